"""``docs/banks.md`` with real processes over TLS: three banks with tables of their own. Its rehearsal in one process is
run by ``tests/deploy``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the engine nvflare is an extra")
pytest.importorskip("polars", reason="needs the extra tables")
pytest.importorskip("private_set_intersection", reason="needs the extra tables")

from banks_page import BANKS, HUB, Block, Hosts, blocks, can_isolate
from nvflare_helpers import hashes

from isthmus.deploy.audit_chain import AuditChain, verify
from isthmus.deploy.loopback import free_port
from isthmus.deploy.processes import descendants
from isthmus.deploy.site_settings import SiteSettings
from isthmus.experiments.config import resolve
from isthmus.experiments.run import start

WATCH = """\
import os, sys
out = os.open(os.path.join(os.environ["WATCH"], f"{os.environ['HOST']}-{os.getpid()}"), os.O_WRONLY | os.O_CREAT)
def watch(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], (str, bytes, os.PathLike)):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if path.startswith(os.environ["HOSTS"]):
            os.write(out, f"{path}\\n".encode())
sys.addaudithook(watch)
"""
"""Imported by every Python process of a host at its start: writes which files below the hosts' folders it opens."""


@dataclass
class Walked:
    hosts: Hosts
    watch: Path
    output: str = ""
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    """Peak resident memory (MB) of each host's processes: supervisor, parent, job."""


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walked]:
    folder, watch = tmp_path_factory.mktemp("hosts"), tmp_path_factory.mktemp("watch")
    (watch / "sitecustomize.py").write_text(WATCH)
    paths = os.pathsep.join([str(watch), os.environ.get("PYTHONPATH", "")])
    found = Walked(Hosts(folder, free_port(), {"PYTHONPATH": paths, "WATCH": str(watch)}, can_isolate()), watch)
    try:
        with measured(found):
            for number, block in enumerate(block for block in blocks() if "--out rehearsal" not in block.script):
                began = time.monotonic()
                found.output += found.hosts.run(block)
                command = block.script.splitlines()[-1]
                print(f"{time.monotonic() - began:6.1f} s  {block.host}: {command}")  # noqa: T201
                if number == 0:
                    for bank in BANKS:  # ids are then those of a run in one process
                        (folder / bank / "data" / "link.key").write_text("07" * 32)
        yield found
    finally:
        found.hosts.stop()


