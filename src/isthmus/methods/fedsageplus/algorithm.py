r"""FedSage+ -- Zhang, Yang, Li, Sun & Yiu, Subgraph Federated Learning with Missing Neighbor Generation, NeurIPS 2021,
https://arxiv.org/abs/2106.13430. Every client learns to generate the neighbours its nodes lost to other clients, mends
its graph with them, and GraphSAGE is trained on the mended graphs by FedAvg.

    paper             here
    \bar G_i          `generator.Impaired`, the graph without hidden nodes (``hide``, ``hidden_share``)
    dGen, fGen, H^e   SageState.generator (`generator`)
    L^d, L^f, L^c     `generator.local_loss`; L^f with other clients' nodes as targets: `cross_round`
    G'_i              `mended`, the graph with generated neighbours, edges both ways
    F                 the classifier, FedAvg's model

1. ``generator_epochs`` steps of every client alone on all of NeighGen.
2. ``cross_rounds`` rounds in which fGen also learns from the others: for a node v of client i every other client j
   takes the neighbours of a random node of its own as targets u,

   .. math::
        L_i = \frac{1}{K} \Bigl( L_i^f + L_i^c + \sum_{j \ne i} \frac{1}{|T_i|} \sum_{v \in T_i} \sum_{p \le \hat d_v}
        \min_{u \in N_j} \tfrac{1}{F} \|\hat x_{vp} - x_u\|^2 \Bigr)

3. Every client mends its graph, and FedAvg begins.

How step 2 crosses clients is ``cross``:

    gradients   i sends its generated rows, j answers with x^ - x_u for the nearest u, which is the gradient but for a
                factor. Answers reach i as one sum over all others, so it learns sums of features of nodes nobody names;
                with ``secure_sum=true`` the server, which passes them on, cannot read one either.
    features    j sends the features of its targets, and i compares: what public implementations do. For comparison.
    none        Nothing crosses: LocSage+'s generator, with FedAvg's classifier.

# Differs from the paper: there i sends fGen and codes, and j answers with gradients of fGen's weights. Both ends can
turn one form into the other: j runs fGen; and i knows the inputs H of fGen's last layer, whose gradient H^T D gives D
as long as there are no more rows than columns of H (`tests/methods/test_fedsageplus.py` does so). So that form hides
nothing, and takes 2 x 61 MB a pair on Cora. What hides features is the sum over clients.
# Differs from the authors' code: labels of the generator's classifier are those of its nodes; one split for all steps;
every client has its own optimiser state; generated neighbours are attached to all nodes; d^ is rounded; models are
scored on each client's mended graph; L^f adds up a node's rows, as in the paper (the code takes their mean over all P
slots). fGen is narrower (1,024 for 2,048), its last layer has rank ``generator_rank``:
0.8 M numbers on Cora, not 15 M (``generator_widths=256,2048 generator_rank=0`` are the published ones).
# Differs from FederatedScope and OpenFGL: there arcs run to generated nodes only, whose features then reach no node
(``edges=outward`` does so, and is FedSage).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.errors import ConfigError
from isthmus.federation.interface import Federation, View
from isthmus.federation.messages import Count, Embedding, Feature, Gradient, Identifier, Message, PartyId
from isthmus.federation.roles import Cohort, Role, handler
from isthmus.federation.script import Script, ScriptLine, ask, mail, total
from isthmus.graph.normalise import from_torch_csr, to_torch_csr
from isthmus.methods import fedavg
from isthmus.methods.averaging import update_line
from isthmus.methods.fedavg import FedAvgClient, FedAvgConfig, ServerState
from isthmus.methods.fedsageplus import generator as neighgen
from isthmus.methods.fedsageplus.generator import Fixed, Impaired, Neighbours, Sizes, Slots
from isthmus.methods.learners import NodeLearner
from isthmus.methods.registry import Log, Phase, register
from isthmus.methods.training import ModelState
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.optim import OptimizerState, fresh_state, step_plan, take_step
from isthmus.nn.sparse import as_csr
from isthmus.seeds import Stream
from isthmus.tensors import Weights


@dataclass(frozen=True)
class FedSagePlusConfig(FedAvgConfig):
    """Settings of FedSage+.

    Args:
        cross: How the generator learns from other clients: from sums of ``gradients``, from their ``features`` in clear
            (for comparison), or not at all (``none``).
        edges: Direction of edges between a node and its generated neighbours: ``both``, or ``outward`` (only towards
            them, a mistake of public implementations).
        generator_epochs: Steps for which each client trains its generator alone.
        cross_rounds: Rounds in which the generators also learn from the other clients.
        generator_lr: Learning rate of the generator, trained by Adam.
        generator_weight_decay: Weight decay of the generator.
        generator_dropout: Dropout of the generator.
        hide: Which nodes are hidden, to play the missing ones: a share of the ``validation`` nodes, or of all
            ``nodes``.
        hidden_share: Share of the nodes named by ``hide`` that is hidden.
        most_neighbours: P, the largest number of neighbours generated for a node.
        encoder_width: Width of the encoder's hidden layer.
        code_width: Width of the encoder's output.
        generator_widths: Hidden widths of fGen.
        generator_rank: Rank of fGen's last layer; 0 = full.
        generator_output: Last activation of fGen: ``tanh``, or ``linear`` for features beyond [-1, 1].
    """

    backbone: str = "sage"
    cross: Literal["gradients", "features", "none"] = "gradients"
    edges: Literal["both", "outward"] = "both"
    generator_epochs: int = 20
    cross_rounds: int = 20
    generator_lr: float = 1e-3
    generator_weight_decay: float = 1e-4
    generator_dropout: float = 0.5
    hide: Literal["validation", "nodes"] = "validation"
    hidden_share: float = 0.5
    most_neighbours: int = 5
    encoder_width: int = 32
    code_width: int = 128
    generator_widths: tuple[int, ...] = (256, 1024)
    generator_rank: int = 64
    generator_output: Literal["tanh", "linear"] = "tanh"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("generator_epochs", "cross_rounds", "generator_rank", "generator_weight_decay"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("most_neighbours", "encoder_width", "code_width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.generator_widths or min(self.generator_widths) < 1:
            raise ConfigError("generator_widths: give at least one layer, and every layer a width of at least 1")
        if self.generator_lr <= 0.0:
            raise ConfigError(f"generator_lr must be above 0, got {self.generator_lr}")
        if not 0.0 < self.hidden_share < 1.0:
            raise ConfigError(
                f"hidden_share must lie in (0, 1), or the generator has nothing to learn from, got {self.hidden_share}"
            )
        if not 0.0 <= self.generator_dropout < 1.0:
            raise ConfigError(f"generator_dropout must lie in [0, 1), got {self.generator_dropout}")
        if self.dp_clip and self.cross != "none":
            raise ConfigError(f"dp_clip does not cover what cross={self.cross} sends: set cross=none, or dp_clip=0")

    def why_not_masked(self) -> str:
        if self.cross == "features":
            return (
                "cross=features sends features in clear, whatever is masked: set cross=gradients, or secure_sum=false"
            )
        return super().why_not_masked()

    def check_clients(self, view: View) -> None:
        super().check_clients(view)
        if self.cross == "gradients" and len(view.clients) == 2:
            raise ConfigError(
                "of two clients a sum over all others shows the one other's features: take three clients or more, or "
                "cross=none"
            )

    def sizes(self, num_features: int, num_classes: int) -> Sizes:
        return Sizes(
            features=num_features,
            classes=num_classes,
            hidden=self.encoder_width,
            code=self.code_width,
            widths=self.generator_widths,
            rank=self.generator_rank,
            most=self.most_neighbours,
            output=self.generator_output,
        )


@dataclass(frozen=True)
class Everybody(Message):
    """Names of all clients."""

    clients: Identifier[tuple[PartyId, ...]]


@dataclass(frozen=True)
class Generated(Message):
    """Generated neighbours of this client's training nodes, row by row (S, F); of which node each is (S,); and how many
    neighbours each node misses (V,).
    """

    rows: Embedding[Tensor]
    node: Count[Tensor]
    missing: Count[Tensor]


@dataclass(frozen=True)
class Residuals(Message):
    """x^ - x_u for the nearest target u of every row (S, F): delivered as a sum over clients."""

    rows: Gradient[Tensor]


@dataclass(frozen=True)
class Missing(Message):
    """How many neighbours each of this client's training nodes misses (V,)."""

    missing: Count[Tensor]


