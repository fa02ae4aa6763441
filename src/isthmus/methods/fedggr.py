r"""FedGGR -- Subgraph Federated Learning with Global Graph Reconstruction (APWeb-WAIM 2023): edges between clients are
lost and known to nobody; the server learns a graph over all nodes from compressed embeddings and sends every client the
rows of what a GNN makes of it.

    paper        here
    E_i          Uploaded.rows                 `isthmus.nn.autoencoder` of the client's nodes, sent once
    W_S          ServerState.module            generator and global GNN, `isthmus.methods.global_graph`
    Z_glob^i     Turn.rows                     rows of the client's nodes
    W_C          ServerState.weights           f_theta (any backbone) and one linear layer over [Z_loc, Z_glob],
                                               `isthmus.nn.two_input_head`
    F_l, F_g     local_width, global_width
    k, Q         k, local_epochs
    grad Z^i     Returned.rows

A round: the server sends W_C and Z_glob^i; the client takes Q steps on W_C with Z_glob^i constant and returns grad Z^i;
the server pulls these through the very forward pass that made Z_glob (its autograd graph, dropout masks included, is a
local variable of the round) and steps W_S.

Differs from the paper: clients' W_C go up as a sum already weighted, not one by one (same mean, less shown); grad Z^i
is multiplied by |V_i| / |V|, without which it is not the gradient of the stated objective (``scale_gradients=false``
leaves that out); the auto-encoders are trained as one by averaging every epoch (``encoder=federated``), because
independent ones put their nodes into unrelated spaces, where nearest neighbours are of the same client almost without
exception (``encoder=independent`` is what the paper seems to describe); neighbours are searched again every ``refresh``
rounds. A client that misses a round counts with zeros for its rows.

This is split learning with an honest but curious server, no protection of privacy: embeddings decode to features, and
returned gradients tell which nodes have training labels, and which (`isthmus.privacy.attacks`). ``dummy_gradients``,
``gradient_clip`` and ``gradient_noise``, ``embedding_bits`` make that harder.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from isthmus.errors import ConfigError, ProtocolError
from isthmus.federation.interface import Federation, PerClient, Replies, View
from isthmus.federation.ledger import Disclosure
from isthmus.federation.messages import Count, Embedding, Gradient, Message, Model, PartyId
from isthmus.federation.roles import Role, handler
from isthmus.methods.evaluation import Evaluation
from isthmus.methods.fedavg import Update
from isthmus.methods.global_graph import Channel, GlobalModule
from isthmus.methods.graph_facts import graph_facts
from isthmus.methods.learners import NodeLearner, dropout_source
from isthmus.methods.noise import statement
from isthmus.methods.registry import Log, Method, Phase, register
from isthmus.methods.training import NoisyState, Size, WeightedClient, WeightedConfig, total_samples
from isthmus.nn.autoencoder import FeatureTask, encode, first_autoencoder, project, train_autoencoder
from isthmus.nn.backbone import Backbone
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.loss import get_loss
from isthmus.nn.optim import OptimizerState, fresh_state, step_plan, take_step
from isthmus.nn.registry import build_backbone
from isthmus.nn.train import gradients, predict
from isthmus.nn.two_input_head import HEAD, Joined, classify, first_head
from isthmus.privacy.dp import Mechanism, secret_stream
from isthmus.records import Record
from isthmus.seeds import Stream
from isthmus.tensors import Weights, get_weights, num_values, scaled


@dataclass(frozen=True)
class FedGGRConfig(WeightedConfig):
    """Knobs of FedGGR; ``hidden`` are the widths of f_theta before Z_loc, ``head`` changes nothing: the classifier is
    always there.

    Args:
        weighting: Of W_C's mean; the objective is that of ``nodes``. Returned gradients count by nodes whatever it
            says.
        local_width, global_width: F_l and F_g.
        joint_dropout: Share of [Z_loc, Z_glob] dropped before the classifier in training.
        activate_local: ReLU on Z_loc before the two channels are joined.
        channel: What Z_glob is made of: the ``learned`` graph, or a control (a fixed ``knn`` graph, ``embeddings``
            only, ``zeros``).
        k: Neighbours each node chooses in the learned graph.
        search: ``exact``, or ``approximate`` for graphs beyond about 100,000 nodes (extra ``ann``).
        refresh: Rounds between two searches; weights of the edges follow the generator in every round.
        server_hidden: Hidden width of the global GNN.
        input_dropout: Share of E dropped before the global GNN in training.
        server_lr: The server's rate; not given = ``lr``.
        self_supervision: Weight of SLAPS' self-supervision, which lets the server train its graph on E as well; 0 =
            off, as in FedGGR.
        hidden_share: Share of the entries of E it hides.
        embedding_norm: ``standard`` gives every column of E mean 0 and deviation 1 over all nodes, at the server.
        encoder: One auto-encoder trained by averaging (``federated``), each client its own from a common start
            (``common_start``) or from a start of its own (``independent``); or a public random ``projection``, which
            needs no training.
        encoder_hidden, embedding_width: Widths of the auto-encoder; the second is p.
        encoder_epochs, encoder_lr: Its training.
        encoder_every: Epochs between two means of a federated one.
        encoder_hops: Whether the auto-encoder sees neighbours.
        returned: Which of the Q gradients of Z is sent back; only ``first`` is exact for the round's starting point.
        scale_gradients: Multiply returned gradients by |V_i| / |V|.
        reset_optimizer: Start the clients' optimiser afresh in every round, as FederatedScope does.
        quorum: Share of the clients that must answer a round.
        dummy_gradients: Nodes without a training label return the gradient of a label drawn from the model's own
            prediction, whose mean
            is zero: no row tells by itself whether its node is labelled. Over many rounds a label that changes still
            gives a dummy away.
        gradient_clip, gradient_noise: Clip the gradient of each node's own loss to this length and add Gaussian noise
            of this many times that to every row; 0 = off.
        embedding_bits: Bits per number of E, 1 to 8; 0 = as it is.
    """

    weighting: Literal["train", "nodes", "uniform"] = "nodes"
    local_width: int = 64
    global_width: int = 64
    joint_dropout: float = 0.0
    activate_local: bool = False
    channel: Channel = "learned"
    k: int = 20
    search: Literal["exact", "approximate"] = "exact"
    refresh: int = 10
    server_hidden: int = 64
    input_dropout: float = 0.0
    server_lr: float | None = None
    self_supervision: float = 0.0
    hidden_share: float = 0.2
    embedding_norm: Literal["none", "standard"] = "none"
    encoder: Literal["federated", "common_start", "independent", "projection"] = "federated"
    encoder_hidden: int = 128
    embedding_width: int = 64
    encoder_epochs: int = 200
    encoder_lr: float = 0.01
    encoder_every: int = 1
    encoder_hops: bool = True
    returned: Literal["last", "first", "mean", "sum"] = "last"
    scale_gradients: bool = True
    reset_optimizer: bool = False
    quorum: float = 1.0
    dummy_gradients: bool = False
    gradient_clip: float = 0.0
    gradient_noise: float = 0.0
    embedding_bits: int = 0

    def __post_init__(self) -> None:
        for name in (
            "local_width",
            "global_width",
            "server_hidden",
            "encoder_hidden",
            "embedding_width",
            "k",
            "refresh",
            "encoder_every",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        super().__post_init__()
        if self.encoder_epochs < 0 or self.encoder_lr <= 0.0:
            raise ConfigError(
                f"the encoder needs epochs of at least 0 and lr above 0, got {self.encoder_epochs} and "
                f"{self.encoder_lr}"
            )
        if self.server_lr is not None and self.server_lr <= 0.0:
            raise ConfigError(f"server_lr must be above 0, got {self.server_lr}")
        if self.self_supervision < 0.0:
            raise ConfigError(f"self_supervision must be at least 0, got {self.self_supervision}")
        if not 0.0 < self.hidden_share < 1.0:
            raise ConfigError(f"hidden_share must lie in (0, 1), got {self.hidden_share}")
        if self.self_supervision and self.channel != "learned":
            raise ConfigError(f"self_supervision trains a learned graph: leave it out with channel={self.channel}")
        for name in ("joint_dropout", "input_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        if not 0.0 < self.quorum <= 1.0:
            raise ConfigError(f"quorum must lie in (0, 1], got {self.quorum}")
        if min(self.gradient_clip, self.gradient_noise) < 0.0:
            raise ConfigError(
                f"gradient_clip and gradient_noise must be at least 0, got {self.gradient_clip} and "
                f"{self.gradient_noise}"
            )
        if self.encoder == "federated" and self.encoder_epochs % self.encoder_every:
            raise ConfigError(
                f"encoder_epochs must be a multiple of encoder_every, got {self.encoder_epochs} and "
                f"{self.encoder_every}"
            )
        if self.init != "standard":
            raise ConfigError(f"fedggr starts f_theta as its layers do: leave init out, got {self.init}")
        if self.dummy_gradients and (self.loss != "ce" or self.class_weight != "none"):
            raise ConfigError(
                "dummy_gradients look like those of plain cross-entropy: use loss=ce and leave class_weight out"
            )
        if self.gradient_noise and not self.gradient_clip:
            raise ConfigError(
                "gradient_noise counts in units of gradient_clip: set gradient_clip above 0 too, e.g. gradient_clip=0.1"
            )
        if not 0 <= self.embedding_bits <= 8:
            raise ConfigError(f"embedding_bits must lie in 0 to 8, got {self.embedding_bits}")

    def build(self, *, num_features: int, num_classes: int, stream: Stream) -> Backbone:
        """f_theta: the backbone up to Z_loc, whatever the number of classes."""
        model = build_backbone(
            self.backbone,
            num_features=num_features,
            num_classes=self.local_width,
            hidden=self.hidden,
            dropout=self.dropout,
            input_norm=self.input_norm,
            stream=stream,
            **self.options,
        )
        return model.to(self.dtype)

    def first_head(self, num_classes: int, common: Stream) -> dict[str, Tensor]:
        return first_head(self.local_width, self.global_width, num_classes, common.child("head"), self.dtype)

    def first_autoencoder(self, num_features: int, stream: Stream) -> dict[str, Tensor]:
        return first_autoencoder(
            num_features, self.encoder_hidden, self.embedding_width, stream.child("encoder"), self.dtype
        )

    @property
    def encoder_rounds(self) -> int:
        """Means of a federated auto-encoder, each a round of the setup."""
        return self.encoder_epochs // self.encoder_every if self.encoder == "federated" else 0

    @property
    def module(self) -> GlobalModule:
        hidden = self.hidden_share if self.self_supervision else 0.0
        return GlobalModule(self.channel, self.k, self.search, self.dropout, self.input_dropout, hidden)


# -- messages --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Encoder(Message):
    """The common auto-encoder, and n for the clients to weight by."""

    weights: Model[Weights]
    total: Count[float]


@dataclass(frozen=True)
class Uploaded(Message):
    """E_i (|V_i|, p); the order of its rows is known to the client alone."""

    rows: Embedding[Tensor]


@dataclass(frozen=True)
class Turn(Message):
    """W_C and Z_glob^i."""

    weights: Model[Weights]
    rows: Embedding[Tensor]


@dataclass(frozen=True)
class Returned(Message):
    """grad Z^i of the client's mean loss (|V_i|, F_g); zero where a node has no training label."""

    rows: Gradient[Tensor]


