r"""HiFGL -- Guo, Yao, Yang & Liu, KDD 2024: devices, silos and a server, with secret message passing (SecMP).

    paper                     here
    device u, silo C(u)       Devices (all of a silo, vectorised), Silo
    theta                     ServerState.weights
    SecMP, layer l            pass_messages: one exchange per layer, forward and backward (spec 11.3, 11.4)
    grad theta_i              Devices.gradients, a sum over the silo's devices only
    theta = mean_i theta_i    train_round

A round (Algorithm 1): the server sends theta to silos, they to their devices; every layer sums over neighbours;
labelled devices form their loss; gradients go back over the same edges; a silo steps with the sum over its devices; the
server averages.

# Differs from the paper: the exact gradient goes back through messages (its Algorithm 1 treats them as constants, which
leaves all but the last layer untrained); shares are spread over holders so that nobody can open a message; gradients
are summed before a silo sees them; # GCN has self-loops, as everywhere. ``secmp=published`` keeps the printed protocol,
for comparison and for attacks.

What remains visible (hardened): the two ends of an edge know each other; a device learns the sum over its neighbours,
once for raw features and in every round for hidden ones; holders learn a power of two above each device's number of
neighbours; a silo learns the sum of its devices' gradients and how many are labelled; the server learns sums over silos
(with ``secure_sum=true`` nothing else of their updates).
A device that cheats could pad its own sums and so single out a neighbour: parties are honest but curious.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from isthmus.errors import ConfigError, RunError
from isthmus.federation.interface import Federation, PerClient, View
from isthmus.federation.ledger import Disclosure
from isthmus.federation.messages import SERVER, PartyId
from isthmus.federation.roles import Role
from isthmus.methods.evaluation import Evaluation
from isthmus.methods.hifgl_config import HiFGLConfig
from isthmus.methods.hifgl_facts import facts, privacy
from isthmus.methods.hifgl_messages import (
    CodedRows,
    CodedSums,
    Common,
    Decoded,
    DeviceGradients,
    Down,
    EdgeKeys,
    HeldSums,
    HolderKey,
    HolderKeys,
    Labelled,
    MaskRequest,
    Masks,
    Pass,
    PlainRows,
    ShareRows,
    Sizes,
    SlotBoxes,
    Update,
)
from isthmus.methods.hifgl_parties import Devices, Silo, box_context, held_sums, open_slots, register_of, silo_of
from isthmus.methods.registry import Log, Method, Phase, register
from isthmus.nn.optim import OptimizerState, fresh_state, stepped
from isthmus.privacy.anonymous_seal import BoxHolder
from isthmus.privacy.secmp import SecretSums
from isthmus.records import Record
from isthmus.seeds import Stream
from isthmus.tensors import Weights, get_weights, num_values, scaled


@dataclass(frozen=True)
class ServerState(Record):
    """All the server remembers between rounds.

    Args:
        weights: theta, without what is personal.
        optimizer: Where the server steps (``fedsgd``).
        labelled, silos: Labelled devices, and silos that have some.
        keys, sizes: By silo, where the server holds shares.
        features, classes: Public shape of the task.
    """

    round: int
    weights: Weights
    optimizer: OptimizerState
    labelled: float
    silos: float
    keys: Mapping[str, Tensor]
    sizes: Mapping[str, Tensor]
    features: int
    classes: int


def init(view: View, config: HiFGLConfig, common: Stream) -> ServerState:
    if not view.alike:
        raise ConfigError(
            "hifgl classifies nodes of one graph: clients must have the same features and classes; try fedavg"
        )
    config.check_holders(view.clients)
    weights = get_weights(config.build(view.num_features, view.num_classes, common.child("init")))
    personal = tuple(f"layers.{layer - 1}." for layer in config.personal(len(config.hidden) + 1))
    shared = {name: tensor for name, tensor in weights.items() if not (personal and name.startswith(personal))}
    return ServerState(
        0, shared, fresh_state(config.optimizer, shared), 0.0, 0.0, {}, {}, view.num_features, view.num_classes
    )


# -- setup -----------------------------------------------------------------------------------------


def setup_round(state: ServerState, federation: Federation, config: HiFGLConfig) -> tuple[ServerState, Log]:
    """Once: how many are labelled, keys of all edges, and the sums of raw features, which never change."""
    devices = federation.tier("device")
    if config.mode == "cross-device":
        state = replace(state, labelled=float(devices.sum(Devices.labelled).devices), silos=1.0)
    else:
        devices.exchange(Devices.count, Silo.take_count)
        total = federation.sum(Silo.sizes)
        state = replace(state, labelled=total.labelled, silos=total.silos)
    if state.labelled <= 0:
        raise RunError("no device has a training label: choose a split with a training part")
    if config.secmp == "hardened":
        state = exchange_keys(state, federation, config)
    elif config.secmp == "published":
        devices.exchange(Devices.ask_masks, Silo.note_requests)
        federation.exchange(Silo.give_masks, Devices.take_masks)
    if config.ways(state.features, state.classes)[0] == "cached":
        for part in range(config.parts(state.features)):
            width = min(config.columns, state.features - part * config.columns)
            pass_messages(state, federation, config, Pass(0, 1, False, False, part, width))
    return state, {}


def exchange_keys(state: ServerState, federation: Federation, config: HiFGLConfig) -> ServerState:
    """One key per edge and holder, through the target, who must not read it (spec 11.3, steps 2 and 3)."""
    devices = federation.tier("device")
    silos = federation.clients
    holders = {name for silo in silos for name in config.holders(silo, silos)}
    box = BoxHolder(box_context(SERVER))
    keys = {silo: b"" for silo in silos} | ({SERVER: box.public} if SERVER in holders else {})
    if holders - {SERVER}:
        keys |= {silo: reply.key for silo, reply in federation.call(Silo.announce).items()}
    devices.exchange(Devices.seal_keys, Devices.take_keys, HolderKeys(keys))
    receive = Silo.take_boxes if holders - {SERVER} else Devices.take_no_boxes
    mail: Any = devices.exchange(Devices.forward_boxes, receive).mail
    held, sizes = open_slots(box, mail) if mail else ({}, {})
    return replace(state, keys=held, sizes=sizes)


# -- one exchange ----------------------------------------------------------------------------------


def pass_messages(state: ServerState, federation: Federation, config: HiFGLConfig, order: Pass) -> None:
    """One sum over neighbours at every device."""
    devices = federation.tier("device")
    if config.secmp == "plain":
        devices.exchange(Devices.send_plain, Devices.add_plain, order)
    elif config.secmp == "published":
        devices.exchange(Devices.send_coded, Devices.add_coded, order)
        devices.exchange(Devices.up_coded, Silo.decode_sums)
        federation.exchange(Silo.give_sums, Devices.take_decoded)
    else:
        devices.exchange(Devices.send_shares, Devices.add_shares, order)
        if state.keys:
            sums = held_sums(config, SecretSums(config.format, config.threshold), state.keys, state.sizes, order)
            devices.call(Devices.take_held, PerClient(sums))
        if any(name != SERVER for name in config.holders(federation.clients[0], federation.clients)):
            federation.exchange(Silo.send_held, Devices.open_sums, order)
        else:
            devices.call(Devices.open_held)


def forward(
    state: ServerState, federation: Federation, config: HiFGLConfig, round: int, *, evaluation: bool = False
) -> None:
    for layer, width in config.forward_widths(state.features, state.classes).items():
        pass_messages(state, federation, config, Pass(round, layer, False, evaluation, 0, width))


def backward(state: ServerState, federation: Federation, config: HiFGLConfig, round: int) -> None:
    federation.tier("device").call(Devices.differentiate)
    for layer, width in config.backward_widths(state.features, state.classes).items():
        pass_messages(state, federation, config, Pass(round, layer, True, False, 0, width))


# -- rounds ----------------------------------------------------------------------------------------


def rate(config: HiFGLConfig, round: int) -> float:
    """The learning rate of a round, from 1."""
    return config.lr * config.lr_decay ** ((round - 1) // config.lr_step)


def train_round(state: ServerState, federation: Federation, config: HiFGLConfig) -> tuple[ServerState, Log]:
    """One turn of Algorithm 1."""
    devices, round = federation.tier("device"), state.round + 1
    lr = rate(config, round)
    if config.mode == "cross-device":
        devices.call(Devices.take, Down(state.weights, 1.0, True))
    else:
        federation.call(Silo.begin, Common(state.weights, state.labelled, state.silos, len(federation.clients), lr))
        federation.exchange(Silo.hand_down, Devices.take_model)
    forward(state, federation, config, round)
    backward(state, federation, config, round)
    if config.mode == "cross-device":
        sums = devices.sum(Devices.gradient_sum)
        total = Update(scaled(sums.gradients, 1.0 / state.labelled), sums.loss / state.labelled, float(sums.clipped))
    else:
        devices.exchange(Devices.gradients, Silo.collect)
        for _ in range(config.local_epochs - 1):
            federation.exchange(Silo.hand_down, Devices.step_again)
            devices.exchange(Devices.gradients, Silo.collect)
        total = federation.sum(Silo.update)
    log = {"loss": total.loss, "lr": lr, "clipped": total.clipped}
    if config.algorithm != "fedsgd":
        return replace(state, round=round, weights=total.weights), log  # theta = sum_i share_i theta_i
    return replace(_stepped(state, total.weights, config, lr), round=round), log


def _stepped(state: ServerState, gradients: Weights, config: HiFGLConfig, lr: float) -> ServerState:
    """One step of the server's optimiser."""
    weights, optimizer = stepped(
        state.weights, gradients, state.optimizer, optimizer=config.optimizer, lr=lr, weight_decay=config.weight_decay
    )
    return replace(state, weights=weights, optimizer=optimizer)