@dataclass(frozen=True)
class RawFeatures(Message):
    """Features of this client's own nodes, in clear (sparse, U x F), and which are the targets of each asked node, -1
    for none (V, P).
    """

    x: Feature[Tensor]
    targets: Count[Tensor]


@dataclass(frozen=True)
class Mended(Message):
    """How many neighbours were generated, and for how many nodes."""

    neighbours: Count[int]
    nodes: Count[int]


@dataclass(frozen=True)
class SageServer(ServerState):
    """FedAvg's, and what clients said of their mended graphs, added up."""

    neighbours: int
    nodes: int


@dataclass(frozen=True)
class SageState(ModelState):
    """The classifier and its optimiser; the generator and its; whether the graph is mended."""

    generator: Weights
    generator_optimizer: OptimizerState
    mended: bool


class MendedLearner(NodeLearner):
    """Learns on the mended graph; samples, groups and logits are those of the client's own nodes."""

    def __init__(self, plain: NodeLearner, data: NodeData) -> None:
        super().__init__(data, plain.model, plain.config)
        self.y, self.num_samples, self.masks = plain.y, plain.num_samples, plain.masks

    def logits(self, weights: Weights) -> Tensor:
        return super().logits(weights)[: self.num_samples]


@dataclass(frozen=True)
class Settled:
    """What stays the same while only fGen learns: noiseless codes of nodes with generated neighbours, what the losses
    read, the first products of the classifier, and what others are asked: which node every compared row is of, and how
    many neighbours each misses.

    Args:
        of: The weights it follows from.
    """

    of: tuple[Tensor, ...]
    codes: Tensor
    known: Fixed
    own: Tensor
    asked_by: Tensor
    missing: Tensor


