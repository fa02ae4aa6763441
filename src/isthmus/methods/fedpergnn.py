r"""FedPerGNN -- Wu et al., Nature Communications 2022, https://doi.org/10.1038/s41467-022-30714-9, for node
classification.

The original recommends items: users encrypt the items they know under a common key, a third party matches them and
hands every user the anonymous embeddings of others who know the same items; gradients are clipped and noisy. HiFGL
compares with it on citation graphs and does not say how (baselines spec, section 16). Here:

    original                       here
    users                          silos
    encrypted item ids             keyed hashes of node ids; the key is known to silos, not to the server
    third party                    the server: it matches hashes and passes embeddings on
    neighbour users' embeddings    hidden values of foreign neighbours, constants in layer 2
    clipped noisy gradients        clipped updates with Laplace noise (``clip``, ``epsilon``)
    pseudo-interacted items        none: a node's features have no items to hide among

A silo's first layer sees its own edges only; its second layer sees all, with foreign neighbours as they were at the
round's start. Factors of GCN are split between the two ends, so that no degree is sent.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.errors import ConfigError, ProtocolError
from isthmus.federation.interface import Federation, PerClient, View
from isthmus.federation.messages import Count, Embedding, Identifier, Message, Model, PartyId
from isthmus.federation.roles import Role, handler
from isthmus.federation.script import Script, ScriptLine, ask, mail, total
from isthmus.graph.normalise import from_torch_csr, gcn_norm
from isthmus.methods import fedavg
from isthmus.methods.evaluation import Evaluation, scores_of
from isthmus.methods.fedavg import FedAvgConfig, Update
from isthmus.methods.hifgl.algorithm import ModelPass
from isthmus.methods.hifgl.config import Form
from isthmus.methods.hifgl.layers import dropout_masks, neighbourhood, numpy_type, propagation, residuals
from isthmus.methods.hifgl.parties import run_through
from isthmus.methods.registry import Log, Method, Phase, register
from isthmus.methods.training import Deployed, NoisyState, WeightedClient, total_samples
from isthmus.nn.kernels import spmm
from isthmus.nn.loss import class_weights
from isthmus.nn.optim import stepped
from isthmus.privacy.dp import Mechanism, noise_warning
from isthmus.records import Record
from isthmus.seeds import Stream
from isthmus.tensors import Weights, num_values, scaled


@dataclass(frozen=True)
class FedPerGNNConfig(FedAvgConfig):
    """Settings of FedPerGNN.

    Args:
        clip: L1 norm to which an update is clipped; 0 = not at all.
        epsilon: Privacy parameter of the Laplace noise on one clipped update; 0 = no noise (the upper bound of
            accuracy).
    """

    scores_after_local: ClassVar[bool] = False
    clip: float = 0.0
    epsilon: float = 0.0

    def idle(self) -> dict[str, str]:
        return super().idle() | {"reset_optimizer": "silos keep their optimiser"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backbone != "gcn" or len(self.hidden) != 1 or self.head or self.input_norm:
            raise ConfigError(
                "fedpergnn is a GCN of two layers: set backbone=gcn, one hidden width, head=false, input_norm=false "
                "(or --preset hifgl)"
            )
        if self.loss != "ce" or self.dp_clip or self.fraction < 1.0:
            raise ConfigError(
                "fedpergnn trains cross entropy at all clients with noise of its own (clip, epsilon): leave loss, "
                "fraction and dp_clip as they are"
            )
        if self.clip < 0.0 or self.epsilon < 0.0 or (self.epsilon and not self.clip):
            raise ConfigError(
                f"epsilon is that of updates clipped to clip: both at least 0, and clip above 0 with noise; got "
                f"{self.clip}, {self.epsilon}"
            )
        if self.clip and self.weighting != "uniform":
            raise ConfigError(f"clip protects clients that count the same: set weighting=uniform, got {self.weighting}")

    @property
    def mechanism(self) -> Mechanism:
        """Replacing all data of a client moves a clipped update by at most 2 clip in L1: scale 2 clip / epsilon."""
        return Mechanism(self.clip, 2.0 / self.epsilon if self.epsilon else 0.0, "laplace")


ConfigT = TypeVar("ConfigT", bound=FedPerGNNConfig)


@dataclass(frozen=True)
class HashKey(Message):
    """One client to all others: the key of the hashes, which the server must not know."""

    key: Identifier[bytes]


@dataclass(frozen=True)
class Offer(Message):
    """C->S, once: hashes of own nodes that have neighbours elsewhere, and of foreign nodes one has arcs from."""

    offered: Identifier[Tensor]
    wanted: Identifier[Tensor]


@dataclass(frozen=True)
class Boundary(Message):
    """C->S: source-scaled hidden values of the offered nodes, in that order. The server reads them."""

    rows: Embedding[Tensor]


@dataclass(frozen=True)
class Expanded(Message):
    """S->C: the common model, and the values of the nodes it wanted."""

    weights: Model[Weights]
    total: Count[float]
    rows: Embedding[Tensor]


@dataclass(frozen=True)
class Wanted(Message):
    """S->C: the values of the nodes it wanted."""

    rows: Embedding[Tensor]


@dataclass(frozen=True)
class SiloState(NoisyState):
    """Also the values of foreign neighbours it was scored with last."""

    rows: Tensor


@dataclass(frozen=True)
class ServerState(Record):
    """The common model, and who is to be sent which rows (positions among all offered ones)."""

    round: int
    weights: Weights
    total: float
    routes: Mapping[str, Tensor]


class FedPerGNNClient(WeightedClient[ConfigT], Generic[ConfigT]):
    """One silo: its graph, and constant values of foreign neighbours."""

    state: SiloState

    def setup(self) -> None:
        super().setup()
        data = self.data
        kind = numpy_type(self.config.dtype)
        counts = torch.bincount(data.y[data.train], minlength=data.num_classes)
        balanced = self.config.class_weight == "balanced"
        self.class_weights = class_weights(counts, self.config.dtype) if balanced else None
        where = neighbourhood(data, self.party, inside=False)
        self.graph = propagation("gcn", where, 0).to(self.config.dtype)
        x = from_torch_csr(data.x) if data.x.layout == torch.sparse_csr else sp.csr_matrix(data.x.numpy())
        self.own = sp.csr_matrix(gcn_norm(data.edge_index, data.num_nodes).astype(kind) @ x.astype(kind))
        columns = [(pair.source, pair.target_id, pair.along, pair.against) for pair in where.pairs.values()]
        near, far, along, against = (
            np.concatenate([np.empty(0, np.int64), *part])
            for part in (zip(*columns, strict=True) if columns else [()] * 4)
        )
        self.boundary = np.unique(near[along > 0])
        self.wanted, place = np.unique(far[against > 0], return_inverse=True)
        self.outer = sp.csr_matrix(
            (against[against > 0].astype(kind), (near[against > 0], place)), shape=(data.num_nodes, self.wanted.size)
        )

    def initial_state(self) -> SiloState:
        state = super().initial_state()
        rows = torch.zeros(self.wanted.size, self.config.hidden[0], dtype=self.config.dtype)
        return SiloState(state.weights, state.optimizer, secrets.token_bytes(32), rows)

    # matching

    @handler
    def give_key(self, everybody: Roster) -> Mapping[PartyId, HashKey]:
        """The first client draws the key."""
        if self.party != everybody.clients[0]:
            return {}
        self.scratch.key = secrets.token_bytes(32)
        return {party: HashKey(self.scratch.key) for party in everybody.clients[1:]}

    @handler
    def take_key(self, mail: Mapping[PartyId, HashKey]) -> None:
        for sent in mail.values():
            self.scratch.key = sent.key

    @handler
    def offer(self) -> Offer:
        return Offer(self._hashes(self.data.node_id.numpy()[self.boundary]), self._hashes(self.wanted))

    def _hashes(self, ids: np.ndarray[Any, Any]) -> Tensor:
        """64 bits of HMAC-SHA256; two of a million nodes share one with probability 2^-25."""
        digests = [hmac.digest(self.scratch.key, int(node).to_bytes(8, "big"), hashlib.sha256)[:8] for node in ids]
        return torch.tensor([int.from_bytes(digest, "big", signed=True) for digest in digests], dtype=torch.int64)

    # training

    def _forward(self, weights: Weights, rows: Tensor, masks: Sequence[Tensor] = ()) -> ModelPass:
        """Both layers; the sums over foreign neighbours are known already."""
        if rows.shape != (self.wanted.size, weights["layers.1.weight"].shape[0]):
            raise ProtocolError(
                f"{self.party} wanted {self.wanted.size} rows, was sent {tuple(rows.shape)}: repeat the round"
            )
        forms: tuple[Form, ...] = ("cached", "aggregate")
        model = ModelPass(self.graph, forms, weights, self.own, first_sums=self.own, masks=masks)
        run_through(model.forward(), [spmm(self.outer, rows.to(self.config.dtype).contiguous())])
        return model

    @handler
    def publish(self, common: Deployed) -> Boundary:
        """Hidden values of boundary nodes under the common model."""
        return self._boundary(common.weights)

    def _boundary(self, weights: Weights) -> Boundary:
        weight, bias = weights["layers.0.weight"], weights["layers.0.bias"]
        hidden = torch.relu(spmm(self.own, weight.contiguous()) + bias)
        rows = torch.from_numpy(self.boundary)
        return Boundary((self.graph.source * hidden)[rows])

    @handler
    def local_update(self, common: Expanded) -> Update:
        """FedAvg's local epochs on the expanded graph; what leaves is clipped and noisy if asked for."""
        self.state = replace(self.state, weights={**self.state.weights, **common.weights})
        config, rows, weight = self.config, self.data.num_nodes, 1.0 / max(1, self.data.num_train)
        masks = dropout_masks(self.stream("dropout"), rows, config.hidden, config.dropout, config.dtype)
        nothing = torch.zeros(rows, common.rows.shape[1], dtype=config.dtype)
        for _ in range(config.local_epochs):
            model = self._forward(self.state.weights, common.rows, masks)
            delta, _ = residuals(model.logits, self.data.y, self.data.train, weight, self.class_weights)
            run_through(model.backward(delta), [nothing])  # foreign values are constants: no gradient returns
            weights, optimizer = stepped(
                self.state.weights,
                model.gradients,
                self.state.optimizer,
                optimizer=config.optimizer,
                lr=config.rate(self.round),
                weight_decay=config.weight_decay,
            )
            self.state = replace(self.state, weights=weights, optimizer=optimizer)
        shared: Weights = {name: self.state.weights[name] for name in common.weights}
        if config.clip:
            assert isinstance(self.state, NoisyState)
            update = {name: shared[name] - received for name, received in common.weights.items()}
            purpose = self.stream("noise").path
            release = config.mechanism.release_update(update, secret=self.state.secret, purpose=purpose)
            shared = {name: received + release.weights[name] for name, received in common.weights.items()}
        share = self.samples() / common.total
        return Update(scaled(shared, share), share)

    @handler
    def score(self, common: Expanded) -> Evaluation:
        self.state = replace(self.state, weights={**self.state.weights, **common.weights}, rows=common.rows)
        return self.evaluate()

    def logits(self) -> Tensor:
        return self._forward(self.state.weights, self.state.rows).logits

    # prediction

    @handler
    def publish_trained(self) -> Boundary:
        """Hidden values of boundary nodes under the trained model."""
        return self._boundary(self.state.weights)

    @handler
    def take_rows(self, wanted: Wanted) -> None:
        """Values of the foreign neighbours to predict with."""
        self.state = replace(self.state, rows=wanted.rows)


