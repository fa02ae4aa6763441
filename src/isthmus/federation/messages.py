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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, Self, TypeVar, Union, get_args, get_origin, get_type_hints

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
    FEATURE = "feature"
    RANDOM_START = "random start"
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
Feature = Annotated[T, Kind.FEATURE]
"""Features of nodes as they are, not what a model makes of them."""
RandomStart = Annotated[T, Kind.RANDOM_START]
"""First values drawn at random: they tell nothing of anybody's data."""
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

    def summand(self) -> Self:
        """What a party masks in this message's place, e.g. in other units; the total is in those."""
        return self


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
    """Kind of each field, and of the fields of messages inside it as ``outer.inner``.

    A field of messages alone (one, a tuple of them, or None) needs no kind of its own. Any other field without one is
    the author's mistake. A map of messages has a kind of its own, because its keys tell something too.
    """
    if message in _KINDS:
        return _KINDS[message]
    hints = get_type_hints(message, include_extras=True)
    kinds: dict[str, Kind] = {}
    for field in fields(message):
        hint = hints[field.name]
        marks = [mark for mark in get_args(hint)[1:] if isinstance(mark, Kind)] if get_origin(hint) is Annotated else []
        if marks:
            kinds[field.name] = marks[0]
        elif not _messages_alone(hint):
            raise TypeError(f"{message.__name__}.{field.name} has no kind: write e.g. `{field.name}: Model[...]`")
        nested = _message_types(hint)
        for inner in nested:
            prefix = field.name if len(nested) == 1 else f"{field.name}.{inner.__name__}"
            kinds |= {f"{prefix}.{name}": kind for name, kind in kinds_of(inner).items()}
    _KINDS[message] = kinds
    return kinds


_KINDS: dict[type[Message], dict[str, Kind]] = {}


def _messages_alone(hint: Any) -> bool:
    if isinstance(hint, type):
        return issubclass(hint, Message)
    if get_origin(hint) not in (tuple, Union, UnionType):
        return False
    return all(part in (Ellipsis, NoneType) or _messages_alone(part) for part in get_args(hint))


def _message_types(hint: Any) -> list[type[Message]]:
    """Types of all messages inside a field, also in maps, tuples and records."""
    if isinstance(hint, type) and issubclass(hint, Message):
        return [hint]
    inside = get_type_hints(hint).values() if isinstance(hint, type) and issubclass(hint, Record) else get_args(hint)
    return list(dict.fromkeys(found for part in inside for found in _message_types(part)))


def messages_inside(value: object) -> Iterator[Message]:
    """The messages inside a field's value, not those inside them."""
    if isinstance(value, Message):
        yield value
    elif isinstance(value, Record):
        for field in fields(value):
            yield from messages_inside(getattr(value, field.name))
    elif isinstance(value, (Mapping, tuple, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from messages_inside(item)
