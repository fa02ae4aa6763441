"""Streams by the processor's AES instructions are those of the library, and without such instructions the library's are
used.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from isthmus.privacy import aes_blocks, prg
from isthmus.privacy.prg import Keystream, add_streams


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    prg._processor_agrees.cache_clear()
    yield
    prg._processor_agrees.cache_clear()


def keys(count: int, seed: int = 0) -> list[bytes]:
    return [np.random.default_rng([seed, k]).bytes(16) for k in range(count)]


@pytest.mark.skipif(not aes_blocks.WIDTH, reason="no AES instructions here")
@pytest.mark.parametrize("words", [0, 1, 2, 15, 16, 17, 31, 32, 33, 4095, 4096, 4097, 70_001])
def test_the_streams_are_the_librarys(words: int) -> None:
    start = np.random.default_rng(words).integers(0, 2**64, words, np.uint64)
    for add, subtract in ((keys(3), keys(2, 1)), (keys(1), []), ([], keys(1)), ([], [])):
        expected = start.copy()
        for key in add:
            expected += Keystream(key).words(words)
        for key in subtract:
            expected -= Keystream(key).words(words)
        found = start.copy()
        aes_blocks.add_streams(found, add, subtract)
        assert np.array_equal(found, expected)
        found = start.copy()
        add_streams(found, add, subtract)
        assert np.array_equal(found, expected)


def test_known_answer() -> None:
    """The first block is AES of zeros, under the key of FIPS 197, C.1."""
    key = bytes(range(16))
    target = np.zeros(2, np.uint64)
    add_streams(target, [key])
    assert target.tobytes().hex() == "c6a13b37878f5b826f4f8162a1c8d879"


def test_a_wrong_processor_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def wrong(target: np.ndarray, add: object, subtract: object) -> None:
        target += np.uint64(1)

    monkeypatch.setattr(aes_blocks, "WIDTH", 1)
    monkeypatch.setattr(aes_blocks, "add_streams", wrong)
    target = np.zeros(5, np.uint64)
    add_streams(target, keys(1))
    assert np.array_equal(target, Keystream(keys(1)[0]).words(5)) and "masks use the library" in caplog.text


def test_arrays_with_gaps_and_long_keys_go_the_other_way() -> None:
    whole = np.zeros(20, np.uint64)
    add_streams(whole[::2], keys(1))
    assert np.array_equal(whole[::2], Keystream(keys(1)[0]).words(10)) and not whole[1::2].any()
    long = bytes(32)
    target = np.zeros(10, np.uint64)
    add_streams(target, [long, *keys(1)])
    assert np.array_equal(target, Keystream(long).words(10) + Keystream(keys(1)[0]).words(10))


def test_code_for_another_processor_does_without() -> None:
    """numba told to compile for any processor: no instruction that may be missing is used."""
    code = (
        "import numpy as np; from isthmus.privacy import aes_blocks, prg; t = np.zeros(3, np.uint64); "
        "prg.add_streams(t, [bytes(16)]); print(aes_blocks.WIDTH, bool((t == prg.Keystream(bytes(16)).words(3)).all()))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NUMBA_CPU_NAME": "generic"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["0", "True"]
