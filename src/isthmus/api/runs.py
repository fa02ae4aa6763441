"""Start runs and continue them, from Python."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from isthmus.api.progress import display_for_python
from isthmus.api.result import Result
from isthmus.api.several import Results
from isthmus.errors import ConfigError
from isthmus.experiments.advice.auto import AUTO, run_auto
from isthmus.experiments.callbacks import Callback
from isthmus.experiments.config import Settings, resolve
from isthmus.experiments.run import by_name, start
from isthmus.experiments.run import resume as continue_run


@overload
def run(
    method: str,
    dataset: Any = ...,
    *,
    seed: int = ...,
    runs: None = ...,
    out: str | os.PathLike[str] | None = ...,
    config: str | os.PathLike[str] | None = ...,
    callbacks: Sequence[Callback] = ...,
    set: Mapping[str, Any] | None = ...,
    overwrite: bool = ...,
    quiet: bool = ...,
    **settings: Any,
) -> Result: ...
@overload
def run(method: str, dataset: Any = ..., *, seed: Sequence[int], **settings: Any) -> Results: ...
@overload
def run(method: str, dataset: Any = ..., *, runs: int, **settings: Any) -> Results: ...
def run(
    method: str,
    dataset: Any = None,
    *,
    seed: int | Sequence[int] | None = None,
    runs: int | None = None,
    out: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callback] = (),
    set: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> Result | Results:
    """Run a method and return its result: the keys of ``result.json``, and what else a finished run has to tell.

    Args:
        method: Name of a method (``isthmus methods`` lists them), or a file ``./mine.py`` with one; or ``auto``: the
            first three that ``isthmus advise`` names are run, and the best on validation is returned.
        dataset: A name that ``isthmus datasets`` lists, a PyG ``Data`` (or a dict of lists of them), or own tables
            (`isthmus.Tables`, or the path of their folder).
        seed: One seed, or several: then the run is repeated with each, and mean and spread are returned too.
        runs: So many seeds, from ``seed`` (or 0) on.
        out: Run folder; default a new one under ``runs/``. With several seeds each has a folder in it, ``seed-0``.
        config: TOML file with further settings.
        callbacks: Called during the run, see `isthmus.Callback`. With several seeds they see all runs.
        set: Settings whose keys are not Python names, e.g. ``{"checkpoint.every": 5}``.
        overwrite: Remove the run that is in ``out`` already, once the new one can begin.
        quiet: Show no progress. It is shown in terminals and notebooks only.
        settings: Any key of the run or the method, e.g. ``clients=10, lr=0.01``.

    Example:
        >>> import isthmus
        >>> result = isthmus.run("fedavg", "csbm:nodes=60", clients=2, rounds=2, out=getfixture("tmp_path"))
        >>> result["rounds"]
        2
    """
    named, file = by_name({**settings, "dataset": dataset}), None if config is None else Path(config)
    target = None if out is None else Path(out)
    several = seeds_of(seed, runs)
    if method == AUTO:
        if several is not None or callbacks or overwrite:
            raise ConfigError("run auto takes one seed, no callbacks and a new folder")
        return Result(run_auto({**named, "seed": seed}, set, file, target))
    if several is None:
        resolved = resolve(method, {**named, "seed": seed}, set, file)
        return run_settings(resolved, target, callbacks, overwrite=overwrite, quiet=quiet)
    each = [resolve(method, {**named, "seed": number}, set, file) for number in several]
    return run_several(each, target, callbacks, overwrite=overwrite, quiet=quiet)


def seeds_of(seed: int | Sequence[int] | None, runs: int | None = None) -> list[int] | None:
    """Seeds of a run that is repeated; None for a single one."""
    if runs is not None:
        if isinstance(runs, bool) or runs < 1:
            raise ConfigError(f"runs must be at least 1, got {runs}")
        if isinstance(seed, Iterable):
            raise ConfigError("seeds are given one by one and counted by runs: choose one of the two")
        first = 0 if seed is None else seed
        return list(range(first, first + runs))
    if isinstance(seed, str) or not isinstance(seed, Iterable):
        return None
    seeds = list(seed)
    if not seeds or len({*seeds}) < len(seeds):
        raise ConfigError(f"several seeds must be given, each once, got {seeds}")
    return seeds


def run_settings(
    settings: Settings,
    out: Path | None,
    callbacks: Sequence[Callback] = (),
    *,
    overwrite: bool = False,
    quiet: bool = True,
) -> Result:
    """Run resolved settings."""
    return Result(start(settings, out, [*display_for_python(quiet), *callbacks], overwrite=overwrite))


def run_several(
    each: Sequence[Settings],
    out: Path | None,
    callbacks: Sequence[Callback] = (),
    *,
    overwrite: bool = False,
    quiet: bool = True,
) -> Results:
    """Run the same settings with several seeds, one after the other."""
    folders = [None if out is None else out / f"seed-{settings.run.seed}" for settings in each]
    return Results(
        [
            run_settings(settings, folder, callbacks, overwrite=overwrite, quiet=quiet)
            for settings, folder in zip(each, folders, strict=True)
        ]
    )


def resume(
    path: str | os.PathLike[str],
    callbacks: Sequence[Callback] = (),
    *,
    rounds: int | str | None = None,
    quiet: bool = False,
    **given_again: Any,
) -> Result:
    """Continue a run from its newest checkpoint; of a finished run the result is returned again.

    Args:
        path: The run folder.
        callbacks: As of `run`.
        rounds: How many more rounds a finished run gets, 100 or ``+100``. It ends with the same bits as a run of
            that many rounds from the start.
        quiet: Show no progress.
        given_again: ``dataset``, ``partition`` and ``split`` that were handed over as objects when the run began.
    """
    return Result(continue_run(path, [*display_for_python(quiet), *callbacks], more=rounds, **given_again))
