"""FedStruct where the server knows the graph -- Aliakbari, Östman & Graell i Amat, ICLR 2025, appendix H, Algorithm 4,
https://arxiv.org/abs/2402.19163.

Clients send the server their edges, cross edges and node ids; features and labels stay. The server computes any
structure feature on the whole graph and any structure model:

    z = sGNN_{theta_s}(S, E)                  at the server, of all nodes
    h = fGNN_{theta_f}(X_i, E_i)              at client i
    yhat_v = softmax(Theta_c^T [z_v || h_v]) = softmax(Theta_cs^T z_v + Theta_cf^T h_v)                      (App. H)

    paper                     here
    theta_s, theta_f          weights ``structure.*`` and ``feature.*``
    Theta_cs, Theta_cf        weights ``head.structure`` and ``head.feature``; none with ``join=sum`` (12.16)
    S, s_q                    `ServerGraphState.nsf`
    dz_v/dtheta_s, dz_v/ds_q  `Jacobian`, with ``gradients=jacobian``

The server sees every edge and every id, and which nodes are labelled. Clients see z of their own
nodes and nothing of others' subgraphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from isthmus.errors import ConfigError, DataError, RunError
from isthmus.federation.interface import Federation, PerClient, View
from isthmus.federation.messages import (
    Embedding,
    Gradient,
    Identifier,
    LabelStatistic,
    Message,
    PartyId,
    Structure,
)
from isthmus.federation.roles import Role, handler
from isthmus.federation.script import Script, ScriptLine, ask, total
from isthmus.graph.graphlets import graphlet_degrees, standardised
from isthmus.graph.powers import walk_diagonals
from isthmus.methods.evaluation import Evaluation, scores_of
from isthmus.methods.fedstruct.algorithm import ModelTask, Step, step_nsf, step_theta
from isthmus.methods.fedstruct.client import FEATURE, STRUCTURE, below, named, padded
from isthmus.methods.fedstruct.directory import cross_edges_of, sorted_arcs, surplus
from isthmus.methods.fedstruct.features import NSF, SPREAD, degree_feature, walk_feature
from isthmus.methods.fedstruct.jacobian import check_size, jacobian, pulled_back
from isthmus.methods.fedstruct.server_config import ServerGraphConfig
from isthmus.methods.fedstruct.state import NO_COLUMNS, NO_STEPS
from isthmus.methods.learners import dropout_source
from isthmus.methods.registry import Log, Method, Phase, register
from isthmus.methods.training import ModelState, WeightedClient, all_familiar, total_samples
from isthmus.nn import train
from isthmus.nn.graph_structure import WholeGraph, propagated
from isthmus.nn.inputs import Inputs
from isthmus.nn.loss import Loss, get_loss
from isthmus.nn.optim import OptimizerState, fresh_state
from isthmus.records import Record
from isthmus.seeds import Stream
from isthmus.tensors import Weights, get_weights, num_values, scaled

HEAD = "head."
HEAD_Z, HEAD_H = HEAD + "structure", HEAD + "feature"


@dataclass(frozen=True)
class ServerGraphState(Record):
    """All the server remembers: the model, the graph, S.

    Args:
        ids: Global id of every node, ascending (n,).
        arcs, weight: The graph, by place in ``ids``: (2, E), (E,).
        rows: Client -> places of its nodes; ``labelled`` -> of its training nodes among those.
        nsf: S (n, d_s).
        scale: Means and deviations by which graphlet degrees were standardised (2, d_s).
    """

    weights: Weights
    optimizer: OptimizerState
    total: float = 0.0
    ids: Tensor = NO_COLUMNS
    arcs: Tensor = NO_COLUMNS
    weight: Tensor = NO_COLUMNS
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    labelled: Mapping[str, Tensor] = field(default_factory=dict)
    nsf: Tensor = NO_COLUMNS
    scale: Tensor = NO_COLUMNS
    nsf_optimizer: OptimizerState = NO_STEPS


def first_weights(config: ServerGraphConfig, feature: Weights, classes: int, common: Stream) -> dict[str, Tensor]:
    """theta_f, theta_s and Theta_c at the start."""
    structure = config.net(classes).first_weights(common.child("structure"), config.dtype)
    head: dict[str, Tensor] = {}
    if config.join == "concat":
        bound = (2 * classes) ** -0.5  # as torch.nn.Linear(2 C, C) starts
        draws = torch.rand(2 * classes, classes, generator=common.child("head").torch()) * 2 - 1
        head = {HEAD_Z: draws[:classes] * bound, HEAD_H: draws[classes:] * bound}
    return {
        **named(feature, FEATURE),
        **named(structure, STRUCTURE),
        **{name: tensor.to(config.dtype) for name, tensor in head.items()},
    }


def init(view: View, config: ServerGraphConfig, common: Stream) -> ServerGraphState:
    if not view.alike:
        raise ConfigError(
            "fedstruct-server classifies nodes of one graph: clients must have the same features and classes; try "
            "fedavg"
        )
    weights = first_weights(config, get_weights(config.first_model(view, common)), view.num_classes, common)
    return ServerGraphState(weights, fresh_state(config.optimizer, weights))


# -- setup: the server learns the graph, and computes S ---------------------------------------------


@dataclass(frozen=True)
class Subgraph(Message):
    """A client's nodes, edges and cross edges by global id, and which of its nodes are labelled."""

    ids: Identifier[Tensor]
    arcs: Structure[Tensor]
    out: Structure[Tensor]
    out_weight: Structure[Tensor]
    entering: Structure[Tensor]
    entering_weight: Structure[Tensor]
    labelled: LabelStatistic[Tensor]


