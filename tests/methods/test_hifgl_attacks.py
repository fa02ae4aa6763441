"""The attacks of the spec (11.2 a to f, 11.5) on what parties of a run were really sent: all succeed against the
published protocol, none against the hardened one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hifgl_helpers import Driver, small
from secure_sums import unmask_total

from isthmus.data.scenario import Scenario
from isthmus.errors import ProtocolError
from isthmus.experiments.config import resolve
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.run import SimulatedRun
from isthmus.federation.messages import Message
from isthmus.federation.transcript import received
from isthmus.methods.hifgl.algorithm import ModelPass
from isthmus.methods.hifgl.hardened import EdgeKeys, HeldSums, ShareRows, SlotKeys
from isthmus.methods.hifgl.layers import dense
from isthmus.methods.hifgl.messages import Pass
from isthmus.methods.hifgl.published import CodedRows, CodedSums, MaskRequest, Masks
from isthmus.privacy.attacks.gradients import inputs_from_linear_gradient
from isthmus.privacy.attacks.labels import labels_from_signs
from isthmus.privacy.attacks.shares import (
    Slots,
    degree_from_sums,
    open_with_all_shares,
    open_with_keys,
    open_with_known_neighbour,
    open_with_masks,
    score_elements,
)
from isthmus.privacy.attacks.sums import determined_by_sums
from isthmus.privacy.attacks.uniform import uniformity
from isthmus.privacy.chacha import expand
from isthmus.privacy.edge_keys import KeyHolder
from isthmus.privacy.field import P61
from isthmus.privacy.flatten import template_of_leaves
from isthmus.privacy.masks import SumParty, SumRoster, SumTag
from isthmus.privacy.secmp import Exchange

FIRST, SECOND, THIRD = "client-0", "client-1", "client-2"
WIDTH = 64


class Recorded:
    """A run with a transcript: what every party was sent in setup."""

    def __init__(self, scenario: Scenario, folder: Path, **settings: Any) -> None:
        given = {
            "dataset": "csbm",
            "preset": "hifgl",
            "clients": 3,
            "seed": 5,
            "hidden": (6,),
            "one_neighbour": "allow",
            "rounds": 2,
            "transcript": True,
        }
        self.experiment = SimulatedRun(resolve("hifgl", given | settings), scenario)
        self.folder = folder
        self.experiment.play(RunFolder.create(folder, self.experiment.settings.to_toml(), {}), resumed=False)
        config: Any = self.experiment.settings.method_config
        threshold = config.holders(len(scenario.parts)) if config.secmp == "hardened" else 1
        self.config, self.sums = config, config.sums(threshold)
        self.table = self.experiment.settings.method.table

    def sent(self, party: str, kind: type[Message], phase: str = "setup") -> list[tuple[str, Any]]:
        """(sender, message) of one type, in order."""
        lines = received(self.folder, party, self.table)
        return [(line.sender, message) for line, message in lines if isinstance(message, kind) and line.phase == phase]

    def kinds(self, party: str) -> set[type[Message]]:
        return {type(message) for _, message in received(self.folder, party, self.table)}

    def where(self, silo: str) -> Any:
        client: Any = self.experiment.engine.party(f"{silo}/devices").client
        return client.where

    def raw(self, silo: str) -> np.ndarray:
        """Encoded first-layer messages of a silo's devices: what attackers are after."""
        client: Any = self.experiment.engine.party(f"{silo}/devices").client
        values: np.ndarray = self.sums.format.encode((client.graph.source * dense(client.x)).double().numpy()).values
        return values


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return small(dataset="csbm:nodes=200,classes=3,features=64,degree=6")


