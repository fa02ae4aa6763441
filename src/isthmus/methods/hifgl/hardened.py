"""``secmp=hardened``, the default (spec 11.3): nobody but the target learns a sum, and nobody a neighbour's value.

Every message has T + 1 shares. The target holds share 1, share holders (its silo, the server, other silos) the others.
Steps 1 to 5 below are those of the spec; the arithmetic is `isthmus.privacy.secmp`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.errors import ConfigError, DataError, ProtocolError
from isthmus.federation.interface import Federation, PerClient
from isthmus.federation.messages import (
    SERVER,
    Ciphertext,
    Count,
    Identifier,
    Message,
    PartyId,
    Share,
    address,
    client_of,
)
from isthmus.federation.roles import handler
from isthmus.methods.hifgl.algorithm import Devices, Lines, SecMP, ServerState, Silo
from isthmus.methods.hifgl.config import HiFGLConfig
from isthmus.methods.hifgl.messages import Pass
from isthmus.methods.hifgl.parties import DeviceState, SiloState
from isthmus.privacy.anonymous_seal import BOX_OVERHEAD, BoxHolder, Bytes, fresh_keys, seal_boxes
from isthmus.privacy.chacha import KEY_BYTES
from isthmus.privacy.secmp import deal_slots

_NOTHING = torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True)
class HolderKey(Message):
    """silo -> server: its public key for sealed boxes of this setup."""

    key: Identifier[bytes]


@dataclass(frozen=True)
class HolderKeys(Message):
    """server -> devices: public keys of all who hold shares."""

    keys: Identifier[Mapping[str, bytes]]


@dataclass(frozen=True)
class EdgeKeys(Message):
    """devices -> devices, once: for each pair of neighbours one sealed key per holder, (E, T, 80) bytes the receiver
    cannot open.

    The two ends of an edge know each other; the ids make sure that they agree which edges there are.
    """

    source: Identifier[Tensor]
    target: Identifier[Tensor]
    boxes: Ciphertext[Tensor]


@dataclass(frozen=True)
class SlotBoxes(Message):
    """devices -> holders, once: sealed keys under pseudonyms, shuffled and padded to powers of two (``sizes``)."""

    sizes: Count[Tensor]
    boxes: Ciphertext[Tensor]


@dataclass(frozen=True)
class ShareRows(Message):
    """devices -> devices: share 1 of each message, (E, d + 1)."""

    rows: Share[Tensor]


@dataclass(frozen=True)
class HeldSums(Message):
    """holder -> devices: its summed shares by pseudonym, (n, d + 1)."""

    rows: Share[Tensor]


# -- share holders ---------------------------------------------------------------------------------


def share_holders(config: HiFGLConfig, silo: str, silos: Sequence[str]) -> tuple[str, ...]:
    """Who holds shares 2 .. T + 1 of messages to devices of ``silo``: the silo, the server, the silos after it (spec
    11.3, 11.6). In ``cross-silo`` mode the silo is the target and cannot hold a second share.
    """
    ordered = sorted(silos)
    at = ordered.index(silo)
    first = [silo, SERVER] if config.mode == "hierarchical" else [SERVER]
    return tuple([*first, *ordered[at + 1 :], *ordered[:at]][: config.threshold])


def holder_roles(config: HiFGLConfig) -> tuple[str, ...]:
    """Roles of the share holders."""
    roles = ("client", "server") if config.mode == "hierarchical" else ("server", "client")
    return roles[: config.threshold]


def box_context(holder: str) -> bytes:
    return f"isthmus/hifgl/{holder}".encode()


def open_slots(box: BoxHolder, mail: Mapping[PartyId, SlotBoxes]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """At a holder: keys (slots, 32) and slots per pseudonym (n,), by silo, from boxes its devices passed on."""
    keys, sizes = dict[str, Tensor](), dict[str, Tensor]()
    for devices, sent in sorted(mail.items()):
        if int(sent.sizes.sum()) != sent.boxes.shape[0] or (sent.sizes.numel() and int(sent.sizes.min()) < 1):
            passed = f"{devices} passed on {sent.boxes.shape[0]} boxes for {int(sent.sizes.sum())} slots"
            raise ProtocolError(f"{passed}: repeat the exchange of keys")
        keys[client_of(devices)] = torch.from_numpy(box.open(sent.boxes.numpy()))
        sizes[client_of(devices)] = sent.sizes
    return keys, sizes


def held_sums(
    config: HiFGLConfig, keys: Mapping[str, Tensor], sizes: Mapping[str, Tensor], order: Pass
) -> dict[PartyId, HeldSums]:
    """Step 4, at a holder: its shares summed by pseudonym, for those they belong to. Nothing is decoded."""
    mail, nonce = dict[PartyId, HeldSums](), order.exchange.nonce()
    for silo in keys:
        sums = config.sums.held(keys[silo].numpy(), sizes[silo].numpy(), order.width, nonce)
        mail[address(silo, "device")] = HeldSums(config.to_wire(sums))
    return mail


# -- parties ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HardenedDeviceState(DeviceState):
    """What the devices of a silo remember.

    Args:
        keys: (E, T, 32), of each pair of neighbours with each holder, peer after peer.
        padding: (P, T, 32), keys of own sharings of zero; ``padded`` (P,) whose they are.
        handle: (n,), pseudonyms towards holders.
        holders: Who holds shares 2 .. T + 1 of what is sent here.
    """

    keys: Tensor = _NOTHING
    padding: Tensor = _NOTHING
    padded: Tensor = _NOTHING
    handle: Tensor = _NOTHING
    holders: tuple[str, ...] = ()


class HardenedDevices(Devices[HardenedDeviceState]):
    """Hold share 1 of what their neighbours send, and open sums."""

    state_type = HardenedDeviceState

    # -- keys, once

    @handler
    def seal_keys(self, holders: HolderKeys) -> Mapping[PartyId, EdgeKeys]:
        """Step 2: one key per edge and holder, sealed to the holder, through the target, who cannot read it."""
        self.scratch.holders = holders.keys
        keys = fresh_keys(self.where.targets.size, self.config.threshold)
        mail, begin = dict[PartyId, EdgeKeys](), 0
        for peer, pair in self.where.pairs.items():
            ids = torch.from_numpy(pair.source_id), torch.from_numpy(pair.target_id)
            boxes = self._boxes(peer, keys[begin : begin + pair.count])
            mail[address(peer, "device")], begin = EdgeKeys(*ids, boxes), begin + pair.count
        self.state = replace(self.state, keys=torch.from_numpy(keys))
        return mail

    def _holders(self, silo: str) -> tuple[str, ...]:
        return share_holders(self.config, silo, [name for name in self.scratch.holders if name != SERVER])

    def _boxes(self, silo: str, keys: Bytes) -> Tensor:
        """Keys (E, T, 32) in boxes for the holders of a silo's devices."""
        public, names = self.scratch.holders, self._holders(silo)
        boxes = [seal_boxes(public[name], keys[:, j], box_context(name)) for j, name in enumerate(names)]
        return torch.from_numpy(np.stack(boxes, axis=1))

    @handler
    def take_keys(self, mail: Mapping[PartyId, EdgeKeys]) -> None:
        """Boxes for the holders, from all neighbours; both ends must know the same edges."""
        pairs = {address(peer, "device"): pair for peer, pair in self.where.pairs.items()}
        for peer in sorted(pairs.keys() | mail.keys()):
            pair, sent = pairs.get(peer), mail.get(peer)
            listed = None if pair is None else (pair.sender_id.tolist(), pair.receiver_id.tolist())
            if listed != (None if sent is None else (sent.source.tolist(), sent.target.tolist())):
                wrong = f"{self.party} and {peer} do not agree on the edges between them"
                raise DataError(f"{wrong}: both ends must list an edge; make the edge lists symmetric")
        self.scratch.boxes = [mail[peer].boxes for peer in pairs]

    @handler
    def forward_boxes(self) -> Mapping[PartyId, SlotBoxes]:
        """Step 3: remove sender identities, shuffle, pad, rename, pass on."""
        slots, holders = deal_slots(self.where.targets, self.where.count), self._holders(self.silo)
        padding = fresh_keys(slots.padding.size, self.config.threshold)
        boxes = torch.cat([*self.scratch.boxes, self._boxes(self.silo, padding)])
        self.state = replace(
            self.state,
            padding=torch.from_numpy(padding),
            padded=torch.from_numpy(slots.padding),
            handle=torch.from_numpy(slots.handle),
            holders=holders,
        )
        order, sizes = torch.from_numpy(slots.order), torch.from_numpy(slots.sizes)
        return {holder: SlotBoxes(sizes, boxes[order, j].contiguous()) for j, holder in enumerate(holders)}

    # -- one exchange

    @handler
    def send_shares(self, order: Pass) -> Mapping[PartyId, ShareRows]:
        """Steps 1 and 2: fixed point, fresh masks, share 1 to the target."""
        sums, nonce = self.config.sums, order.exchange.nonce()
        encoded = sums.encode(self.message(order).double().numpy(), nonce)
        self.scratch.clipped += encoded.clipped
        pairs = self.where.pairs
        if not pairs:
            return {}
        source, along, against = self.where.sources
        times = against if order.backward else along
        shares = sums.hide(encoded.values, source, times, self.state.keys.numpy(), nonce)
        parts = torch.split_with_sizes(self.config.to_wire(shares), [pair.count for pair in pairs.values()])
        return {address(peer, "device"): ShareRows(part) for peer, part in zip(pairs, parts, strict=True)}

    @handler
    def add_shares(self, mail: Mapping[PartyId, ShareRows]) -> None:
        """Step 5, first half: the target's own sum of share 1, padding included."""
        order: Pass = self.scratch.awaited
        rows, sums, count = self.joined(mail), self.config.sums, self.where.count
        padding = sums.zeros(self.state.padding.numpy(), order.width, order.exchange.nonce())
        total = sums.field.segment_sum(padding, self.state.padded.numpy(), count)
        if rows is not None:
            shares = sums.field.check(self.config.from_wire(rows), "shares")
            total = sums.field.add(total, sums.field.segment_sum(shares, self.where.targets, count))
        self.scratch.share_one, self.scratch.held = total, {}

    @handler
    def take_held(self, sums: HeldSums) -> None:
        """Sums of the server, where it holds shares."""
        self._open_when_complete({SERVER: sums})

    @handler
    def open_sums(self, mail: Mapping[PartyId, HeldSums]) -> None:
        """Sums of the silos."""
        self._open_when_complete(mail)

    def _open_when_complete(self, mail: Mapping[PartyId, HeldSums]) -> None:
        """Step 5, second half: the sums of all holders, interpolated at beta_1 and decoded."""
        order, sums, handle = self.scratch.awaited, self.config.sums, self.state.handle
        for holder, sent in mail.items():
            if sent.rows.shape != (self.where.count, order.width + 1):
                wrong = f"{holder} sent {self.party} sums of shape {tuple(sent.rows.shape)} in layer {order.layer}"
                raise ProtocolError(f"{wrong}: repeat the round")
            self.scratch.held[holder] = sums.field.check(self.config.from_wire(sent.rows[handle]), "sums of shares")
        if set(self.scratch.held) >= set(self.state.holders):
            others = [self.scratch.held[holder] for holder in self.state.holders]
            opened = sums.open(self.scratch.share_one, others, self.terms, order.exchange.nonce())
            self.receive(torch.from_numpy(opened))

    def senders(self) -> str:
        held = getattr(self.scratch, "held", {})
        return f"the share holders {', '.join(name for name in self.state.holders if name not in held)}"


