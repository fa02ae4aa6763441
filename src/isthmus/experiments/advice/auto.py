"""``isthmus run auto``: the methods the advice names first, on the same scenario; validation picks one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from isthmus.data.datasets import with_defaults
from isthmus.errors import ConfigError, RunError
from isthmus.experiments.advice.facts import measure
from isthmus.experiments.advice.plans import Plan
from isthmus.experiments.advice.rules import Advice, Choice, advise
from isthmus.experiments.batch import Job, Outcome, run_all
from isthmus.experiments.config import Settings, read_file, resolve
from isthmus.experiments.run import default_folder
from isthmus.experiments.scenarios import scenario_of

AUTO = "auto"
FIRST = 3
"""How many of the named methods are run."""
FILE = "auto.json"
_EVERYWHERE = "fedavg"  # a method that takes every task: its settings of the run describe the scenario


def advice_for(
    flags: Mapping[str, Any], overrides: Mapping[str, Any] | None = None, file: Path | None = None
) -> Advice:
    """The advice for a scenario given by settings of a run, as `resolve` takes them. Nothing is trained."""
    given = {**(read_file(file) if file is not None else {}), **(overrides or {}), **flags}
    named = {key: value for key, value in given.items() if value is not None}
    if named.get("engine", "local") != "local":
        raise ConfigError("advice looks at all data in one place: leave --engine out")
    settings = resolve(_EVERYWHERE, {key: value for key, value in named.items() if key in _SCENARIO})
    metric = with_defaults(settings.run.dataset, named).get("metric")
    return advise(measure(scenario_of(settings), metric))


_SCENARIO = ("dataset", "partition", "clients", "split", "seed", "undirected", "link", "metric", "secure_sum")


def settings_of(plan: Plan, metric: str, given: Mapping[str, Any], file: Path | None = None) -> Settings:
    """Settings of one plan on a scenario; what is given, in a file or otherwise, wins over the plan."""
    from_file = read_file(file) if file is not None else {}
    return resolve(plan.method, {**plan.settings, "metric": metric, **from_file, **given})


def run_auto(
    flags: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    file: Path | None = None,
    out: Path | None = None,
    *,
    on_advice: Callable[[Advice], None] = lambda advice: None,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
) -> dict[str, Any]:
    """Run the first few methods of the advice and return the result of the one that validation prefers.

    Every run has a folder in ``out``, ``auto.json`` there says what was tried. Called again with the same folder,
    finished runs are used again and an unfinished one is continued.

    Returns:
        The result of the chosen run, and under ``auto`` what was tried with which validation score.
    """
    advice = advice_for(flags, overrides, file)
    on_advice(advice)
    given = {**(overrides or {}), **{key: value for key, value in flags.items() if value is not None}}
    jobs: dict[str, tuple[Choice, Job]] = {}
    refused: dict[str, str] = {}
    for choice in advice.choices:
        if len(jobs) == FIRST:
            break
        try:
            settings = settings_of(choice.plan, advice.facts.metric, given, file)
        except ConfigError as error:
            refused[choice.plan.name] = str(error)
            continue
        target = _folder(settings) if out is None else out
        out = target
        jobs[choice.plan.name] = (choice, Job(settings, target / choice.plan.name))
    if not jobs:
        raise ConfigError(f"no method takes these settings: {next(iter(refused.values()))}")
    outcomes = run_all([job for _, job in jobs.values()], workers=1, on_done=on_done)
    tried = [_tried(choice, outcomes[job.folder]) for choice, job in jobs.values()]
    scored = [row for row in tried if row["val"] is not None]
    if not scored:
        raise RunError(f"none of {', '.join(jobs)} could be run: {tried[0]['reason_failed']}")
    best = max(scored, key=lambda row: row["val"])
    result = outcomes[jobs[best["plan"]][1].folder].result
    assert result is not None and out is not None
    found = {**result, AUTO: {"chosen": best["plan"], "metric": advice.facts.metric, "tried": tried}}
    (out / FILE).write_text(json.dumps({**found[AUTO], "facts": advice.facts.to_json()}, indent=1) + "\n")
    return found


def _tried(choice: Choice, outcome: Outcome) -> dict[str, Any]:
    result = outcome.result
    return {
        "plan": choice.plan.name,
        "method": choice.plan.method,
        "why": choice.reason,
        "expected": choice.expected,
        "val": None if result is None else result["val"],
        "run_dir": str(outcome.job.folder),
        "reason_failed": outcome.reason,
    }


def _folder(settings: Settings) -> Path:
    return default_folder(replace(settings, run=replace(settings.run, method=AUTO)))
