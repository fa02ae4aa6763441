"""``isthmus compare``: several methods on one scenario, with the same seeds and partitions for all."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli.batch import Jobs, Out, Runs, raise_failure, run_jobs
from isthmus.cli.console import print_table, size
from isthmus.cli.run import (
    Clients,
    Config,
    Dataset,
    EngineName,
    Json,
    Metric,
    Partition,
    Plugin,
    Preset,
    Profile,
    Rounds,
    Set,
    Split,
)

if TYPE_CHECKING:
    from isthmus.experiments.batch import Outcome
    from isthmus.experiments.config import Settings

NAME = "compare"


def command(
    methods: Annotated[
        list[str],
        typer.Argument(help="Methods, with own settings as in local:backbone=mlp; differences are to the first."),
    ],
    dataset: Dataset = None,
    partition: Partition = None,
    clients: Clients = None,
    split: Split = None,
    rounds: Rounds = None,
    preset: Preset = None,
    profile: Profile = None,
    metric: Metric = None,
    engine: EngineName = None,
    config: Config = None,
    set_: Set = None,
    plugin: Plugin = None,
    runs: Runs = 3,
    jobs: Jobs = None,
    out: Out = None,
    json_: Json = False,
) -> None:
    """Run several methods on one scenario; table, disclosure and report."""
    from isthmus.errors import ConfigError
    from isthmus.experiments.batch import Job
    from isthmus.experiments.config import resolve
    from isthmus.experiments.config_values import parse_override
    from isthmus.papers import folder_of

    if twice := sorted({method for method in methods if methods.count(method) > 1}):
        raise ConfigError(f"{', '.join(twice)} is given twice: name each method once")
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
    overrides = dict(parse_override(text) for text in set_ or ())
    settings: dict[str, list[Settings]] = {}
    for method in methods:
        name, own = split_method(method)
        settings[method] = [
            resolve(name, {**flags, "seed": seed}, {**overrides, **own}, config) for seed in range(runs)
        ]
    check_same_scenario([each[0] for each in settings.values()])
    check_presets([each[0] for each in settings.values()])
    target = out if out is not None else Path("runs/compare") / _slug(settings[methods[0]][0])
    by_method = {
        method: [Job(each, folder_of(each, target)) for each in each_seed] for method, each_seed in settings.items()
    }
    # Seed by seed, so that every method has a number early.
    order = [by_method[method][seed] for seed in range(runs) for method in methods]
    names = {job.folder: f"{method}, seed {seed}" for method in methods for seed, job in enumerate(by_method[method])}
    outcomes = run_jobs(order, names, jobs, silent=True)
    comparison = compare_methods({method: [outcomes[job.folder] for job in each] for method, each in by_method.items()})
    add_gains(
        comparison["methods"],
        {method: getattr(each[0].method_config, "backbone", "") for method, each in settings.items()},
    )
    document = {
        "scenario": _scenario(settings[methods[0]][0], outcomes),
        "runs": runs,
        "out": str(target),
        **comparison,
    }
    finished = [
        job.folder for method in methods for job in by_method[method] if outcomes[job.folder].result is not None
    ]
    if finished:
        from isthmus.report import write_report

        document["report"] = str(write_report(finished, target / "report.html"))
        (target / "compare.json").write_text(json.dumps(document, indent=1) + "\n")
    if json_:
        print(json.dumps(document))
    elif finished:
        _print_comparison(document)
    raise_failure(outcomes)


def split_method(text: str) -> tuple[str, dict[str, Any]]:
    """``local:backbone=mlp,lr=0.1`` -> the method's name and its own settings; also ``./mine.py:name:lr=0.1``."""
    from isthmus.errors import ConfigError
    from isthmus.experiments.config_values import parse_override

    name, colon, own = text.partition(":")
    if name.endswith(".py") and colon and "=" not in own.partition(":")[0]:
        chosen, colon, own = own.partition(":")
        name = f"{name}:{chosen}"
    parts = split_commas(own) if colon else []
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
    option to give.
    """
    from isthmus.errors import ConfigError

    first = settings[0].run
    for other in (each.run for each in settings[1:]):
        for key in SCENARIO:
            mine, theirs = getattr(first, key), getattr(other, key)
            if mine != theirs:
                raise ConfigError(
                    f"{first.method} would run with {key} {mine or 'of its data'} and {other.method} with {key} "
                    f"{theirs or 'of its data'}, "
                    f"and scores of different scenarios cannot be compared: give --{key}, or --preset PAPER for one "
                    "paper's settings"
                )


def check_presets(settings: Sequence[Settings]) -> None:
    """Refuse scores by different rules, which cannot be compared, and print presets that differ: their settings may
    explain a difference.
    """
    from isthmus.errors import ConfigError

    first = settings[0]
    for other in settings[1:]:
        if other.score != first.score:
            raise ConfigError(
                f"the score of {first.run.method} is {first.score} (preset {first.run.preset}), "
                f"that of {other.run.method} {other.score} (preset {other.run.preset}), which cannot be compared: "
                "give --preset PAPER to run all with one paper's settings"
            )
    presets = dict.fromkeys(f"{each.run.method} {each.run.preset}" for each in settings)
    if len({each.run.preset for each in settings}) > 1:
        print(
            f"settings come from different presets ({', '.join(presets)}): --preset PAPER takes one paper's for all",
            file=sys.stderr,
        )


def compare_methods(outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    """Rows of the table, in the given order; differences are to the first method, paired by seed. Refuses runs on
    different data.
    """
    from isthmus.metrics.spread import spread

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
        test = spread([by_seed[seed]["test"] for seed in seeds])
        known = all(by_seed[seed]["score"] is not None and first[seed]["score"] is not None for seed in common)
        paired = spread([by_seed[seed]["score"] - first[seed]["score"] for seed in common]) if known else None
        some = by_seed[seeds[0]] if seeds else {}
        times = [
            by_seed[seed]["seconds_per_round"] for seed in seeds if by_seed[seed].get("seconds_per_round") is not None
        ]
        rows.append(
            {
                "method": method,
                "seeds": seeds,
                "score": summary(score),
                "test": summary(test),
                "difference": summary(paired),
                "client_stds": _client_stds([by_seed[seed] for seed in seeds]),
                "scores": [by_seed[seed]["score"] for seed in seeds],
                "score_rule": some.get("score_rule"),
                "rounds": some.get("rounds"),
                "parameters": some.get("parameters"),
                "bytes": some.get("bytes"),
                "seconds_per_round": statistics.median(times) if times else None,
                "discloses": _discloses(some),
                "reasons": sorted({o.reason for o in outcomes[method] if o.result is None}),
            }
        )
    return {"methods": rows}


def _client_stds(results: Sequence[Mapping[str, Any]]) -> float | None:
    """Standard deviations of clients, at the round of the score, where the score is the clients' mean."""
    from isthmus.metrics.spread import client_stds

    rules = {str(result.get("score_rule")) for result in results}
    if not all(rule.startswith("unweighted mean of the clients") for rule in rules):
        return None
    last = all(rule.endswith("last round") for rule in rules)
    return client_stds([result["per_client"] for result in results], "test_score_last" if last else "test_score")


