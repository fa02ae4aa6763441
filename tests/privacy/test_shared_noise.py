"""Noise in shares: drawn exactly, of the stated size in a total, worth the stated epsilon against an attack."""

from __future__ import annotations

import itertools
import math

import dp_accounting
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import beta, chi2, norm

from isthmus.errors import ConfigError, RunError
from isthmus.privacy import shared_noise
from isthmus.privacy.accountant import Accountant
from isthmus.privacy.prg import Keystream
from isthmus.privacy.shared_noise import (
    SCALE_BITS,
    SharedNoise,
    discrete_gaussian,
    excess,
)

Floats = NDArray[np.float64]
SECRET = bytes(range(32))


def stream(number: int = 0) -> Keystream:
    return Keystream(number.to_bytes(32, "big"))


def exact(scale: float, reach: int) -> Floats:
    """The discrete Gaussian at -reach .. reach."""
    density = np.exp(-(np.arange(-reach, reach + 1.0) ** 2) / (2 * scale**2))
    found: Floats = density / density.sum()
    return found


def fits(drawn: NDArray[np.int64], expected: Floats, reach: int) -> bool:
    """Chi-square at a level of 1e-4, over values that are expected at least 20 times."""
    counts = np.bincount(drawn + reach, minlength=2 * reach + 1)
    often = expected * drawn.size >= 20
    found, wanted = counts[often], expected[often] * drawn.size
    statistic = float(((found - wanted) ** 2 / wanted).sum())
    return statistic < chi2.ppf(1 - 1e-4, int(often.sum()) - 1)


@pytest.mark.parametrize("bits", [0, 1, 3])
def test_a_share_is_a_discrete_gaussian(bits: int) -> None:
    drawn = discrete_gaussian(stream(bits), 400_000, bits)
    reach = 10 * 2**bits
    assert np.abs(drawn).max() <= reach and fits(drawn, exact(2.0**bits, reach), reach)
    assert not fits(drawn, exact(2.0**bits * 1.01, reach), reach), "a deviation that is 1 % off is seen"


def test_the_share_that_is_used_has_the_stated_variance() -> None:
    drawn = discrete_gaussian(stream(9), 500_000, SCALE_BITS) / 2.0**SCALE_BITS
    assert abs(drawn.mean()) < 5 / 500_000**0.5 and abs(drawn.var() - 1) < 5 * (2 / 500_000) ** 0.5
    # Its finest bits are noise too: a sampler made of floats rounded to a coarser grid would show here.
    assert abs(float((discrete_gaussian(stream(8), 100_000, SCALE_BITS) & 1).mean()) - 0.5) < 5 / (2 * 100_000**0.5)
    for value, probability in ((1.0, norm.cdf(1)), (-2.0, norm.cdf(-2)), (3.0, norm.cdf(3))):
        assert abs((drawn <= value).mean() - probability) < 5 * (probability * (1 - probability) / 500_000) ** 0.5


def test_running_out_of_words_chooses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = discrete_gaussian(stream(3), 3000, 4)
    fetched: list[int] = []

    class Few(Keystream):
        def words(self, count: int) -> NDArray[np.uint64]:
            fetched.append(count)
            return super().words(61)

    assert np.array_equal(discrete_gaussian(Few((3).to_bytes(32, "big")), 3000, 4), whole) and len(fetched) > 100


def renyi(p: Floats, q: Floats, order: float) -> float:
    both = (p > 0) & (q > 0)
    return float(np.log(np.sum(np.exp(order * np.log(p[both]) + (1 - order) * np.log(q[both])))) / (order - 1))


def summed(scale: float, shares: int, reach: int = 60) -> Floats:
    """The distribution of a sum of shares, convolved exactly."""
    one = found = exact(scale, reach)
    for _ in range(shares - 1):
        found = np.convolve(found, one)
    return found


