"""The server's part of a job: plays the named runs, one after the other, over the sites of the job."""

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
from isthmus.deploy.heartbeat import Beating, end_with_parent
from isthmus.deploy.job import check_run_id
from isthmus.deploy.play import BEAT, RUNS, play_run
from isthmus.errors import IsthmusError
from isthmus.federation.interface import Failure

logger = logging.getLogger(__name__)

LONGEST = 24 * 3600.0
"""A call without a time limit of its own gets this one; a site that is gone is noticed long before."""
PING_EVERY, PING_TIMEOUT, PINGS = 2.0, 4.0, 2
"""While an answer is awaited, its site is pinged; so many misses in a row and it is given up."""


class CollabCarrier:
    """Requests through the Collab API: one thread and one call per site, the same bytes never twice.

    A site that was lost stays lost: the library lets nobody back into a job. The next job has it again.
    """

    def __init__(self, proxies: Mapping[Site, Any]) -> None:
        self._proxies = dict(sorted(proxies.items()))
        self._lost: dict[Site, Failure] = {}
        self._pool = ThreadPoolExecutor(max_workers=2 * max(1, len(self._proxies)), thread_name_prefix="isthmus-call")

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(self._proxies)

    def ask(
        self, run: str, kind: str, requests: Mapping[Site, bytes], timeout: float | None
    ) -> dict[Site, bytes | Failure]:
        limit = LONGEST if timeout is None else timeout
        there = {site: data for site, data in requests.items() if site not in self._lost}
        calls = {site: self._pool.submit(self._one, site, run, kind, data, limit) for site, data in there.items()}
        self._lost |= self._watch(calls)
        answers = {site: self._lost[site] if site in self._lost else calls[site].result() for site in requests}
        self._lost |= {
            site: one for site, one in answers.items() if isinstance(one, Failure) and one.kind == "unavailable"
        }
        return answers

    def _one(self, site: Site, run: str, kind: str, data: bytes, timeout: float) -> bytes | Failure:
        try:
            answer = self._proxies[site](timeout=timeout).handle(run=run, kind=kind, data=data)
        except Exception as error:
            cause = getattr(error, "cause", None)
            late = isinstance(cause, TimeoutError) or "timed out" in str(error)
            return Failure("timeout" if late else "unavailable", type(error).__name__)
        return bytes(answer) if isinstance(answer, (bytes, bytearray, memoryview)) else Failure("protocol", "NoBytes")

    def _watch(self, calls: Mapping[Site, Future[bytes | Failure]]) -> dict[Site, Failure]:
        """Wait for all; sites that no longer answer to their name while they are waited for are lost."""
        missed = dict.fromkeys(calls, 0)
        while True:
            _, open_ = wait(calls.values(), timeout=PING_EVERY)
            if not open_:
                return {}
            waiting = [site for site, call in calls.items() if call in open_ and missed[site] < PINGS]
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


class ServerApp:
    """What the job template names as ``_server``."""

    def __init__(self) -> None:
        end_with_parent()

    @collab.main  # type: ignore[untyped-decorator]
    def main(self) -> str:
        """Play the runs. One that cannot go on ends the job; the supervisor decides what next."""
        runs, attempt = (
            [check_run_id(run) for run in collab.get_app_prop("runs", [])],
            int(collab.get_app_prop("attempt", 0)),
        )
        root = Path(os.environ[RUNS])
        carrier = CollabCarrier({proxy.name: proxy for proxy in collab.clients})
        try:
            for run in runs:
                beating = Beating(root / run / BEAT)
                try:
                    play_run(root / run, run, attempt, carrier)
                finally:
                    beating.stop()
        except IsthmusError as error:
            logger.error("%s", error)
            self._leave()
        finally:
            carrier.close()
        return "done"

    def _leave(self) -> None:
        """End this process soon, whatever waits for an answer that will not come: state is on disk, a new job
        continues.
        """

        def leave() -> None:
            time.sleep(1.0)
            os._exit(1)

        threading.Thread(target=leave, daemon=True).start()
        raise RuntimeError("the run could not go on")