def setup_round(
    state: ServerGraphState, federation: Federation, config: ServerGraphConfig
) -> tuple[ServerGraphState, Log]:
    """|Vt|, the graph, and S of all nodes."""
    state = with_graph(
        replace(state, total=total_samples(federation)), federation.call(ServerGraphClient.give_subgraph)
    )
    nsf, scale = first_nsf(state, config, federation.stream("nsf"))
    optimizer = fresh_state(config.optimizer, {NSF: nsf}) if config.learns_nsf else NO_STEPS
    return replace(state, nsf=nsf, scale=scale, nsf_optimizer=optimizer), {}


def with_graph(state: ServerGraphState, parts: Mapping[PartyId, Subgraph]) -> ServerGraphState:
    """The whole graph from everybody's part; both ends of a cross edge must list it."""
    every = torch.cat([part.ids for part in parts.values()])
    ids = every.sort().values
    if bool((ids[1:] == ids[:-1]).any()):
        twice = int(ids[1:][ids[1:] == ids[:-1]][0])
        raise DataError(f"node {twice} has two owners: every node belongs to one client; correct the node ids")

    def crossing(arcs: str, weight: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        ends = torch.cat([getattr(part, arcs) for part in parts.values()], dim=1)
        values = torch.cat([getattr(part, weight) for part in parts.values()])
        return sorted_arcs(ends[0], ends[1], torch.ones_like(ends[0]), values)

    out, entering = crossing("out", "out_weight"), crossing("entering", "entering_weight")
    unknown = ~np.isin(np.append(out[:, :2], entering[:, :2]), ids.numpy())
    differ = surplus(out, entering) + surplus(entering, out)
    if differ or unknown.any():
        raise DataError(
            f"cross edges of the clients do not match: {differ} are listed by one end only, {int(unknown.sum())} ends "
            "belong to nobody; both owners must list every cross edge"
        )
    arcs = torch.cat([torch.cat([part.arcs, part.out], dim=1) for part in parts.values()], dim=1)
    weight = torch.cat(
        [torch.cat([torch.ones(part.arcs.shape[1]), part.out_weight.float()]) for part in parts.values()]
    )
    return replace(
        state,
        ids=ids,
        arcs=torch.searchsorted(ids, arcs.contiguous()),
        weight=weight,
        rows={client: torch.searchsorted(ids, part.ids) for client, part in parts.items()},
        labelled={client: part.labelled for client, part in parts.items()},
    )


def first_nsf(state: ServerGraphState, config: ServerGraphConfig, stream: Stream) -> tuple[Tensor, Tensor]:
    """S on the whole graph: edges between clients count as all others do."""
    nodes, scale = state.ids.numel(), NO_COLUMNS
    if config.nsf == "hop2vec":
        nsf = torch.randn(nodes, config.nsf_dim, generator=stream.torch()) * SPREAD
    elif config.nsf == "node2vec":
        nsf = config.walker.embed(state.arcs, nodes, stream)
    elif config.nsf == "gdv":
        values, mean, deviation = standardised(graphlet_degrees(state.arcs, nodes))
        nsf, scale = torch.from_numpy(values), torch.from_numpy(np.stack([mean, deviation]))
    else:
        nsf = place_feature(state, config)
    return nsf.to(config.dtype), scale


def place_feature(state: ServerGraphState, config: ServerGraphConfig) -> Tensor:
    """Degrees, or return probabilities of walks and degrees."""
    nodes = state.ids.numel()
    degree = np.rint(np.bincount(state.arcs.numpy().ravel(), minlength=nodes) / 2).astype(np.int64)
    if config.nsf == "degree":
        return degree_feature(degree, config.nsf_dim)
    walk = graph_of(state, torch.float64).walk.csr
    return walk_feature(torch.from_numpy(walk_diagonals(walk, config.steps)), degree, config.nsf_dim)


def graph_of(state: ServerGraphState, dtype: torch.dtype) -> WholeGraph:
    return WholeGraph.of(state.arcs, state.weight, state.ids.numel(), dtype)


# -- training --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Jacobian(Message):
    """dz_v/dtheta_s and dz_v/ds_q of a client's training nodes: (t, C, ...) of every parameter."""

    weights: Gradient[Weights]
    nsf: Gradient[Tensor | None]


@dataclass(frozen=True)
class Rows(Message):
    """z_v of a client's own nodes (n_i, C), and in training its Jacobian where the client is to use it."""

    z: Embedding[Tensor]
    jacobian: Jacobian | None


@dataclass(frozen=True)
class Residuals(Message):
    """1/|Vt| dL_i/dz_v of a client's training nodes (t, C): its signs tell their labels."""

    z: LabelStatistic[Tensor]


def train_round(
    state: ServerGraphState, federation: Federation, config: ServerGraphConfig
) -> tuple[ServerGraphState, Log]:
    """Algorithm 4: z to the clients, gradients back, one step."""
    graph = graph_of(state, config.dtype)
    for step in range(config.local_epochs):
        theta_s = {name: tensor.clone().requires_grad_() for name, tensor in below(state.weights, STRUCTURE).items()}
        nsf = state.nsf.clone().requires_grad_(config.learns_nsf)
        draws = federation.stream("structure").child(step).torch()
        z = net_of(state, config).embed(theta_s, nsf, graph, draws)
        learned = [*theta_s.values(), *([nsf] if config.learns_nsf else [])]
        jacobians = jacobians_of(z, theta_s, nsf, state, config) if config.gradients == "jacobian" else {}
        send_rows(state, federation, z.detach(), jacobians)
        average = federation.sum(ServerGraphClient.gradient, ModelTask(for_clients(state.weights), state.total))
        grads, nsf_grad = dict(average.gradients), average.nsf
        if config.gradients == "residuals":
            z_grad = torch.zeros_like(z)
            for client, reply in federation.call(ServerGraphClient.residuals).items():
                z_grad[state.rows[client][state.labelled[client]]] = reply.z
            # Differs from the paper: the server multiplies dz/dtheta_s with dL/dz itself; the paper sends dz/dtheta_s
            # to the clients, |Vt| x C x |theta_s| numbers. The gradient is the same; what the server sees is not.
            found = torch.autograd.grad(z, learned, z_grad)
            grads |= named(dict(zip(theta_s, found, strict=False)), STRUCTURE)
            nsf_grad = found[-1] if config.learns_nsf else None
        state = stepped_on(state, grads, nsf_grad, config, federation.round)
    return state, {}


def for_clients(weights: Weights) -> dict[str, Tensor]:
    """theta_f and Theta_c; theta_s stays at the server."""
    return {name: tensor for name, tensor in weights.items() if not name.startswith(STRUCTURE)}


def net_of(state: ServerGraphState, config: ServerGraphConfig) -> Any:
    name = "top.bias" if config.structure_model == "gnn" else f"layers.{len(config.structure_hidden)}.bias"
    return config.net(int(state.weights[STRUCTURE + name].numel()))


def send_rows(
    state: ServerGraphState, federation: Federation, z: Tensor, jacobians: Mapping[PartyId, Jacobian]
) -> None:
    requests = {client: Rows(z[places], jacobians.get(client)) for client, places in state.rows.items()}
    federation.call(ServerGraphClient.take_rows, PerClient(requests))


def jacobians_of(
    z: Tensor, theta_s: Weights, nsf: Tensor, state: ServerGraphState, config: ServerGraphConfig
) -> dict[PartyId, Jacobian]:
    """dz_v/dtheta_s and dz_v/ds_q of every training node."""
    learned = {**theta_s, **({NSF: nsf} if config.learns_nsf else {})}
    check_size(sum(labelled.numel() for labelled in state.labelled.values()) * z.shape[1], learned)
    found = {}
    for client, places in state.rows.items():
        parts = jacobian(z[places[state.labelled[client]]], learned)
        of_nsf = parts.pop(NSF, None)
        found[client] = Jacobian(parts, of_nsf)
    return found


def stepped_on(
    state: ServerGraphState, grads: Weights, nsf_grad: Tensor | None, config: ServerGraphConfig, round: int
) -> ServerGraphState:
    """theta <- theta - lr dL/dtheta, S <- S - lr_s dL/dS, by Adam as everywhere (12.2)."""
    ordered = {name: grads[name] for name in state.weights}
    weights, optimizer = step_theta(config, state.weights, ordered, state.optimizer, round)
    state = replace(state, weights=weights, optimizer=optimizer)
    if nsf_grad is None:
        return state
    nsf, nsf_optimizer = step_nsf(config, state.nsf, nsf_grad, state.nsf_optimizer, round)
    return replace(state, nsf=nsf, nsf_optimizer=nsf_optimizer)


class JoinedLoss:
    """The loss of q = z Theta_cs + h Theta_cf, as a loss of h. After a backward pass it has dL/dz and dL/dTheta_c."""

    def __init__(self, base: Loss, z: Tensor, weights: Weights) -> None:
        self.base, self.z = base, z
        self.of_z, self.of_h = weights.get(HEAD_Z), weights.get(HEAD_H)
        self.z_grad: Tensor
        self.head_grads: dict[str, Tensor] = {}
        self.loss = Loss(self._value, self._value_and_grad)

    def joined(self, h: Tensor) -> Tensor:
        """q."""
        return joined(self.z, h, self.of_z, self.of_h)

    def _value(self, h: Tensor, inputs: Inputs) -> Tensor:
        q = self.joined(h)
        q.register_hook(lambda grad: self._keep(h.detach(), grad))  # type: ignore[no-untyped-call]
        return self.base.value(q, inputs)

    def _value_and_grad(self, h: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        value, r = self.base.value_and_grad(self.joined(h), inputs)
        self._keep(h.clone(), r.clone())
        return value, r if self.of_h is None else r @ self.of_h.mT  # dL/dh = Theta_cf r_v

    def _keep(self, h: Tensor, r: Tensor) -> None:
        self.z_grad = r if self.of_z is None else r @ self.of_z.mT  # Theta_cs r_v
        self.head_grads = {} if self.of_z is None else {HEAD_Z: self.z.mT @ r, HEAD_H: h.mT @ r}


def joined(z: Tensor, h: Tensor, of_z: Tensor | None, of_h: Tensor | None) -> Tensor:
    """q_v = Theta_cs^T z_v + Theta_cf^T h_v; without a head z_v + h_v."""
    return z + h if of_z is None or of_h is None else z @ of_z + h @ of_h


@dataclass(frozen=True)
class ServerGraphClientState(ModelState):
    """theta_f and Theta_c as they were last, and z of own nodes that goes with them."""

    z: Tensor


class ServerGraphClient(WeightedClient[ServerGraphConfig]):
    """A client: features and labels stay here, edges do not."""

    state: ServerGraphClientState
    plain_model: ClassVar[bool] = False
    keeps_of_data: ClassVar[tuple[str, ...]] = ("z",)

    def setup(self) -> None:
        super().setup()
        self.cross = cross_edges_of(self.data, self.party)
        self.inputs: Inputs = self.learner.inputs  # type: ignore[attr-defined]

    def initial_state(self) -> ServerGraphClientState:
        classes = self.data.num_classes
        weights = first_weights(self.config, get_weights(self.learner.model), classes, self.common)
        z = torch.zeros(self.data.num_nodes, classes, dtype=self.config.dtype)
        return ServerGraphClientState(for_clients(weights), NO_STEPS, z)

    @handler
    def give_subgraph(self) -> Subgraph:
        """All edges, to the server: that it knows the graph is what this method assumes."""
        data, cross, ids = self.data, self.cross, self.data.node_id
        out = cross.outgoing
        return Subgraph(
            ids=ids,
            arcs=ids[data.edge_index],
            out=torch.stack([ids[cross.own[out]], cross.other[out]]),
            out_weight=cross.weight[out],
            entering=torch.stack([cross.other[~out], ids[cross.own[~out]]]),
            entering_weight=cross.weight[~out],
            labelled=torch.nonzero(data.train).flatten(),
        )

    @handler
    def take_rows(self, rows: Rows) -> None:
        """z of own nodes."""
        self.state = replace(self.state, z=rows.z)
        self.scratch.jacobian = rows.jacobian

    @handler
    def gradient(self, task: ModelTask) -> Step:
        """1/|Vt| dL_i/dtheta; exact zeros at a client without training nodes."""
        config, share = self.config, self.samples() / task.total
        z = padded([self.state.z[self.data.train]], self.inputs)
        loss = JoinedLoss(get_loss(config.loss), z, task.weights)
        dropout = dropout_source(config, [self.stream])
        # dL_i/dtheta_f = sum_v (dh_v/dtheta_f)^T Theta_cf r_v
        theta_f, _ = train.gradients(
            self.learner.model, below(task.weights, FEATURE), self.inputs, loss=loss.loss, dropout=dropout
        )
        z_grad = self.inputs.unpad(loss.z_grad) * share
        self.scratch.z_grad = z_grad
        grads = scaled({**named(theta_f, FEATURE), **loss.head_grads}, share)
        given: Jacobian | None = getattr(self.scratch, "jacobian", None)
        if given is None:
            return Step(grads, None, share)
        # dL_i/dtheta_s,j = sum_v (dz_v/dtheta_s,j)^T Theta_cs r_v  (Prop. 4)
        theta_s = named(pulled_back(z_grad, given.weights), STRUCTURE)
        nsf = None if given.nsf is None else torch.tensordot(z_grad, given.nsf, dims=2)
        return Step({**grads, **theta_s}, nsf, share)

    @handler
    def residuals(self) -> Residuals:
        """dL_i/dz of own training nodes, of the gradient given last."""
        if not hasattr(self.scratch, "z_grad"):
            raise RunError(f"{self.party} has no gradient in this round: ask for it first")
        return Residuals(self.scratch.z_grad)

    @handler
    def deploy_head(self, ready: ModelTask) -> Evaluation:
        """Take the trained model and score it, with the z sent just before."""
        self.state = replace(self.state, weights=ready.weights)
        return self.evaluate()

    def logits(self) -> Tensor:
        weights = self.state.weights
        h = self.learner.logits(below(weights, FEATURE))
        return joined(self.state.z, h, weights.get(HEAD_Z), weights.get(HEAD_H))


# -- evaluation and prediction ---------------------------------------------------------------------


def evaluate(
    state: ServerGraphState, federation: Federation, config: ServerGraphConfig
) -> Mapping[PartyId, Evaluation]:
    """z anew, without dropout; every client scores its own nodes."""
    send_rows(state, federation, embedded(state, config), {})
    return scores_of(federation, ServerGraphClient.deploy_head, ModelTask(for_clients(state.weights), state.total))


def embedded(state: ServerGraphState, config: ServerGraphConfig) -> Tensor:
    """z of all nodes, nothing dropped."""
    with torch.no_grad():
        z: Tensor = net_of(state, config).embed(
            below(state.weights, STRUCTURE), state.nsf, graph_of(state, config.dtype), None
        )
    return z


def predict(state: ServerGraphState, federation: Federation, config: ServerGraphConfig) -> None:
    """Of the data of the training clients have kept z. For other data the server is told the graph again: features
    of place are computed on it; new nodes get learned rows from the nodes they reach.
    """
    if all_familiar(federation):
        return
    federation.call(ServerGraphClient.forget_data)
    now = with_graph(state, federation.call(ServerGraphClient.give_subgraph))
    now = replace(now, nsf=later_nsf(state, now, config))
    send_rows(now, federation, embedded(now, config), {})


def later_nsf(before: ServerGraphState, now: ServerGraphState, config: ServerGraphConfig) -> Tensor:
    """S of a graph that has changed since the training, in the terms of the training."""
    if config.nsf in ("degree", "walk"):
        return place_feature(now, config).to(config.dtype)
    if config.nsf == "gdv":
        counts = torch.from_numpy(graphlet_degrees(now.arcs, now.ids.numel())).double()
        return ((counts - before.scale[0]) / before.scale[1]).to(config.dtype)
    place = torch.searchsorted(before.ids, now.ids).clamp(max=before.ids.numel() - 1)
    known = before.ids[place] == now.ids
    if not bool(known.any()):
        raise RunError("no client has a node of the training left, so nothing is known of S: train again")
    rows = before.nsf[place] * known.unsqueeze(1)
    graph, hops = graph_of(now, config.dtype), (1.0,) * (config.structure_hops + 1)
    mass = propagated(known.to(rows.dtype).unsqueeze(1), hops, graph)
    reached = propagated(rows, hops, graph) / mass.clamp(min=torch.finfo(mass.dtype).tiny)
    new = torch.where(mass > 0, reached, before.nsf[place[known]].mean(0))
    return torch.where(known.unsqueeze(1), rows, new)


def facts(state: ServerGraphState, config: ServerGraphConfig, scenario: Any) -> dict[str, Any]:
    """What the server knew, and how S was made."""
    return {
        "nodes": state.ids.numel(),
        "arcs_known_to_server": int(state.arcs.shape[1]),
        "structure_feature": f"{config.nsf}, computed by the server on the whole graph, edges between clients included",
        **({"nodes_without_feature": int((~state.nsf.any(dim=1)).sum())} if config.nsf == "node2vec" else {}),
    }


def script(config: ServerGraphConfig, view: View) -> Script:
    """The server sees edges (`Subgraph`) and with ``gradients=residuals`` residuals."""
    steps = config.local_epochs
    told = (ask(ServerGraphClient.residuals, most=steps),) if config.gradients == "residuals" else ()
    return {
        "setup": (total(ServerGraphClient.size), ask(ServerGraphClient.give_subgraph)),
        "train": (
            ask(ServerGraphClient.take_rows, most=steps, each=True),
            total(ServerGraphClient.gradient, most=steps),
            *told,
        ),
        "evaluation": (ask(ServerGraphClient.take_rows, each=True), ask(ServerGraphClient.deploy_head)),
    }


def predict_script(config: ServerGraphConfig, view: View) -> tuple[ScriptLine, ...]:
    return (
        ask(ServerGraphClient.familiar),
        ask(ServerGraphClient.forget_data),
        ask(ServerGraphClient.give_subgraph),
        ask(ServerGraphClient.take_rows, each=True),
    )


METHOD = register(
    Method(
        name="fedstruct-server",
        summary="FedStruct with a server that knows all edges: any structure feature and model, features stay",
        reference="Aliakbari, Östman & Graell i Amat, Decoupled Subgraph Federated Learning, ICLR 2025, appendix H",
        config=ServerGraphConfig,
        tasks=("node",),
        init=init,
        phases=(Phase("setup", setup_round, rounds=1, setup=True), Phase("train", train_round)),
        evaluate=evaluate,
        predict=predict,
        predict_script=predict_script,
        server_keeps=("weights", "ids", "nsf", "scale"),
        roles={"client": Role(ServerGraphClient)},
        script=script,
        preset="fedstruct",
        cross_edges=True,
        shared_values=lambda state: num_values(state.weights),
        facts=facts,
    )
)