@pytest.mark.parametrize("shares", [2, 3, 5])
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_sum_of_shares_is_worth_what_the_bound_says(scale: float, shares: int) -> None:
    """Proposition 14 of Kairouz, Liu and Steinke for one number, by the exact distributions of the two totals; and it
    does not hold with a share less.
    """
    for shift, order in itertools.product((1, 2, 3), (1.5, 2.0, 6.0)):
        bound = order / 2 * (shift / (math.sqrt(shares) * scale) + excess(shares, scale)) ** 2
        found = {}
        for count in (shares, shares - 1):
            total = summed(scale, count)
            found[count] = renyi(total[shift:], total[:-shift], order)
        assert found[shares] <= bound * (1 + 1e-9) < found[shares - 1]


def test_drawn_shares_add_up_to_the_convolution() -> None:
    drawn = np.sum([discrete_gaussian(stream(20 + k), 300_000, 1) for k in range(4)], axis=0)
    reach = 40
    expected = summed(2.0, 4, 10 * 2)
    middle = len(expected) // 2
    assert fits(drawn, expected[middle - reach : middle + reach + 1], reach)
    assert not fits(drawn, exact(math.sqrt(3) * 2.0, reach), reach), "three shares are not enough"


def test_the_terms_of_the_dimension_vanish_for_the_share_that_is_used() -> None:
    assert excess(1000, 2**SCALE_BITS) == 0.0 < excess(1000, 1.0)
    noise = SharedNoise(1.0, 2.0, 8)
    # Rounding to the grid is what is left of it: sqrt(d) / 2 steps.
    assert 2.0 > noise.counted(10**6) > 1.999 > noise.counted(10**12)


def gaussian_delta(epsilon: float, ratio: float) -> float:
    """delta of a Gaussian mechanism, sensitivity over deviation = ratio (Balle and Wang, 2018)."""
    return float(norm.cdf(ratio / 2 - epsilon / ratio) - math.exp(epsilon) * norm.cdf(-ratio / 2 - epsilon / ratio))


@pytest.mark.parametrize(("multiplier", "releases"), [(4.0, 1), (6.0, 10), (20.0, 50)])
def test_epsilon_is_that_of_an_independent_computation(multiplier: float, releases: int) -> None:
    noise, values, delta = SharedNoise(0.3, multiplier, 7), 5000, 1e-5
    stated = Accountant(replace=True).add(noise.counted(values), releases).epsilon(delta)
    # By hand: the noise of 7 shares over the largest distance of two totals, both in grid steps.
    step = multiplier * 0.3 / 7**0.5 / 2**20
    ratio = 2 * (0.3 / step * (1 + 2**-20) + 5000**0.5 / 2) / (7**0.5 * 2**20)
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(1 / ratio), releases)
    assert stated == pytest.approx(accountant.get_epsilon(delta), rel=1e-12)
    # The exact curve of as many Gaussian releases says no more, and not much less.
    whole = ratio * releases**0.5
    assert gaussian_delta(stated, whole) <= delta < gaussian_delta(0.85 * stated, whole)


def test_what_leaves_is_clipped_and_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_noise, "discrete_gaussian", lambda stream, count, bits: np.zeros(count, np.int64))
    noise = SharedNoise(0.5, 1e3, 4)  # a coarse grid
    for factor in (0.1, 1.0, 1e6):
        update = {"a": factor * torch.randn(30, 20), "b": factor * torch.randn(7, dtype=torch.float64)}
        steps = noise.release_update(update, secret=SECRET, purpose=()).weights
        assert {name: (part.dtype, part.shape) for name, part in steps.items()} == {
            name: (torch.int64, part.shape) for name, part in update.items()
        }
        length = math.sqrt(sum(int(value) ** 2 for part in steps.values() for value in part.flatten().tolist()))
        assert length <= noise.norm(607)
        clipped = torch.cat([part.flatten().double() for part in update.values()])
        clipped *= min(1.0, 0.5 / float(clipped.norm()))
        back = torch.cat([part.flatten().double() for part in noise.mean(steps, 1, update).values()])
        torch.testing.assert_close(back, clipped, atol=0.51 * noise.step, rtol=1e-6)
    with pytest.raises(RunError, match="NaN or infinity"):
        noise.release_update({"a": torch.tensor([float("nan")])}, secret=SECRET, purpose=())


