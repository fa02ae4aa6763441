"""``isthmus status``: which organisations are connected, and how far the runs are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.cli.console import print_table

NAME = "status"


def command(
    federation: Annotated[Path, typer.Argument(help="The federation's folder.")] = Path("federation"),
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a federation: server, organisations, runs. Exit code 4 if the server does not answer."""
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
    print_table(("party", "state"), [("server", server), *found["organisations"].items()])
    if found["runs"]:
        print()
        rows = [(run["run"], str(run["rounds"]), str(run["of"] or "-"), run["state"]) for run in found["runs"]]
        print_table(("run", "rounds", "of", "state"), rows)
