"""The attacks themselves: exact where they should be, and honest about it."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import nn

from isthmus.privacy.attacks import Recovery
from isthmus.privacy.attacks.gradients import inputs_from_linear_gradient
from isthmus.privacy.attacks.labels import labels_from_embedding_gradient, labels_from_signs
from isthmus.privacy.attacks.membership import guess_members, membership_by_loss, score_guesses
from isthmus.privacy.attacks.structure import neighbours_from_hop_products
from isthmus.privacy.attacks.sums import difference_of_sums, difference_under_one_mask
from isthmus.privacy.attacks.uniform import uniformity


def test_recovery() -> None:
    some = Recovery("x", "server", claimed=4, correct=3, of=6)
    assert (some.recall, some.precision, some.exact) == (0.5, 0.75, False)
    assert Recovery("x", "server", 3, 3, 3).exact and not Recovery("x", "server", 0, 0, 0).exact
    assert some.to_json() == {
        "attack": "x",
        "party": "server",
        "claimed": 4,
        "correct": 3,
        "of": 6,
        "recall": 0.5,
        "precision": 0.75,
        "exact": False,
    }


def test_input_is_read_from_a_real_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(1, 20)
    nn.functional.cross_entropy(model(x), torch.tensor([2])).backward()
    layer = model[0]
    found = inputs_from_linear_gradient(layer.weight.grad.numpy(), layer.bias.grad.numpy())
    assert found.exact and found.score(x[0].numpy(), "server").exact
    nothing = inputs_from_linear_gradient(np.zeros((3, 4)), np.zeros(3))
    assert not nothing.exact and not nothing.values.any()
    with pytest.raises(ValueError, match="one linear layer"):
        inputs_from_linear_gradient(np.zeros((3, 4)), np.zeros(4))


def test_labels_are_read_from_gradients_of_embeddings() -> None:
    torch.manual_seed(0)
    z, output = torch.randn(50, 16, requires_grad=True), nn.Linear(16, 7)
    labels = torch.randint(0, 7, (50,))
    train = torch.rand(50) < 0.4
    nn.functional.cross_entropy(output(z)[train], labels[train]).backward()
    assert z.grad is not None
    found = labels_from_embedding_gradient(z.grad.numpy(), output.weight.detach().numpy())
    truth = torch.where(train, labels, -1).numpy()
    assert found.score(truth, "server").exact and np.array_equal(found.labels, truth)  # who is labelled, and how
    assert np.array_equal(found.certain, train.numpy())
    # An output layer with fewer columns than classes cannot be inverted, and the attack says so.
    narrow = labels_from_embedding_gradient(z.grad.numpy()[:, :4], output.weight.detach().numpy()[:, :4])
    assert narrow.certain.mean() < 0.2


def test_labels_from_signs() -> None:
    rows = np.array([[0.1, -0.3, 0.2], [0.0, 0.0, 0.0], [-0.1, -0.1, 0.2], [5.0, 5.0, -10.0]])
    found = labels_from_signs(rows)
    assert found.labels.tolist() == [1, -1, 0, 2] and found.certain.tolist() == [True, False, False, True]


def test_membership() -> None:
    clear = membership_by_loss(np.array([0.1, 0.2]), np.array([0.9, 1.0]))
    assert (clear.auc, clear.advantage, clear.threshold) == (1.0, 1.0, 0.2)
    none = membership_by_loss(np.ones(5), np.ones(7))
    assert (none.auc, none.advantage) == (0.5, 0.0)
    mixed = membership_by_loss(np.array([1.0, 3.0]), np.array([2.0, 3.0]))
    assert mixed.auc == pytest.approx((1 + 1 + 0 + 0.5) / 4) and mixed.advantage == 0.5
    guessed = guess_members(np.array([0.1, 0.5, 0.9]), 0.5)
    assert score_guesses(guessed, np.array([True, False, True]), "server") == Recovery(
        "membership_by_loss", "server", 2, 1, 2
    )
    for bad in (np.empty(0), np.array([np.nan])):
        with pytest.raises(ValueError):
            membership_by_loss(bad, np.ones(2))


def test_difference_of_sums_finds_all_that_can_be_found() -> None:
    values = {name: np.random.default_rng(i).normal(size=(2, 3)) for i, name in enumerate("abcde")}

    def total(roster: str) -> tuple[str, np.ndarray]:
        return roster, np.sum([values[name] for name in roster], axis=0)

    found = difference_of_sums([total("abc"), total("ab")])
    assert set(found) == {"c"} and np.allclose(found["c"], values["c"]) and found["c"].shape == (2, 3)
    assert set(difference_of_sums([total("ab"), total("bc"), total("ac")])) == {"a", "b", "c"}
    assert difference_of_sums([total("abcde"), total("ab"), total("bc")]) == {}
    assert difference_of_sums([]) == {}


def test_reused_masks_are_recognised() -> None:
    mask = np.random.default_rng(0).integers(0, 2**64, 64, dtype=np.uint64)
    fresh = np.random.default_rng(1).integers(0, 2**64, 64, dtype=np.uint64)
    number = np.full(64, 3 << 32, np.uint64)
    assert difference_under_one_mask(mask - number, mask, 32).values.tolist() == [-3.0] * 64
    assert (
        difference_under_one_mask(mask - number, mask, 32).plausible
        and not difference_under_one_mask(fresh, mask, 32).plausible
    )


def test_peeling_reads_more_lists() -> None:
    # Own nodes 0, 1; foreign 2, 3, 4 with edges 2-3, 3-4, 0-2, 1-2, 1-3.
    adjacency = np.zeros((5, 5))
    for a, b in ((2, 3), (3, 4), (0, 2), (1, 2), (1, 3)):
        adjacency[a, b] = adjacency[b, a] = 1
    looped = adjacency + np.eye(5)
    walk = looped / looped.sum(1, keepdims=True)
    own, foreign = [0, 1], np.array([2, 3, 4])
    products = adjacency[np.ix_(own, foreign)] @ walk[foreign]
    args = sp.csr_matrix(adjacency[np.ix_(own, foreign)]), sp.csr_matrix(products.astype(np.float32)), foreign
    plain = neighbours_from_hop_products(*args, peel=False)
    assert {node: found.tolist() for node, found in plain.neighbours.items()} == {2: [0, 1, 3]}
    peeled = neighbours_from_hop_products(*args)
    assert {node: found.tolist() for node, found in peeled.neighbours.items()} == {2: [0, 1, 3], 3: [1, 2, 4]}
    assert peeled.edges() == {(0, 2), (1, 2), (2, 3), (1, 3), (3, 4)}


def test_uniformity_can_fail() -> None:
    generator = np.random.default_rng(0)
    for modulus in (11, 2**31 - 1, 2**61 - 1, 2**64):
        values = generator.integers(0, modulus, 50_000, dtype=np.uint64)
        assert uniformity(values, modulus) > 1e-6
        assert uniformity(np.minimum(values, np.uint64(modulus // 2)), modulus) < 1e-6
    even = generator.integers(0, 2**64, 50_000, dtype=np.uint64) & np.uint64(2**64 - 2)
    assert uniformity(even) < 1e-6
    with pytest.raises(ValueError, match="at least"):
        uniformity(np.zeros(10, np.uint64))
