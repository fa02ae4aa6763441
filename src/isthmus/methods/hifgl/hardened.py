"""``secmp=hardened``, the default (spec 11.3): nobody but the target learns a sum, and nobody a neighbour's value.

Every message has T + 1 shares. The target holds share 1, share holders (the server, then other silos) the others.
Steps 1 to 5 below are those of the spec; the arithmetic is `isthmus.privacy.secmp`, keys are
`isthmus.privacy.edge_keys`.

# Differs from the spec: the target's own silo is no holder. Between organisations target and silo are one process,
which would hold all shares of what it receives with T = 1, and one share too many with any other T.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
    Structure,
    address,
    client_of,
)
from isthmus.federation.roles import handler
from isthmus.federation.script import ask, mail
from isthmus.methods.hifgl.algorithm import Devices, Lines, SecMP, ServerState, Silo
from isthmus.methods.hifgl.config import HiFGLConfig
from isthmus.methods.hifgl.messages import Pass
from isthmus.methods.hifgl.parties import DeviceState, SiloState
from isthmus.privacy.chacha import KEY_BYTES, Nonce
from isthmus.privacy.edge_keys import (
    GROUP,
    PROOF_BYTES,
    Bytes,
    KeyGroups,
    KeyHolder,
    Rows,
    joined_groups,
    make_keys,
)
from isthmus.privacy.field import Elements
from isthmus.privacy.keys import PUBLIC_BYTES
from isthmus.privacy.secmp import SecretSums, deal_slots

_NOTHING = torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True)
class Announcement(Message):
    """server -> silos: which silos there are."""

    silos: Identifier[tuple[str, ...]]


@dataclass(frozen=True)
class HolderKey(Message):
    """silo -> devices of all silos: its public key for the keys of this setup. It travels as mail, which between
    organisations is sealed with keys that the organisations signed, so whoever carries it cannot put in another one.
    """

    key: Identifier[bytes]


@dataclass(frozen=True)
class HolderKeys(Message):
    """server -> devices: which silos there are, and the server's own public key where it holds shares."""

    silos: Identifier[tuple[str, ...]]
    server: Identifier[bytes]


@dataclass(frozen=True)
class EdgeKeys(Message):
    """devices -> devices, once: for each pair of neighbours where its keys come from (`edge_keys.KeyGroups`), nothing
    the receiver could compute one from; and what the sender's devices want of the receiver's, in the order in which the
    receiver sends: a device of too few neighbours is sent no values (1), no gradients (2), or neither.

    The two ends of an edge know each other; the ids make sure that they agree which edges there are.
    """

    source: Identifier[Tensor]
    target: Identifier[Tensor]
    group: Identifier[Tensor]
    number: Identifier[Tensor]
    public: Ciphertext[Tensor]
    proof: Ciphertext[Tensor]
    withheld: Structure[Tensor]


@dataclass(frozen=True)
class SlotKeys(Message):
    """devices -> holders, once: where the keys come from, under pseudonyms, shuffled and padded to powers of two
    (``sizes``); groups in random order.
    """

    sizes: Count[Tensor]
    group: Identifier[Tensor]
    number: Identifier[Tensor]
    public: Ciphertext[Tensor]
    proof: Ciphertext[Tensor]


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
    """Who holds shares 2 .. T + 1 of messages to devices of ``silo``: the server, the silos after it (spec 11.3, 11.6),
    never the silo itself.
    """
    ordered = sorted(silos)
    at = ordered.index(silo)
    others = [] if config.mode == "cross-device" else [*ordered[at + 1 :], *ordered[:at]]
    return tuple([SERVER, *others][: config.holders(len(ordered))])


def holder_roles(config: HiFGLConfig, silos: int) -> tuple[str, ...]:
    """Roles of the share holders."""
    return ("server", "client")[: config.holders(silos)]


def key_context(holder: str) -> bytes:
    return f"isthmus/hifgl/{holder}".encode()


