"""Keys of messages through somebody who must not learn them: both ends derive the same, nothing else opens, and what a
holder could link."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import ProtocolError
from isthmus.privacy.edge_keys import GROUP, KeyGroups, KeyHolder, deal_groups, joined_groups, make_keys


def passed_on(groups: KeyGroups, holder: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return groups.group, groups.number, groups.public, groups.proof[:, holder]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 300), st.integers(1, 3), st.integers(0, 2**32))
def test_both_ends_have_the_same_keys_and_all_differ(messages: int, threshold: int, seed: int) -> None:
    target = np.random.default_rng(seed).integers(0, 40, messages)
    holders = [KeyHolder(f"holder {j}".encode()) for j in range(threshold)]
    keys, groups = make_keys([(holder.public, holder.context) for holder in holders], target)
    assert keys.shape == (messages, threshold, 32)
    for j, holder in enumerate(holders):
        assert np.array_equal(holder.keys(*passed_on(groups, j)), keys[:, j])
    assert len({key.tobytes() for key in keys.reshape(-1, 32)}) == messages * threshold


def test_only_the_holder_it_was_made_for_gets_the_keys_and_only_once() -> None:
    holder, stranger = KeyHolder(b"here"), KeyHolder(b"here")
    target = np.arange(50)

    def made(context: bytes = b"here") -> KeyGroups:
        return make_keys([(holder.public, context)], target)[1]

    groups = made()
    holder.keys(*passed_on(groups))
    with pytest.raises(ProtocolError, match="arrived twice"):
        holder.keys(*passed_on(groups))
    with pytest.raises(ProtocolError, match="another holder"):
        stranger.keys(*passed_on(made()))
    with pytest.raises(ProtocolError, match="another holder"):
        holder.keys(*passed_on(made(b"elsewhere")))
    for name in ("public", "proof"):
        groups = made()
        getattr(groups, name)[1].flat[3] ^= 1
        with pytest.raises(ProtocolError, match="changed on their way"):
            holder.keys(*passed_on(groups))
    groups = made()
    for changed, words in (
        (replace(groups, group=groups.group + len(groups.public)), "not passed on"),
        (replace(groups, number=groups.number - 1000), "not passed on"),
        (replace(groups, group=groups.group * 0, number=groups.number * 0), "passed on twice"),
        (replace(groups, public=groups.public[:, :31]), "32 bytes"),
        (replace(groups, public=groups.public * 0), "arrived twice|not a usable"),
    ):
        with pytest.raises(ProtocolError, match=words):
            holder.keys(*passed_on(changed))
    with pytest.raises(ProtocolError, match="not a usable"):
        make_keys([(bytes(32), b"")], target)


def test_a_holder_links_messages_of_a_group_and_no_more() -> None:
    """Groups have random sizes around the mean whoever makes them, no target twice, and an order that tells nothing."""
    target = np.repeat(np.arange(500), 6)
    group, number = deal_groups(target)
    sizes = np.bincount(group)
    assert len(sizes) == -(-3000 // GROUP) and sizes.min() < GROUP < sizes.max()
    assert len({(t, g) for t, g in zip(target, group, strict=True)}) == 3000  # a target's messages are in groups apart
    assert all(np.array_equal(np.sort(number[group == g]), np.arange(size)) for g, size in enumerate(sizes[:20]))
    holder = KeyHolder(b"x")
    made = [make_keys([(holder.public, holder.context)], np.arange(320)) for _ in range(3)]
    together = joined_groups([groups for _, groups in made])
    assert np.array_equal(holder.keys(*passed_on(together)), np.concatenate([keys[:, 0] for keys, _ in made]))
    sender = np.repeat(np.arange(3), 320)
    first = [int(together.group[sender == each].min()) for each in range(3)]
    assert max(first) < len(together.public) // 3  # a sender's groups are spread over all of them


def test_a_target_with_more_messages_than_groups_still_gets_its_keys() -> None:
    group, number = deal_groups(np.zeros(40, np.int64))
    assert len(group) == len({pair for pair in zip(group, number, strict=True)}) == 40
