r"""FedProto -- Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022,
https://arxiv.org/abs/2105.00243, Algorithm 1.

    paper        here
    C_i^{(j)}    Sums.embeddings[j] / Sums.counts[j]    client i's prototype of class j: mean embedding of its training
                                                        nodes of the class, without dropout, after local training
    bar C^{(j)}  Prototypes.rows[j]                     global prototype
    lambda       pull

No weights travel. A client trains on

.. math::
    CE + \lambda \,\frac{1}{n} \sum_v \frac{1}{d} \lVert h_v - \bar C^{(y_v)} \rVert^2

over its training nodes, h_v the embedding the last layer is given; the term is absent in the first round and for
classes nobody holds. It then reports the sums of embeddings per class and how many there were: the server needs only
their totals, :math:`\bar C^{(j)} = \sum_i n_{ij} C_i^{(j)} / \sum_i n_{ij}`. A class that one client alone holds shows
that client's mean, and one that a single node holds that node's embedding, behind masks too.

# Differs from the authors' code: they take the plain mean over the clients that hold a class; here every node counts
the same, so that how nodes are shared out does not change a prototype. They collect prototypes during the last epoch,
with dropout, and choose among the classes a client has; here after it, without, and among all classes, so that a
prototype is one model's and no score depends on what a client holds. Clients start from common weights, without which
axes of embeddings would not mean the same at two clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.federation.interface import Federation, View
from isthmus.federation.messages import Embedding, LabelStatistic, Message, PartyId
from isthmus.federation.roles import Role, handler
from isthmus.federation.script import Script, ask, total
from isthmus.methods.evaluation import Evaluation, scores_of
from isthmus.methods.learners import EmbeddingTerm, NodeLearner
from isthmus.methods.registry import Log, Method, Phase, register
from isthmus.methods.training import ModelClient, ModelState, TrainConfig
from isthmus.nn.inputs import Inputs
from isthmus.records import Record
from isthmus.seeds import Stream


@dataclass(frozen=True)
class FedProtoConfig(TrainConfig):
    """Settings of FedProto.

    Args:
        pull: Weight lambda of the distance to the prototypes; 0 is Local.
        classify: A node's class by the client's ``model``, or by the nearest ``prototype``.
    """

    pull: float = 1.0
    classify: Literal["model", "prototype"] = "model"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pull < 0.0:
            raise ConfigError(f"pull must be at least 0, got {self.pull}")


@dataclass(frozen=True)
class Prototypes(Message):
    """bar C (C, d), and which classes have one."""

    rows: Embedding[Tensor]
    known: LabelStatistic[Tensor]


@dataclass(frozen=True)
class Sums(Message):
    """Sums of embeddings by class (C, d) and numbers of nodes (C,): ready to be added up over clients."""

    embeddings: Embedding[Tensor]
    counts: LabelStatistic[Tensor]


@dataclass(frozen=True)
class ServerState(Record):
    """The global prototypes; ``known`` is 0 for a class that has none."""

    rows: Tensor
    known: Tensor


@dataclass(frozen=True)
class ProtoState(ModelState):
    """A client's model, and the prototypes it received last."""

    rows: Tensor
    known: Tensor


class FedProtoClient(ModelClient[FedProtoConfig]):
    """One client: its model stays."""

    state: ProtoState
    keeps: ClassVar[tuple[str, ...]] = ("rows", "known")
    learner: NodeLearner

    def initial_state(self) -> ProtoState:
        state = super().initial_state()
        width = self.learner.embedding(state.weights, self.learner.inputs).shape[1]
        rows = torch.zeros(self.data.num_classes, width, dtype=self.config.dtype)
        return ProtoState(state.weights, state.optimizer, rows, torch.zeros(self.data.num_classes))

    @handler
    def local_update(self, common: Prototypes) -> Sums:
        """E steps with the received prototypes, then the sums the next ones are made of."""
        rows, known = common.rows, common.known
        if rows.shape[0] == len(self.state.rows) and rows.shape[1] == 0:  # the first round
            rows, known = self.state.rows, self.state.known
        self.state = replace(self.state, rows=rows, known=known)
        self.state = self.train(self.state.weights, received={})  # type: ignore[assignment]
        inputs = self.learner.inputs
        count = inputs.counts[0]
        embedding, y = self.learner.embedding(self.state.weights, inputs)[:count], inputs.y[:count]
        sums = torch.zeros_like(self.state.rows).index_add_(0, y, embedding)
        return Sums(sums, torch.bincount(y, minlength=len(sums)).to(sums.dtype))

    def term(self) -> EmbeddingTerm | None:
        """lambda times the mean squared distance to the prototype of a node's class."""
        if not self.config.pull or not bool(self.state.known.any()):
            return None
        inputs = self.learner.inputs
        count = inputs.counts[0]
        y = inputs.y[:count]
        target, held = self.state.rows[y], self.state.known[y].to(self.config.dtype).unsqueeze(1)
        scale = self.config.pull / (max(1, count) * max(1, target.shape[1]))

        def value(embedding: Tensor, inputs: Inputs) -> Tensor:
            return (scale * ((embedding[:count] - target).square() * held).sum()).view(1)

        return EmbeddingTerm(value)

    def logits(self) -> Tensor:
        if self.config.classify == "model" or not bool(self.state.known.any()):
            return super().logits()
        z = self.learner.embedding(self.state.weights, self.learner.everything)[: self.learner.num_samples]
        near = -torch.cdist(z, self.state.rows).square()
        return near.masked_fill(self.state.known == 0, torch.finfo(near.dtype).min)


def init(view: View, config: FedProtoConfig, common: Stream) -> ServerState:
    """No prototypes yet."""
    if not view.alike:
        raise ConfigError("fedproto shares a prototype per class: all clients need the same classes")
    return ServerState(torch.zeros(view.num_classes, 0, dtype=config.dtype), torch.zeros(view.num_classes))


def fedproto_round(state: ServerState, federation: Federation, config: FedProtoConfig) -> tuple[ServerState, Log]:
    """Every client trains; the server adds up what they report and divides."""
    added = federation.sum(FedProtoClient.local_update, Prototypes(state.rows, state.known))
    known = added.counts > 0
    rows = added.embeddings / added.counts.clamp(min=1.0).unsqueeze(1)  # bar C^(j) = sum_i n_ij C_i^(j) / sum_i n_ij
    return ServerState(rows, known.to(torch.float32)), {}


def evaluate(state: ServerState, federation: Federation, config: FedProtoConfig) -> Mapping[PartyId, Evaluation]:
    """Every client scores its own model."""
    return scores_of(federation, FedProtoClient.evaluate)


def script(config: FedProtoConfig, view: View) -> Script:
    """Sums by class in every round; models stay."""
    return {"train": (total(FedProtoClient.local_update),), "evaluation": (ask(FedProtoClient.evaluate),)}


METHOD = register(
    Method(
        name="fedproto",
        summary="personal models that share a prototype embedding per class; no weights travel",
        reference="Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022",
        config=FedProtoConfig,
        edge_weights=True,
        tasks=("node",),
        init=init,
        phases=(Phase("train", fedproto_round),),
        evaluate=evaluate,
        roles={"client": Role(FedProtoClient)},
        script=script,
        shared_values=lambda state: state.rows.numel(),
    )
)
