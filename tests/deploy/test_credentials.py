"""Kits: made, closed down, checked. Needs the provisioner of the engine."""

from __future__ import annotations

import datetime
import json
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the engine nvflare is an extra")

from isthmus.deploy.credentials import Kit
from isthmus.deploy.job import CLIENT_CONFIG, SERVER_CONFIG, SITE_CLASSES, write_job
from isthmus.deploy.project import Project, make_kits
from isthmus.errors import ConfigError


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kit]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    extra = [{"name": "super@x.isthmus", "type": "admin", "org": "x", "role": "super"}]
    return make_kits(Project("x", ("bank-a", "bank-b"), port=port), tmp_path_factory.mktemp("project"), extra)


def test_a_kit_knows_whose_it_is(kits: dict[str, Kit]) -> None:
    assert {name: (kit.kind, kit.name) for name, kit in kits.items()} == {
        "bank-a": ("client", "bank-a"),
        "bank-b": ("client", "bank-b"),
        "server": ("server", "localhost"),
        "coordinator": ("admin", "coordinator@x.isthmus"),
        "super@x.isthmus": ("admin", "super@x.isthmus"),
    }
    assert {kit.target for kit in kits.values()} == {kits["server"].target}


def test_a_kit_lets_only_our_job_in(kits: dict[str, Kit]) -> None:
    kit = kits["bank-a"]
    resources = json.loads((kit.local / "resources.json").read_text())
    assert resources["class_allow_list"] == list(SITE_CLASSES)
    assert resources["class_list_enforcement_mode"] == "enforce"
    assert resources["allow_log_streaming"] is False
    assert resources["app_validator"]["path"] == "isthmus.deploy.gate.ConfigOnly"
    assert "site_log_streamer" not in {part["id"] for part in resources["components"]}
    rights = json.loads((kit.local / "authorization.json").read_text())["permissions"]
    for role in rights.values():
        assert [role[right] for right in ("byoc", "shell_commands", "operate", "clone_job", "download_job")] == [
            "none"
        ] * 5
    assert not list(kit.startup.glob("*.sh")), "they would start a site without our launcher"
    server, home = json.loads((kits["server"].local / "resources.json").read_text()), str(kits["server"].path)
    roots = [server["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"]]
    roots += [part["args"]["uri_root"] for part in server["components"] if "uri_root" in part.get("args", {})]
    assert len(roots) == 2 and all(root.startswith(home) for root in roots), (
        "state must not lie in a folder all users share"
    )


def test_closing_down_again_undoes_lax_rules(kits: dict[str, Kit]) -> None:
    kit = kits["bank-b"]
    path = kit.local / "resources.json"
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | {"class_allow_list": ["*"]}))
    kit.close_down()
    assert path.read_text() == before


def test_keys_are_for_their_owner_alone(kits: dict[str, Kit]) -> None:
    for kit in kits.values():
        for key in kit.startup.glob("*.key"):
            assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_dates(kits: dict[str, Kit]) -> None:
    kit, now = kits["bank-a"], datetime.datetime.now(datetime.UTC)
    assert kit.check_certificates(now) == []
    soon = kit.check_certificates(now + datetime.timedelta(days=335))
    assert len(soon) == 2 and "the certificate of bank-a ends on" in soon[0] and "root certificate" in soon[1]
    with pytest.raises(ConfigError, match="the certificate of bank-a ended on"):
        kit.check_certificates(now + datetime.timedelta(days=361))
    with pytest.raises(ConfigError, match=r"begins on .* set this machine's clock"):
        kit.check_certificates(now - datetime.timedelta(days=2))


def test_a_certificate_of_another_root(kits: dict[str, Kit], tmp_path: Path) -> None:
    other = make_kits(Project("y", ("bank-a",)), tmp_path / "y")["bank-a"]
    (other.startup / "rootCA.pem").write_bytes((kits["bank-a"].startup / "rootCA.pem").read_bytes())
    with pytest.raises(ConfigError, match="is not of the root certificate in its kit"):
        other.check_certificates()


