"""``isthmus advise``: which methods fit a data set and its parts, and why."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli.console import print_table
from isthmus.cli.known import check_run
from isthmus.cli.options import Clients, Config, Dataset, Json, Metric, Partition, Set, Split

if TYPE_CHECKING:
    from isthmus.experiments.advice.rules import Advice

NAME = "advise"
NAMED = 3
"""Methods that are explained; the others are one line."""


def command(
    dataset: Dataset = None,
    partition: Partition = None,
    clients: Clients = None,
    split: Split = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the scenario.")] = None,
    metric: Metric = None,
    config: Config = None,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Examine a graph and its parts and propose methods with settings and reasons. No method is trained."""
    check_run((), dataset, (), config)
    from isthmus.experiments.advice.auto import advice_for
    from isthmus.experiments.config_values import parse_override

    flags = {
        "dataset": dataset,
        "partition": partition,
        "clients": clients,
        "split": split,
        "seed": seed,
        "metric": metric,
    }
    advice = advice_for(flags, dict(parse_override(text) for text in set_ or ()), config)
    if json_:
        print(json.dumps(_plain(advice)))
    else:
        options = {"dataset": dataset, "partition": partition, "clients": clients, "split": split, "seed": seed}
        scored_by = None if advice.facts.metric == "accuracy" else advice.facts.metric
        given = [f"--{name} {shlex.quote(str(value))}" for name, value in options.items() if value is not None]
        given += [
            f"--{name} {value}"
            for name, value in (("metric", metric or scored_by), ("config", config))
            if value is not None
        ]
        given += [f"--set {shlex.quote(text)}" for text in set_ or ()]
        print_advice(advice, " ".join(given))


def print_advice(advice: Advice, options: str) -> None:
    """Facts, the first methods with reason and command, the others, and remarks. ``options``: what names the data."""
    facts, reach = advice.facts, advice.facts.reach
    things = "nodes" if facts.task == "node" else "graphs"
    rows = [
        (
            "size",
            f"{facts.nodes:,} {things}, {facts.edges:,} arcs, {facts.features:,} features, {facts.classes} classes",
        ),
        ("owners", f"{facts.clients}, {facts.training} training {things} each (median)"),
        ("label skew", f"{facts.label_skew:.2f} (mean total variation distance to all labels)"),
        ("rarest class", f"{100 * facts.rarest:.1f} % of the {things}; scored by {facts.metric}"),
    ]
    if facts.homophily is not None:
        rows.insert(2, ("homophily", f"{facts.homophily:.2f} (0 = as by chance, 1 = neighbours of one class)"))
    if facts.cross_share is not None:
        rows.insert(2, ("cross edges", f"{100 * facts.cross_share:.0f} % of the edges lie between owners"))
    if reach is not None:
        rows.append(
            (
                "a plain model",
                f"reaches {reach.alone:.2f} with features alone; with neighbours {reach.local:.2f} at each owner, "
                f"{reach.together:.2f} together, {reach.across:.2f} with cross edges, {reach.smoothed:.2f} where own "
                f"features are mixed with its neighbours'; without features, by links, {reach.links:.2f} (validation)",
            )
        )
    print_table(("", ""), rows)
    print()
    for number, choice in enumerate(advice.choices[:NAMED], 1):
        expected = "" if choice.expected is None else f" (about {choice.expected:.2f})"
        print(f"{number}. {choice.plan.name}{expected}: {choice.reason}.")
        print(f"   isthmus run {choice.plan.method} {options} {choice.plan.words()}")
    others = [
        f"{c.plan.name} {c.expected:.2f}" if c.expected is not None else c.plan.name for c in advice.choices[NAMED:]
    ]
    if others:
        print(f"\nthen: {', '.join(others)}")
    for name, why in advice.unfit.items():
        print(f"not {name}: {why}")
    for remark in advice.remarks:
        print(f"note: {remark}")
    print(f"\nTo run the first three and keep the best on validation: isthmus run auto {options}")


def _plain(advice: Advice) -> dict[str, Any]:
    choices = [
        {
            "plan": choice.plan.name,
            "method": choice.plan.method,
            "settings": dict(choice.plan.settings),
            "expected": choice.expected,
            "why": choice.reason,
        }
        for choice in advice.choices
    ]
    return {
        "facts": advice.facts.to_json(),
        "choices": choices,
        "remarks": list(advice.remarks),
        "unfit": dict(advice.unfit),
    }
