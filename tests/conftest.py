"""What holds for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from isthmus.methods.registry import METHODS, all_methods


@pytest.fixture(scope="module", autouse=True)
def our_own_methods() -> Iterator[None]:
    """Methods that the tests of a file register are gone with it: other files are about our own."""
    all_methods()
    before = dict(METHODS._entries)
    yield
    METHODS._entries.clear()
    METHODS._entries.update(before)