@dataclass(frozen=True)
class Roster(Message):
    """S->C: all clients, in order."""

    clients: Identifier[tuple[str, ...]]


def init(view: View, config: FedPerGNNConfig, common: Stream) -> ServerState:
    begun = fedavg.init(view, config, common)
    return ServerState(0, begun.weights, 0.0, {})


def setup_round(state: ServerState, federation: Federation, config: FedPerGNNConfig) -> tuple[ServerState, Log]:
    """n, a key the server does not learn, and which rows go where."""
    return replace(state, total=total_samples(federation), routes=routes(federation)), {}


def routes(federation: Federation) -> dict[str, Tensor]:
    """Which rows go where, from hashes under a key the server does not learn."""
    federation.exchange(FedPerGNNClient.give_key, FedPerGNNClient.take_key, Roster(federation.clients))
    return match(federation.call(FedPerGNNClient.offer))


def predict(state: ServerState, federation: Federation, config: FedPerGNNConfig) -> None:
    """Values of foreign neighbours under the trained model, for the data of now."""
    wanted = routes(federation)
    replies = federation.call(FedPerGNNClient.publish_trained)
    rows = torch.cat([replies[client].rows for client in sorted(replies)])
    federation.call(
        FedPerGNNClient.take_rows, PerClient({client: Wanted(rows[route]) for client, route in wanted.items()})
    )


