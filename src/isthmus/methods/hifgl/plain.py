"""``secmp=plain``: neighbours' values travel in the clear. What the reference code does; for comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.federation.interface import Federation
from isthmus.federation.messages import Embedding, Message, PartyId, address
from isthmus.federation.roles import handler
from isthmus.federation.script import mail
from isthmus.methods.hifgl.algorithm import Devices, Lines, SecMP, ServerState, Silo
from isthmus.methods.hifgl.messages import Pass
from isthmus.methods.hifgl.parties import DeviceState


@dataclass(frozen=True)
class PlainRows(Message):
    """devices -> devices: values in the clear, (E, d)."""

    rows: Embedding[Tensor]


class PlainDevices(Devices[DeviceState]):
    @handler
    def send_plain(self, order: Pass) -> Mapping[PartyId, PlainRows]:
        values, mail = self.message(order), dict[PartyId, PlainRows]()
        for peer, pair, counts in self.times_by_peer(order):
            rows, times = values[torch.from_numpy(pair.source)], torch.from_numpy(counts)
            once = bool((times == 1).all())
            mail[address(peer, "device")] = PlainRows(rows if once else rows * times[:, None].to(rows.dtype))
        return mail

    @handler
    def add_plain(self, mail: Mapping[PartyId, PlainRows]) -> None:
        rows = self.joined(mail)
        total = torch.zeros(self.where.count, self.scratch.awaited.width, dtype=self.config.dtype)
        if rows is not None:
            kept = torch.from_numpy(self.arriving(self.scratch.awaited))
            total.index_add_(0, torch.from_numpy(self.where.targets)[kept], rows[kept])
        self.receive(total)


class Plain(SecMP):
    devices, silo = PlainDevices, Silo

    def sum_over_neighbours(self, state: ServerState, federation: Federation, order: Pass) -> None:
        federation.tier("device").exchange(PlainDevices.send_plain, PlainDevices.add_plain, order)

    def exchange_lines(self, silos: int, most: int, *, setup: bool = False) -> Lines:
        return (mail(PlainDevices.send_plain, PlainDevices.add_plain, most=most),)

    def message_bytes(self, width: int) -> int:
        return width * self.config.dtype.itemsize