def test_noise_follows_secret_purpose_and_numbers() -> None:
    noise, update = SharedNoise(1.0, 1.0, 3), {"w": torch.linspace(-0.1, 0.1, 50)}

    def released(update: dict[str, torch.Tensor], secret: bytes = SECRET, round: int = 1) -> torch.Tensor:
        return noise.release_update(update, secret=secret, purpose=("train", round)).weights["w"]

    assert torch.equal(released(update), released(update)), "a replayed round releases the same numbers"
    for other in (released({"w": update["w"] + 1e-3}), released(update, bytes(32)), released(update, round=2)):
        assert int((other - released(update)).abs().min()) > 0


def test_sizes_that_cannot_be_are_refused() -> None:
    for bad in ((0.0, 1.0, 2), (1.0, 0.0, 2), (1.0, 1.0, 0), (math.inf, 1.0, 2)):
        with pytest.raises(ConfigError, match="shared noise needs"):
            SharedNoise(*bad)
    with pytest.raises(ConfigError, match="too small to be shared by 1000 parties"):
        SharedNoise(1.0, 1e-9, 800).check(10**6, 1000)
    SharedNoise(1.0, 1e-3, 800).check(10**6, 1000)
    with pytest.raises(ValueError, match="exact for"):
        discrete_gaussian(stream(), 1, SCALE_BITS + 1)


# -- the attack ------------------------------------------------------------------------------------


def empirical_epsilon(one: Floats, other: Floats, delta: float) -> float:
    """What a threshold on a statistic shows epsilon to be at least, at 99.9 %: half of the trials choose the threshold,
    the others count (Clopper and Pearson).
    """
    half = len(one) // 2
    thresholds = np.quantile(np.concatenate([one[:half], other[:half]]), np.linspace(0.02, 0.98, 97))

    def ratio(a: Floats, b: Floats, threshold: float, level: float) -> float:
        hits, false = int((a > threshold).sum()), int((b > threshold).sum())
        low = float(beta.ppf(level, hits, len(a) - hits + 1)) if hits else 0.0
        high = float(beta.ppf(1 - level, false + 1, len(b) - false)) if false < len(b) else 1.0
        return math.log(max(low - delta, 1e-12) / high)

    chosen = max(thresholds, key=lambda threshold: ratio(one[:half], other[:half], threshold, 0.05))
    return ratio(one[half:], other[half:], float(chosen), 0.0005)


def observed(noise: SharedNoise, sign: float, honest: int, trials: int, values: int, first: int) -> Floats:
    """What a server that knows everybody's numbers but one client's, and the shares of those who work with it, sees of
    that client in the total: its projection on the client's update.
    """
    update = torch.full((values,), sign * noise.clip / math.sqrt(values), dtype=torch.float64)
    target = np.stack(
        [
            noise.release_update({"w": update}, secret=SECRET, purpose=("attack", first, trial)).weights["w"].numpy()
            for trial in range(trials)
        ]
    )
    others = discrete_gaussian(stream(first), (honest - 1) * trials * values, SCALE_BITS)
    total = target + others.reshape(honest - 1, trials, values).sum(0)
    return total.sum(1) * noise.step / math.sqrt(values) / noise.clip


def test_the_attack_on_one_client_of_a_total() -> None:
    """Whose update is it, u or -u? Without noise: always right. With the stated shares: less is seen than epsilon
    allows. With one share in the place of sixteen, the others told: more than epsilon allows.
    """
    values, delta, trials = 16, 1e-5, 4000
    noise = SharedNoise(1.0, 6.0, 16)
    stated = Accountant(replace=True).add(noise.counted(values)).epsilon(delta)
    assert 1.0 < stated < 1.7
    plus, minus = (observed(noise, sign, 16, trials, values, int(sign) + 5) for sign in (1.0, -1.0))
    enough = empirical_epsilon(plus, minus, delta)
    assert 0.1 < enough < stated, "the attack sees something, and no more than that"
    assert plus.mean() - minus.mean() == pytest.approx(2.0, abs=0.5)
    alone = [observed(noise, sign, 1, trials, values, int(sign) + 50) for sign in (1.0, -1.0)]
    assert empirical_epsilon(*alone, delta) > stated, "shares that the server knows protect nobody"
    exactly = [np.full(trials, sign) for sign in (1.0, -1.0)]
    assert empirical_epsilon(*exactly, delta) > 4.5, "as much as so many trials can show"
