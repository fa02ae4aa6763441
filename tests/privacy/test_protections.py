"""Every protection: the attack succeeds without it and fails with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from secure_sums import unmask_total
from torch import Tensor

from isthmus.errors import ProtocolError
from isthmus.privacy.attacks.gradients import inputs_from_linear_gradient
from isthmus.privacy.attacks.labels import labels_from_embedding_gradient, labels_from_signs
from isthmus.privacy.attacks.membership import Membership, membership_by_loss
from isthmus.privacy.attacks.relay import Impersonator, Relay
from isthmus.privacy.attacks.shares import (
    degree_from_sums,
    open_with_all_shares,
    open_with_known_neighbour,
    open_with_masks,
    score_elements,
)
from isthmus.privacy.attacks.structure import neighbours_from_hop_products
from isthmus.privacy.attacks.sums import difference_of_sums, score_parties
from isthmus.privacy.attacks.uniform import uniformity
from isthmus.privacy.dp import Mechanism
from isthmus.privacy.field import P61, Field
from isthmus.privacy.flatten import decode_leaves, error_bound, template_of_leaves
from isthmus.privacy.guard import RosterGuard
from isthmus.privacy.keys import Identity, Roster
from isthmus.privacy.lagrange import LagrangeCode
from isthmus.privacy.masks import CHECK_WORDS, SumParty, SumRoster, SumTag
from isthmus.privacy.sealed_message import Envelope, Header, Mailbox

TAG = SumTag("run", "train", 1, 1, "gradient")
Words = np.ndarray[tuple[int], np.dtype[np.uint64]]


def _masked(values: dict[str, list[Tensor]], tag: SumTag = TAG) -> tuple[dict[str, Words], SumRoster]:
    parties = {name: SumParty(name) for name in values}
    roster = SumRoster({name: party.public_key for name, party in parties.items()})
    return {name: party.mask(values[name], roster, tag) for name, party in parties.items()}, roster


def _as_read(words: Words, like: list[Tensor]) -> list[np.ndarray]:
    """What a curious server makes of one upload: it decodes it as if there were no mask."""
    return [np.asarray(leaf) for leaf in decode_leaves(words[:-CHECK_WORDS], template_of_leaves(like), parties=1)]


# -- secure sums -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cohort", (2, 5))
def test_secure_sum_against_the_gradient_of_a_layer(cohort: int) -> None:
    """HiFGL spec, section 12: 14."""
    generator = torch.Generator().manual_seed(cohort)
    inputs = {f"device-{i}": torch.randn(12, generator=generator, dtype=torch.float64) for i in range(cohort)}
    gradients = {}
    for name, s in inputs.items():
        delta = torch.randn(6, generator=generator, dtype=torch.float64)
        gradients[name] = [torch.outer(delta, s), delta]
    for name, (weight, bias) in gradients.items():  # without: every device's input is read
        assert inputs_from_linear_gradient(weight.numpy(), bias.numpy()).score(inputs[name].numpy(), "silo").exact
    masked, roster = _masked(gradients)
    for name, words in masked.items():  # with: uploads are noise
        weight, bias = _as_read(words, gradients[name])
        found = inputs_from_linear_gradient(weight, bias)
        assert not found.exact and found.score(inputs[name].numpy(), "silo").recall < 0.5
    total = [np.asarray(leaf) for leaf in unmask_total(masked, roster, TAG, template_of_leaves(gradients["device-0"]))]
    found = inputs_from_linear_gradient(*total)
    assert not found.exact and all(found.score(s.numpy(), "silo").recall < 0.2 for s in inputs.values())
    plain = [sum(g[k] for g in gradients.values()) for k in range(2)]
    assert np.abs(total[0] - np.asarray(plain[0])).max() <= error_bound(cohort) + 1e-12  # and the sum is right


def test_secure_sum_against_labels_from_signs() -> None:
    """FedStruct spec, section 13.6: rows of dL/dS that one labelled node reaches show its class."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 5, (300,), generator=generator)
    rows = torch.softmax(torch.randn(300, 5, generator=generator), 1) - torch.nn.functional.one_hot(labels, 5)
    assert labels_from_signs(rows.numpy()).score(labels.numpy(), "server").exact
    masked, _ = _masked({"a": [rows], "b": [torch.zeros(300, 5)]})
    found = labels_from_signs(_as_read(masked["a"], [rows])[0])
    assert found.score(labels.numpy(), "server").recall < 0.4  # one in five is chance
    assert found.certain.mean() < 0.05


