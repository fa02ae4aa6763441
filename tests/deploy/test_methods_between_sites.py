"""Methods whose parties send mail to each other, between sites without processes: sealed, and bit-equal to one
process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from site_per_client import SitePerClient

from isthmus.experiments.run import SimulatedRun
from isthmus.federation.engine import Export
from isthmus.federation.engines.local import LocalEngine
from isthmus.methods.registry import all_methods, get_method
from isthmus.testing import small_runs

WITH_MAIL = [
    method.name
    for method in all_methods()
    if any(s.sends for names in method.table.handlers.values() for s in names.values())
]

FEWEST = {"fedsageplus": 3}
"""Clients a method asks for at least, where that is more than two."""


@pytest.mark.parametrize("method", WITH_MAIL)
def test_bit_equal_between_sites(method: str) -> None:
    for settings, scenario in small_runs(method).values():
        with (
            SimulatedRun(settings, scenario, engine=LocalEngine) as local,
            SimulatedRun(settings, scenario, engine=SitePerClient) as apart,
        ):
            for run in (local, apart):
                run.loop.play()
            expected, found = dict(local.engine.export(False)), dict(apart.engine.export(False))
            kept: dict[str, Export] = apart.engine.models  # type: ignore[attr-defined]
        for client, export in expected.items():
            assert found[client] == Export(export.values), "nothing but the size of a model leaves its site"
            own = kept[client]
            assert (
                export.weights is not None and own.weights is not None and export.weights.keys() == own.weights.keys()
            )
            assert all(torch.equal(tensor, own.weights[name]) for name, tensor in export.weights.items())
            assert export.logits is not None and own.logits is not None and torch.equal(export.logits, own.logits)
        assert apart.loop.totals == local.loop.totals, "sealing is not counted"


@pytest.mark.parametrize("clients", [2, 6])
@pytest.mark.parametrize("method", [method.name for method in all_methods() if not method.pooled])
def test_a_run_ends_under_its_contract(method: str, clients: int) -> None:
    """Nothing is refused, whatever the number of clients, and no bound is too tight; with masks where a method has
    them.
    """
    clients = max(clients, FEWEST.get(method, 2))
    secure = {"secure_sum": True} if clients > 2 and not get_method(method).needs_single_updates else {}
    for settings, scenario in small_runs(method, clients=clients, settings={"rounds": 2, **secure}).values():
        with SimulatedRun(settings, scenario, engine=SitePerClient) as run:
            run.loop.play()
            engine: Any = run.engine
            assert engine.log.refusals == [] and len(engine.log.calls) > clients
            assert not any(call.changed for call in engine.log.calls)
            assert {(call.phase, call.handler) for call in engine.log.calls} == {
                (line.phase, line.handler) for line in run.contract.lines
            }
