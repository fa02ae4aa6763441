"""Start a site's or the server's parent process: ``python -P -u -m isthmus.deploy.launch KIT``.

A server can ask a site's parent to run commands (``cat`` any file, restart, change logging), and whether that needs
permission is decided by a header the server itself writes. So only the requests a job needs are answered here; to
everything else the site says ``invalid_request``.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

WANTED = frozenset(
    {
        "ClientStatusProcessor",
        "ScopeInfoProcessor",
        "DeployProcessor",
        "StartJobProcessor",
        "CheckResourceProcessor",
        "CancelResourceProcessor",
        "ReportResourcesProcessor",
        "AbortAppProcessor",
        "NotifyJobStatusProcessor",
    }
)
"""What a job needs: hear of it, receive it, start it, end it."""


def restrict_requests() -> None:
    """Drop every request processor that no job needs."""
    from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

    ClientRequestProcessors.request_processors = [
        processor for processor in ClientRequestProcessors.request_processors if type(processor).__name__ in WANTED
    ]


def main(kit: str) -> None:
    """Become the parent process of a kit."""
    from isthmus.deploy.credentials import Kit
    from isthmus.deploy.heartbeat import end_with_parent

    end_with_parent()
    found = Kit.read(Path(kit))
    module, config = (
        ("server.server_train", "fed_server.json")
        if found.kind == "server"
        else ("client.client_train", "fed_client.json")
    )
    if found.kind == "client":
        restrict_requests()
    # In every process and its children: without the first each message part would get a download of its own.
    os.environ |= {"NVFLARE_TENSOR_DOWNLOAD_CHUNK_SIZE": "0", "PYTHONSAFEPATH": "1"}
    settings = ["secure_train=true", f"org={found.organisation}", "config_folder=config"]
    settings += [f"uid={found.name}"] if found.kind == "client" else []
    name = f"nvflare.private.fed.app.{module}"
    sys.argv = [name, "-m", str(found.path), "-s", config, "--set", *settings]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1])