@pytest.fixture(scope="module")
def published(scenario: Scenario, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(scenario, tmp_path_factory.mktemp("published") / "run", secmp="published")


@pytest.fixture(scope="module")
def hardened(scenario: Scenario, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(scenario, tmp_path_factory.mktemp("hardened") / "run", secmp="hardened")


def first_from(run: Recorded, kind: type[Message]) -> Any:
    """What the first silo's devices were sent by the second's, in the first exchange."""
    return next(message for sender, message in run.sent(f"{FIRST}/devices", kind) if sender == f"{SECOND}/devices")


def test_a_target_opens_single_neighbours(published: Recorded, hardened: Recorded) -> None:
    coded = published.config.from_wire(first_from(published, CodedRows).rows)
    truth = published.raw(SECOND)[published.where(SECOND).pairs[FIRST].source]
    assert score_elements(open_with_all_shares(published.sums.code, coded), truth, "device", "a").exact

    shares = hardened.config.from_wire(first_from(hardened, ShareRows).rows)[:, :WIDTH]
    assert FIRST not in {sender for sender, _ in hardened.sent(f"{FIRST}/devices", ShareRows)}
    client: Any = hardened.experiment.engine.party(f"{FIRST}/devices").client
    sums = {sender: hardened.config.from_wire(m.rows) for sender, m in hardened.sent(f"{FIRST}/devices", HeldSums)[:2]}
    target = hardened.where(FIRST).pairs[SECOND].target
    rows = client.state.handle.numpy()[target]
    others = [sums[holder][rows][:, :WIDTH] for holder in client.state.holders]
    tried = hardened.sums.code.decode(np.stack([shares, *others]))  # the best it can do: one share, and sums
    alone = hardened.where(FIRST).neighbours[target] == 1
    assert score_elements(tried[~alone], truth[~alone], "device", "a").correct == 0
    assert uniformity(shares, P61) > 1e-6


def test_b_whoever_has_mu_opens_a_share(published: Recorded, hardened: Recorded) -> None:
    masks = published.config.from_wire(
        next(m.masks for s, m in published.sent(f"{SECOND}/devices", Masks) if s == FIRST)
    )
    intercepted = published.config.from_wire(
        next(m for s, m in published.sent(f"{FIRST}/devices", CodedRows) if s == "client-2/devices").rows
    )
    truth = published.raw("client-2")[published.where("client-2").pairs[FIRST].source]
    found = np.stack([open_with_masks(published.sums.code, 0, share, masks[:, :WIDTH]) for share in intercepted[0]])
    assert score_elements(found, truth, "source device of another silo", "b").exact

    # Hardened: nobody is given masks. A holder can make its own share of a message, and needs all others to open it.
    assert Masks not in hardened.kinds(f"{SECOND}/devices") | hardened.kinds(f"{FIRST}/devices")
    assert not {ShareRows, CodedRows, EdgeKeys} & hardened.kinds(FIRST)
    silo: Any = hardened.experiment.engine.party(FIRST).client
    own = expand(hardened.sums.field, silo.state.keys[THIRD].numpy(), Exchange(0, 1).nonce(), WIDTH)
    assert uniformity(own, P61) > 1e-6
    # And the target cannot make keys of what it passes on.
    sent = first_from(hardened, EdgeKeys)
    with pytest.raises(ProtocolError, match="another holder"):
        KeyHolder(b"isthmus/hifgl/server").keys(
            sent.group.numpy().astype(np.int64),
            sent.number.numpy().astype(np.int64),
            sent.public.numpy(),
            sent.proof[:, 0].numpy(),
        )


def test_c_differences_of_shares(published: Recorded, hardened: Recorded) -> None:
    coded = published.config.from_wire(first_from(published, CodedRows).rows)
    truth = published.raw(SECOND)[published.where(SECOND).pairs[FIRST].source]
    opened = np.stack(
        [open_with_known_neighbour(published.sums.code, 0, share, coded[0, 0], truth[0]) for share in coded[0, 1:]]
    )
    assert score_elements(opened, truth[1:], "device", "c").exact

    shares = hardened.config.from_wire(first_from(hardened, ShareRows).rows)[:, :WIDTH]
    tried = np.stack(
        [open_with_known_neighbour(hardened.sums.code, 0, share, shares[0], truth[0]) for share in shares[1:]]
    )
    assert score_elements(tried, truth[1:], "device", "c").correct == 0
    field = hardened.sums.field
    assert uniformity(np.stack([field.sub(a, b) for a, b in itertools.pairwise(shares)]), P61) > 1e-6


def test_d_the_silo_reads_degrees(published: Recorded, hardened: Recorded) -> None:
    source: Any = published.experiment.engine.party(
        f"{SECOND}/devices"
    ).client  # was given the silo's masks by the silo
    (sums,) = [published.config.from_wire(m.rows) for s, m in published.sent(FIRST, CodedSums)][:1]
    masks = published.config.from_wire(source.state.masks[FIRST])[:, :WIDTH]
    read = [degree_from_sums(published.sums.code, sums[:, u], masks) for u in range(sums.shape[1])]
    assert read == published.where(FIRST).neighbours.tolist()

    # Hardened: made-up handles with powers of two, filled up by the devices.
    ((sender, boxes),) = hardened.sent(SECOND, SlotKeys)
    assert sender == f"{FIRST}/devices"
    degree = hardened.where(FIRST).neighbours
    assert set(boxes.sizes.tolist()) <= {1, 2, 4, 8, 16, 32} and int(boxes.sizes.sum()) > int(degree.sum())
    assert boxes.sizes.tolist() != degree.tolist()
    within = [sorted(degree[(degree > low) & (degree <= 2 * low)].tolist()) for low in (2, 4)]
    assert any(len(set(group)) > 1 for group in within)  # devices of different degree, one size


def test_e_the_silo_reads_sums_of_raw_features(published: Recorded, hardened: Recorded) -> None:
    (sums,) = [published.config.from_wire(m.rows) for s, m in published.sent(FIRST, CodedSums)][:1]
    where, truth = published.where(FIRST), np.zeros((published.where(FIRST).count, WIDTH), np.uint64)
    for peer, pair in where.pairs.items():
        sources = published.raw(peer)[published.where(peer).pairs[FIRST].source]
        truth = published.sums.field.add(truth, published.sums.field.segment_sum(sources, pair.target, where.count))
    assert score_elements(published.sums.code.decode(sums), truth, "silo", "e").exact

    assert not {CodedSums, ShareRows} & hardened.kinds(FIRST)  # no share of the target's ever reaches its silo
    holder: Any = hardened.experiment.engine.party(SECOND).client
    held = hardened.sums.held(
        holder.state.keys[FIRST].numpy(), holder.state.sizes[FIRST].numpy(), 200, Exchange(9, 1).nonce()
    )
    assert uniformity(held, P61) > 1e-6
    truth_rows = {row.tobytes() for row in truth}
    assert not truth_rows & {np.ascontiguousarray(row[:WIDTH]).tobytes() for row in held}


def test_f_asking_for_mu_tells_of_edges(scenario: Scenario, published: Recorded, hardened: Recorded) -> None:
    asked = {sender: set(message.devices.tolist()) for sender, message in published.sent(FIRST, MaskRequest)}
    for other in ("client-1", "client-2"):
        part = scenario.parts[other]
        assert part.cross is not None
        into = part.cross.owner == part.cross.owners.index(FIRST)
        assert asked[f"{other}/devices"] == set(
            part.node_id[part.cross.own[into]].tolist()
        )  # exactly who has a neighbour here

    assert MaskRequest not in hardened.kinds(FIRST)
    # As a holder it is written to by the devices of one other silo only, all of them at once.
    assert {sender for sender, _ in hardened.sent(FIRST, SlotKeys)} == {f"{THIRD}/devices"}


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_nobody_ever_holds_all_shares_of_a_message(scenario: Scenario, tmp_path: Path, threshold: int) -> None:
    run = Recorded(scenario, tmp_path / "run", secmp="hardened", threshold=threshold)
    held = {"server": run.experiment.loop.state.keys}  # type: ignore[attr-defined]
    for silo in scenario.parts:
        devices, own = run.kinds(f"{silo}/devices"), run.kinds(silo)
        assert ShareRows in devices and not {SlotKeys, CodedRows} & devices  # share 1, and sums of the others
        assert not {ShareRows, HeldSums, EdgeKeys} & own
        holder: Any = run.experiment.engine.party(silo).client
        held[silo] = holder.state.keys
        assert silo not in holder.state.keys  # no share of what its own devices receive
    for silo in scenario.parts:
        rows = [{row.tobytes() for row in keys[silo].numpy()} for keys in held.values() if silo in keys]
        assert len(rows) == threshold and len(set.union(*rows)) == sum(map(len, rows))  # one share each


def test_keys_of_a_run_are_all_different(hardened: Recorded) -> None:
    keys = []
    for silo in hardened.experiment.engine.parties("client"):
        client: Any = hardened.experiment.engine.party(f"{silo}/devices").client
        keys += [part.reshape(-1, 32) for part in (client.state.keys, client.state.padding)]
        holder: Any = hardened.experiment.engine.party(silo).client
        assert all(part.shape[0] == int(holder.state.sizes[of].sum()) for of, part in holder.state.keys.items())
    everything = torch.cat(keys)
    assert torch.unique(everything, dim=0).shape[0] == everything.shape[0]


# -- what one organisation's process holds ---------------------------------------------------------


def opened_by(run: Recorded, organisations: Sequence[str], victim: str) -> tuple[int, int]:
    """Messages of foreign devices to devices of ``victim`` that these parties open together from what their processes
    hold, and how many there are. Devices and silo of an organisation are one process.
    """
    client: Any = run.experiment.engine.party(f"{victim}/devices").client
    held: dict[str, Any] = {"server": run.experiment.loop.state}  # type: ignore[attr-defined]
    held |= {silo: run.experiment.engine.party(silo).client.state for silo in run.experiment.engine.parties("client")}
    keys = [held[name].keys[victim].numpy() if name in organisations else None for name in client.state.holders]
    sizes = next(held[name].sizes[victim].numpy() for name in client.state.holders)  # known to the victim itself
    slots = Slots(client.state.handle.numpy(), sizes, keys)
    right = total = 0
    for peer, pair in client.where.pairs.items():
        if peer == victim:
            continue
        sent = next(m.rows for sender, m in run.sent(f"{victim}/devices", ShareRows) if sender == f"{peer}/devices")
        truth = run.raw(peer)[run.where(peer).pairs[victim].source]
        width = run.config.plan(client.data.num_features, client.data.num_classes).raw[0]
        opened, found = open_with_keys(run.sums, run.config.from_wire(sent), pair.target, slots, Exchange(0, 1).nonce())
        right += int((found & (opened == truth[:, :width]).all(1)).sum())
        total += pair.count
    return right, total


def own_silo_holds(config: Any, silo: str, silos: Sequence[str]) -> tuple[str, ...]:
    """Share holders as they were: with T = 1 the silo of the target alone."""
    others = [name for name in sorted(silos) if name != silo]
    return tuple([silo, "server", *others][: config.holders(len(silos))])


def test_one_organisation_opens_what_it_receives_only_if_its_own_silo_holds_the_share(
    scenario: Scenario, hardened: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for silo in scenario.parts:
        right, total = opened_by(hardened, [silo], silo)
        assert total > 100 and right == 0
    monkeypatch.setattr("isthmus.methods.hifgl.hardened.share_holders", own_silo_holds)
    monkeypatch.setattr("isthmus.methods.hifgl.hardened.holder_roles", lambda config, silos: ("client",))
    before = Recorded(scenario, tmp_path / "run", secmp="hardened", threshold=1)
    for silo in scenario.parts:
        right, total = opened_by(before, [silo], silo)
        assert right == total > 100


def test_it_takes_the_organisation_and_all_its_share_holders(hardened: Recorded) -> None:
    """The attack works, the keys are what is missing: server and one other silo help, either alone does not."""
    holders = hardened.experiment.engine.party(f"{FIRST}/devices").client.state.holders  # type: ignore[attr-defined]
    assert holders == ("server", SECOND)
    for helpers in ([], ["server"], [SECOND], [THIRD], ["server", THIRD]):
        assert opened_by(hardened, [FIRST, *helpers], FIRST)[0] == 0
    right, total = opened_by(hardened, [FIRST, "server", SECOND], FIRST)
    assert right == total


def test_devices_of_few_foreign_neighbours_are_sent_sharings_of_zero(scenario: Scenario, tmp_path: Path) -> None:
    """Not the receiver's self-discipline: even all shares together hold nothing."""
    run = Recorded(scenario, tmp_path / "run", secmp="hardened", one_neighbour="drop", k_min=4)
    client: Any = run.experiment.engine.party(f"{FIRST}/devices").client
    foreign = client.arrivals[0].foreign
    sizes = next(state.sizes[FIRST] for state in [run.experiment.loop.state])  # type: ignore[attr-defined]
    keys = [run.experiment.loop.state.keys[FIRST].numpy()]  # type: ignore[attr-defined]
    keys.append(run.experiment.engine.party(SECOND).client.state.keys[FIRST].numpy())  # type: ignore[attr-defined]
    slots = Slots(client.state.handle.numpy(), sizes.numpy(), keys)
    for peer in (SECOND, THIRD):
        pair = client.where.pairs[peer]
        sent = next(m.rows for sender, m in run.sent(f"{FIRST}/devices", ShareRows) if sender == f"{peer}/devices")
        opened, found = open_with_keys(run.sums, run.config.from_wire(sent), pair.target, slots, Exchange(0, 1).nonce())
        assert found.all() and (~foreign[pair.target]).any() and foreign[pair.target].any()
        assert np.array_equal(opened.any(axis=1), foreign[pair.target])


def test_an_exchange_is_answered_once_and_after_a_rollback_only_with_the_same_values() -> None:
    driver = Driver(small(), secmp="hardened")
    client: Any = driver.devices(FIRST)
    driver.differentiate()
    order = Pass(1, 2, False, False, 0, 3)
    client.scratch.awaited, client.scratch.outgoing = None, torch.ones(client.where.count, 3, dtype=torch.float64)
    with pytest.raises(ProtocolError, match="a second time"):
        client.send_shares(order)
    party: Any = driver.experiment.engine.party(f"{FIRST}/devices")
    party.commit(1)
    party.rollback(1)  # a server that sends other weights the second time
    again: Any = driver.devices(FIRST)
    assert again is not client
    again.start(iter([torch.ones(again.where.count, 3, dtype=torch.float64)]))
    with pytest.raises(ProtocolError, match="a second time, which would show what changed"):
        again.send_shares(order)
    again.start(
        iter(
            [
                client.scratch.model.graph.source
                * (client.scratch.model.inputs[2] @ client.scratch.model.weights["layers.1.weight"])
            ]
        )
    )
    assert again.send_shares(order)  # the same values: an honest repetition


def test_foreign_rows_that_sums_determine() -> None:
    """The rank test against elimination by hand, and what counting foreign neighbours is worth."""
    sums = sp.csr_matrix(np.array([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0]]))
    found = determined_by_sums(sums)  # an odd cycle: half of (a + b) - (b + c) + (a + c)
    assert found.unknowns.tolist() == [True, True, True, False] and found.rank == 3
    even = sp.csr_matrix(np.array([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]]))
    assert not determined_by_sums(even).unknowns.any() and determined_by_sums(even).rank == 3
    generator = np.random.default_rng(3)
    for _ in range(20):
        matrix = (generator.random((7, 9)) < 0.3).astype(float)
        basis = units_in_row_space(matrix)
        assert determined_by_sums(sp.csr_matrix(matrix)).unknowns.tolist() == basis


def units_in_row_space(matrix: np.ndarray) -> list[bool]:
    """Which unit vectors do not raise the rank."""
    rank = np.linalg.matrix_rank(matrix)
    return [np.linalg.matrix_rank(np.vstack([matrix, unit])) == rank for unit in np.eye(matrix.shape[1])]


# -- gradients (property 14) -----------------------------------------------------------------------


def device_gradients(driver: Driver, silo: str) -> list[dict[str, torch.Tensor]]:
    """What every labelled device of a silo would send by itself: its own rows of the pass."""
    model: ModelPass = driver.devices(silo).scratch.model
    first = dense(model.sums[1])
    return [
        {"weight": torch.outer(first[u], model.deltas[1][u]), "bias": model.deltas[1][u], "out": model.deltas[2][u]}
        for u in range(first.shape[0])
    ]


def test_a_single_devices_gradient_is_its_input_and_a_masked_one_is_noise() -> None:
    driver = Driver(small(), secmp="hardened", hidden=(40,))
    driver.differentiate()
    model: ModelPass = driver.devices(FIRST).scratch.model
    singles = device_gradients(driver, FIRST)
    inputs = dense(model.sums[1])
    labelled = [u for u in range(len(singles)) if bool(singles[u]["bias"].abs().max() > 0)]
    for u in labelled[:5]:  # s = grad W / grad b: the sum of its neighbours' raw features, and its own
        found = inputs_from_linear_gradient(singles[u]["weight"].T.numpy(), singles[u]["bias"].numpy())
        assert found.exact and found.score(inputs[u].numpy(), "silo").exact
    data = driver.devices(FIRST).data
    signs = labels_from_signs(torch.stack([single["out"] for single in singles]).numpy())
    assert np.array_equal(signs.labels[data.train.numpy()], data.y[data.train].numpy())

    # Together, behind masks: single uploads are uniform, the sum is what the silo gets, and it is of no single device.
    cohort = {f"device-{u}": SumParty(f"device-{u}") for u in range(len(singles))}
    roster, tag = SumRoster({name: party.public_key for name, party in cohort.items()}), SumTag("run", "train", 1, 1)
    leaves = [[single["weight"], single["bias"]] for single in singles]
    masked = {name: party.mask(part, roster, tag) for (name, party), part in zip(cohort.items(), leaves, strict=True)}
    assert uniformity(np.concatenate(list(masked.values()))) > 1e-6
    total: Any = unmask_total(masked, roster, tag, template_of_leaves(leaves[0]))
    for name, tensor in (("weight", total[0]), ("bias", total[1])):
        torch.testing.assert_close(tensor, model.gradients[f"layers.0.{name}"], atol=1e-6, rtol=0)
    found = inputs_from_linear_gradient(total[0].T.numpy(), total[1].numpy())
    assert not found.exact and all(found.score(inputs[u].numpy(), "silo").recall < 0.9 for u in labelled)
    pair = inputs_from_linear_gradient(
        (singles[labelled[0]]["weight"] + singles[labelled[1]]["weight"]).T.numpy(),
        (singles[labelled[0]]["bias"] + singles[labelled[1]]["bias"]).numpy(),
    )
    assert not pair.exact  # a cohort of two is enough
