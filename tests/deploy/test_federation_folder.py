"""The coordinator's folder: who is connected."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the engine nvflare is an extra")

from isthmus.deploy import federation_folder
from isthmus.deploy.admin_session import SEEN_WITHIN, AdminSession
from isthmus.deploy.federation_folder import FederationFolder
from isthmus.deploy.provisioning import FederationConfig


class Session:
    """An admin session of a server that has not yet dropped bank-b."""

    def __init__(self, kit: object) -> None:
        pass

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def last_seen(self) -> dict[str, float]:
        return {"bank-a": 1.0, "bank-b": SEEN_WITHIN + 5.0}


def test_an_organisation_that_gives_no_sign_of_life_is_not_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(federation_folder, "AdminSession", Session)
    monkeypatch.setattr(FederationFolder, "kit", lambda self, name: None)
    found = FederationFolder(tmp_path, FederationConfig("x", ("bank-a", "bank-b", "bank-c"))).status()
    assert found["server"] and found["organisations"] == {
        "bank-a": "connected",
        "bank-b": f"not seen for {SEEN_WITHIN + 5:.0f} s",
        "bank-c": "not connected",
    }


def test_a_silent_site_counts_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    session = AdminSession.__new__(AdminSession)
    monkeypatch.setattr(session, "last_seen", lambda: {"bank-b": SEEN_WITHIN + 1, "bank-a": 0.5})
    assert session.sites() == ["bank-a"]
