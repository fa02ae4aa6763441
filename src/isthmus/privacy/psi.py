"""Private set intersection between two parties, who learn what both hold and nothing else of each other but sizes.

    receiver                                       sender
    session = Receiver(items); session.request ->  answer(items, request) -> bytes
    session.common(answer) -> positions of its items that both hold

Diffie-Hellman on an elliptic curve (`openmined-psi`, Angelou et al., 2020): the request is the receiver's hashed items,
each raised to a secret power; the sender raises them to its own and adds its items under its power, compressed. Safe
against a party that keeps to the protocol and looks at everything it received; one that puts items into its set that it
does not hold learns whether the other has them, which is what a cap on the size limits.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from isthmus.errors import ConfigError, ProtocolError

FALSE_POSITIVES = 1e-9
"""Chance that the sender's compressed set shows the receiver any item that is not in it."""
_SIZES = struct.Struct(">QQ")


def _library() -> Any:
    try:
        import private_set_intersection.python as library
    except ImportError:
        raise ConfigError("linking owners' edges needs openmined-psi: pip install 'isthmus[tables]'") from None
    return library


class Receiver:
    """The side that learns the common items."""

    def __init__(self, items: Sequence[bytes]) -> None:
        self._items, self.request = items, b""
        if items:
            self._client = _library().client.CreateWithNewKey(True)
            self.request = self._client.CreateRequest([item.hex() for item in items]).SerializeToString()

    def common(self, answer: bytes) -> list[int]:
        """Positions of the items that both hold."""
        if not self._items or not answer:  # one of the two holds none
            return []
        library = _library()
        try:
            setup_size, response_size = _SIZES.unpack_from(answer)
            body = memoryview(answer)[_SIZES.size :]
            if len(body) != setup_size + response_size:
                raise ValueError("sizes")
            setup, response = library.ServerSetup(), library.Response()
            setup.ParseFromString(bytes(body[:setup_size]))
            response.ParseFromString(bytes(body[setup_size:]))
            return sorted(self._client.GetIntersection(setup, response))
        except Exception as error:  # whatever the library makes of bytes from another party
            kind = type(error).__name__
            raise ProtocolError(f"the answer to a private set intersection cannot be read ({kind})") from None


def answer(items: Sequence[bytes], request: bytes) -> bytes:
    """What the sender returns to a request."""
    if not request or not items:
        return b""
    library = _library()
    message = _request(request)
    server = library.server.CreateWithNewKey(True)
    try:
        setup: bytes = server.CreateSetupMessage(
            FALSE_POSITIVES,
            len(message.encrypted_elements),
            [item.hex() for item in items],
            library.DataStructure.GCS,
        ).SerializeToString()
        response: bytes = server.ProcessRequest(message).SerializeToString()
    except Exception as error:
        raise ProtocolError(f"a request for a private set intersection is malformed ({type(error).__name__})") from None
    return _SIZES.pack(len(setup), len(response)) + setup + response


def request_size(request: bytes) -> int:
    """How many items a request is about, for a cap."""
    return len(_request(request).encrypted_elements) if request else 0


def _request(data: bytes) -> Any:
    message = _library().Request()
    try:
        message.ParseFromString(data)
    except Exception as error:
        raise ProtocolError(f"a request for a private set intersection is malformed ({type(error).__name__})") from None
    return message
