"""Requests of the server that the parent process of a client answers."""

from __future__ import annotations

import pytest

pytest.importorskip("nvflare", reason="the engine nvflare is an extra")

from nvflare.private.admin_defs import Message
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.private.fed.client.scheduler_cmds import StartJobProcessor

from isthmus.deploy import parent_process
from isthmus.deploy.job_template import AT_ONCE
from isthmus.deploy.parent_process import ALLOWED_REQUESTS, limit_jobs, restrict_requests


def test_a_site_starts_no_more_jobs_than_its_owner_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the server asks for: one that deploys many jobs first and then starts them at once, say."""
    started: list[object] = []
    monkeypatch.setattr(StartJobProcessor, "process", lambda self, request, context: started.append(request))
    monkeypatch.setenv(AT_ONCE, "2")
    running = [11]
    monkeypatch.setattr(parent_process, "jobs_of", lambda pid: running)
    limit_jobs()
    request = Message(topic="start", body="")
    assert StartJobProcessor().process(request, None) is None and started == [request]
    running.append(12)
    answer = StartJobProcessor().process(request, None)
    assert len(started) == 1 and "it runs 2 at once, its limit" in answer.body
    running.pop()
    StartJobProcessor().process(request, None)
    assert len(started) == 2


def test_only_requests_a_job_needs_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClientRequestProcessors, "request_processors", list(ClientRequestProcessors.request_processors))
    restrict_requests()
    kept = {type(processor).__name__ for processor in ClientRequestProcessors.request_processors}
    assert kept == ALLOWED_REQUESTS, "check what a new or missing processor does"
