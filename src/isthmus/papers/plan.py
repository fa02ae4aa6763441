"""From a cell to settings, to a command a person can type, and to a run folder."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.errors import ConfigError
from isthmus.experiments.config import Settings, resolve
from isthmus.papers.cells import Cell

_SCENARIO = ("dataset", "partition", "clients", "split", "metric")
_UNKNOWN = re.compile(r"unknown (?:value for )?(?P<what>\w+) '(?P<name>[^']*)': ")  # the wording of `errors.unknown`
_FLAGS = ("dataset", "partition", "clients", "split", "rounds", "preset", "profile", "metric")


def cell_settings(cell: Cell, seed: int) -> Settings:
    """The settings of one run of a cell; a ConfigError if there can be none here (`why_not` says so in words)."""
    settings = _resolved(json.dumps(cell.run, sort_keys=True))
    return dataclasses.replace(settings, run=dataclasses.replace(settings.run, seed=seed))


@functools.cache
def _resolved(run: str) -> Settings:
    """Cells share runs, and a paper has hundreds of cells."""
    values = json.loads(run)
    return resolve(values.pop("method"), values)


def why_not(cell: Cell) -> str | None:
    """Why a cell cannot be run with what is here, data apart; None if it can."""
    if cell.skip is not None:
        return cell.skip
    try:
        cell_settings(cell, 0)
    except ConfigError as error:
        # A published cell is no slip of the pen: what it names is still to come, and what else is allowed would fill a
        # page.
        named = _UNKNOWN.match(str(error))
        return f"{named['what'].replace('key', 'setting')} {named['name']} is not here yet" if named else str(error)
    return None


def cell_command(cell: Cell, seed: int | None = None) -> str:
    """The exact command of one run of a cell; without a seed for the command of any of them."""
    if "method" not in cell.run:
        return ""
    words = ["isthmus", "run", cell.run["method"]]
    for key in _FLAGS:
        if key in cell.run:
            words += [f"--{key}", str(cell.run[key])]
    for key, value in cell.run.items():
        if key not in (*_FLAGS, "method"):
            words += ["--set", f"{key}={json.dumps(value) if not isinstance(value, str) else value}"]
    return shlex.join([*words, "--seed", "SEED" if seed is None else str(seed)])


def folder_of(settings: Settings, out: Path) -> Path:
    """``<out>/<method>-<data set>-<partition>-k<clients>-<digest>-s<seed>``: same settings, same folder.

    The digest covers the scenario and what differs from the defaults, so a setting added to Isthmus later leaves
    finished runs valid.
    """
    run = settings.run
    digest = hashlib.sha256(json.dumps(changed(settings), sort_keys=True, default=str).encode()).hexdigest()[:8]
    known = [run.partition, None if run.clients is None else f"k{run.clients}"]
    name = "-".join([run.method, run.dataset.lower(), *(part for part in known if part is not None)])
    stem = "".join(character if character.isalnum() or character in "-_." else "_" for character in name)[:80]
    return out / f"{stem}-{digest}-s{run.seed}"


def changed(settings: Settings) -> Mapping[str, Any]:
    """The scenario as far as it was given, and settings that differ from their defaults; without the seed."""
    kept: dict[str, Any] = {"score": settings.score}
    kept |= {key: getattr(settings.run, key) for key in _SCENARIO if getattr(settings.run, key) is not None}
    for config in (settings.run, settings.method_config):
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if field.name != "seed" and field.name not in kept and value != field.default:
                kept[field.name] = list(value) if isinstance(value, tuple) else value
    return kept