def evaluate(state: ServerState, federation: Federation, config: HiFGLConfig) -> Mapping[PartyId, Evaluation]:
    """Prediction goes through SecMP too."""
    devices = federation.tier("device")
    federation.call(Silo.begin, Common(state.weights, state.labelled, state.silos, len(federation.clients), 0.0))
    if config.mode == "cross-device":  # the silo's address only keeps the model its devices were given
        devices.call(Devices.take, Down(state.weights, 0.0, False))
        forward(state, federation, config, state.round, evaluation=True)
        return {silo_of(party): reply for party, reply in devices.call(Devices.score).items()}
    federation.exchange(Silo.deploy, Devices.take_model)
    forward(state, federation, config, state.round, evaluation=True)
    devices.exchange(Devices.scores, Silo.take_scores)
    return federation.call(Silo.evaluation)


# -- what is shown to whom -------------------------------------------------------------------------


def _lines(phase: str, *rows: tuple[str, str, type]) -> tuple[Disclosure, ...]:
    return tuple(Disclosure(phase, sender, receiver, message) for sender, receiver, message in rows)


_HARDENED = (
    ("server", "device", Pass),
    ("server", "client", Pass),
    ("device", "device", ShareRows),
    ("client", "device", HeldSums),
)
_PUBLISHED = (
    ("server", "device", Pass),
    ("device", "device", CodedRows),
    ("device", "client", CodedSums),
    ("client", "device", Decoded),
)
_PLAIN = (("server", "device", Pass), ("device", "device", PlainRows))


