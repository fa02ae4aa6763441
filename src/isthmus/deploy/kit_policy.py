"""What the owner of a startup kit accepts: only the classes of our job, our job validator, no shipped code, no remote
commands, no log streaming, and state inside the kit instead of a shared temporary folder.

Written into ``local/`` of a kit, where it overrides what came with the kit, by ``isthmus server init`` and at every
start of a server or client: a kit that arrived with laxer rules is restricted too.
"""

from __future__ import annotations

import json
from typing import Any

from isthmus.deploy.job_template import CLIENT_CLASSES, SERVER_CLASSES
from isthmus.deploy.startup_kit import StartupKit
from isthmus.errors import ConfigError

VALIDATOR = "isthmus.deploy.job_validator.JobValidator"
CLIENT_TIMEOUT = 60
"""Seconds without a sign of life after which the server drops an organisation (NVIDIA FLARE's default: ten minutes)."""
RIGHTS = (
    "submit_job",
    "clone_job",
    "manage_job",
    "download_job",
    "view",
    "operate",
    "shell_commands",
    "byoc",
    "server-predeployed-flwr",
)
GRANTED = {"submit_job": "any", "manage_job": "n:submitter", "view": "any"}
"""What a ``lead`` may do; nobody may do anything else. By default ``project_admin`` would be allowed everything, code
included.
"""
MAX_CONNECTIONS = 1000
"""Of all sites at the server at a time; each organisation's own share is smaller (``connection_gate``)."""
MOST_JOBS = 16
"""Of NVIDIA FLARE, at once: more than the runs a hub lets go on (``run_queue``), so that the job after a crash need not
wait until the one before is seen to be gone.
"""
IDLE = {"grpc.server_handshake_timeout_ms": 10_000, "grpc.max_connection_idle_ms": 20_000}
"""How long a connection may take to prove who it is, and may then be without a stream; by default two minutes and for
ever. Each holds a file of the server.
"""
LOG_STREAMING_COMPONENTS = ("site_log_streamer", "log_receiver")


def write_policy(kit: StartupKit) -> None:
    """Write the rules into a kit; that of the coordinator has none."""
    if kit.kind == "admin":
        return
    kit.local.mkdir(exist_ok=True)
    roles = {role: dict.fromkeys(RIGHTS, "none") for role in ("project_admin", "org_admin", "lead", "member")}
    roles["lead"] |= GRANTED
    files = {
        "resources.json": _resources(kit),
        "authorization.json": {"format_version": "1.0", "permissions": roles},
        "log_config.json": _logging(kit),
        "comm_config.json": _connections(kit),
    }
    for name, content in files.items():
        temporary = kit.local / f".{name}.tmp"
        temporary.write_text(json.dumps(content, indent=2))
        temporary.rename(kit.local / name)


def _resources(kit: StartupKit) -> dict[str, Any]:
    resources = _default(kit, "resources.json")
    resources["class_list_enforcement_mode"] = "enforce"
    resources["class_allow_list"] = list(SERVER_CLASSES if kit.kind == "server" else CLIENT_CLASSES)
    resources["allow_log_streaming"] = False
    resources["app_validator"] = {"path": VALIDATOR, "args": {}}
    resources["components"] = [part for part in resources["components"] if part["id"] not in LOG_STREAMING_COMPONENTS]
    if kit.kind == "server":
        resources["servers"][0]["heart_beat_timeout"] = CLIENT_TIMEOUT
        resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(kit.path / "snapshots")
        for part in resources["components"]:
            if part["id"] == "job_manager":
                part["args"]["uri_root"] = str(kit.job_store)
            if part["id"] == "job_scheduler":
                part["args"]["max_jobs"] = MOST_JOBS
    return resources


def _connections(kit: StartupKit) -> dict[str, Any]:
    # Without the first the server gains a thread that waits a minute with every reply.
    config: dict[str, Any] = {"streaming_retry_timeout": 3.0}
    if kit.kind == "server":
        from nvflare.fuel.f3.drivers.grpc_driver import GRPC_DEFAULT_OPTIONS

        # Each connection holds a thread, two of a site in a run: NVIDIA FLARE's 100 would keep out a 51st site.
        options = [list(one) for one in GRPC_DEFAULT_OPTIONS] + [list(one) for one in IDLE.items()]
        config["grpc"] = {"max_workers": MAX_CONNECTIONS, "options": options}
    return config


def _logging(kit: StartupKit) -> dict[str, Any]:
    """The kit's logging, but of NVIDIA FLARE only warnings: it writes several lines for every call."""
    config = _default(kit, "log_config.json")
    config["loggers"] |= {"nvflare": {"level": "WARNING"}, "isthmus": {"level": "INFO"}}
    return config


def _default(kit: StartupKit, name: str) -> dict[str, Any]:
    """A file as the provisioner made it."""
    path = kit.local / f"{name}.default"
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        raise ConfigError(f"{path} is missing or damaged: ask for the kit again") from None
    return found
