"""Roles: what runs at a party, and which of its functions others may call.

A method gives one class per role (``client``, and below it ``device``). Only functions marked :func:`handler` can be
called from outside; what they take and return is read from their annotations, so a message of another type is refused
before the function runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar, get_args, get_origin, get_type_hints

from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.errors import ProtocolError, unknown
from isthmus.federation.messages import Message, PartyId
from isthmus.records import Record
from isthmus.seeds import Key, Stream
from isthmus.tensors import Weights

ConfigT = TypeVar("ConfigT")
StateT = TypeVar("StateT", bound=Record)
ClientT = TypeVar("ClientT", bound="Client[Any, Any]")
F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__isthmus_handler__"


class NoLogitsError(TypeError):
    """A party without a model to predict with."""


def handler(function: F) -> F:
    """Mark a role's function as callable from other parties. Everything unmarked is out of reach."""
    setattr(function, _MARK, True)
    return function


@dataclass(frozen=True)
class Signature:
    """What a handler takes and gives.

    ``request``: message type of its argument, or None if it takes none. ``mail``: True if the argument is
    ``Mapping[PartyId, request]`` (a receiver of mail). ``reply``: message type it returns, or None. ``sends``: True if
    it returns ``Mapping[PartyId, reply]`` (a sender of mail).
    """

    request: type[Message] | None
    mail: bool
    reply: type[Message] | None
    sends: bool


def signature_of(function: Callable[..., Any]) -> Signature:
    """Read a handler's signature from its annotations; a mistake in them is reported to the author by name."""
    hints = get_type_hints(function)
    parameters = list(inspect.signature(function).parameters)[1:]
    name = function.__qualname__
    if len(parameters) > 1:
        raise TypeError(f"handler {name} must take at most one argument besides self: one message")
    for place in (*parameters, "return"):
        if place not in hints:
            raise TypeError(
                f"handler {name} does not say what {place!r} is: annotate it with a Message, Mapping[PartyId, Message] "
                "or None"
            )
    request, mail = _message_type(hints[parameters[0]], name) if parameters else (None, False)
    reply, sends = _message_type(hints["return"], name)
    if reply is not None and type(None) in get_args(hints["return"]):
        raise TypeError(
            f"handler {name} must always return a {reply.__name__} or never: silence would be a message too"
        )
    return Signature(request, mail, reply, sends)


def _message_type(hint: Any, name: str) -> tuple[type[Message] | None, bool]:
    if hint in (None, type(None)):
        return None, False
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(origin, type) and issubclass(origin, Mapping) and arguments[0] is str:
        inner, nested = _message_type(arguments[1], name)
        if inner is not None and not nested:
            return inner, True
    elif origin is not None and type(None) in arguments and len(arguments) == 2:
        return _message_type(next(argument for argument in arguments if argument is not type(None)), name)
    elif isinstance(hint, type) and issubclass(hint, Message):
        return hint, False
    raise TypeError(f"handler {name}: {hint!r} cannot travel; use a Message, Mapping[PartyId, Message] or None")


