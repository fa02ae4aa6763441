"""A coordinator's session with the server: submit, query and abort jobs, list the connected sites.

Used by ``isthmus submit`` and ``isthmus status`` with the coordinator's startup kit, over the same port as the clients.
"""

from __future__ import annotations

import contextlib
import io
import logging
import time
from typing import Any

from isthmus.deploy.parent_process import HEARTBEAT_INTERVAL
from isthmus.deploy.startup_kit import StartupKit

logger = logging.getLogger(__name__)

ANSWERS = ("JobNotRunning", "JobNotFound", "JobNotDone", "InvalidJobDefinition", "AuthorizationError")
"""Errors that are an answer of the server: the connection is fine."""

SEEN_WITHIN = 3 * HEARTBEAT_INTERVAL
"""A connected site gave a sign of life within so many seconds."""


class AdminSession:
    """A session that is opened again whenever it breaks."""

    def __init__(self, kit: StartupKit) -> None:
        self.kit = kit
        self._session: Any = None
        logging.getLogger("nvflare").setLevel(logging.CRITICAL)  # failures are reported by the caller

    def __enter__(self) -> AdminSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a function of NVIDIA FLARE's session. After a failed connection the next call opens a new one."""
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        try:
            # The library prints, but our standard output may have to be JSON.
            with contextlib.redirect_stdout(io.StringIO()):
                if self._session is None:
                    self._session = new_secure_session(
                        self.kit.name, str(self.kit.path), timeout=5.0, auto_login_max_tries=1
                    )
                return getattr(self._session, name)(*arguments, **named)
        except Exception as error:
            if type(error).__name__ not in ANSWERS:
                self.close()
            raise

    def sites(self) -> list[str]:
        """Sites that are connected: the server may list one for another minute after it was killed."""
        return sorted(name for name, seconds in self.last_seen().items() if seconds <= SEEN_WITHIN)

    def last_seen(self) -> dict[str, float]:
        """Seconds since the last sign of life of each site that the server lists; the server is on this machine."""
        found = self.call("get_connected_client_list")
        now = time.time()  # the call may have taken seconds to log in
        return {info.name: now - info.last_connect_time for info in found}

    def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            try:
                session.close()
            except Exception:
                logger.debug("closing a session", exc_info=True)