def add_gains(rows: Sequence[dict[str, Any]], backbones: Mapping[str, str]) -> None:
    """Graph information gain (HiFGL) of each row, where a local and a pooled method are among them; means over the same
    seeds only.
    """
    from isthmus.metrics.gain import Scored, gains

    fair = all(row["seeds"] == rows[0]["seeds"] for row in rows)
    scored = [
        Scored(row["method"].partition(":")[0], backbones[row["method"]], (row["test"] or {}).get("mean"))
        for row in rows
    ]
    for row, gain in zip(rows, gains(scored), strict=True):
        row["graph_gain"] = None if gain is None or not fair else vars(gain)


def _check_same_data(results: Sequence[Mapping[str, Any]]) -> None:
    from isthmus.errors import ConfigError

    for result in results[1:]:
        for key in ("dataset", "partition", "clients", "split", "source"):
            if result.get(key) != results[0].get(key):
                raise ConfigError(
                    f"these runs are of different scenarios and cannot be compared: {key} is {results[0].get(key)} in "
                    f"{results[0]['run_dir']} "
                    f"and {result.get(key)} in {result['run_dir']}; choose another --out"
                )


def summary(value: Any) -> dict[str, Any] | None:
    """A `Spread` as a plain dict."""
    return None if value is None else {"mean": value.mean, "std": value.std, "runs": value.runs}


