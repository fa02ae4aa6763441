"""Startup kits: reading, certificates, the port and the jobs of a server."""

from __future__ import annotations

import datetime
import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the engine nvflare is an extra")

from isthmus.deploy.provisioning import FederationConfig, provision
from isthmus.deploy.startup_kit import StartupKit
from isthmus.errors import ConfigError


def test_kind_and_name_of_a_kit(kits: dict[str, StartupKit]) -> None:
    assert {name: (kit.kind, kit.name) for name, kit in kits.items()} == {
        "bank-a": ("client", "bank-a"),
        "bank-b": ("client", "bank-b"),
        "server": ("server", "localhost"),
        "coordinator": ("admin", "coordinator@x.isthmus"),
        "super@x.isthmus": ("admin", "super@x.isthmus"),
    }
    assert {kit.target for kit in kits.values()} == {kits["server"].target}


def test_certificates_that_expire(kits: dict[str, StartupKit]) -> None:
    kit, now = kits["bank-a"], datetime.datetime.now(datetime.UTC)
    assert kit.check_certificates(now) == []
    soon = kit.check_certificates(now + datetime.timedelta(days=335))
    assert len(soon) == 1 and "the certificate of bank-a expires on" in soon[0], "the root lives for ten years"
    with pytest.raises(ConfigError, match="the certificate of bank-a expired on"):
        kit.check_certificates(now + datetime.timedelta(days=361))
    with pytest.raises(ConfigError, match=r"is valid from .* set this machine's clock"):
        kit.check_certificates(now - datetime.timedelta(days=2))


def test_a_certificate_of_another_root(kits: dict[str, StartupKit], tmp_path: Path) -> None:
    other = provision(FederationConfig("y", ("bank-a",)), tmp_path / "y")["bank-a"]
    (other.startup / "rootCA.pem").write_bytes((kits["bank-a"].startup / "rootCA.pem").read_bytes())
    with pytest.raises(ConfigError, match="was not issued by the root certificate in its kit"):
        other.check_certificates()


def test_a_port_in_use(kits: dict[str, StartupKit]) -> None:
    kit = kits["server"]
    kit.check_port()
    with socket.socket() as taken:
        taken.bind(("", kit.target[1]))
        taken.listen()
        with pytest.raises(ConfigError, match=rf"port {kit.target[1]} cannot be used \(Address already in use\)"):
            kit.check_port()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda kit: (kit / "startup" / "fed_client.json").unlink(), "is not a kit"),
        (lambda kit: (kit / "startup" / "fed_client.json").write_text("{}"), "fed_client.json is damaged"),
        (lambda kit: (kit / "startup" / "fed_client.json").write_text("[" * 100_000), "fed_client.json is damaged"),
        (
            lambda kit: (kit / "startup" / "fed_client.json").write_text('{"servers": [{"service": {"target": 1}}]}'),
            "fed_client.json is damaged",
        ),
        (lambda kit: (kit / "startup" / "client.crt").write_text("no"), "is missing or no certificate"),
    ],
)
def test_a_damaged_kit(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    kit = provision(FederationConfig("z", ("bank-a",)), tmp_path / "z")["bank-a"].path
    damage(kit)
    with pytest.raises(ConfigError, match=message):
        StartupKit.read(kit)


def test_jobs_of_a_killed_server_are_abandoned(kits: dict[str, StartupKit]) -> None:
    kit = kits["server"]
    for name, status in (("a", "RUNNING"), ("b", "FINISHED:COMPLETED"), ("c", "DISPATCHED")):
        (kit.job_store / name).mkdir(parents=True)
        (kit.job_store / name / "meta").write_text(json.dumps({"status": status}))
    assert kit.abandon_stale_jobs() == 2
    assert [json.loads((kit.job_store / name / "meta").read_text())["status"] for name in "abc"] == [
        "FINISHED:ABANDONED",
        "FINISHED:COMPLETED",
        "FINISHED:ABANDONED",
    ]
