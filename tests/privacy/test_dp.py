"""Differential privacy: clip, noise from secrets, and the published values of the formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from isthmus.errors import ConfigError, RunError
from isthmus.privacy import accountant
from isthmus.privacy.accountant import Accountant
from isthmus.privacy.dp import Mechanism, noise_warning, zcdp_epsilon, zcdp_rho

SIGMA = 13.806991623206883
"""rho + 2 sqrt(rho ln(1/delta)) = epsilon solved for sigma: epsilon 8, delta 1e-5, 100 releases, clip 1."""


def _norm(weights: dict[str, torch.Tensor], order: int) -> float:
    return float(torch.linalg.vector_norm(torch.cat([w.reshape(-1) for w in weights.values()]), ord=order))


@pytest.mark.parametrize(("noise", "order"), (("gaussian", 2), ("laplace", 1)))
def test_updates_are_clipped_as_a_whole(noise: str, order: int) -> None:
    weights = {"w": torch.full((3, 4), 2.0), "b": torch.full((2,), -1.0, dtype=torch.float64)}
    mechanism = Mechanism(1.5, 0.0, noise)
    release = mechanism.release_update(weights)
    assert release.clipped == 1 and math.isclose(_norm(dict(release.weights), order), 1.5, rel_tol=1e-6)
    assert {n: (w.dtype, w.shape) for n, w in release.weights.items()} == {
        n: (w.dtype, w.shape) for n, w in weights.items()
    }
    ratio = release.weights["w"][0, 0] / weights["w"][0, 0]
    assert torch.allclose(release.weights["b"], weights["b"] * ratio)  # direction kept
    small = Mechanism(100.0, 0.0, noise).release_update(weights)
    assert small.clipped == 0 and torch.equal(small.weights["w"], weights["w"])


def test_rows_are_clipped_one_by_one() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    released, clipped = Mechanism(1.0, 0.0).release_rows(rows)
    assert clipped == 1 and torch.allclose(released, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))


@pytest.mark.parametrize(("noise", "law"), (("gaussian", stats.norm), ("laplace", stats.laplace)))
def test_noise_has_the_stated_law_and_is_never_seeded(noise: str, law: object) -> None:
    mechanism = Mechanism(2.0, 0.75, noise)
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - shows that it has no effect
    first, _ = mechanism.release_rows(torch.zeros(200, 100, dtype=torch.float64))
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    second, _ = mechanism.release_rows(torch.zeros(200, 100, dtype=torch.float64))
    assert not torch.equal(first, second)
    assert stats.kstest(first.numpy().ravel(), law.cdf, args=(0, mechanism.scale)).pvalue > 1e-6
    assert mechanism.scale == 1.5


def test_bad_input_is_refused() -> None:
    for bad in (float("nan"), float("inf")):
        with pytest.raises(RunError, match="NaN or infinity"):
            Mechanism(1.0, 1.0).release_update({"w": torch.tensor([bad])})
    for clip, multiplier, noise in (
        (0.0, 1.0, "gaussian"),
        (1.0, -1.0, "laplace"),
        (math.inf, 1.0, "gaussian"),
        (1.0, 1.0, "uniform"),
    ):
        with pytest.raises(ConfigError):
            Mechanism(clip, multiplier, noise)
    for delta in (0.0, 1.0, -1.0):
        with pytest.raises(ConfigError, match="delta"):
            zcdp_epsilon(1.0, delta)
    assert Mechanism(1.0, 1.0).release_update({}).weights == {}


def test_zcdp_formulas() -> None:
    """HiFGL spec, section 11.7: eps = 8, delta = 1e-5, 100 releases need sigma of about 14 C."""
    assert math.isclose(zcdp_epsilon(zcdp_rho(100, 1.0, SIGMA), 1e-5), 8.0, rel_tol=1e-9)
    assert math.isclose(zcdp_epsilon(zcdp_rho(100, 3.0, 3 * SIGMA), 1e-5), 8.0, rel_tol=1e-9)
    assert math.isclose(zcdp_rho(100, 0.5, 10.0), 100 * 1.0 / 200)


def test_warning_is_honest() -> None:
    said = noise_warning(Mechanism(1.0, SIGMA), dimension=64)
    assert said is not None and "near chance" in said and "110 times" in said  # 13.8 * 8
    assert noise_warning(Mechanism(1.0, 0.01), dimension=64) is None
    some = noise_warning(Mechanism(1.0, 0.5), dimension=64)
    assert some is not None and "clear loss" in some
    assert noise_warning(Mechanism(1.0, 0.5), dimension=64, parties=100) is None  # averaged over parties


# -- accountant ------------------------------------------------------------------------------------


def test_accountant() -> None:
    pytest.importorskip("dp_accounting")
    rdp = Accountant().add(1.0, 100, sampling=0.1).epsilon(1e-5)
    assert math.isclose(rdp, 7.90, abs_tol=0.01)
    assert Accountant("pld").add(1.0, 100, sampling=0.1).epsilon(1e-5) < rdp
    assert Accountant().epsilon(1e-5) == 0.0
    # Laplace of scale b = 2 C is 1/2-private.
    assert math.isclose(Accountant("pld").add(2.0, noise="laplace").epsilon(1e-9), 0.5, abs_tol=1e-3)
    # Steps add up, however they are given.
    assert math.isclose(Accountant().add(2.0, 3).add(2.0, 4).epsilon(1e-5), Accountant().add(2.0, 7).epsilon(1e-5))
    # A replaced record counts as twice the clip.
    assert math.isclose(Accountant(replace=True).add(2.0).epsilon(1e-5), Accountant().add(1.0).epsilon(1e-5))
    # zCDP's closed form is an upper bound of the same thing.
    assert 6.0 < Accountant(replace=True).add(SIGMA, 100).epsilon(1e-5) < 8.0


def test_accountant_refuses() -> None:
    pytest.importorskip("dp_accounting")
    with pytest.raises(ConfigError):
        Accountant("moments")
    for multiplier, steps, sampling in ((0.0, 1, 1.0), (1.0, -1, 1.0), (1.0, 1, 0.0), (1.0, 1, 1.5)):
        with pytest.raises(ConfigError):
            Accountant().add(multiplier, steps, sampling=sampling)
    with pytest.raises(ConfigError, match="delta"):
        Accountant().epsilon(0.0)
    with pytest.raises(ConfigError, match="sampling"):
        Accountant(replace=True).add(1.0, sampling=0.5)


def test_absence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(accountant.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"isthmus\[dp\]"):
        Accountant()
