"""What the sums of FedStruct's hops tell those who are given them (`isthmus audit`, docs/methods/fedstruct.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import isthmus
from isthmus.cli.recover_streamed import Told, sums_told
from isthmus.cli.replay_streamed import Played, played_again
from isthmus.data.node_data import NodeData
from isthmus.experiments.config import settings_from_toml
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.scenarios import parts_for, scenario_of
from isthmus.federation.audit import NEIGHBOURS, SOLVING
from isthmus.federation.messages import PartyId
from isthmus.privacy.attacks.hop_sums import (
    SumsOfHops,
    edges_by_regression,
    labels_from_first_hop_back,
    labels_present,
)

FIRST, SECOND = "Backward, first hop", "Backward, second hop"
Parts = dict[PartyId, NodeData]


def replayed(folder: Path, **settings: Any) -> tuple[Played, Parts]:
    """A small run on a generated graph, and what goes on from it."""
    given = {"dataset": "csbm:nodes=120,classes=3,features=8,degree=3", "clients": 4, "rounds": 20, "split": "50/20/30"}
    given |= {"seed": 1, "preset": "fedstruct", "structure_hops": 4, "nsf_dim": 8, "structure_hidden": (6,)}
    given |= {"loss": "ce", "dropout": 0.5, "precision": "float64", "lr": 0.05, **settings}
    with pytest.MonkeyPatch.context() as patch:
        # The first rows of S come from secrets; what is read of a small graph depends on them.
        patch.setattr("isthmus.methods.fedstruct.streamed_client.secrets.token_bytes", lambda size: b"7" * size)
        isthmus.run("fedstruct", **given, out=folder, quiet=True)
    resolved = settings_from_toml(RunFolder(folder).config)
    parts = dict(parts_for(resolved, scenario_of(resolved)))
    played = played_again(RunFolder(folder), resolved, parts)
    assert played is not None
    return played, parts


def by_kind(told: list[Told]) -> dict[str, dict[str, float]]:
    return {on.split(":")[0] if on.startswith("Backward") else attack: numbers for attack, _, on, _, numbers in told}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Played, Parts]:
    return replayed(tmp_path_factory.mktemp("small") / "run")


def test_values_edges_and_labels_that_sums_tell(small: tuple[Played, Parts]) -> None:
    masked, plain = (by_kind(list(sums_told(*small, secure))) for secure in (True, False))
    assert 0 < masked[SOLVING]["exposed"] < plain[SOLVING]["exposed"] <= plain[SOLVING]["of"]
    assert plain[SOLVING]["error"] < 1e-6, "without noise values are exact"
    assert masked[FIRST]["claimed"] == masked[FIRST]["correct"] > 0, "a residual is negative at its label alone"
    assert masked[FIRST]["claimed"] < plain[FIRST]["claimed"] == plain[FIRST]["correct"]
    assert masked[FIRST]["present"] == masked[FIRST]["present_right"] > 0
    assert masked[SECOND]["claimed"] == masked[SECOND]["correct"] > 0
    assert masked[NEIGHBOURS]["recall"] < plain[NEIGHBOURS]["recall"]
    assert plain[NEIGHBOURS]["precision"] > 0.7 and plain[NEIGHBOURS]["recall"] > 0.1


def test_clients_that_pool_what_they_see_read_more(small: tuple[Played, Parts]) -> None:
    alone, together = (by_kind(list(sums_told(*small, True, together=count))) for count in (1, 3))
    share = [told[SOLVING]["exposed"] / told[SOLVING]["of"] for told in (alone, together)]
    # Of four owners three know all but one: what is left are the sums of a single sender.
    assert share[1] > share[0]
    assert together[FIRST]["claimed"] == together[FIRST]["correct"] > alone[FIRST]["claimed"]
    assert together[SOLVING]["error"] < 1e-6, "what they sent each other is taken out"
    assert sums_of_one_sender(small[1]) == together[SOLVING]["exposed"]


def sums_of_one_sender(parts: Parts) -> int:
    """Values of every owner that follow from all sums over its nodes that anybody is given: counted on the graph."""
    count = 0
    for victim in parts:
        own, rows = parts[victim].node_id.tolist(), []
        for other, data in parts.items():
            if other == victim or data.cross is None:
                continue
            theirs = data.cross.owner.numpy() == data.cross.owners.index(victim)
            for node in np.unique(data.cross.own.numpy()[theirs & data.cross.outgoing.numpy()]):
                chosen = theirs & data.cross.outgoing.numpy() & (data.cross.own.numpy() == node)
                row = np.zeros(len(own))
                row[[own.index(far) for far in data.cross.other.numpy()[chosen].tolist()]] = 1.0
                rows.append(row)
        matrix = np.array(rows)
        rank = np.linalg.matrix_rank(matrix)
        units = np.eye(len(own))
        count += sum(np.linalg.matrix_rank(np.vstack([matrix, unit])) == rank for unit in units)
    return count


def test_labels_of_closed_nodes_cannot_be_read(tmp_path: Path) -> None:
    told = by_kind(list(sums_told(*replayed(tmp_path / "run", secure_sum=True, withhold_exposed=True, rounds=2), True)))
    assert told[SOLVING]["exposed"] > 0 and told[FIRST]["of"] > 0
    assert told[FIRST]["claimed"] == 0


def test_noise_is_in_what_is_read(tmp_path: Path) -> None:
    told = by_kind(list(sums_told(*replayed(tmp_path / "run", execution="each", forward_noise=30.0), False)))
    assert told[SOLVING]["error"] > 0.5
    assert told[NEIGHBOURS]["precision"] < 0.9


def test_labels_are_read_where_others_send_nothing_and_where_two_sums_are_equal() -> None:
    """Six nodes in four sums, none determined; nodes 1 and 4 are training nodes."""
    edges = sp.csr_matrix(
        np.array([[1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1]], dtype=float)
    )
    residual = np.zeros((6, 3))
    residual[1], residual[4] = [0.2, -0.5, 0.3], [-0.4, 0.3, 0.1]
    sums = SumsOfHops(edges, np.arange(6) + 100)
    assert not sums.exposed.any()
    nodes, labels = labels_from_first_hop_back(sums, edges @ residual)
    read = {int(node): int(label) for node, label in zip(nodes, labels.labels, strict=True) if label >= 0}
    assert read == {101: 1, 104: 0}


def test_sums_of_residuals_are_negative_at_labels_alone() -> None:
    residuals = np.array([[0.2, -0.5, 0.3], [-0.4, 0.3, 0.1], [0.0, 0.0, 0.0]])
    sums = np.array([[1, 0, 1], [1, 1, 0], [0, 0, 1]]) @ residuals
    assert labels_present(sums).tolist() == [[False, True, False], [True, True, False], [False, False, False]]


@pytest.mark.parametrize("hidden", [0, 1], ids=["all exposed", "a neighbour that is not"])
def test_regression_finds_edges_between_exposed_nodes(hidden: int) -> None:
    """Five nodes in a path with a chord, and one more whose values the client does not know."""
    adjacency = np.zeros((6, 6))
    for a, b in [(0, 1), (0, 4), (1, 2), (2, 3), *[(3, 5)] * hidden]:
        adjacency[a, b] = adjacency[b, a] = 1.0
    walk = (adjacency + np.eye(6)) / (adjacency + np.eye(6)).sum(1, keepdims=True)
    before = np.random.default_rng(0).normal(size=(60, 6))
    after, shown = before @ walk.T, slice(0, 5)
    found = edges_by_regression(after[:, shown], before[:, shown], before[:, shown], both_ways=True)
    assert np.array_equal(found, adjacency[shown, shown] > 0)


def test_an_arc_is_named_from_its_source_where_the_graph_is_directed() -> None:
    arcs = np.array([[0, 1, 0], [0, 0, 1], [0, 0, 0]], dtype=float)
    walk = (arcs + np.eye(3)) / (arcs + np.eye(3)).sum(1, keepdims=True)
    before = np.random.default_rng(0).normal(size=(30, 3))
    assert np.array_equal(edges_by_regression(before @ walk.T, before, before, both_ways=False), arcs > 0)
    assert not edges_by_regression(before @ walk.T, before, before, both_ways=True).any()


def test_solved_values_are_the_true_ones() -> None:
    rng = np.random.default_rng(1)
    edges, values = sp.csr_matrix(rng.random((9, 12)) < 0.18, dtype=float), rng.normal(size=(12, 3))
    sums = SumsOfHops(edges, np.arange(12))
    exposed = sums.exposed
    assert 0 < exposed.sum() < 12
    np.testing.assert_allclose(sums.solved(edges @ values), values[exposed], atol=1e-10)