class FedSagePlusClient(FedAvgClient[FedSagePlusConfig]):
    """One client: its generator stays."""

    state: SageState
    learner: NodeLearner
    cohort: ClassVar[type[Cohort[Any]] | None] = None
    keeps: ClassVar[tuple[str, ...]] = ("generator", "mended")
    plain_model: ClassVar[bool] = False

    def setup(self) -> None:
        super().setup()
        self.plain = self.learner
        self._mended_by: Weights | None = None
        self.sizes = self.config.sizes(self.data.num_features, self.data.num_classes)
        self.neighbours = Neighbours(self.data.edge_index, self.data.num_nodes)
        self._impaired: Impaired | None = None
        self._settled: Settled | None = None
        self._x: sp.csr_matrix | None = None

    def initial_state(self) -> SageState:
        state = super().initial_state()
        weights = neighgen.first_weights(self.sizes, self.common.child("generator"), self.config.dtype)
        return SageState(state.weights, state.optimizer, weights, fresh_state("adam", weights), mended=False)

    # -- the generator -----------------------------------------------------------------------------

    @property
    def x(self) -> sp.csr_matrix:
        if self._x is None:
            self._x = as_csr(self.data.x)
        return self._x

    @property
    def impaired(self) -> Impaired:
        """The graph without hidden nodes, the same in all rounds."""
        if self._impaired is None:
            data, config = self.data, self.config
            among = torch.nonzero(data.val if config.hide == "validation" else torch.ones_like(data.val)).flatten()
            order = torch.randperm(len(among), generator=self._stream.child("hide").torch())
            hidden = torch.zeros_like(data.val)
            hidden[among[order[: int(config.hidden_share * len(among))]]] = True
            self._impaired = neighgen.impair(data, hidden, config.most_neighbours, config.dtype)
        return self._impaired

    def noise(self, draws: torch.Generator, count: int) -> tuple[Tensor, Tensor | None]:
        """N(0, 1) for the codes of some nodes, and what dropout multiplies by."""
        noise = torch.randn(count, self.config.code_width, generator=draws, dtype=self.config.dtype)
        if not self.config.generator_dropout:
            return noise, None
        width, rate = self.config.generator_widths[-1], self.config.generator_dropout
        return noise, DropoutSource([draws]).mask([count], count, width, rate, self.config.dtype)

    @handler
    def learn_generator(self) -> None:
        """Step 1: all of NeighGen, alone."""
        config, state, impaired = self.config, self.state, self.impaired
        weights = {name: tensor.clone() for name, tensor in state.generator.items()}
        moments, draws = state.generator_optimizer.copy(), self.stream("noise").torch()
        epochs, decay = config.generator_epochs, config.generator_weight_decay
        plan = step_plan("adam", moments.steps, epochs, config.generator_lr, decay, config.dtype)
        for epoch in range(epochs if len(impaired.train) else 0):
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
            loss = neighgen.local_loss(leaves, self.sizes, impaired, self.x, partial(self.noise, draws))
            found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
            moments = take_step(weights, dict(zip(leaves, found, strict=True)), moments, replace(plan, step=epoch))
        self.state = replace(state, generator=weights, generator_optimizer=moments)

    @torch.no_grad()
    def settled(self) -> Settled:
        """Computed once for all rounds of step 2."""
        weights, impaired, most = self.state.generator, self.impaired, self.sizes.most
        of = tuple(tensor for name, tensor in weights.items() if not name.startswith(neighgen.ROWS))
        if self._settled is None or any(a is not b for a, b in zip(self._settled.of, of, strict=True)):
            codes = neighgen.encode(weights, impaired.graph)
            slots = neighgen.used_slots(neighgen.missing_counts(weights, codes), most, impaired.near)
            known = neighgen.fixed(impaired, slots, self.x)
            asked, asked_by = torch.unique(known.number, return_inverse=True)
            missing = impaired.missing[asked].clamp(max=most)
            own = neighgen.first_products(weights, impaired.graph)
            self._settled = Settled(of, codes[torch.unique(slots.node)], known, own, asked_by, missing)
        return self._settled

    def generate(self) -> None:
        """This round's rows of all nodes the losses see, to differentiate."""
        settled = self.settled()
        noise, drop = self.noise(self.stream("noise").torch(), len(settled.codes))
        leaves = {
            name: tensor.detach().requires_grad_(name.startswith(neighgen.ROWS))
            for name, tensor in self.state.generator.items()
        }
        slots = settled.known.slots
        self.scratch.leaves = leaves
        self.scratch.rows = neighgen.generated_rows(leaves, self.sizes, settled.codes + noise, slots, drop)

    def learn_rows(self, away: Tensor | None, others: int) -> None:
        """One step on fGen: (L^f + CE at home + L^f of the others) / K. ``away``: residuals, summed over the others."""
        config, state, scratch, settled = self.config, self.state, self.scratch, self.settled()
        rows, leaves = scratch.rows, {name: w for name, w in scratch.leaves.items() if w.requires_grad}
        del scratch.rows, scratch.leaves
        if not len(rows) or not len(self.impaired.train):
            return
        loss = neighgen.row_loss({**state.generator, **leaves}, self.impaired, settled.known, rows, settled.own)
        if away is not None:
            # sum_j |x^ - x_j|^2 has the gradient 2 sum_j (x^ - x_j): the sum of residuals is all that is needed.
            over = rows.shape[1] * len(self.impaired.train)
            loss = loss + 2.0 * (rows[settled.known.which] * away.to(rows.dtype)).sum() / over
        found = torch.autograd.grad(loss / (others + 1), list(leaves.values()))
        weights = {**state.generator, **{name: state.generator[name].clone() for name in leaves}}
        kept = state.generator_optimizer
        only = [{name: part[name] for name in leaves} for part in (kept.first, kept.second)]  # the rest is not needed
        moments = OptimizerState(kept.steps, *only).copy()
        plan = step_plan("adam", moments.steps, 1, config.generator_lr, config.generator_weight_decay, config.dtype)
        moments = take_step(weights, dict(zip(leaves, found, strict=True)), moments, plan)
        self.state = replace(state, generator=weights, generator_optimizer=moments)

    def targets(self, asking: PartyId, missing: Tensor) -> Tensor:
        """Own nodes that another client's generated rows are compared with in this round. (V, P)"""
        stream, most = self._stream.child("targets", self.round, asking), self.sizes.most
        return self.neighbours.of_random_nodes(missing.clamp(max=most), most, stream)

    # -- step 2, sums of gradients -----------------------------------------------------------------

    @handler
    def send_rows(self, everybody: Everybody) -> Mapping[PartyId, Generated]:
        """This client's generated rows, to every other client."""
        self.generate()
        self.scratch.others = [party for party in everybody.clients if party != self.party]
        settled, rows = self.settled(), self.scratch.rows.detach()
        message = Generated(rows[settled.known.which], settled.asked_by, settled.missing)
        return dict.fromkeys(self.scratch.others, message)

    @handler
    def take_rows(self, mail: Mapping[PartyId, Generated]) -> None:
        self.scratch.asked = mail

    @handler
    def send_residuals(self) -> Mapping[PartyId, Residuals]:
        """For every row that came, how far it is from the nearest of this client's targets."""
        asked: Mapping[PartyId, Generated] = self.scratch.asked
        if not asked:
            return {}
        targets = torch.cat([self.targets(asking, sent.missing)[sent.node] for asking, sent in asked.items()])
        rows = torch.cat([sent.rows.to(self.config.dtype) for sent in asked.values()])
        away = torch.split(neighgen.residuals(rows, targets, self.x), [len(sent.rows) for sent in asked.values()])
        return {asking: Residuals(part) for asking, part in zip(asked, away, strict=True)}

    @handler
    def learn_from_residuals(self, mail: Residuals | None) -> None:
        self.learn_rows(None if mail is None else mail.rows, len(self.scratch.others))

    # -- step 2, other clients' features in clear --------------------------------------------------

    @handler
    def send_counts(self, everybody: Everybody) -> Mapping[PartyId, Missing]:
        self.generate()
        self.scratch.others = [party for party in everybody.clients if party != self.party]
        return dict.fromkeys(self.scratch.others, Missing(self.settled().missing))

    @handler
    def take_counts(self, mail: Mapping[PartyId, Missing]) -> None:
        self.scratch.asked = mail

    @handler
    def send_features(self) -> Mapping[PartyId, RawFeatures]:
        """Features of this client's nodes leave it as they are."""
        answers = {}
        for asking, sent in self.scratch.asked.items():
            targets = self.targets(asking, sent.missing)
            nodes, place = torch.unique(targets, return_inverse=True)
            there = int((nodes < 0).sum())
            answers[asking] = RawFeatures(to_torch_csr(self.x[nodes[there:].numpy()]), place - there)
        return answers

    @handler
    def learn_from_features(self, mail: Mapping[PartyId, RawFeatures]) -> None:
        settled = self.settled()
        rows = self.scratch.rows[settled.known.which].detach()
        away = torch.zeros_like(rows)
        for sent in mail.values():
            x = from_torch_csr(sent.x)
            if x.shape[0]:
                away += neighgen.residuals(rows, sent.targets[settled.asked_by], x)
        self.learn_rows(away, len(self.scratch.others))

    @handler
    def learn_alone(self) -> None:
        """A round of fGen without the others."""
        self.generate()
        self.learn_rows(None, 0)

    # -- step 3 ------------------------------------------------------------------------------------

    @handler
    def mend_graph(self) -> Mended:
        """The generator is ready; its moments are not needed any more."""
        self.state = replace(self.state, mended=True, generator_optimizer=fresh_state("sgd", self.state.generator))
        self.prepare()
        return Mended(self.learner.data.num_nodes - self.data.num_nodes, self.data.num_nodes)

    def prepare(self) -> None:
        """Learn on the graph as it is now: mended, once the generator is ready."""
        wanted = self.state.generator if self.state.mended else None
        if wanted is not self._mended_by:
            self.learner = self.plain if wanted is None else MendedLearner(self.plain, self.mended_data())
            self._mended_by = wanted

    @torch.no_grad()
    def mended_data(self) -> NodeData:
        """G': generated nodes after the own ones, without labels, in no part of the split."""
        data, weights = self.data, self.state.generator
        graph = neighgen.Graph(self.x, data.edge_index, self.config.dtype)
        codes = neighgen.encode(weights, graph)
        slots = neighgen.used_slots(neighgen.missing_counts(weights, codes), self.sizes.most)
        nodes = torch.unique(slots.node)
        draws = self._stream.child("mend").torch()
        noise = torch.randn(len(nodes), codes.shape[1], generator=draws, dtype=codes.dtype)
        rows = neighgen.generated_rows(weights, self.sizes, codes[nodes] + noise, slots)
        return mended(data, slots, rows, both=self.config.edges == "both")

    def train(self, weights: Weights, received: Weights) -> ModelState:
        self.prepare()
        return super().train(weights, received)

    def logits(self) -> Tensor:
        self.prepare()
        return super().logits()