def _sheet(
    setup: tuple[tuple[str, str, type], ...], passing: tuple[tuple[str, str, type], ...]
) -> tuple[Disclosure, ...]:
    """Hierarchical mode, T = 1."""
    return (
        *_lines("setup", ("device", "client", Labelled), *setup, *passing),
        Disclosure("setup", "client", "server", Sizes, "summed"),
        *_lines(
            "train",
            ("server", "client", Common),
            ("client", "device", Down),
            *passing,
            ("device", "client", DeviceGradients),
        ),
        Disclosure("train", "client", "server", Update, "summed"),
        *_lines(
            "evaluation",
            ("server", "client", Common),
            ("client", "device", Down),
            *passing,
            ("device", "client", Evaluation),
            ("client", "server", Evaluation),
        ),
    )


SHEETS = {
    "hardened": _sheet(
        (
            ("client", "server", HolderKey),
            ("server", "device", HolderKeys),
            ("device", "device", EdgeKeys),
            ("device", "client", SlotBoxes),
        ),
        _HARDENED,
    ),
    "published": _sheet((("device", "client", MaskRequest), ("client", "device", Masks)), _PUBLISHED),
    "plain": _sheet((), _PLAIN),
}
"""Disclosure sheets by protocol; the method's own is the hardened one."""

METHOD = register(
    Method(
        name="hifgl",
        summary="devices, silos, server: exact GNN over all edges by secret message passing",
        reference=(
            "Guo et al., HiFGL: A Hierarchical Framework for Cross-silo Cross-device Federated Graph Learning, KDD 2024"
        ),
        config=HiFGLConfig,
        tasks=("node",),
        init=init,
        phases=(Phase("setup", setup_round, rounds=1, setup=True), Phase("train", train_round)),
        evaluate=evaluate,
        roles={"client": Role(Silo, holds=register_of), "device": Role(Devices)},
        discloses=SHEETS["hardened"],
        preset="hifgl",
        cross_edges=True,
        shared_values=lambda state: num_values(state.weights),
        privacy=privacy,
        facts=facts,
    )
)
