"""``isthmus run``: one method on one scenario."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.cli.console import ProgressDisplay, print_result

NAME = "run"

Dataset = Annotated[str | None, typer.Option(help="Data set; isthmus datasets lists them.")]
Partition = Annotated[
    str | None, typer.Option(help="How the data are divided between clients; isthmus partitions lists them.")
]
Clients = Annotated[int | None, typer.Option(help="Number of clients.")]
Split = Annotated[str | None, typer.Option(help="Train/validation/test, e.g. 10/10/80.")]
Rounds = Annotated[int | None, typer.Option(help="Rounds of the main phase.")]
Preset = Annotated[str | None, typer.Option(help="Paper whose settings apply.")]
Profile = Annotated[
    str | None, typer.Option(help="paper = as published, with our fixes; reference = as the published code did.")
]
Metric = Annotated[str | None, typer.Option(help="Score by which validation selects a round.")]
EngineName = Annotated[str | None, typer.Option("--engine", help="Where parties run: local, ray or nvflare.")]
Config = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Any setting, as key=value; may be repeated.")]
Plugin = Annotated[
    list[str] | None,
    typer.Option("--plugin", help="Own code to load first: ./file.py or an importable module; may be repeated."),
]
Out = Annotated[Path | None, typer.Option(help="Run folder (default: a new one under runs/).")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


def command(
    method: Annotated[
        str, typer.Argument(help="Method; isthmus methods lists them. Or a file of your own, ./file.py.")
    ],
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
    plugin: Plugin = None,
    out: Out = None,
    json_: Json = False,
) -> None:
    """Run a method and write a run folder."""
    from isthmus.experiments.config import resolve
    from isthmus.experiments.config_values import parse_override
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
        "plugins": plugin,
    }
    settings = resolve(method, flags, dict(parse_override(text) for text in set_ or ()), config)
    display = ProgressDisplay()
    run_and_print(display, lambda: start(settings, out, [display]), json_)


def run_and_print(
    display: ProgressDisplay, run: Callable[[], dict[str, Any]], as_json: bool, resume: str | None = None
) -> None:
    """Run under a progress display, then print the result; after Ctrl-C print how to continue (``resume``, default:
    by resuming the folder).
    """
    try:
        result = run()
    except KeyboardInterrupt:
        display.stop()
        resume = resume or f"isthmus resume {shlex.quote(str(display.folder))}"
        how = "nothing was written" if display.folder is None else f"continue with: {resume}"
        print(f"\nstopped; {how}", file=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        display.stop()
    if as_json:
        print(json.dumps(result))
    else:
        print_result(result)
