"""FedStruct's powers by messages against one dense computation (spec 14: 1, 2, 3, 4, 15, 17, 18, 19), and what is wrong
with edges.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_powers import combined_adjacency
from fedstruct_helpers import experiment, graph, opaque_ids, powers, rows_of, scenario, states, walk

from isthmus.data.scenario import Scenario
from isthmus.errors import ConfigError, DataError
from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.federation.messages import Kind
from isthmus.methods.fedstruct import Product
from isthmus.methods.fedstruct import powers as powers_module
from isthmus.methods.fedstruct.features import degree_feature, degrees

PROTOCOLS = ("published", "hardened")


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize(
    ("clients", "hops", "betas", "beta0"),
    [
        (1, 3, (), 0.0),
        (3, 4, (), 0.0),
        (5, 3, (0.5, 0.0, 0.25), 0.1),
        (3, 1, (), 0.0),
    ],
)
def test_unpruned_rows_equal_the_dense_power(
    protocol: str, directed: bool, clients: int, hops: int, betas: Any, beta0: float
) -> None:
    where = graph(clients=clients, directed=directed, isolated=2)
    run = powers(where, protocol=protocol, prune=0, structure_hops=hops, betas=betas, beta0=beta0)
    expected = combined_adjacency(walk(where), betas or (0.0,) * (hops - 1) + (1.0,), beta0)
    np.testing.assert_allclose(rows_of(run, where), expected, atol=1e-12)
    if not betas:
        np.testing.assert_allclose(rows_of(run, where).sum(1), 1.0, atol=1e-12)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_single_precision_stripes_and_the_wire_change_nothing(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where = graph(clients=4)
    expected = combined_adjacency(walk(where), (0.0, 0.0, 1.0))
    whole = rows_of(powers(where, protocol=protocol, prune=0, structure_hops=3, precision="float32"), where)
    np.testing.assert_allclose(whole, expected, atol=1e-6)
    monkeypatch.setattr(powers_module, "STRIPE_BYTES", 1)
    striped = powers(where, protocol=protocol, prune=0, structure_hops=3, precision="float32", wire=True)
    assert {
        entry.sequence for _, entries in striped.loop._entries for entry in entries if entry.message == "Stripe"
    } != {1}
    np.testing.assert_array_equal(rows_of(striped, where), whole)


@pytest.mark.parametrize("mode", ["block", "row", "global"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("directed", [False, True])
def test_pruned_powers_lie_between_zero_and_the_exact_power(protocol: str, mode: str, directed: bool) -> None:
    where = graph(60, clients=4, directed=directed)
    for hops in (2, 3, 4):
        exact = combined_adjacency(walk(where), (0.0,) * (hops - 1) + (1.0,))
        cut = rows_of(powers(where, protocol=protocol, prune=4, prune_mode=mode, structure_hops=hops), where)
        assert (cut >= 0).all() and (cut <= exact + 1e-6).all()
        assert 0 < cut.sum() < exact.sum() - 1
        if mode == "row":
            assert ((cut > 0).sum(1) <= 4).all()
        if mode == "global":
            assert (cut > 0).sum() == 4 * 60


def test_global_pruning_keeps_what_one_place_would_keep() -> None:
    """The reference code cuts every power to the p n largest entries; ties by value, row, column."""
    where = graph(50, clients=3, seed=4)
    one_step = walk(where).toarray().astype(np.float32)
    power = np.eye(50, dtype=np.float32)
    for _ in range(3):
        power = one_step @ power
        flat = power.ravel()
        kept = np.argsort(-flat, kind="stable")[: 3 * 50]
        power = np.zeros_like(flat)
        power[kept] = flat[kept]
        power = power.reshape(50, 50)
    found = rows_of(
        powers(where, protocol="published", prune=3, prune_mode="global", structure_hops=3, precision="float32"), where
    )
    # Sums in another order may differ in the last bit and decide a tie otherwise: compare what is kept, not which of
    # equals.
    np.testing.assert_allclose(np.sort(found.ravel()), np.sort(power.ravel()), atol=1e-6)
    assert np.mean((found > 0) == (power > 0)) > 0.98


def test_blocks_hold_at_most_their_limit_and_a_large_p_cuts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    where = graph(60, clients=3)
    sizes = {client: data.num_nodes for client, data in where.parts.items()}
    seen: list[tuple[int, int, int]] = []
    original = powers_module.keep_largest_by_owner

    def watched(block: Any, owner: Any, count: int) -> Any:
        kept = original(block, owner, count)
        seen.extend(
            (int((owner[kept.indices] == one).sum()), count, int((owner[block.indices] == one).sum()))
            for one in range(3)
        )
        return kept

    monkeypatch.setattr(powers_module, "keep_largest_by_owner", watched)
    powers(where, protocol="published", prune=4, prune_mode="block", structure_hops=4)
    limits = {2 * size for size in sizes.values()}  # ceil(4 / 3) n_i
    assert all(kept <= limit and limit in limits for kept, limit, _ in seen)
    assert any(before > limit for _, limit, before in seen)
    monkeypatch.undo()
    all_kept = powers(where, protocol="published", prune=60 * 3, prune_mode="block", structure_hops=3)
    np.testing.assert_allclose(rows_of(all_kept, where), combined_adjacency(walk(where), (0, 0, 1.0)), atol=1e-12)


@pytest.mark.parametrize("mode", ["block", "row", "global"])
def test_one_hop_is_never_cut(mode: str) -> None:
    """Chameleon: H2V and H2V-F are the same algorithm."""
    where = graph(40, clients=3, directed=True)
    one = dict(protocol="published", structure_hops=1, rounds=3, prune_mode=mode, dropout=0.3)
    runs = [experiment(where, prune=prune, **one) for prune in (1, 0)]
    for run in runs:
        run.loop.play()
    np.testing.assert_array_equal(rows_of(runs[0], where), walk(where).toarray())
    assert runs[0].loop.lines[-1]["test"] == runs[1].loop.lines[-1]["test"]
    assert all(
        torch.equal(runs[0].loop.state.weights[name], runs[1].loop.state.weights[name])
        for name in runs[0].loop.state.weights
    )  # type: ignore[attr-defined]


def test_betas_are_linear() -> None:
    where = graph(clients=3)

    def abar(betas: tuple[float, ...]) -> np.ndarray:
        return rows_of(powers(where, prune=0, structure_hops=3, betas=betas), where)

    np.testing.assert_allclose(abar((0.5, 0.2, 0.0)) + abar((0.1, -0.2, 1.0)), abar((0.6, 0.0, 1.0)), atol=1e-12)


def test_renormalised_rows_sum_to_one() -> None:
    where = graph(60, clients=3)
    found = rows_of(powers(where, prune=3, structure_hops=4, renormalise=True), where)
    np.testing.assert_allclose(found.sum(1), 1.0, atol=1e-12)


def test_diagonals_and_degrees_are_those_of_the_whole_graph() -> None:
    where = graph(clients=4, directed=True, isolated=1)
    run = powers(where, prune=0, structure_hops=3)
    exact = [np.diag(combined_adjacency(walk(where), (0.0,) * (hop - 1) + (1.0,))) for hop in (1, 2, 3)]
    source, target = where.whole.edge_index.numpy()
    degree = np.rint((np.bincount(source, minlength=40) + np.bincount(target, minlength=40)) / 2).astype(int)
    for client, state in states(run).items():
        ids = where.parts[client].node_id.numpy()
        np.testing.assert_allclose(state.diagonal.numpy(), np.stack(exact, axis=1)[ids], atol=1e-12)
        np.testing.assert_array_equal(degrees(where.parts[client]), degree[ids])
    one_hot = degree_feature(degree, 3)
    assert torch.equal(one_hot.sum(1), torch.ones(40)) and torch.equal(
        one_hot.argmax(1), torch.from_numpy(np.minimum(degree, 2))
    )


def test_bytes_are_counted_and_stay_below_the_bound() -> None:
    """(Ls - 1) K (K - 1) ceil(p/K) n triples at most."""
    where, clients, p, hops = graph(80, clients=4), 4, 2, 4
    run = powers(where, protocol="published", prune=p, prune_mode="block", structure_hops=hops)
    entries = [entry for _, batch in run.loop._entries for entry in batch if entry.message == Product.__name__]
    values = sum(entry.by_kind[Kind.STRUCTURE] for entry in entries)
    slots = sum(len(np.unique(data.cross.own[data.cross.outgoing])) + 1 for data in where.parts.values())  # type: ignore[union-attr]
    pointers = 8 * (hops - 1) * (clients - 1) * slots
    triples = (values - pointers) / (8 + 8)  # a value and a column; rows are in the pointers
    bound = (hops - 1) * clients * (clients - 1) * -(-p // clients) * 80
    assert 0 < triples <= bound
    assert {entry.channel for entry in entries} == {"peer"}
    assert run.loop.totals.setup["peer"] >= values


def test_no_message_holds_a_feature(tmp_path: Path) -> None:
    where = graph(clients=3)
    marked = {client: replace(data, x=torch.full_like(data.x, 123.4567)) for client, data in where.parts.items()}
    run = experiment(replace(where, parts=marked), transcript=True, prune=0, structure_hops=3, wire=True)
    from isthmus.experiments.folder import RunFolder

    run.play(RunFolder.create(tmp_path / "run", run.settings.to_toml(), {}), resumed=False)
    kept = list((tmp_path / "run" / "transcript").rglob("*.bin"))
    needles = [np.array([123.4567], dtype=kind).tobytes() for kind in (np.float32, np.float64)]
    assert len(kept) > 50 and not any(needle in path.read_bytes() for path in kept for needle in needles)


# -- what is wrong with edges ----------------------------------------------------------------------


def broken(where: Scenario, client: str, **changes: Any) -> Scenario:
    data = where.parts[client]
    assert data.cross is not None
    return replace(where, parts={**where.parts, client: replace(data, cross=replace(data.cross, **changes))})


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_cross_edge_that_one_side_does_not_list_is_found(protocol: str) -> None:
    where = graph(clients=3)
    cross = where.parts["client-1"].cross
    assert cross is not None
    keep = torch.arange(cross.num_edges) != 2
    fewer = {name: getattr(cross, name)[keep] for name in ("own", "owner", "other", "outgoing", "weight")}
    with pytest.raises(DataError, match=r"do not match.*both ends must list"):
        powers(broken(where, "client-1", **fewer), protocol=protocol)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_cross_edge_to_an_unknown_node_is_found(protocol: str) -> None:
    where = graph(clients=3)
    cross = where.parts["client-1"].cross
    assert cross is not None
    other = cross.other.clone()
    other[0] = 4000
    with pytest.raises(DataError, match="does not own or list"):
        powers(broken(where, "client-1", other=other), protocol=protocol)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_ids_that_differ_in_the_last_bit_are_two_nodes(protocol: str) -> None:
    """The list of one end names a node whose id no float of 64 bits can tell from the right one."""
    where = opaque_ids(graph(clients=3))
    cross = where.parts["client-1"].cross
    assert cross is not None
    other = cross.other.clone()
    other[0] += 1
    run = SimulatedRun(
        resolve("fedstruct", {"dataset": "csbm", "clients": 3, "protocol": protocol}),
        broken(where, "client-1", other=other),
    )
    with pytest.raises(DataError, match="does not own or list"):
        run.loop.play(until=1)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_cross_edge_to_an_unknown_client_is_found(protocol: str) -> None:
    where = graph(clients=3)
    cross = where.parts["client-1"].cross
    assert cross is not None
    with pytest.raises(DataError, match="clients that take no part"):
        powers(broken(where, "client-1", owners=("client-0", "client-1", "somebody")), protocol=protocol)


def test_weights_of_a_cross_edge_must_agree_and_not_be_negative() -> None:
    where = graph(clients=3)
    cross = where.parts["client-1"].cross
    assert cross is not None
    with pytest.raises(DataError, match="do not match"):
        powers(broken(where, "client-1", weight=2 * cross.weight))
    with pytest.raises(DataError, match="negative weight"):
        powers(broken(where, "client-1", weight=-cross.weight))


def test_a_node_with_two_owners_is_found() -> None:
    where = graph(clients=2)
    ids = where.parts["client-1"].node_id.clone()
    ids[0] = where.parts["client-0"].node_id[0]
    twice = replace(where, parts={**where.parts, "client-1": replace(where.parts["client-1"], node_id=ids)})
    with pytest.raises(DataError, match="has two owners"):
        powers(twice, protocol="published")


def test_a_graph_without_edges_has_the_identity_as_every_power() -> None:
    where = graph(12, clients=3)
    whole = replace(where.whole, edge_index=torch.zeros(2, 0, dtype=torch.int64))
    lonely = scenario(whole, torch.arange(12) % 3, 3)
    for protocol in PROTOCOLS:
        np.testing.assert_array_equal(
            rows_of(powers(lonely, protocol=protocol, prune=2, structure_hops=3), lonely), np.eye(12)
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"structure_hops": 0}, "structure_hops must be at least 1"),
        ({"prune": -1}, "prune must be at least 0"),
        ({"structure_hops": 3, "betas": (1.0, 2.0)}, "one weight per power"),
        ({"prune_mode": "best"}, "unknown value for prune_mode"),
        ({"dp_clip": 1.0, "weighting": "uniform"}, "no differential privacy"),
    ],
)
def test_settings_of_the_powers_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve("fedstruct", {"dataset": "csbm", **settings})


@pytest.mark.parametrize("protocol", ["published", "hardened"])
def test_more_walk_steps_than_hops_leave_abar_as_it_is(protocol: str) -> None:
    """FED* of the reference code: 50 steps whatever L_s is."""
    where = graph(30, clients=3, directed=True)
    given = {"structure_hops": 2, "prune": 0, "nsf": "walk", "protocol": protocol}
    run = experiment(where, walk_steps=5, nsf_dim=8, rounds=1, **given)
    run.loop.play()
    np.testing.assert_allclose(rows_of(run, where), np.linalg.matrix_power(walk(where).toarray(), 2), atol=1e-12)
    dense, power = walk(where).toarray(), np.eye(30)
    for step in range(5):
        power = power @ dense
        for client, state in states(run).items():
            wanted = np.diag(power)[where.parts[client].node_id.numpy()]
            np.testing.assert_allclose(state.diagonal[:, step].numpy(), wanted, atol=1e-12)
    assert next(iter(states(run).values())).nsf.shape[1] == 8
