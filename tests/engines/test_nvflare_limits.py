"""Limits of a hub and of a site, met by real processes: idle connections, connections of one member, jobs at once."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the engine nvflare is an extra")

from nvflare_helpers import TIMEOUT, add_run, at_round, settings_of, wait_until
from test_nvflare_members import BANKS, running, settle

from isthmus.deploy.admin_session import AdminSession
from isthmus.deploy.connection_gate import MAX_CONNECTIONS, REFUSALS_FILE
from isthmus.deploy.federation_folder import FederationFolder
from isthmus.deploy.loopback import LoopbackFederation, free_port
from isthmus.deploy.processes import descendants, jobs_of
from isthmus.deploy.provisioning import COORDINATOR_KIT, FederationConfig
from isthmus.deploy.run_status import committed_rounds

IDLE = 300


@pytest.fixture
def hub(tmp_path: Path) -> FederationFolder:
    made = FederationFolder.create(tmp_path / "hub", FederationConfig("x", BANKS, port=free_port()))
    settle(made, tmp_path)
    return made


def parent_of(keeper: subprocess.Popen[bytes]) -> int:
    return int(wait_until(lambda: descendants(keeper.pid))[0])


def listens(hub: FederationFolder) -> bool:
    try:
        socket.create_connection(("127.0.0.1", hub.config.port), 1.0).close()
    except OSError:
        return False
    return True


def refused(hub: FederationFolder) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((hub.path / REFUSALS_FILE).read_text())
    return 0


def connected(admin: AdminSession) -> set[str]:
    """Who is connected; nobody while the server is still starting."""
    with contextlib.suppress(Exception):
        return set(admin.sites())
    return set()


@contextlib.contextmanager
def idle_connections(hub: FederationFolder, startup: Path) -> Iterator[None]:
    """300 connections that say nothing, and 300 of a member that open no stream."""
    context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
    context.check_hostname = False
    context.load_cert_chain(startup / "client.crt", startup / "client.key")
    context.set_alpn_protocols(["h2"])
    with contextlib.ExitStack() as stack:
        for _ in range(IDLE):
            stack.enter_context(socket.create_connection(("127.0.0.1", hub.config.port), 10.0))
        for _ in range(IDLE):
            plain = stack.enter_context(socket.create_connection(("127.0.0.1", hub.config.port), 10.0))
            stack.enter_context(context.wrap_socket(plain, server_hostname="localhost"))
        yield


@contextlib.contextmanager
def streams(hub: FederationFolder, startup: Path, count: int) -> Iterator[None]:
    """Connections of a member that open a stream each and say nothing."""
    import grpc  # type: ignore[import-untyped]
    from nvflare.fuel.f3.drivers.grpc.streamer_pb2_grpc import StreamerStub

    parts = [(startup / name).read_bytes() for name in ("rootCA.pem", "client.key", "client.crt")]
    own = [("grpc.use_local_subchannel_pool", 1)]
    target, end = f"localhost:{hub.config.port}", threading.Event()
    channels = [grpc.secure_channel(target, grpc.ssl_channel_credentials(*parts), options=own) for _ in range(count)]

    def silent() -> Iterator[object]:
        end.wait(200.0)
        yield from ()

    def hold(channel: object) -> None:
        with contextlib.suppress(grpc.RpcError):
            for _ in StreamerStub(channel).Stream(silent()):
                pass

    for channel in channels:
        threading.Thread(target=hold, args=(channel,), daemon=True).start()
    try:
        yield
    finally:
        end.set()
        for channel in channels:
            channel.close()


def test_idle_connections_keep_nobody_out(hub: FederationFolder, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running("server", "start", hub.path))
        wait_until(lambda: listens(hub))
        startup, files = tmp_path / "bank-c" / "kit" / "startup", Path(f"/proc/{parent_of(server)}/fd")
        stack.enter_context(idle_connections(hub, startup))
        stack.enter_context(streams(hub, startup, 5 * MAX_CONNECTIONS))
        wait_until(lambda: refused(hub) >= 3 * MAX_CONNECTIONS)
        for bank in BANKS[:2]:
            home = tmp_path / bank
            stack.enter_context(running("client", "start", "--kit", home / "kit", "--config", home / "client.toml"))
        with AdminSession(hub.kit(COORDINATOR_KIT)) as admin:
            wait_until(lambda: connected(admin) >= set(BANKS[:2]), 120.0)
        wait_until(lambda: len(list(files.iterdir())) < IDLE, 60.0)  # they were not only outlived but ended


def test_a_site_runs_no_more_jobs_at_once_than_it_wants(hub: FederationFolder, tmp_path: Path) -> None:
    """Two runs at once at the hub; one site takes one at a time. Both get their result."""
    text = (tmp_path / "run.toml").read_text()
    (tmp_path / "run.toml").write_text(text.replace("rounds = 3000", "rounds = 3"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(running("server", "start", hub.path))
        clients = {}
        for bank in BANKS:
            home = tmp_path / bank
            most = ("--at-once", 1 if bank == "bank-b" else 4)
            given = ("--kit", home / "kit", "--config", home / "client.toml", *most)
            clients[bank] = stack.enter_context(running("client", "start", *given))
        runs = [hub.create_run(tmp_path / "run.toml") for _ in range(2)]
        logs = [(tmp_path / f"{run}.log").open("wb") for run in runs]
        submitted = [
            subprocess.Popen(
                [sys.executable, "-m", "isthmus.cli.main", "submit", "--federation", hub.path, "--again", run],
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
            for run, log in zip(runs, logs, strict=True)
        ]
        parents, most_jobs = {bank: parent_of(clients[bank]) for bank in BANKS}, dict.fromkeys(BANKS, 0)

        def finished() -> bool:
            for bank, parent in parents.items():
                most_jobs[bank] = max(most_jobs[bank], len(jobs_of(parent)))
            return all(process.poll() is not None for process in submitted)

        wait_until(finished, 540.0)
    said = "".join((tmp_path / f"{run}.log").read_text() for run in runs)
    assert [process.returncode for process in submitted] == [0, 0], said
    assert most_jobs["bank-b"] == 1 and "site busy: it runs 1 at once" in said, said
    for run in runs:
        assert json.loads((hub.runs / run / "result.json").read_text())["rounds"] == 3


SLOW = """
import os, time
from pathlib import Path
from torch import nn

