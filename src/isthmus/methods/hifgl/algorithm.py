r"""HiFGL -- Guo, Yao, Yang & Liu, HiFGL: A Hierarchical Framework for Cross-silo Cross-device Federated Graph Learning,
KDD 2024. Algorithm 1 from top to bottom: the server's rounds, then a pass at the devices, then the step of a silo.

    paper                          here
    device u, silo C_i             row u of `Devices` (all devices of silo i, vectorised), `Silo`
    k layers, width d              `LayerPlan`
    theta, theta_i                 ServerState.weights, SiloState.weights
    W_l, b_l                       weights ``layers.<l - 1>.weight``, ``.bias``; GraphSAGE: ``.neighbour``, ``.root``
    h_u^(l-1)                      ModelPass.inputs[l]       h_u^(0): raw features
    c_vu = 1 / sqrt(|N_u| |N_v|)   Propagation               factor ``target`` at u, ``source`` at v; A: matrix of all c
    s_u^(l) = sum_v c_vu h_v       ModelPass.sums[l]
    p_u^(l) = s_u W_l + b_l        ModelPass.outputs[l]
    dl / dp_u^(l)                  ModelPass.deltas[l]       delta of spec 11.4
    SecMP                          SecMP.sum_over_neighbours: one exchange per layer, forward and backward
    rho                            `learning_rate`

# Differs from the paper: the exact gradient returns through the messages (Algorithm 1 treats them as constants, which
leaves all but the last layer untrained); sums are decoded in every layer, before W, bias and relu (a coded value cannot
pass through relu, spec 11.1); gradients are summed over devices before their silo sees them, since a single
one reveals the device's input (spec 11.5); GCN has self-loops, as in all methods here, so |N| counts the device itself;
by default shares are spread over several holders, so that nobody can open a message (``secmp=hardened``; ``published``
is the printed protocol, for comparison and for attacks).

Parties are honest but curious. What each of them still sees is in docs/methods/hifgl.md.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.errors import ConfigError, RunError
from isthmus.federation.interface import Federation, View
from isthmus.federation.messages import PartyId, address, client_of
from isthmus.federation.roles import handler
from isthmus.federation.script import Script, ScriptLine, ask, mail, total
from isthmus.graph.normalise import to_torch_csr
from isthmus.methods.evaluation import Detail, Evaluation, details_of, scores_of
from isthmus.methods.hifgl.config import Form, HiFGLConfig
from isthmus.methods.hifgl.layers import Matrix, Propagation, dense, dropout_masks, multiply, multiply_t, residuals
from isthmus.methods.hifgl.messages import Common, DeviceGradients, Down, Pass, Update
from isthmus.methods.hifgl.parties import DeviceGroup, DeviceStateT, Exchanges, SiloParty, SiloStateT, run_through
from isthmus.methods.registry import Log
from isthmus.methods.schedule import rate_factor
from isthmus.nn.loss import class_weights
from isthmus.nn.optim import OptimizerState, fresh_state, stepped
from isthmus.records import Record
from isthmus.seeds import Stream
from isthmus.tensors import Weights, check_same_names, get_weights, scaled

Lines = tuple[ScriptLine, ...]

# -- the server ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerState(Record):
    """All the server remembers between rounds.

    Args:
        weights: theta, without what is personal.
        optimizer: Where the server takes the step (``fedsgd``).
        features, classes: Public shape of the task.
        labelled, silos: Labelled devices, and silos that have some.
        keys, sizes: By silo, where the server holds shares (`hardened`).
    """

    round: int
    weights: Weights
    optimizer: OptimizerState
    features: int
    classes: int
    labelled: float = 0.0
    silos: float = 0.0
    keys: Mapping[str, Tensor] = field(default_factory=dict)
    sizes: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class SecMP(abc.ABC):
    """A protocol for sums over neighbours; each is a file of its own: `plain`, `published`, `hardened`."""

    config: HiFGLConfig
    devices: ClassVar[type[Devices[Any]]]
    silo: ClassVar[type[Silo[Any]]]

    def setup(self, state: ServerState, federation: Federation) -> ServerState:
        """What the parties must agree on once: keys, or mu."""
        return state

    @abc.abstractmethod
    def sum_over_neighbours(self, state: ServerState, federation: Federation, order: Pass) -> None:
        """Every device v sends a value x_v, every device u learns sum_{v in N_u} x_v."""

    @abc.abstractmethod
    def exchange_lines(self, silos: int, most: int, *, setup: bool = False) -> Lines:
        """Script of a phase with so many exchanges; in ``setup`` keys are fresh."""

    def setup_lines(self, silos: int) -> Lines:
        """Script of :meth:`setup`."""
        return ()

    @abc.abstractmethod
    def message_bytes(self, width: int) -> int:
        """Of one message over one edge."""

    def key_bytes(self, silos: int) -> int:
        """Of what is said about the keys of one edge, once, where there are share holders."""
        return 0

    def check(self, silos: Sequence[str]) -> None:  # noqa: B027 -- most protocols run with any number of silos
        """Refuse settings that these silos cannot run."""


def init(view: View, common: Stream, secmp: SecMP) -> ServerState:
    """theta^(0), the same everywhere."""
    if not view.alike:
        raise ConfigError("hifgl learns one graph: clients must have the same features and classes; try fedavg")
    config = secmp.config
    secmp.check(view.clients)
    weights = get_weights(config.build(view.num_features, view.num_classes, common.child("init")))
    personal = tuple(f"layers.{layer - 1}." for layer in config.personal)
    shared = {name: tensor for name, tensor in weights.items() if not (personal and name.startswith(personal))}
    return ServerState(0, shared, fresh_state(config.optimizer, shared), view.num_features, view.num_classes)


def setup_round(state: ServerState, federation: Federation, secmp: SecMP) -> tuple[ServerState, Log]:
    """Once: how many devices are labelled, the protocol's keys, and the sums of raw features, which never change."""
    config, devices = secmp.config, federation.tier("device")
    if config.mode == "cross-device":
        state = replace(state, labelled=float(devices.sum(Devices.labelled).devices), silos=1.0)
        if config.class_weight == "balanced":
            devices.call(Devices.take_class_counts, devices.sum(Devices.class_counts))
    else:
        devices.exchange(Devices.count, Silo.take_count)
        total = federation.sum(Silo.sizes)
        state = replace(state, labelled=total.labelled, silos=total.silos)
        if config.class_weight == "balanced":
            devices.exchange(Devices.tell_class_counts, Silo.note_class_counts)
            federation.exchange(Silo.tell_class_counts, Devices.hear_class_counts)
    if state.labelled <= 0:
        raise RunError("no device has a training label: choose a split with a training part")
    return connect(state, federation, secmp), {}