class Client(Generic[ConfigT, StateT]):
    """One party of a role. Its data stays in ``self.data``; only what handlers return leaves.

    ``self.state`` is everything it remembers between rounds: one frozen record, replaced as a whole, never modified in
    place. What :meth:`setup` derives from data and config may be kept on ``self`` (it is recomputed after a restart).
    ``self.scratch`` lives for one round and is empty at the start of the next. ``self.remembered`` is for what must not
    be forgotten in a rollback, e.g. which masks have been used; it is lost with the process and never changes a result.
    """

    cohort: ClassVar[type[Cohort[Any]] | None] = None
    """Class that runs handlers of many such clients in one set of kernels, or None. It stands for the class that sets
    it: a subclass that overrides anything sets it again (see :func:`cohort_of`).
    """
    keeps: ClassVar[tuple[str, ...]] = ()
    """Fields of the state that prediction needs beside the weights of :meth:`export`; they go into the party's model
    package.
    """
    keeps_of_data: ClassVar[tuple[str, ...]] = ()
    """The same for fields that are true of the data of the training only, such as rows of a matrix over its nodes."""

    def __init__(self, party: PartyId, data: Any, config: ConfigT, stream: Stream) -> None:
        self.party = party
        self.data: NodeData = data
        self.config = config
        self.common = Stream(stream.seed, ("common",))
        """Randomness all parties share, e.g. first weights; nothing private may depend on it."""
        self.scratch = SimpleNamespace()
        self.remembered: dict[Any, Any] = {}
        self.state: StateT
        self.as_trained = True
        """False for a party that was restored from a model package on other data than it was trained on."""
        self.round = 1
        """Number of the current call's round within its phase, from 1."""
        self._stream = stream
        self._call: tuple[Key, ...] = ()

    def setup(self) -> None:
        """Derive what is constant over the run from data and config alone."""

    def initial_state(self) -> StateT:
        """State before the first round. Draw from ``self.stream(...)`` only."""
        raise TypeError(f"{type(self).__name__} must define initial_state()")

    def forgotten(self, first: StateT) -> StateT:
        """The state in which a round begins where clients may be lost, and none may remember what others were not told:
        that before the first round. Overridden by a client with a secret.
        """
        return first

    def export(self) -> Weights:
        """The model this party ends with (written to its own model package); empty for parties without one."""
        return {}

    def dummy_positions(self, receiver: PartyId, content: Message) -> Sequence[Tensor]:
        """Where the sparse matrices of mail to a receiver could have entries but have none, one tensor of flat
        positions each: announced with the entries when the mail is masked. Uniform ones come in any case; a method
        whose entries cannot be anywhere overrides this.
        """
        return ()

    def logits(self) -> Tensor:
        """What its model says of its samples, one row each."""
        raise NoLogitsError(f"{type(self).__name__} does not define logits(), so its model cannot predict")

    def restore(self, weights: Weights, kept: Mapping[str, Any], *, as_trained: bool) -> None:
        """Become the party that exported these weights and kept these fields of its state.

        ``as_trained``: the data are those of the training; only then are fields of :attr:`keeps_of_data` given.
        """
        self.as_trained = as_trained
        fields: dict[str, Any] = {"weights": weights, **kept}
        self.state = replace(self.initial_state(), **fields)

    def stream(self, purpose: str) -> Stream:
        """Random stream of this party for one purpose in the current call."""
        return self._stream.child(*self._call, purpose)

    def enter(self, phase: str, round: int, sequence: int) -> None:
        """Called by the party's runtime before a handler: random streams follow the call."""
        self.round = round
        self._call = phase, round, sequence


class Cohort(Generic[ClientT]):
    """Many clients of one process, trained together. A method named like a handler replaces it for the whole group.

    It takes the clients' requests (one message, or a list of them) and returns a
    :class:`~isthmus.federation.interface.Stacked` message. A method named like a handler that sends summed mail stands
    for the whole exchange, delivery included, and returns :class:`~isthmus.federation.interface.Exchanged`. While a
    cohort works, it owns the clients' state: :meth:`load` takes it over, :meth:`store` gives it back.
    Behind masks each row of the stack is masked by the client it belongs to; handlers in ``only_totals`` make no rows
    that are anybody's own, so there they run at each client. A cohort that stands for exchanges has no mail of single
    clients to mask: it is not used behind masks (``masked=False``).
    """

    only_totals: ClassVar[frozenset[str]] = frozenset()
    masked: ClassVar[bool] = True

    def __init__(self, clients: Sequence[ClientT]) -> None:
        self.clients = clients

    @classmethod
    def worthwhile(cls, clients: Sequence[ClientT]) -> bool:
        """Whether training these clients together pays."""
        return len(clients) > 1

    def load(self) -> None:
        """Take over the state of all clients."""

    def store(self) -> None:
        """Write back the state of all clients, as copies the cohort will not touch again."""


@dataclass(frozen=True)
class CohortChoice:
    """Which cohort may run the clients of a class together.

    Args:
        cohort: None where there is none, or none that may be used.
        handlers: Handlers it runs; all others run at each client.
        refused: Why the declared cohort may not be used, for the user; empty where it may.
    """

    cohort: type[Cohort[Any]] | None = None
    handlers: frozenset[str] = frozenset()
    refused: str = ""