def take_slots(holder: KeyHolder, mail: Mapping[PartyId, SlotKeys]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """At a holder: keys (slots, 32) and slots per pseudonym (n,), by silo, from what its devices passed on."""
    keys, sizes = dict[str, Tensor](), dict[str, Tensor]()
    for devices, sent in sorted(mail.items()):
        if int(sent.sizes.sum()) != sent.group.shape[0] or (sent.sizes.numel() and int(sent.sizes.min()) < 1):
            passed = f"{devices} passed on {sent.group.shape[0]} keys for {int(sent.sizes.sum())} slots"
            raise ProtocolError(f"{passed}: repeat the exchange of keys")
        where = sent.group.numpy().astype(np.int64), sent.number.numpy().astype(np.int64)
        keys[client_of(devices)] = torch.from_numpy(holder.keys(*where, sent.public.numpy(), sent.proof.numpy()))
        sizes[client_of(devices)] = sent.sizes
    return keys, sizes


def held_sums(
    config: HiFGLConfig, keys: Mapping[str, Tensor], sizes: Mapping[str, Tensor], order: Pass
) -> dict[PartyId, HeldSums]:
    """Step 4, at a holder: its shares summed by pseudonym, for those they belong to. Nothing is decoded."""
    mail, nonce = dict[PartyId, HeldSums](), order.exchange.nonce()
    for silo in keys:
        sums = config.sums(1).held(keys[silo].numpy(), sizes[silo].numpy(), order.width, nonce)
        mail[address(silo, "device")] = HeldSums(config.to_wire(sums))
    return mail


# -- parties ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HardenedDeviceState(DeviceState):
    """What the devices of a silo remember.

    Args:
        keys: (E, T, 32), of each pair of neighbours with each holder, peer after peer.
        withheld: (E,), which messages to the neighbour are empty: of values (1), of gradients (2).
        padding: (P, T, 32), keys of own sharings of zero; ``padded`` (P,) whose they are.
        handle: (n,), pseudonyms towards holders.
        holders: Who holds shares 2 .. T + 1 of what is sent here.
    """

    keys: Tensor = _NOTHING
    withheld: Tensor = _NOTHING
    padding: Tensor = _NOTHING
    padded: Tensor = _NOTHING
    handle: Tensor = _NOTHING
    holders: tuple[str, ...] = ()


class HardenedDevices(Devices[HardenedDeviceState]):
    """Hold share 1 of what their neighbours send, and open sums."""

    state_type = HardenedDeviceState

    @property
    def sums(self) -> SecretSums:
        return self.config.sums(len(self.state.holders))

    # -- keys, once

    @handler
    def take_holders(self, mail: Mapping[PartyId, HolderKey]) -> None:
        """Public keys of the silos, from themselves."""
        self.scratch.public = {silo: sent.key for silo, sent in mail.items()}

    @handler
    def seal_keys(self, order: HolderKeys) -> Mapping[PartyId, EdgeKeys]:
        """Step 2: one key per edge and holder; the target learns where holders find it."""
        self.scratch.silos = order.silos
        self.scratch.public = {**getattr(self.scratch, "public", {}), SERVER: order.server}
        self.state = replace(self.state, holders=share_holders(self.config, self.silo, order.silos))
        keys, mail = [], dict[PartyId, EdgeKeys]()
        for peer, pair in self.where.pairs.items():
            made, groups = self._make_keys(peer, pair.target_id)
            keys.append(made)
            mail[address(peer, "device")] = EdgeKeys(
                torch.from_numpy(pair.source_id),
                torch.from_numpy(pair.target_id),
                *_on_wire(groups.group, groups.number),
                torch.from_numpy(groups.public),
                torch.from_numpy(groups.proof),
                torch.from_numpy(self._unwanted(peer)[pair.target]),
            )
        none = np.empty((0, len(self.state.holders), KEY_BYTES), np.uint8)
        self.state = replace(self.state, keys=torch.from_numpy(np.concatenate([none, *keys])))
        return mail

    def _make_keys(self, silo: str, target: Rows) -> tuple[Bytes, KeyGroups]:
        """Keys (E, T, 32) with the holders of a silo's devices, of messages to ``target``."""
        names, public = share_holders(self.config, silo, self.scratch.silos), self.scratch.public
        for name in names:
            if name not in public:
                raise ProtocolError(f"{self.party} has no key of the share holder {name}: repeat the exchange of keys")
        return make_keys([(public[name], key_context(name)) for name in names], target)

    def _unwanted(self, peer: str) -> NDArray[np.uint8]:
        """What devices of a peer must not send to each device, (n,): values (1), gradients (2)."""
        values, gradients = (~each.of(peer, self.silo) for each in self.arrivals)
        return values.astype(np.uint8) + 2 * gradients.astype(np.uint8)

    @handler
    def take_keys(self, mail: Mapping[PartyId, EdgeKeys]) -> None:
        """What to pass on to the holders, from all neighbours; both ends must know the same edges."""
        pairs = {address(peer, "device"): pair for peer, pair in self.where.pairs.items()}
        for peer in sorted(pairs.keys() | mail.keys()):
            pair, sent = pairs.get(peer), mail.get(peer)
            listed = None if pair is None else (pair.sender_id.tolist(), pair.receiver_id.tolist())
            if listed != (None if sent is None else (sent.source.tolist(), sent.target.tolist())):
                wrong = f"{self.party} and {peer} do not agree on the edges between them"
                raise DataError(f"{wrong}: both ends must list an edge; make the edge lists symmetric")
        self.scratch.passed = [_groups(mail[peer]) for peer in pairs]
        if any(mail[peer].withheld.shape != (pair.count,) for peer, pair in pairs.items()):
            raise ProtocolError(f"{self.party} was told what to withhold for other edges: repeat the exchange of keys")
        none = torch.zeros(0, dtype=torch.uint8)
        self.state = replace(self.state, withheld=torch.cat([none, *(mail[peer].withheld for peer in pairs)]))

    @handler
    def forward_boxes(self) -> Mapping[PartyId, SlotKeys]:
        """Step 3: remove sender identities, shuffle, pad, rename, pass on."""
        slots, holders = deal_slots(self.where.targets, self.where.count), self.state.holders
        padding, own = self._make_keys(self.silo, slots.padding)
        everything = joined_groups([*self.scratch.passed, own])
        self.state = replace(
            self.state,
            padding=torch.from_numpy(padding),
            padded=torch.from_numpy(slots.padding),
            handle=torch.from_numpy(slots.handle),
        )
        sizes, where = torch.from_numpy(slots.sizes), _on_wire(everything.group, everything.number)
        group, number = (part[torch.from_numpy(slots.order)] for part in where)
        public, proof = torch.from_numpy(everything.public), torch.from_numpy(everything.proof)
        return {
            holder: SlotKeys(sizes, group, number, public, proof[:, j].contiguous()) for j, holder in enumerate(holders)
        }

    # -- one exchange

    @handler
    def send_shares(self, order: Pass) -> Mapping[PartyId, ShareRows]:
        """Steps 1 and 2: fixed point, fresh masks, share 1 to the target."""
        sums, nonce = self.sums, order.exchange.nonce()
        encoded = sums.encode(self.message(order).double().numpy(), nonce)
        self.scratch.clipped += encoded.clipped
        pairs = self.where.pairs
        if not pairs:
            return {}
        self._use_once(nonce, encoded.values)
        wanted = (self.state.withheld.numpy() & (2 if order.backward else 1)) == 0
        leaving = [(pair.source, times) for _, pair, times in self.times_by_peer(order)]
        source, times = (np.concatenate(part) for part in zip(*leaving, strict=True))
        shares = sums.hide(encoded.values, source, times * wanted, self.state.keys.numpy(), nonce)
        parts = torch.split_with_sizes(self.config.to_wire(shares), [pair.count for pair in pairs.values()])
        return {address(peer, "device"): ShareRows(part) for peer, part in zip(pairs, parts, strict=True)}

    def _use_once(self, nonce: Nonce, values: Elements) -> None:
        """Two messages under one key and nonce have the same masks, and their shares differ by what the values differ
        by. So an exchange is answered once; after a rollback the round is run again, and must come to the same values.
        """
        key = hashlib.blake2b(self.state.keys[:1].numpy().tobytes(), digest_size=16).digest()
        digest = hashlib.blake2b(values.tobytes(), digest_size=16).digest()
        used: set[Nonce] = self.scratch.__dict__.setdefault("used", set())
        if nonce in used or self.remembered.setdefault((key, nonce), digest) != digest:
            asked = f"{self.party} was asked for exchange {nonce} a second time"
            raise ProtocolError(f"{asked}, which would show what changed since: start the run again")
        used.add(nonce)

    @handler
    def add_shares(self, mail: Mapping[PartyId, ShareRows]) -> None:
        """Step 5, first half: the target's own sum of share 1, padding included."""
        order: Pass = self.scratch.awaited
        rows, sums, count = self.joined(mail), self.sums, self.where.count
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
        order, sums, handle = self.scratch.awaited, self.sums, self.state.handle
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
    def announce(self, everyone: Announcement) -> Mapping[PartyId, HolderKey]:
        """A key for this setup, to the devices of all silos; its secret half is gone with the round."""
        self.scratch.holder = KeyHolder(key_context(self.party))
        return {address(silo, "device"): HolderKey(self.scratch.holder.public) for silo in everyone.silos}

    @handler
    def take_boxes(self, mail: Mapping[PartyId, SlotKeys]) -> None:
        keys, sizes = take_slots(self.scratch.holder, mail)
        self.state = replace(self.state, keys=keys, sizes=sizes)

    @handler
    def send_held(self, order: Pass) -> Mapping[PartyId, HeldSums]:
        return held_sums(self.config, self.state.keys, self.state.sizes, order)


# -- the protocol ----------------------------------------------------------------------------------


class Hardened(SecMP):
    devices, silo = HardenedDevices, HardenedSilo

    def check(self, silos: Sequence[str]) -> None:
        wanted, have = self.config.holders(len(silos)), len(share_holders(self.config, silos[0], silos))
        if have < wanted:
            raise ConfigError(
                f"threshold {wanted} needs {wanted + 1} share holders, {self.config.mode} with {len(silos)} silos has "
                f"{have + 1}: use threshold={have} or more silos"
            )

    def setup(self, state: ServerState, federation: Federation) -> ServerState:
        """One key per edge and holder (steps 2 and 3)."""
        devices, silos = federation.tier("device"), federation.clients
        roles, holder = holder_roles(self.config, len(silos)), KeyHolder(key_context(SERVER))
        if "client" in roles:
            federation.exchange(HardenedSilo.announce, HardenedDevices.take_holders, Announcement(silos))
        devices.exchange(HardenedDevices.seal_keys, HardenedDevices.take_keys, HolderKeys(silos, holder.public))
        receivers = [HardenedSilo.take_boxes] if "client" in roles else []
        mail: Any = devices.exchange(HardenedDevices.forward_boxes, receivers).mail
        held, sizes = take_slots(holder, mail)
        return replace(state, keys=held, sizes=sizes)

    def sum_over_neighbours(self, state: ServerState, federation: Federation, order: Pass) -> None:
        devices = federation.tier("device")
        devices.exchange(HardenedDevices.send_shares, HardenedDevices.add_shares, order)
        if state.keys:
            devices.call(HardenedDevices.take_held, PerClient(held_sums(self.config, state.keys, state.sizes, order)))
        if "client" in holder_roles(self.config, len(federation.clients)):
            federation.exchange(HardenedSilo.send_held, HardenedDevices.open_sums, order)

    def setup_lines(self, silos: int) -> Lines:
        keys = mail(HardenedDevices.seal_keys, HardenedDevices.take_keys, fresh=True)
        if "client" not in holder_roles(self.config, silos):
            return keys, mail(HardenedDevices.forward_boxes, server=True)
        return (
            mail(HardenedSilo.announce, HardenedDevices.take_holders),
            keys,
            mail(HardenedDevices.forward_boxes, HardenedSilo.take_boxes, server=True),
        )

    def exchange_lines(self, silos: int, most: int, *, setup: bool = False) -> Lines:
        others = (mail(HardenedSilo.send_held, HardenedDevices.open_sums, most=most),)
        return (
            mail(HardenedDevices.send_shares, HardenedDevices.add_shares, most=most),
            ask(HardenedDevices.take_held, most=most, each=True, fresh=setup),
            *(others if "client" in holder_roles(self.config, silos) else ()),
        )

    def message_bytes(self, width: int) -> int:
        return (width + 1) * self.config.element_bytes  # one more element to check sums by

    def key_bytes(self, silos: int) -> int:
        group = PUBLIC_BYTES + self.config.holders(silos) * PROOF_BYTES
        return _WHERE_BYTES + -(-group // GROUP)


_WHERE_BYTES = 4 + 2


def _on_wire(group: Rows, number: Rows) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(group.astype(np.int32)), torch.from_numpy(number.astype(np.int16))


def _groups(sent: EdgeKeys) -> KeyGroups:
    """What a neighbour's message says of keys; refused if it names groups that are not in it."""
    groups = KeyGroups(
        sent.group.numpy().astype(np.int64),
        sent.number.numpy().astype(np.int64),
        sent.public.numpy(),
        sent.proof.numpy(),
    )
    if groups.group.shape != sent.source.shape or (
        groups.group.size and not 0 <= groups.group.min() <= groups.group.max() < groups.public.shape[0]
    ):
        raise ProtocolError("a neighbour's keys name groups that were not sent: repeat the exchange of keys")
    return groups
