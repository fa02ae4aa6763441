"""The coordinator's folder: who is connected."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the engine nvflare is an extra")

from isthmus.deploy import federation_folder
from isthmus.deploy.admin_session import SEEN_WITHIN, AdminSession
from isthmus.deploy.federation_folder import SERVER_PID, FederationFolder
from isthmus.deploy.loopback import free_port
from isthmus.deploy.provisioning import FederationConfig
from isthmus.errors import ConfigError


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


def test_a_server_that_has_ended_does_not_keep_the_next_from_starting(tmp_path: Path) -> None:
    """In a container every start has the process number of the last one."""
    federation = FederationFolder.create(tmp_path / "hub", FederationConfig("x", (), port=free_port()))
    (federation.path / SERVER_PID).write_text(f"{os.getpid()}\n")
    assert federation.server_pid() is None
    code = (
        "import sys, time; from pathlib import Path; from isthmus.deploy.processes import hold; "
        "print(hold(Path(sys.argv[1])), flush=True); time.sleep(60)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(federation.path / SERVER_PID)], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None and other.stdout.readline() == "None\n"
    try:
        with pytest.raises(ConfigError, match=rf"runs already \(process {other.pid}\)"):
            federation.server_order()
    finally:
        other.kill()
        other.wait()
    federation.server_order()
    assert federation.server_pid() == os.getpid()
