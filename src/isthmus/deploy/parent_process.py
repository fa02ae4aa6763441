"""The parent process of a kit: NVIDIA FLARE's server or client, which receives jobs and starts a process for each.

Started by :class:`~isthmus.deploy.process_supervisor.ProcessSupervisor` as ``python -P -u -m
isthmus.deploy.parent_process KIT``, at ``isthmus server start`` and ``isthmus client start``.

A FLARE server can ask a client's parent to run commands (``cat`` any file, restart, change logging), and whether that
needs permission is decided by a header the server itself writes. So a client answers only the requests a job needs; to
all others it replies ``invalid_request``. A server lets in only certificates of its register (``connection_gate``).
"""

from __future__ import annotations

import functools
import io
import os
import runpy
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from isthmus.deploy.job_template import AT_ONCE, busy
from isthmus.deploy.processes import jobs_of
from isthmus.deploy.startup_kit import JOB_ID

ALLOWED_REQUESTS = frozenset(
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
"""Request processors a job needs: announce, deploy, start and end it."""
MAX_APP_BYTES = 1 << 20
"""Of a job, as it is sent and unpacked: a few kilobytes in truth."""
HEARTBEAT_INTERVAL = 4
"""Seconds between two signs of life of a client (NVIDIA FLARE's default: 10)."""


def restrict_requests() -> None:
    """Drop every request processor that no job needs, and look at what is asked of the others before they do."""
    from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

    ClientRequestProcessors.request_processors = [
        processor
        for processor in ClientRequestProcessors.request_processors
        if type(processor).__name__ in ALLOWED_REQUESTS
    ]
    for processor in ClientRequestProcessors.request_processors:
        processor.process = _guarded(processor.process)


def _guarded(process: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    from nvflare.private.admin_defs import error_reply

    @functools.wraps(process)
    def guarded(request: Any, context: Any) -> Any:
        reason = refusal(request)
        return error_reply(reason) if reason else process(request, context)

    return guarded


def refusal(request: Any) -> str:
    """Why a request is not looked at any further; empty if it is. The library makes a folder of the kit out of a job's
    name and replaces what was there: a job called ``startup`` would take this site's key with it.
    """
    from nvflare.private.defs import RequestHeader, TrainingTopic

    job = request.get_header(RequestHeader.JOB_ID)
    if job is not None and not (isinstance(job, str) and JOB_ID.fullmatch(job)):
        return "no job can be called so"
    return _archive_refusal(request.body) if request.topic == TrainingTopic.DEPLOY else ""


def _archive_refusal(body: object) -> str:
    if not isinstance(body, bytes) or len(body) > MAX_APP_BYTES:
        return "the job is no archive, or too large"
    try:
        with ZipFile(io.BytesIO(body)) as archive:
            size = sum(one.file_size for one in archive.infolist())
    except BadZipFile:
        return "the job is no archive"
    return "the job is too large" if size > MAX_APP_BYTES else ""


def limit_jobs() -> None:
    """Start no more jobs at once than the owner wants, whatever the server asks for. The job validator says so to an
    honest server before; one that deploys many jobs first and starts them together meets this.
    """
    from nvflare.private.admin_defs import Message
    from nvflare.private.defs import ERROR_MSG_PREFIX
    from nvflare.private.fed.client.scheduler_cmds import StartJobProcessor

    start, lock = StartJobProcessor.process, threading.Lock()

    def process(self: Any, request: Any, context: Any) -> Any:
        with lock:
            reason = busy(os.environ.get(AT_ONCE), len(jobs_of(os.getpid())))
            if reason:
                return Message(topic=f"reply_{request.topic}", body=f"{ERROR_MSG_PREFIX}: {reason}")
            return start(self, request, context)

    StartJobProcessor.process = process


def main(path: str) -> None:
    """Turn this process into the parent process of a kit."""
    from isthmus.deploy.connection_gate import MEMBERS_FILE, ConnectionGate, install
    from isthmus.deploy.processes import exit_with_parent
    from isthmus.deploy.startup_kit import StartupKit

    exit_with_parent()
    kit = StartupKit.read(Path(path))
    module, config = (
        ("server.server_train", "fed_server.json")
        if kit.kind == "server"
        else ("client.client_train", "fed_client.json")
    )
    if kit.kind == "client":
        restrict_requests()
        limit_jobs()
    elif MEMBERS_FILE in os.environ:
        install(ConnectionGate(Path(os.environ[MEMBERS_FILE])))
    # For this process and its children: without the first each part of a message would be downloaded separately.
    os.environ |= {"NVFLARE_TENSOR_DOWNLOAD_CHUNK_SIZE": "0", "PYTHONSAFEPATH": "1"}
    settings = ["secure_train=true", f"org={kit.organisation}", "config_folder=config"]
    if kit.kind == "client":
        settings += [f"uid={kit.name}", f"heart_beat_interval={HEARTBEAT_INTERVAL}"]
    name = f"nvflare.private.fed.app.{module}"
    sys.argv = [name, "-m", str(kit.path), "-s", config, "--set", *settings]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1])
