"""Every registered method passes the kit as called plainly, and a property that fails is named with what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.experiments.disclosure import sheet_of
from isthmus.experiments.scenarios import parts_for, view_of
from isthmus.federation.contract import compiled
from isthmus.federation.interface import Federation, View
from isthmus.federation.messages import Count, Gradient, Message
from isthmus.federation.roles import Role, handler
from isthmus.federation.script import Script, ask, mail, total
from isthmus.methods import fedavg, registry
from isthmus.methods.fedavg import Broadcast, FedAvgClient, FedAvgCohort, FedAvgConfig, ServerState
from isthmus.methods.registry import Log, Method, Phase, all_methods, get_method
from isthmus.methods.training import ModelState
from isthmus.tensors import Weights, scaled
from isthmus.testing import METHODS, PROPERTIES, Plainly, check_method, recorded_script, small_runs

Start = Callable[..., str]


@pytest.mark.parametrize("method", [method.name for method in all_methods()])
def test_every_method_as_called_plainly(method: str) -> None:
    ran = check_method(method)
    assert {"same_seed_same_result", "wire_equals_declaration", "state_is_declared", "resume_is_bit_equal"} <= set(ran)


def test_exceptions_are_of_methods_and_properties_that_exist() -> None:
    known = {(method.name, task) for method in all_methods() for task in method.tasks}
    assert set(METHODS) <= known
    assert all(skipped in PROPERTIES for plainly in METHODS.values() for skipped in plainly.skip)
    assert METHODS.get(("fedavg", "node"), Plainly()) == Plainly(), "the plainest method has no exceptions"


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Registers a changed FedAvg for the time of a test."""

    def register(**changes: Any) -> str:
        method: Method = replace(fedavg.METHOD, name="changed", **changes)
        monkeypatch.setitem(registry.METHODS._entries, "changed", method)
        return "changed"

    registry.get_method("fedavg")
    return register


def fails(method: str, check: str, reason: str) -> None:
    with pytest.raises(AssertionError) as caught:
        check_method(method)
    text = str(caught.value)
    assert text.startswith(f"{method} fails {check}: ") and reason in text, text
    assert "What to do: " in text and f'skip={{"{check}": "why"}}' in text, text


@dataclass(frozen=True)
class Update(Message):
    """Called like FedAvg's, and holds something else."""

    weights: Gradient[Weights]
    share: Count[float]


class SendsGradients(FedAvgClient[FedAvgConfig]):
    @handler
    def local_update(self, common: Broadcast) -> Update:  # type: ignore[override]
        update = super().local_update(common)
        return Update(update.weights, update.share)


def test_the_sheet_follows_from_what_handlers_send_not_from_the_names_of_messages(start: Start) -> None:
    method = get_method(start(roles={"client": Role(SendsGradients)}))
    assert "train / client / server / Update / summed (share: count, weights: gradient)" in {
        str(line.key) for line in sheet_of(method)
    }


def test_a_line_that_is_never_used(start: Start) -> None:
    def script(config: FedAvgConfig, view: View) -> Script:
        return {**fedavg.script(config, view), "evaluation": (ask(FedAvgClient.deploy), ask(FedAvgClient.evaluate))}

    fails(start(script=script), "calls_follow_the_script", "no call was made by: evaluation: client.evaluate")


def test_a_call_outside_the_script(start: Start) -> None:
    def script(config: FedAvgConfig, view: View) -> Script:
        return {**fedavg.script(config, view), "train": ()}

    wanted = "client.local_update is called by sum() in phase 'train', but the script of changed does not have it"
    fails(start(script=script), "calls_follow_the_script", wanted)


