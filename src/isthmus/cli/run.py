"""``isthmus run``: one method on one scenario."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.api.progress import ProgressDisplay
from isthmus.cli.console import print_result, print_results
from isthmus.cli.known import check_run
from isthmus.experiments.config_values import parse_override

NAME = "run"

Dataset = Annotated[str | None, typer.Option(help="Data set; isthmus datasets lists them.")]
Partition = Annotated[
    str | None, typer.Option(help="How the data are divided between clients; isthmus partitions lists them.")
]
Clients = Annotated[int | None, typer.Option(help="Number of clients.")]
Split = Annotated[
    str | None,
    typer.Option(help="Train/validation/test in percent, e.g. 10/10/80, or a rule."),
]
Rounds = Annotated[int | None, typer.Option(help="Rounds of the main phase.")]
Preset = Annotated[str | None, typer.Option(help="Settings to start from: general, or a paper's, e.g. fedstruct.")]
Profile = Annotated[
    str | None, typer.Option(help="paper = as published, with corrections; reference = as the published code did.")
]
Metric = Annotated[str | None, typer.Option(help="Score to report and to pick a round by, e.g. auprc.")]
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
        str, typer.Argument(help="Method; isthmus methods lists them. Or a file of your own, ./file.py; or auto.")
    ],
    dataset: Dataset = None,
    partition: Partition = None,
    clients: Clients = None,
    split: Split = None,
    seed: Annotated[str | None, typer.Option(help="Seed of the run; several, as 0,1,2, give one run each.")] = None,
    rounds: Rounds = None,
    preset: Preset = None,
    profile: Profile = None,
    metric: Metric = None,
    engine: EngineName = None,
    config: Config = None,
    set_: Set = None,
    plugin: Plugin = None,
    runs: Annotated[int | None, typer.Option(help="Number of seeds, counting up from --seed (or 0).", min=1)] = None,
    out: Out = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that is in --out already.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    json_: Json = False,
) -> None:
    """Run a method and write a run folder."""
    overrides = dict(parse_override(text) for text in set_ or ())
    chosen = _seeds(seed)
    check_run([method], dataset, overrides, config, plugin, preset)
    from isthmus.api.runs import run_several, seeds_of
    from isthmus.experiments.advice.auto import AUTO
    from isthmus.experiments.config import resolve
    from isthmus.experiments.run import start

    flags = {
        "dataset": dataset,
        "partition": partition,
        "clients": clients,
        "split": split,
        "rounds": rounds,
        "preset": preset,
        "profile": profile,
        "metric": metric,
        "engine": engine,
        "plugins": plugin,
    }
    several = seeds_of(chosen, runs)
    if method == AUTO:
        _run_auto({**flags, "seed": chosen}, overrides, config, out, several=several is not None, json_=json_)
        return
    display = ProgressDisplay()
    shown = [] if quiet else [display]
    if several is None:
        settings = resolve(method, {**flags, "seed": chosen}, overrides, config)
        run_and_print(display, lambda: start(settings, out, shown, overwrite=overwrite), json_)
        return
    each = [resolve(method, {**flags, "seed": number}, overrides, config) for number in several]
    run_and_print(display, lambda: run_several(each, out, shown, overwrite=overwrite), json_)


def _run_auto(
    flags: dict[str, Any],
    overrides: dict[str, Any],
    config: Path | None,
    out: Path | None,
    *,
    several: bool,
    json_: bool,
) -> None:
    """Let the advice choose: a line per method that is tried, then the result of the best."""
    from isthmus.api.progress import percent
    from isthmus.errors import ConfigError
    from isthmus.experiments.advice.auto import run_auto

    if several:
        raise ConfigError("run auto takes one seed: give --seed a single number and leave --runs out")
    found = run_auto(
        flags,
        overrides,
        config,
        out,
        on_done=lambda done: print(
            f"{done.job.folder.name}: "
            + (done.reason if done.result is None else f"validation {percent(done.result['val'])}"),
            file=sys.stderr,
        ),
    )
    if json_:
        print(json.dumps(found))
        return
    print_result(found)
    print(
        f"\nchosen on validation: {found['auto']['chosen']}, of {', '.join(r['plan'] for r in found['auto']['tried'])}"
    )


def _seeds(text: str | None) -> int | list[int] | None:
    """``3``, or several as ``0,1,2``."""
    from isthmus.errors import ConfigError

    if text is None:
        return None
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--seed takes a number, or several as 0,1,2, got {text!r}") from None
    return seeds if len(seeds) > 1 else seeds[0]


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
    elif "results" in result:
        print_results(result)
    else:
        print_result(result)
