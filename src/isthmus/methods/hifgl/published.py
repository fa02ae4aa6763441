"""``secmp=published``: the protocol as printed (spec 3.3), in a large field. It leaks; kept to be attacked (spec 11.2).

All sources of a silo's devices are given the same masks (mu); a target receives all T + 1 shares of each message, sums
them, and its silo decodes the sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from isthmus.federation.interface import Federation
from isthmus.federation.messages import Embedding, Identifier, Message, PartyId, Share, address
from isthmus.federation.roles import handler
from isthmus.federation.script import mail
from isthmus.methods.hifgl.algorithm import Devices, Lines, SecMP, ServerState, Silo
from isthmus.methods.hifgl.config import HiFGLConfig
from isthmus.methods.hifgl.messages import Pass
from isthmus.methods.hifgl.parties import DeviceState, SiloState
from isthmus.privacy.secmp import PublicMasks, gather


def printed_threshold(config: HiFGLConfig) -> int:
    """T, 1 unless given (the paper)."""
    return config.threshold or 1


@dataclass(frozen=True)
class MaskRequest(Message):
    """devices -> silo of a neighbour: who asks for mu. That alone tells the silo of edges (spec 11.2 f)."""

    devices: Identifier[Tensor]


@dataclass(frozen=True)
class Masks(Message):
    """silo -> devices that asked: the masks of mu, (T, D)."""

    masks: Share[Tensor]


@dataclass(frozen=True)
class CodedRows(Message):
    """devices -> devices: all T + 1 shares of each message, (T + 1, E, d)."""

    rows: Share[Tensor]


@dataclass(frozen=True)
class CodedSums(Message):
    """devices -> own silo: sums by device and share, (T + 1, n, d)."""

    rows: Share[Tensor]


@dataclass(frozen=True)
class Decoded(Message):
    """silo -> own devices: the sums in the clear, which the silo has now seen (spec 11.2 e)."""

    rows: Embedding[Tensor]


@dataclass(frozen=True)
class PublishedDeviceState(DeviceState):
    """``masks``: those of mu, by silo."""

    masks: Mapping[str, Tensor] = field(default_factory=dict)


class PublishedDevices(Devices[PublishedDeviceState]):
    state_type = PublishedDeviceState

    @handler
    def ask_masks(self) -> Mapping[PartyId, MaskRequest]:
        """Every source asks the silo of its target for mu."""
        pairs = self.where.pairs.items()
        return {peer: MaskRequest(torch.from_numpy(np.unique(pair.source_id))) for peer, pair in pairs}

    @handler
    def take_masks(self, mail: Mapping[PartyId, Masks]) -> None:
        self.state = replace(self.state, masks={silo: sent.masks for silo, sent in mail.items()})

    @handler
    def send_coded(self, order: Pass) -> Mapping[PartyId, CodedRows]:
        """Step 1: encode, all shares to the target."""
        config, mail = self.config, dict[PartyId, CodedRows]()
        encoded = config.format.encode(self.message(order).double().numpy())
        self.scratch.clipped += encoded.clipped
        for peer, pair, times in self.times_by_peer(order):
            mu = PublicMasks(config.sums(printed_threshold(config)).code, config.from_wire(self.state.masks[peer]))
            shares = mu.encode(gather(config.format.field, encoded.values, pair.source, times))
            mail[address(peer, "device")] = CodedRows(config.to_wire(shares))
        return mail

    @handler
    def add_coded(self, mail: Mapping[PartyId, CodedRows]) -> None:
        """Step 2: sum share by share."""
        rows, field, count = self.joined(mail, axis=1), self.config.format.field, self.where.count
        total = np.zeros((printed_threshold(self.config) + 1, count, self.scratch.awaited.width), np.uint64)
        if rows is not None:
            kept = self.arriving(self.scratch.awaited)
            for share, words in enumerate(field.check(self.config.from_wire(rows), "shares")):
                total[share] = field.segment_sum(words[kept], self.where.targets[kept], count)
        self.scratch.coded = total

    @handler
    def up_coded(self) -> Mapping[PartyId, CodedSums]:
        return {self.silo: CodedSums(self.config.to_wire(self.scratch.coded))}

    @handler
    def take_decoded(self, mail: Mapping[PartyId, Decoded]) -> None:
        (sent,) = mail.values()
        self.receive(sent.rows)


class PublishedSilo(Silo[SiloState]):
    @handler
    def note_requests(self, mail: Mapping[PartyId, MaskRequest]) -> None:
        self.scratch.asked = sorted(mail)

    @handler
    def give_masks(self) -> Mapping[PartyId, Masks]:
        """mu, drawn once and the same for all."""
        config, plan = self.config, self.config.plan(self.data.num_features, self.data.num_classes)
        masks = config.format.field.random((printed_threshold(config), max([config.columns, *plan.widths])))
        return {devices: Masks(config.to_wire(masks)) for devices in self.scratch.asked}

    @handler
    def decode_sums(self, mail: Mapping[PartyId, CodedSums]) -> None:
        """Interpolate at beta_1: the silo reads the sums."""
        (sent,) = mail.values()
        sums = self.config.sums(printed_threshold(self.config))
        words = sums.field.check(self.config.from_wire(sent.rows), "sums of shares")
        self.scratch.decoded = sums.format.decode(sums.code.decode(words), sums.format.terms)

    @handler
    def give_sums(self) -> Mapping[PartyId, Decoded]:
        return {address(self.party, "device"): Decoded(torch.from_numpy(self.scratch.decoded))}


class Published(SecMP):
    devices, silo = PublishedDevices, PublishedSilo

    def setup(self, state: ServerState, federation: Federation) -> ServerState:
        federation.tier("device").exchange(PublishedDevices.ask_masks, PublishedSilo.note_requests)
        federation.exchange(PublishedSilo.give_masks, PublishedDevices.take_masks)
        return state

    def sum_over_neighbours(self, state: ServerState, federation: Federation, order: Pass) -> None:
        devices = federation.tier("device")
        devices.exchange(PublishedDevices.send_coded, PublishedDevices.add_coded, order)
        devices.exchange(PublishedDevices.up_coded, PublishedSilo.decode_sums)
        federation.exchange(PublishedSilo.give_sums, PublishedDevices.take_decoded)

    def setup_lines(self, silos: int) -> Lines:
        return (
            mail(PublishedDevices.ask_masks, PublishedSilo.note_requests),
            mail(PublishedSilo.give_masks, PublishedDevices.take_masks),
        )

    def exchange_lines(self, silos: int, most: int, *, setup: bool = False) -> Lines:
        return (
            mail(PublishedDevices.send_coded, PublishedDevices.add_coded, most=most),
            mail(PublishedDevices.up_coded, PublishedSilo.decode_sums, most=most),
            mail(PublishedSilo.give_sums, PublishedDevices.take_decoded, most=most),
        )

    def message_bytes(self, width: int) -> int:
        return (printed_threshold(self.config) + 1) * width * self.config.element_bytes
