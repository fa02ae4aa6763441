"""Generated data have the properties they promise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score

from isthmus.data.banks import PATTERNS, Banks
from isthmus.data.generators import GENERATORS, GRAPH_GENERATORS, canonical, generate, generate_graphs
from isthmus.data.scenario import build_scenario
from isthmus.data.whole_graph import Loaded
from isthmus.errors import ConfigError
from isthmus.graph.homophily import edge_homophily
from isthmus.graph.normalise import mean_norm
from isthmus.seeds import Stream


def draw(name: str, seed: int = 0) -> Loaded:
    return generate(name, Stream(seed, ("data",)))


@pytest.mark.parametrize("homophily", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("kind", ["csbm", "powerlaw"])
def test_homophily_and_degree_are_as_asked(kind: str, homophily: float) -> None:
    data = draw(f"{kind}:nodes=4000,classes=5,degree=8,homophily={homophily}").data
    assert edge_homophily(data.edge_index, data.y) == pytest.approx(homophily, abs=0.02)
    assert data.edge_index.shape[1] / 4000 == pytest.approx(8, rel=0.05)
    assert torch.bincount(data.y).tolist() == [800] * 5


@pytest.mark.parametrize("kind", sorted(GENERATORS))
def test_graphs_are_simple_and_symmetric(kind: str) -> None:
    data = draw(kind).data
    codes = data.edge_index[0] * data.num_nodes + data.edge_index[1]
    assert torch.equal(codes, codes.unique())  # sorted, no duplicates
    assert not (data.edge_index[0] == data.edge_index[1]).any()
    assert torch.equal((data.edge_index[1] * data.num_nodes + data.edge_index[0]).sort().values, codes)


@pytest.mark.parametrize("kind", sorted(GENERATORS))
def test_same_stream_same_graph(kind: str) -> None:
    first, again, other = draw(kind), draw(kind), draw(kind, 1)
    assert torch.equal(first.data.edge_index, again.data.edge_index) and torch.equal(first.data.x, again.data.x)
    assert not torch.equal(first.data.x, other.data.x)


def test_signal_is_in_the_features() -> None:
    data = draw("csbm:nodes=3000,classes=2,features=8,signal=4").data
    means = torch.stack([data.x[data.y == label].mean(dim=0) for label in range(2)])
    torch.testing.assert_close(means.norm(dim=1), torch.full((2,), 4.0), atol=0.2, rtol=0)


def test_power_law_tail() -> None:
    degree = torch.bincount(draw("powerlaw:nodes=50000,degree=10").data.edge_index[0], minlength=50000).double()
    plain = torch.bincount(draw("csbm:nodes=50000,degree=10").data.edge_index[0], minlength=50000).double()
    assert degree.max() > 8 * plain.max()
    top = degree.sort(descending=True).values
    # P(degree > d) ~ d^-1.5: from rank 100 to rank 3200 the degree falls by about 32^(1 / 1.5).
    assert float((top[100] / top[3200]).log()) == pytest.approx(np.log(32) / 1.5, rel=0.25)


def test_names_carry_parameters() -> None:
    assert canonical("CSBM:nodes=600,degree=6.0,homophily=0.2") == "csbm:homophily=0.2"
    assert canonical("banks") == "banks" and canonical("motifs:nodes=9") == "motifs:nodes=9"
    assert generate_graphs("motifs:graphs=12", Stream(0)).num_graphs == 12
    assert build_scenario(dataset="csbm:nodes=200,degree=6", clients=2).dataset == "csbm:nodes=200"
    for name in (*GENERATORS, *GRAPH_GENERATORS):
        with pytest.raises(ConfigError, match="parameter"):
            canonical(f"{name}:nonsense=1")


@pytest.mark.parametrize(
    "name",
    [
        "csbm:classes=1",
        "csbm:degree=-1",
        "powerlaw:exponent=2",
        "banks:banks=2",
        "banks:rate=0.5",
        "banks:directed=2",
        "motifs:classes=9",
    ],
)
def test_impossible_parameters(name: str) -> None:
    with pytest.raises(ConfigError, match="must be"):
        canonical(name)


# -- banks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"banks": 3, "accounts": 300},
        {"banks": 20, "accounts": 1000, "rate": 0.2, "schemes": 1},
        {"banks": 3, "accounts": 300, "home": 1.0},
    ],
)
def test_no_two_banks_see_all_of_a_ring(options: dict[str, int]) -> None:
    network = Banks(**options).network(Stream(5))
    assert set(np.unique(network.illicit)) == set(
        np.flatnonzero(network.y)
    )  # every member pays or is paid, nobody else is
    assert (network.ring[network.illicit[0]] == network.ring[network.illicit[1]]).all()
    for ring in range(network.ring.max() + 1):
        assert len(np.unique(network.bank[network.ring == ring])) >= 3
    assert network.y.mean() == pytest.approx(options.get("rate", 0.09), abs=0.02)
    assert set(range(options.get("banks", 8))) == set(network.bank.tolist())


def test_transfers_of_a_scheme_are_small_alike_and_close_in_time() -> None:
    network = Banks().network(Stream(7))
    moved, ordinary = network.transfers, network.licit.shape[1]
    amount, day = moved.amount.numpy(), moved.day.numpy()
    assert day.min() >= 0 and day.max() < 200
    assert np.log(amount[:ordinary]).mean() == pytest.approx(5.0, abs=0.02)
    begin, middles = ordinary, []
    for scheme in network.schemes:
        rows = slice(begin, begin + scheme.payments.shape[1])
        assert np.array_equal(np.stack([moved.source[rows], moved.target[rows]]), scheme.payments)
        assert np.log(amount[rows]).std() < 0.1 and day[rows].max() - day[rows].min() <= 20
        middles.append(np.log(amount[rows]).mean())
        begin = rows.stop
    assert begin == moved.num_transfers
    assert np.mean(middles) == pytest.approx(4.5, abs=0.12)


def test_a_network_differs_by_seed_and_repeats_itself() -> None:
    first, again, other = (draw("banks:accounts=400", seed) for seed in (0, 0, 1))
    assert torch.equal(first.data.x, again.data.x) and torch.equal(first.data.edge_index, again.data.edge_index)
    assert not torch.equal(first.data.x, other.data.x)
    assert not torch.equal(torch.as_tensor(first.columns["ring"]), torch.as_tensor(other.columns["ring"]))
    assert first.data.x.shape[1] == 11 and first.transfers is not None


def test_patterns_have_their_shape() -> None:
    network = Banks().network(Stream(6))
    assert {scheme.pattern for scheme in network.schemes} == set(PATTERNS)
    for scheme in network.schemes:
        source, target = scheme.payments
        out, into = np.unique(source, return_counts=True), np.unique(target, return_counts=True)
        if scheme.pattern == "fan-in":
            assert len(into[0]) == 1 and out[1].max() == 1
        elif scheme.pattern == "fan-out":
            assert len(out[0]) == 1 and into[1].max() == 1
        elif scheme.pattern == "cycle":
            assert len(source) >= 3 and (out[1] == 1).all() and (into[1] == 1).all() and set(out[0]) == set(into[0])
        elif scheme.pattern == "scatter-gather" and len(source):
            half = len(source) // 2
            assert (
                len(set(source[:half])) == 1 and len(set(target[half:])) == 1 and (target[:half] == source[half:]).all()
            )


def test_edges_across_banks_are_worth_several_points() -> None:
    """A linear model on features and what they are in the neighbourhood: only the edges it may use differ."""
    scores: dict[str, list[float]] = {"features": [], "inside": [], "across": []}
    for seed in range(3):
        scenario = build_scenario(dataset="banks", partition="owner", split="stratified:40/20/40", seed=seed)
        whole, owner = scenario.whole, torch.empty(scenario.whole.num_nodes, dtype=torch.long)
        for index, part in enumerate(scenario.parts.values()):
            owner[part.node_id] = index
        inside = whole.edge_index[:, owner[whole.edge_index[0]] == owner[whole.edge_index[1]]]
        for name, edges in (("features", None), ("inside", inside), ("across", whole.edge_index)):
            x = whole.x.numpy()
            if edges is not None:
                matrix = mean_norm(edges, whole.num_nodes)
                x = np.concatenate([x, matrix @ x, matrix @ (matrix @ x)], axis=1)
            model = LogisticRegression(max_iter=1000).fit(x[whole.train.numpy()], whole.y[whole.train].numpy())
            guess = model.decision_function(x[whole.test.numpy()])
            scores[name].append(average_precision_score(whole.y[whole.test].numpy(), guess))
    mean = {name: float(np.mean(values)) for name, values in scores.items()}
    assert mean["across"] > mean["inside"] + 0.04 > mean["features"] + 0.04, mean
    assert all(0.15 < value < 0.9 for value in mean.values()), mean
