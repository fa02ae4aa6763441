"""``isthmus status``: who is connected, and where the runs stand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.console import print_table

NAME = "status"


def command(
    federation: Annotated[Path, typer.Argument(help="The federation's folder.")] = Path("federation"),
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a federation: server, organisations, runs."""
    from isthmus.deploy.headquarters import Headquarters

    found = Headquarters.read(federation).status()
    if json_:
        print(json.dumps(found))
        return
    server = "answers" if found["server"] else f"does not answer ({found['reason']})"
    print_table(("party", "state"), [("server", server), *found["organisations"].items()])
    if found["runs"]:
        print()
        rows = [(run["run"], str(run["rounds"]), str(run["of"] or "-"), run["state"]) for run in found["runs"]]
        print_table(("run", "rounds", "of", "state"), rows)