def connect(state: ServerState, federation: Federation, secmp: SecMP) -> ServerState:
    """The protocol's keys, and the sums of raw features, which depend on the data alone."""
    state = secmp.setup(state, federation)
    for part, width in enumerate(secmp.config.plan(state.features, state.classes).raw):
        secmp.sum_over_neighbours(state, federation, Pass(0, 1, False, False, part, width))
    return state


def train_round(state: ServerState, federation: Federation, secmp: SecMP) -> tuple[ServerState, Log]:
    """One turn of Algorithm 1."""
    config, devices, round = secmp.config, federation.tier("device"), state.round + 1
    plan = config.plan(state.features, state.classes)
    lr = learning_rate(config, round)
    if config.mode == "cross-device":
        devices.call(Devices.take, Down(state.weights, 1.0, True))
    else:
        federation.call(Silo.begin, Common(state.weights, state.labelled, state.silos, len(federation.clients), lr))
        federation.exchange(Silo.hand_down, Devices.take_model)
    for layer, width in plan.forward.items():  # h^(l), l = 1 .. k, then the loss: see ModelPass.forward
        secmp.sum_over_neighbours(state, federation, Pass(round, layer, False, False, 0, width))
    for layer, width in plan.backward.items():  # delta^(l), l = k .. 1: see ModelPass.backward
        secmp.sum_over_neighbours(state, federation, Pass(round, layer, True, False, 0, width))
    if config.mode == "cross-device":
        sums = devices.sum(Devices.gradient_sum)
        total = Update(scaled(sums.gradients, 1.0 / state.labelled), sums.loss / state.labelled, float(sums.clipped))
    else:
        devices.exchange(Devices.gradients, Silo.step)
        for _ in range(config.local_epochs - 1):
            federation.exchange(Silo.hand_down, Devices.train_again)
            devices.exchange(Devices.gradients, Silo.step)
        total = federation.sum(Silo.update)
    log = {"loss": total.loss, "lr": lr, "clipped": total.clipped}
    if config.algorithm != "fedsgd":
        return replace(state, round=round, weights=total.weights), log  # theta = (1 / |C|) sum_i theta_i
    weights, optimizer = take_step(state.weights, total.weights, state.optimizer, config, lr)
    return replace(state, round=round, weights=weights, optimizer=optimizer), log