@dataclass(frozen=True)
class Total(Message):
    """n, for the clients to weight by."""

    total: Count[float]


@dataclass(frozen=True)
class Deployment(Message):
    """W_C and Z_glob^i, sent to be used."""

    weights: Model[Weights]
    rows: Embedding[Tensor]


# -- client ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClientState(NoisyState):
    """What a client remembers: W_C and its optimiser; the auto-encoder until E_i is sent; the last rows it was sent to
    use.
    """

    encoder: Weights
    encoder_optimizer: OptimizerState
    rows: Tensor


class FedGGRClient(WeightedClient[FedGGRConfig]):
    """One client. Features, edges and labels stay in ``self.data``."""

    state: ClientState
    learner: NodeLearner

    def setup(self) -> None:
        config, data = self.config, self.data
        model = config.build(
            num_features=data.num_features, num_classes=data.num_classes, stream=self.common.child("init")
        )
        self.learner = NodeLearner(data, model, config)
        self._task: FeatureTask | None = None

    @property
    def task(self) -> FeatureTask:
        """Only the setup needs it, so a restarted client may do without."""
        if self._task is None:
            self._task = FeatureTask.of(self.data, hops=self.config.encoder_hops, dtype=self.config.dtype)
        return self._task

    def initial_state(self) -> ClientState:
        config = self.config
        weights = {**get_weights(self.learner.model), **config.first_head(self.data.num_classes, self.common)}
        stream = self.stream("encoder") if config.encoder == "independent" else self.common
        encoder = {} if config.encoder == "projection" else config.first_autoencoder(self.data.num_features, stream)
        rows = torch.zeros(self.data.num_nodes, config.global_width, dtype=config.dtype)
        return ClientState(
            weights,
            fresh_state(config.optimizer, weights),
            secrets.token_bytes(32),
            encoder,
            fresh_state("adam", encoder),
            rows,
        )

    # -- setup -------------------------------------------------------------------------------------

    def _train_encoder(self, weights: Weights, epochs: int) -> None:
        config = self.config
        encoder, moments, _ = train_autoencoder(
            weights, self.state.encoder_optimizer, self.task, epochs=epochs, lr=config.encoder_lr
        )
        self.state = replace(self.state, encoder=encoder, encoder_optimizer=moments)

    @handler
    def train_encoder(self, common: Encoder) -> Update:
        """Some epochs of the common auto-encoder; ready to be summed."""
        self._train_encoder(common.weights, self.config.encoder_every)
        share = self.samples() / common.total
        return Update(scaled(self.state.encoder, share), share)

    @handler
    def upload(self) -> Uploaded:
        """E_i of an auto-encoder of the client's own, or of the projection everybody knows."""
        if self.config.encoder != "projection":
            self._train_encoder(self.state.encoder, self.config.encoder_epochs)
        return self._embedded(self.state.encoder)

    @handler
    def upload_common(self, common: Encoder) -> Uploaded:
        """E_i of the common auto-encoder."""
        return self._embedded(common.weights)

    def _embedded(self, encoder: Weights) -> Uploaded:
        with torch.no_grad():
            if encoder:
                rows = encode(encoder, self.task)
            else:
                rows = project(self.task, self.config.embedding_width, self.common, self.config.dtype)
        self._task = None
        self.state = replace(self.state, encoder={}, encoder_optimizer=fresh_state("adam", {}))
        return Uploaded(quantised(rows, self.config.embedding_bits))

    # -- rounds ------------------------------------------------------------------------------------

    @handler
    def turn(self, turn: Turn) -> Returned:
        """Q steps on W_C; the gradients of Z_glob^i."""
        config, learner = self.config, self.learner
        weights = {name: tensor.clone() for name, tensor in {**self.state.weights, **turn.weights}.items()}
        moments = fresh_state(config.optimizer, weights) if config.reset_optimizer else self.state.optimizer.copy()
        dropout = dropout_source(config, [self.stream])
        joint = self._joint_dropout()
        labelled, width = self.data.train, config.local_width + config.global_width
        rows = turn.rows.new_zeros(learner.inputs.padded[-1], config.global_width)
        rows[: learner.num_train] = turn.rows[labelled]
        found: list[Tensor] = []
        dummies: list[Tensor] = []
        # Not isthmus.nn.train.local_epochs: dropout, head and the gradients sent back are made for each step apart.
        for _ in range(config.local_epochs):
            mask = (
                None
                if joint is None
                else joint.mask(learner.inputs.counts, len(rows), width, config.joint_dropout, rows.dtype)
            )
            joined = Joined(get_loss(config.loss), weights, rows, activate=config.activate_local, mask=mask)
            if config.dummy_gradients:  # of this step, before it moves the weights: they must look like the others
                dummies.append(self._dummies(weights, turn.rows, joint))
            own = {name: tensor for name, tensor in weights.items() if name not in HEAD}
            grads, _ = gradients(learner.model, own, learner.inputs, loss=joined.as_loss(), dropout=dropout)
            plan = step_plan(config.optimizer, moments.steps, 1, config.lr, config.weight_decay, config.dtype)
            moments = take_step(weights, {**grads, **joined.head_grads}, moments, plan)
            found.append(joined.rows_grad[: learner.num_train])
        self.state = replace(self.state, weights=weights, optimizer=moments)
        self.scratch.received = turn.weights
        gradient = _chosen(dummies, config.returned) if dummies else torch.zeros_like(turn.rows)
        gradient[labelled] = _chosen(found, config.returned)
        return Returned(self._released_rows(gradient))

    def _joint_dropout(self) -> DropoutSource | None:
        """Masks of this round. Where dummies must not be told from labelled rows, of a secret: the run's seed would
        give masks away.
        """
        if not self.config.joint_dropout:
            return None
        stream = self.stream("joint dropout")
        if not self.config.dummy_gradients:
            return DropoutSource([stream.torch()])
        seed = int(secret_stream(self.state.secret, stream.path).uniform(1)[0] * (1 << 62))
        return DropoutSource([torch.Generator().manual_seed(seed)])

    def _dummies(self, weights: Weights, rows: Tensor, joint: DropoutSource | None = None) -> Tensor:
        """For every node the gradient a label would give that is drawn from the model's own prediction: its mean is
        zero. What is drawn for a node stays with it, so that its label changes only where the prediction does."""
        config, count = self.config, len(rows)
        mask = None
        if joint is not None:
            mask = joint.mask(
                (count,), count, config.local_width + config.global_width, config.joint_dropout, rows.dtype
            )
        p = torch.softmax(self._logits(weights, rows, mask).double(), dim=1)
        drawn = secret_stream(self.state.secret, ("dummies",)).uniform(count)
        label = (p.cumsum(1) < torch.from_numpy(drawn)[:, None]).sum(1).clamp(max=p.shape[1] - 1)
        residual = p - torch.nn.functional.one_hot(label, p.shape[1])
        read = weights["head.weight"][config.local_width :].double()
        gradient = (residual @ read.mT / max(1, self.learner.num_train)).to(rows.dtype)
        return gradient if mask is None else gradient * mask[:, config.local_width :]

    def _released_rows(self, gradient: Tensor) -> Tensor:
        """What may leave of grad Z^i: of each node's own loss, so clip means the same at every client."""
        config = self.config
        if not config.gradient_clip:
            return gradient
        count = max(1, self.learner.num_train)
        mechanism = Mechanism(config.gradient_clip, config.gradient_noise)
        return (
            mechanism.release_rows(
                gradient * count, secret=self.state.secret, purpose=self.stream("gradient noise").path
            )[0]
            / count
        )

    @handler
    def update(self, common: Total) -> Update:
        """W_C,i, weighted; ready to be summed."""
        received: Weights = self.scratch.received
        weights: Weights = {name: self.state.weights[name] for name in received}
        if self.config.dp_clip:
            change = self.released({name: weights[name] - start for name, start in received.items()})
            weights = {name: start + change[name] for name, start in received.items()}
        share = self.samples() / common.total
        return Update(scaled(weights, share), share)

    def logits(self) -> Tensor:
        return self._logits(self.state.weights, self.state.rows)

    def _logits(self, weights: Weights, rows: Tensor, mask: Tensor | None = None) -> Tensor:
        local = predict(
            self.learner.model, {name: t for name, t in weights.items() if name not in HEAD}, self.learner.everything
        )
        return classify(weights, local, rows, activate=self.config.activate_local, mask=mask)

    @handler
    def use(self, common: Deployment) -> Evaluation:
        """Take the common model and the rows, and score them."""
        self.state = replace(self.state, weights={**self.state.weights, **common.weights}, rows=common.rows)
        return self.evaluate()


