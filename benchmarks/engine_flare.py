"""Calls of the engine nvflare, measured inside a job, for `engines.py`: the server's part takes the times, the site's
part answers.

The federation is one of ours except that its kits also let these two classes in.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine_echo import ECHO
from nvflare.collab import collab

from isthmus.deploy.admin_session import AdminSession
from isthmus.deploy.job_template import CLIENT_CONFIG, CLIENT_JOB, RUNS, SERVER_CONFIG, SERVER_JOB, write_job
from isthmus.deploy.loopback import LoopbackFederation
from isthmus.deploy.processes import exit_with_parent
from isthmus.deploy.provisioning import SERVER_KIT
from isthmus.deploy.server_job import CollabTransport
from isthmus.deploy.server_run import SitesEngine
from isthmus.deploy.startup_kit import StartupKit
from isthmus.federation.host import PartyHost
from isthmus.federation.wire import pack, unpack
from isthmus.seeds import Stream

SERVER, SITE = "engine_flare.BenchServer", "engine_flare.BenchSite"


class BenchSite:
    """One echoing client behind our host, and beside it the plainest function there can be."""

    def __init__(self) -> None:
        exit_with_parent()
        self._host = PartyHost({"client-0": None}, ECHO, None, Stream(0))

    @collab.publish
    def handle(self, run: str, kind: str, data: bytes) -> bytes:
        return pack(self._host.handle(kind, unpack(data)))

    @collab.publish
    def ping(self) -> bool:
        return True

    @collab.publish
    def echo(self, data: bytes) -> bytes:
        return data


class BenchServer:
    def __init__(self) -> None:
        exit_with_parent()

    @collab.main
    def main(self) -> str:
        from engines import Options, call_rows

        (site,) = collab.clients
        folder = Path(os.environ[RUNS])
        transport = CollabTransport({site.name: site})
        engine = SitesEngine({site.name: ["client-0"]}, ECHO, transport, "bench")
        options = Options(**json.loads((folder / "options.json").read_text()))
        rows = call_rows("nvflare", engine, lambda data: lambda: site(timeout=60.0).echo(data=data), options)
        with (folder / "rows.jsonl").open("w") as file:
            for row in rows:
                file.write(json.dumps(asdict(row)) + "\n")
                file.flush()
        (folder / "done").touch()
        transport.close()
        return "done"


def measure(options: Any) -> Iterator[dict[str, Any]]:
    """Rows of calls through a federation of one site."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "options.json").write_text(json.dumps(asdict(options)))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        made = LoopbackFederation(1, folder, folder / "state")
        try:
            _let_in(made.kits[SERVER_KIT])
            _let_in(made.kits["site-1"])
            made.start()
            job = write_job(folder / "bench-job", ["bench"], 0, ["site-1"])
            for file, ours, bench in ((SERVER_CONFIG, SERVER_JOB, SERVER), (CLIENT_CONFIG, CLIENT_JOB, SITE)):
                path = job / "app" / "config" / file
                path.write_text(path.read_text().replace(ours, bench))
            with AdminSession(made.coordinator) as admin:
                while "site-1" not in _connected(admin):
                    time.sleep(0.5)
                job_id = admin.call("submit_job", str(job))
                status = str(admin.call("wait_for_job", job_id, timeout=1200.0))
            if not (folder / "done").exists():
                raise RuntimeError(f"the benchmark's job ended early: {status}")
            yield from (json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines())
        finally:
            made.close()


def _connected(admin: AdminSession) -> list[str]:
    try:
        return admin.sites()
    except Exception:  # the server is not up yet
        return []


def _let_in(kit: StartupKit) -> None:
    path = kit.local / "resources.json"
    resources = json.loads(path.read_text())
    del resources["app_validator"]
    resources["class_allow_list"] = [*resources["class_allow_list"], SERVER, SITE]
    path.write_text(json.dumps(resources))
