"""Many organisations at one hub: do 50 hold 1,000 rounds, and how much memory and how many threads do they take?

    python benchmarks/thin_sites.py [--sites 50] [--rounds 1000]

A site in service is two processes of 90 and 500 MB, of which 50 do not fit on one machine. Here a site is thin: a
certificate, a connection and the runtime that answers in service (`isthmus.deploy.site_runtime`), several in one
process. Between them and the hub are NVIDIA FLARE's gRPC driver over TLS and the hub's gate, which checks every
certificate every two seconds, and the frames of `isthmus.federation.wire`; the hub plays the run as its server job
does. Left out are NVIDIA FLARE's cells and jobs. FedAvg on a small generated graph; at the end the models are compared
with those of a run in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from drills import models
from nvflare.fuel.f3.connection import Connection, ConnState, FrameReceiver
from nvflare.fuel.f3.drivers.connector_info import ConnectorInfo, Mode
from nvflare.fuel.f3.drivers.driver import ConnMonitor
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.drivers.grpc_driver import GrpcDriver
from soak import usage

from isthmus.deploy.certificates import read_certificate
from isthmus.deploy.connection_gate import ConnectionGate, install
from isthmus.deploy.kit_policy import MAX_CONNECTIONS
from isthmus.deploy.loopback import LoopbackFederation, free_port, prepare_run
from isthmus.deploy.members import Members
from isthmus.deploy.processes import terminate
from isthmus.deploy.run_status import committed_rounds
from isthmus.deploy.server_run import run_on_sites
from isthmus.deploy.site_runtime import SiteRuntime
from isthmus.deploy.site_settings import SiteSettings
from isthmus.experiments.config import resolve
from isthmus.experiments.run import start as start_local
from isthmus.experiments.variants import first_variant
from isthmus.federation.interface import Failure

RUN, READINGS, WAIT = "load", 20, 300.0


class Frames(FrameReceiver):  # type: ignore[misc]
    """Hands on the frames of one connection."""

    def __init__(self, connection: Connection, receive: Callable[[bytes], None]) -> None:
        self.connection, self._receive = connection, receive
        connection.register_frame_receiver(self)

    def process_frame(self, frame: Any) -> None:
        self._receive(bytes(frame))

    def send(self, header: Mapping[str, Any], data: bytes) -> None:
        self.connection.send_frame(json.dumps(header).encode() + b"\n" + data)


def split(frame: bytes) -> tuple[dict[str, Any], bytes]:
    header, _, data = frame.partition(b"\n")
    return json.loads(header), data


class Meeting(ConnMonitor):  # type: ignore[misc]
    """Calls a function with every new connection."""

    def __init__(self, met: Callable[[Connection], None]) -> None:
        self._met = met

    def state_change(self, connection: Connection) -> None:
        if connection.state == ConnState.CONNECTED:
            self._met(connection)


def connector(mode: Mode, port: int, **files: Path) -> ConnectorInfo:
    params = {DriverParams.SCHEME.value: "grpcs", DriverParams.HOST.value: "localhost", DriverParams.PORT.value: port}
    params |= {DriverParams[name.upper()].value: str(path) for name, path in files.items()}
    return ConnectorInfo("thin", None, params, mode, 0, 0, False, threading.Event())


# -- sites -----------------------------------------------------------------------------------------


def serve(names: list[str], kits: Path, settings: Path, port: int) -> None:
    """Be some sites until killed: every request is answered by the runtime of its site, one at a time."""
    turn = threading.Lock()

    def connect(name: str) -> None:
        runtime, startup = SiteRuntime(SiteSettings.read(settings / f"{name}.toml")), kits / name / "startup"

        def met(connection: Connection) -> None:
            def receive(frame: bytes) -> None:
                header, data = split(frame)
                with turn:
                    reply = runtime.handle(header["run"], header["kind"], data)
                frames.send({"id": header["id"]}, reply)

            frames = Frames(connection, receive)

        driver = GrpcDriver()
        driver.register_conn_monitor(Meeting(met))
        given = {"client_cert": startup / "client.crt", "client_key": startup / "client.key"}
        driver.connect(connector(Mode.ACTIVE, port, ca_cert=startup / "rootCA.pem", **given))

    threads = [threading.Thread(target=connect, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# -- hub -------------------------------------------------------------------------------------------


class Hub:
    """The sites that are connected. Implements :class:`isthmus.deploy.handshake.Transport`."""

    def __init__(self, startup: Path, port: int) -> None:
        self._frames: dict[str, Frames] = {}
        self._pending: dict[int, Future[bytes]] = {}
        self._count = 0
        driver = GrpcDriver()
        driver.max_workers = MAX_CONNECTIONS
        driver.register_conn_monitor(Meeting(self._met))
        given = {"server_cert": startup / "server.crt", "server_key": startup / "server.key"}
        listening = connector(Mode.PASSIVE, port, ca_cert=startup / "rootCA.pem", **given)
        threading.Thread(target=driver.listen, args=(listening,), daemon=True).start()

    def _met(self, connection: Connection) -> None:
        name = connection.get_conn_properties()[DriverParams.PEER_CN.value]
        self._frames[name] = Frames(connection, self._receive)

    def _receive(self, frame: bytes) -> None:
        header, data = split(frame)
        self._pending.pop(header["id"]).set_result(data)

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(sorted(self._frames))

    def request(
        self, run: str, kind: str, requests: Mapping[str, bytes], timeout: float | None
    ) -> dict[str, bytes | Failure]:
        waiting: dict[str, Future[bytes]] = {}
        for site, data in requests.items():
            self._count += 1
            self._pending[self._count] = waiting[site] = Future()
            self._frames[site].send({"id": self._count, "run": run, "kind": kind}, data)
        return {site: self._reply(future) for site, future in waiting.items()}

    def _reply(self, future: Future[bytes]) -> bytes | Failure:
        try:
            return future.result(WAIT)
        except TimeoutError:
            return Failure("unavailable", "NoReply")


def load(sites: int, rounds: int, processes: int) -> None:
    flags: dict[str, Any] = {
        "dataset": f"csbm:nodes={20 * sites},classes=3,features=16",
        "clients": sites,
        "rounds": rounds,
        "hidden": 8,
        "eval_every": max(1, rounds // 10),
        "patience": 0,
        "seed": 0,
    }
    given: dict[str, Any] = {"execution": "each", "checkpoint.every": 50}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder, port = Path(name), free_port()
        (folder / "runs").mkdir()
        federation = LoopbackFederation(sites, folder / "runs", folder / "state")
        stack.callback(federation.close)
        prepare_run(
            resolve("fedavg", flags, {**given, "engine": "nvflare", "nvflare.sites": sites}), federation.runs / RUN
        )
        gate = admitting(federation)
        install(gate)
        hub = Hub(federation.kits["server"].startup, port)
        started = []
        for number in range(processes):
            mine = ",".join(federation.names[number::processes])
            kits = federation.kits[federation.names[0]].path.parent
            command = [sys.executable, __file__, "--serve", mine, str(kits), str(federation.folder), str(port)]
            started.append(subprocess.Popen(command))
        stack.callback(lambda: terminate([one.pid for one in started]))
        begun = time.monotonic()
        while len(hub.sites) < sites:
            if time.monotonic() > begun + WAIT:
                raise RuntimeError(f"{len(hub.sites)} of {sites} sites have connected after {WAIT:.0f} s")
            time.sleep(0.2)
        print(f"{sites} sites connected over TLS after {time.monotonic() - begun:.0f} s", flush=True)
        done = threading.Event()
        watching = threading.Thread(target=watch, args=(federation.runs / RUN, rounds, [p.pid for p in started], done))
        watching.start()
        begun, used = time.monotonic(), time.process_time()
        run_on_sites(federation.runs / RUN, RUN, 0, hub)
        spent, used = time.monotonic() - begun, time.process_time() - used
        done.set()
        watching.join()
        print(f"{sites} sites, {rounds} rounds: {spent:.0f} s, CPU of the hub {1e3 * used / rounds:.0f} ms a round")
        print(f"refused or cut connections: {gate.refused}")
        start_local(first_variant(resolve("fedavg", flags, {**given, "engine": "local"})), folder / "local")
        wanted = models(folder / "local")
        print(f"models like those of a run in one process: {models(folder / 'state') == wanted} ({len(wanted)})")


def admitting(federation: LoopbackFederation) -> ConnectionGate:
    """A gate whose register holds the certificates of all sites."""
    register = Members()
    for name in federation.names:
        register = register.issued(read_certificate(federation.kits[name].startup / "client.crt"))
    path = federation.folder / "members.json"
    register.write(path)
    return ConnectionGate(path)


def watch(run: Path, rounds: int, pids: list[int], done: threading.Event) -> None:
    begun, shown = time.monotonic(), -1.0
    while not done.wait(0.5):
        step = committed_rounds(run)
        if step >= shown + rounds / READINGS:
            shown = float(step)
            read = [usage(pid) for pid in (os.getpid(), *pids)]
            words = "  ".join(f"{one[0]:.0f} MB {one[1]} t" for one in read if one is not None)
            print(
                f"round {step:5d}  {time.monotonic() - begun:7.1f} s  hub and processes of sites: {words}", flush=True
            )


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        names, kits, settings, port = sys.argv[2:]
        serve(names.split(","), Path(kits), Path(settings), int(port))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2, help="Which share the sites.")
    given = parser.parse_args()
    load(given.sites, given.rounds, given.processes)
    sys.stdout.flush()
    os._exit(0)  # the listener's threads would go on


if __name__ == "__main__":
    main()
