"""Which jobs a site accepts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the engine nvflare is an extra")

from isthmus.deploy.job_template import CLIENT_CONFIG, SERVER_CONFIG, write_job
from isthmus.deploy.job_validator import JobValidator, refusal_reason
from isthmus.deploy.startup_kit import StartupKit


@pytest.fixture
def app(kits: dict[str, StartupKit], tmp_path: Path) -> Path:
    """Our job as it arrives at a site, signed by the coordinator."""
    app = write_job(tmp_path / "job", ["r1", "r2"], 3, ["bank-a", "bank-b"]) / "app"
    (app / ".__nvfl_submitter.crt").write_bytes((kits["coordinator"].startup / "client.crt").read_bytes())
    (app / ".__nvfl_sig.json").write_text("{}")
    return app


def _edit(app: Path, name: str, change: Callable[[dict[str, object]], object]) -> None:
    path = app / "config" / name
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def test_our_job_is_accepted(app: Path) -> None:
    assert JobValidator().validate(str(app)) == ("", {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda app: (app / "custom").mkdir(), "folder custom not permitted"),
        (lambda app: (app / "config" / "deeper").mkdir(), "folder config/deeper not permitted"),
        (lambda app: (app / "config" / "evil.py").touch(), "file config/evil.py not permitted"),
        (lambda app: (app / "evil.py").touch(), "file evil.py not permitted"),
        (lambda app: (app / "config" / "config_train.json").write_text("{}"), "config_train.json not permitted"),
        (lambda app: (app / "link").symlink_to("/etc"), "link link not permitted"),
        (lambda app: (app / "config" / CLIENT_CONFIG).write_text("{"), "cannot be read"),
        (lambda app: (app / "config" / SERVER_CONFIG).unlink(), "cannot be read"),
        (lambda app: (app / "config" / CLIENT_CONFIG).write_text(" " * (1 << 21)), "is too large"),
        (
            lambda app: _edit(
                app, CLIENT_CONFIG, lambda c: c["components"].append({"id": "x", "path": "subprocess.Popen"})
            ),
            "client config",
        ),
        (
            lambda app: _edit(app, CLIENT_CONFIG, lambda c: c["executors"][0]["executor"]["args"]["props"].update(a=1)),
            "client config",
        ),
        (lambda app: _edit(app, CLIENT_CONFIG, lambda c: c.update(extra=1)), "client config"),
        (
            lambda app: _edit(app, SERVER_CONFIG, lambda c: c["workflows"][0]["args"]["props"].update(runs=["../x"])),
            "server config",
        ),
        (
            lambda app: _edit(app, SERVER_CONFIG, lambda c: c["workflows"][0]["args"]["props"].update(more=1)),
            "server config",
        ),
        (lambda app: _edit(app, SERVER_CONFIG, lambda c: c["components"].clear()), "server config"),
        (lambda app: (app / ".__nvfl_submitter.crt").unlink(), "not signed by its submitter"),
        (lambda app: (app / ".__nvfl_submitter.crt").write_text("x"), "cannot be read"),
    ],
)
def test_every_other_job_is_refused(app: Path, change: Callable[[Path], None], reason: str) -> None:
    change(app)
    error, _ = JobValidator().validate(str(app))
    assert error.startswith("isthmus job validator: ") and reason in error


@pytest.mark.parametrize(
    ("who", "reason"), [("super@x.isthmus", "role super not permitted"), ("bank-a", "role (none) not permitted")]
)
def test_only_a_lead_may_submit(app: Path, kits: dict[str, StartupKit], who: str, reason: str) -> None:
    (app / ".__nvfl_submitter.crt").write_bytes((kits[who].startup / "client.crt").read_bytes())
    assert reason in refusal_reason(app)