@dataclass(frozen=True)
class HardenedSiloState(SiloState):
    """``keys``, ``sizes``: by silo whose devices it holds shares for, (slots, 32) and (n,)."""

    keys: Mapping[str, Tensor] = field(default_factory=dict)
    sizes: Mapping[str, Tensor] = field(default_factory=dict)


class HardenedSilo(Silo[HardenedSiloState]):
    """A share holder: adds up shares, opens nothing."""

    state_type = HardenedSiloState

    @handler
    def announce(self) -> HolderKey:
        """A key for this setup; its secret half is gone with the round."""
        self.scratch.box = BoxHolder(box_context(self.party))
        return HolderKey(self.scratch.box.public)

    @handler
    def take_boxes(self, mail: Mapping[PartyId, SlotBoxes]) -> None:
        keys, sizes = open_slots(self.scratch.box, mail)
        self.state = replace(self.state, keys=keys, sizes=sizes)

    @handler
    def send_held(self, order: Pass) -> Mapping[PartyId, HeldSums]:
        return held_sums(self.config, self.state.keys, self.state.sizes, order)


# -- the protocol ----------------------------------------------------------------------------------


class Hardened(SecMP):
    devices, silo = HardenedDevices, HardenedSilo

    def check(self, silos: Sequence[str]) -> None:
        config, have = self.config, len(share_holders(self.config, silos[0], silos))
        if have < config.threshold:
            raise ConfigError(
                f"threshold {config.threshold} needs {config.threshold + 1} share holders, {config.mode} with "
                f"{len(silos)} silos has {have + 1}: use threshold={have} or more silos"
            )

    def setup(self, state: ServerState, federation: Federation) -> ServerState:
        """One key per edge and holder (steps 2 and 3)."""
        devices, roles = federation.tier("device"), holder_roles(self.config)
        box = BoxHolder(box_context(SERVER))
        keys = dict.fromkeys(federation.clients, b"") | ({SERVER: box.public} if "server" in roles else {})
        if "client" in roles:
            keys |= {silo: reply.key for silo, reply in federation.call(HardenedSilo.announce).items()}
        devices.exchange(HardenedDevices.seal_keys, HardenedDevices.take_keys, HolderKeys(keys))
        receivers = [HardenedSilo.take_boxes] if "client" in roles else []
        mail: Any = devices.exchange(HardenedDevices.forward_boxes, receivers).mail
        held, sizes = open_slots(box, mail)
        return replace(state, keys=held, sizes=sizes)

    def sum_over_neighbours(self, state: ServerState, federation: Federation, order: Pass) -> None:
        devices, roles = federation.tier("device"), holder_roles(self.config)
        devices.exchange(HardenedDevices.send_shares, HardenedDevices.add_shares, order)
        if "server" in roles:
            devices.call(HardenedDevices.take_held, PerClient(held_sums(self.config, state.keys, state.sizes, order)))
        if "client" in roles:
            federation.exchange(HardenedSilo.send_held, HardenedDevices.open_sums, order)

    def setup_lines(self) -> Lines:
        roles = holder_roles(self.config)
        return (
            *((("client", "server", HolderKey),) if "client" in roles else ()),
            ("server", "device", HolderKeys),
            ("device", "device", EdgeKeys),
            *(("device", role, SlotBoxes) for role in roles),
        )

    def lines(self) -> Lines:
        roles = holder_roles(self.config)
        return (
            ("server", "device", Pass),
            *((("server", "client", Pass),) if "client" in roles else ()),
            ("device", "device", ShareRows),
            *((role, "device", HeldSums) for role in roles),
        )

    def message_bytes(self, width: int) -> int:
        return (width + 1) * self.config.element_bytes  # one more element to check sums by

    def key_bytes(self) -> int:
        return self.config.threshold * (KEY_BYTES + BOX_OVERHEAD)