def _discloses(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Which party received what, from the run's disclosure sheet."""
    from isthmus.errors import DataError
    from isthmus.report.runs import read_run

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


def _gain(row: Mapping[str, Any], shown: Sequence[Any]) -> list[str]:
    """The cell of graph gain, if there is such a column."""
    if not shown:
        return []
    value = None if row["graph_gain"] is None else row["graph_gain"]["value"]
    return ["-" if value is None else f"{100 * value:.1f}"]


def _print_comparison(document: Mapping[str, Any]) -> None:
    from isthmus.metrics.gain import Gain
    from isthmus.report.words import gain_rules

    first = document["methods"][0]["method"]
    gained = [Gain(**row["graph_gain"]) for row in document["methods"] if row["graph_gain"] is not None]
    apart = any(row["client_stds"] is not None for row in document["methods"])
    lines = []
    for row in document["methods"]:
        sent, parameters = row["bytes"] or {}, row["parameters"] or {}
        difference = "" if row["method"] == first else percent_spread(row["difference"], sign=True)
        stds = [] if not apart else ["-" if row["client_stds"] is None else f"{100 * row['client_stds']:.2f}"]
        lines.append(
            [
                row["method"],
                percent_spread(row["score"]),
                *stds,
                difference,
                percent_spread(row["test"]),
                *_gain(row, gained),
                str(len(row["seeds"])),
                f"{parameters.get('trainable', 0):,}",
                f"{parameters.get('shared', 0):,}",
                size(sent.get("up", 0) + sent.get("setup_up", 0)),
                size(sent.get("down", 0) + sent.get("setup_down", 0)),
                size(sent.get("peer", 0)),
                "" if row["seconds_per_round"] is None else f"{1000 * row['seconds_per_round']:.1f}",
            ]
        )
    headings = (
        "method",
        "score",
        *(("client stds",) if apart else ()),
        f"to {first}, paired",
        "test pooled",
        *(("graph gain",) if gained else ()),
        "seeds",
        "parameters",
        "shared",
        "up",
        "down",
        "peer",
        "ms/round",
    )
    scenario = document["scenario"]
    title = f"{scenario['dataset']}, {scenario['clients']} clients ({scenario['partition']}), split {scenario['split']}"
    print_table(headings, lines, title)
    rules = dict.fromkeys(row["score_rule"] for row in document["methods"] if row["score_rule"])
    print(
        f"score: {'; '.join(rules)}. ± over seeds, population; the same seeds and partitions for all. Bytes of one "
        "whole run."
    )
    if apart:
        print(
            "client stds: mean over clients of each client's sample standard deviation over seeds, what FedStar's "
            "paper prints as ±."
        )
    print(f"{gain_rules(gained)}\n" if gained else "")
    received = [
        [
            row["method"],
            line["from"],
            line["to"],
            line["phase"],
            ", ".join(line["kinds"]),
            line["protection"],
            f"{line['times']:.0f}",
            size(line["bytes"]),
        ]
        for row in document["methods"]
        for line in row["discloses"]
    ]
    if received:
        print_table(
            ("method", "from", "to", "phase", "receives", "protection", "times", "bytes"),
            received,
            "What each party receives, in one run",
        )
    for row in document["methods"]:
        if not row["discloses"] and row["seeds"]:
            print(f"{row['method']}: no message left a party")
        for reason in row["reasons"]:
            print(f"{row['method']}: not all seeds: {reason}")
    print(f"report: {document['report']}")


def percent_spread(summary: Mapping[str, Any] | None, *, sign: bool = False) -> str:
    """``64.80 ± 1.50`` in percent; the spread of one seed is unknown."""
    if summary is None:
        return "-"
    std = "unknown" if summary["std"] is None else f"{100 * summary['std']:.2f}"
    return f"{100 * summary['mean']:{'+' if sign else ''}.2f} ± {std}"


def _scenario(settings: Settings, outcomes: Mapping[Path, Outcome]) -> dict[str, Any]:
    """The scenario as the runs resolved it; as given where no run finished."""
    found = next((outcome.result for outcome in outcomes.values() if outcome.result is not None), {})
    return {key: found.get(key, getattr(settings.run, key)) for key in SCENARIO}


def _slug(settings: Settings) -> str:
    run = settings.run
    known = (run.dataset.lower(), run.partition, run.clients and f"k{run.clients}", run.split)
    name = "-".join(part for part in known if part)
    return "".join(character if character.isalnum() or character in "-_." else "_" for character in name)[:80]
