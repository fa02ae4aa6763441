"""What can be seen of a scenario without training a method: sizes, skew, and what plain models reach on validation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.data.graphscenario import GraphScenario
from isthmus.data.reach import Reach, reach_of
from isthmus.data.scenario import Scenario
from isthmus.experiments.scenarios import AnyScenario, owner_of
from isthmus.seeds import Stream

RARE = 0.25
"""A class of two that has a smaller share is looked for by AUPRC, unless another metric is asked for."""


@dataclass(frozen=True)
class Facts:
    """A scenario in numbers.

    Args:
        task: ``node`` or ``graph``.
        metric: Score the advice is about.
        clients: Number of owners.
        nodes, edges, features, classes: Of the whole graph; of a set of graphs, ``nodes`` is the number of graphs.
        training: Median number of training nodes (or graphs) of an owner.
        unlabelled: Owners without a training node.
        homophily: Share of edges whose ends have the same class, corrected for chance: 0 = as by chance, 1 = always.
        cross_share: Share of edges between owners.
        label_skew: Mean total variation distance of an owner's classes to all.
        rarest: Share of the rarest class.
        alike: Whether all owners have the same features and classes.
        reach: What plain models reach; None for sets of graphs.
    """

    task: str
    metric: str
    clients: int
    nodes: int
    edges: int
    features: int
    classes: int
    training: int
    unlabelled: int
    homophily: float | None
    cross_share: float | None
    label_skew: float
    rarest: float
    alike: bool
    reach: Reach | None

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return asdict(self)


def measure(scenario: AnyScenario, metric: str | None = None) -> Facts:
    """The facts of a scenario; the metric is chosen by how rare the rarest class is, where none is given."""
    return _of_graphs(scenario, metric) if isinstance(scenario, GraphScenario) else _of_nodes(scenario, metric)


def _of_nodes(scenario: Scenario, metric: str | None) -> Facts:
    whole, facts, owner = scenario.whole, scenario.statistics, owner_of(scenario)
    seen = torch.where(whole.train | whole.val, whole.y, -1)  # labels of test nodes are nobody's business here
    rows = torch.nonzero(seen >= 0).flatten()
    counts = torch.bincount(
        owner[rows] * whole.num_classes + seen[rows], minlength=scenario.clients * whole.num_classes
    )
    labels = counts.reshape(scenario.clients, -1).double()
    shares = labels.sum(0) / labels.sum()
    rarest = float(shares[shares > 0].min())
    chosen = metric or ("auprc" if whole.num_classes == 2 and rarest < RARE else "accuracy")
    return Facts(
        task="node",
        metric=chosen,
        clients=scenario.clients,
        nodes=whole.num_nodes,
        edges=facts.edges,
        features=whole.num_features,
        classes=whole.num_classes,
        training=int(np.median([client.train for client in facts.clients])),
        unlabelled=sum(client.train == 0 for client in facts.clients),
        homophily=_homophily(whole.edge_index, seen, whole.num_classes),
        cross_share=facts.cross_edge_share,
        label_skew=_skew(labels, shares),
        rarest=rarest,
        alike=True,
        reach=reach_of(whole, owner, chosen, Stream(scenario.seed, ("advice",))),
    )


def _of_graphs(scenario: GraphScenario, metric: str | None) -> Facts:
    parts = list(scenario.parts.values())
    shapes = {(part.num_features, part.num_classes) for part in parts}
    seen = [part.y[part.train | part.val] for part in parts]
    counts = [torch.bincount(y, minlength=part.num_classes).double() for y, part in zip(seen, parts, strict=True)]
    alike = len(shapes) == 1
    shares = torch.stack(counts).sum(0) / sum(float(count.sum()) for count in counts) if alike else None
    skew = (
        0.0 if shares is None else float(torch.stack([(c / c.sum() - shares).abs().sum() / 2 for c in counts]).mean())
    )
    rarest = min(float((count / count.sum().clamp(min=1)).min()) for count in counts)
    return Facts(
        task="graph",
        metric=metric or "accuracy",
        clients=len(parts),
        nodes=sum(part.num_graphs for part in parts),
        edges=sum(part.edge_index.shape[1] for part in parts),
        features=parts[0].num_features,
        classes=parts[0].num_classes,
        training=int(np.median([part.num_train for part in parts])),
        unlabelled=sum(part.num_train == 0 for part in parts),
        homophily=None,
        cross_share=None,
        label_skew=skew,
        rarest=rarest,
        alike=alike,
        reach=None,
    )


def _skew(labels: Tensor, shares: Tensor) -> float:
    """Mean total variation distance of owners' labels (K, C) to all; owners without a label do not count."""
    mine = labels[labels.sum(1) > 0]
    return float(((mine / mine.sum(1, keepdim=True)) - shares).abs().sum(1).mean() / 2)


def _homophily(edge_index: Tensor, y: Tensor, classes: int) -> float | None:
    """Edge homophily corrected for how often classes meet by chance (Platonov et al., 2023); y < 0 is unknown."""
    ends = y[edge_index]
    known = ends[:, (ends >= 0).all(0)]
    if not known.numel():
        return None
    share = torch.bincount(known.flatten(), minlength=classes).double() / known.numel()
    chance = float((share**2).sum())
    same = float((known[0] == known[1]).double().mean())
    return (same - chance) / (1 - chance) if chance < 1 else 0.0