def mended(data: NodeData, slots: Slots, rows: Tensor, *, both: bool) -> NodeData:
    """Data with generated nodes: features ``rows``, linked to the nodes of ``slots``."""
    count, new = data.num_nodes, len(rows)
    if data.x.layout == torch.strided:
        x = torch.cat([data.x, rows.to(data.x.dtype)])
    else:
        own = as_csr(data.x)
        x = to_torch_csr(sp.vstack([own, sp.csr_matrix(rows.numpy().astype(own.dtype))], format="csr"))
    no = torch.zeros(new, dtype=torch.bool)
    parts: Any = {part: torch.cat([getattr(data, part), no]) for part in ("train", "val", "test")}
    return replace(
        data,
        x=x,
        edge_index=neighgen.attached(data.edge_index, count, slots, both=both),
        y=torch.cat([data.y, torch.full((new,), -1)]),
        node_id=torch.cat([data.node_id, torch.full((new,), -1)]),
        **parts,
    )


def init(view: View, config: FedSagePlusConfig, common: Stream) -> SageServer:
    if not view.alike:
        raise ConfigError("fedsageplus trains one common model: all clients need the same features and classes")
    first = fedavg.init(view, config, common)
    return SageServer(first.round, first.weights, first.total, neighbours=0, nodes=0)


