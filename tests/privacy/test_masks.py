"""Secure sums: equal to the plain sum within the fixed-point bound, uniform upload by upload, never silently wrong."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from secure_sums import unmask_total

from isthmus.errors import ConfigError, ProtocolError, RunError
from isthmus.privacy.attacks.sums import difference_under_one_mask
from isthmus.privacy.attacks.uniform import uniformity
from isthmus.privacy.flatten import Leaf, error_bound, template_of_leaves
from isthmus.privacy.guard import RosterGuard
from isthmus.privacy.masks import CHECK_WORDS, SumParty, SumRoster, SumServer, SumTag

TAG = SumTag("run", "train", round=3, sequence=1, handler="local_update")


def _parties(count: int, **options: int) -> tuple[dict[str, SumParty], SumRoster]:
    parties = {f"client-{i}": SumParty(f"client-{i}", **options) for i in range(count)}
    return parties, SumRoster({name: party.public_key for name, party in parties.items()})


def _message(i: int) -> list[Leaf]:
    generator = torch.Generator().manual_seed(i)
    return [
        torch.randn(40, 7, generator=generator),
        10 + i,
        0.1 * i,
        torch.randn(5, generator=generator, dtype=torch.float64),
    ]


TEMPLATE = template_of_leaves([torch.zeros(40, 7), 1, 1.0])
TEMPLATE = replace(TEMPLATE, leaves=(*TEMPLATE.leaves, ("F64", (5,))))


@pytest.mark.parametrize("count", (2, 3, 10))
@pytest.mark.parametrize("bits", (32, 40))
def test_total_is_the_plain_sum(count: int, bits: int) -> None:
    parties, roster = _parties(count, fraction_bits=bits)
    messages = {name: _message(i) for i, name in enumerate(parties)}
    masked = {name: party.mask(messages[name], roster, TAG) for name, party in parties.items()}
    assert all(words.nbytes == 8 * (TEMPLATE.words + CHECK_WORDS) for words in masked.values())
    weights, number, share, precise = unmask_total(masked, roster, TAG, TEMPLATE, fraction_bits=bits)
    plain = [sum(message[k] for message in messages.values()) for k in range(4)]
    bound = error_bound(count, bits)
    exact = torch.stack([message[0].double() for message in messages.values()]).sum(0)
    assert isinstance(weights, torch.Tensor) and weights.dtype == torch.float32
    assert float((weights.double() - exact).abs().max()) <= bound + 2.0**-24 * float(exact.abs().max())
    assert float((precise - plain[3]).abs().max()) <= bound + 1e-14
    assert number == plain[1] and abs(share - plain[2]) <= bound + 1e-14


def test_every_upload_is_uniform_and_different() -> None:
    parties, roster = _parties(3)
    zeros: list[Leaf] = [torch.zeros(60_000)]
    first = {name: party.mask(zeros, roster, TAG) for name, party in parties.items()}
    assert all(uniformity(words) > 1e-6 for words in first.values())
    assert uniformity(first["client-0"] + first["client-1"]) > 1e-6  # two of three are as blind as one
    assert (
        uniformity(first["client-0"] + first["client-1"] + first["client-2"]) < 1e-6
    )  # all masks cancel: the test can fail
    second = parties["client-0"].mask(zeros, roster, replace(TAG, sequence=2))
    assert uniformity(first["client-0"] - second) > 1e-6


@pytest.mark.parametrize(
    "change",
    (
        {"run": "x"},
        {"phase": "x"},
        {"round": 4},
        {"sequence": 2},
        {"handler": "x"},
        {"attempt": 1},
        {"receiver": "client-9"},
    ),
)
def test_masks_depend_on_every_part_of_the_tag(change: dict[str, int | str]) -> None:
    parties, roster = _parties(2)
    party = parties["client-0"]
    one, other = party.mask([1.5], roster, TAG), party.mask([1.5], roster, replace(TAG, **change))
    assert not (one == other).any()


def test_a_tag_is_masked_once() -> None:
    parties, roster = _parties(2)
    parties["client-0"].mask([1.0], roster, TAG)
    with pytest.raises(ProtocolError, match="never used twice"):
        parties["client-0"].mask([2.0], roster, TAG)


def test_missing_party_is_named() -> None:
    parties, roster = _parties(4)
    masked = {name: party.mask(_message(i), roster, TAG) for i, (name, party) in enumerate(parties.items())}
    del masked["client-2"]
    with pytest.raises(ProtocolError, match="unusable without client-2"):
        unmask_total(masked, roster, TAG, TEMPLATE)
    # A server that leaves the missing party off its roster sees that masks do not cancel.
    smaller = SumRoster({name: key for name, key in roster.keys.items() if name != "client-2"})
    with pytest.raises(ProtocolError, match="do not cancel"):
        unmask_total(masked, smaller, TAG, TEMPLATE)
    with pytest.raises(ProtocolError, match="unusable"):
        SumServer(roster, TAG).total_words()


def test_a_party_with_another_roster_key_or_tag_is_detected() -> None:
    def total(roster_of_first: SumRoster, tag_of_first: SumTag) -> None:
        words = {"client-0": parties["client-0"].mask([1.0, 2], roster_of_first, tag_of_first)}
        words |= {name: parties[name].mask([1.0, 2], roster, TAG) for name in ("client-1", "client-2")}
        unmask_total(words, roster, TAG, template_of_leaves([1.0, 2]))

    parties, roster = _parties(3)
    total(roster, TAG)
    parties, roster = _parties(3)
    with pytest.raises(ProtocolError, match="do not cancel"):
        total(SumRoster({**roster.keys, "client-3": SumParty("client-3").public_key}), TAG)
    parties, roster = _parties(3)
    with pytest.raises(ProtocolError, match="do not cancel"):
        total(SumRoster({**roster.keys, "client-2": SumParty("client-2").public_key}), TAG)
    parties, roster = _parties(3)
    with pytest.raises(ProtocolError, match="do not cancel"):
        total(roster, replace(TAG, attempt=1))


def test_a_changed_word_is_detected() -> None:
    parties, roster = _parties(2)
    masked = {name: party.mask([1.0, 2, torch.ones(50)], roster, TAG) for name, party in parties.items()}
    template = template_of_leaves([1.0, 2])
    template = replace(template, leaves=(*template.leaves, ("F32", (50,))))
    assert unmask_total(masked, roster, TAG, template)[1] == 4
    for position in range(52 + CHECK_WORDS):
        bad = {**masked, "client-1": masked["client-1"].copy()}
        bad["client-1"][position] ^= np.uint64(1 << 63)
        with pytest.raises(ProtocolError, match="do not cancel"):
            unmask_total(bad, roster, TAG, template)


def test_strangers_repeats_and_wrong_shapes_are_refused() -> None:
    parties, roster = _parties(2)
    words = {name: party.mask([1.0], roster, TAG) for name, party in parties.items()}
    server = SumServer(roster, TAG)
    server.add("client-0", words["client-0"])
    with pytest.raises(ProtocolError, match="already sent"):
        server.add("client-0", words["client-0"])
    with pytest.raises(ProtocolError, match="not on the roster"):
        server.add("client-7", words["client-1"])
    with pytest.raises(ProtocolError, match="one shape"):
        server.add("client-1", np.concatenate([words["client-1"], words["client-1"]]))
    with pytest.raises(ProtocolError, match="64-bit words"):
        server.add("client-1", words["client-1"].astype(np.float64))
    server.add("client-1", words["client-1"])
    assert server.total(template_of_leaves([1.0])) == [2.0]


def test_bad_rosters_and_keys_are_refused() -> None:
    parties, roster = _parties(2)
    with pytest.raises(ProtocolError, match="not on the roster"):
        SumParty("client-0").mask([1.0], roster, TAG)  # right name, other key
    with pytest.raises(ProtocolError, match="same session key"):
        SumRoster({"a": bytes(range(32)), "b": bytes(range(32))})
    with pytest.raises(ProtocolError, match="32 bytes"):
        SumRoster({"a": b"short"})
    # A point of low order: everybody would know the secret.
    zero = SumRoster({"client-0": parties["client-0"].public_key, "client-1": bytes(32)})
    with pytest.raises(ProtocolError, match="X25519"):
        parties["client-0"].mask([1.0], zero, TAG)
    with pytest.raises(ProtocolError, match="at least 2"):
        parties["client-1"].mask([1.0], SumRoster({"client-1": parties["client-1"].public_key}), TAG)
    with pytest.raises(ConfigError, match="fractional bits"):
        SumParty("a", fraction_bits=16)


def test_bad_numbers_use_up_no_tag() -> None:
    parties, roster = _parties(2)
    for bad in (float("nan"), float("inf"), 1e12):
        with pytest.raises(RunError):
            parties["client-0"].mask([bad], roster, TAG)
    parties["client-0"].mask([1.0], roster, TAG)


def test_secrets_are_never_serialised() -> None:
    party = SumParty("client-0")
    with pytest.raises(TypeError, match="never serialised"):
        pickle.dumps(party)


def test_mask_reuse_attack_needs_a_reused_mask() -> None:
    """What the tag is for: were it not part of the mask, the change between two rounds would be in the clear."""
    parties, roster = _parties(3)
    before, after = torch.randn(500), torch.randn(500)
    party = parties["client-0"]
    first = party.mask([before], roster, TAG)[:-CHECK_WORDS]
    party._used.clear()  # the party forgets that it has used this tag
    reused = party.mask([after], roster, TAG)[:-CHECK_WORDS]
    found = difference_under_one_mask(reused, first, party.fraction_bits)
    assert found.plausible and np.abs(found.values - (after.double() - before.double()).numpy()).max() < 1e-11
    fresh = party.mask([after], roster, replace(TAG, attempt=1))[:-CHECK_WORDS]
    assert not difference_under_one_mask(fresh, first, party.fraction_bits).plausible


def test_guard_refuses_rosters_that_differ_by_one() -> None:
    guard = RosterGuard()
    guard.admit("train/3", "abcd")
    guard.admit("train/3", "dcba")  # the same again
    guard.admit("train/3", "ab")
    guard.admit("train/4", "abc")  # other content
    for roster in ("abc", "abcde", "abce"[:3]):
        with pytest.raises(ProtocolError, match="differ by"):
            guard.admit("train/3", roster)
    with pytest.raises(ProtocolError, match="at least 2"):
        guard.admit("train/5", "a")
    guard.forget("train/3")
    guard.admit("train/3", "abc")


def test_guard_sees_combinations_of_more_than_two_sums() -> None:
    guard = RosterGuard()
    guard.admit("x", "ab")
    guard.admit("x", "bc")
    with pytest.raises(ProtocolError, match="together reveal"):
        guard.admit("x", "ac")  # (ab + ac - bc) / 2 = a
    guard.admit("x", "abcd")  # d + (c) is still hidden: abcd - ab = cd
    strict = RosterGuard(minimum=3)
    strict.admit("x", "abcd")
    with pytest.raises(ProtocolError, match="differ by"):
        strict.admit("x", "abce")
    with pytest.raises(ConfigError):
        RosterGuard(minimum=1)


def test_parties_guard_themselves_across_attempts() -> None:
    parties, roster = _parties(3)
    smaller = SumRoster({name: key for name, key in roster.keys.items() if name != "client-2"})
    parties["client-0"].mask([1.0], roster, TAG)
    with pytest.raises(ProtocolError, match="client-2"):
        parties["client-0"].mask([1.0], smaller, replace(TAG, attempt=1, sequence=2))
    with pytest.raises(ProtocolError, match="one roster for the whole run, and client-2 would come or go"):
        parties["client-0"].mask([1.0], smaller, replace(TAG, round=4))
    parties["client-0"].mask([1.0], smaller, replace(TAG, round=4, handler="another"))
