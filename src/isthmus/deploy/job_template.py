"""The only job a federation accepts: three files that name installed classes and nothing else.

Written by ``isthmus submit`` for every attempt at a run, checked by ``job_validator`` on the server and at each site.
NVIDIA FLARE's own job recipe would add a folder with code, so the files are written here. They hold no settings: the
server job reads those from the run folder of the given name and sends them to the sites.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isthmus.errors import ConfigError

CONTROLLER = "nvflare.collab.runtime.controller.CollabController"
EXECUTOR = "nvflare.collab.runtime.executor.CollabExecutor"
SERVER_JOB = "isthmus.deploy.server_job.ServerJob"
CLIENT_JOB = "isthmus.deploy.client_job.ClientJob"
SERVER_CLASSES = (CONTROLLER, SERVER_JOB)
CLIENT_CLASSES = (EXECUTOR, CLIENT_JOB)
SERVER_CONFIG = "config_fed_server.json"
CLIENT_CONFIG = "config_fed_client.json"
RUNS = "ISTHMUS_RUNS"
"""Environment variable of the server's processes: the folder that holds the run folders."""
SITE_SETTINGS = "ISTHMUS_SITE"
"""Environment variable of a client's processes: its ``client.toml``."""
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
"""Allowed names of runs: each becomes a folder name, on the server and at every site."""
RESERVED = ("contracts",)
"""Folders of a site's state that are no run's."""
REFUSED = "isthmus job validator"
"""First words of a refusal by ``job_validator``; a further attempt would be refused too."""


AT_ONCE = "ISTHMUS_AT_ONCE"
"""Environment variable of a client's parent process: most jobs it runs at once."""
BUSY = "isthmus site busy"
"""First words of the refusal of a site that runs as many; another attempt may be accepted."""


def busy(most: str | None, running: int) -> str:
    """Why a site starts no further job now; empty if it does."""
    return f"{BUSY}: it runs {running} at once, its limit (--at-once)" if most and running >= int(most) else ""


def client_config() -> dict[str, Any]:
    """The client config every site expects, exactly."""
    return {
        "format_version": 2,
        "executors": [
            {
                "tasks": ["*"],
                "executor": {
                    "path": EXECUTOR,
                    "args": {"client_obj_id": "_client", "collab_obj_ids": [], "props": {}},
                },
            }
        ],
        "components": [{"id": "_client", "path": CLIENT_JOB, "args": {}}],
        "task_data_filters": [],
        "task_result_filters": [],
    }


def server_config(runs: Sequence[str], attempt: int) -> dict[str, Any]:
    """The server config; only the names of the runs and the number of the attempt vary."""
    return {
        "format_version": 2,
        "workflows": [
            {
                "id": "controller",
                "path": CONTROLLER,
                "args": {
                    "server_obj_id": "_server",
                    "collab_obj_ids": [],
                    "sync_task_timeout": 60,
                    "props": {"runs": list(runs), "attempt": attempt},
                },
            }
        ],
        "components": [{"id": "_server", "path": SERVER_JOB, "args": {}}],
        "task_data_filters": [],
        "task_result_filters": [],
    }


def parse_server_config(config: Mapping[str, Any]) -> tuple[tuple[str, ...], int] | None:
    """Runs and attempt of a server config, or None if it differs from what :func:`server_config` writes."""
    try:
        props = config["workflows"][0]["args"]["props"]
        runs, attempt = tuple(props["runs"]), props["attempt"]
        valid = (
            type(attempt) is int
            and attempt >= 0
            and bool(runs)
            and all(type(run) is str and RUN_NAME.fullmatch(run) for run in runs)
        )
        return (runs, attempt) if valid and server_config(runs, attempt) == config else None
    except (KeyError, IndexError, TypeError):
        return None


def write_job(folder: Path, runs: Sequence[str], attempt: int, sites: Sequence[str]) -> Path:
    """Write the job folder for an attempt at some runs, for these sites and no others that may be connected."""
    for run in runs:
        check_run_name(run)
    config = folder / "app" / "config"
    config.mkdir(parents=True)
    meta: dict[str, Any] = {"name": runs[0], "resource_spec": {}, "min_clients": len(sites)}
    meta["deploy_map"] = {"app": ["server", *sites]}
    (folder / "meta.json").write_text(json.dumps(meta))
    (config / SERVER_CONFIG).write_text(json.dumps(server_config(runs, attempt)))
    (config / CLIENT_CONFIG).write_text(json.dumps(client_config()))
    return folder


def check_run_name(run: object) -> str:
    """The name of a run, if it is allowed."""
    if not isinstance(run, str) or not RUN_NAME.fullmatch(run):
        raise ConfigError(f"a run cannot be called {str(run)[:120]!r}: use letters, digits, - and _, at most 100")
    if run.lower() in RESERVED:
        raise ConfigError(f"a run cannot be called {run!r}, which sites keep other things under: choose another name")
    return run