def generator_round(state: SageServer, federation: Federation, config: FedSagePlusConfig) -> tuple[SageServer, Log]:
    """Step 1."""
    federation.call(FedSagePlusClient.learn_generator)
    return state, {}


def cross_round(state: SageServer, federation: Federation, config: FedSagePlusConfig) -> tuple[SageServer, Log]:
    """One round of step 2."""
    client, everybody = FedSagePlusClient, Everybody(federation.clients)
    if config.cross == "gradients":
        federation.exchange(client.send_rows, client.take_rows, everybody)
        federation.exchange(client.send_residuals, client.learn_from_residuals, combine="sum")
    elif config.cross == "features":
        federation.exchange(client.send_counts, client.take_counts, everybody)
        federation.exchange(client.send_features, client.learn_from_features)
    else:
        federation.call(client.learn_alone)
    return state, {}


def mend_round(state: SageServer, federation: Federation, config: FedSagePlusConfig) -> tuple[SageServer, Log]:
    """Step 3; how much was mended, over all clients."""
    found = federation.sum(FedSagePlusClient.mend_graph)
    return replace(state, neighbours=found.neighbours, nodes=found.nodes), {}


def facts(state: SageServer, config: FedSagePlusConfig, scenario: Any) -> Mapping[str, Any]:
    """How many neighbours were generated: with none, FedSage+ is FedSage."""
    each = state.neighbours / max(1, state.nodes)
    summary = f"{state.neighbours} neighbours were generated for {state.nodes} nodes ({each:.2f} each)"
    return {"summary": summary, "generated_neighbours": state.neighbours, "nodes": state.nodes}


