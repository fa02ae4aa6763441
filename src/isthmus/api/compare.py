"""Several methods on one scenario, with the same seeds and partitions for all."""

from __future__ import annotations

import json
import logging
import os
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from isthmus.api.batch import Runner, raise_failure, runner
from isthmus.api.model_words import model_words
from isthmus.api.progress import say, size, watched
from isthmus.api.result import Result, load
from isthmus.api.several import SPREAD
from isthmus.api.table import Cell, Table, counted, scored
from isthmus.errors import ConfigError, DataError, unknown
from isthmus.experiments.batch import Job, Outcome
from isthmus.experiments.config import Settings, allowed_keys, resolve
from isthmus.experiments.config_values import parse_override
from isthmus.experiments.run import by_name
from isthmus.metrics.gain import Gain, Scored, gains
from isthmus.metrics.scores import at_score_round
from isthmus.metrics.spread import client_stds, spread
from isthmus.papers import folder_of
from isthmus.report import write_report
from isthmus.report.runs import read_run
from isthmus.report.words import gain_rules

logger = logging.getLogger(__name__)


class Comparison(dict[str, Any]):
    """What a comparison found, the mapping of ``compare.json``: ``scenario``, ``runs``, ``out``, ``report`` and
    ``methods``, a row each.
    """

    @cached_property
    def results(self) -> dict[str, list[Result]]:
        """The results of each method, by seed."""
        return {row["method"]: [load(folder) for folder in row["folders"]] for row in self["methods"]}

    def table(self) -> Table:
        """Scores, differences to the first method, sizes and bytes."""
        return _table(self)

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def compare(
    methods: Sequence[str],
    dataset: Any = None,
    *,
    runs: int = 3,
    jobs: int = 1,
    out: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
    set: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Comparison:
    """Run several methods on one scenario; finished runs in the folder are used, begun ones continued.

    Args:
        methods: Names, with own settings as in ``local:backbone=mlp``; differences are to the first.
        dataset, config, set, settings: As of `isthmus.run`, for all methods.
        runs: Seeds, the same for all.
        jobs: Runs at a time. More than one are other processes, which know neither data nor methods and backbones that
            exist in this one only.
        out: Folder of runs and report; default: one under ``runs/compare``.
        quiet: Show no progress.
    """
    found, outcomes = compare_outcomes(
        methods,
        by_name({**settings, "dataset": dataset}),
        set,
        None if config is None else Path(config),
        runs=runs,
        out=None if out is None else Path(out),
        run=runner(jobs, shown=watched(quiet), silent=True),
    )
    raise_failure(outcomes)
    return found


def compare_outcomes(
    methods: Sequence[str],
    flags: Mapping[str, Any],
    overrides: Mapping[str, Any] | None,
    config: Path | None,
    *,
    runs: int,
    out: Path | None,
    run: Runner,
) -> tuple[Comparison, dict[Path, Outcome]]:
    """The comparison, and what became of each run, failures included."""
    if isinstance(methods, str) or not methods:
        raise ConfigError('name the methods to compare, e.g. ["local", "fedavg"]')
    if twice := sorted({method for method in methods if methods.count(method) > 1}):
        raise ConfigError(f"{', '.join(twice)} is given twice: name each method once")
    settings = compared_settings(methods, flags, overrides, config, runs)
    target = out if out is not None else Path("runs/compare") / _slug(settings[methods[0]][0])
    by_method = {
        method: [Job(each, folder_of(each, target)) for each in each_seed] for method, each_seed in settings.items()
    }
    # Seed by seed, so that every method has a number early.
    order = [by_method[method][seed] for seed in range(runs) for method in methods]
    names = {job.folder: f"{method}, seed {seed}" for method in methods for seed, job in enumerate(by_method[method])}
    outcomes = run(order, names, {})
    rows = compare_methods({method: [outcomes[job.folder] for job in each] for method, each in by_method.items()})
    add_gains(
        rows["methods"], {method: getattr(each[0].method_config, "backbone", "") for method, each in settings.items()}
    )
    found = Comparison(
        {"scenario": _scenario(settings[methods[0]][0], outcomes), "runs": runs, "out": str(target), **rows}
    )
    finished = [
        job.folder for method in methods for job in by_method[method] if outcomes[job.folder].result is not None
    ]
    if finished:
        found["report"] = str(write_report(finished, target / "report.html"))
        (target / "compare.json").write_text(json.dumps(found, indent=1) + "\n")
    return found, outcomes


def compared_settings(
    methods: Sequence[str],
    flags: Mapping[str, Any],
    overrides: Mapping[str, Any] | None,
    config: Path | None,
    runs: int,
) -> dict[str, list[Settings]]:
    """Settings of every method, seed by seed, on one scenario and with one rule for the score.

    A method's own settings win over those for all. ``preset=own`` (for all, or of one method) is the preset of that
    method's paper where the data set is one of the paper's, else the general one; then all are scored alike.
    """
    common, unreadable = _for_each(methods, overrides or {})
    settings, refused = _resolved(common, flags, config, runs)
    _raise_refusals(methods, {**unreadable, **refused})
    given = (flags, overrides or {}, *(split_method(method)[1] for method in methods))
    presets = {each[0].run.preset for each in settings.values()}
    if len(presets) > 1 and config is None and not any(one.get("preset") or one.get("profile") for one in given):
        logger.warning(
            "presets would differ (%s): all run with the general one; give preset=PAPER for one paper's, preset=own "
            "for each method's own",
            ", ".join(sorted(presets)),
        )
        settings, refused = _resolved(common, {**flags, "preset": "general"}, config, runs)
        _raise_refusals(methods, refused)
    check_same_scenario([each[0] for each in settings.values()])
    check_presets([each[0] for each in settings.values()])
    return settings


def _for_each(
    methods: Sequence[str], overrides: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], dict[str, ConfigError]]:
    """The settings for all that each method has: one that only some have is left out for the others, and said. And the
    refusals of methods that are unknown or cannot be read.
    """
    allowed: dict[str, Collection[str]] = {}
    refused: dict[str, ConfigError] = {}
    for method in methods:
        try:
            name, own = split_method(method)
            allowed[method] = allowed_keys(name)
            if "seed" in own or "seed" in overrides:
                raise ConfigError("all methods of a comparison run with the seeds from 0 on: leave seed out, give runs")
        except ConfigError as error:
            refused[method] = error
    allowed = {method: keys for method, keys in allowed.items() if method not in refused}
    for key in overrides if allowed else ():
        without = [method for method, keys in allowed.items() if key not in keys]
        if len(without) == len(allowed):
            raise unknown("key", key, {one for keys in allowed.values() for one in keys})
        if without:
            say(f"{key} is no setting of {', '.join(without)}, which {'runs' if len(without) == 1 else 'run'} without")
    return {
        method: {key: value for key, value in overrides.items() if key in keys} for method, keys in allowed.items()
    }, refused


