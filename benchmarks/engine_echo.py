"""A client that returns what it is sent, for `engines.py`: in a module of its own, so that other processes can import
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from isthmus.federation.messages import Message, Model
from isthmus.federation.roles import Client, Role, RoleTable, handler
from isthmus.records import Record


@dataclass(frozen=True)
class Payload(Message):
    values: Model[Tensor]


@dataclass(frozen=True)
class Nothing(Record):
    """An echo remembers nothing."""


class Echo(Client[Any, Nothing]):
    def initial_state(self) -> Nothing:
        return Nothing()

    @handler
    def echo(self, request: Payload) -> Payload:
        return request


ECHO = RoleTable({"client": Role(Echo)})