def match(offers: Mapping[str, Offer]) -> dict[str, Tensor]:
    """For every client the positions of its wanted nodes among all offered ones."""
    offered = torch.cat([offers[client].offered for client in sorted(offers)])
    place = {value: at for at, value in enumerate(offered.tolist())}
    if len(place) < offered.numel():
        raise ProtocolError("two offered nodes have the same hash: start the run again for another key")
    routes = {}
    for client in sorted(offers):
        missing = [value for value in offers[client].wanted.tolist() if value not in place]
        if missing:
            raise ProtocolError(
                f"{client} has arcs from {len(missing)} nodes that nobody offers: make the edge lists symmetric"
            )
        routes[client] = torch.tensor([place[value] for value in offers[client].wanted.tolist()], dtype=torch.int64)
    return routes


def expand(state: ServerState, federation: Federation) -> PerClient[Expanded]:
    """Graph expansion: fresh values of boundary nodes, to whoever wanted them."""
    replies = federation.call(FedPerGNNClient.publish, Deployed(state.weights))
    rows = torch.cat([replies[client].rows for client in sorted(replies)])
    return PerClient(
        {client: Expanded(state.weights, state.total, rows[route]) for client, route in state.routes.items()}
    )


def train_round(state: ServerState, federation: Federation, config: FedPerGNNConfig) -> tuple[ServerState, Log]:
    """FedAvg on expanded graphs."""
    total = federation.sum(FedPerGNNClient.local_update, expand(state, federation))
    return replace(state, round=state.round + 1, weights=total.weights), {}


