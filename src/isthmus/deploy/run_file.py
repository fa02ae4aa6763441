"""A run file, as ``isthmus submit`` takes it, resolved: the same at the coordinator and at every organisation that
wants to see the contract it leads to.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from isthmus.data.graphscenario import task_of
from isthmus.data.own_dataset import SITE_TABLES
from isthmus.errors import ConfigError
from isthmus.experiments.config import Settings, read_file, resolve
from isthmus.experiments.scenarios import DEFAULTS


def resolve_run_file(file: Path, *, own_code: bool = True) -> Settings:
    """Settings of a run between organisations.

    ``own_code=False`` refuses a file that names code: that of somebody else must not run here.
    """
    keys = read_file(file)
    if not isinstance(keys.get("method"), str):
        raise ConfigError(f'{file} does not say which method: add e.g. method = "fedavg"')
    if not own_code and (keys.get("plugins") or "/" in str(keys.get("backbone", ""))):
        raise ConfigError(f"{file} names code of its own: its contract is derived when the run is joined")
    settings = resolve(keys["method"], {"engine": "nvflare"}, None, file)
    run = settings.run
    if settings.method.pooled:
        raise ConfigError(f"{run.method} needs all data in one place: run it with `isthmus run {run.method}`")
    if run.execution == "cohort" or run.transcript or run.nvflare_sites is not None:
        raise ConfigError("execution=cohort, transcript and nvflare.sites are for simulations: leave them out")
    if run.dataset == SITE_TABLES:
        return replace(settings, run=replace(run, execution="each"))
    # What data a run is about is agreed with every organisation: what the file does not say is not left to a preset.
    partition, split = DEFAULTS[task_of(run.dataset)]
    if keys.get("scale", "none") != "none":
        raise ConfigError(f"{file}: public data sets are used as they are between organisations: leave scale out")
    run = replace(run, execution="each", undirected=run.undirected and "undirected" in keys, scale="none")
    return replace(settings, run=replace(run, partition=run.partition or partition, split=run.split or split))