def quantised(rows: Tensor, bits: int) -> Tensor:
    """Every column on 2^bits even steps between its least and its largest value; 0 bits leave it as it is."""
    if not bits or not len(rows):
        return rows
    low, high = rows.amin(0), rows.amax(0)
    step = ((high - low) / ((1 << bits) - 1)).clamp(min=torch.finfo(rows.dtype).tiny)
    steps: Tensor = ((rows - low) / step).round()
    return low + steps * step


def _chosen(found: list[Tensor], which: str) -> Tensor:
    """The gradient of Z that is returned, of those of the Q steps."""
    if which in ("last", "first"):
        return found[-1 if which == "last" else 0]
    total = torch.stack(found).sum(0)
    return total / len(found) if which == "mean" else total


# -- server ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerState(Record):
    """All the server remembers between rounds.

    Args:
        weights: W_C.
        total: n of the mean.
        encoder, encoded: The common auto-encoder until E is there, empty unless it is federated; how many means it has
            seen.
        module, optimizer: W_S and its Adam.
        embeddings: E (N, p), clients in sorted order.
        sizes: Rows of each client, in the same order.
        neighbours: (N, k + 1), of the last search.
    """

    round: int
    weights: Weights
    total: float
    encoder: Weights
    encoded: int
    module: Weights
    optimizer: OptimizerState
    embeddings: Tensor
    sizes: tuple[int, ...]
    neighbours: Tensor

    def split(self, rows: Tensor, clients: tuple[PartyId, ...]) -> dict[PartyId, Tensor]:
        """Rows by client."""
        return dict(zip(clients, torch.split(rows, list(self.sizes)), strict=True))


