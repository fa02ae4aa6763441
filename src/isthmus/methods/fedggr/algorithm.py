r"""FedGGR -- Subgraph Federated Learning with Global Graph Reconstruction (APWeb-WAIM 2023): edges between clients are
lost and known to nobody; the server learns a graph over all nodes from compressed embeddings and sends every client the
rows of what a GNN makes of it.

    paper        here
    E_i          Uploaded.rows                 `isthmus.nn.autoencoder` of the client's nodes, sent once
    W_S          ServerState.module            generator and global GNN, `isthmus.methods.fedggr.global_graph`
    Z_glob^i     Turn.rows                     rows of the client's nodes
    W_C          ServerState.weights           f_theta (any backbone) and one linear layer over [Z_loc, Z_glob],
                                               `isthmus.nn.two_input_head`
    F_l, F_g     local_width, global_width
    k, Q         k, local_epochs
    grad Z^i     Returned.rows

The algorithm, and the functions below that do it:

    phase 0      each client pre-trains an auto-encoder and sends E_i     `setup_round`, `train_encoder`, `upload`
    1            the server sends W_C and rows of Z_glob = GSL(E)         `train_round`
    2            the client takes Q steps on W_C, with Z_glob^i constant  `turn`
    3            the client returns grad Z^i and W_C,i                    `turn`, `update`
    4            the server steps W_S and averages W_C                    `train_round`
    inference    Z_glob without dropout; clients classify their nodes     `evaluate`, `use`

# Differs from the paper: W_C,i go up as a sum already weighted, not one by one: the same mean, and less is shown.
# Differs from the paper: grad Z^i is multiplied by |V_i| / |V|, without which it is not the gradient of the stated
objective (``scale_gradients=false`` leaves that out).
# Differs from the paper: the auto-encoders are trained as one by averaging (``encoder=federated``), because independent
ones (``encoder=independent``, what the paper seems to describe) put their nodes into unrelated spaces, where nearest
neighbours are of the same client almost without exception.
# Differs from the paper: neighbours are searched again every ``refresh`` rounds, because the generator moves slowly. A
client that misses a round counts with zeros for its rows.

This is split learning with an honest but curious server, no protection of privacy: embeddings decode to features, and
returned gradients tell which nodes have training labels, and which (`isthmus.privacy.attacks`). `protections` make that
harder.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from isthmus.errors import ConfigError, ProtocolError
from isthmus.federation.interface import Federation, PerClient, View
from isthmus.federation.messages import PartyId
from isthmus.federation.roles import Role, handler
from isthmus.federation.script import Script, ask, total
from isthmus.methods.evaluation import Evaluation, scores_of
from isthmus.methods.fedavg import Update
from isthmus.methods.fedggr.config import FedGGRConfig
from isthmus.methods.fedggr.diagnostics import graph_facts
from isthmus.methods.fedggr.messages import Deployment, Encoder, GlobalRows, Returned, Total, Turn, Uploaded
from isthmus.methods.fedggr.protections import dummy_gradients, joint_dropout, privacy, quantised, released_rows
from isthmus.methods.learners import NodeLearner, dropout_source
from isthmus.methods.registry import Log, Method, Phase, register
from isthmus.methods.schedule import rate_factor
from isthmus.methods.training import ModelClient, NoisyState, WeightedClient, all_familiar, total_samples
from isthmus.nn.autoencoder import FeatureTask, encode, project, train_autoencoder
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.loss import get_loss
from isthmus.nn.optim import OptimizerState, fresh_state, step_plan, take_step
from isthmus.nn.train import gradients, predict
from isthmus.nn.two_input_head import HEAD, Joined, classify
from isthmus.records import Record
from isthmus.seeds import Stream
from isthmus.tensors import Weights, get_weights, scaled

# -- client ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClientState(NoisyState):
    """What a client remembers: W_C and its optimiser; the auto-encoder, which new nodes need too; the last rows it was
    sent to use.
    """

    encoder: Weights
    encoder_optimizer: OptimizerState
    rows: Tensor


class FedGGRClient(WeightedClient[FedGGRConfig]):
    """One client. Features, edges and labels stay in ``self.data``."""

    state: ClientState
    learner: NodeLearner
    keeps: ClassVar[tuple[str, ...]] = ("encoder",)
    keeps_of_data: ClassVar[tuple[str, ...]] = ("rows",)

    def setup(self) -> None:
        super().setup()
        self._task: FeatureTask | None = None

    @property
    def task(self) -> FeatureTask:
        """Only phase 0 needs it, so a restarted client may do without."""
        if self._task is None:
            self._task = FeatureTask.of(self.data, hops=self.config.encoder_hops, dtype=self.config.dtype)
        return self._task

    def initial_state(self) -> ClientState:
        config = self.config
        weights = {**get_weights(self.learner.model), **config.first_head(self.data.num_classes, self.common)}
        stream = self.stream("encoder") if config.encoder == "independent" else self.common
        encoder = {} if config.encoder == "projection" else config.first_autoencoder(self.data.num_features, stream)
        return ClientState(
            weights=weights,
            optimizer=fresh_state(config.optimizer, weights),
            secret=secrets.token_bytes(32),
            encoder=encoder,
            encoder_optimizer=fresh_state("adam", encoder),
            rows=torch.zeros(self.data.num_nodes, config.global_width, dtype=config.dtype),
        )

    # Phase 0.

    @handler
    def train_encoder(self, common: Encoder) -> Update:
        """Some epochs of the common auto-encoder; ready to be summed."""
        self._train_encoder(common.weights, self.config.encoder_every)
        share = self.samples() / common.total
        return Update(scaled(self.state.encoder, share), share)

    @handler
    def upload(self) -> Uploaded:
        """E_i of an auto-encoder of the client's own, or of the public projection."""
        if self.config.encoder != "projection":
            self._train_encoder(self.state.encoder, self.config.encoder_epochs)
        return self._embedded(self.state.encoder)

    @handler
    def upload_common(self, common: Encoder) -> Uploaded:
        """E_i of the common auto-encoder."""
        return self._embedded(common.weights)

    def _train_encoder(self, weights: Weights, epochs: int) -> None:
        """Adam steps on the mean of (X_i - X_i^rec)^2, X_i^rec = Dec(Enc(X_i, A_i), A_i)."""
        moments, lr = self.state.encoder_optimizer, self.config.encoder_lr
        encoder, moments, _ = train_autoencoder(weights, moments, self.task, epochs=epochs, lr=lr)
        self.state = replace(self.state, encoder=encoder, encoder_optimizer=moments)

    def _embedded(self, encoder: Weights) -> Uploaded:
        with torch.no_grad():
            if encoder:
                rows = encode(encoder, self.task)  # E_i = Enc(X_i, A_i)
            else:
                rows = project(self.task, self.config.embedding_width, self.common, self.config.dtype)
        self._task = None
        self.state = replace(self.state, encoder=encoder, encoder_optimizer=fresh_state("adam", {}))
        return Uploaded(quantised(rows, self.config.embedding_bits))

    # Steps 2 and 3.

    @handler
    def turn(self, turn: Turn) -> Returned:
        """Q steps on W_C; the gradients of Z_glob^i."""
        config, learner, labelled, lr = self.config, self.learner, self.data.train, self.config.rate(self.round)
        weights = {name: tensor.clone() for name, tensor in {**self.state.weights, **turn.weights}.items()}
        moments = fresh_state(config.optimizer, weights) if config.reset_optimizer else self.state.optimizer.copy()
        dropout = dropout_source(config, [self.stream])
        joint = joint_dropout(config, self.state.secret, self.stream("joint dropout"))
        rows = turn.rows.new_zeros(learner.inputs.padded[-1], config.global_width)
        rows[: learner.num_train] = turn.rows[labelled]
        found: list[Tensor] = []
        dummies: list[Tensor] = []
        for _ in range(config.local_epochs):  # j = 1 ... Q
            mask = self._mask(joint, learner.inputs.counts, rows)
            joined = Joined(get_loss(config.loss), weights, rows, activate=config.activate_local, mask=mask)
            if config.dummy_gradients:  # of this step, before it moves the weights: they must look like the others
                dummies.append(self.dummies(weights, turn.rows, joint))
            # L_i = CE(y, softmax([Z_loc, Z_glob^i] W + b)), Z_loc = f_theta(X_i, A_i)
            theta, loss = _backbone(weights), joined.as_loss()
            grads, _ = gradients(learner.model, theta, learner.inputs, loss=loss, dropout=dropout)
            plan = step_plan(config.optimizer, moments.steps, 1, lr, config.weight_decay, config.dtype)
            moments = take_step(weights, {**grads, **joined.head_grads}, moments, plan)  # a step on W_C alone
            found.append(joined.rows_grad[: learner.num_train])
        self.state = replace(self.state, weights=weights, optimizer=moments)
        self.scratch.received = turn.weights
        gradient = chosen(dummies, config.returned) if dummies else torch.zeros_like(turn.rows)
        gradient[labelled] = chosen(found, config.returned)  # grad Z^i, zero elsewhere
        noise = self.stream("gradient noise")
        return Returned(released_rows(gradient, learner.num_train, config, self.state.secret, noise))

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

    def dummies(self, weights: Weights, rows: Tensor, joint: DropoutSource | None = None) -> Tensor:
        """What nodes without a training label return in place of zeros (|V_i|, F_g)."""
        width, mask = self.config.local_width, self._mask(joint, (len(rows),), rows)
        logits, head = self._logits(weights, rows, mask), weights["head.weight"][width:]
        gradient = dummy_gradients(logits, head, self.state.secret, self.learner.num_train)
        return gradient if mask is None else gradient * mask[:, width:]

    def _mask(self, joint: DropoutSource | None, counts: tuple[int, ...], rows: Tensor) -> Tensor | None:
        """Dropout of [Z_loc, Z_glob^i] in one step."""
        width, rate = self.config.local_width + self.config.global_width, self.config.joint_dropout
        return None if joint is None else joint.mask(counts, len(rows), width, rate, rows.dtype)

    # Inference.

    @handler
    def use(self, common: Deployment) -> Evaluation:
        """Take the common model and the rows, and score them."""
        self.state = replace(self.state, weights={**self.state.weights, **common.weights}, rows=common.rows)
        return self.evaluate()

    @handler
    def embed(self) -> Uploaded:
        """E_i of the data of now, by the trained auto-encoder."""
        return self._embedded(self.state.encoder)

    @handler
    def take_rows(self, given: GlobalRows) -> None:
        """Z_glob^i to predict with."""
        self.state = replace(self.state, rows=given.rows)

    def logits(self) -> Tensor:
        return self._logits(self.state.weights, self.state.rows)

    def _logits(self, weights: Weights, rows: Tensor, mask: Tensor | None = None) -> Tensor:
        local = predict(self.learner.model, _backbone(weights), self.learner.everything)
        return classify(weights, local, rows, activate=self.config.activate_local, mask=mask)


