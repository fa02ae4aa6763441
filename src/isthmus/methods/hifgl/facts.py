"""What a HiFGL run reports besides scores: cost per link, leakage of the partition, privacy of added noise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isthmus.data.scenario import Scenario
from isthmus.methods.hifgl.algorithm import SecMP
from isthmus.methods.hifgl.config import HiFGLConfig, LayerPlan
from isthmus.metrics.gain import subgraph_leakage
from isthmus.privacy.dp import noise_warning, zcdp_epsilon, zcdp_rho
from isthmus.privacy.secmp import bucket


def releases(config: HiFGLConfig, features: int, classes: int, rounds: int) -> int:
    """How often a device sends something of its own to its neighbours in a run that evaluates after every round."""
    plan = config.plan(features, classes)
    return int(bool(plan.raw)) + rounds * (2 * len(plan.forward) + len(plan.backward))


def privacy(state: Any, config: HiFGLConfig, rounds: int, clients: int, masked: bool) -> dict[str, Any] | None:
    """The statement of ``one_neighbour=dp`` (spec 11.7): replace-one sensitivity 2C, all releases of a device added up
    as zCDP.
    """
    if config.one_neighbour != "dp":
        return None
    count = releases(config, state.features, state.classes, rounds)
    clip, sigma = config.message_clip, config.message_clip * config.message_noise
    rho = zcdp_rho(count, clip, sigma) if sigma > 0 else None
    width = max(config.plan(state.features, state.classes).widths, default=state.features)
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


def facts(state: Any, secmp: SecMP, scenario: Scenario | None) -> dict[str, Any]:
    """Costs by the cost model, and in a simulation what no single party knows of the partition."""
    config, plan = secmp.config, secmp.config.plan(state.features, state.classes)
    found: dict[str, Any] = {
        "secmp": config.secmp,
        "mode": config.mode,
        "algorithm": config.algorithm,
        "one_neighbour": config.one_neighbour,
        "threshold": config.threshold if scenario is None else config.holders(len(scenario.parts)),
        "layers": list(plan.forms),
        "forward_widths": list(plan.forward.values()),
        "backward_widths": list(plan.backward.values()),
    }
    if scenario is None:
        return found
    found["eps_p"] = subgraph_leakage(scenario.whole.edge_index, owners(scenario))
    found["cross_edge_share"] = scenario.statistics.cross_edge_share
    degree = neighbours(scenario.whole.edge_index, scenario.whole.num_nodes)
    found["devices_below_k_min"] = float((degree < config.k_min).float().mean())
    found["cost"] = cost(secmp, plan, degree, len(scenario.parts))
    return found


def owners(scenario: Scenario) -> Tensor:
    """Number of the silo that owns each node of the whole graph, (n,); node ids may be any numbers."""
    ids, order = scenario.whole.node_id.sort()
    owner = torch.empty(scenario.whole.num_nodes, dtype=torch.int64)
    for number, data in enumerate(scenario.parts.values()):
        owner[order[torch.searchsorted(ids, data.node_id)]] = number
    return owner


def neighbours(edge_index: Tensor, count: int) -> Tensor:
    """Different neighbours of every node, in either direction; (n,)."""
    source, target = edge_index[:, edge_index[0] != edge_index[1]]
    pairs = torch.unique(torch.stack([torch.cat([source, target]), torch.cat([target, source])]), dim=1)
    return torch.bincount(pairs[0], minlength=count)


def cost(secmp: SecMP, plan: LayerPlan, degree: Tensor, silos: int) -> dict[str, Any]:
    """Bytes by link, each device counted for itself (in a simulation, mail inside a silo is not on the ledger, and
    devices of a silo share a model).

    ``..._round``: of one training round, without evaluation. ``..._setup``: keys, and raw features if they travel.
    """
    config, keys = secmp.config, secmp.key_bytes(silos)
    edges, slots, nodes = int(degree.sum()), int(bucket(degree.numpy()).sum()), int(degree.numel())
    in_round, in_setup = (sum(map(secmp.message_bytes, widths)) for widths in (plan.widths, plan.raw))
    holders = config.holders(silos) if keys else 0  # each returns as much to a device as one message
    matrices = 2 if config.kind == "sage" else 1
    parameters = sum((matrices * inner + 1) * outer for inner, outer in plan.sizes)
    model = parameters * config.dtype.itemsize
    return {
        "directed_edges": edges,
        "slots": slots if keys else None,
        "device_device_round": edges * in_round,
        "holder_device_round": nodes * holders * in_round,
        "model_device_round": 2 * nodes * model,  # the model down, a gradient up
        "server_silo_round": 0 if config.mode == "cross-device" else 2 * model,  # of each silo
        "device_device_setup": edges * (in_setup + keys),
        "device_holder_setup": slots * holders * keys,
        "holder_device_setup": nodes * holders * in_setup,
    }