def _raise_refusals(methods: Sequence[str], refused: Mapping[str, ConfigError]) -> None:
    """One error for all methods that cannot run so; that of a single method as it is."""
    if not refused:
        return
    if len(methods) == 1 or len({str(error) for error in refused.values()}) == 1:
        raise next(iter(refused.values()))
    told = "; ".join(f"{method}: {error}" for method, error in refused.items())
    raise ConfigError(f"{len(refused)} of {len(methods)} methods cannot run with these settings: {told}")


OWN = "own"
"""The preset that stands for each method's own."""
OWN_SCORE = "pooled_selected"
"""How methods with presets of their own are scored, whatever rules their papers have."""


def _resolved(
    common: Mapping[str, Mapping[str, Any]], flags: Mapping[str, Any], config: Path | None, runs: int
) -> tuple[dict[str, list[Settings]], dict[str, ConfigError]]:
    """Settings of every method, seed by seed, and the refusals of those that have none. ``common``: by method, what is
    set for all.
    """
    settings: dict[str, list[Settings]] = {}
    refused: dict[str, ConfigError] = {}
    some_own = any({**each, **flags, **split_method(method)[1]}.get("preset") == OWN for method, each in common.items())
    for method, each in common.items():
        name, own = split_method(method)
        named = {key: value for key, value in flags.items() if key not in own}
        values = {**each, **own}
        if {**values, **{key: value for key, value in named.items() if value is not None}}.get("preset") == OWN:
            named.pop("preset", None)
            values.pop("preset", None)
        if some_own and not any("selection" in each for each in (named, values)):
            values["selection"] = "best_val_acc"  # which round is scored belongs to the comparison, not to a method
        try:
            found = [resolve(name, {**named, "seed": seed}, values, config) for seed in range(runs)]
        except ConfigError as error:
            refused[method] = error
        else:
            settings[method] = [replace(each, score=OWN_SCORE) for each in found] if some_own else found
    return settings, refused


