"""Which cohort may stand for which clients (`isthmus.federation.roles.cohort_of`)."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from isthmus.data.scenario import build_scenario
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.roles import Client, Cohort, Role, RoleTable, cohort_of, handler
from isthmus.federation.session import Session
from isthmus.records import Record
from isthmus.seeds import Stream


class Together(Cohort[Any]):
    ran: ClassVar[list[str]] = []

    def work(self) -> None:
        self.ran.append("work")

    def helper(self) -> None:
        self.ran.append("helper")


class Base(Client[Any, Record]):
    def setup(self) -> None:
        self.done: list[str] = []

    def initial_state(self) -> Record:
        return Record()

    def step(self) -> str:
        return "base"

    @property
    def rate(self) -> float:
        return 1.0


class Worker(Base):
    cohort = Together

    @handler
    def work(self) -> None:
        self.done.append(self.step())


class Same(Worker):
    """Adds, overrides nothing."""

    @handler
    def helper(self) -> None:
        self.done.append("own helper")


class OtherHandler(Worker):
    @handler
    def work(self) -> None: ...


class OtherStep(Worker):
    def step(self) -> str:
        return "other"


class OtherProperty(Worker):
    @property
    def rate(self) -> float:
        return 2.0


class OtherStart(Worker):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)


class Mixin:
    def step(self) -> str:
        return "mixed in"


class MixedIn(Mixin, Worker):  # type: ignore[misc]
    pass


class Aside(Base):
    def step(self) -> str:
        return "aside"


class Diamond(Worker, Aside):
    """`Aside` comes after the declaring class, and still before `Base`."""


class Redeclared(OtherStep):
    cohort = Together


class Without(OtherStep):
    cohort = None


class BelowRedeclared(Redeclared):
    def setup(self) -> None:
        super().setup()


@pytest.mark.parametrize("cls", [Worker, Same, Redeclared])
def test_served(cls: type[Client[Any, Any]]) -> None:
    choice = cohort_of(cls)
    assert (choice.cohort, choice.handlers, choice.refused) == (Together, {"work"}, "")


@pytest.mark.parametrize(
    ("cls", "name", "declaring"),
    [
        (OtherHandler, "work", "Worker"),
        (OtherStep, "step", "Worker"),
        (OtherProperty, "rate", "Worker"),
        (OtherStart, "__init__", "Worker"),
        (MixedIn, "step", "Worker"),
        (Diamond, "step", "Worker"),
        (BelowRedeclared, "setup", "Redeclared"),
    ],
)
def test_refused(cls: type[Client[Any, Any]], name: str, declaring: str) -> None:
    choice = cohort_of(cls)
    assert choice.cohort is None and not choice.handlers
    assert f"{cls.__name__} overrides {name}, which Together, the cohort of {declaring}, would ignore" in choice.refused


@pytest.mark.parametrize("cls", [Base, Without])
def test_without_a_cohort_there_is_nothing_to_say(cls: type[Client[Any, Any]]) -> None:
    choice = cohort_of(cls)
    assert choice.cohort is None and choice.refused == ""


def session_of(cls: type[Client[Any, Any]]) -> tuple[Session, LocalEngine]:
    Together.ran.clear()
    table = RoleTable({"client": Role(cls)})
    parts = build_scenario(dataset="csbm:nodes=30", clients=3, partition="random", split="30/20/50", seed=0).parts
    engine = LocalEngine(parts, table, None, Stream(0), cohort=True)
    return Session(engine, table), engine


def done(engine: LocalEngine) -> list[list[str]]:
    return [engine.party(name).client.done for name in engine.parties("client")]  # type: ignore[attr-defined]


def test_the_engine_runs_what_was_overridden() -> None:
    for cls, step in ((OtherStep, "other"), (MixedIn, "mixed in"), (Diamond, "aside")):
        session, engine = session_of(cls)
        session.call(Worker.work)
        assert done(engine) == [[step]] * 3 and not Together.ran
        assert engine.execution == "each" and cls.__name__ in engine.why_each


def test_a_function_replaced_on_one_object_counts_too() -> None:
    class Replaced(Worker):
        cohort = Together

        def setup(self) -> None:
            super().setup()
            if self.party == "client-1":
                self.step = lambda: "replaced"  # type: ignore[method-assign]

    session, engine = session_of(Replaced)
    session.call(Worker.work)
    assert done(engine) == [["base"], ["replaced"], ["base"]] and not Together.ran
    assert engine.execution == "each" and "Replaced overrides step" in engine.why_each


def test_a_handler_that_happens_to_be_called_like_a_function_of_the_cohort_is_the_clients() -> None:
    session, engine = session_of(Same)
    session.call(Worker.work)
    session.call(Same.helper)
    assert Together.ran == ["work"]
    assert done(engine) == [["own helper"]] * 3