@contextlib.contextmanager
def measured(walked: Walked) -> Iterator[None]:
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.5):
            for host, process in list(walked.hosts.running.items()):
                for pid in (process.pid, *descendants(process.pid)):
                    with contextlib.suppress(OSError, TypeError):  # it may end meanwhile
                        command = Path(f"/proc/{pid}/cmdline").read_bytes()
                        kind = "parent" if b"parent_process" in command else "job"
                        kind = "supervisor" if pid == process.pid else kind
                        peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
                        peaks = walked.memory.setdefault(host, {})
                        peaks[kind] = max(peaks.get(kind, 0), int(peak[1]) // 1024)  # type: ignore[index]

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_same_bits_as_in_one_process(walked: Walked, tmp_path: Path) -> None:
    """FedStruct behind masks adds up in an order that depends on secrets: only FedAvg promises the bits."""
    method, more = "fedavg", {"secure_sum": True}
    for bank in BANKS:
        shutil.copytree(walked.hosts.folder / bank / "data", tmp_path / "all" / bank)
    flags = {"dataset": str(tmp_path / "all"), "clients": 3, "rounds": 20, "execution": "each", **more}
    start(resolve(method, flags), tmp_path / "one")
    wanted = hashes(tmp_path / "one" / "models")
    (run,) = (walked.hosts.folder / HUB / "federation" / "runs").glob(f"{method}-*")
    found: dict[str, str] = {}
    for bank in BANKS:
        own = hashes(walked.hosts.folder / bank / "state" / run.name / "models")
        assert own.keys() == {bank}, "models stay with their owners"
        found |= own
    assert found == wanted and len(wanted) == 3
    assert not (run / "models").exists()
    assert (walked.hosts.folder / "bank-a" / "state" / run.name / "links.json").exists()


def test_every_bank_can_show_what_it_was_asked_under_its_strict_policy(walked: Walked) -> None:
    runs = sorted((walked.hosts.folder / HUB / "federation" / "runs").iterdir())
    assert [run.name.partition("-")[0] for run in runs] == ["fedavg", "fedstruct", "predict"]
    assert all((run / "result.json").exists() for run in runs)
    contracts = []
    for bank in BANKS:
        state = walked.hosts.folder / bank / "state"
        assert SiteSettings.read(walked.hosts.folder / bank / "client.toml").policy.secure_sum
        head = verify(state)
        found = list(AuditChain(state).open().read())
        assert len(found) == head.number and not [one for one in found if one["kind"] == "refused"]
        contracts.append({one["run"]: one["contract"] for one in found if one["kind"] == "join"})
        kept = [line for run in runs for line in (run / "heads.jsonl").read_text().splitlines()]
        heads = {one["head"] for one in map(json.loads, kept) if one["client"] == bank}
        assert head.hash in heads and all(AuditChain(state).open().has_head(each) for each in heads)
    assert contracts[0] == contracts[1] == contracts[2] and contracts[0].keys() == {run.name for run in runs}
    printed = {contract for contract in contracts[0].values() if contract in walked.output}
    assert len(printed) == 1, "the contract in words is that of the run"


def test_no_process_opens_tables_of_another_host(walked: Walked) -> None:
    opened: dict[str, set[str]] = {host: set() for host in (HUB, *BANKS)}
    for file in walked.watch.glob("*-[0-9]*"):
        opened[file.name.rpartition("-")[0]] |= set(file.read_text().splitlines())
    for host, paths in opened.items():
        own = [path for path in paths if path.startswith(str(walked.hosts.folder / host))]
        assert own, f"nothing of {host} was watched"
        others = [bank for bank in BANKS if bank != host]
        assert not [p for p in paths for bank in others if p.startswith(str(walked.hosts.folder / bank))]
    assert any(path.endswith("data/schema.toml") for path in opened["bank-a"])


@pytest.mark.skipif(not can_isolate(), reason="needs user and mount namespaces")
def test_no_process_could_have_opened_them(walked: Walked) -> None:
    """Libraries that read tables are not seen by an audit hook; the files of other hosts were not there to be read."""
    for host, process in walked.hosts.running.items():
        for pid in (process.pid, *descendants(process.pid)):
            for other in (HUB, *BANKS):
                seen = list(Path(f"/proc/{pid}/root{walked.hosts.folder / other}").iterdir())
                assert bool(seen) == (other == host), f"a process of {host} sees {other}"


def test_what_the_page_promises(walked: Walked) -> None:
    for host, peaks in walked.memory.items():
        print(f"{host}: " + ", ".join(f"{kind} {peak} MB" for kind, peak in peaks.items()))  # noqa: T201
        assert set(peaks) == {"supervisor", "parent", "job"}
    assert all(re.search(rf"{bank} +connected", walked.output) for bank in BANKS)
    assert (walked.hosts.folder / HUB / "report.html").exists()
    assert not list((walked.hosts.folder / HUB).glob("federation/**/*.safetensors"))


def test_a_run_that_a_bank_would_refuse_starts_no_job(walked: Walked) -> None:
    runs = set((walked.hosts.folder / HUB / "federation" / "runs").iterdir())
    began = time.monotonic()
    with pytest.raises(AssertionError, match="bank-a: method 'local' is not allowed"):
        walked.hosts.run(Block(HUB, False, "sed s/fedavg/local/ run.toml > local.toml\nisthmus submit local.toml"))
    seconds = time.monotonic() - began
    print(f"refused after {seconds:.1f} s")  # noqa: T201
    # No run folder, so no job: that is what took most of a minute before.
    assert runs == set((walked.hosts.folder / HUB / "federation" / "runs").iterdir())


def test_a_bank_that_left_is_soon_missed(walked: Walked) -> None:
    """Last, as it ends bank-c."""
    gone = walked.hosts.running.pop("bank-c")
    gone.send_signal(signal.SIGTERM)
    gone.wait(timeout=30.0)
    began = time.monotonic()
    while not (found := re.search(r"bank-c +(not .*)", walked.hosts.run(Block(HUB, False, "isthmus status")))):
        assert time.monotonic() - began < 40.0
    print(f"after {time.monotonic() - began:.1f} s: bank-c {found[1]}")  # noqa: T201
    submitting = walked.hosts.start(HUB, "exec isthmus submit run.toml", subprocess.PIPE)
    walked.hosts.running["submit"] = submitting
    assert submitting.stderr is not None
    assert any(b"waiting for bank-c" in line for line in submitting.stderr)
