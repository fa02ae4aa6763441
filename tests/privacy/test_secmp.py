"""Secret message passing: exact sums, fresh masks, and nothing for anybody who should learn nothing (HiFGL spec,
section 12).
"""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from isthmus.errors import ConfigError, ProtocolError, RunError
from isthmus.privacy.attacks.uniform import uniformity
from isthmus.privacy.chacha import Nonce, blocks, expand, expand_sum
from isthmus.privacy.edge_keys import fresh_keys
from isthmus.privacy.field import P31, P61, Field
from isthmus.privacy.fixedpoint import FixedPoint
from isthmus.privacy.lagrange import LagrangeCode
from isthmus.privacy.secmp import Exchange, PublicMasks, SecretSums, bucket, deal_slots

FORMAT = FixedPoint(Field(P61), fraction=24, bound=1024.0, terms=1024)
NONCE = Exchange(3, 1).nonce()


def hide(
    sums: SecretSums, values: np.ndarray, rows: np.ndarray, times: np.ndarray, keys: np.ndarray, nonce: Nonce = NONCE
) -> np.ndarray:
    return sums.hide(sums.encode(values, nonce).values, rows, times, keys, nonce)


def whole_protocol(
    sums: SecretSums, values: np.ndarray, source: np.ndarray, target: np.ndarray, count: int, exchange: Exchange
) -> np.ndarray:
    """Sources, target and holders in one place: what the target decodes."""
    nonce, threshold, width = exchange.nonce(), sums.threshold, values.shape[1]
    keys = fresh_keys(source.size, threshold)
    slots = deal_slots(target, count)
    padding = fresh_keys(slots.padding.size, threshold)
    shares = hide(sums, values, source, np.ones(source.size, np.int64), keys, nonce)
    everything = np.concatenate([keys, padding])[slots.order]
    others = [sums.held(everything[:, j], slots.sizes, width, nonce)[slots.handle] for j in range(threshold)]
    field = sums.field
    first = field.add(
        field.segment_sum(shares, target, count),
        field.segment_sum(sums.zeros(padding, width, nonce), slots.padding, count),
    )
    return sums.open(first, others, max(1, int(np.bincount(target, minlength=count).max(initial=0))), nonce)


# -- streams ---------------------------------------------------------------------------------------


def test_streams_are_chacha20() -> None:
    keys, nonce = fresh_keys(70), (1, 2**31, 2**32 - 1)
    initial = (9).to_bytes(4, "little") + b"".join(word.to_bytes(4, "little") for word in nonce)
    for key, block in zip(keys, blocks(keys, nonce, 9), strict=True):
        expected = Cipher(algorithms.ChaCha20(key.tobytes(), initial), None).encryptor().update(bytes(64))
        assert block.astype("<u4").tobytes() == expected


@pytest.mark.parametrize("prime", [11, P31, P61])
def test_elements_are_uniform_and_sums_are_sums(prime: int) -> None:
    field, keys = Field(prime), fresh_keys(400)
    elements = expand(field, keys, NONCE, 33)
    assert int(elements.max()) < prime and uniformity(elements, prime) > 1e-6
    assert np.array_equal(elements[:, :5], expand(field, keys, NONCE, 5))
    sizes = np.array([0, 1, 7, 0, 200, 192])
    assert np.array_equal(
        expand_sum(field, keys, sizes, NONCE, 33), field.segment_sum(elements, np.repeat(np.arange(6), sizes), 6)
    )
    with pytest.raises(ValueError, match="do not fall"):
        expand_sum(field, keys, np.array([3]), NONCE, 2)
    with pytest.raises(ValueError, match="32 bytes"):
        expand(field, keys[:, :31].copy(), NONCE, 2)


@given(
    st.sets(
        st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 60), st.booleans(), st.booleans(), st.integers(0, 99)),
        min_size=2,
        max_size=50,
    )
)
def test_exchanges_never_share_a_nonce(wanted: set[tuple[int, int, bool, bool, int]]) -> None:
    assert len({Exchange(*each).nonce() for each in wanted}) == len(wanted)


def test_exchanges_beyond_the_numbering_are_refused() -> None:
    for bad in (Exchange(2**32, 1), Exchange(0, 2**16), Exchange(0, 0)):
        with pytest.raises(ConfigError, match="numbered"):
            bad.nonce()