def test_a_port_in_use(kits: dict[str, Kit]) -> None:
    kit = kits["server"]
    kit.check_port()
    with socket.socket() as taken:
        taken.bind(("", kit.target[1]))
        taken.listen()
        with pytest.raises(ConfigError, match=rf"port {kit.target[1]} cannot be used \(Address already in use\)"):
            kit.check_port()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda kit: (kit / "startup" / "fed_client.json").unlink(), "is not a kit"),
        (lambda kit: (kit / "startup" / "fed_client.json").write_text("{}"), "fed_client.json is damaged"),
        (lambda kit: (kit / "startup" / "client.crt").write_text("no"), "is missing or no certificate"),
    ],
)
def test_a_damaged_kit(tmp_path: Path, harm: Callable[[Path], None], said: str) -> None:
    kit = make_kits(Project("z", ("bank-a",)), tmp_path / "z")["bank-a"].path
    harm(kit)
    with pytest.raises(ConfigError, match=said):
        Kit.read(kit)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"organisations": ("Bank A",)}, "organisation 'Bank A'"),
        ({"organisations": ("a", "a")}, "every organisation once"),
        ({"organisations": ()}, "every organisation once"),
        ({"organisations": ("server",)}, "cannot be called 'server'"),
        ({"host": "not a host"}, "host 'not a host'"),
        ({"port": 70000}, "port must lie between"),
        ({"days": 0}, "at least a day"),
        ({"name": "../x"}, "project '../x'"),
    ],
)
def test_a_project_that_cannot_be(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        Project(**{"name": "x", "organisations": ("bank-a",), **given})  # type: ignore[arg-type]
    assert said in str(error.value)


def test_a_second_federation_in_a_folder_is_refused(kits: dict[str, Kit]) -> None:
    with pytest.raises(ConfigError, match="already holds a federation"):
        make_kits(Project("x", ("bank-a",)), kits["server"].path.parents[1])


def test_jobs_of_a_killed_server_are_swept(kits: dict[str, Kit]) -> None:
    kit = kits["server"]
    for name, status in (("a", "RUNNING"), ("b", "FINISHED:COMPLETED"), ("c", "DISPATCHED")):
        (kit.job_store / name).mkdir(parents=True)
        (kit.job_store / name / "meta").write_text(json.dumps({"status": status}))
    assert kit.sweep_jobs() == 2
    assert [json.loads((kit.job_store / name / "meta").read_text())["status"] for name in "abc"] == [
        "FINISHED:ABANDONED",
        "FINISHED:COMPLETED",
        "FINISHED:ABANDONED",
    ]


# -- the gate --------------------------------------------------------------------------------------


@pytest.fixture
def app(kits: dict[str, Kit], tmp_path: Path) -> Path:
    """Our job as it arrives at a site, signed by the coordinator."""
    app = write_job(tmp_path / "job", ["r1", "r2"], 3, 2) / "app"
    (app / ".__nvfl_submitter.crt").write_bytes((kits["coordinator"].startup / "client.crt").read_bytes())
    (app / ".__nvfl_sig.json").write_text("{}")
    return app


def _edit(app: Path, name: str, change: Callable[[dict[str, object]], object]) -> None:
    path = app / "config" / name
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def test_the_gate_lets_our_job_in(app: Path) -> None:
    from isthmus.deploy.gate import ConfigOnly

    assert ConfigOnly().validate(str(app)) == ("", {})


@pytest.mark.parametrize(
    ("harm", "said"),
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
def test_the_gate_refuses_everything_else(app: Path, harm: Callable[[Path], None], said: str) -> None:
    from isthmus.deploy.gate import ConfigOnly

    harm(app)
    error, _ = ConfigOnly().validate(str(app))
    assert error.startswith("isthmus gate: ") and said in error


@pytest.mark.parametrize(
    ("who", "said"), [("super@x.isthmus", "role super not permitted"), ("bank-a", "role (none) not permitted")]
)
def test_the_gate_knows_who_submits(app: Path, kits: dict[str, Kit], who: str, said: str) -> None:
    from isthmus.deploy.gate import refusal

    (app / ".__nvfl_submitter.crt").write_bytes((kits[who].startup / "client.crt").read_bytes())
    assert said in refusal(app)


def test_the_launcher_keeps_what_a_job_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

    from isthmus.deploy.launch import WANTED, restrict_requests

    monkeypatch.setattr(ClientRequestProcessors, "request_processors", list(ClientRequestProcessors.request_processors))
    restrict_requests()
    kept = {type(processor).__name__ for processor in ClientRequestProcessors.request_processors}
    assert kept == WANTED, "a name that is gone, or a new one, needs a look at what it does"
