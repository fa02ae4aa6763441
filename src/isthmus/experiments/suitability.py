"""What to know before the first round: settings that cannot act, and what a method needs that the data do not have."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from isthmus.data.node_data import NodeData
from isthmus.methods.fedprox import FedProxConfig
from isthmus.methods.registry import Method
from isthmus.methods.training import drops_nothing
from isthmus.metrics.registry import ACCURACY

RARE = 0.1
"""Share of the rarer of two classes below which accuracy says little."""


def idle_settings(config: Any, given: Collection[str], task: str) -> list[str]:
    """Settings given by hand that change nothing in the model or training that is built, one sentence each."""
    powers = ("prune", "prune_mode", "renormalise") if hasattr(config, "streamed") else ()
    sampled = getattr(config, "batches", "full")
    full = task == "node" and sampled == "full"
    rules = [
        ("batch_size", full, "batches=full takes all training nodes in every step; set batches=neighbours"),
        ("fanout", task == "graph" or sampled != "neighbours", "only batches=neighbours draws neighbours"),
        ("score_train", task == "node", "training nodes are predicted with the others and always scored"),
        ("batches", task == "graph", "graph tasks take batch_size graphs in every step"),
        ("lr_decay", getattr(config, "schedule", "decay") != "decay", "only schedule=decay uses it"),
        ("lr_step", getattr(config, "schedule", "decay") != "decay", "only schedule=decay uses it"),
        ("schedule_rounds", getattr(config, "schedule", "cosine") != "cosine", "only schedule=cosine uses it"),
        ("personal_layers", getattr(config, "algorithm", "fedper") != "fedper", "only algorithm=fedper uses it"),
        ("mu", getattr(config, "algorithm", "fedprox") != "fedprox", "only algorithm=fedprox uses it"),
        ("nsf_lr", getattr(config, "nsf", "hop2vec") != "hop2vec", "only nsf=hop2vec learns structure features"),
        ("nsf_dim", getattr(config, "form", "headed") == "direct", "form=direct has one column per class"),
        ("structure_hidden", getattr(config, "form", "headed") == "direct", "form=direct has no head"),
        *((key, config.streamed, "protocol=streamed forms no powers and prunes nothing") for key in powers),
        ("dropout", task == "node" and drops_nothing(config), "the model has no hidden layer that is dropped"),
    ]
    rules += [(key, True, why) for key, why in (config.idle() if hasattr(config, "idle") else {}).items()]
    found = [f"{key} changes nothing here: {why}" for key, idle, why in rules if key in given and idle]
    if isinstance(config, FedProxConfig) and config.local_epochs == 1 and task == "node":
        found.append(
            "with one local step from the common weights the proximal term is zero and fedprox is fedavg: set "
            "local_epochs=2 or more"
        )
    return found


def shortcomings(
    method: Method, parts: Mapping[str, Any], backbone: str | None = None, metric: str | None = None
) -> list[str]:
    """What a method, its backbone or a metric would use that these clients do not have, one sentence each; none stops a
    run.
    """
    found = []
    nodes = {client: data for client, data in parts.items() if isinstance(data, NodeData)}
    linked = any(data.cross is not None and data.cross.num_edges for data in nodes.values())
    if method.cross_edges and len(nodes) > 1 and not linked:
        found.append(
            f"{method.name} uses edges between clients, and these have none: try fedavg or fedsgd, which cost less"
        )
    if backbone == "dirsage" and nodes and not any(_directed(data) for data in nodes.values()):
        found.append(
            "dirsage tells incoming from outgoing arcs, and here every arc runs both ways: set undirected=false where "
            "the data have directions, or take backbone=sage, which costs less"
        )
    mean = _mean_weight(nodes.values())
    if backbone != "sage" and mean is not None and not 0.1 <= mean <= 10:
        found.append(
            f"edges weigh {mean:.3g} on average and a node's loop to itself counts 1: scale edge weights so that an "
            "ordinary edge weighs about 1, or take backbone=sage, whose means do not depend on the scale"
        )
    without = [client for client, data in parts.items() if not data.num_train]
    if without:
        names = ", ".join(without[:5]) + (" ..." if len(without) > 5 else "")
        found.append(
            f"no training label at {names}: a client that keeps a model of its own cannot train it; a common model, "
            "as fedavg's, serves it"
        )
    if metric == ACCURACY and (share := _share_of_rarer(nodes.values())) < RARE:
        found.append(
            f"only {100 * share:.1f} % of the labelled nodes are of the rarer class, so a model that never names it is "
            f"{100 - 100 * share:.1f} % accurate: take metric=auprc"
        )
    return found


def _share_of_rarer(parts: Iterable[NodeData]) -> float:
    """Of two classes among training and validation nodes; 1 where there are more classes, or one."""
    seen = [data.y[data.train | data.val] for data in parts if data.num_classes == 2]
    counts = torch.bincount(torch.cat(seen), minlength=2) if seen else torch.zeros(2)
    return float(counts.min() / counts.sum()) if bool((counts > 0).all()) else 1.0


def _mean_weight(parts: Iterable[NodeData]) -> float | None:
    """Of own edges; None where models do not use weights."""
    weights = [data.edge_weight for data in parts if data.edge_weight is not None and data.edge_weight.numel()]
    return float(torch.cat(weights).double().mean()) if weights else None


def _directed(data: NodeData) -> bool:
    """Whether some arc has none that runs back."""
    source, target = data.edge_index
    arcs, back = source * data.num_nodes + target, target * data.num_nodes + source
    return not bool(torch.isin(arcs, back).all())
