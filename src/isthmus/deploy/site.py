"""The client's part of a job: one published function behind which the site's runtime decides.

The library lets any party of a job call it, on a hundred threads, and would send the text of an exception back. Here
only the server is listened to, one request at a time, and nothing is ever raised.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from nvflare.collab import collab

from isthmus.deploy.heartbeat import end_with_parent
from isthmus.deploy.runtime import SITE_SETTINGS, SiteRuntime, refused
from isthmus.deploy.settings import SiteSettings
from isthmus.errors import ProtocolError

SERVER_NAME = "server"


class SiteApp:
    """What the job template names as ``_client``. Takes no arguments: a job cannot set anything."""

    def __init__(self) -> None:
        end_with_parent()
        self._lock = threading.Lock()
        self._runtime: SiteRuntime | None = None

    @collab.publish  # type: ignore[untyped-decorator]
    def handle(self, run: str, kind: str, data: bytes) -> bytes:
        """The only door of a site."""
        try:
            if collab.caller != SERVER_NAME:
                return refused(ProtocolError("only the server may call a site"))
            with self._lock:
                if self._runtime is None:
                    self._runtime = SiteRuntime(SiteSettings.read(Path(os.environ[SITE_SETTINGS])))
                return self._runtime.handle(run, kind, data)
        except Exception as error:
            return refused(error)

    @collab.publish  # type: ignore[untyped-decorator]
    def ping(self) -> bool:
        """Says that the site is there, also while it works."""
        return True