def init(view: View, config: FedGGRConfig, common: Stream) -> ServerState:
    if not view.alike:
        raise ConfigError(
            "fedggr compares nodes of all clients: they must have the same features and classes; try fedavg"
        )
    widths = config.embedding_width, config.server_hidden, config.global_width
    module = config.module.first_weights(*widths, common.child("server"), config.dtype)
    weights = {**get_weights(config.first_model(view, common)), **config.first_head(view.num_classes, common)}
    optimizer = fresh_state(config.optimizer, {name: module[name] for name in config.module.trained(module)})
    encoder = config.first_autoencoder(view.num_features, common) if config.encoder == "federated" else {}
    return ServerState(
        0,
        weights,
        0.0,
        encoder,
        0,
        module,
        optimizer,
        torch.empty(0, config.embedding_width, dtype=config.dtype),
        (),
        torch.empty(0, 0, dtype=torch.int64),
    )


def setup_round(state: ServerState, federation: Federation, config: FedGGRConfig) -> tuple[ServerState, Log]:
    """Phase 0: n, then a mean of the auto-encoder in each round, and in the last round E and the first graph."""
    total = state.total or total_samples(federation)
    if state.encoded < config.encoder_rounds:
        encoder = federation.sum(FedGGRClient.train_encoder, Encoder(state.encoder, total)).weights
        return replace(state, total=total, encoder=encoder, encoded=state.encoded + 1), {}
    if config.encoder == "federated":
        replies = federation.call(FedGGRClient.upload_common, Encoder(state.encoder, total))
    else:
        replies = federation.call(FedGGRClient.upload)
    embeddings = torch.cat([replies[client].rows for client in federation.clients])
    if config.module.has_graph and config.k >= embeddings.shape[0]:
        raise ConfigError(f"k must be below the number of nodes {embeddings.shape[0]}, got {config.k}; set a smaller k")
    if config.embedding_norm == "standard":
        embeddings = (embeddings - embeddings.mean(0)) / embeddings.std(0, correction=0).clamp(min=1e-6)
    sizes = tuple(int(replies[client].rows.shape[0]) for client in federation.clients)
    neighbours = config.module.neighbours(state.module, embeddings)
    return replace(state, total=total, encoder={}, embeddings=embeddings, sizes=sizes, neighbours=neighbours), {}