def split_method(text: str) -> tuple[str, dict[str, Any]]:
    """``local:backbone=mlp,lr=0.1`` -> the method's name and its own settings; also ``./mine.py:name:lr=0.1``."""

    name, colon, own = text.partition(":")
    if name.endswith(".py") and colon and "=" not in own.partition(":")[0]:
        chosen, colon, own = own.partition(":")
        name = f"{name}:{chosen}"
    parts: list[str] = []
    for part in split_commas(own) if colon else []:
        if "=" in part or not parts:
            parts.append(part)
        else:  # hidden=64,32
            parts[-1] += f",{part}"
    if any("=" not in part for part in parts):
        raise ConfigError(f"{text}: settings of a method are key=value, e.g. {name}:backbone=mlp")
    return name, dict(parse_override(part) for part in parts)


def split_commas(text: str) -> list[str]:
    """``a,[b,c],d`` -> ``a``, ``[b,c]``, ``d``: commas inside brackets belong to a value."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


SCENARIO = ("dataset", "partition", "clients", "split", "metric")


def check_same_scenario(settings: Sequence[Settings]) -> None:
    """Presets of different papers may set different scenarios, whose scores cannot be compared: the error says which
    options to give.
    """
    differing = {
        key: {each.run.method: getattr(each.run, key) for each in settings}
        for key in SCENARIO
        if len({getattr(each.run, key) for each in settings}) > 1
    }
    if differing:
        told = "; ".join(
            f"{key} would be "
            + ", ".join(f"{value or 'that of the data'} for {method}" for method, value in values.items())
            for key, values in differing.items()
        )
        flags = ", ".join(f"--{key}" for key in differing)
        raise ConfigError(
            f"scores of different scenarios cannot be compared: {told}; give {flags}, or --preset PAPER for one "
            "paper's settings"
        )


def check_presets(settings: Sequence[Settings]) -> None:
    """Refuse scores by different rules, which cannot be compared, and print presets that differ: their settings may
    explain a difference.
    """
    if len({each.score for each in settings}) > 1:
        told = ", ".join(f"{each.run.method} {each.score} (preset {each.run.preset})" for each in settings)
        raise ConfigError(
            f"scores by different rules cannot be compared: {told}; give --preset PAPER to run all with one paper's "
            "settings, or --preset own to score all alike"
        )
    presets = dict.fromkeys(f"{each.run.method} {each.run.preset}" for each in settings)
    if len({each.run.preset for each in settings}) > 1:
        say(f"settings come from different presets ({', '.join(presets)}): --preset PAPER takes one paper's for all")


def compare_methods(outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    """Rows of the table, in the given order; differences are to the first method, paired by seed. Refuses runs on
    different data.
    """
    results = {
        method: {o.result["seed"]: o.result for o in each if o.result is not None} for method, each in outcomes.items()
    }
    _check_same_data([result for by_seed in results.values() for result in by_seed.values()])
    first = next(iter(results.values()))
    rows = []
    for method, by_seed in results.items():
        seeds = sorted(by_seed)
        common = [seed for seed in seeds if seed in first]
        score = spread([by_seed[seed]["score"] for seed in seeds])
        test = spread([by_seed[seed][at_score_round(by_seed[seed])] for seed in seeds])
        known = all(by_seed[seed]["score"] is not None and first[seed]["score"] is not None for seed in common)
        paired = spread([by_seed[seed]["score"] - first[seed]["score"] for seed in common]) if known else None
        some = by_seed[seeds[0]] if seeds else {}
        times = [
            by_seed[seed]["seconds_per_round"] for seed in seeds if by_seed[seed].get("seconds_per_round") is not None
        ]
        rows.append(
            {
                "method": method,
                "ran": ran_with([by_seed[seed] for seed in seeds]),
                "seeds": seeds,
                "score": _summary(score),
                "val": _summary(spread([by_seed[seed].get("val") for seed in seeds])),
                "test": _summary(test),
                "difference": _summary(paired),
                "client_stds": _client_stds([by_seed[seed] for seed in seeds]),
                "scores": [by_seed[seed]["score"] for seed in seeds],
                "score_rule": some.get("score_rule"),
                "rounds": some.get("rounds"),
                "preset": some.get("preset"),
                "model": some.get("model"),
                "parameters": some.get("parameters"),
                "bytes": some.get("bytes"),
                "seconds_per_round": statistics.median(times) if times else None,
                "discloses": _discloses(some),
                "folders": [by_seed[seed]["run_dir"] for seed in seeds],
                "reasons": sorted({o.reason for o in outcomes[method] if o.result is None}),
            }
        )
    return {"methods": rows}


def ran_with(results: Sequence[Mapping[str, Any]]) -> str:
    """What ran, in words: preset and variant, profile, backbone, rounds; several where seeds chose differently."""
    rounds = sorted(int(result["rounds"]) for result in results if result.get("rounds") is not None)
    told = " | ".join(dict.fromkeys(_ran(result) for result in results))
    if not rounds:
        return told
    return f"{told}, {rounds[0]}{f' to {rounds[-1]}' if rounds[-1] > rounds[0] else ''} rounds"


def _ran(result: Mapping[str, Any]) -> str:
    variant = result.get("variant")
    preset = f"{result.get('preset')}{f'/{variant}' if variant not in (None, 'none') else ''}"
    profile = " as the reference code" if result.get("profile") == "reference" else ""
    try:
        backbone = read_run(Path(result["run_dir"])).settings.get("method", {}).get("backbone")
    except (DataError, KeyError):
        backbone = None
    return f"{preset}{profile}{'' if backbone is None else f', {backbone}'}"


def equal_rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Methods that scored the same on every seed, in validation too: what tells them apart did nothing to the score."""
    groups: dict[tuple[float | None, ...], list[str]] = {}
    for row in rows:
        if row["seeds"] and all(score is not None for score in row["scores"]):
            others = tuple((row.get(key) or {}).get("mean") for key in ("val", "test"))
            groups.setdefault((*row["seeds"], *row["scores"], *others), []).append(row["method"])
    return [
        f"{', '.join(names)} scored the same on every seed: what tells them apart did nothing to the score here."
        for names in groups.values()
        if len(names) > 1
    ]


