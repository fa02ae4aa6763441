"""Kinds of a message's fields, addresses and roles, and which functions of a role may be called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import pytest
from torch import Tensor

from isthmus.errors import ProtocolError
from isthmus.federation import messages
from isthmus.federation.messages import (
    Count,
    Embedding,
    Identifier,
    Kind,
    Message,
    Metric,
    Model,
    PartyId,
    Structure,
    kinds_of,
    messages_inside,
    role_of,
)
from isthmus.federation.roles import Client, Role, RoleTable, handler, signature_of
from isthmus.records import Record
from isthmus.tensors import Weights


@dataclass(frozen=True)
class Leaf(Message):
    weights: Model[Weights]
    share: Count[float]


@dataclass(frozen=True)
class Branch(Message):
    left: Leaf
    right: Leaf
    seen: Metric[Tensor | None]
    sealed: Identifier[Leaf]


@dataclass(frozen=True)
class Root(Message):
    branch: Branch
    limit: ClassVar[int] = 3


def test_kinds_of_nested_messages() -> None:
    leaf = {"weights": Kind.MODEL, "share": Kind.COUNT}
    assert kinds_of(Leaf) == leaf
    expected = {f"{side}.{name}": kind for side in ("left", "right") for name, kind in leaf.items()}
    expected |= {"seen": Kind.METRIC, "sealed": Kind.IDENTIFIER}
    expected |= {f"sealed.{name}": kind for name, kind in leaf.items()}  # an outer kind does not hide what is inside
    assert kinds_of(Branch) == expected
    assert kinds_of(Root) == {f"branch.{name}": kind for name, kind in expected.items()}


@dataclass(frozen=True)
class Twig(Message):
    edges: Structure[Tensor]


@dataclass(frozen=True)
class Basket(Record):
    content: tuple[Leaf, ...]


@dataclass(frozen=True)
class Tree(Message):
    by_name: Metric[Mapping[str, Leaf]]
    several: tuple[Leaf, ...]
    maybe: Leaf | None
    mixed: tuple[Leaf, Twig]
    recorded: Metric[Basket]


def test_kinds_of_messages_in_maps_tuples_and_records() -> None:
    leaf = {"weights": Kind.MODEL, "share": Kind.COUNT}
    expected = {"by_name": Kind.METRIC, "recorded": Kind.METRIC, "mixed.Twig.edges": Kind.STRUCTURE}
    for place in ("by_name", "several", "maybe", "mixed.Leaf", "recorded"):
        expected |= {f"{place}.{name}": kind for name, kind in leaf.items()}
    assert kinds_of(Tree) == expected
    one, other = Leaf({}, 1.0), Leaf({}, 2.0)
    assert list(messages_inside({"a": one, "b": (other, None, 3)})) == [one, other]
    assert list(messages_inside(Basket((one, other)))) == [one, other] and list(messages_inside(3.0)) == []


def test_every_kind_has_an_alias() -> None:
    for kind in Kind:
        name = "".join(part.capitalize() for part in kind.value.split())
        alias = getattr(messages, name)
        assert alias[int] == Annotated[int, kind]


@dataclass(frozen=True)
class Kindless(Message):
    share: Count[float]
    secret: float


@dataclass(frozen=True)
class HalfKind(Message):
    maybe: Model[Tensor] | None


@dataclass(frozen=True)
class Bare(Record):
    value: int


@dataclass(frozen=True)
class WithRecord(Message):
    state: Bare


@dataclass(frozen=True)
class DeepKindless(Message):
    inner: Kindless


@dataclass(frozen=True)
class KindlessMap(Message):
    """Keys of a map tell something too."""

    leaves: Mapping[str, Leaf]


@dataclass(frozen=True)
class KindlessPair(Message):
    pair: tuple[Leaf, Tensor]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (KindlessMap, "KindlessMap.leaves"),
        (KindlessPair, "KindlessPair.pair"),
        (Kindless, "Kindless.secret"),
        (HalfKind, "HalfKind.maybe"),
        (WithRecord, "WithRecord.state"),
        (DeepKindless, "Kindless.secret"),
    ],
)
def test_a_field_without_a_kind_is_named(message: type[Message], field: str) -> None:
    with pytest.raises(TypeError, match=field):
        kinds_of(message)
    with pytest.raises(TypeError, match=field):  # and again: a failed look-up is not remembered as an answer
        kinds_of(message)


def test_messages_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Leaf({}, 1.0).share = 2.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("party", "role"),
    [("server", "server"), ("client-3", "client"), ("client-3/devices", "device"), ("a/bosss", "boss")],
)
def test_roles_of_addresses(party: PartyId, role: str) -> None:
    assert role_of(party) == role


# -- handlers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Note(Message):
    vector: Embedding[Tensor]


class Base(Client[Any, Any]):
    @handler
    def ask(self, note: Note) -> Leaf:
        raise NotImplementedError

    @handler
    def post(self) -> Mapping[PartyId, Note]:
        raise NotImplementedError

    @handler
    def read(self, mail: Mapping[PartyId, Note]) -> None:
        raise NotImplementedError

    @handler
    def absorb(self, total: Note | None) -> None:
        raise NotImplementedError

    def private(self) -> Leaf:
        raise NotImplementedError


class Overrides(Base):
    def ask(self, note: Note) -> Leaf:
        raise NotImplementedError


class Lower(Client[Any, Any]):
    @handler
    def sleep(self) -> None:
        raise NotImplementedError


class Stranger(Client[Any, Any]):
    @handler
    def ask(self, note: Note) -> Leaf:
        raise NotImplementedError


def test_signatures() -> None:
    def read(function: Any) -> tuple[Any, ...]:
        signature = signature_of(function)
        return signature.request, signature.mail, signature.reply, signature.sends

    assert read(Base.ask) == (Note, False, Leaf, False)
    assert read(Base.post) == (None, False, Note, True)
    assert read(Base.read) == (Note, True, None, False)
    assert read(Base.absorb) == (Note, False, None, False)


class TwoArguments(Client[Any, Any]):
    @handler
    def ask(self, note: Note, more: Note) -> None: ...


class NoAnnotation(Client[Any, Any]):
    @handler
    def ask(self, note) -> None: ...  # type: ignore[no-untyped-def]


class NoReturn(Client[Any, Any]):
    @handler
    def ask(self, note: Note): ...  # type: ignore[no-untyped-def]


class TakesTensor(Client[Any, Any]):
    @handler
    def ask(self, note: Tensor) -> None: ...


class TakesRecord(Client[Any, Any]):
    @handler
    def ask(self, note: Bare) -> None: ...


class ReturnsList(Client[Any, Any]):
    @handler
    def ask(self) -> list[Note]: ...  # type: ignore[empty-body]


class ReturnsByNumber(Client[Any, Any]):
    @handler
    def ask(self) -> Mapping[int, Note]: ...  # type: ignore[empty-body]


class ReturnsSometimes(Client[Any, Any]):
    @handler
    def ask(self) -> Note | None: ...


class ReturnsMailOfMail(Client[Any, Any]):
    @handler
    def ask(self) -> Mapping[PartyId, Mapping[PartyId, Note]]: ...  # type: ignore[empty-body]


@pytest.mark.parametrize(
    "wrong",
    [
        TwoArguments,
        NoAnnotation,
        NoReturn,
        TakesTensor,
        TakesRecord,
        ReturnsList,
        ReturnsByNumber,
        ReturnsSometimes,
        ReturnsMailOfMail,
    ],
)
def test_a_wrong_annotation_is_reported_to_the_author(wrong: type[Client[Any, Any]]) -> None:
    with pytest.raises(TypeError, match=f"{wrong.__name__}.ask"):
        RoleTable({"client": Role(wrong)})


def test_only_marked_functions_are_in_the_table() -> None:
    table = RoleTable({"client": Role(Overrides), "device": Role(Lower)})
    assert set(table.handlers["client"]) == {"ask", "post", "read", "absorb"}
    assert set(table.handlers["device"]) == {"sleep"}


def test_locate() -> None:
    table = RoleTable({"client": Role(Overrides), "device": Role(Lower)})
    assert table.locate(Base.ask) == table.locate(Overrides.ask) == ("client", "ask")
    assert table.locate(Overrides.post) == ("client", "post")
    assert table.locate(Lower.sleep) == ("device", "sleep")
    for unmarked in (Base.private, Base.setup, Base.export, Base.initial_state, len):
        with pytest.raises(TypeError, match="not marked @handler"):
            table.locate(unmarked)
    with pytest.raises(TypeError, match="belongs to no role"):
        table.locate(Stranger.ask)


def test_roles_that_share_a_base() -> None:
    class Upper(Base):
        pass

    class Under(Base):
        pass

    table = RoleTable({"client": Role(Upper), "device": Role(Under)})
    assert table.locate(Base.ask) == ("client", "ask")
    assert table.locate(Base.ask, prefer="device") == ("device", "ask")
    assert table.locate(Base.ask, prefer="nobody") == ("client", "ask")


def test_an_unknown_handler_is_refused_with_a_list() -> None:
    table = RoleTable({"client": Role(Base), "device": Role(Lower)})
    for role, name in (("client", "sleep"), ("client", "private"), ("client", "__init__"), ("nobody", "ask")):
        with pytest.raises(ProtocolError, match=r"client\.ask, client\.post, client\.read, device\.sleep"):
            table.signature(role, name)


def test_the_report_has_words_and_a_colour_for_every_kind() -> None:
    from isthmus.report.figures import KIND_COLOURS
    from isthmus.report.words import KINDS

    assert set(map(str, Kind)) == KINDS.keys() - {"framing"} == KIND_COLOURS.keys() - {"framing"}
