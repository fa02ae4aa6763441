"""Clients trained together: uneven ones, and scores of models of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isthmus.data.node_data import NodeData
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.interface import View
from isthmus.federation.session import Session
from isthmus.methods import cohort_training, fedper
from isthmus.methods.cohort_training import LARGE, padding
from isthmus.methods.fedavg import FedAvgConfig, count_round, fedavg_round, init
from isthmus.methods.registry import get_method
from isthmus.seeds import Stream
from isthmus.tensors import max_difference


def part(nodes: int, seed: int) -> NodeData:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.rand(nodes, 40, generator=generator) < 0.05).double()
    mask = torch.arange(nodes) % 2 == 0
    return NodeData(
        x=x.float().to_sparse_csr(),
        edge_index=torch.randint(0, nodes, (2, 2 * nodes), generator=generator),
        y=torch.randint(0, 3, (nodes,), generator=generator),
        train=mask,
        val=~mask,
        test=~mask,
        node_id=torch.arange(nodes),
        num_classes=3,
    )


@pytest.mark.parametrize(("method", "large"), [("fedavg", LARGE), ("fedper", LARGE), ("fedavg", 0)])
def test_uneven_clients_are_trained_together_and_score_as_each_by_itself(
    method: str, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One large client among small ones: beyond what padding would be allowed to cost."""
    monkeypatch.setattr(cohort_training, "LARGE", large)
    sizes = [200, 6, 5, 8, 4, 7, 5, 6]
    assert padding(sizes) > 4.0
    parts = {f"client-{i}": part(size, i) for i, size in enumerate(sizes)}
    config: FedAvgConfig = (fedper.FedPerConfig if method == "fedper" else FedAvgConfig)(
        backbone="sage", hidden=(6,), dropout=0.3, precision="float64", local_epochs=2
    )
    registered = get_method(method)
    ended = []
    for cohort in (True, False):
        engine = LocalEngine(parts, registered.table, config, Stream(0, ("party",)), cohort=cohort)
        assert engine.execution == ("cohort" if cohort else "each")
        session = Session(engine, registered.table)
        state = init(View(engine.parties("client"), 40, 3), config, Stream(0, ("common",)))
        state, _ = count_round(state, session, config)
        scores = {}
        for number in (1, 2, 3):
            session.clock.begin("train", number, number)
            state, _ = fedavg_round(replace(state), session, config)
            session.clock.begin("evaluation", number, number)
            scores = dict(registered.evaluate(state, session, config))
        ended.append((state.weights, scores))
    assert max_difference(ended[0][0], ended[1][0]) < 1e-10
    for client, evaluation in ended[0][1].items():
        for name, tally in evaluation.parts.items():
            other = ended[1][1][client].parts[name]
            assert (tally.correct, tally.total) == (other.correct, other.total)
            assert tally.loss == pytest.approx(other.loss, abs=1e-9)
