"""Private set intersection: right, and deaf to garbage."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("private_set_intersection", reason="needs the extra tables")

from isthmus.errors import ProtocolError
from isthmus.privacy.psi import Receiver, answer, request_size


def item(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()[:16]


@settings(max_examples=20, deadline=None)
@given(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)))
def test_common_items(mine: set[int], theirs: set[int]) -> None:
    own, other = [item(i) for i in sorted(mine)], [item(i) for i in sorted(theirs)]
    receiver = Receiver(own)
    found = receiver.common(answer(other, receiver.request))
    assert [own[place] for place in found] == [item(i) for i in sorted(mine & theirs)]
    assert request_size(receiver.request) == len(own)


def test_a_request_holds_no_item_and_no_hash_of_one() -> None:
    own = [item(i) for i in range(50)]
    receiver = Receiver(own)
    sent = answer([item(i) for i in range(25, 80)], receiver.request)
    assert not any(one in receiver.request or one.hex().encode() in receiver.request for one in own)
    assert not any(item(i) in sent or item(i).hex().encode() in sent for i in range(25, 80))


def test_two_requests_about_the_same_items_differ() -> None:
    own = [item(i) for i in range(5)]
    assert Receiver(own).request != Receiver(own).request


@pytest.mark.parametrize("garbage", [b"x", b"\0" * 16, b"\0" * 40, b"\xff" * 100])
def test_garbage_is_refused(garbage: bytes) -> None:
    own = [item(i) for i in range(3)]
    with pytest.raises(ProtocolError, match="cannot be read"):
        Receiver(own).common(garbage)
    with pytest.raises(ProtocolError, match="malformed"):
        answer(own, garbage)
