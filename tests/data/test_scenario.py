"""Scenarios: what goes in comes out, cut but complete."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.data.from_arrays import both_ways
from isthmus.data.node_data import NodeData
from isthmus.data.partition import client_ids
from isthmus.data.scenario import Scenario, build_scenario
from isthmus.data.split_graph import split_graph
from isthmus.errors import ConfigError, DataError, IsthmusError

SMALL = "csbm:nodes=120,classes=3,features=5,degree=5"


def arcs(data: NodeData) -> set[tuple[int, int]]:
    """Own arcs as pairs of global ids."""
    source, target = data.node_id[data.edge_index]
    return set(zip(source.tolist(), target.tolist(), strict=True))


def known_arcs(data: NodeData) -> set[tuple[int, int]]:
    """Arcs the cross edges tell of, as pairs of global ids."""
    cross = data.cross
    assert cross is not None
    own = data.node_id[cross.own]
    source, target = torch.where(cross.outgoing, own, cross.other), torch.where(cross.outgoing, cross.other, own)
    return set(zip(source.tolist(), target.tolist(), strict=True))


def test_parts_are_the_whole_cut() -> None:
    scenario = build_scenario(dataset=SMALL, clients=4, seed=3)
    whole = scenario.whole
    assert torch.equal(torch.cat([part.node_id for part in scenario.parts.values()]).sort().values, torch.arange(120))
    own = set().union(*(arcs(part) for part in scenario.parts.values()))
    cross = set().union(*(known_arcs(part) for part in scenario.parts.values()))
    assert own | cross == arcs(whole)
    assert not own & cross
    for part in scenario.parts.values():
        for name in ("x", "y", "train", "val", "test"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[part.node_id]), name
        assert part.num_classes == 3
        assert torch.equal(part.node_id, part.node_id.sort().values)


def test_both_ends_know_a_cross_edge() -> None:
    scenario = build_scenario(dataset=SMALL, clients=4, seed=3)
    owner = {int(node): client for client, part in scenario.parts.items() for node in part.node_id}
    for client, part in scenario.parts.items():
        cross = part.cross
        assert cross is not None and cross.owners == tuple(scenario.parts)
        assert [cross.owners[index] for index in cross.owner] == [owner[int(node)] for node in cross.other]
        assert client not in {cross.owners[index] for index in cross.owner}
        for arc in known_arcs(part):
            assert arc in known_arcs(scenario.parts[owner[arc[0]]]) & known_arcs(scenario.parts[owner[arc[1]]])
        assert part.without_cross().cross is None


def test_cut_of_a_directed_graph_by_hand() -> None:
    none = torch.zeros(4, dtype=torch.bool)
    whole = NodeData(
        x=torch.arange(4.0)[:, None],
        edge_index=torch.tensor([[0, 2, 0, 3], [2, 0, 1, 0]]),
        y=torch.tensor([0, 1, 0, 1]),
        train=none,
        val=none,
        test=none,
        node_id=torch.arange(4),
        num_classes=2,
    )
    parts = split_graph(whole, torch.tensor([0, 1, 0, 1]), ("a", "b"))
    assert parts["a"].edge_index.tolist() == [[0, 1], [1, 0]]  # 0 <-> 2 as rows 0, 1
    assert parts["b"].edge_index.shape == (2, 0)
    a, b = parts["a"].cross, parts["b"].cross
    assert a is not None and b is not None
    assert (a.own.tolist(), a.other.tolist(), a.outgoing.tolist()) == ([0, 0], [1, 3], [True, False])
    assert (b.own.tolist(), b.other.tolist(), b.outgoing.tolist()) == ([1, 0], [0, 0], [True, False])


def test_statistics_count_what_is_there() -> None:
    scenario = build_scenario(dataset=SMALL, clients=4, seed=3)
    statistics = scenario.statistics
    owner = torch.empty(120, dtype=torch.long)
    for index, part in enumerate(scenario.parts.values()):
        owner[part.node_id] = index
    source, target = owner[scenario.whole.edge_index]
    assert statistics.cross_edge_share == pytest.approx(float((source != target).double().mean()))
    for i in range(4):
        for j in range(4):
            assert statistics.cross_edges[i][j] == int(((source == i) & (target == j)).sum())
    for client, part in zip(statistics.clients, scenario.parts.values(), strict=True):
        assert client.nodes == part.num_nodes and client.edges == part.edge_index.shape[1]
        assert sum(client.classes) == client.nodes
    assert json.loads(json.dumps(statistics.to_json())) == statistics.to_json()


def test_same_seed_same_bits_other_seed_other_draw() -> None:
    def ids(scenario: Scenario) -> list[list[int]]:
        return [part.node_id.tolist() for part in scenario.parts.values()]

    first, again, other = (build_scenario(dataset=SMALL, clients=4, seed=seed) for seed in (1, 1, 2))
    assert ids(first) == ids(again) != ids(other)
    assert torch.equal(first.whole.x, again.whole.x) and torch.equal(first.whole.train, again.whole.train)
    # Split and partition have streams of their own: another number of clients leaves data and split alone.
    more = build_scenario(dataset=SMALL, clients=7, seed=1)
    assert torch.equal(first.whole.train, more.whole.train) and torch.equal(
        first.whole.edge_index, more.whole.edge_index
    )


def test_one_client_owns_everything() -> None:
    scenario = build_scenario(dataset=SMALL, clients=1)
    (part,) = scenario.parts.values()
    assert part.cross is not None and part.cross.num_edges == 0
    assert torch.equal(part.edge_index, scenario.whole.edge_index)
    assert scenario.statistics.label_skew == 0.0


def test_client_ids_sort_by_number() -> None:
    assert client_ids(1) == ("client-0",)
    assert client_ids(10)[-1] == "client-9"
    assert client_ids(11)[0] == "client-00"
    assert list(client_ids(101)) == sorted(client_ids(101))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"clients": 0}, ConfigError, "at least 1 client"),
        ({"clients": 121}, DataError, "121 clients cannot share 120 nodes"),
        ({"clients": 110}, DataError, "partition random leaves client-.* without nodes"),
        ({"partition": "randon"}, ConfigError, "did you mean 'random'"),
        ({"split": "10/10"}, ConfigError, "train/val/test"),
        ({"split": "10/10/70"}, ConfigError, "add up to 100"),
        ({"split": "0/20/80"}, DataError, "leaves no train nodes"),
        ({"dataset": "coral"}, ConfigError, "did you mean 'cora'"),
        ({"dataset": "csbm:nods=3"}, ConfigError, "did you mean 'nodes'"),
        ({"dataset": "csbm:nodes=3.5"}, ConfigError, "whole number"),
        ({"dataset": "csbm:homophily=2"}, ConfigError, "in \\[0, 1\\]"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], error: type[IsthmusError], message: str) -> None:
    with pytest.raises(error, match=message):
        build_scenario(**{"dataset": SMALL, **options})  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(
    nodes=st.integers(40, 200),
    clients=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    train=st.integers(3, 50),
    test=st.integers(3, 40),
)
def test_split_sizes_are_floored_and_parts_cover(nodes: int, clients: int, seed: int, train: int, test: int) -> None:
    split = f"{train}/{100 - train - test}/{test}"
    scenario = build_scenario(dataset=f"csbm:nodes={nodes},classes=2,degree=3", clients=clients, seed=seed, split=split)
    whole = scenario.whole
    assert int(whole.train.sum()) == nodes * train // 100
    assert int(whole.test.sum()) == nodes * test // 100
    assert bool((whole.train.int() + whole.val.int() + whole.test.int() == 1).all())
    assert sum(part.num_nodes for part in scenario.parts.values()) == nodes


def test_undirected_reads_every_arc_both_ways() -> None:
    plain, both = (
        build_scenario(dataset="powerlaw:nodes=200", clients=2, seed=1, undirected=on) for on in (False, True)
    )
    arcs = {tuple(arc) for arc in plain.whole.edge_index.T.tolist()}
    assert {tuple(arc) for arc in both.whole.edge_index.T.tolist()} == arcs | {(b, a) for a, b in arcs}
    assert both.whole.edge_index.shape[1] == len(arcs | {(b, a) for a, b in arcs})


def test_a_class_without_training_nodes_is_said(caplog: pytest.LogCaptureFixture) -> None:
    build_scenario(dataset=SMALL, clients=2, seed=0)
    assert not caplog.records
    build_scenario(dataset="csbm:nodes=60,classes=12,degree=2", clients=2, seed=0)
    assert "without a training node: no method can predict it" in caplog.text and len(caplog.records) == 1


def test_without_cross_edges_the_rest_is_the_same() -> None:
    with_edges, without = (
        build_scenario(dataset="csbm:nodes=120", clients=3, cross_edges=asked) for asked in (True, False)
    )
    assert with_edges.statistics == without.statistics and with_edges.statistics.clients[0].cross_edges > 0
    for client, data in with_edges.parts.items():
        other = without.parts[client]
        assert other.cross is None and data.cross is not None
        assert torch.equal(data.edge_index, other.edge_index) and torch.equal(data.x, other.x)


def test_a_single_client_has_the_graph_itself() -> None:
    scenario = build_scenario(dataset="csbm:nodes=120", clients=1)
    (data,) = scenario.parts.values()
    assert data.x is scenario.whole.x and data.edge_index is scenario.whole.edge_index
    assert data.cross is not None and data.cross.num_edges == 0


@pytest.mark.parametrize("case", ["directed", "loops", "twice", "ready", "none"])
def test_both_ways_is_what_sorting_columns_gives(case: str) -> None:
    generator = torch.Generator().manual_seed(3)
    arcs = torch.randint(0, 12, (2, 40), generator=generator)
    if case != "loops":
        arcs = arcs[:, arcs[0] != arcs[1]]
    if case == "twice":
        arcs = torch.cat([arcs, arcs], dim=1)
    if case == "none":
        arcs = arcs[:, :0]
    wanted = torch.unique(torch.cat([arcs, arcs.flip(0)], dim=1), dim=1)
    if case == "ready":
        assert both_ways(wanted, 12) is wanted
    assert torch.equal(both_ways(arcs, 12), wanted)
