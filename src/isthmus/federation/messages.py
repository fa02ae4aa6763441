"""Messages: the only things that pass between parties.

A message is a frozen dataclass whose fields say what *kind* of thing they disclose::

    @dataclass(frozen=True)
    class Update(Message):
        weights: Model[Weights]
        share: Count[float]

The kinds of a method's messages are its disclosure sheet: what a reader of the sheet sees is what the codec lets
through. A :class:`~isthmus.records.Record` is the same without kinds: state that stays with its party and goes into
that party's checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, TypeVar, get_args, get_origin, get_type_hints

from isthmus.records import Record

PartyId = str
ClientId = str
SERVER: PartyId = "server"

T = TypeVar("T")


class Kind(StrEnum):
    """What a field tells whoever reads it."""

    MODEL = "model"
    GRADIENT = "gradient"
    EMBEDDING = "embedding"
    STRUCTURE = "structure"
    LABEL_STATISTIC = "label statistic"
    COUNT = "count"
    IDENTIFIER = "identifier"
    SHARE = "share"
    CIPHERTEXT = "ciphertext"
    METRIC = "metric"
    FEATURE_STATISTIC = "feature statistic"


Model = Annotated[T, Kind.MODEL]
Gradient = Annotated[T, Kind.GRADIENT]
Embedding = Annotated[T, Kind.EMBEDDING]
Structure = Annotated[T, Kind.STRUCTURE]
LabelStatistic = Annotated[T, Kind.LABEL_STATISTIC]
Count = Annotated[T, Kind.COUNT]
Identifier = Annotated[T, Kind.IDENTIFIER]
Share = Annotated[T, Kind.SHARE]
Ciphertext = Annotated[T, Kind.CIPHERTEXT]
Metric = Annotated[T, Kind.METRIC]
FeatureStatistic = Annotated[T, Kind.FEATURE_STATISTIC]


@dataclass(frozen=True)
class Message(Record):
    """A record that may travel. Every field carries a kind, or is itself a message."""


def role_of(party: PartyId) -> str:
    """The role behind an address: ``server``, ``client``, or for ``client-3/devices`` the tier ``device``."""
    if party == SERVER:
        return SERVER
    _, slash, tier = party.partition("/")
    return tier.removesuffix("s") if slash else "client"


def address(client: ClientId, role: str) -> PartyId:
    """The party of a role at a client: the client itself, or the tier below it (``client-3/devices``)."""
    return client if role == "client" else f"{client}/{role}s"


def client_of(party: PartyId) -> ClientId:
    """The client a party belongs to."""
    return party.partition("/")[0]


def kinds_of(message: type[Message]) -> dict[str, Kind]:
    """Kind of each field, nested messages as ``outer.inner``. A field without one is the author's mistake."""
    if message in _KINDS:
        return _KINDS[message]
    hints = get_type_hints(message, include_extras=True)
    kinds: dict[str, Kind] = {}
    for field in fields(message):
        hint = hints[field.name]
        marks = [mark for mark in get_args(hint)[1:] if isinstance(mark, Kind)] if get_origin(hint) is Annotated else []
        if marks:
            kinds[field.name] = marks[0]
        elif isinstance(hint, type) and issubclass(hint, Message):
            kinds |= {f"{field.name}.{name}": kind for name, kind in kinds_of(hint).items()}
        else:
            raise TypeError(f"{message.__name__}.{field.name} has no kind: write e.g. `{field.name}: Model[...]`")
    _KINDS[message] = kinds
    return kinds


_KINDS: dict[type[Message], dict[str, Kind]] = {}
