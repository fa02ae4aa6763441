"""The rules written into a startup kit."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("nvflare", reason="the engine nvflare is an extra")

from isthmus.deploy.job_template import CLIENT_CLASSES
from isthmus.deploy.kit_policy import IDLE, MAX_CONNECTIONS, MOST_JOBS, write_policy
from isthmus.deploy.run_queue import AT_ONCE
from isthmus.deploy.startup_kit import StartupKit


def test_only_our_job_is_allowed(kits: dict[str, StartupKit]) -> None:
    kit = kits["bank-a"]
    resources = json.loads((kit.local / "resources.json").read_text())
    assert resources["class_allow_list"] == list(CLIENT_CLASSES)
    assert resources["class_list_enforcement_mode"] == "enforce"
    assert resources["allow_log_streaming"] is False
    assert resources["app_validator"]["path"] == "isthmus.deploy.job_validator.JobValidator"
    assert "site_log_streamer" not in {part["id"] for part in resources["components"]}
    rights = json.loads((kit.local / "authorization.json").read_text())["permissions"]
    for role in rights.values():
        assert [role[right] for right in ("byoc", "shell_commands", "operate", "clone_job", "download_job")] == [
            "none"
        ] * 5
    assert not list(kit.startup.glob("*.sh")), "they would bypass parent_process"
    server, home = json.loads((kits["server"].local / "resources.json").read_text()), str(kits["server"].path)
    roots = [server["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"]]
    roots += [part["args"]["uri_root"] for part in server["components"] if "uri_root" in part.get("args", {})]
    assert len(roots) == 2 and all(root.startswith(home) for root in roots), (
        "state must not be in a folder that all users share"
    )


def test_limits_of_the_server(kits: dict[str, StartupKit]) -> None:
    kit = kits["server"]
    resources = json.loads((kit.local / "resources.json").read_text())
    (scheduler,) = [part for part in resources["components"] if part["id"] == "job_scheduler"]
    assert scheduler["args"]["max_jobs"] == MOST_JOBS > AT_ONCE, "the queue of the hub decides, not this one"
    given = json.loads((kit.local / "comm_config.json").read_text())["grpc"]
    options = dict(given["options"])
    assert given["max_workers"] == MAX_CONNECTIONS
    assert {name: options[name] for name in IDLE} == IDLE, "an idle connection does not stay"


def test_laxer_rules_are_overwritten(kits: dict[str, StartupKit]) -> None:
    kit = kits["bank-b"]
    path = kit.local / "resources.json"
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | {"class_allow_list": ["*"]}))
    write_policy(kit)
    assert path.read_text() == before