def test_guard_against_difference_of_sums() -> None:
    values = {name: np.random.default_rng(i).normal(size=20) for i, name in enumerate("abcd")}

    def total(roster: str) -> tuple[str, np.ndarray]:
        return roster, np.sum([values[name] for name in roster], axis=0)

    asked = ["abcd", "abc", "ab", "bcd"]
    stolen = difference_of_sums([total(roster) for roster in asked])
    assert set(stolen) == {"a", "b", "c", "d"} and score_parties(stolen, values, "server").exact
    guard, answered = RosterGuard(), []
    for roster in asked:
        try:
            guard.admit("round-1", roster)
        except ProtocolError:
            continue
        answered.append(total(roster))
    assert [roster for roster, _ in answered] == ["abcd", "ab"] and difference_of_sums(answered) == {}


def test_guard_protects_in_every_order() -> None:
    generator = np.random.default_rng(0)
    values = {name: generator.normal(size=3) for name in "abcdef"}
    for _ in range(50):
        guard, answered = RosterGuard(), []
        for _ in range(12):
            roster = "".join(name for name in values if generator.random() < 0.5)
            try:
                guard.admit("x", roster)
            except ProtocolError:
                continue
            answered.append((roster, np.sum([values[name] for name in roster], axis=0)))
        assert answered and difference_of_sums(answered) == {}


def test_secure_sum_against_hop_products() -> None:
    """FedStruct spec, section 14: 11."""
    generator = np.random.default_rng(3)
    n = 90
    upper = np.triu(generator.random((n, n)) < 0.035, 1)
    adjacency = (upper | upper.T).astype(np.float64)
    looped = adjacency + np.eye(n)
    walk = looped / looped.sum(1, keepdims=True)
    owner = np.arange(n) % 3
    own = np.flatnonzero(owner == 0)
    truth = {w: np.flatnonzero(adjacency[w]) for w in np.flatnonzero(owner != 0)}
    blocks, single = {}, set()
    for k in (1, 2):
        theirs = np.flatnonzero(owner == k)
        edges = looped[np.ix_(own, theirs)]
        blocks[f"client-{k}"] = torch.from_numpy(edges @ walk[theirs])
        read = neighbours_from_hop_products(
            sp.csr_matrix(edges), sp.csr_matrix(edges @ walk[theirs]), theirs, peel=False
        )
        expected = {int(theirs[row.argmax()]) for row in edges if row.sum() == 1}
        single |= expected
        assert set(read.neighbours) == expected  # every one of them, exactly
        assert read.score(truth, "client-0").correct == len(expected) > 5
    # Masked: one block tells nothing ...
    masked, roster = _masked({name: [block] for name, block in blocks.items()}, replace(TAG, receiver="client-0"))
    foreign = np.flatnonzero(owner != 0)
    for k in (1, 2):
        theirs = np.flatnonzero(owner == k)
        block = _as_read(masked[f"client-{k}"], [blocks[f"client-{k}"]])[0]
        assert not neighbours_from_hop_products(
            sp.csr_matrix(looped[np.ix_(own, theirs)]), sp.csr_matrix(block), theirs
        ).neighbours
    # ... and the sum only what 13.1 (c) says it must: nodes that are the only foreign neighbour of an own node.
    total = np.asarray(
        unmask_total(masked, roster, replace(TAG, receiver="client-0"), template_of_leaves([blocks["client-1"]]))[0]
    )
    total[np.abs(total) < 1e-9] = 0
    edges = looped[np.ix_(own, foreign)]
    left = neighbours_from_hop_products(sp.csr_matrix(edges), sp.csr_matrix(total), foreign, peel=False)
    assert set(left.neighbours) == {int(foreign[row.argmax()]) for row in edges if row.sum() == 1} < single


def test_masked_blocks_are_uniform() -> None:
    masked, _ = _masked({"a": [torch.zeros(100, 100)], "b": [torch.ones(100, 100)]})
    assert all(uniformity(words) > 1e-6 for words in masked.values())