def train_round(state: ServerState, federation: Federation, config: FedGGRConfig) -> tuple[ServerState, Log]:
    """One round of the algorithm."""
    module, clients = config.module, federation.clients
    trained = module.trained(state.module)
    leaves = {name: tensor.clone().requires_grad_(name in trained) for name, tensor in state.module.items()}
    dropout = DropoutSource([federation.stream("dropout").torch()])
    graph = module.adjacency(leaves, state.embeddings, state.neighbours)
    z = module.rows(leaves, state.embeddings, graph, dropout)  # Z_glob = GSL(E), kept alive until its gradient is here
    rows = state.split(z.detach(), clients)
    requests = PerClient({client: Turn(state.weights, rows[client]) for client in clients})
    replies = federation.call(FedGGRClient.turn, requests, quorum=config.quorum)
    update = federation.sum(FedGGRClient.update, Total(state.total), to=tuple(replies))
    weights: Weights = update.weights  # W_C <- sum_i (|V_i| / |V|) W_C,i
    if len(replies) < len(clients):  # the rest speaks for all; those without a training node have nothing to say
        weights = scaled(weights, 1.0 / update.share) if update.share > 0.0 else state.weights
    if trained:
        sources, pulls = [z], [_joined_gradient(state, replies, clients, config)]
        if config.self_supervision:
            error = module.guess_error(leaves, state.embeddings, graph, dropout)
            sources, pulls = [*sources, error], [*pulls, torch.full_like(error, config.self_supervision)]
        torch.autograd.backward(sources, pulls)
        state = _server_step(state, {name: leaves[name].grad for name in trained}, config)  # type: ignore[misc]
    state = replace(state, round=state.round + 1, weights=weights)
    if config.channel == "learned" and state.round % config.refresh == 0:
        state = replace(state, neighbours=module.neighbours(state.module, state.embeddings))
    return state, {}