def evaluate(state: ServerState, federation: Federation, secmp: SecMP) -> Mapping[PartyId, Evaluation]:
    """Prediction needs the neighbours' values too, so it goes through SecMP."""
    config, devices = secmp.config, federation.tier("device")
    federation.call(Silo.begin, Common(state.weights, state.labelled, state.silos, len(federation.clients), 0.0))
    if config.mode == "cross-device":  # the silo's address only keeps the model its devices were given
        devices.call(Devices.take, Down(state.weights, 0.0, False))
    else:
        federation.exchange(Silo.deploy, Devices.take_model)
    for layer, width in config.plan(state.features, state.classes).forward.items():
        secmp.sum_over_neighbours(state, federation, Pass(state.round, layer, False, True, 0, width))
    if config.mode == "cross-device":
        scores = scores_of(devices, Devices.score)
        return scores if devices.secure else {client_of(party): reply for party, reply in scores.items()}
    devices.exchange(Devices.scores, Silo.take_scores)
    return scores_of(federation, Silo.evaluation)


def predict(state: ServerState, federation: Federation, secmp: SecMP) -> None:
    """A forward pass of the model each silo was trained to, over the edges of now."""
    state = connect(state, federation, secmp)
    federation.exchange(Silo.deploy, Devices.take_model)
    for layer, width in secmp.config.plan(state.features, state.classes).forward.items():
        secmp.sum_over_neighbours(state, federation, Pass(0, layer, False, True, 0, width))


def details(federation: Federation, config: HiFGLConfig) -> Mapping[PartyId, Detail]:
    """Counts of the predictions scored last, over the devices of each silo, or with secure sums of all together."""
    devices = federation.tier("device")
    if config.mode == "cross-device":
        found = details_of(devices, Devices.detail)
        return found if devices.secure else {client_of(party): reply for party, reply in found.items()}
    devices.exchange(Devices.tell_detail, Silo.take_detail)
    return details_of(federation, Silo.detail)


def script(view: View, secmp: SecMP) -> Script:
    """Calls of the rounds above: exchanges as the plan of the layers has them."""
    config = secmp.config
    plan = config.plan(view.num_features, view.num_classes)
    raw, layers, steps, silos = len(plan.raw), len(plan.forward), config.local_epochs, len(view.clients)
    setup = (*secmp.setup_lines(silos), *(secmp.exchange_lines(silos, raw, setup=True) if raw else ()))
    passes = secmp.exchange_lines(silos, 2 * layers) if layers else ()
    scored = secmp.exchange_lines(silos, layers) if layers else ()
    balanced = config.class_weight == "balanced"
    if config.mode == "cross-device":
        weighted: Lines = (total(Devices.class_counts), ask(Devices.take_class_counts)) if balanced else ()
        return {
            "setup": (total(Devices.labelled), *weighted, *setup),
            "train": (ask(Devices.take), *passes, total(Devices.gradient_sum)),
            "evaluation": (ask(Silo.begin), ask(Devices.take), *scored, ask(Devices.score)),
        }
    weighted = (
        mail(Devices.tell_class_counts, Silo.note_class_counts),
        mail(Silo.tell_class_counts, Devices.hear_class_counts),
    )
    again = (mail(Silo.hand_down, Devices.train_again, most=steps - 1),) if steps > 1 else ()
    return {
        "setup": (
            mail(Devices.count, Silo.take_count),
            total(Silo.sizes),
            *(weighted if balanced else ()),
            *setup,
        ),
        "train": (
            ask(Silo.begin),
            mail(Silo.hand_down, Devices.take_model),
            *passes,
            mail(Devices.gradients, Silo.step, most=steps),
            *again,
            total(Silo.update),
        ),
        "evaluation": (
            ask(Silo.begin),
            mail(Silo.deploy, Devices.take_model),
            *scored,
            mail(Devices.scores, Silo.take_scores),
            ask(Silo.evaluation),
        ),
    }