# -- shares ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", (1, 2))
def test_fresh_masks_against_the_published_protocol(threshold: int) -> None:
    """HiFGL spec, section 11.2a-d: common masks and all shares for the target (literal), fresh masks and one share each
    (hardened).
    """
    field = Field(P61)
    code = LagrangeCode(field, threshold)
    messages, known = field.random((7, 30)), np.zeros(30, np.uint64)
    common = field.random((threshold, 30))
    literal = np.stack([code.encode_with(message, common) for message in messages], axis=1)  # (T + 1, 7, 30)
    hardened = np.stack([code.encode(message) for message in messages], axis=1)
    for shares, opened in ((literal, True), (hardened, False)):
        known_share = code.encode_with(known, common)[0]
        attempts = {
            "open_with_masks": open_with_masks(code, 0, shares[0, 3], common),
            "open_with_known_neighbour": open_with_known_neighbour(code, 0, shares[0, 3], known_share, known),
            "difference": field.add(messages[4], open_with_known_neighbour(code, 0, shares[0, 3], shares[0, 4], known)),
        }
        for attack, found in attempts.items():
            score = score_elements(found, messages[3], "source", attack)
            assert score.exact if opened else score.recall == 0
        summed = np.stack([field.sum(held) for held in shares])
        assert (degree_from_sums(code, summed, common) == 7) is opened
        assert np.array_equal(code.decode(summed), field.sum(messages))  # both compute the sum
    # (a) All T + 1 shares open a message in either protocol: the hardened one gives the target one share of each.
    assert score_elements(
        open_with_all_shares(code, hardened[:, 2]), messages[2], "target", "open_with_all_shares"
    ).exact
    with pytest.raises(ProtocolError, match="missing"):
        open_with_all_shares(code, hardened[:-1, 2])


def test_differences_of_shares_are_uniform_only_with_fresh_masks() -> None:
    field = Field(P61)
    code = LagrangeCode(field, 1)
    v, w = np.full(40_000, 5, np.uint64), np.full(40_000, 3, np.uint64)
    common = field.random((1, 40_000))
    literal = field.sub(code.encode_with(v, common)[0], code.encode_with(w, common)[0])
    assert set(literal.tolist()) == {code.basis(code.alphas[0])[0] * 2 % P61}
    assert uniformity(field.sub(code.encode(v)[0], code.encode(w)[0]), P61) > 1e-6


# -- envelopes and keys ----------------------------------------------------------------------------

MESSAGE = b"embedding of node 17"
HEADER = Header("run", "hop", 1, 0, 1, "a", "b", "send", "Embedding", len(MESSAGE))


def test_sealing_against_a_curious_carrier() -> None:
    a, b = Mailbox("a", "run"), Mailbox("b", "run")
    a.meet(b.announce())
    b.meet(a.announce())
    plain, sealed = Envelope(HEADER, MESSAGE), a.seal(HEADER, MESSAGE)
    assert MESSAGE in plain.body and MESSAGE not in sealed.body
    outsider = Mailbox("b", "run")
    outsider.meet(a.announce())
    with pytest.raises(ProtocolError):
        outsider.open(sealed)
    assert b.open(sealed) == MESSAGE


def test_signatures_against_a_carrier_in_the_middle() -> None:
    a, b = Mailbox("a", "run"), Mailbox("b", "run")  # unsigned
    relay = Relay("run", a.announce(), b.announce())
    a.meet(relay.replace(b.announce()))
    b.meet(relay.replace(a.announce()))
    message, forwarded = relay.read(a.seal(HEADER, MESSAGE))
    assert message == MESSAGE and b.open(forwarded) == MESSAGE  # read, and nobody noticed
    identities = {name: Identity() for name in "ab"}
    roster = Roster("run", {name: identity.public for name, identity in identities.items()})
    a, b = (Mailbox(name, "run", identities[name], roster) for name in "ab")
    relay = Relay("run", a.announce(), b.announce())
    with pytest.raises(ProtocolError, match="did not sign"):
        a.meet(relay.replace(b.announce()))
    a.meet(b.announce())
    with pytest.raises(ProtocolError):
        relay.read(a.seal(HEADER, MESSAGE))