FLAG = Path({flag!r})

class SlowNet(nn.Module):
    def __init__(self, num_features, num_classes):
        super().__init__()
        self.only = nn.Linear(num_features, num_classes)

    def forward(self, x, edge_index):
        if FLAG.exists() and os.environ.get("ISTHMUS_SITE", "").endswith("site-3.toml"):
            time.sleep(20.0)
        return self.only(x)
"""


def test_a_slow_client_stalls_nobody_beyond_the_deadline(tmp_path: Path) -> None:
    """A client that answers every ping but takes 20 s for a step: rounds go on without it, and later with it."""
    flag, net, runs = tmp_path / "slow", tmp_path / "net.py", tmp_path / "runs"
    net.write_text(SLOW.format(flag=str(flag)))
    runs.mkdir()
    given = {"backbone": f"{net}:SlowNet", "reset_optimizer": True, "deadline": 4.0, "least_clients": 2}
    federation = LoopbackFederation(3, runs, tmp_path / "state", plugins=[net])
    with federation:
        settings = settings_of("fedavg", "nvflare", {**given, "checkpoint.every": 1}, rounds=400, patience=0)
        add_run(federation, "r", settings)
        supervising = threading.Thread(target=federation.supervisor().finish, args=(["r"],), daemon=True)
        supervising.start()
        at_round(federation, "r", 3)
        flag.touch()
        before = committed_rounds(runs / "r")
        at_round(federation, "r", before + 3)
        flag.unlink()
        supervising.join(timeout=TIMEOUT)
        assert not supervising.is_alive()
    result = json.loads((runs / "r" / "result.json").read_text())
    assert result["rounds"] == 400 and set(result["absent"]) == {"client-2"}, result["absent"]