def predict_script(view: View, secmp: SecMP) -> Lines:
    """Calls of :func:`predict`."""
    plan = secmp.config.plan(view.num_features, view.num_classes)
    raw, layers, silos = len(plan.raw), len(plan.forward), len(view.clients)
    return (
        *secmp.setup_lines(silos),
        *(secmp.exchange_lines(silos, raw, setup=True) if raw else ()),
        mail(Silo.deploy, Devices.take_model),
        *(secmp.exchange_lines(silos, layers) if layers else ()),
    )


def detail_script(config: HiFGLConfig) -> Lines:
    """Calls of :func:`details`."""
    if config.mode == "cross-device":
        return (ask(Devices.detail),)
    return mail(Devices.tell_detail, Silo.take_detail), ask(Silo.detail)


def learning_rate(config: HiFGLConfig, round: int) -> float:
    """rho of a round, from 1."""
    return config.lr * rate_factor(config, round)


def take_step(
    weights: Weights, gradients: Weights, optimizer: OptimizerState, config: HiFGLConfig, lr: float
) -> tuple[Weights, OptimizerState]:
    """theta <- theta - rho grad L, by the optimiser of the settings."""
    return stepped(weights, gradients, optimizer, optimizer=config.optimizer, lr=lr, weight_decay=config.weight_decay)


# -- the devices -----------------------------------------------------------------------------------


