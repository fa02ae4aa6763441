"""The server's process of a job: runs the named runs one after the other on the sites of the job.

NVIDIA FLARE starts it, as a child of the server's parent process, for every job that was accepted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from nvflare.collab import collab

from isthmus.deploy.handshake import Site
from isthmus.deploy.heartbeat import Heartbeat
from isthmus.deploy.job_template import RUNS, check_run_name
from isthmus.deploy.processes import exit_with_parent
from isthmus.deploy.run_status import HEARTBEAT
from isthmus.deploy.server_run import run_on_sites
from isthmus.errors import IsthmusError
from isthmus.federation.interface import Failure

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = 24 * 3600.0
"""For a request without a time limit; a lost site is noticed long before."""
PING_EVERY, PING_TIMEOUT, MAX_MISSED_PINGS = 2.0, 4.0, 2
"""While a reply is awaited its site is pinged; after so many missed pings in a row it is lost."""


class CollabTransport:
    """Sends requests through NVIDIA FLARE's Collab API: one thread and one call per site.

    A lost site stays lost: NVIDIA FLARE lets no client rejoin a job. The next job includes it again.
    """

    def __init__(self, proxies: Mapping[Site, Any]) -> None:
        self._proxies = dict(sorted(proxies.items()))
        self._lost: dict[Site, Failure] = {}
        self._pool = ThreadPoolExecutor(max_workers=2 * max(1, len(self._proxies)), thread_name_prefix="isthmus-call")

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(self._proxies)

    def request(
        self, run: str, kind: str, requests: Mapping[Site, bytes], timeout: float | None
    ) -> dict[Site, bytes | Failure]:
        limit = DEFAULT_TIMEOUT if timeout is None else timeout
        reachable = {site: data for site, data in requests.items() if site not in self._lost}
        calls = {site: self._pool.submit(self._call, site, run, kind, data, limit) for site, data in reachable.items()}
        self._lost |= self._wait(calls)
        replies = {site: self._lost[site] if site in self._lost else calls[site].result() for site in requests}
        self._lost |= {
            site: one for site, one in replies.items() if isinstance(one, Failure) and one.kind == "unavailable"
        }
        return replies

    def _call(self, site: Site, run: str, kind: str, data: bytes, timeout: float) -> bytes | Failure:
        try:
            reply = self._proxies[site](timeout=timeout).handle(run=run, kind=kind, data=data)
        except Exception as error:
            cause = getattr(error, "cause", None)
            late = isinstance(cause, TimeoutError) or "timed out" in str(error)
            return Failure("timeout" if late else "unavailable", type(error).__name__)
        return bytes(reply) if isinstance(reply, (bytes, bytearray, memoryview)) else Failure("protocol", "NoBytes")

    def _wait(self, calls: Mapping[Site, Future[bytes | Failure]]) -> dict[Site, Failure]:
        """Wait for all calls; returns the sites that stopped answering pings meanwhile."""
        missed = dict.fromkeys(calls, 0)
        while True:
            _, pending = wait(calls.values(), timeout=PING_EVERY)
            if not pending:
                return {}
            waiting = [site for site, call in calls.items() if call in pending and missed[site] < MAX_MISSED_PINGS]
            if not waiting:
                return {site: Failure("unavailable", "NoSignOfLife") for site, call in calls.items() if not call.done()}
            for site, answered in zip(waiting, self._pool.map(self._ping, waiting), strict=True):
                missed[site] = 0 if answered else missed[site] + 1

    def _ping(self, site: Site) -> bool:
        try:
            return bool(self._proxies[site](timeout=PING_TIMEOUT).ping())
        except Exception:
            return False

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class ServerJob:
    """The component ``_server`` of the job template."""

    def __init__(self) -> None:
        exit_with_parent()

    @collab.main  # type: ignore[untyped-decorator]
    def main(self) -> str:
        """Run the runs. One that fails ends the job; the supervisor decides whether to submit another."""
        runs = [check_run_name(run) for run in collab.get_app_prop("runs", [])]
        attempt = int(collab.get_app_prop("attempt", 0))
        root = Path(os.environ[RUNS])
        transport = CollabTransport({proxy.name: proxy for proxy in collab.clients})
        try:
            for run in runs:
                heartbeat = Heartbeat(root / run / HEARTBEAT)
                try:
                    run_on_sites(root / run, run, attempt, transport)
                finally:
                    heartbeat.stop()
        except IsthmusError as error:
            logger.error("%s", error)
            _exit_soon()
            raise RuntimeError("the run failed") from error
        finally:
            transport.close()
        return "done"


def _exit_soon() -> None:
    """End this process in a second, even if a thread still waits for a reply: state is on disk, a new job continues."""

    def leave() -> None:
        time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=leave, daemon=True).start()
