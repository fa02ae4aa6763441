"""What a hub and a site say of themselves when they are asked (``health``): read from their folders, no new state."""

from __future__ import annotations

import json
import shutil
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.deploy.certificates import now, read_certificate
from isthmus.deploy.connection_gate import REFUSALS_FILE, SEEN_FILE
from isthmus.deploy.health import Health, Labels, Metric, gauge
from isthmus.deploy.members import MEMBERS, Members
from isthmus.deploy.processes import is_alive
from isthmus.deploy.run_files import AUDIT, committed_rounds, run_state
from isthmus.deploy.run_queue import RunQueue
from isthmus.deploy.startup_kit import certificate_file

if TYPE_CHECKING:
    from isthmus.deploy.process_supervisor import ProcessSupervisor

SEEN_WITHIN = 12.0
LEAST_FREE_BYTES = 200 * 2**20
LEAST_DAYS = 7.0


def connections(federation: Path) -> dict[str, float]:
    """Seconds since each organisation was last heard of, from what the gate wrote."""
    try:
        seen = json.loads((federation / SEEN_FILE).read_text())
        return {str(name): max(0.0, time.time() - float(when)) for name, when in seen.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def measure_hub(federation: Path, supervisor: ProcessSupervisor, sent: SentBytes) -> Health:
    """The folder is read anew each time: members change while the server runs."""
    config = tomllib.loads((federation / "federation.toml").read_text())
    register, seen = Members.read(federation / MEMBERS), connections(federation)
    states = {path.name: run_state(path) for path in sorted((federation / "runs").iterdir()) if path.is_dir()}
    members = [name for name in config["organisations"] if register.joined(name)]
    days = {name: found.days_left for name in members if (found := register.valid(name)) is not None}
    problems, shared = _of_process(supervisor)
    problems += [f"{name} has no valid certificate" for name in members if name not in days]
    problems += [f"{name} is not connected" for name in members if seen.get(name, SEEN_WITHIN + 1) > SEEN_WITHIN]
    problems += _disk_problems(federation)
    running = [name for name, state in states.items() if state == "running"]
    metrics = [
        *shared,
        _free(federation),
        gauge("queued_runs", "runs that wait for their turn", float(len(RunQueue(federation).waiting()))),
        gauge("certificate_days", "days until the certificate expires", days),
        gauge(
            "last_seen_seconds",
            "since the organisation was last heard of",
            {n: s for n, s in seen.items() if n in members},
        ),
        gauge("runs", "runs by state", Counter(state.partition(":")[0] for state in states.values()), "state"),
        gauge(
            "rounds",
            "committed rounds of runs that go on",
            {name: committed_rounds(federation / "runs" / name) for name in running},
            "run",
        ),
        gauge("refused_connections_total", "connections refused or cut since the start", _number(federation)),
        sent.read(running),
    ]
    facts = {"federation": config["name"], "organisations": members, "running": len(running)}
    return Health(tuple(problems), tuple(metrics), facts)


class AuditCounts:
    """Lines of an audit chain by kind, counted as they are added: a chain grows for years."""

    def __init__(self, state: Path) -> None:
        self._path, self._offset = state / AUDIT, 0
        self._counts: Counter[str] = Counter()

    def read(self) -> Counter[str]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    if line.endswith(b"\n"):
                        self._offset += len(line)
                        self._counts[str(json.loads(line)["kind"])] += 1
        except FileNotFoundError:
            pass
        return self._counts


def measure_site(state: Path, supervisor: ProcessSupervisor, audit: AuditCounts) -> Health:
    problems, shared = _of_process(supervisor)
    problems += _disk_problems(state)
    metrics = [
        *shared,
        _free(state),
        gauge("audit_lines_total", "lines of the audit chain by kind", audit.read(), "kind"),
    ]
    return Health(tuple(problems), tuple(metrics), {"organisation": supervisor.kit.name})


def _free(folder: Path) -> Metric:
    return gauge("disk_free_bytes", "free on the disk of the own folder", float(shutil.disk_usage(folder).free))


def _disk_problems(folder: Path) -> list[str]:
    free = shutil.disk_usage(folder).free
    if free >= LEAST_FREE_BYTES:
        return []
    return [f"{free // 2**20} MB are free on the disk of {folder}: docs/operations.md, disk full"]


def _of_process(supervisor: ProcessSupervisor) -> tuple[list[str], list[Metric]]:
    kit, problems = supervisor.kit, []
    days = (
        read_certificate(kit.startup / certificate_file(kit.kind)).not_valid_after_utc - now()
    ).total_seconds() / 86400
    if supervisor.pid is None or not is_alive(supervisor.pid):
        problems.append(f"the process of {kit.name} does not run: see {supervisor.log.name}")
    if days < LEAST_DAYS:
        problems.append(f"the certificate of {kit.name} expires in {max(0.0, days):.1f} days: renew it")
    return problems, [
        gauge("own_certificate_days", "days until the own certificate expires", days),
        gauge("restarts_total", "restarts of the own process since the start", float(supervisor.restarts)),
    ]


def _number(path: Path) -> float:
    try:
        return float((path / REFUSALS_FILE).read_text())
    except (OSError, ValueError):
        return 0.0


class SentBytes:
    """Bytes of running runs by kind of content, from their ledgers; a round is read once."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._rounds: dict[Path, Counter[str]] = {}

    def read(self, names: list[str]) -> Metric:
        files = [file for name in names for file in sorted((self._runs / name / "ledger").glob("*.jsonl"))]
        self._rounds = {file: self._rounds.get(file) or _by_kind(file) for file in files}
        values: Counter[Labels] = Counter()
        for file, kinds in self._rounds.items():
            for kind, size in kinds.items():
                values[("run", file.parent.parent.name), ("kind", kind)] += size
        return Metric("isthmus_sent_bytes", "bytes sent in runs that are not finished, by kind", "gauge", values)


def _by_kind(file: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for line in file.read_text().splitlines():
        found.update(json.loads(line)["by_kind"])
    return found
