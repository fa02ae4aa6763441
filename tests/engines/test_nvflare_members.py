"""Three organisations with keys of their own: one is renewed and one revoked while a run goes on."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the engine nvflare is an extra")

from nvflare_helpers import NODES, wait_until

from isthmus.deploy.admin_session import AdminSession
from isthmus.deploy.federation_folder import FederationFolder
from isthmus.deploy.join_files import join, request
from isthmus.deploy.loopback import free_port
from isthmus.deploy.membership import approve, fingerprint_of, revoke
from isthmus.deploy.provisioning import COORDINATOR_KIT, FederationConfig
from isthmus.deploy.roster import make_identity, read_identity
from isthmus.deploy.run_status import committed_rounds
from isthmus.errors import RunError

BANKS = ("bank-a", "bank-b", "bank-c")


def settle(hub: FederationFolder, folder: Path) -> None:
    """Keys, roster and settings of all organisations, each in its own folder."""
    for bank in BANKS:
        (folder / bank).mkdir()
        make_identity(folder / bank / "identity.key")
    keys = {bank: read_identity(folder / bank / "identity.key").public.hex() for bank in BANKS}
    roster = "".join(f'[{bank}]\nclient = "client-{n}"\nkey = "{keys[bank]}"\n' for n, bank in enumerate(BANKS))
    data = "".join(f"{key} = {json.dumps(value)}\n" for key, value in NODES.items())
    for number, bank in enumerate(BANKS):
        (folder / bank / "roster.toml").write_text(roster)
        (folder / bank / "client.toml").write_text(
            f'client = "client-{number}"\nroster = "roster.toml"\nidentity = "identity.key"\n[data]\n{data}'
        )
        certify(hub, folder / bank, number)
    (folder / "run.toml").write_text(f'method = "fedavg"\nrounds = 3000\npatience = 3000\nhidden = 8\n{data}')


def certify(hub: FederationFolder, home: Path, number: int) -> None:
    made = request(home / "kit", home.name, f"client-{number}", read_identity(home / "identity.key"))
    (home / "request.toml").write_text(made.to_toml())
    answer, _ = approve(hub, home / "request.toml", hub.path / "root", made.fingerprint)
    join(home / "kit", answer, fingerprint_of(hub))


@contextlib.contextmanager
def running(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "isthmus.cli.main", *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=sys.stderr
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30.0)


def test_renewed_and_revoked_while_a_run_goes_on(tmp_path: Path) -> None:
    hub = FederationFolder.create(tmp_path / "hub", FederationConfig("x", BANKS, port=free_port()))
    settle(hub, tmp_path)
    with contextlib.ExitStack() as stack:
        stack.enter_context(running("server", "start", hub.path))
        for bank in BANKS:
            home = tmp_path / bank
            stack.enter_context(running("client", "start", "--kit", home / "kit", "--config", home / "client.toml"))
        name = hub.create_run(tmp_path / "run.toml")
        submitted = stack.enter_context(running("submit", "--federation", hub.path, "--again", name))
        wait_until(lambda: committed_rounds(hub.runs / name) > 3)
        certify(hub, tmp_path / "bank-a", 0)  # renewed: taken over when the job has ended
        rounds = committed_rounds(hub.runs / name)
        wait_until(lambda: committed_rounds(hub.runs / name) > rounds + 3)
        before = time.monotonic()
        revoke(hub, "bank-c")
        assert submitted.wait(timeout=60.0) == RunError.exit_code, "it ends by itself: its contract names bank-c"
        sys.stderr.write(f"the run ended {time.monotonic() - before:.1f} s after bank-c was revoked\n")
        with AdminSession(hub.kit(COORDINATOR_KIT)) as admin:
            wait_until(lambda: admin.sites() == ["bank-a", "bank-b"], 60.0)
        log = hub.path / "kits" / "server" / "isthmus.log"
        wait_until(lambda: log.read_text().count("refused: bank-c was revoked") >= 2, 60.0)
        assert "bank-a" not in "".join(line for line in log.read_text().splitlines() if "refused" in line)
