"""``isthmus status``: which organisations are connected, and how far the runs are."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.cli.console import print_table
from isthmus.errors import no_federation

NAME = "status"


def command(
    federation: Annotated[Path, typer.Argument(help="The federation's folder.")] = Path("federation"),
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a federation: server, organisations, runs. Exit code 4 if the server does not answer."""
    if not (federation / "federation.toml").is_file():
        raise no_federation(federation)
    from isthmus.deploy.federation_folder import FederationFolder
    from isthmus.errors import RunError

    found = FederationFolder.read(federation).status()
    if json_:
        print(json.dumps(found))
    else:
        _print_status(found)
    if not found["server"]:
        raise RunError(f"the server does not answer: start it with isthmus server start {federation}, on its own host")


def _print_status(found: dict[str, Any]) -> None:
    server = "answers" if found["server"] else f"does not answer ({found['reason']})"
    seen, days = found["last_seen"], found["certificate_days"]
    rows = [
        (name, state, "-" if seen.get(name) is None else f"{seen[name]:.0f} s ago", _days(days.get(name)))
        for name, state in found["organisations"].items()
    ]
    print_table(("party", "state", "last seen", "certificate"), [("server", server, "", ""), *rows])
    if found["runs"]:
        print()
        rows = [(run["run"], str(run["rounds"]), str(run["of"] or "-"), _state(run)) for run in found["runs"]]
        print_table(("run", "rounds", "of", "state"), rows)


def _days(days: float | None) -> str:
    return "none" if days is None else f"{days:.0f} days"


def _state(run: dict[str, Any]) -> str:
    """A run's state; while it waits for somebody or goes on without, for whom and since when."""
    if run["queue"] is not None:
        return f"number {run['queue']} in the queue"
    if run["state"] == "waiting" and run["waiting_for"]:
        return f"waiting for {', '.join(f'{name} since {_clock(t)}' for name, t in run['waiting_for'].items())}"
    if run["state"] == "running" and run.get("missing"):
        lost = [f"{name} since step {step:.0f} at {_clock(t)}" for name, (step, t) in run["missing"].items()]
        return f"running without {', '.join(lost)}"
    return str(run["state"])


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