def _client_stds(results: Sequence[Mapping[str, Any]]) -> float | None:
    """Standard deviations of clients, at the round of the score, where the score is the clients' mean."""
    rules = {str(result.get("score_rule")) for result in results}
    if not all(rule.startswith("unweighted mean of the clients") for rule in rules):
        return None
    last = all(rule.endswith("last round") for rule in rules)
    return client_stds([result.get("per_client") for result in results], "test_score_last" if last else "test_score")


def add_gains(rows: Sequence[dict[str, Any]], backbones: Mapping[str, str]) -> None:
    """Graph information gain (HiFGL) of each row, where a local and a pooled method are among them; means over the same
    seeds only.
    """
    fair = all(row["seeds"] == rows[0]["seeds"] for row in rows)
    scored = [
        Scored(row["method"].partition(":")[0], backbones[row["method"]], (row["test"] or {}).get("mean"))
        for row in rows
    ]
    for row, gain in zip(rows, gains(scored), strict=True):
        row["graph_gain"] = None if gain is None or not fair else vars(gain)


def _check_same_data(results: Sequence[Mapping[str, Any]]) -> None:
    for result in results[1:]:
        for key in ("dataset", "partition", "clients", "split", "source"):
            if result.get(key) != results[0].get(key):
                raise ConfigError(
                    f"these runs are of different scenarios and cannot be compared: {key} is {results[0].get(key)} in "
                    f"{results[0]['run_dir']} "
                    f"and {result.get(key)} in {result['run_dir']}; choose another --out"
                )


