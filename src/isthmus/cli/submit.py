"""``isthmus submit``: run a method between organisations."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from isthmus.api.progress import ProgressDisplay
from isthmus.cli.options import Json
from isthmus.cli.run import run_and_print
from isthmus.errors import ConfigError, no_federation

NAME = "submit"

Federation = Annotated[Path, typer.Option(help="The federation's folder.")]


def command(
    run: Annotated[
        Path | None, typer.Argument(help="TOML file: method, dataset, clients and any other setting.")
    ] = None,
    federation: Federation = Path("federation"),
    again: Annotated[str | None, typer.Option(help="Continue a run that was submitted before, by its name.")] = None,
    predict: Annotated[
        str | None, typer.Option(help="Predict with the models a finished run left at the organisations, by its name.")
    ] = None,
    for_: Annotated[
        str | None,
        typer.Option("--for", help="Who submits (default: you); they take turns in the queue."),
    ] = None,
    json_: Json = False,
) -> None:
    """Submit a run and wait for its result; after a crash it is submitted again and continues from the newest
    checkpoint.
    """
    if (run or again or predict) and not (federation / "federation.toml").is_file():
        raise no_federation(federation)
    from isthmus.deploy.federation_folder import FederationFolder
    from isthmus.deploy.processes import user

    by = for_ or user()
    if predict is not None and run is None and again is None:
        folder = FederationFolder.read(federation)
        name = folder.create_prediction(predict)
        print(f"prediction {name}", file=sys.stderr)
        result = folder.submit(name, by=by)
        if json_:
            print(json.dumps(result))
            return
        print(f"{', '.join(result['clients'])}: predictions are at each of them, in STATE/{name}/predictions.csv")
        return
    if (run is None) == (again is None):
        raise ConfigError("give a run file, e.g. `isthmus submit run.toml`, or the name of an earlier run with --again")
    folder = FederationFolder.read(federation)
    silent = sorted(set(folder.config.organisations) - folder.offers().keys())
    if run is not None and silent:
        print(
            f"no offer of {', '.join(silent)} in {federation / 'offers'}: they are asked only when the run begins "
            "(`isthmus client offer` prints one)",
            file=sys.stderr,
        )
    name = folder.create_run(run) if run is not None else str(again)
    resume = f"isthmus submit --federation {shlex.quote(str(federation))} --again {name}"
    print(f"run {name}; after an interruption: {resume}", file=sys.stderr)
    contract, approve = folder.contract(name)
    if contract is not None:
        print(f"contract {contract[:16]}: every organisation derives the same one, or refuses", file=sys.stderr)
    if approve:
        print(f"somebody must have approved it at {', '.join(approve)}", file=sys.stderr)
    display = ProgressDisplay()
    run_and_print(display, lambda: folder.submit(name, [display], by), json_, resume)
