"""Homomorphic sums: within the stated error, and closed to whoever adds."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from isthmus.errors import ConfigError, ProtocolError, RunError
from isthmus.privacy import homomorphic
from isthmus.privacy.homomorphic import CiphertextAdder, CkksParameters, HomomorphicKeys

pytest.importorskip("tenseal")
PARAMETERS = CkksParameters(error=1e-6, terms=10, bound=8.0)


@pytest.fixture(scope="module")
def keys() -> HomomorphicKeys:
    return HomomorphicKeys(PARAMETERS)


CHOICES = (PARAMETERS, CkksParameters(1e-8, 5, 100.0), CkksParameters(1e-3, 50, 1000.0), CkksParameters(1e-10, 3, 1.0))


@pytest.mark.parametrize("parameters", CHOICES)
def test_sum_is_within_the_stated_error(parameters: CkksParameters) -> None:
    keys = HomomorphicKeys(parameters)
    adder = keys.adder()
    x = np.random.default_rng(0).uniform(
        -parameters.bound, parameters.bound, (parameters.terms, parameters.slots + 100)
    )
    x[:, 0] = parameters.bound
    total = keys.decrypt(adder.add(adder.encrypt(row) for row in x), x.shape[1])
    assert np.abs(total - x.sum(0)).max() <= parameters.error
    assert np.abs(total - x.sum(0)).max() > 0


def test_the_adder_cannot_open(keys: HomomorphicKeys) -> None:
    adder = keys.adder()
    closed = adder.encrypt(np.ones(5))
    assert not adder._context.is_private() and not hasattr(adder, "decrypt")
    with pytest.raises(ValueError, match="secret"):
        adder._load(closed[0]).decrypt()
    secret = keys._context.secret_key()
    with pytest.raises(ValueError, match="Secret key"):
        adder._context.secret_key()
    assert secret is not None
    with pytest.raises(ProtocolError, match="secret key"):
        CiphertextAdder(keys.share(), PARAMETERS)  # handed over by mistake


def test_same_numbers_close_differently(keys: HomomorphicKeys) -> None:
    assert keys.encrypt(np.zeros(5)) != keys.encrypt(np.zeros(5))


def test_clients_share_keys_and_other_runs_do_not(keys: HomomorphicKeys) -> None:
    other = HomomorphicKeys.from_share(keys.share(), PARAMETERS)
    closed = keys.adder().add([keys.encrypt(np.full(3, 2.0)), other.encrypt(np.full(3, 0.5))])
    assert np.abs(other.decrypt(closed, 3) - 2.5).max() < 1e-5
    with pytest.raises(ProtocolError):
        HomomorphicKeys(PARAMETERS).decrypt(closed, 3)
    with pytest.raises(ProtocolError, match="no secret key"):
        HomomorphicKeys.from_share(keys.public(), PARAMETERS)
    with pytest.raises(TypeError, match="never serialised"):
        pickle.dumps(keys)


def test_bad_input_is_refused(keys: HomomorphicKeys) -> None:
    for bad in (np.nan, np.inf, 8.1):
        with pytest.raises(RunError):
            keys.encrypt(np.array([0.0, bad]))
    adder = keys.adder()
    one, long = keys.encrypt(np.ones(3)), keys.encrypt(np.ones(PARAMETERS.slots + 1))
    with pytest.raises(ProtocolError, match="differ in length"):
        adder.add([one, long])
    with pytest.raises(ProtocolError, match="sums of 1 to 10"):
        adder.add([one] * 11)
    with pytest.raises(ProtocolError, match="sums of 1 to 10"):
        adder.add([])
    with pytest.raises(ProtocolError, match="not a ciphertext"):
        adder.add([(b"garbage",)])
    with pytest.raises(ProtocolError, match="pieces"):
        keys.decrypt(one, PARAMETERS.slots + 1)
    with pytest.raises(ProtocolError, match="not a ciphertext"):
        keys.decrypt((b"garbage",), 3)
    senseless = ((0.0, 1, 1.0), (1e-6, 0, 1.0), (1e-6, 1, 0.0), (float("nan"), 1, 1.0))
    out_of_reach = ((1e-30, 1, 1.0), (1e-9, 100, 1e30), (1e-9, 10, 1e6))
    for error, terms, bound in senseless + out_of_reach:
        with pytest.raises(ConfigError):
            CkksParameters(error, terms, bound)


def test_absence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(homomorphic.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"isthmus\[he\]"):
        HomomorphicKeys(PARAMETERS)