# -- sums (properties 3, 4) ------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_sums_are_exact_up_to_rounding(data: st.DataObject) -> None:
    threshold = data.draw(st.sampled_from([1, 2, 3, 5]))
    nodes, edges, width = data.draw(st.integers(1, 30)), data.draw(st.integers(0, 120)), data.draw(st.integers(1, 9))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    source, target = generator.integers(0, nodes, (2, edges))
    values = generator.normal(scale=30.0, size=(nodes, width))
    found = whole_protocol(SecretSums(FORMAT, threshold), values, source, target, nodes, Exchange(1, 1))
    expected = np.zeros((nodes, width))
    np.add.at(expected, target, values[source])
    degree = np.bincount(target, minlength=nodes)[:, None]
    assert (np.abs(found - expected) <= degree * 2.0**-25 + 1e-12).all()


@pytest.mark.parametrize("prime, fraction, bound", [(P31, 16, 16.0), (P61, 30, 64.0)])
def test_a_node_with_500_neighbours_and_one_with_none(prime: int, fraction: int, bound: float) -> None:
    sums = SecretSums(FixedPoint(Field(prime), fraction, bound, 512), 2)
    values = np.random.default_rng(1).uniform(-bound, bound, (500, 3))
    target = np.zeros(500, np.int64)
    found = whole_protocol(sums, values, np.arange(500), target, 2, Exchange(1, 2, True))
    integers = np.rint(values * 2.0**fraction).astype(np.int64).sum(0)
    assert np.array_equal(found[0], integers * 2.0**-fraction) and not found[1].any()  # integer exact


def test_what_cannot_be_summed_is_refused_never_wrapped() -> None:
    sums = SecretSums(FORMAT, 1)
    one, row = np.ones(1, np.int64), np.zeros(1, np.int64)
    for bad in (np.nan, np.inf):
        with pytest.raises(RunError, match="NaN or infinite"):
            sums.encode(np.array([[bad]]), NONCE)
    clipped = sums.encode(np.array([[5000.0, -5000.0, 3.0]]), NONCE)
    assert clipped.clipped == 2
    with pytest.raises(ConfigError, match="overflow"):
        FixedPoint(Field(P31), 24, 1024.0, 1024)
    keys = fresh_keys(1, 1)
    share = hide(sums, np.array([[1.0]]), row, one, keys)
    held = sums.held(keys[:, 0], one, 1, NONCE)
    assert sums.open(share, [held], 1, NONCE)[0, 0] == 1.0
    for wrong in (
        sums.field.add(held, np.array([[1, 0]], np.uint64)),
        sums.field.add(held, np.array([[0, 1]], np.uint64)),
        sums.held(keys[:, 0], one, 1, Exchange(4, 1).nonce()),
    ):
        with pytest.raises(ProtocolError, match="lost or changed"):
            sums.open(share, [wrong], 1, NONCE)
    many, keys = np.zeros(3, np.int64), fresh_keys(3, 1)  # three values within the bound, in a format for two
    shares = hide(sums, np.array([[1000.0]]), many, np.ones(3, np.int64), keys)
    with pytest.raises(ProtocolError, match="overflow"):
        sums.open(sums.field.sum(shares)[None], [sums.held(keys[:, 0], np.array([3]), 1, NONCE)], 2, NONCE)
    with pytest.raises(ProtocolError, match="2 share holders are needed, 1 answered"):
        sums.open(share, [], 1, NONCE)


def test_times_count_arcs() -> None:
    sums, keys = SecretSums(FORMAT, 1), fresh_keys(3, 1)
    shares = hide(sums, np.array([[2.0], [5.0]]), np.array([0, 1, 1]), np.array([1, 3, 0]), keys)
    assert [
        float(sums.open(shares[e : e + 1], [sums.held(keys[e], np.ones(1, np.int64), 1, NONCE)], 4, NONCE)[0, 0])
        for e in range(3)
    ] == [2.0, 15.0, 0.0]


# -- privacy (properties 5, 7, 9) ------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [1, 2])
def test_any_shares_but_all_are_uniform_whatever_the_secret(threshold: int) -> None:
    """Exhaustive in F_11: over all shares a source can draw for holders, every T of the T + 1 take every value exactly
    once.
    """
    field = Field(11)
    code = LagrangeCode(field, threshold)
    drawn = np.array(list(itertools.product(range(11), repeat=threshold)), np.uint64).T  # (T, 11^T)
    for secret in range(11):
        shares = np.concatenate([code.complete(np.full(drawn.shape[1], secret, np.uint64), drawn)[None], drawn])
        assert np.array_equal(code.decode(shares), np.full(drawn.shape[1], secret))
        for chosen in itertools.combinations(range(threshold + 1), threshold):
            counts = Counter(map(tuple, shares[list(chosen)].T.tolist()))
            assert len(counts) == 11**threshold and set(counts.values()) == {1}


