"""The process that stays when ``isthmus server start`` or ``isthmus client start`` has checked everything.

It replaces the process of the command and keeps its process id. It supervises the parent process, answers for its
health, and does not need torch or any data, which the command has loaded for its checks: 30 MB instead of 340.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from isthmus.deploy.health import Health, HealthServer
from isthmus.deploy.measurements import AuditCounts, SentBytes, measure_hub, measure_site
from isthmus.deploy.process_supervisor import ProcessSupervisor
from isthmus.deploy.processes import interrupt_on_terminate
from isthmus.deploy.startup_kit import StartupKit
from isthmus.errors import IsthmusError

INTERRUPTED = 130


@dataclass(frozen=True)
class Order:
    """What to keep running.

    Args:
        environment: Of the parent process.
        folder: Of the federation, or a site's state.
        metrics: Port for ``/healthz`` and ``/metrics``, if they are wanted.
    """

    kit: str
    environment: Mapping[str, str]
    log: str
    folder: str
    metrics: int | None = None

    def become(self) -> NoReturn:
        """Turn this process into the keeper."""
        sys.stderr.flush()
        command = [sys.executable, "-P", "-u", "-m", "isthmus.deploy.keeper", json.dumps(asdict(self))]
        os.execv(sys.executable, command)

    def supervisor(self) -> ProcessSupervisor:
        kit = StartupKit.read(Path(self.kit))
        before_start = kit.abandon_stale_jobs if kit.kind == "server" else None
        return ProcessSupervisor(kit, self.environment, Path(self.log), before_start)

    def health(self, supervisor: ProcessSupervisor) -> Callable[[], Health]:
        folder = Path(self.folder)
        if supervisor.kit.kind == "server":
            sent = SentBytes(folder / "runs")
            return lambda: measure_hub(folder, supervisor, sent)
        audit = AuditCounts(folder)
        return lambda: measure_site(folder, supervisor, audit)


def keep(order: Order) -> int:
    """Keep the parent process running until Ctrl-C; returns the exit code of the command."""
    interrupt_on_terminate()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s: %(message)s")
    try:
        supervisor = order.supervisor()
        if order.metrics is not None:
            HealthServer(order.metrics, order.health(supervisor))
        supervisor.start().run_until_stopped()
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        return INTERRUPTED
    except IsthmusError as error:
        sys.stderr.write(f"isthmus: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(keep(Order(**json.loads(sys.argv[1]))))