def chosen(found: list[Tensor], which: str) -> Tensor:
    """The gradient of Z that is returned, of those of the Q steps."""
    if which in ("last", "first"):
        return found[-1 if which == "last" else 0]
    total = torch.stack(found).sum(0)
    return total / len(found) if which == "mean" else total


def _backbone(weights: Weights) -> dict[str, Tensor]:
    """theta, without the classifier."""
    return {name: tensor for name, tensor in weights.items() if name not in HEAD}


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
    return ServerState(
        round=0,
        weights={**get_weights(config.first_model(view, common)), **config.first_head(view.num_classes, common)},
        total=0.0,
        encoder=config.first_autoencoder(view.num_features, common) if config.encoder == "federated" else {},
        encoded=0,
        module=module,
        optimizer=fresh_state(config.optimizer, {name: module[name] for name in config.module.trained(module)}),
        embeddings=torch.empty(0, config.embedding_width, dtype=config.dtype),
        sizes=(),
        neighbours=torch.empty(0, 0, dtype=torch.int64),
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
    return replace(with_graph(state, replies, federation.clients, config), total=total, encoder={}), {}


def with_graph(
    state: ServerState, replies: Mapping[PartyId, Uploaded], clients: tuple[PartyId, ...], config: FedGGRConfig
) -> ServerState:
    """E of all nodes and each node's neighbours in it."""
    embeddings = torch.cat([replies[client].rows for client in clients])  # E = concat(E_1 ... E_m)
    if config.module.has_graph and config.k >= embeddings.shape[0]:
        raise ConfigError(f"k must be below the number of nodes {embeddings.shape[0]}, got {config.k}; set a smaller k")
    if config.embedding_norm == "standard":
        embeddings = (embeddings - embeddings.mean(0)) / embeddings.std(0, correction=0).clamp(min=1e-6)
    sizes = tuple(int(replies[client].rows.shape[0]) for client in clients)
    neighbours = config.module.neighbours(state.module, embeddings)
    return replace(state, embeddings=embeddings, sizes=sizes, neighbours=neighbours)


def train_round(state: ServerState, federation: Federation, config: FedGGRConfig) -> tuple[ServerState, Log]:
    """One round of the algorithm."""
    module, clients = config.module, federation.clients
    trained = module.trained(state.module)
    leaves = {name: tensor.clone().requires_grad_(name in trained) for name, tensor in state.module.items()}
    dropout = DropoutSource([federation.stream("dropout").torch()])

    # Step 1. The forward pass, dropout masks included, is kept until the gradient of Z_glob is here.
    graph = module.adjacency(leaves, state.embeddings, state.neighbours)  # A*
    z = module.rows(leaves, state.embeddings, graph, dropout)  # Z_glob = f_phi(E, A*)
    rows = state.split(z.detach(), clients)
    requests = PerClient({client: Turn(state.weights, rows[client]) for client in clients})

    # Steps 2 and 3, at the clients.
    replies = federation.call(FedGGRClient.turn, requests, quorum=config.quorum)
    update = federation.sum(FedGGRClient.update, Total(state.total), to=tuple(replies))

    # Step 4.
    weights: Weights = update.weights  # W_C <- sum_i (|V_i| / |V|) W_C,i
    if len(replies) < len(clients):  # the mean is over those that answered; without training nodes it stays
        weights = scaled(weights, 1.0 / update.share) if update.share > 0.0 else state.weights
    if trained:
        losses = module.further_losses(leaves, state.embeddings, graph, dropout)
        sources = [(z, joined_gradient(state, replies, clients, config)), *losses]
        torch.autograd.backward([value for value, _ in sources], [grad for _, grad in sources])  # grad W_S
        lr = (config.server_lr or config.lr) * rate_factor(config, federation.round)
        state = _server_step(state, {name: leaves[name].grad for name in trained}, config, lr)  # type: ignore[misc]
    state = replace(state, round=state.round + 1, weights=weights)
    if module.learns_graph and state.round % config.refresh == 0:
        state = replace(state, neighbours=module.neighbours(state.module, state.embeddings))
    return state, {}


def joined_gradient(
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
                f"{client} returned gradients of shape {tuple(rows.shape)} for {size} rows of {config.global_width}: "
                "all parties need the same settings"
            )
        blocks.append(rows * (size / state.embeddings.shape[0]) if config.scale_gradients else rows)
    return torch.cat(blocks)


def _server_step(state: ServerState, grads: Weights, config: FedGGRConfig, lr: float) -> ServerState:
    """One optimiser step on W_S."""
    weights = {name: tensor.clone() for name, tensor in state.module.items()}
    moments = state.optimizer.copy()
    plan = step_plan(config.optimizer, moments.steps, 1, lr, config.weight_decay, config.dtype)
    return replace(state, module=weights, optimizer=take_step(weights, grads, moments, plan))


def evaluate(state: ServerState, federation: Federation, config: FedGGRConfig) -> Mapping[PartyId, Evaluation]:
    """Inference: Z_glob without dropout; every client classifies its own nodes on its own graph."""
    rows = global_rows(state, federation.clients, config)
    deployments = {client: Deployment(state.weights, rows[client]) for client in federation.clients}
    return scores_of(federation, FedGGRClient.use, PerClient(deployments))


def global_rows(state: ServerState, clients: tuple[PartyId, ...], config: FedGGRConfig) -> dict[PartyId, Tensor]:
    """Z_glob by client, without dropout."""
    module = config.module
    with torch.no_grad():
        graph = module.adjacency(state.module, state.embeddings, state.neighbours)
        return state.split(module.rows(state.module, state.embeddings, graph), clients)


def predict_nodes(state: ServerState, federation: Federation, config: FedGGRConfig) -> None:
    """Of the data of the training clients have kept their rows. For other data: E again, by the trained auto-encoder;
    nearest neighbours and Z_glob by the trained W_S.
    """
    if all_familiar(federation):
        return
    clients = federation.clients
    state = with_graph(state, federation.call(FedGGRClient.embed), clients, config)
    rows = global_rows(state, clients, config)
    federation.call(FedGGRClient.take_rows, PerClient({client: GlobalRows(rows[client]) for client in clients}))


def facts(state: ServerState, config: FedGGRConfig, scenario: Any) -> dict[str, Any]:
    """What the learned graph is like; which edges were lost is known only where the whole scenario is."""
    if not config.module.has_graph:
        return {"graph": config.channel}
    return {"learned_graph": graph_facts(state.neighbours, state.sizes, scenario)}


def script(config: FedGGRConfig, view: View) -> Script:
    """Only a federated auto-encoder's weights travel."""
    federated = total(FedGGRClient.train_encoder), ask(FedGGRClient.upload_common)
    return {
        "setup": (
            total(FedGGRClient.size),
            *(federated if config.encoder == "federated" else (ask(FedGGRClient.upload),)),
        ),
        "train": (ask(FedGGRClient.turn, each=True), total(FedGGRClient.update, some=config.quorum < 1.0)),
        "evaluation": (ask(FedGGRClient.use, each=True),),
    }


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
        predict=predict_nodes,
        predict_script=lambda config, view: (
            ask(ModelClient.familiar),
            ask(FedGGRClient.embed),
            ask(FedGGRClient.take_rows, each=True),
        ),
        server_keeps=("module",),
        roles={"client": Role(FedGGRClient)},
        script=script,
        preset="fedggr",
        privacy=lambda state, *run: privacy(state.weights, *run),
        facts=facts,
    )
)
