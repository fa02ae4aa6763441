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
from isthmus.cli.options import Json, RunOptions, takes

NAME = "run"


@takes(RunOptions)
def command(
    method: Annotated[
        str, typer.Argument(help="Method; isthmus methods lists them. Or a file of your own, ./file.py; or auto.")
    ],
    *,
    options: RunOptions,
    seed: Annotated[str | None, typer.Option(help="Seed of the run; several, as 0,1,2, give one run each.")] = None,
    runs: Annotated[int | None, typer.Option(help="Number of seeds, counting up from --seed (or 0).", min=1)] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder (default: a new one under runs/).")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that is in --out already.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    json_: Json = False,
) -> None:
    """Run a method and write a run folder."""
    chosen = _seeds(seed)
    options.check([method])
    from isthmus.api.runs import run_several, seeds_of
    from isthmus.experiments.advice.auto import AUTO
    from isthmus.experiments.config import resolve
    from isthmus.experiments.run import start

    overrides, config = options.overrides, options.config
    several = seeds_of(chosen, runs)
    if method == AUTO:
        _run_auto({**options.flags, "seed": chosen}, overrides, config, out, several=several is not None, json_=json_)
        return
    display = ProgressDisplay()
    shown = [] if quiet else [display]
    each = [
        resolve(method, {**options.flags, "seed": number}, overrides, config)
        for number in ([chosen] if several is None else several)
    ]
    if several is None:
        run_and_print(display, lambda: start(each[0], out, shown, overwrite=overwrite), json_)
        return
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