def test_shares_of_different_secrets_cannot_be_told_apart() -> None:
    sums, rows = SecretSums(FORMAT, 1), np.zeros(8000, np.int64)
    drawn = [
        hide(sums, np.array([[value]]), rows, np.ones(8000, np.int64), fresh_keys(8000, 1)).ravel()
        for value in (0.0, 1000.0)
    ]
    assert stats.ks_2samp(*(part.astype(np.float64) for part in drawn)).pvalue > 1e-4
    assert all(uniformity(part, P61) > 1e-6 for part in drawn)


def test_masks_are_fresh_in_every_exchange_and_differences_tell_nothing() -> None:
    sums, keys = SecretSums(FORMAT, 1), fresh_keys(50, 1)
    orders = [
        Exchange(r, layer, back, ev, part)
        for r in (1, 2)
        for layer in (1, 2)
        for back in (0, 1)
        for ev in (0, 1)
        for part in (0, 1)
    ]  # type: ignore[arg-type]
    streams = np.stack([expand(sums.field, keys[:, 0], order.nonce(), 8) for order in orders])
    assert np.unique(streams).size == streams.size
    values, rows, one = np.ones((50, 8)), np.arange(50), np.ones(50, np.int64)
    shares = np.stack([hide(sums, values, rows, one, keys, order.nonce()) for order in orders])
    field = sums.field
    differences = np.stack([field.sub(a, b) for a, b in itertools.pairwise(shares)])  # the same value in two exchanges
    assert uniformity(differences, P61) > 1e-6 and np.unique(differences).size == differences.size


def test_published_masks_cancel() -> None:
    """The negative of the test above: as printed, the difference of two shares is the difference of the values, times
    L_1(alpha).
    """
    code = LagrangeCode(Field(P61), 1)
    mu = PublicMasks(code, code.field.random((1, 8)))
    secret = FORMAT.encode(np.random.default_rng(0).normal(size=(2, 5))).values
    shares = mu.encode(secret)
    for i in range(2):
        factor = np.uint64(code.basis(code.alphas[i])[0])
        assert np.array_equal(
            code.field.sub(shares[i, 0], shares[i, 1]),
            code.field.mul(code.field.sub(secret[0], secret[1]), np.full(5, factor)),
        )
    assert np.array_equal(mu.decode(shares), secret)


def test_slots_show_a_bucket_and_nothing_else() -> None:
    assert bucket(np.array([0, 1, 2, 3, 4, 5, 8, 9, 500])).tolist() == [1, 1, 2, 4, 4, 8, 8, 16, 512]
    target = np.array([0, 0, 0, 1, 2, 2, 2, 2])
    slots = deal_slots(target, 4)
    assert sorted(slots.sizes.tolist()) == [1, 1, 4, 4] and slots.sizes[slots.handle].tolist() == [4, 1, 4, 1]
    assert sorted(slots.order.tolist()) == list(range(10)) and sorted(slots.padding.tolist()) == [0, 3]
    owner = np.concatenate([target, slots.padding])[slots.order]
    assert np.array_equal(slots.handle[owner], np.repeat(np.arange(4), slots.sizes))
    orders = {tuple(deal_slots(target, 4).order.tolist()) for _ in range(20)}
    handles = {tuple(deal_slots(target, 4).handle.tolist()) for _ in range(20)}
    assert len(orders) > 10 and len(handles) > 5  # 10! and 4! possibilities


def test_a_holders_sums_do_not_depend_on_values_or_on_the_degree_within_a_bucket() -> None:
    """What a holder computes is a function of keys alone; three neighbours and four look the same to it."""
    for degree in (3, 4):
        slots = deal_slots(np.zeros(degree, np.int64), 1)
        assert slots.sizes.tolist() == [4] and slots.order.size == 4
    sums = SecretSums(FORMAT, 1)
    held = np.concatenate([sums.held(fresh_keys(4), np.array([4]), 600, Exchange(1, 1).nonce()) for _ in range(20)])
    assert uniformity(held, P61) > 1e-6
