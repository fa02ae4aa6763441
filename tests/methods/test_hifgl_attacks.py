"""The attacks of the spec (11.2 a to f, 11.5) on what parties of a run were really sent: all succeed against the
published protocol, none against the hardened one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hifgl_helpers import Driver, small
from secure_sums import unmask_total

from isthmus.data.scenario import Scenario
from isthmus.experiments.config import resolve
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.run import SimulatedRun
from isthmus.federation.messages import Message
from isthmus.federation.transcript import received
from isthmus.methods.hifgl.algorithm import ModelPass
from isthmus.methods.hifgl.hardened import EdgeKeys, HeldSums, ShareRows, SlotBoxes
from isthmus.methods.hifgl.layers import dense
from isthmus.methods.hifgl.published import CodedRows, CodedSums, MaskRequest, Masks
from isthmus.privacy.anonymous_seal import BoxHolder
from isthmus.privacy.attacks.gradients import inputs_from_linear_gradient
from isthmus.privacy.attacks.labels import labels_from_signs
from isthmus.privacy.attacks.shares import (
    degree_from_sums,
    open_with_all_shares,
    open_with_known_neighbour,
    open_with_masks,
    score_elements,
)
from isthmus.privacy.attacks.uniform import uniformity
from isthmus.privacy.chacha import expand
from isthmus.privacy.field import P61
from isthmus.privacy.flatten import template_of_leaves
from isthmus.privacy.masks import SumParty, SumRoster, SumTag
from isthmus.privacy.secmp import Exchange

FIRST, SECOND = "client-0", "client-1"
WIDTH = 64


class Recorded:
    """A run with a transcript: what every party was sent in setup."""

    def __init__(self, scenario: Scenario, folder: Path, **settings: Any) -> None:
        given = {
            "dataset": "csbm",
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
        self.config, self.sums = config, config.sums
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
    sums = hardened.config.from_wire(
        next(m.rows for sender, m in hardened.sent(f"{FIRST}/devices", HeldSums) if sender == FIRST)
    )
    handle = hardened.experiment.engine.party(f"{FIRST}/devices").client.state.handle.numpy()
    target = hardened.where(FIRST).pairs[SECOND].target
    tried = hardened.sums.code.decode(
        np.stack([shares, sums[handle[target]][:, :WIDTH]])
    )  # the best it can do: one share, and a sum
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

    # Hardened: nobody is given masks. The silo can make its own share of every message, and needs the target's to open
    # one.
    assert Masks not in hardened.kinds(f"{SECOND}/devices") | hardened.kinds(f"{FIRST}/devices")
    assert not {ShareRows, CodedRows, EdgeKeys} & hardened.kinds(FIRST)
    silo: Any = hardened.experiment.engine.party(FIRST).client
    own = expand(hardened.sums.field, silo.state.keys[FIRST].numpy(), Exchange(0, 1).nonce(), WIDTH)
    assert uniformity(own, P61) > 1e-6
    # And the target cannot open the boxes it passes on.
    boxes = first_from(hardened, EdgeKeys).boxes.numpy()
    with pytest.raises(Exception, match="another holder"):
        BoxHolder(b"isthmus/hifgl/client-0").open(boxes[:, 0])


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
    (boxes,) = [message for _, message in hardened.sent(FIRST, SlotBoxes)]
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
    silo: Any = hardened.experiment.engine.party(FIRST).client
    held = hardened.sums.held(
        silo.state.keys[FIRST].numpy(), silo.state.sizes[FIRST].numpy(), 200, Exchange(9, 1).nonce()
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
    assert {sender for sender, _ in hardened.sent(FIRST, SlotBoxes)} == {
        f"{FIRST}/devices"
    }  # nothing comes from foreign devices


@pytest.mark.parametrize("threshold", [1, 2])
def test_nobody_ever_holds_all_shares_of_a_message(scenario: Scenario, tmp_path: Path, threshold: int) -> None:
    run = Recorded(scenario, tmp_path / "run", secmp="hardened", threshold=threshold)
    for silo in scenario.parts:
        devices, own = run.kinds(f"{silo}/devices"), run.kinds(silo)
        assert ShareRows in devices and not {SlotBoxes, CodedRows} & devices  # share 1, and sums of the others
        assert not {ShareRows, HeldSums, EdgeKeys} & own
        holder: Any = run.experiment.engine.party(silo).client
        assert set(holder.state.keys) == {silo}  # one share of each message to its own devices
    kept: Any = run.experiment.loop.state
    assert set(kept.keys) == (set(scenario.parts) if threshold == 2 else set())
    for silo, keys in kept.keys.items():
        mine: Any = run.experiment.engine.party(silo).client
        assert not {row.tobytes() for row in keys.numpy()} & {row.tobytes() for row in mine.state.keys[silo].numpy()}


def test_keys_of_a_run_are_all_different(hardened: Recorded) -> None:
    keys = []
    for silo in ("client-0", "client-1", "client-2"):
        client: Any = hardened.experiment.engine.party(f"{silo}/devices").client
        keys += [part.reshape(-1, 32) for part in (client.state.keys, client.state.padding)]
        holder: Any = hardened.experiment.engine.party(silo).client
        assert holder.state.keys[silo].shape[0] == int(holder.state.sizes[silo].sum())
    everything = torch.cat(keys)
    assert torch.unique(everything, dim=0).shape[0] == everything.shape[0]


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
