"""``isthmus run``: one method on one scenario."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.cli.console import Watch, print_result

NAME = "run"

Dataset = Annotated[str | None, typer.Option(help="Data set; isthmus datasets lists them.")]
Partition = Annotated[str | None, typer.Option(help="How the graph is split between clients.")]
Clients = Annotated[int | None, typer.Option(help="Number of clients.")]
Split = Annotated[str | None, typer.Option(help="Train/validation/test, e.g. 10/10/80.")]
Rounds = Annotated[int | None, typer.Option(help="Rounds of the main phase.")]
Preset = Annotated[str | None, typer.Option(help="Paper whose settings apply.")]
Profile = Annotated[
    str | None, typer.Option(help="paper = as published, with our fixes; reference = as the published code did.")
]
Metric = Annotated[str | None, typer.Option(help="Score that validation picks rounds by.")]
EngineName = Annotated[str | None, typer.Option("--engine", help="Where parties run.")]
Config = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Any setting, as key=value; may be repeated.")]
Out = Annotated[Path | None, typer.Option(help="Run folder (default: a new one under runs/).")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


def command(
    method: Annotated[str, typer.Argument(help="Method; isthmus methods lists them.")],
    dataset: Dataset = None,
    partition: Partition = None,
    clients: Clients = None,
    split: Split = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run.")] = None,
    rounds: Rounds = None,
    preset: Preset = None,
    profile: Profile = None,
    metric: Metric = None,
    engine: EngineName = None,
    config: Config = None,
    set_: Set = None,
    out: Out = None,
    json_: Json = False,
) -> None:
    """Run a method and leave a run folder."""
    from isthmus.experiments.config import parse_override, resolve
    from isthmus.experiments.run import start

    flags = {
        "dataset": dataset,
        "partition": partition,
        "clients": clients,
        "split": split,
        "seed": seed,
        "rounds": rounds,
        "preset": preset,
        "profile": profile,
        "metric": metric,
        "engine": engine,
    }
    settings = resolve(method, flags, dict(parse_override(text) for text in set_ or ()), config)
    watch = Watch()
    show(watch, lambda: start(settings, out, [watch]), json_)


def show(watch: Watch, play: Any, as_json: bool, again: str | None = None) -> None:
    """Play a run under a progress display, then print its result; Ctrl-C says how to go on (``again``, or by resuming
    the folder).
    """
    try:
        result = play()
    except KeyboardInterrupt:
        watch.stop()
        again = again or f"isthmus resume {shlex.quote(str(watch.folder))}"
        how = "nothing was written" if watch.folder is None else f"continue with: {again}"
        print(f"\nstopped; {how}", file=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        watch.stop()
    if as_json:
        print(json.dumps(result))
    else:
        print_result(result)
