"""The parties of HiFGL: the devices of a silo (vectorised), and the silo.

A silo object is built from identities alone; features, labels and edges are with its devices, at the address
``<silo>/devices``. All
devices of a silo run in one object: what passes between two devices of one silo is an array in it and no message, and
what a silo's devices know, they know together. Everything that leaves the object is a message. Where the simulation
stands in for separate hosts:

- sums of gradients over the devices of a silo are formed in the object. Separate devices form them by
  `isthmus.privacy.masks`;
- mail between devices of one silo does not show in the ledger (``facts`` counts it);
- a device that fails takes its group with it: the round is lost and repeated, no sum is formed without it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.errors import DataError, ProtocolError, RunError
from isthmus.federation.messages import SERVER, PartyId
from isthmus.federation.roles import Client, handler
from isthmus.graph.normalise import from_torch_csr, to_torch_csr
from isthmus.methods.evaluation import Evaluation, tally
from isthmus.methods.hifgl_config import HiFGLConfig
from isthmus.methods.hifgl_layers import Matrix, Neighbourhood, Scales, Tape, dense, neighbourhood, residuals, scales
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
from isthmus.methods.learners import PARTS, node_groups
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.optim import OptimizerState, fresh_state, stepped
from isthmus.privacy.anonymous_seal import BoxHolder, fresh_keys, seal_boxes
from isthmus.privacy.secmp import PublicMasks, SecretSums, deal_slots, gather
from isthmus.records import Record
from isthmus.tensors import Weights, check_same_names, get_weights, scaled


def devices_of(silo: str) -> PartyId:
    return f"{silo}/devices"


def silo_of(devices: PartyId) -> str:
    return devices.partition("/")[0]


def box_context(holder: str) -> bytes:
    return f"isthmus/hifgl/{holder}".encode()


# -- devices ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceState(Record):
    """What the devices of a silo remember.

    Args:
        first: Sums of the first layer's raw features (n, F), once they are known.
        keys: By peer, (E, T, 32): of each edge one sends on, with each holder.
        padding: (P, T, 32), keys of own sharings of zero; ``padded`` (P,) whose they are.
        handle: (n,), made-up names towards holders.
        holders: Who holds shares 2 .. T + 1 of what is sent here.
        masks: By silo, mu's masks as published.
        secret: Where noise of ``one_neighbour=dp`` comes from.
    """

    first: Mapping[str, Tensor]
    keys: Mapping[str, Tensor]
    padding: Tensor
    padded: Tensor
    handle: Tensor
    holders: tuple[str, ...]
    masks: Mapping[str, Tensor]
    secret: bytes


class Devices(Client[HiFGLConfig, DeviceState]):
    """All devices of one silo: features, labels, edges, and one share of whatever their neighbours send."""

    def setup(self) -> None:
        config, data = self.config, self.data
        self.where: Neighbourhood = neighbourhood(data, silo_of(self.party), inside=config.mode != "cross-silo")
        self.terms = max(1, self.where.terms)
        if self.terms > config.max_degree:
            raise DataError(
                f"{self.party}: a device has {self.terms} arcs, sums are made for {config.max_degree}: raise max_degree"
            )
        self.ways = config.ways(data.num_features, data.num_classes)
        self.factors: Scales = scales(
            config.kind, self.where, config.k_min if config.one_neighbour == "drop" else 0
        ).to(config.dtype)
        kind: Any = np.float64 if config.dtype == torch.float64 else np.float32
        self.x: Matrix = (
            from_torch_csr(data.x).astype(kind) if data.x.layout == torch.sparse_csr else data.x.to(config.dtype)
        )
        self.inner = None if self.where.inner is None else self.where.inner.astype(kind)
        self.sums = SecretSums(config.format, config.threshold)
        self._joined_keys: tuple[Any, np.ndarray[Any, Any]] = None, np.empty(0, np.uint8)
        self._kept: tuple[Tensor | None, Matrix] = None, torch.empty(0)

    def initial_state(self) -> DeviceState:
        empty = torch.zeros(0, self.config.threshold, 32, dtype=torch.uint8)
        nothing = torch.zeros(0, dtype=torch.int64)
        return DeviceState({}, {}, empty, nothing, nothing, (), {}, secrets.token_bytes(32))

    @handler
    def count(self) -> Mapping[PartyId, Labelled]:
        """To the silo: how many devices have a training label."""
        return {silo_of(self.party): self.labelled()}

    @handler
    def labelled(self) -> Labelled:
        return Labelled(self.data.num_train)

    # keys of the hardened protocol

    @handler
    def seal_keys(self, holders: HolderKeys) -> Mapping[PartyId, EdgeKeys]:
        """Spec 11.3, step 2: one key per edge and holder, sealed to the holder, through the target."""
        self.scratch.holders = holders.keys
        keys, mail = dict[str, Tensor](), dict[PartyId, EdgeKeys]()
        for peer, pair in self.where.pairs.items():
            made = fresh_keys(pair.count, self.config.threshold)
            keys[peer] = torch.from_numpy(made)
            mail[devices_of(peer)] = EdgeKeys(
                torch.from_numpy(pair.source_id), torch.from_numpy(pair.target_id), self._boxes(peer, made)
            )
        self.state = replace(self.state, keys=keys)
        return mail

    def _boxes(self, silo: str, keys: np.ndarray[Any, Any]) -> Tensor:
        """Keys (E, T, 32) in boxes for the holders of a silo's devices."""
        names = self.config.holders(silo, self._silos)
        boxes = [seal_boxes(self.scratch.holders[name], keys[:, j], box_context(name)) for j, name in enumerate(names)]
        return torch.from_numpy(np.stack(boxes, axis=1))

    @property
    def _silos(self) -> tuple[str, ...]:
        return tuple(sorted(name for name in self.scratch.holders if name != SERVER))

    @handler
    def take_keys(self, mail: Mapping[PartyId, EdgeKeys]) -> None:
        """Boxes for the holders, from all neighbours; both ends must know the same edges."""
        boxes = []
        for peer, pair in self.where.pairs.items():
            sent = mail.get(devices_of(peer))
            wrong = sent is None or not (
                np.array_equal(sent.source.numpy(), pair.sender_id)
                and np.array_equal(sent.target.numpy(), pair.receiver_id)
            )
            if wrong:
                raise DataError(
                    f"{self.party} and {devices_of(peer)} do not agree on the edges between them: both ends must list "
                    "an edge; "
                    "make the edge lists symmetric"
                )
            assert sent is not None
            boxes.append(sent.boxes)
        strangers = set(mail) - {devices_of(peer) for peer in self.where.pairs}
        if strangers:
            raise DataError(
                f"{', '.join(sorted(strangers))} sent keys for edges that {self.party} does not list: make the edge "
                "lists symmetric"
            )
        self.scratch.boxes = torch.cat(boxes) if boxes else None

    @handler
    def forward_boxes(self) -> Mapping[PartyId, SlotBoxes]:
        """Step 3: strip senders, shuffle, pad, rename, pass on."""
        config, silo = self.config, silo_of(self.party)
        holders = config.holders(silo, self._silos)
        slots = deal_slots(self.where.targets, self.where.count)
        padding = fresh_keys(slots.padding.size, config.threshold)
        own = self._boxes(silo, padding)
        everything = own if self.scratch.boxes is None else torch.cat([self.scratch.boxes, own])
        self.state = replace(
            self.state,
            padding=torch.from_numpy(padding),
            padded=torch.from_numpy(slots.padding),
            handle=torch.from_numpy(slots.handle),
            holders=holders,
        )
        order, sizes = torch.from_numpy(slots.order), torch.from_numpy(slots.sizes)
        return {holder: SlotBoxes(sizes, everything[order, j].contiguous()) for j, holder in enumerate(holders)}

    @handler
    def take_no_boxes(self, mail: Mapping[PartyId, SlotBoxes]) -> None:
        """Devices hold share 1 and no boxes; all of them went to the server."""
        if mail:
            raise ProtocolError(
                f"{self.party} was sent boxes of {', '.join(sorted(mail))}, which are for share holders"
            )

    # model

    @handler
    def take_model(self, mail: Mapping[PartyId, Down]) -> None:
        (down,) = mail.values()
        self.take(down)

    @handler
    def take(self, down: Down) -> None:
        """Begin a pass with the model of the round's start."""
        self.scratch.weight, self.scratch.clipped = down.weight, 0
        masks = self._dropout(down.weights) if down.training else ()
        cached = self.state.first.get("sums")
        self.scratch.tape = Tape(
            self.config.kind,
            self.ways,
            down.weights,
            self.x,
            self.factors,
            inner=self.inner,
            masks=masks,
            cached=None if cached is None else self._cached,
        )
        if self.ways[0] == "cached" and cached is not None:
            self.scratch.tape.receive(1, None)

    @property
    def _cached(self) -> Matrix:
        """The first layer's sums in the form they are multiplied fastest; made once, from state."""
        stored = self.state.first["sums"]
        if self._kept[0] is not stored:
            matrix: Matrix = from_torch_csr(stored) if stored.layout == torch.sparse_csr else stored
            self._kept = (
                stored,
                matrix.astype(np.float64)
                if isinstance(matrix, sp.csr_matrix) and self.config.dtype == torch.float64
                else matrix,
            )
        return self._kept[1]

    def _dropout(self, weights: Weights) -> list[Tensor]:
        if self.config.dropout == 0.0:
            return []
        source = DropoutSource([self.stream("dropout").torch()])
        widths = [weights[f"layers.{i}.bias"].shape[0] for i in range(len(self.ways) - 1)]
        return [
            source.mask([self.where.count], self.where.count, width, self.config.dropout, self.config.dtype)
            for width in widths
        ]

    @handler
    def differentiate(self) -> None:
        """delta^(k) of labelled devices."""
        self._ready()
        tape: Tape = self.scratch.tape
        delta, self.scratch.loss = residuals(tape.logits, self.data.y, self.data.train, self.scratch.weight)
        tape.start_backward(delta)
        self._go_back(tape, len(self.ways))

    def _go_back(self, tape: Tape, layer: int) -> None:
        """On to the next layer that needs an exchange."""
        while layer >= 1 and not tape.needs_return(layer):
            tape.back_receive(layer, None)
            layer -= 1

    @handler
    def step_again(self, mail: Mapping[PartyId, Down]) -> None:
        """A further local step: new weights on the messages of the round's start (spec 11.4)."""
        (down,) = mail.values()
        tape: Tape = self.scratch.tape.again(down.weights)
        delta, self.scratch.loss = residuals(tape.logits, self.data.y, self.data.train, self.scratch.weight)
        tape.start_backward(delta)
        for layer in range(len(self.ways), 0, -1):
            tape.back_receive(layer, None)
        self.scratch.tape = tape

    @handler
    def gradients(self) -> Mapping[PartyId, DeviceGradients]:
        """To the silo: the sum over its devices and nothing of a single one."""
        return {silo_of(self.party): self.gradient_sum()}

    @handler
    def gradient_sum(self) -> DeviceGradients:
        self._ready()
        count = self.where.count
        if 1 < count < self.config.min_cohort:
            few = f"{self.party} are {count} devices, fewer than min_cohort={self.config.min_cohort}"
            raise RunError(f"{few}: their sum would tell too much of each; lower min_cohort or join silos")
        return DeviceGradients(self.scratch.tape.gradients, self.scratch.loss, self.scratch.clipped)

    # one exchange

    def _ready(self) -> None:
        """Nothing of the last exchange is missing."""
        if getattr(self.scratch, "share_one", None) is not None:
            missing, layer = ", ".join(self.state.holders), self.scratch.order.layer
            raise ProtocolError(
                f"{self.party} has no sums of the share holders {missing} in layer {layer}: repeat the round with all "
                "of them"
            )

    def _values(self, order: Pass) -> Tensor:
        """What the devices send in an exchange, (n, d): a stretch of columns of raw features, or a layer's message."""
        self._ready()
        tape: Tape | None = getattr(self.scratch, "tape", None)
        self.scratch.order = order
        if order.layer == 1 and self.ways[0] == "cached":
            if order.part == 0:
                self.scratch.raw = self._noisy(order, self.factors.source * dense(self.x))
            begin = order.part * self.config.columns
            part: Tensor = self.scratch.raw[:, begin : begin + self.config.columns]
            return part
        assert tape is not None
        return self._noisy(order, tape.back_message(order.layer) if order.backward else tape.message(order.layer))

    def _noisy(self, order: Pass, values: Tensor) -> Tensor:
        """``one_neighbour=dp``: clipped, with Gaussian noise, before anything leaves; the same to all neighbours, so
        one release.
        """
        if self.config.one_neighbour != "dp":
            return values
        purpose = (self.party, order.round, order.layer, int(order.backward), int(order.evaluation))
        return self.config.mechanism.release_rows(values, secret=self.state.secret, purpose=purpose)[0]

    def _arrived(self, sums: Tensor) -> None:
        """Sums over neighbours, (n, d), of the exchange under way."""
        order: Pass = self.scratch.order
        sums = sums.to(self.config.dtype)
        if order.layer == 1 and self.ways[0] == "cached":
            self._keep_first(order, sums)
        elif order.backward:
            self.scratch.tape.back_receive(order.layer, sums)
            self._go_back(self.scratch.tape, order.layer - 1)
        else:
            self.scratch.tape.receive(order.layer, sums)

    def _keep_first(self, order: Pass, sums: Tensor) -> None:
        """Collect the columns of the first layer's sums; with the last stretch they are complete and kept."""
        parts: list[Tensor] = getattr(self.scratch, "parts", [])
        self.scratch.parts = [*parts, sums]
        if order.part + 1 < self.config.parts(self.data.num_features):
            return
        features = dense(self.x)
        whole = self.factors.target * torch.cat(self.scratch.parts, dim=1) + self.factors.own * features
        if self.inner is not None:
            whole = whole + self.factors.inner * torch.from_numpy(
                np.asarray(self.inner @ (self.factors.source * features).numpy())
            )
        matrix = sp.csr_matrix(whole.numpy())
        sparse = matrix.nnz < 0.25 * whole.numel() and self.config.dtype == torch.float32
        self.state = replace(self.state, first={"sums": to_torch_csr(matrix) if sparse else whole})

    def _joined(self, mail: Mapping[PartyId, Any], axis: int = 0) -> Tensor | None:
        """Rows of all peers in order; a peer that sent too few has lost a device on the way."""
        rows = []
        for peer, pair in self.where.pairs.items():
            sent = mail.get(devices_of(peer))
            if sent is None or sent.rows.shape[axis] != pair.count:
                found = 0 if sent is None else sent.rows.shape[axis]
                sent_few = (
                    f"{devices_of(peer)} sent {found} of {pair.count} messages to {self.party} in layer "
                    f"{self.scratch.order.layer}"
                )
                raise ProtocolError(f"{sent_few}: a device dropped out; repeat the round when it is back")
            rows.append(sent.rows)
        return torch.cat(rows, dim=axis) if rows else None

    # plain

    @handler
    def send_plain(self, order: Pass) -> Mapping[PartyId, PlainRows]:
        values = self._values(order)
        mail = {}
        for peer, pair in self.where.pairs.items():
            times = torch.from_numpy(pair.against if order.backward else pair.along)
            rows = values[torch.from_numpy(pair.source)]
            mail[devices_of(peer)] = PlainRows(
                rows if bool((times == 1).all()) else rows * times[:, None].to(rows.dtype)
            )
        return mail

    @handler
    def add_plain(self, mail: Mapping[PartyId, PlainRows]) -> None:
        rows = self._joined(mail)
        total = torch.zeros(self.where.count, self.scratch.order.width, dtype=self.config.dtype)
        if rows is not None:
            total.index_add_(0, torch.from_numpy(self._targets), rows)
        self._arrived(total)

    @cached_property
    def _targets(self) -> np.ndarray[Any, Any]:
        return self.where.targets

    # hardened

    @handler
    def send_shares(self, order: Pass) -> Mapping[PartyId, ShareRows]:
        """Spec 11.3, steps 1 and 2: fixed point, fresh masks, share 1 to the target."""
        nonce = order.exchange.nonce()
        encoded = self.sums.encode(self._values(order).double().numpy(), nonce)
        self.scratch.clipped = getattr(self.scratch, "clipped", 0) + encoded.clipped
        if not self.where.pairs:
            return {}
        source, along, against = self._sources
        shares = self.sums.hide(encoded.values, source, against if order.backward else along, self._keys, nonce)
        sizes = [pair.count for pair in self.where.pairs.values()]
        parts = torch.split_with_sizes(self.config.to_wire(shares), sizes)
        return {devices_of(peer): ShareRows(part) for peer, part in zip(self.where.pairs, parts, strict=True)}

    @cached_property
    def _sources(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Own row of every message that leaves in one exchange, peer after peer, and how often it counts forward and
        backward.
        """
        pairs = self.where.pairs.values()
        return tuple(np.concatenate([getattr(pair, name) for pair in pairs]) for name in ("source", "along", "against"))

    @property
    def _keys(self) -> np.ndarray[Any, Any]:
        """Keys of all these messages; put together once."""
        if self._joined_keys[0] is not self.state.keys:
            self._joined_keys = self.state.keys, torch.cat([self.state.keys[peer] for peer in self.where.pairs]).numpy()
        return self._joined_keys[1]

    @handler
    def add_shares(self, mail: Mapping[PartyId, ShareRows]) -> None:
        """Step 5, first half: the target's own sum of share 1, padding included."""
        order: Pass = self.scratch.order
        rows = self._joined(mail)
        padding = self.sums.zeros(self.state.padding.numpy(), order.width, order.exchange.nonce())
        field = self.sums.field
        total = field.segment_sum(padding, self.state.padded.numpy(), self.where.count)
        if rows is not None:
            shares = field.check(self.config.from_wire(rows), "shares")
            total = field.add(total, field.segment_sum(shares, self._targets, self.where.count))
        self.scratch.share_one, self.scratch.others = total, {}

    @handler
    def take_held(self, sums: HeldSums) -> None:
        """Sums of the server, where it holds shares."""
        self.scratch.others[SERVER] = sums.rows

    @handler
    def open_sums(self, mail: Mapping[PartyId, HeldSums]) -> None:
        """Step 5: all holders' sums, interpolated at beta_1 and decoded."""
        others = {**self.scratch.others, **{holder: sums.rows for holder, sums in mail.items()}}
        self._open(others)

    @handler
    def open_held(self) -> None:
        """The same where the server is the only other holder."""
        self._open(self.scratch.others)

    def _open(self, others: Mapping[str, Tensor]) -> None:
        order: Pass = self.scratch.order
        handle = self.state.handle
        shares = []
        for holder in self.state.holders:
            if holder not in others or others[holder].shape != (self.where.count, order.width + 1):
                raise ProtocolError(
                    f"{self.party} has no sums of the share holders {holder} in layer {order.layer}: repeat the round "
                    "with all holders"
                )
            shares.append(self.sums.field.check(self.config.from_wire(others[holder][handle]), "sums of shares"))
        opened = self.sums.open(self.scratch.share_one, shares, self.terms, order.exchange.nonce())
        self.scratch.share_one = None
        self._arrived(torch.from_numpy(opened))

    # published

    @handler
    def ask_masks(self) -> Mapping[PartyId, MaskRequest]:
        """Every source asks the silo of its target for mu."""
        return {
            peer: MaskRequest(torch.from_numpy(np.unique(pair.source_id))) for peer, pair in self.where.pairs.items()
        }

    @handler
    def take_masks(self, mail: Mapping[PartyId, Masks]) -> None:
        self.state = replace(self.state, masks={silo: sent.masks for silo, sent in mail.items()})

    @handler
    def send_coded(self, order: Pass) -> Mapping[PartyId, CodedRows]:
        encoded = self.sums.format.encode(self._values(order).double().numpy())
        self.scratch.clipped = getattr(self.scratch, "clipped", 0) + encoded.clipped
        mail = {}
        for peer, pair in self.where.pairs.items():
            times = pair.against if order.backward else pair.along
            mu = PublicMasks(self.sums.code, self.config.from_wire(self.state.masks[peer]))
            mail[devices_of(peer)] = CodedRows(
                self.config.to_wire(mu.encode(gather(self.sums.field, encoded.values, pair.source, times)))
            )
        return mail

    @handler
    def add_coded(self, mail: Mapping[PartyId, CodedRows]) -> None:
        rows = self._joined(mail, axis=1)
        order: Pass = self.scratch.order
        self.scratch.coded = np.zeros((self.config.threshold + 1, self.where.count, order.width), np.uint64)
        if rows is not None:
            words = self.sums.field.check(self.config.from_wire(rows), "shares")
            for share in range(self.config.threshold + 1):
                self.scratch.coded[share] = self.sums.field.segment_sum(words[share], self._targets, self.where.count)

    @handler
    def up_coded(self) -> Mapping[PartyId, CodedSums]:
        return {silo_of(self.party): CodedSums(self.config.to_wire(self.scratch.coded))}

    @handler
    def take_decoded(self, mail: Mapping[PartyId, Decoded]) -> None:
        (sent,) = mail.values()
        self._arrived(sent.rows)

    # scores

    @cached_property
    def _masks(self) -> dict[str, Tensor]:
        return {part: getattr(self.data, part) for part in PARTS} | node_groups(self.data)

    @handler
    def scores(self) -> Mapping[PartyId, Evaluation]:
        """To the silo: counts over its devices."""
        return {silo_of(self.party): self.score()}

    @handler
    def score(self) -> Evaluation:
        self._ready()
        logits = self.scratch.tape.logits
        return Evaluation({part: tally(logits, self.data.y, mask) for part, mask in self._masks.items()})


# -- silo ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Register:
    """All a silo is given: who its devices are, and the public shape of the task."""

    node_id: Tensor
    num_features: int
    num_classes: int


def register_of(data: NodeData) -> Register:
    return Register(data.node_id, data.num_features, data.num_classes)


@dataclass(frozen=True)
class SiloState(Record):
    """What a silo remembers: its model and optimiser, how many of its devices are labelled, and what it needs to hold
    shares.

    Args:
        keys, sizes: By silo whose devices it holds shares for: (slots, 32) and (H,).
        masks: mu's masks as published, (T, D).
    """

    weights: Weights
    optimizer: OptimizerState
    labelled: int
    keys: Mapping[str, Tensor]
    sizes: Mapping[str, Tensor]
    masks: Tensor


class Silo(Client[HiFGLConfig, SiloState]):
    """Knows identities and the model; adds up shares and gradients, opens nothing."""

    def setup(self) -> None:
        self.register: Any = self.data
        self.sums = SecretSums(self.config.format, self.config.threshold)

    def initial_state(self) -> SiloState:
        weights = get_weights(
            self.config.build(self.register.num_features, self.register.num_classes, self.common.child("init"))
        )
        masks = torch.zeros(0, 0, dtype=torch.int64)
        if self.config.secmp == "published":
            widest = max(
                [self.config.columns, *self.config.widths(self.register.num_features, self.register.num_classes)]
            )
            masks = self.config.to_wire(self.sums.field.random((self.config.threshold, widest)))
        return SiloState(weights, fresh_state(self.config.optimizer, weights), 0, {}, {}, masks)

    def export(self) -> Weights:
        return self.state.weights

    @handler
    def take_count(self, mail: Mapping[PartyId, Labelled]) -> None:
        (sent,) = mail.values()
        self.state = replace(self.state, labelled=sent.devices)

    @handler
    def sizes(self) -> Sizes:
        return Sizes(float(self.state.labelled), float(self.state.labelled > 0))

    # shares

    @handler
    def announce(self) -> HolderKey:
        """A key for this setup; its secret half is gone with the round."""
        self.scratch.box = BoxHolder(box_context(self.party))
        return HolderKey(self.scratch.box.public)

    @handler
    def take_boxes(self, mail: Mapping[PartyId, SlotBoxes]) -> None:
        keys, sizes = open_slots(self.scratch.box, mail) if mail else ({}, {})
        self.state = replace(self.state, keys=keys, sizes=sizes)

    @handler
    def send_held(self, order: Pass) -> Mapping[PartyId, HeldSums]:
        """Spec 11.3, step 4: sums of shares by handle, to whom they belong. Nothing is decoded."""
        return held_sums(self.config, self.sums, self.state.keys, self.state.sizes, order)

    # published

    @handler
    def note_requests(self, mail: Mapping[PartyId, MaskRequest]) -> None:
        self.scratch.asked = sorted(mail)

    @handler
    def give_masks(self) -> Mapping[PartyId, Masks]:
        return {devices: Masks(self.state.masks) for devices in self.scratch.asked}

    @handler
    def decode_sums(self, mail: Mapping[PartyId, CodedSums]) -> None:
        (sent,) = mail.values()
        words = self.sums.field.check(self.config.from_wire(sent.rows), "sums of shares")
        self.scratch.decoded = self.sums.format.decode(self.sums.code.decode(words), self.config.max_degree)

    @handler
    def give_sums(self) -> Mapping[PartyId, Decoded]:
        return {devices_of(self.party): Decoded(torch.from_numpy(self.scratch.decoded))}

    # training

    @handler
    def begin(self, common: Common) -> None:
        """Take theta, keep what is personal."""
        self.scratch.common = common
        self.scratch.received = common.weights
        self.state = replace(self.state, weights={**self.state.weights, **common.weights})

    @handler
    def hand_down(self) -> Mapping[PartyId, Down]:
        return {devices_of(self.party): Down(self.state.weights, self._loss_weight(), True)}

    @handler
    def deploy(self) -> Mapping[PartyId, Down]:
        """The same to predict with."""
        return {devices_of(self.party): Down(self.state.weights, 0.0, False)}

    def _share(self) -> float:
        """This silo's part of an average over silos."""
        common: Common = self.scratch.common
        return self.state.labelled / common.labelled if self.config.weighting == "train" else 1.0 / common.members

    def _loss_weight(self) -> float:
        """Of one labelled device: silos count by ``weighting``, devices of a silo the same. In units of 1 / (all
        labelled), so that gradients on the wire are about 1 whatever the size of the graph and fixed point loses
        nothing."""
        common: Common = self.scratch.common
        if not self.state.labelled:
            return 0.0
        return 1.0 if self.config.weighting == "train" else common.labelled / (common.silos * self.state.labelled)

    @handler
    def collect(self, mail: Mapping[PartyId, DeviceGradients]) -> None:
        """The sum over own devices; a step of the silo's optimiser with it, unless the server takes the step."""
        (sent,) = mail.values()
        common: Common = self.scratch.common
        check_same_names(self.state.weights, sent.gradients)
        self.scratch.sent = sent
        self.scratch.clipped = getattr(self.scratch, "clipped", 0) + sent.clipped
        if self.config.algorithm == "fedsgd":
            return
        factor = (
            common.members / common.labelled if self.config.weighting != "train" else 1.0 / max(1, self.state.labelled)
        )
        grads = {name: tensor * factor for name, tensor in sent.gradients.items()}
        if self.config.algorithm == "fedprox" and self.config.mu:
            for name, received in self.scratch.received.items():
                grads[name] = grads[name] + self.config.mu * (self.state.weights[name] - received)
        weights, optimizer = stepped(
            self.state.weights,
            grads,
            self.state.optimizer,
            optimizer=self.config.optimizer,
            lr=common.lr,
            weight_decay=self.config.weight_decay,
        )
        self.state = replace(self.state, weights=weights, optimizer=optimizer)

    @handler
    def update(self) -> Update:
        """What the server adds up: share times new weights, or the gradient where the server steps."""
        sent: DeviceGradients = self.scratch.sent
        common: Common = self.scratch.common
        if self.config.algorithm == "fedsgd":
            part = scaled(sent.gradients, 1.0 / common.labelled)
        else:
            part = scaled({name: self.state.weights[name] for name in common.weights}, self._share())
        return Update(part, sent.loss / common.labelled, float(self.scratch.clipped))

    # scores

    @handler
    def take_scores(self, mail: Mapping[PartyId, Evaluation]) -> None:
        (self.scratch.evaluation,) = mail.values()

    @handler
    def evaluation(self) -> Evaluation:
        scored: Evaluation = self.scratch.evaluation
        return scored


def open_slots(box: BoxHolder, mail: Mapping[PartyId, SlotBoxes]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Keys (slots, 32) and slots per handle (H,) by silo, from boxes its devices passed on."""
    keys, sizes = dict[str, Tensor](), dict[str, Tensor]()
    for devices, sent in sorted(mail.items()):
        if int(sent.sizes.sum()) != sent.boxes.shape[0] or (sent.sizes.numel() and int(sent.sizes.min()) < 1):
            raise ProtocolError(
                f"{devices} passed on {sent.boxes.shape[0]} boxes for {int(sent.sizes.sum())} slots: repeat the "
                "exchange of keys"
            )
        keys[silo_of(devices)] = torch.from_numpy(box.open(sent.boxes.numpy()))
        sizes[silo_of(devices)] = sent.sizes
    return keys, sizes


def held_sums(
    config: HiFGLConfig, sums: SecretSums, keys: Mapping[str, Tensor], sizes: Mapping[str, Tensor], order: Pass
) -> dict[PartyId, HeldSums]:
    """A holder's part of one exchange."""
    nonce = order.exchange.nonce()
    return {
        devices_of(silo): HeldSums(
            config.to_wire(sums.held(keys[silo].numpy(), sizes[silo].numpy(), order.width, nonce))
        )
        for silo in keys
    }