def _joined_gradient(
    state: ServerState, replies: Mapping[PartyId, Returned], clients: tuple[PartyId, ...], config: FedGGRConfig
) -> Tensor:
    """grad Z of all nodes (N, F_g): block i times |V_i| / |V|, zeros for a client that did not answer."""
    blocks = []
    for client, size in zip(clients, state.sizes, strict=True):
        if client not in replies:
            blocks.append(torch.zeros(size, config.global_width, dtype=config.dtype))
            continue
        rows = replies[client].rows
        if rows.shape != (size, config.global_width):
            raise ProtocolError(
                f"{client} returned gradients of shape {tuple(rows.shape)} for {size} rows of {config.global_width}"
            )
        blocks.append(rows * (size / state.embeddings.shape[0]) if config.scale_gradients else rows)
    return torch.cat(blocks)


def _server_step(state: ServerState, grads: Weights, config: FedGGRConfig) -> ServerState:
    """One step on W_S."""
    weights = {name: tensor.clone() for name, tensor in state.module.items()}
    moments = state.optimizer.copy()
    plan = step_plan(
        config.optimizer, moments.steps, 1, config.server_lr or config.lr, config.weight_decay, config.dtype
    )
    return replace(state, module=weights, optimizer=take_step(weights, grads, moments, plan))


