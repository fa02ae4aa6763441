"""Sparse sums over an announced support."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from secure_sums import unmask_total

from isthmus.errors import ConfigError, ProtocolError
from isthmus.privacy.attacks.structure import entries_from_support
from isthmus.privacy.flatten import error_bound, template_of_leaves
from isthmus.privacy.masks import SumParty, SumRoster, SumTag
from isthmus.privacy.sparse import announce, place, union_support

TAG = SumTag("run", "hop", 2, 1, "products", receiver="client-9")


def test_sparse_sum_equals_the_dense_sum() -> None:
    generator = np.random.default_rng(0)
    size, parties = 5000, {f"client-{i}": SumParty(f"client-{i}") for i in range(4)}
    positions = {name: generator.choice(size, 60) for name in parties}  # repetitions add up
    values = {name: generator.normal(size=60) for name in parties}
    support = union_support([announce(own, size) for own in positions.values()], size)
    roster = SumRoster({name: party.public_key for name, party in parties.items()})
    masked = {
        name: party.mask([torch.from_numpy(place(positions[name], values[name], support))], roster, TAG)
        for name, party in parties.items()
    }
    template = template_of_leaves([torch.zeros(support.size, dtype=torch.float64)])
    total = unmask_total(masked, roster, TAG, template)[0]
    dense = np.zeros(size)
    for name in parties:
        np.add.at(dense, positions[name], values[name])
    assert np.abs(np.asarray(total) - dense[support]).max() <= error_bound(4) + 1e-12
    assert not np.delete(dense, support).any()


@pytest.mark.parametrize(("count", "size"), ((0, 100), (1, 100), (60, 5000), (60, 130), (100, 100), (50, 60)))
@pytest.mark.parametrize("dummies", (0.0, 0.5, 1.0, 3.0))
def test_announcements(count: int, size: int, dummies: float) -> None:
    own = np.random.default_rng(1).choice(size, count, replace=False)
    announced = announce(own, size, dummies)
    assert np.array_equal(announced, np.unique(announced)) and np.isin(own, announced).all()
    assert announced.size >= min(size, count * (1 + dummies)) and (announced < size).all() and (announced >= 0).all()
    if dummies:
        assert (
            announced.size == size or announced.size & (announced.size - 1) == 0
        )  # the number tells a power of two only
        assert announced.size >= 2


def test_dummies_hide_entries() -> None:
    own = np.arange(100)
    bare = entries_from_support(announce(own, 10_000, 0), own, "server")
    hidden = entries_from_support(announce(own, 10_000, 3), own, "server")
    assert bare.exact and hidden.recall == 1.0 and hidden.precision <= 0.25
    assert not np.array_equal(announce(own, 10_000), announce(own, 10_000))


def test_bad_positions_are_refused() -> None:
    for bad in (np.array([5]), np.array([-1]), np.array([1.0]), np.array([[1]])):
        with pytest.raises(ProtocolError):
            announce(bad, 5)
        with pytest.raises(ProtocolError):
            union_support([np.array([1]), bad], 5)
    with pytest.raises(ConfigError):
        announce(np.array([1]), 5, -1.0)
    for support in (np.array([1, 3]), np.empty(0, np.int64)):
        with pytest.raises(ProtocolError, match="lacks"):
            place(np.array([1, 2]), np.ones(2), support)
    assert union_support([], 5).size == 0 and place(np.empty(0, np.int64), np.empty(0), np.array([1])).tolist() == [0.0]
