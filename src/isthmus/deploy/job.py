"""The one job a site accepts: three files that name installed classes and nothing else.

The recipe of the library would add a folder with code, so the folder is written by hand. What a run is about is not in
it: the server's part reads the run folder it is told by name, a site is told by calls.
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
SERVER_APP = "isthmus.deploy.server.ServerApp"
SITE_APP = "isthmus.deploy.site.SiteApp"
SERVER_CLASSES = (CONTROLLER, SERVER_APP)
SITE_CLASSES = (EXECUTOR, SITE_APP)
SERVER_CONFIG = "config_fed_server.json"
CLIENT_CONFIG = "config_fed_client.json"
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
"""What a run may be called: it becomes a folder name, on the server and at every site."""


def client_config() -> dict[str, Any]:
    """What every site must be sent, to the letter."""
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
        "components": [{"id": "_client", "path": SITE_APP, "args": {}}],
        "task_data_filters": [],
        "task_result_filters": [],
    }


def server_config(runs: Sequence[str], attempt: int) -> dict[str, Any]:
    """What the server is sent; only the names of the runs and the number of the attempt vary."""
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
        "components": [{"id": "_server", "path": SERVER_APP, "args": {}}],
        "task_data_filters": [],
        "task_result_filters": [],
    }


def props_of(config: Mapping[str, Any]) -> tuple[tuple[str, ...], int] | None:
    """Runs and attempt of a server config, or None if it is anything else than :func:`server_config` writes."""
    try:
        props = config["workflows"][0]["args"]["props"]
        runs, attempt = tuple(props["runs"]), props["attempt"]
        fits = (
            type(attempt) is int
            and attempt >= 0
            and bool(runs)
            and all(type(run) is str and RUN_ID.fullmatch(run) for run in runs)
        )
        return (runs, attempt) if fits and server_config(runs, attempt) == config else None
    except (KeyError, IndexError, TypeError):
        return None


def write_job(folder: Path, runs: Sequence[str], attempt: int, sites: int) -> Path:
    """Write the job folder for an attempt at some runs."""
    for run in runs:
        check_run_id(run)
    config = folder / "app" / "config"
    config.mkdir(parents=True)
    meta = {"name": runs[0], "resource_spec": {}, "min_clients": sites, "deploy_map": {"app": ["@ALL"]}}
    (folder / "meta.json").write_text(json.dumps(meta))
    (config / SERVER_CONFIG).write_text(json.dumps(server_config(runs, attempt)))
    (config / CLIENT_CONFIG).write_text(json.dumps(client_config()))
    return folder


def check_run_id(run: object) -> str:
    """A run's name, if it can be one."""
    if not isinstance(run, str) or not RUN_ID.fullmatch(run):
        raise ConfigError(f"a run cannot be called {str(run)[:120]!r}: use letters, digits, - and _, at most 100")
    return run