def evaluate(state: ServerState, federation: Federation, config: FedGGRConfig) -> Replies[Evaluation]:
    """Z_glob without dropout; every client classifies its own nodes on its own graph."""
    module = config.module
    with torch.no_grad():
        z = module.rows(
            state.module, state.embeddings, module.adjacency(state.module, state.embeddings, state.neighbours)
        )
    rows = state.split(z, federation.clients)
    return federation.call(
        FedGGRClient.use, PerClient({client: Deployment(state.weights, rows[client]) for client in federation.clients})
    )


def privacy(state: ServerState, config: FedGGRConfig, rounds: int, clients: int, masked: bool) -> dict[str, Any] | None:
    """What clipped and noisy updates are worth for a client, or clipped and noisy rows for a label."""
    if config.dp_clip:
        stated = statement(
            clip=config.dp_clip,
            noise=config.dp_noise,
            delta=config.dp_delta,
            releases=rounds,
            values=num_values(state.weights),
            parties=clients,
            masked=masked,
        )
        besides = "embeddings and gradients of rows, which clients send besides"
        besides += "; the auto-encoder's weights of the setup" if config.encoder == "federated" else ""
        return stated | {"not_covered": f"{besides}; {stated['not_covered']}"}
    if not config.gradient_clip:
        return None
    stated = statement(
        clip=config.gradient_clip,
        noise=config.gradient_noise,
        delta=config.dp_delta,
        releases=rounds,
        values=config.global_width,
        parties=1,
        masked=False,
        knob="gradient_noise",
    )
    if config.class_weight != "none" or (config.local_epochs > 1 and config.returned != "first"):
        stated["epsilon"] = None
        stated["warning"] = (
            "one label changes other rows as well (steps after the first and class weights depend on all labels), so "
            "no epsilon can be "
            "stated: use local_epochs=1 or returned=first, and no class_weight"
        )
    return stated | {
        "unit": "training label of one node",
        "neighbours": "that label replaced, given the weights of each round",
        "not_covered": (
            f"the weights clients train with their labels (dp_clip covers those); embeddings; {stated['not_covered']}"
        ),
    }