def test_a_method_without_a_script_is_not_checked_and_says_so(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    fails(start(script=None), "calls_follow_the_script", "the method declares no script")
    assert "changed declares no script, so its calls are not checked, and organisations will refuse it" in caplog.text


class Remembers(FedAvgClient[FedAvgConfig]):
    def setup(self) -> None:
        super().setup()
        self.calls = 0

    def train(self, weights: Weights, received: Weights) -> ModelState:
        self.calls += 1
        state = super().train(weights, received)
        return replace(state, weights=scaled(state.weights, 1.0 if self.calls < 3 else 0.5))


def test_state_outside_the_record(start: Start) -> None:
    method = start(roles={"client": Role(Remembers)})
    with pytest.raises(AssertionError, match=r"changed fails state_is_declared: .*outside its declared state"):
        check_method(method, skip={"one_client_equals_local": "not what is tested here"})


class WrongCohort(FedAvgCohort):
    def train_together(self, received: Weights, shares: Tensor | None = None) -> None:
        super().train_together(scaled(received, 0.9), shares)


class WronglyTogether(FedAvgClient[FedAvgConfig]):
    cohort: ClassVar[Any] = WrongCohort


def test_a_cohort_that_does_something_else(start: Start) -> None:
    method = start(roles={"client": Role(WronglyTogether)})
    fails(method, "cohort_equals_each", "training together and one by one differ")


def first_reply_wins(state: ServerState, federation: Federation, config: FedAvgConfig) -> tuple[ServerState, Log]:
    replies = federation.call(FedAvgClient.local_update, Broadcast(state.weights, state.total))
    first = next(iter(replies.values()))
    return replace(state, round=state.round + 1, weights=scaled(first.weights, 1.0 / first.share)), {}


def test_a_server_that_prefers_a_client(start: Start) -> None:
    def script(config: FedAvgConfig, view: View) -> Script:
        return {**fedavg.script(config, view), "train": (ask(FedAvgClient.local_update),)}

    phases = (fedavg.METHOD.phases[0], Phase("train", first_reply_wins))
    fails(start(phases=phases, script=script), "order_does_not_matter", "depends on the order of the clients")


def test_an_error_of_the_method_is_named_as_the_property_it_breaks(start: Start) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("nobody there")

    phases = (fedavg.METHOD.phases[0], Phase("train", broken))
    fails(start(phases=phases), "calls_follow_the_script", "nobody there")


def test_a_subclass_that_overrides_has_no_cohort_to_check(start: Start) -> None:
    class Plain(FedAvgClient[FedAvgConfig]):
        def samples(self) -> float:
            return super().samples()

    assert "cohort_equals_each" not in check_method(start(roles={"client": Role(Plain)}))


def test_an_unknown_property_is_refused() -> None:
    with pytest.raises(ConfigError, match="property"):
        check_method("fedavg", skip={"one_client_equals_locl": "a typing mistake"})


def test_dropout_counts_in_the_small_runs() -> None:
    """Otherwise the properties would hold for methods that draw their masks in a wrong place."""
    from isthmus.testing import _Kit

    for name in ("fedavg", "fedstruct", "hifgl"):
        kit = _Kit(name, None, 3, "node")
        with_dropout, without = (kit.models(kit.scenario(), dropout=rate) for rate in (0.3, 0.0))
        some = next(iter(without))
        assert any(not torch.equal(with_dropout[some][key], without[some][key]) for key in without[some]), name


@pytest.mark.parametrize("name", ["fedavg", "fedgcn", "fedlit", "gcfl", "hifgl"])
def test_a_recorded_script_can_be_pasted_and_says_what_the_method_declares(name: str) -> None:
    (settings, scenario), *_ = small_runs(name, settings={"secure_sum": False, "rounds": 2}).values()
    method, view = settings.method, view_of(parts_for(settings, scenario))
    pasted: dict[str, Any] = {"ask": ask, "total": total, "mail": mail}
    pasted |= {role.cls.__name__: role.cls for role in method.roles.values()}
    exec(recorded_script(name), pasted)
    recorded = compiled(pasted["script"](settings.method_config, view), method.table)
    declared = compiled(method.script_with(settings.method_config, view), method.table)
    assert [replace(line, most=1, fresh=False, to=()) for line in recorded] == [
        replace(line, most=1, fresh=False, to=()) for line in declared
    ]
    assert all(seen.most <= line.most for seen, line in zip(recorded, declared, strict=True))
