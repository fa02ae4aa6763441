"""Requests of the server that the parent process of a client answers."""

from __future__ import annotations

import pytest

pytest.importorskip("nvflare", reason="the engine nvflare is an extra")

from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

from isthmus.deploy.parent_process import ALLOWED_REQUESTS, restrict_requests


def test_only_requests_a_job_needs_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClientRequestProcessors, "request_processors", list(ClientRequestProcessors.request_processors))
    restrict_requests()
    kept = {type(processor).__name__ for processor in ClientRequestProcessors.request_processors}
    assert kept == ALLOWED_REQUESTS, "check what a new or missing processor does"