def test_signatures_against_a_server_that_plays_the_others() -> None:
    identities = {name: Identity() for name in "abc"}
    victim = SumParty("a")
    announced = identities["a"].sign("a", "run", victim.public_key)
    impersonator = Impersonator(announced, "bc")
    secret = torch.randn(50, dtype=torch.float64)
    # Unsigned: the victim takes the keys it is given.
    unsigned = SumRoster({signed.party: signed.key for signed in impersonator.announcements()})
    stolen = decode_leaves(
        impersonator.read(victim.mask([secret], unsigned, TAG), TAG), template_of_leaves([secret]), parties=3
    )[0]
    assert float((stolen - secret).abs().max()) <= error_bound(1)
    # Signed: it takes only keys that b and c vouch for, and the impersonator cannot read.
    roster = Roster("run", {name: identity.public for name, identity in identities.items()})
    with pytest.raises(ProtocolError):
        SumRoster.of(impersonator.announcements(), roster)
    keys = [announced, *(identities[name].sign(name, "run", SumParty(name).public_key) for name in "bc")]
    masked = victim.mask([secret], SumRoster.of(keys, roster), replace(TAG, round=2))
    with pytest.raises(ProtocolError, match="do not cancel"):
        impersonator.read(masked, replace(TAG, round=2))
    with pytest.raises(ProtocolError, match="two session keys"):
        SumRoster.of([*keys, announced], roster)


# -- noise -----------------------------------------------------------------------------------------


def test_noise_against_labels_from_gradients() -> None:
    """FedGGR spec, section 11: 9."""
    torch.manual_seed(0)
    z, output = torch.randn(600, 16, requires_grad=True), torch.nn.Linear(16, 7)
    labels, train = torch.randint(0, 7, (600,)), torch.rand(600) < 0.5
    torch.nn.functional.cross_entropy(output(z)[train], labels[train]).backward()
    assert z.grad is not None
    truth, weight = torch.where(train, labels, -1).numpy(), output.weight.detach().numpy()
    assert labels_from_embedding_gradient(z.grad.numpy(), weight).score(truth, "server").exact
    typical = float(z.grad.norm(dim=1)[train].median())
    released, _ = Mechanism(typical, 4.0).release_rows(z.grad)
    found = labels_from_embedding_gradient(released.numpy(), weight)
    assert (found.labels >= 0).all()  # who is labelled is hidden
    assert found.score(truth, "server").recall < 0.35 and found.certain.mean() < 0.05  # one in seven is chance


def test_noise_against_the_gradient_of_a_layer() -> None:
    s, delta = torch.randn(12), torch.randn(6)
    gradient = {"weight": torch.outer(delta, s), "bias": delta}
    assert inputs_from_linear_gradient(gradient["weight"].numpy(), gradient["bias"].numpy()).exact
    released = Mechanism(1.0, 1.0).release_update(gradient).weights
    found = inputs_from_linear_gradient(released["weight"].numpy(), released["bias"].numpy())
    assert not found.exact and found.score(s.numpy(), "server").recall < 0.3


def test_noise_against_membership() -> None:
    """A model with more parameters than records learns random labels by heart, unless gradients are clipped and
    noisy.
    """

    def attack(mechanism: Mechanism | None) -> Membership:
        weight = torch.zeros(400)
        for _ in range(20):
            rows = (torch.sigmoid(x @ weight) - y)[:, None] * x  # gradient per record
            weight = weight - 0.05 * (rows if mechanism is None else mechanism.release_rows(rows)[0]).mean(0)
        losses = [
            torch.nn.functional.binary_cross_entropy_with_logits(a @ weight, b, reduction="none")
            for a, b in ((x, y), (x2, y2))
        ]
        return membership_by_loss(losses[0].numpy(), losses[1].numpy())

    generator = torch.Generator().manual_seed(0)
    x, x2 = torch.randn(300, 400, generator=generator), torch.randn(300, 400, generator=generator)
    y, y2 = (
        torch.randint(0, 2, (300,), generator=generator).float(),
        torch.randint(0, 2, (300,), generator=generator).float(),
    )
    assert attack(None).auc > 0.75  # others' losses are small half of the time by luck
    assert attack(Mechanism(1.0, 20.0)).auc < 0.65
