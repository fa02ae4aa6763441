"""Any single changed field of a valid call is refused, and leaves no trace: runs in which every kind of call is first
sent in all changed forms end with the same bits as undisturbed ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from site_per_client import SitePerClient

from isthmus.experiments.run import SimulatedRun
from isthmus.federation.interface import Failure
from isthmus.federation.messages import PartyId
from isthmus.federation.party import Invocation, Outcome
from isthmus.federation.secure import MailOrder, MaskOrder
from isthmus.privacy.masks import SumRoster, SumTag
from isthmus.testing import small_runs


def changed_value(value: Any) -> Any:
    return f"{value}x" if isinstance(value, str) else value + 1


def changed_orders(order: MaskOrder) -> Iterator[tuple[str, MaskOrder]]:
    """An order to mask with one thing changed in its tag, or in its roster."""
    for each in fields(SumTag):
        if each.name != "run":  # the server's name for its own process
            yield (
                f"tag.{each.name}",
                replace(order, tag=replace(order.tag, **{each.name: changed_value(getattr(order.tag, each.name))})),
            )
    keys = dict(order.roster.keys)
    first, *rest = keys
    yield "roster without one", replace(order, roster=SumRoster({party: keys[party] for party in rest}))
    yield "roster with another", replace(order, roster=SumRoster({**keys, "somebody": b"0" * 32}))
    yield "another key", replace(order, roster=SumRoster({**keys, first: b"1" * 32}))


def changed_request(call: Invocation) -> Iterator[Invocation]:
    """The same call with another number or tensor in its request."""
    if call.argument is None:
        return
    for each in fields(call.argument):
        value = getattr(call.argument, each.name)
        if type(value) in (int, float) or (isinstance(value, torch.Tensor) and value.numel()):
            yield replace(call, argument=replace(call.argument, **{each.name: value + 1}))
        elif isinstance(value, Mapping) and value and all(isinstance(one, torch.Tensor) for one in value.values()):
            name = next(iter(value))
            other = {**value, name: value[name] + 1e-3}
            yield replace(call, argument=replace(call.argument, **{each.name: other}))


def changed_calls(call: Invocation, handlers: Sequence[str], tied: bool) -> Iterator[tuple[str, Invocation]]:
    """A call with one thing changed. ``tied``: its sum is tied to the request."""
    turn = call.turn
    for name in ("phase", "round", "step"):
        yield name, replace(call, turn=replace(turn, **{name: changed_value(getattr(turn, name))}))
    for handler in handlers:
        yield f"handler {handler}", replace(call, handler=handler)
    yield "sequence", replace(call, sequence=10_000)
    yield "sequence 0", replace(call, sequence=0)
    if call.parcels is None:
        yield "mail for one that gets none", replace(call, parcels=())
    if call.mask is not None:
        yield "mask", replace(call, mask=None)
        yield "sequence of a sum", replace(call, sequence=call.sequence + 1)
        yield "attempt of a sum", replace(call, turn=replace(turn, incarnation=turn.incarnation + 1))
        for what, order in changed_orders(call.mask):
            yield what, replace(call, mask=order)
        for other in changed_request(call) if tied else ():
            yield "request", other
    elif call.mail is None:
        yield (
            "an order to mask that nobody agreed to",
            replace(call, mask=MaskOrder(SumRoster({}), SumTag("", "", 0, 0))),
        )
    if call.mail is not None:
        yield "mail order", replace(call, mail=None)
        yield "mail held under another sequence", replace(call, mail=MailOrder(call.mail.held + 1, call.mail.orders))
        for receiver, order in (call.mail.orders or {}).items():
            for what, other_order in changed_orders(order):
                orders = {**(call.mail.orders or {}), receiver: other_order}
                yield f"mail {what}", replace(call, mail=MailOrder(call.mail.held, orders))


class TamperingEngine(SitePerClient):
    """Before a call of a kind is made for the first time, it is made in all changed forms."""

    tried: list[str]
    answered: list[str]

    def dispatch(self, calls: Sequence[Invocation], timeout: float | None) -> Mapping[PartyId, Outcome]:
        first = calls[0]
        contract = self.contract
        kind = first.turn.phase, first.role, first.handler, first.sequence < 0
        if kind not in self.seen:
            self.seen.add(kind)
            line = contract.by_place[first.turn.phase, first.role, first.handler]
            listed = {each.handler for each in contract.lines if (each.phase, each.role) == (line.phase, line.role)}
            others = sorted(set(self._table.handlers[first.role]) - listed)
            for what, changed in changed_calls(first, others, tied=not line.each):
                outcome = self._tampered(changed)
                self.tried.append(what)
                if not (isinstance(outcome, Failure) and outcome.kind == "protocol"):
                    self.answered.append(f"{line.phase}: {line.name}: {what}: {outcome!r}")
        return super().dispatch(calls, timeout)

    def _tampered(self, call: Invocation) -> Outcome:
        try:
            return super().dispatch([call], None)[call.party]
        except Exception as error:  # a call that cannot even be written as one
            return Failure("protocol", type(error).__name__, error)

    def watch(self, contract: Any) -> None:
        super().watch(contract)
        self.contract, self.seen, self.tried, self.answered = contract, set[Any](), [], []


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedavg", {"secure_sum": True}),
        ("fedavg", {}),
        ("fedstruct", {"secure_sum": True, "protocol": "hardened"}),
        ("fedgcn", {"secure_sum": True}),
        ("fedlit", {"secure_sum": True}),
        ("hifgl", {"secure_sum": True}),
        ("hifgl", {"threshold": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_any_single_changed_field_is_refused_and_leaves_no_trace(method: str, more: dict[str, Any]) -> None:
    (settings, scenario), *_ = small_runs(method, clients=4, settings={"rounds": 2, **more}).values()
    with (
        SimulatedRun(settings, scenario, engine=SitePerClient) as undisturbed,
        SimulatedRun(settings, scenario, engine=TamperingEngine) as tampered,
    ):
        for run in (undisturbed, tampered):
            run.loop.play()
        engine: Any = tampered.engine
        assert engine.answered == []
        assert len(engine.tried) >= 20 and {"phase", "round", "step"} <= set(engine.tried)
        if "secure_sum" in more:
            assert {"mask", "tag.request", "roster without one", "tag.receiver"} <= set(engine.tried)
        lines = [{key: value for key, value in line.items() if key not in ("seconds",)} for line in tampered.loop.lines]
        if method != "fedstruct":  # its hardened protocol repeats itself up to rounding
            assert lines == [
                {key: value for key, value in line.items() if key not in ("seconds",)}
                for line in undisturbed.loop.lines
            ]
