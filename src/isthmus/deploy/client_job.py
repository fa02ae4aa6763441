"""The client's process of a job: one published function, behind which :class:`SiteRuntime` decides what is answered.

NVIDIA FLARE starts it at every site, as a child of the client's parent process, for every job the site accepted. The
library would let any party of a job call it, on a hundred threads, and send the text of an exception back. Here only
the server is answered, one request at a time, and nothing is ever raised.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from nvflare.collab import collab

from isthmus.deploy.job_template import SITE_SETTINGS
from isthmus.deploy.processes import exit_with_parent
from isthmus.deploy.site_runtime import SiteRuntime, refuse
from isthmus.deploy.site_settings import SiteSettings
from isthmus.errors import ProtocolError

SERVER_NAME = "server"


class ClientJob:
    """The component ``_client`` of the job template. It has no arguments: a job cannot configure it."""

    def __init__(self) -> None:
        exit_with_parent()
        self._lock = threading.Lock()
        self._runtime: SiteRuntime | None = None

    @collab.publish  # type: ignore[untyped-decorator]
    def handle(self, run: str, kind: str, data: bytes) -> bytes:
        """Every request of the server arrives here."""
        try:
            if collab.caller != SERVER_NAME:
                return refuse(ProtocolError("only the server may call a site"))
            with self._lock:
                if self._runtime is None:
                    self._runtime = SiteRuntime(SiteSettings.read(Path(os.environ[SITE_SETTINGS])))
                return self._runtime.handle(run, kind, data)
        except Exception as error:
            return refuse(error)

    @collab.publish  # type: ignore[untyped-decorator]
    def ping(self) -> bool:
        """Answered at once, also while another request is handled: shows that this process is alive."""
        return True
