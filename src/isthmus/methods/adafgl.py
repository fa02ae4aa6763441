r"""AdaFGL -- Li, Wu, Zhang, Zhu & Wang, AdaFGL: A New Paradigm for Federated Node Classification with Topology
Heterogeneity, ICDE 2024, https://arxiv.org/abs/2401.11750. FedAvg trains an extractor; then every client alone rewires
its graph by what the extractor says and trains a head for homophilous and one for heterophilous neighbourhoods.

    paper          here
    P^             `p`, soft predictions of the extractor
    H^             AdaState.homophily     how well label propagation works at the client, in [0, 1]
    A~             `rewired`              alpha A + (1 - alpha) B, B = 1 where predictions of two nodes agree
    X~             [X, Â X, Â^2 X, Â^3 X]  with Â the normalised A~
    alpha, beta    own_edges, agreement

Step 1 is FedAvg for ``extractor_rounds`` rounds; the run's rounds are step 2, ``local_epochs`` steps each, in which no
message passes. What is deployed mixes both heads:

.. math::
    H\, \tfrac{1}{2} (\mathrm{softmax}(l) + \mathrm{softmax}(p)) + (1 - H)\, \tfrac{1}{3} (\mathrm{softmax}(o) +
    \mathrm{softmax}(s) + \mathrm{softmax}(t))

l are the logits of the homophilous head on X~, trained on labels and to stay near p; o, s and t those of the
heterophilous one on X, on X~, and on messages with signs: :math:`t = \tfrac{1}{2}(\mathrm{softmax}(\sigma(M) z) -
\mathrm{softmax}(\sigma(-M) z) + z)`.

# Differs from the authors' code: it takes one head only, by H >= 0.9 (``switch=0.9`` does so; the paper mixes, and so
does this by default); its extractor is that of the best validation round, this one that of the last (the paper's); a
client takes its own best epoch of step 2, here one round is picked for all; step 1 keeps the optimiser's state over
rounds (``reset_optimizer=true`` is the authors'); weights start as torch draws linear layers, each head has a slope of
its own. A client compares all pairs of its nodes, so it may have at most 10,000 (``MOST_NODES``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from isthmus.errors import ConfigError, DataError
from isthmus.federation.interface import Federation, View
from isthmus.federation.messages import Message, Model, PartyId
from isthmus.federation.roles import Cohort, Role, handler
from isthmus.federation.script import Script, ask, total
from isthmus.graph.label_propagation import propagated
from isthmus.graph.normalise import gcn_norm
from isthmus.methods import fedavg
from isthmus.methods.averaging import update_line
from isthmus.methods.evaluation import Evaluation, scores_of
from isthmus.methods.fedavg import FedAvgClient, FedAvgConfig, ServerState
from isthmus.methods.learners import NodeLearner, dropout_source
from isthmus.methods.registry import Log, Phase, register
from isthmus.methods.training import ModelState
from isthmus.nn.dropout import DropoutSource, dropout_mask
from isthmus.nn.optim import OptimizerState, fresh_state, step_plan, take_step
from isthmus.seeds import Stream
from isthmus.tensors import Weights

HOPS = 3
MOST_NODES = 10_000
PROPAGATIONS = 10
HEAD = "head of "


@dataclass(frozen=True)
class AdaFGLConfig(FedAvgConfig):
    """Settings of AdaFGL.

    Args:
        extractor_rounds: Rounds of FedAvg before the clients go on alone.
        own_edges: Weight alpha of the client's own edges beside edges between nodes that agree.
        agreement: Weight beta of agreement in the signed messages of the heterophilous head.
        similar: Cosine of two nodes' predictions above which they agree.
        head_width: Hidden width of the heads.
        head_lr: Learning rate of the heads; not given = ``lr``.
        switch: Take the homophilous head alone where H is at least this, else the other alone; not given = mix.
    """

    scores_after_local: ClassVar[bool] = False
    extractor_rounds: int = 100
    own_edges: float = 0.05
    agreement: float = 0.2
    similar: float = 0.999
    head_width: int = 64
    head_lr: float | None = None
    switch: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("extractor_rounds", "head_width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("own_edges", "agreement", "similar", "switch"):
            if getattr(self, name) is not None and not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} must lie in [0, 1], got {getattr(self, name)}")
        if self.head_lr is not None and self.head_lr <= 0.0:
            raise ConfigError(f"head_lr must be above 0, got {self.head_lr}")


@dataclass(frozen=True)
class Extractor(Message):
    """The federated model, to build on."""

    weights: Model[Weights]


@dataclass(frozen=True)
class AdaState(ModelState):
    """The extractor and its optimiser; the heads, theirs, and H (below 0: not known yet)."""

    heads: Weights
    heads_optimizer: OptimizerState
    homophily: float


class AdaFGLClient(FedAvgClient[AdaFGLConfig]):
    """One client: in step 2 it learns alone."""

    state: AdaState
    learner: NodeLearner
    cohort: ClassVar[type[Cohort[Any]] | None] = None
    keeps: ClassVar[tuple[str, ...]] = ("heads", "homophily")

    def setup(self) -> None:
        super().setup()
        if self.data.num_nodes > MOST_NODES:
            raise DataError(
                f"adafgl compares all pairs of a client's nodes, and a client has {self.data.num_nodes}: split the "
                f"graph among more clients (at most {MOST_NODES} nodes each), or use another method"
            )

    def initial_state(self) -> AdaState:
        state, data = super().initial_state(), self.data
        heads = first_heads(data.num_features, self.config.head_width, data.num_classes, self.common.child("heads"))
        heads = {name: tensor.to(self.config.dtype) for name, tensor in heads.items()}
        return AdaState(state.weights, state.optimizer, heads, fresh_state(self.config.optimizer, heads), -1.0)

    @handler
    def take_extractor(self, sent: Extractor) -> None:
        """Step 1 is over: keep the federated model, and see how well labels spread here."""
        weights = {**self.state.weights, **self.allowed(sent.weights)}
        self.state = replace(self.state, weights=weights, homophily=self.spread_of_labels())

    @handler
    def train_heads(self) -> None:
        """E steps on both heads; nothing is returned."""
        config, state = self.config, self.state
        heads = {name: tensor.clone() for name, tensor in state.heads.items()}
        moments, dropout = state.heads_optimizer.copy(), dropout_source(config, [self.stream])
        lr = config.rate(self.round) if config.head_lr is None else config.head_lr
        plan = step_plan(config.optimizer, moments.steps, config.local_epochs, lr, config.weight_decay, config.dtype)
        # Not isthmus.nn.train.local_epochs: heads are no backbone, and their inputs depend on the extractor.
        for epoch in range(config.local_epochs):
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in heads.items()}
            found = torch.autograd.grad(self.loss(leaves, dropout), list(leaves.values()))
            moments = take_step(heads, dict(zip(leaves, found, strict=True)), moments, replace(plan, step=epoch))
        self.state = replace(state, heads=heads, heads_optimizer=moments)

    # -- what the heads read -----------------------------------------------------------------------

    @cached_property
    def adjacency(self) -> Tensor:
        """The client's own A, dense and symmetric, without loops. (n, n)"""
        count = self.data.num_nodes
        found = torch.zeros(count, count, dtype=self.config.dtype)
        source, target = self.data.edge_index
        found[source, target] = 1.0
        return torch.maximum(found, found.T).fill_diagonal_(0.0)

    @cached_property
    def features(self) -> Tensor:
        x = self.data.x
        return (x if x.layout == torch.strided else x.to_sparse_csr()).to(self.config.dtype)

    def extracted(self) -> tuple[Tensor, Tensor, Tensor]:
        """p, B and Â of the extractor, kept while it is the same."""
        if getattr(self, "_extractor", None) is not self.state.weights:
            p = torch.softmax(self.learner.logits(self.state.weights), dim=1)
            agrees = agreeing(p, self.config.similar)
            self._extractor = self.state.weights
            self._extracted = p, agrees, rewired(self.adjacency, agrees, self.config.own_edges)
        return self._extracted

    def outputs(self, heads: Weights, dropout: DropoutSource | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """l, o, s and t; ``dropout`` in training, after every PReLU between layers."""
        _, agrees, propagation = self.extracted()
        x, drop = self.features, partial(dropped, dropout=dropout, rate=self.config.dropout)

        def stacked(name: str) -> Tensor:
            """First layer on [X, Â X, Â^2 X, Â^3 X], propagated after the products."""
            parts = torch.split(heads[f"{name}.0.weight"], self.data.num_features)
            h: Tensor = x @ parts[HOPS]
            for hop in reversed(range(HOPS)):
                h = x @ parts[hop] + propagation @ h
            return h + heads[f"{name}.0.bias"]

        label = deeper(heads, "homophilous", stacked("homophilous"), drop, layers=2)
        own = deeper(heads, "own", x @ heads["own.0.weight"] + heads["own.0.bias"], drop, layers=3)
        smooth = deeper(heads, "smooth", stacked("smooth"), drop, layers=3)
        z = deeper(heads, "signed", stacked("signed"), drop, layers=3)
        signs = signed_messages(agrees, z, self.config.agreement)
        slope = heads["signs.slope"]
        toward, away = (torch.nn.functional.prelu(each, slope) @ z for each in (signs, -signs))
        return label, own, smooth, (torch.softmax(toward, dim=1) - torch.softmax(away, dim=1) + z) / 2.0

    def loss(self, heads: Weights, dropout: DropoutSource | None = None) -> Tensor:
        p, _, _ = self.extracted()
        label, *others = self.outputs(heads, dropout)
        weight = self.learner.whole.weight[: len(p)]

        def ce(logits: Tensor) -> Tensor:
            rows = torch.nn.functional.cross_entropy(logits, self.data.y.clamp(min=0), reduction="none")
            return (rows * weight).sum()

        near = torch.nn.functional.mse_loss(label, p)
        return ce(label) + near + ce(others[0]) + ce(others[1]) + ce(others[2])

    def logits(self) -> Tensor:
        """Logarithm of the mixed probabilities; the extractor's logits before step 2."""
        if self.state.homophily < 0.0:
            return super().logits()
        p, _, _ = self.extracted()
        with torch.no_grad():
            label, *others = self.outputs(self.state.heads)
            homophilous = (torch.softmax(label, dim=1) + torch.softmax(p, dim=1)) / 2.0
            other = torch.stack([torch.softmax(each, dim=1) for each in others]).mean(0)
            share = self.state.homophily
            if self.config.switch is not None:
                share = float(share >= self.config.switch)
            return torch.log((share * homophilous + (1.0 - share) * other).clamp(min=1e-30))

    def restore(self, weights: Weights, kept: Mapping[str, Any], *, as_trained: bool) -> None:
        """The heads are among what is kept."""
        extractor = {name: tensor for name, tensor in weights.items() if not name.startswith(HEAD)}
        super().restore(extractor, kept, as_trained=as_trained)

    def export(self) -> Weights:
        return {**self.state.weights, **{HEAD + name: tensor for name, tensor in self.state.heads.items()}}

    def spread_of_labels(self) -> float:
        """H: labels of a random half of the training nodes are propagated; the share of the other half they get
        right. 0.5 where there are too few to tell.
        """
        data = self.data
        known = torch.nonzero(data.train & (data.y >= 0)).flatten()
        if len(known) < 2:
            return 0.5
        order = known[torch.randperm(len(known), generator=self.stream("halves").torch())]
        given, held = order[: len(order) // 2], order[len(order) // 2 :]
        return label_propagation(data, given, held)


def label_propagation(data: Any, given: Tensor, held: Tensor) -> float:
    """Accuracy on ``held`` of labels propagated from ``given``."""
    start = torch.full((data.num_nodes, data.num_classes), 1.0 / data.num_classes, dtype=torch.float64)
    start[given] = torch.nn.functional.one_hot(data.y[given], data.num_classes).double()
    y = propagated(gcn_norm(data.edge_index, data.num_nodes), start, given, steps=PROPAGATIONS, mix=0.5)
    return float((y[held].argmax(1) == data.y[held]).double().mean())


def agreeing(p: Tensor, similar: float) -> Tensor:
    """B: 1 where the cosine of two nodes' predictions, softmaxed once more, is above ``similar``; no diagonal."""
    rows = torch.nn.functional.normalize(torch.softmax(p, dim=1), dim=1)
    return (rows @ rows.T > similar).to(p.dtype).fill_diagonal_(0.0)


def rewired(adjacency: Tensor, agrees: Tensor, own: float) -> Tensor:
    """Â of alpha A + (1 - alpha) B, symmetric with loops."""
    both = own * adjacency + (1.0 - own) * agrees
    both = both + torch.eye(len(both), dtype=both.dtype)
    scale = both.sum(1).rsqrt()
    return scale[:, None] * both * scale


def signed_messages(agrees: Tensor, z: Tensor, agreement: float) -> Tensor:
    """M: entries above their mean become positive, others negative, in [-1, 1]; then loops."""
    rows = torch.nn.functional.normalize(torch.softmax(z, dim=1), dim=1)
    cosine = rows @ rows.T
    found = agreement * agrees + (1.0 - agreement) * (cosine - torch.diag(cosine.diagonal()))
    mean, most = found.mean(), found.max()
    tiny = torch.finfo(found.dtype).tiny
    signs = torch.where(found > mean, (found - mean) / (most - mean).clamp(min=tiny), -found / mean.clamp(min=tiny))
    return signs.clamp(-1.0, 1.0) + torch.eye(len(found), dtype=found.dtype)


def dropped(h: Tensor, dropout: DropoutSource | None, rate: float) -> Tensor:
    """Activations of one client after dropout."""
    mask = dropout_mask(dropout, [len(h)], len(h), h, rate)
    return h if mask is None else h * mask


def deeper(heads: Weights, name: str, h: Tensor, drop: Callable[[Tensor], Tensor], *, layers: int) -> Tensor:
    """The layers after the first: PReLU, dropout, then a linear map."""
    for layer in range(1, layers):
        h = drop(torch.nn.functional.prelu(h, heads[f"{name}.slope"]))
        h = h @ heads[f"{name}.{layer}.weight"] + heads[f"{name}.{layer}.bias"]
    return h


def first_heads(num_features: int, width: int, num_classes: int, stream: Stream) -> dict[str, Tensor]:
    """First weights, as torch draws linear layers; slopes of PReLU start at 0.25."""
    generator = stream.torch()
    stacked = (1 + HOPS) * num_features
    shapes = {
        "homophilous": (stacked, width, num_classes),
        "own": (num_features, width, width, num_classes),
        "smooth": (stacked, width, width, num_classes),
        "signed": (stacked, width, width, num_classes),
    }
    weights: dict[str, Tensor] = {"signs.slope": torch.full((1,), 0.25)}
    for name, widths in shapes.items():
        weights[f"{name}.slope"] = torch.full((1,), 0.25)
        for layer, (a, b) in enumerate(pairwise(widths)):
            bound = a**-0.5
            weights[f"{name}.{layer}.weight"] = torch.empty(a, b).uniform_(-bound, bound, generator=generator)
            weights[f"{name}.{layer}.bias"] = torch.empty(b).uniform_(-bound, bound, generator=generator)
    return weights


def extractor_round(state: ServerState, federation: Federation, config: AdaFGLConfig) -> tuple[ServerState, Log]:
    """Between the steps: everybody takes the federated model."""
    federation.call(AdaFGLClient.take_extractor, Extractor(state.weights))
    return state, {}


def personal_round(state: ServerState, federation: Federation, config: AdaFGLConfig) -> tuple[ServerState, Log]:
    """Step 2: every client for itself."""
    federation.call(AdaFGLClient.train_heads)
    return state, {}


def evaluate(state: ServerState, federation: Federation, config: AdaFGLConfig) -> Mapping[PartyId, Evaluation]:
    """Every client scores its mixed heads."""
    return scores_of(federation, AdaFGLClient.evaluate)


def privacy(state: ServerState, config: AdaFGLConfig, rounds: int, clients: int, masked: bool) -> dict[str, Any] | None:
    """That of FedAvg's rounds in step 1; in step 2 nothing leaves a client."""
    return fedavg.privacy(state, config, config.extractor_rounds, clients, masked)


def script(config: AdaFGLConfig, view: View) -> Script:
    """FedAvg's in step 1; in step 2 clients are told to go on, and nothing comes back."""
    drawn = fedavg.drawn(len(view.clients), config.fraction)
    return {
        "setup": (total(AdaFGLClient.size),),
        "extract": (update_line(AdaFGLClient.local_update, config, view, drawn=drawn),),
        "hand over": (ask(AdaFGLClient.take_extractor),),
        "train": (ask(AdaFGLClient.train_heads),),
        "evaluation": (ask(AdaFGLClient.evaluate),),
    }


METHOD = register(
    replace(
        fedavg.METHOD,
        name="adafgl",
        summary="FedAvg, then every client alone rewires its graph and trains heads for like and unlike neighbours",
        reference=(
            "Li et al., AdaFGL: A New Paradigm for Federated Node Classification with Topology Heterogeneity, ICDE 2024"
        ),
        config=AdaFGLConfig,
        tasks=("node",),
        edge_weights=False,
        own_backbones=False,
        phases=(
            Phase("setup", fedavg.count_round, rounds=1, setup=True),
            Phase("extract", fedavg.fedavg_round, rounds=lambda config: int(config.extractor_rounds)),
            Phase("hand over", extractor_round, rounds=1),
            Phase("train", personal_round),
        ),
        evaluate=evaluate,
        script=script,
        roles={"client": Role(AdaFGLClient)},
        privacy=privacy,
    )
)