def script(config: FedSagePlusConfig, view: View) -> Script:
    """FedAvg's, after what the generator needs."""
    client = FedSagePlusClient
    crossing: dict[str, tuple[ScriptLine, ...]] = {
        "gradients": (
            mail(client.send_rows, client.take_rows),
            mail(client.send_residuals, client.learn_from_residuals, summed=True),
        ),
        "features": (
            mail(client.send_counts, client.take_counts),
            mail(client.send_features, client.learn_from_features),
        ),
        "none": (ask(client.learn_alone),),
    }
    found: dict[str, tuple[ScriptLine, ...]] = {
        "generator": (ask(client.learn_generator),),
        "cross": crossing[config.cross] if config.cross_rounds else (),
        "mend": (total(client.mend_graph),),
    }
    drawn = fedavg.drawn(len(view.clients), config.fraction)
    return {
        **found,
        "setup": (total(client.size),),
        "train": (update_line(client.local_update, config, view, drawn=drawn),),
        "evaluation": (ask(fedavg.scored(config, client)),),
    }


METHOD = register(
    replace(
        fedavg.METHOD,
        name="fedsageplus",
        summary="FedAvg on graphs mended with generated neighbours, the generator trained across clients",
        reference="Zhang et al., Subgraph Federated Learning with Missing Neighbor Generation, NeurIPS 2021",
        config=FedSagePlusConfig,
        tasks=("node",),
        edge_weights=False,
        own_backbones=False,
        init=init,
        phases=(
            Phase("generator", generator_round, rounds=1, setup=True),
            Phase("cross", cross_round, rounds=lambda config: int(config.cross_rounds), setup=True),
            Phase("mend", mend_round, rounds=1, setup=True),
            Phase("setup", fedavg.count_round, rounds=1, setup=True),
            Phase("train", fedavg.fedavg_round),
        ),
        script=script,
        roles={"client": Role(FedSagePlusClient)},
        facts=facts,
    )
)
