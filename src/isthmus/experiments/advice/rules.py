"""From facts to methods: what each is expected to reach, and why.

An expectation starts from what a plain model reaches on validation with the rows and edges the method may use
(`isthmus.data.reach`), and is moved by what a method can or cannot do with this kind of graph. The numbers are rough;
their order is the advice, and `auto` lets validation decide between the first few.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from isthmus.data.reach import Reach
from isthmus.experiments.advice.facts import Facts
from isthmus.experiments.advice.plans import GRAPH_PLANS, PLANS, Plan
from isthmus.methods.registry import get_method
from isthmus.metrics.registry import ACCURACY

HOMOPHILOUS = 0.3
"""Homophily, corrected for chance, from which neighbours are taken to be of the same class."""
WORTH = 0.01
"""What counts as a difference: a point."""


@dataclass(frozen=True)
class Choice:
    """A plan, the score it is expected to reach (None without an estimate), and why."""

    plan: Plan
    expected: float | None
    reason: str


@dataclass(frozen=True)
class Advice:
    """Methods in order of preference, what to keep in mind, and what does not fit."""

    facts: Facts
    choices: tuple[Choice, ...]
    remarks: tuple[str, ...]
    unfit: Mapping[str, str]


def advise(facts: Facts) -> Advice:
    """Which methods fit, best first."""
    if facts.task == "graph":
        return _for_graphs(facts)
    assert facts.reach is not None
    unfit = {name: why for name, plan in PLANS.items() if (why := _obstacle(plan, facts)) is not None}
    choices = [Choice(plan, *_RULES[name](facts, facts.reach)) for name, plan in PLANS.items() if name not in unfit]
    ranked = sorted(choices, key=lambda choice: -(choice.expected or 0.0))  # ties: the simpler, which is listed first
    return Advice(facts, tuple(ranked), _remarks(facts, facts.reach), unfit)


def homophilous(facts: Facts) -> bool:
    """Whether neighbours mostly have the same class."""
    return facts.homophily is not None and facts.homophily >= HOMOPHILOUS


def _obstacle(plan: Plan, facts: Facts) -> str | None:
    """Why a plan cannot be used on these data, if so."""
    method = get_method(plan.method)
    if method.cross_edges and not facts.cross_share:
        return "it is about edges between owners, and there are none"
    if facts.metric != ACCURACY and not method.has_details:
        return f"it reports accuracy only, not {facts.metric}"
    if facts.clients < 2 and plan.method != "local":
        return "there is one owner only"
    return None


Rule = Callable[[Facts, Reach], tuple[float, str]]


def _points(value: float) -> str:
    return f"{100 * value:+.1f} points"


def _alone(facts: Facts, reach: Reach) -> tuple[float, str]:
    return reach.local, f"each owner alone: a plain model reaches {reach.local:.2f}, together {reach.together:.2f}"


def _together(facts: Facts, reach: Reach) -> tuple[float, str]:
    gain = reach.together - reach.local
    return max(reach.together, reach.alone - WORTH), (
        f"training together is worth {_points(gain)} to a plain model, and no edge between owners is used"
    )


def _features_only(facts: Facts, reach: Reach) -> tuple[float, str]:
    return reach.alone, (
        f"features without the graph reach {reach.alone:.2f}; with neighbours inside an owner {reach.together:.2f}"
    )


def _gradients(facts: Facts, reach: Reach) -> tuple[float, str]:
    return _together(facts, reach)[0] - 0.005, "as FedAvg, with gradients summed every step: steadier, more messages"


def _personal(facts: Facts, reach: Reach) -> tuple[float, str]:
    return max(reach.together - 2 * WORTH, reach.local + WORTH), (
        f"owners keep a head of their own; alone they reach {reach.local:.2f}, together {reach.together:.2f}; label "
        f"skew is {facts.label_skew:.2f}"
    )


def _neighbour_sums(facts: Facts, reach: Reach) -> tuple[float, str]:
    gain = reach.across - reach.together
    lost = reach.across - reach.smoothed
    words = f"edges between owners are worth {_points(gain)}; sums of neighbours' features are exchanged once"
    if lost < WORTH:
        return reach.smoothed, f"{words}, and mixing a node's features with its neighbours' loses nothing"
    return reach.smoothed, f"{words}, but mixing a node's features with its neighbours' costs {_points(-lost)}"


def _structure(facts: Facts, reach: Reach) -> tuple[float, str]:
    # One estimate per kind of variant of the general preset; validation tries them all, so the best counts.
    gain = max(reach.across - reach.together, 0)
    worth = f"edges between owners are worth {_points(reach.across - reach.together)}"
    own = reach.across - reach.smoothed > 2 * WORTH  # a node's own features must be kept apart
    near = max(reach.together, reach.alone - WORTH) + (0.9 if own else 0.1) * gain
    kinds = [(near, f"{worth}; two hops of structure can be read directly, beside a node's own features")]
    if homophilous(facts):
        words = f"{worth} and homophily is {facts.homophily:.2f}: structure alone, without features of others, carries"
        kinds.append((reach.together + 0.9 * gain, f"{words} classes"))
    if reach.links > reach.across:
        words = f"who is connected to whom tells classes better ({reach.links:.2f}) than features do"
        words += f" ({reach.across:.2f} with all edges): structure is worth more than features of others"
        kinds.append((reach.links, words))
    return max(kinds, key=lambda kind: kind[0])


def _message_passing(facts: Facts, reach: Reach) -> tuple[float, str]:
    scarce = 0.04 * max((facts.cross_share or 0.0) - 0.5, 0) / 0.5 if homophilous(facts) else 0.0
    return max(reach.across, reach.alone) - scarce, (
        f"edges between owners are worth {_points(reach.across - reach.together)}; neighbours' features pass between "
        "owners, hidden, and a node's own are kept apart"
    )


def _proxies(facts: Facts, reach: Reach) -> tuple[float, str]:
    shift = 0.5 * WORTH if homophilous(facts) else -2 * WORTH
    return reach.together + shift, "personal models beside class-wise proxies; for nodes whose neighbours mislead"


def _learnt_graph(facts: Facts, reach: Reach) -> tuple[float, str]:
    return reach.together - 0.03, "the server learns edges where those between owners are unknown"


_RULES: Mapping[str, Rule] = {
    "local": _alone,
    "fedavg": _together,
    "fedavg-mlp": _features_only,
    "fedsgd": _gradients,
    "fedper": _personal,
    "fedgcn": _neighbour_sums,
    "fedstruct": _structure,
    "hifgl": _message_passing,
    "fedspray": _proxies,
    "fedggr": _learnt_graph,
}


def _remarks(facts: Facts, reach: Reach) -> tuple[str, ...]:
    found = []
    if reach.across < reach.alone + WORTH:
        found.append("neighbours add nothing to a plain model: expect little from any method that spends on edges")
    elif facts.cross_share and reach.across < reach.together + WORTH:
        found.append(
            "edges between owners add nothing to a plain model: methods that hide them cost more than they give"
        )
    if reach.local > reach.together - WORTH and facts.clients > 1:
        found.append(
            "owners alone are as good as together: look whether they have the same task, or train personal models"
        )
    if facts.metric != ACCURACY:
        found.append(
            f"the rarest class has {100 * facts.rarest:.1f} % of the nodes, so accuracy says little: score by "
            f"{facts.metric}; weighting classes (class_weight=balanced) is worth a try and often costs"
        )
    if facts.training < 50:
        found.append(
            f"an owner has {facts.training} training nodes (median): repeat with several seeds before believing"
        )
    if facts.unlabelled:
        found.append(f"{facts.unlabelled} owners have no training node: they are scored with what others learnt")
    return tuple(found)


def _for_graphs(facts: Facts) -> Advice:
    reasons = {
        "fedstar": "structure is shared and features stay with each owner",
        "gcflplus": "owners whose updates go alike train together, others apart",
        "fedavg": "one model for all owners",
        "fedsage": "one GraphSAGE for all owners",
        "local": "each owner alone: what the others must beat",
    }
    order: tuple[str, ...] = ("fedavg", "gcflplus", "fedstar", "fedsage", "local")
    if not facts.alike:  # parts of a model can still be common to all
        order = ("fedstar", "gcflplus", "fedavg", "fedsage", "local")
    choices = tuple(Choice(GRAPH_PLANS[name], None, reasons[name]) for name in order)
    kind = "the same" if facts.alike else "different"
    remark = f"sets of graphs, {kind} features and classes at all owners: no estimate is made, let validation decide"
    return Advice(facts, choices, (remark,), {})