class ModelPass:
    """Forward and backward pass of a silo's devices; row u of every matrix is device u, layers count from 1.

    Both directions are generators: each ``yield`` hands out what the devices send to their neighbours, and gives back
    the sums over neighbours that SecMP formed.

    Args:
        forms: How each layer is computed, see `LayerPlan`.
        x: Features, dense or CSR.
        first_sums: s^(1) where it is ``cached``.
        masks: Of dropout, one per hidden layer, or none.
    """

    def __init__(
        self,
        graph: Propagation,
        forms: Sequence[Form],
        weights: Weights,
        x: Matrix,
        *,
        first_sums: Matrix | None = None,
        masks: Sequence[Tensor] = (),
    ) -> None:
        self.graph, self.forms, self.weights, self.masks = graph, forms, weights, masks
        self.first_sums, self.sage = first_sums, "layers.0.root" in weights
        self.matrix = "neighbour" if self.sage else "weight"
        self.inputs: dict[int, Matrix] = {1: x}
        self.sums: dict[int, Matrix] = {}
        self.outputs: dict[int, Tensor] = {}
        self.deltas: dict[int, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}

    @property
    def logits(self) -> Tensor:
        return self.outputs[len(self.forms)]

    def forward(self) -> Exchanges:
        """p^(l) = A h^(l-1) W_l + b_l, h^(l) = relu(p^(l)), for l = 1 .. k (spec 3.1)."""
        for layer, form in enumerate(self.forms, 1):
            h, name = self.inputs[layer], f"layers.{layer - 1}"
            weight = self.weights[f"{name}.{self.matrix}"]
            if form == "project":
                z = multiply(h, weight)
                p = self.graph.forward(z, (yield self.graph.source * z))  # A (h W)
            elif form == "aggregate":
                values = dense(h)
                self.sums[layer] = self.graph.forward(values, (yield self.graph.source * values))  # s = A h
                p = multiply(self.sums[layer], weight)  # (A h) W
            else:
                assert self.first_sums is not None
                self.sums[layer] = self.first_sums
                p = multiply(self.first_sums, weight)
            if self.sage:
                p = p + multiply(h, self.weights[f"{name}.root"])
            self.outputs[layer] = p = p + self.weights[f"{name}.bias"]
            if layer < len(self.forms):
                hidden = torch.relu(p)
                self.inputs[layer + 1] = hidden * self.masks[layer - 1] if self.masks else hidden

    def backward(self, delta: Tensor) -> Exchanges:
        """Gradients of all parameters from delta^(k), for l = k .. 1 (spec 11.4).

        # Differs from the paper: e and delta travel over reversed edges, so the gradient is exact.
        """
        for layer in range(len(self.forms), 0, -1):
            h, name = self.inputs[layer], f"layers.{layer - 1}"
            weight = self.weights[f"{name}.{self.matrix}"]
            self.deltas[layer] = delta
            below: Tensor | None = None
            if self.forms[layer - 1] == "project":
                through = self.graph.backward(delta, (yield self.graph.target * delta))  # A^T delta
                gradient = multiply_t(h, through)  # grad W = h^T A^T delta
                below = multiply(through, weight.T) if layer > 1 else None
            else:
                gradient = multiply_t(self.sums[layer], delta)  # grad W = s^T delta
                if layer > 1:
                    e = multiply(delta, weight.T)  # e_u = delta_u W^T
                    below = self.graph.backward(e, (yield self.graph.target * e))  # eps_v = sum_u c_vu e_u
            self.gradients[f"{name}.{self.matrix}"] = gradient
            self.gradients[f"{name}.bias"] = delta.sum(0)  # grad b = sum_u delta_u
            if self.sage:
                self.gradients[f"{name}.root"] = multiply_t(h, delta)
            if below is None:
                return
            if self.sage:
                below = below + multiply(delta, self.weights[f"{name}.root"].T)
            if self.masks:
                below = below * self.masks[layer - 2]
            delta = below * (self.outputs[layer - 1] > 0)  # delta^(l-1) = eps relu'(p^(l-1))


class Devices(DeviceGroup[DeviceStateT]):
    """What the devices of one silo do in Algorithm 1; the protocol in use adds how they sum over neighbours."""

    def raw_feature_sums(self, order: Pass) -> Exchanges:
        """s^(1) = A x, once: ``columns`` features at a time."""
        x = dense(self.x)
        outgoing, sums = self.with_noise(self.graph.source * x, order), []
        for part in torch.split(outgoing, self.config.columns, dim=1):
            sums.append((yield part))
        whole = self.graph.forward(x, torch.cat(sums, dim=1))
        matrix = sp.csr_matrix(whole.numpy())
        sparse = matrix.nnz < 0.25 * whole.numel() and self.config.dtype == torch.float32
        self.state = replace(self.state, first_sums=to_torch_csr(matrix) if sparse else whole)

    @handler
    def take_model(self, mail: Mapping[PartyId, Down]) -> None:
        (down,) = mail.values()
        self.take(down)

    @handler
    def take(self, down: Down) -> None:
        """Begin a pass with theta of the round's start."""
        self.scratch.weight = down.weight
        config, count = self.config, self.where.count
        share = config.dropout if down.training else 0.0
        masks = dropout_masks(self.stream("dropout"), count, config.hidden, share, config.dtype)
        model = self._model(down.weights, masks)
        self.start(self._train(model) if down.training else model.forward())

    def _model(self, weights: Weights, masks: Sequence[Tensor]) -> ModelPass:
        stored = self.state.first_sums
        first_sums = None if stored is None else self.first_sums(stored, self.config.dtype)
        model = ModelPass(self.graph, self.plan.forms, weights, self.x, first_sums=first_sums, masks=masks)
        self.scratch.model = model
        return model

    def _train(self, model: ModelPass) -> Exchanges:
        """SecMP forward; yhat = softmax(h^(k)); cross entropy l_j of every labelled device; its gradient backward."""
        yield from model.forward()
        counts = self.state.class_counts
        weights = None if counts is None else class_weights(counts, self.config.dtype)
        delta, self.scratch.loss = residuals(model.logits, self.data.y, self.data.train, self.scratch.weight, weights)
        yield from model.backward(delta)

    @handler
    def train_again(self, mail: Mapping[PartyId, Down]) -> None:
        """A further local step: new weights on the sums received since the round's start (spec 11.4)."""
        (down,) = mail.values()
        model = self._model(down.weights, self.scratch.model.masks)
        run_through(self._train(model), self.scratch.received)
        self.scratch.clipped = 0  # nothing was encoded for this step

    @handler
    def gradients(self) -> Mapping[PartyId, DeviceGradients]:
        """To the silo: the sum over its devices and nothing of a single one."""
        return {self.silo: self.gradient_sum()}

    @handler
    def gradient_sum(self) -> DeviceGradients:
        self.check_complete()
        count = self.where.count
        if 1 < count < self.config.min_cohort:
            few = f"{self.party} are {count} devices, fewer than min_cohort={self.config.min_cohort}"
            raise RunError(f"{few}: their sum would tell too much of each; lower min_cohort or join silos")
        return DeviceGradients(self.scratch.model.gradients, self.scratch.loss, self.scratch.clipped)


