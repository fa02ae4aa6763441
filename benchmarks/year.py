"""A year in some minutes: certificates of minutes, renewed and revoked while one run goes on; is anything lost?

    python benchmarks/year.py [--rounds 2500] [--valid 660]

A hub and three organisations with keys of their own, real processes on loopback. Certificates are valid for eleven
minutes instead of 90 days, and each organisation renews in turn; one has lost its key once, so that its old certificate
is revoked at once; a fourth organisation joins after the run was agreed, connects, and is excluded. At the end the
models are compared with those of an undisturbed run in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from drills import models

from isthmus.deploy.federation_folder import FederationFolder
from isthmus.deploy.join_files import join, request
from isthmus.deploy.loopback import free_port
from isthmus.deploy.members import Members
from isthmus.deploy.membership import add, approve, fingerprint_of, revoke
from isthmus.deploy.provisioning import FederationConfig
from isthmus.deploy.roster import make_identity, read_identity
from isthmus.deploy.run_status import committed_rounds
from isthmus.experiments.config import settings_from_toml
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.run import start as start_local
from isthmus.experiments.variants import first_variant

BANKS, GUEST = ("bank-a", "bank-b", "bank-c"), "bank-d"
FIRST, APART, RENEW_BEFORE = 300.0, 130.0, 100.0
"""Seconds that the first certificate of the first organisation is good for, how much longer those of the others are,
and how long before its end a new one is asked for.
"""
DATA = {"dataset": "csbm:nodes=90,classes=3,features=8", "clients": 3, "seed": 3}


def certify(hub: FederationFolder, home: Path, seconds: float, lost: bool = False) -> None:
    """Request, approval and joining; the first time, and when a key was lost, with the fingerprint."""
    first = not (home / "kit" / "startup" / "client.crt").exists()
    made = request(
        home / "kit", home.name, f"client-{'abcd'.index(home.name[-1])}", read_identity(home / "identity.key")
    )
    (home / "request.toml").write_text(made.to_toml())
    told = made.fingerprint if first or lost else None
    answer, _ = approve(hub, home / "request.toml", hub.path / "root", told, f"{seconds / 60:.0f}m", lost)
    join(home / "kit", answer, fingerprint_of(hub) if first else None)


def settle(folder: Path) -> None:
    """Keys, roster and settings of each organisation, in its own folder."""
    data = "".join(f"{key} = {json.dumps(value)}\n" for key, value in DATA.items())
    lines = ""
    for number, bank in enumerate((*BANKS, GUEST)):
        (folder / bank).mkdir()
        identity = make_identity(folder / bank / "identity.key")
        lines += f'[{bank}]\nclient = "client-{number}"\nkey = "{identity.public.hex()}"\n'
    for number, bank in enumerate((*BANKS, GUEST)):
        (folder / bank / "roster.toml").write_text(lines)
        own = data if bank in BANKS else data.replace("clients = 3", "clients = 4")  # the guest is in no run
        (folder / bank / "client.toml").write_text(
            f'client = "client-{number}"\nroster = "roster.toml"\nidentity = "identity.key"\n[data]\n{own}'
        )


@contextlib.contextmanager
def running(log: Path, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as file:
        process = subprocess.Popen([sys.executable, "-m", "isthmus.cli.main", *map(str, arguments)], stderr=file)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30.0)


def client(stack: contextlib.ExitStack, home: Path) -> subprocess.Popen[bytes]:
    arguments = ("client", "start", "--kit", home / "kit", "--config", home / "client.toml")
    return stack.enter_context(running(home / "log.txt", *arguments))


def refusals(log: str, name: str) -> int:
    """Connections of a revoked certificate that were refused, as far as the log has said so: it does once a minute."""
    lines = [line for line in log.splitlines() if f"refused: {name} was revoked" in line]
    return sum(1 + int(more[1]) if (more := re.search(r"\((\d+) times more", line)) else 1 for line in lines)


def year(folder: Path, rounds: int, valid: float) -> None:
    hub = FederationFolder.create(folder / "hub", FederationConfig("year", BANKS, port=free_port()))
    settle(folder)
    for number, bank in enumerate(BANKS):
        certify(hub, folder / bank, FIRST + APART * number)
    data = "".join(f"{key} = {json.dumps(value)}\n" for key, value in DATA.items())
    (folder / "run.toml").write_text(
        f'method = "fedavg"\nrounds = {rounds}\npatience = 0\neval_every = 100\nhidden = 8\n{data}'
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(folder / "hub.log", "server", "start", hub.path))
        clients = [client(stack, folder / bank) for bank in BANKS]
        run = hub.create_run(folder / "run.toml")
        log = folder / "submit.log"
        submitted = stack.enter_context(running(log, "submit", "--federation", hub.path, "--again", run))
        begun, renewals, guest, lost = time.monotonic(), dict.fromkeys(BANKS, 0), "", False
        while submitted.poll() is None:
            time.sleep(1.0)
            register, passed = Members.read(hub.register), time.monotonic() - begun
            for bank in BANKS:
                held = register.valid(bank)
                if held is None or held.days_left * 86400 < RENEW_BEFORE:
                    lost = bank == "bank-b" and renewals[bank] == 0
                    certify(hub, folder / bank, valid, lost)
                    renewals[bank] += 1
                    words = "has lost its key: the old one is revoked, a new one approved" if lost else "is renewed"
                    print(f"{passed:6.0f} s  round {committed_rounds(hub.runs / run):5d}  {bank} {words}", flush=True)
            if not guest and committed_rounds(hub.runs / run) > rounds / 10:
                hub = add(FederationFolder.read(hub.path), GUEST)
                certify(hub, folder / GUEST, 3600.0)
                client(stack, folder / GUEST)
                guest = "joined"
                print(f"{passed:6.0f} s  round {committed_rounds(hub.runs / run):5d}  {GUEST} joins", flush=True)
            elif guest == "joined" and hub.status()["organisations"][GUEST] == "connected":
                hub, guest = revoke(hub, GUEST), "revoked"
                print(f"{passed:6.0f} s  round {committed_rounds(hub.runs / run):5d}  {GUEST} is revoked", flush=True)
        spent = time.monotonic() - begun
        alive = sum(one.poll() is None for one in clients)
        gate = (hub.path / "kits" / "server" / "isthmus.log").read_text()
        attempts = int(json.loads((hub.runs / run / "attempts.json").read_text())) + 1
    if submitted.returncode:
        sys.exit(f"the run ended with {submitted.returncode}: {log.read_text()[-2000:]}")
    settings = settings_from_toml(RunFolder(hub.runs / run).config)
    start_local(first_variant(replace(settings, run=replace(settings.run, engine="local"))), folder / "local")
    found = {name: one for bank in BANKS for name, one in models(folder / bank / "state").items()}
    done = ", ".join(f"{bank} {count} times" for bank, count in renewals.items())
    print(f"{rounds} rounds in {spent:.0f} s and {attempts} attempts; renewed: {done}; {alive} of 3 clients still run")
    print(f"{GUEST} {guest}: {refusals(gate, GUEST)} connections of it were cut or refused")
    print(f"bank-b with its lost key: {refusals(gate, 'bank-b')} connections were cut or refused")
    print(f"models like those of an undisturbed run: {found == models(folder / 'local')} ({len(found)})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2500)
    parser.add_argument("--valid", type=float, default=660.0, help="Seconds that a renewed certificate is good for.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        year(Path(folder), given.rounds, given.valid)


if __name__ == "__main__":
    main()
