"""What a run of HiFGL tells besides scores: costs per link, leakage of the partition, what noise is worth."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.data.scenario import Scenario
from isthmus.methods.hifgl_config import HiFGLConfig
from isthmus.metrics.gain import subgraph_leakage
from isthmus.privacy.anonymous_seal import BOX_OVERHEAD
from isthmus.privacy.dp import noise_warning, zcdp_epsilon, zcdp_rho
from isthmus.privacy.secmp import bucket


def releases(config: HiFGLConfig, features: int, classes: int, rounds: int) -> int:
    """How often a device sends something of its own to its neighbours in a run that evaluates after every round."""
    forward, backward = len(config.forward_widths(features, classes)), len(config.backward_widths(features, classes))
    once = int(config.ways(features, classes)[0] == "cached")
    return once + rounds * (2 * forward + backward)


def privacy(state: Any, config: HiFGLConfig, rounds: int, clients: int, masked: bool) -> dict[str, Any] | None:
    """The statement of ``one_neighbour=dp`` (spec 11.7): replace-one sensitivity 2C, all releases of a device added up
    as zCDP.
    """
    if config.one_neighbour != "dp":
        return None
    count = releases(config, state.features, state.classes, rounds)
    clip, sigma = config.message_clip, config.message_clip * config.message_noise
    rho = zcdp_rho(count, clip, sigma) if sigma > 0 else None
    width = max(config.widths(state.features, state.classes), default=state.features)
    warning: str | None = "clipping without noise guarantees no privacy: set message_noise above 0"
    if sigma > 0:
        warning = noise_warning(config.mechanism, width)
    return {
        "epsilon": None if rho is None else zcdp_epsilon(rho, config.dp_delta),
        "delta": config.dp_delta,
        "unit": "device",
        "neighbours": "all values of one device replaced",
        "mechanism": "gaussian at the source",
        "clip": clip,
        "noise": config.message_noise,
        "releases": count,
        "values": width,
        "rho": rho,
        "not_covered": "summed gradients and counts of evaluation, which carry no noise",
        "warning": warning,
    }


def facts(state: Any, config: HiFGLConfig, scenario: Scenario | None) -> dict[str, Any]:
    """Costs by the cost model, and in a simulation what only an onlooker knows of the partition."""
    features, classes = state.features, state.classes
    told: dict[str, Any] = {
        "secmp": config.secmp,
        "mode": config.mode,
        "algorithm": config.algorithm,
        "one_neighbour": config.one_neighbour,
        "threshold": config.threshold,
        "layers": list(config.ways(features, classes)),
        "forward_widths": list(config.forward_widths(features, classes).values()),
        "backward_widths": list(config.backward_widths(features, classes).values()),
    }
    if scenario is None:
        return told
    owner = torch.empty(scenario.whole.num_nodes, dtype=torch.int64)
    for number, data in enumerate(scenario.parts.values()):
        owner[data.node_id] = number
    told["eps_p"] = subgraph_leakage(scenario.whole.edge_index, owner)
    told["cross_edge_share"] = scenario.statistics.cross_edge_share
    degree = neighbours(scenario.whole.edge_index, scenario.whole.num_nodes)
    told["devices_below_k_min"] = float((degree < config.k_min).float().mean())
    told["cost"] = cost(config, features, classes, degree)
    return told


def neighbours(edge_index: Tensor, count: int) -> Tensor:
    """Different neighbours of every node, in either direction; (n,)."""
    source, target = edge_index[:, edge_index[0] != edge_index[1]]
    pairs = torch.unique(torch.stack([torch.cat([source, target]), torch.cat([target, source])]), dim=1)
    return torch.bincount(pairs[0], minlength=count)


def cost(config: HiFGLConfig, features: int, classes: int, degree: Tensor) -> dict[str, Any]:
    """Bytes by link, every device apart (in a simulation, mail inside a silo is not on the ledger, and devices of a
    silo share a model).

    ``..._round``: of one training round, evaluation apart. ``..._setup``: keys, and raw features if they travel.
    """
    edges, slots = int(degree.sum()), int(bucket(degree.numpy()).sum())
    nodes, element = int(degree.numel()), config.element_bytes
    hardened = config.secmp == "hardened"
    widths = config.widths(features, classes)
    numbers = sum(widths) + hardened * len(widths)  # a hardened message carries one element to check sums by
    raw = features + hardened * config.parts(features) if config.ways(features, classes)[0] == "cached" else 0
    per_edge = {"hardened": 1, "published": config.threshold + 1, "plain": 1}[config.secmp]
    number = np.dtype("float64" if config.precision == "float64" else "float32").itemsize
    size = element if config.secmp != "plain" else number
    box = 32 + BOX_OVERHEAD
    matrices = 2 if config.kind == "sage" else 1
    parameters = sum((matrices * inner + 1) * outer for inner, outer in config.sizes(features, classes))
    silos = 0 if config.mode == "cross-device" else 2 * parameters * number
    return {
        "directed_edges": edges,
        "slots": slots if hardened else None,
        "device_device_round": edges * numbers * per_edge * size,
        "holder_device_round": nodes * numbers * config.threshold * element if hardened else 0,
        "model_device_round": 2 * nodes * parameters * number,  # the model down, a gradient up
        "server_silo_round": silos,  # of each silo
        "device_device_setup": edges * (raw * per_edge * size + (config.threshold * box if hardened else 0)),
        "device_holder_setup": slots * config.threshold * box if hardened else 0,
        "holder_device_setup": nodes * raw * config.threshold * element if hardened else 0,
    }
