"""A method's variants of the general preset: every one is run, validation keeps the best, and the run says which.

``variant=auto`` (where a preset has variants of the method) tries them all in memory, one after the other, and then
runs the chosen one as if it had been named. A variant sets what the method or the run has (how arcs are read, say),
save what own data settle themselves. A setting of a variant given by hand leaves nothing to choose: the first variant
is taken, with that setting. Between organisations nothing is tried, since every trial would tell more: there the first
variant is taken unless one is named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, cast

from isthmus.data.graphscenario import task_of
from isthmus.data.own_dataset import kind_of
from isthmus.experiments.config_values import coerce, keys_of
from isthmus.experiments.presets import load_preset

logger = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"
TRIAL_ROUNDS = 100
"""Most rounds of a trial."""


def settled_by_data(dataset: str) -> tuple[str, ...]:
    """Settings of a scenario that own data settle themselves."""
    settled = ("partition", "clients")
    tables = (*settled, "split", "undirected", "scale")
    return {None: (), "tables": tables, "site tables": tables}.get(kind_of(dataset), settled)


def with_variant(settings: Any, name: str) -> Any:
    """Settings with ``variant=auto`` as those of one variant; what only other variants set is as without them."""
    run, config = settings.run, settings.method_config
    preset = load_preset(run.preset)
    values = preset.values(
        {"method": run.method, "task": task_of(run.dataset), "profile": run.profile, "variant": name}
    )
    varied = varied_keys(settings)
    run = replace(run, variant=name, **_changes(type(run), values, varied))
    return replace(settings, run=run, method_config=replace(config, **_changes(type(config), values, varied)))


def varied_keys(settings: Any) -> set[str]:
    """The settings in which the variants of the method differ."""
    variants = load_preset(settings.run.preset).variants(settings.run.method)
    return {key for values in variants.values() for key in values} - set(settled_by_data(settings.run.dataset))


def _changes(config_type: type, values: Mapping[str, Any], varied: set[str]) -> dict[str, Any]:
    """Fields of a config that variants set, with the values of one; its defaults where that one sets none."""
    keys, defaults = keys_of(config_type), {field.name: field.default for field in fields(cast(Any, config_type))}
    return {
        keys[key][0]: coerce(values[key], keys[key][1], key) if key in values else defaults[keys[key][0]]
        for key in varied
        if key in keys
    }


def chosen(settings: Any, score: Callable[[Any], float | None]) -> tuple[Any, Mapping[str, float | None]]:
    """The settings of the variant that scores best on validation, and the scores of all; ties go to the earlier.

    Args:
        score: Runs settings and returns the validation score of the round it keeps.
    """
    if settings.run.variant != AUTO:
        return settings, {}
    run = settings.run
    trials = {name: with_variant(settings, name) for name in load_preset(run.preset).variants(run.method)}
    scores = {name: score(_short(trial)) for name, trial in trials.items()}
    best = max(scores, key=lambda name: -1.0 if scores[name] is None else float(scores[name] or 0.0))
    told = ", ".join(f"{name} {'-' if value is None else format(value, '.4f')}" for name, value in scores.items())
    logger.info("variant %s of %s, by %s on validation (%s)", best, run.method, run.metric, told)
    return trials[best], scores


def _short(settings: Any) -> Any:
    """The same for a trial: no more than `TRIAL_ROUNDS` rounds."""
    return replace(settings, run=replace(settings.run, rounds=min(settings.run.rounds, TRIAL_ROUNDS)))


def first_variant(settings: Any) -> Any:
    """Settings for a place where nothing can be tried."""
    if settings.run.variant != AUTO:
        return settings
    return with_variant(settings, next(iter(load_preset(settings.run.preset).variants(settings.run.method))))