def cohort_of(cls: type[Client[Any, Any]]) -> CohortChoice:
    """The cohort of a class, unless something was overridden since the class that declares it.

    A cohort stands for the functions of the class that declares it. What a subclass (or a mixin) changes would never
    run, so clients of such a class run each by itself until it declares a cohort of its own.
    """
    declaring = next(base for base in cls.__mro__ if "cohort" in vars(base))
    cohort: type[Cohort[Any]] | None = vars(declaring)["cohort"]
    if cohort is None:
        return CohortChoice()
    added = [base for base in cls.__mro__ if base not in declaring.__mro__]
    overridden = sorted(
        {name for base in added for name in vars(base) if _can_override(name) and hasattr(declaring, name)}
    )
    if overridden:
        return CohortChoice(refused=_refusal(cls, overridden, cohort, declaring))
    handlers = {name for name in _marked(declaring) if hasattr(cohort, name) and not hasattr(Cohort, name)}
    return CohortChoice(cohort, frozenset(handlers))


def together_behind_masks(roles: Iterable[Role]) -> bool:
    """Whether clients of these roles may run together where their messages are masked."""
    cohorts = (cohort_of(role.cls).cohort for role in roles)
    return all(cohort is None or cohort.masked for cohort in cohorts)


def overridden_on_objects(clients: Sequence[Client[Any, Any]]) -> str:
    """Why clients may not run together although their class may: functions replaced on single objects. Empty if
    none were.
    """
    for client in clients:
        cls = type(client)
        names = sorted(name for name in vars(client) if callable(getattr(cls, name, None)))
        if names and cls.cohort is not None:
            return _refusal(cls, names, cls.cohort, cls)
    return ""


def _can_override(name: str) -> bool:
    return name == "__init__" or not (name.startswith("__") and name.endswith("__"))


def _refusal(cls: type, names: Sequence[str], cohort: type, declaring: type) -> str:
    return (
        f"clients run each by itself: {cls.__name__} overrides {', '.join(names)}, which {cohort.__name__}, the cohort "
        f"of {declaring.__name__}, would ignore; set `cohort` in {cls.__name__} to a class that does the same for many "
        "clients, or to None to run without one and without this line"
    )


def everything(data: NodeData) -> NodeData:
    return data


@dataclass(frozen=True)
class Role:
    """A class and what of a client's data a party of this role holds (``holds`` is applied once, before
    construction).
    """

    cls: type[Client[Any, Any]]
    holds: Callable[[NodeData], Any] = everything


@dataclass(frozen=True)
class RoleTable:
    """All roles of a method, with the allow-list of handlers that follows from the marks."""

    roles: Mapping[str, Role]
    handlers: Mapping[str, Mapping[str, Signature]] = field(init=False)

    def __post_init__(self) -> None:
        table = {
            role: {name: signature_of(function) for name, function in _marked(entry.cls).items()}
            for role, entry in self.roles.items()
        }
        object.__setattr__(self, "handlers", table)

    def locate(self, function: Callable[..., Any], prefer: str | None = None) -> tuple[str, str]:
        """Role and name of a handler given as the function itself, also one inherited or overridden by a role's class.

        ``prefer`` decides where several roles inherit the same function.
        """
        name = function.__name__
        roles = [
            role
            for role, entry in self.roles.items()
            if any(vars(base).get(name) is function for base in entry.cls.__mro__)
        ]
        if not (any(name in self.handlers[role] for role in roles) if roles else getattr(function, _MARK, False)):
            raise TypeError(f"{function.__qualname__} is not marked @handler, so no party may be asked to run it")
        if not roles:
            raise TypeError(f"{function.__qualname__} belongs to no role of this method ({', '.join(self.roles)})")
        return prefer if prefer in roles else roles[0], name

    def signature(self, role: str, name: str) -> Signature:
        """Signature of an allowed handler; anything else is refused."""
        try:
            return self.handlers[role][name]
        except KeyError:
            allowed = [f"{role}.{name}" for role, names in self.handlers.items() for name in names]
            raise unknown("handler", f"{role}.{name}", allowed, error=ProtocolError) from None


def _marked(cls: type) -> dict[str, Callable[..., Any]]:
    """Functions of a class that are marked :func:`handler`, there or in a base."""
    return {
        name: function
        for name, function in inspect.getmembers(cls, inspect.isfunction)
        if any(getattr(vars(base).get(name), _MARK, False) for base in cls.__mro__)
    }