# -- the silo --------------------------------------------------------------------------------------


class Silo(SiloParty[SiloStateT]):
    """What a silo does in Algorithm 1: hands the model to its devices and takes the step with their summed gradient."""

    @handler
    def begin(self, common: Common) -> None:
        """Take theta, keep what is personal."""
        self.scratch.common, self.scratch.clipped = common, 0
        self.state = replace(self.state, weights={**self.state.weights, **common.weights})

    @handler
    def hand_down(self) -> Mapping[PartyId, Down]:
        return {address(self.party, "device"): Down(self.state.weights, self._loss_weight(), True)}

    @handler
    def deploy(self) -> Mapping[PartyId, Down]:
        """The same to predict with."""
        return {address(self.party, "device"): Down(self.state.weights, 0.0, False)}

    def _loss_weight(self) -> float:
        """Of one labelled device: silos count by ``weighting``, devices of a silo the same. In units of 1 / (all
        labelled), so that gradients on the wire are about 1 whatever the size of the graph and fixed point loses
        nothing.
        """
        common: Common = self.scratch.common
        if not self.state.labelled:
            return 0.0
        return 1.0 if self.config.weighting == "train" else common.labelled / (common.silos * self.state.labelled)

    @handler
    def step(self, mail: Mapping[PartyId, DeviceGradients]) -> None:
        """theta_i <- theta_i - rho grad L_i, from the sum over own devices; with ``fedsgd`` the server does it."""
        (sent,) = mail.values()
        config, common = self.config, self.scratch.common
        check_same_names(self.state.weights, sent.gradients)
        self.scratch.sent = sent
        self.scratch.clipped += sent.clipped
        if config.algorithm == "fedsgd":
            return
        by_silo = config.weighting != "train"
        factor = common.members / common.labelled if by_silo else 1.0 / max(1, self.state.labelled)
        gradients = scaled(sent.gradients, factor)  # grad L_i = (1 / |D_i|) sum_j grad l_j
        if config.algorithm == "fedprox" and config.mu:
            for name, received in common.weights.items():
                gradients[name] = gradients[name] + config.mu * (self.state.weights[name] - received)
        weights, optimizer = take_step(self.state.weights, gradients, self.state.optimizer, config, common.lr)
        self.state = replace(self.state, weights=weights, optimizer=optimizer)

    @handler
    def update(self) -> Update:
        """What the server adds up: share times new weights, or the gradient where the server takes the step."""
        sent, common, labelled = self.scratch.sent, self.scratch.common, self.state.labelled
        if self.config.algorithm == "fedsgd":
            part = scaled(sent.gradients, 1.0 / common.labelled)
        else:  # theta_i / |C|, or by labelled devices
            share = labelled / common.labelled if self.config.weighting == "train" else 1.0 / common.members
            part = scaled({name: self.state.weights[name] for name in common.weights}, share)
        return Update(part, sent.loss / common.labelled, float(self.scratch.clipped))