def _discloses(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Which party received what, from the run's disclosure sheet."""

    if not result:
        return []
    try:
        sheet = read_run(Path(result["run_dir"])).disclosure
    except DataError:
        return []
    return [
        {
            "phase": row.phase,
            "from": row.sender,
            "to": row.receiver,
            "kinds": list(row.kinds),
            "protection": row.protection,
            "times": row.times,
            "bytes": row.bytes,
        }
        for row in sheet or ()
    ]


def _scenario(settings: Settings, outcomes: Mapping[Path, Outcome]) -> dict[str, Any]:
    """The scenario as the runs resolved it; as given where no run finished."""
    found = next((outcome.result for outcome in outcomes.values() if outcome.result is not None), {})
    return {key: found.get(key, getattr(settings.run, key)) for key in SCENARIO}


def _slug(settings: Settings) -> str:
    run = settings.run
    known = (run.dataset.lower(), run.partition, run.clients and f"k{run.clients}", run.split)
    name = "-".join(part for part in known if part)
    return "".join(character if character.isalnum() or character in "-_." else "_" for character in name)[:80]


def _summary(value: Any) -> dict[str, Any] | None:
    """A `Spread` as a plain dict."""
    return None if value is None else {"mean": value.mean, "std": value.std, "runs": value.runs}


def differences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What else than the method differs between rows, and may explain a difference."""
    found = []
    for key, told in (("preset", str), ("model", model_words)):
        by_value: dict[str, list[str]] = {}
        for row in rows:
            if row.get(key) is not None:
                by_value.setdefault(told(row[key]), []).append(row["method"])
        if len(by_value) > 1:
            each = "; ".join(f"{', '.join(names)}: {value}" for value, names in by_value.items())
            found.append(f"not the same {key} for all: {each}")
    return found


def _table(document: Mapping[str, Any]) -> Table:
    first = document["methods"][0]["method"]
    gained = [Gain(**row["graph_gain"]) for row in document["methods"] if row["graph_gain"] is not None]
    apart = any(row["client_stds"] is not None for row in document["methods"])
    lines: list[tuple[Cell, ...]] = []
    for row in document["methods"]:
        sent, parameters = row["bytes"] or {}, row["parameters"] or {}
        stds = row["client_stds"]
        gain = None if row["graph_gain"] is None else row["graph_gain"]["value"]
        times = row["seconds_per_round"]
        lines.append(
            (
                Cell(row["method"]),
                Cell(row["ran"]),
                scored(row["score"]),
                *([Cell("-") if stds is None else Cell(f"{100 * stds:.2f}", stds)] if apart else []),
                Cell("") if row["method"] == first else scored(row["difference"], sign=True),
                scored(row["test"]),
                *([Cell("-") if gain is None else Cell(f"{100 * gain:.1f}", gain)] if gained else []),
                counted(len(row["seeds"])),
                counted(parameters.get("trainable", 0)),
                counted(parameters.get("shared", 0)),
                *(
                    counted(total, size(total))
                    for total in (
                        sent.get("up", 0) + sent.get("setup_up", 0),
                        sent.get("down", 0) + sent.get("setup_down", 0),
                        sent.get("peer", 0),
                    )
                ),
                counted(None if times is None else 1000 * times, None if times is None else f"{1000 * times:.1f}"),
            )
        )
    paired = f"to {first}, paired"
    headings = (
        "method",
        "ran with",
        "score",
        *(("client stds",) if apart else ()),
        paired,
        "test pooled",
        *(("graph gain",) if gained else ()),
        *("seeds", "parameters", "shared", "up", "down", "peer", "ms/round"),
    )
    scenario = document["scenario"]
    title = f"{scenario['dataset']}, {scenario['clients']} clients ({scenario['partition']}), split {scenario['split']}"
    rules = dict.fromkeys(row["score_rule"] for row in document["methods"] if row["score_rule"])
    notes = [
        f"score: {'; '.join(rules)}; test pooled is of the same round. {SPREAD}. The same seeds and "
        "partitions for all. Bytes of one whole run.",
        *differences(document["methods"]),
    ]
    if apart:
        notes.append(
            "client stds: mean over clients of each client's sample standard deviation over seeds, what FedStar's "
            "paper prints as ±."
        )
    if gained:
        notes.append(gain_rules(gained))
    notes += equal_rows(document["methods"])
    return Table(title, headings, tuple(lines), tuple(notes), frozenset({"score", paired, "test pooled"}))