def evaluate(state: ServerState, federation: Federation, config: FedPerGNNConfig) -> Mapping[PartyId, Evaluation]:
    return scores_of(federation, FedPerGNNClient.score, expand(state, federation))


def privacy(
    state: ServerState, config: FedPerGNNConfig, rounds: int, clients: int, masked: bool
) -> dict[str, Any] | None:
    """Laplace noise adds up over rounds. Embeddings of boundary nodes leave without any."""
    if not config.clip:
        return None
    values = num_values(state.weights)
    warning: str | None = "clipping without noise guarantees no privacy: set epsilon above 0"
    if config.epsilon:
        warning = noise_warning(config.mechanism, values, clients)
    return {
        "epsilon": config.epsilon * rounds if config.epsilon else None,
        "epsilon_round": config.epsilon or None,
        "delta": 0.0,
        "unit": "client",
        "neighbours": "all data of one client replaced",
        "mechanism": "laplace",
        "clip": config.clip,
        "releases": rounds,
        "values": values,
        "not_covered": "hidden values of boundary nodes, sent in the clear in every round",
        "warning": warning,
    }


def script(config: FedPerGNNConfig, view: View) -> Script:
    """A common key and what each client offers; then values of boundary nodes before every average and score."""
    return {
        "setup": (
            total(FedPerGNNClient.size),
            mail(FedPerGNNClient.give_key, FedPerGNNClient.take_key),
            ask(FedPerGNNClient.offer),
        ),
        "train": (ask(FedPerGNNClient.publish), total(FedPerGNNClient.local_update, each=True)),
        "evaluation": (ask(FedPerGNNClient.publish), ask(FedPerGNNClient.score, each=True)),
    }


def predict_script(config: FedPerGNNConfig, view: View) -> tuple[ScriptLine, ...]:
    """Calls of :func:`predict`."""
    return (
        mail(FedPerGNNClient.give_key, FedPerGNNClient.take_key),
        ask(FedPerGNNClient.offer),
        ask(FedPerGNNClient.publish_trained),
        ask(FedPerGNNClient.take_rows, each=True),
    )


METHOD = register(
    Method(
        name="fedpergnn",
        summary="FedAvg on silos expanded by hidden values of foreign neighbours, matched by keyed hashes",
        reference=(
            "Wu et al., A federated graph neural network framework for privacy-preserving personalization, Nat. "
            "Commun. 2022"
        ),
        config=FedPerGNNConfig,
        tasks=("node",),
        init=init,
        phases=(Phase("setup", setup_round, rounds=1, setup=True), Phase("train", train_round)),
        evaluate=evaluate,
        roles={"client": Role(FedPerGNNClient)},
        script=script,
        preset="hifgl",
        cross_edges=True,
        predict=predict,
        predict_script=predict_script,
        privacy=privacy,
    )
)
