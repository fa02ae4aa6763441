"""What hub and site say of themselves on loopback, and how it is served."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="the engine nvflare is an extra")

from isthmus.cli import status as status_command
from isthmus.deploy import admin_session, keeper, measurements
from isthmus.deploy.admin_session import AdminSession
from isthmus.deploy.audit_chain import ORDER, AuditChain
from isthmus.deploy.connection_gate import REFUSALS_FILE, SEEN_FILE
from isthmus.deploy.federation_folder import FederationFolder
from isthmus.deploy.health import Health, HealthServer, Metric, gauge, to_text
from isthmus.deploy.join_files import request
from isthmus.deploy.measurements import AuditCounts, SentBytes, measure_hub, measure_site
from isthmus.deploy.membership import approve
from isthmus.deploy.provisioning import SERVER_KIT, FederationConfig
from isthmus.deploy.run_queue import RunQueue
from isthmus.deploy.startup_kit import StartupKit
from isthmus.errors import ConfigError
from isthmus.privacy.keys import Identity


def ask(port: int, path: str, host: str = "localhost") -> tuple[int, str]:
    question = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Host": host})
    try:
        with urllib.request.urlopen(question) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_text_format() -> None:
    metrics = [gauge("rounds", "rounds", {'a"\n\\': 3.0}, "run"), gauge("refused_total", "refused", 2.0)]
    assert to_text(metrics) == (
        "# HELP isthmus_rounds rounds\n# TYPE isthmus_rounds gauge\n"
        'isthmus_rounds{run="a\\"\\n\\\\"} 3\n'
        "# HELP isthmus_refused_total refused\n# TYPE isthmus_refused_total counter\nisthmus_refused_total 2\n"
    )


def test_served_on_loopback_only() -> None:
    health = [Health((), (Metric("x", "y", "gauge", {(): 1.5}),), {"organisation": "bank-a"})]
    server = HealthServer(0, lambda: health[-1])
    try:
        assert server._server.server_address[0] == "127.0.0.1"
        code, text = ask(server.port, "/healthz")
        assert (code, json.loads(text)) == (200, {"healthy": True, "problems": [], "organisation": "bank-a"})
        assert "isthmus_healthy 1\n" in ask(server.port, "/metrics")[1] and "x 1.5\n" in ask(server.port, "/metrics")[1]
        health.append(Health(("disk full",)))
        code, text = ask(server.port, "/healthz")
        assert (code, json.loads(text)["problems"]) == (503, ["disk full"])
        assert "isthmus_healthy 0\n" in ask(server.port, "/metrics")[1]
        assert ask(server.port, "/etc/passwd")[0] == 404
        assert ask(server.port, "/metrics", "127.0.0.1:9400")[0] == 200
        for page in ("evil.example.org", f"evil.example.org:{server.port}", "127.0.0.1.example.org"):
            assert ask(server.port, "/metrics", page) == (403, "ask for localhost\n"), "a name made to mean 127.0.0.1"
        health.clear()  # measuring fails
        assert ask(server.port, "/healthz")[0] == 503
        with pytest.raises(ConfigError, match="choose a free port"):
            HealthServer(server.port, lambda: health[-1])
    finally:
        server.close()


def test_a_question_that_never_comes_holds_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.deploy.health.ASKED_WITHIN", 0.1)
    server = HealthServer(0, Health)
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10.0) as silent:
            assert silent.recv(1) == b"", "it is closed"
    finally:
        server.close()


def supervisor(kit: StartupKit, pid: int | None = 1) -> Any:
    return SimpleNamespace(kit=kit, pid=pid, restarts=4, log=Path("isthmus.log"))


def values(health: Health) -> dict[str, float]:
    lines = to_text(health.metrics).splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_what_a_hub_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = FederationFolder.create(tmp_path / "hub", FederationConfig("x", ("bank-a", "bank-b")))
    for name in ("bank-a", "bank-b"):
        made = request(tmp_path / name, name, name, Identity())
        (tmp_path / "request").write_text(made.to_toml())
        approve(federation, tmp_path / "request", federation.path / "root", made.fingerprint, "30d")
    monkeypatch.setattr(measurements.time, "time", lambda: 1000.0)
    monkeypatch.setattr(measurements.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**30))
    (federation.path / SEEN_FILE).write_text(json.dumps({"bank-a": 999.0, "bank-b": 940.0}))
    (federation.path / REFUSALS_FILE).write_text("7\n")
    ledger = federation.runs / "r1" / "ledger"
    ledger.mkdir(parents=True)
    (ledger / "000001.jsonl").write_text('{"by_kind": {"model": 40}}\n{"by_kind": {"model": 2, "count": 8}}\n')
    monkeypatch.setattr("isthmus.deploy.measurements.run_state", lambda path: "running")
    sent, process = SentBytes(federation.runs), supervisor(federation.kit(SERVER_KIT))
    found = measure_hub(federation.path, process, sent)
    assert found.problems == ("bank-b is not connected",)
    shown = values(found)
    assert shown['isthmus_last_seen_seconds{organisation="bank-b"}'] == 60
    assert 29 < shown['isthmus_certificate_days{organisation="bank-a"}'] <= 30
    assert shown["isthmus_refused_connections_total"] == 7 and shown["isthmus_restarts_total"] == 4
    assert shown['isthmus_sent_bytes{run="r1",kind="model"}'] == 42 and shown['isthmus_runs{state="running"}'] == 1
    (ledger / "000002.jsonl").write_text('{"by_kind": {"model": 1}}\n')
    assert values(measure_hub(federation.path, process, sent))['isthmus_sent_bytes{run="r1",kind="model"}'] == 43
    process.pid = None
    assert any("does not run" in one for one in measure_hub(federation.path, process, sent).problems)
    monkeypatch.setattr(measurements.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    full = measure_hub(federation.path, process, sent)
    assert any("1 MB are free" in one for one in full.problems) and values(full)["isthmus_disk_free_bytes"] == 2**20


def test_a_hub_says_how_many_runs_wait_for_their_turn(tmp_path: Path) -> None:
    federation = FederationFolder.create(tmp_path / "hub", FederationConfig("x", ()))
    process, sent, shown = supervisor(federation.kit(SERVER_KIT)), SentBytes(federation.runs), list[float]()

    def look(number: int) -> None:
        shown.append(values(measure_hub(federation.path, process, sent))["isthmus_queued_runs"])
        raise InterruptedError

    queue = RunQueue(federation.path, 1)
    with queue.turn("first", "a", look), pytest.raises(InterruptedError), queue.turn("second", "a", look):
        pass
    assert shown == [1]
    assert values(measure_hub(federation.path, process, sent))["isthmus_queued_runs"] == 0


@pytest.mark.parametrize("content", ["[]", '{"bank-a": "yesterday"}', '{"bank-a": null}', "{"])
def test_a_damaged_file_of_signs_of_life_counts_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / SEEN_FILE).write_text(content)
    assert measurements.connections(tmp_path) == {}


def test_what_a_site_says(kits: dict[str, StartupKit], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = AuditChain(tmp_path).open()
    chain.append(ORDER, name="approve", contract="c", by="somebody")
    audit = AuditCounts(tmp_path)
    monkeypatch.setattr(measurements.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**30))
    found = measure_site(tmp_path, supervisor(kits["bank-a"]), audit)
    assert found.problems == () and values(found)['isthmus_audit_lines_total{kind="order"}'] == 1
    chain.append(ORDER, name="approve", contract="d", by="somebody")
    with (tmp_path / "audit.jsonl").open("a") as file:
        file.write('{"torn')
    assert audit.read() == {"order": 2}
    monkeypatch.setattr(measurements.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    assert any("1 MB are free" in one for one in measure_site(tmp_path, supervisor(kits["bank-a"]), audit).problems)


def test_status_says_for_whom_a_run_waits() -> None:
    run = {"state": "waiting", "queue": None, "waiting_for": {"bank-b": 0.0}}
    assert status_command._state(run).startswith("waiting for bank-b since ")
    assert status_command._state(run | {"state": "running"}) == "running"
    assert status_command._state(run | {"state": "queued", "queue": 2}) == "number 2 in the queue"
    without = run | {"state": "running", "waiting_for": {}, "missing": {"client-3": [4, 0.0]}}
    assert status_command._state(without).startswith("running without client-3 since step 4 at ")
    assert status_command._state({**without, "state": "finished"}) == "finished"


def test_the_keeper_needs_no_torch() -> None:
    """It runs for months at every site; imports are what it weighs."""
    code = (
        "import isthmus.deploy.keeper, sys; print(sorted({'torch', 'numpy', 'nvflare', 'polars'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_the_keeper_says_why_it_ends(kits: dict[str, StartupKit], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "interrupt_on_terminate", lambda: None)
    assert keeper.keep(keeper.Order("/nowhere", {}, "log", "folder")) == ConfigError.exit_code
    order = keeper.Order(str(kits["server"].path), {}, "log", "folder")
    assert order.supervisor()._before_start is not None, "jobs of a server that was killed are marked as abandoned"

    def interrupted(self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(keeper.ProcessSupervisor, "start", lambda self: self)
    monkeypatch.setattr(keeper.ProcessSupervisor, "run_until_stopped", interrupted)
    assert keeper.keep(order) == 130


def test_seconds_since_a_site_was_seen_are_counted_after_the_server_answered(
    kits: dict[str, StartupKit], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logging in takes seconds, in which the site gives signs of life."""
    clock = [100.0]
    monkeypatch.setattr(admin_session.time, "time", lambda: clock[0])

    def answer(self: AdminSession, name: str) -> list[Any]:
        clock[0] += 15.0
        return [SimpleNamespace(name="bank-a", last_connect_time=114.0)]

    monkeypatch.setattr(AdminSession, "call", answer)
    assert AdminSession(kits["coordinator"]).last_seen() == {"bank-a": 1.0}