def facts(state: ServerState, config: FedGGRConfig, scenario: Any) -> dict[str, Any]:
    """What the learned graph is like; which edges were lost, only an onlooker knows."""
    if not config.module.has_graph:
        return {"graph": config.channel}
    return {"learned_graph": graph_facts(state.neighbours, state.sizes, scenario)}


DISCLOSES = (
    Disclosure("setup", "client", "server", Size, "summed"),
    Disclosure("setup", "server", "client", Encoder),
    Disclosure("setup", "client", "server", Update, "summed"),
    Disclosure("setup", "client", "server", Uploaded),
    Disclosure("train", "server", "client", Turn),
    Disclosure("train", "client", "server", Returned),
    Disclosure("train", "server", "client", Total),
    Disclosure("train", "client", "server", Update, "summed"),
    Disclosure("evaluation", "server", "client", Deployment),
    Disclosure("evaluation", "client", "server", Evaluation),
)


def sheet(config: FedGGRConfig) -> tuple[Disclosure, ...]:
    """Who sees what; only a federated auto-encoder travels."""
    return tuple(
        line
        for line in DISCLOSES
        if config.encoder == "federated" or line.phase != "setup" or line.message in (Size, Uploaded)
    )


METHOD = register(
    Method(
        name="fedggr",
        summary="the server learns a graph over all clients' nodes and sends back what a GNN makes of it",
        reference="Subgraph Federated Learning with Global Graph Reconstruction, APWeb-WAIM 2023",
        config=FedGGRConfig,
        tasks=("node",),
        init=init,
        phases=(
            Phase("setup", setup_round, rounds=lambda config: config.encoder_rounds + 1, setup=True),
            Phase("train", train_round),
        ),
        evaluate=evaluate,
        roles={"client": Role(FedGGRClient)},
        discloses=DISCLOSES,
        sheet=sheet,
        preset="fedggr",
        shared_values=lambda state: num_values(state.weights),
        privacy=privacy,
        facts=facts,
    )
)
