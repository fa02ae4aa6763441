"""Disturb a federation and measure how it comes back: the table of ``docs/operations.md``.

    python benchmarks/drills.py [--drill NAME]... [--docs docs/operations.md]

Real kits and processes: FedAvg, three sites, a small generated graph. Where this process may make network namespaces,
server and sites of a drill that disturbs the network have one each, and the partition is a cable that is cut; latency
and loss are made by the kernel if it has netem. Otherwise each site reaches the server through a relay of its own,
which delays, holds back or stops its bytes; packet loss is then what TCP makes of it: a segment is held for a
retransmission time, twice as long for each further loss. A full disk needs the right to mount; clock skew needs
libfaketime (FAKETIME_LIBRARY). Every drill must end with the same models as an undisturbed run in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from namespaces import HUB, Namespaces, possible

from isthmus.deploy.heartbeat import read_heartbeat
from isthmus.deploy.loopback import LoopbackFederation, prepare_run
from isthmus.deploy.processes import descendants
from isthmus.deploy.run_status import HEARTBEAT, committed_rounds
from isthmus.errors import IsthmusError
from isthmus.experiments.config import resolve
from isthmus.experiments.model_package import MODEL, MODELS, read_package
from isthmus.experiments.run import start as start_local
from isthmus.experiments.variants import first_variant
from isthmus.federation.messages import SERVER

SITES, ROUNDS, RUN = 3, 60, "drill"
PARTIES = ("server", *(f"site-{number}" for number in range(1, SITES + 1)))
RETRANSMIT = 0.2
SEGMENT, MOST_UNDER_WAY = 1460, 10_000
FLAGS = {"dataset": "csbm:nodes=300,classes=3,features=16", "clients": SITES, "rounds": ROUNDS, "seed": 1, "hidden": 16}
FAKETIME = Path(os.environ.get("FAKETIME_LIBRARY", "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"))
NETWORK = ("latency", "loss", "partition")
"""Drills for which namespaces are made, if that is possible."""
BEGIN, END = "<!-- drills: written by benchmarks/drills.py -->", "<!-- end of drills -->"


class Relay:
    """A port that passes bytes on to the server, as badly as it is told: in order, each segment when it is due."""

    def __init__(self, server: int) -> None:
        self.delay, self.loss, self.open = 0.0, 0.0, threading.Event()
        self.open.set()
        self._server, self._draw = server, random.Random(7)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                site, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server))
            except OSError:
                continue
            for source, target in ((site, server), (server, site)):
                threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        under_way: queue.Queue[tuple[float, bytes]] = queue.Queue(MOST_UNDER_WAY)
        threading.Thread(target=self._deliver, args=(under_way, source, target), daemon=True).start()
        data = b"-"
        while data:
            try:
                data = source.recv(SEGMENT)
            except OSError:
                data = b""
            wait, again = self.delay, RETRANSMIT
            while self.loss and self._draw.random() < self.loss:
                wait, again = wait + again, 2 * again
            under_way.put((time.monotonic() + wait, data))

    def _deliver(
        self, under_way: queue.Queue[tuple[float, bytes]], source: socket.socket, target: socket.socket
    ) -> None:
        broken = False
        while True:
            due, data = under_way.get()
            time.sleep(max(0.0, due - time.monotonic()))
            self.open.wait()
            if not data:
                break
            with contextlib.suppress(OSError):
                if not broken:
                    broken = True
                    target.sendall(data)
                    broken = False
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@dataclass
class Scene:
    """A federation with a run that goes on, for a drill to disturb."""

    federation: LoopbackFederation
    relays: dict[str, Relay]
    state: Path
    network: Namespaces | None = None
    began: float = 0.0
    healed: list[float] = field(default_factory=list)
    """When each disturbance was over, or for kills when it happened."""

    @property
    def rounds(self) -> int:
        return committed_rounds(self.federation.runs / RUN)

    def wait_for(self, rounds: int, timeout: float = 900.0) -> None:
        deadline = time.monotonic() + timeout
        while self.rounds < rounds:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.rounds} rounds after {timeout} s, {rounds} expected")
            time.sleep(0.05)

    def over(self) -> None:
        self.healed.append(time.monotonic())

    def kill(self, *what: str) -> None:
        for one in what:
            name, _, kind = one.partition(" ")
            parent = self.federation.parents[name].pid
            beat = read_heartbeat(self.federation.runs / RUN / HEARTBEAT)
            jobs = [beat[0]] if name == "server" and beat else descendants(parent)[-1:] if parent else []
            for pid in jobs if kind == "job" else [parent] if parent else []:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        self.over()


def nothing(scene: Scene) -> None:
    """An undisturbed run."""


def latency(scene: Scene) -> None:
    for site in scene.federation.names:
        if scene.network is not None:
            scene.network.impair(site, "delay", "50ms")  # at both ends of the cable, there and back
    for relay in scene.relays.values():
        relay.delay = 0.1


def loss(scene: Scene) -> None:
    for site in scene.federation.names:
        if scene.network is not None:
            scene.network.impair(site, "loss", "30%")
    for relay in scene.relays.values():
        relay.loss = 0.3


def partition(scene: Scene) -> None:
    cut = scene.relays["site-2"].open.clear if scene.network is None else lambda: scene.network.cut("site-2")
    mend = scene.relays["site-2"].open.set if scene.network is None else lambda: scene.network.mend("site-2")
    cut()
    time.sleep(60.0)
    mend()
    scene.over()


def full_disk(scene: Scene) -> None:
    """The disk of a site has no room for a minute; then there is room again."""
    filler = scene.state / "site-2" / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError:
            pass
    time.sleep(60.0)
    filler.unlink()
    scene.over()


def random_kills(scene: Scene) -> None:
    """For ten minutes or until the run has ended one of the eight processes is killed every 20 s."""
    draw = random.Random(3)
    parties = [f"{name} {kind}" for name in ("server", *scene.federation.names) for kind in ("parent", "job")]
    deadline = time.monotonic() + 600.0
    while time.monotonic() < deadline and scene.rounds < ROUNDS:
        scene.kill(draw.choice(parties))
        time.sleep(20.0)


def killed(*what: str) -> Callable[[Scene], None]:
    return lambda scene: scene.kill(*what)


DRILLS: dict[str, tuple[str, Callable[[Scene], None]]] = {
    "none": ("none", nothing),
    "latency": ("200 ms there and back, all sites", latency),
    "loss": ("30 % of segments lost, all sites", loss),
    "partition": ("one site cut off for 60 s", partition),
    "client-job": ("client job killed", killed("site-1 job")),
    "client-parent": ("client parent killed", killed("site-1 parent")),
    "server-job": ("server job killed", killed("server job")),
    "server-parent": ("server parent killed", killed("server parent")),
    "two": ("server parent and a client job killed at once", killed("server parent", "site-3 job")),
    "skew": ("clock of one site an hour fast", nothing),
    "full-disk": ("disk of one site full for 60 s", full_disk),
    "random": ("one of eight processes killed every 20 s", random_kills),
}


@dataclass(frozen=True)
class Outcome:
    same: bool
    seconds: float
    recovery: tuple[float, ...]
    attempts: int
    note: str = ""


def models(folder: Path) -> dict[str, str]:
    """A hash of the weights of every client."""
    found = {}
    for path in sorted(one.parent for one in folder.rglob(MODEL) if one.parent.parent.name == MODELS):
        package = read_package(path)
        if package.client != SERVER:
            parts = [name.encode() + tensor.numpy().tobytes() for name, tensor in sorted(package.weights.items())]
            found[package.client] = sha256(b"".join(parts)).hexdigest()
    return found


def drill(name: str, wanted: dict[str, str]) -> Outcome | str:
    """Run one drill; why it cannot be run here, if it cannot."""
    with tempfile.TemporaryDirectory() as folder:
        runs, state = Path(folder) / "runs", Path(folder) / "state"
        runs.mkdir()
        if name == "skew" and not FAKETIME.exists():
            return "needs libfaketime"
        with contextlib.ExitStack() as stack:
            network = stack.enter_context(Namespaces(PARTIES)) if name in NETWORK and possible() else None
            if name in ("latency", "loss") and network is not None and not network.impair(PARTIES[0], "delay", "0ms"):
                stack.close()
                network = None  # the kernel has no netem
            return _drill(name, wanted, network, runs, state)


def _drill(name: str, wanted: dict[str, str], network: Namespaces | None, runs: Path, state: Path) -> Outcome | str:
    disturb = DRILLS[name][1]
    federation = LoopbackFederation(SITES, runs, state, host="localhost" if network is None else HUB)
    mounted = state / "site-2"
    if name == "full-disk":
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(mounted)], check=False)
        if done.returncode:
            federation.close()
            return "needs the right to mount"
    try:
        return _play(Scene(federation, {}, state, network), name, disturb, wanted)
    finally:
        federation.close()
        if name == "full-disk":
            subprocess.run(["umount", str(mounted)], check=False)


def _play(scene: Scene, name: str, disturb: Callable[[Scene], None], wanted: dict[str, str]) -> Outcome:
    federation = scene.federation
    server = federation.kits["server"].target[1]
    for site in federation.names if scene.network is None else ():
        relay = scene.relays[site] = Relay(server)
        file = federation.kits[site].startup / "fed_client.json"
        file.write_text(re.sub(rf":{server}\b", f":{relay.port}", file.read_text()))
    prepare_run(resolve("fedavg", FLAGS, {"execution": "each", "engine": "nvflare"}), federation.runs / RUN)
    os.environ |= {"LD_PRELOAD": "", "FAKETIME": ""}

    def enter(name: str) -> Callable[[], object]:
        return (lambda: None) if scene.network is None else scene.network.enter(name)

    federation.start_one("server", enter("server"))
    for site in federation.names:
        if name == "skew" and site == "site-2":
            os.environ |= {"LD_PRELOAD": str(FAKETIME), "FAKETIME": "+3600s", "DONT_FAKE_MONOTONIC": "1"}
        federation.start_one(site, enter(site))
        time.sleep(0.5)
        os.environ |= {"LD_PRELOAD": "", "FAKETIME": ""}
    note: list[str] = []
    supervisor = federation.supervisor()

    def finish() -> None:
        for _ in range(4):
            try:
                supervisor.finish([RUN])
                return
            except IsthmusError as error:  # what `isthmus submit` prints; the operator submits again
                note.append(f"ended with: {error}")
                time.sleep(20.0)

    thread = threading.Thread(target=finish, daemon=True)
    began = time.monotonic()
    thread.start()
    times: list[float] = []
    watching = threading.Thread(target=_note_rounds, args=(scene, thread, times), daemon=True)
    watching.start()
    scene.wait_for(10)
    disturb(scene)
    thread.join()
    watching.join()
    recovery = tuple(_longest_pause(times, healed) for healed in scene.healed)
    same = models(scene.state) == wanted
    print("\n".join(note), end="\n" if note else "", file=sys.stderr)
    text = f"; {len(note)} time(s) submitted again by hand" if note else ""
    return Outcome(same, time.monotonic() - began, recovery, len(supervisor.attempts), text)


def _longest_pause(times: list[float], healed: float) -> float:
    """The longest time without a new round from when a disturbance was over; a round in flight may still be done."""
    points = [healed, *(one for one in times if one > healed)]
    return max((later - earlier for earlier, later in itertools.pairwise(points)), default=0.0)


def _note_rounds(scene: Scene, thread: threading.Thread, times: list[float]) -> None:
    seen = 0
    while thread.is_alive():
        rounds = scene.rounds
        if rounds != seen:
            times.append(time.monotonic())
            seen = rounds
        time.sleep(0.05)


def row(name: str, outcome: Outcome | str) -> str:
    words = DRILLS[name][0]
    if isinstance(outcome, str):
        return f"| {words} | not run: {outcome} | | | |"
    longest = f"{max(outcome.recovery):.0f} s" if outcome.recovery else "-"
    count = f" (longest of {len(outcome.recovery)})" if len(outcome.recovery) > 1 else ""
    same = "yes" if outcome.same else "**no**"
    return f"| {words} | {longest}{count} | {outcome.attempts} | {outcome.seconds:.0f} s | {same}{outcome.note} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drill", action="append", choices=sorted(DRILLS))
    parser.add_argument("--rows", type=Path, help="Add the rows to this file, one JSON object a line.")
    parser.add_argument("--docs", type=Path, help="Write the rows of --rows into this page.")
    given = parser.parse_args()
    if given.docs is None:
        with tempfile.TemporaryDirectory() as folder:
            settings = resolve("fedavg", FLAGS, {"execution": "each", "engine": "local"})
            start_local(first_variant(settings), Path(folder) / "run")
            wanted = models(Path(folder) / "run")
        for name in given.drill or DRILLS:
            line = row(name, drill(name, wanted))
            print(line, flush=True)
            if given.rows is not None:
                with given.rows.open("a") as file:
                    file.write(json.dumps({name: line}) + "\n")
        return
    rows: dict[str, str] = {}
    for text in given.rows.read_text().splitlines():
        rows |= json.loads(text)
    table = ["| disturbance | longest pause after it | attempts | whole run | same models |", "|---|---|---|---|---|"]
    table += [rows[name] for name in DRILLS if name in rows]
    page = given.docs.read_text()
    before, _, rest = page.partition(BEGIN)
    given.docs.write_text(f"{before}{BEGIN}\n" + "\n".join(table) + f"\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
