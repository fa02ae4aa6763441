"""Wire codec: one safetensors buffer per record; its JSON header carries the tree. Never pickle.

Layout: 8-byte header length, JSON header (padded to 8 bytes), raw tensors. Tensor ``f`` holds all floats, ``i`` all
integers and bools, ``y0, y1, ...`` byte strings, ``0, 1, ...`` the tensors; ``__metadata__.isthmus`` the tree (see
``schema.py``).

We write the buffer ourselves and read it with the safetensors library: writing by one function makes :func:`size` exact
without encoding, reading by the library keeps the validated parser between us and another party's bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from isthmus.errors import ProtocolError
from isthmus.federation.messages import Kind, Message, kinds_of, messages_inside
from isthmus.federation.schema import DTYPES, Json, Sink, Source, schema
from isthmus.records import Record

R = TypeVar("R", bound=Record)
Buffer = bytes | memoryview

assert sys.byteorder == "little", "the wire format is little-endian"

LARGE = 2**18
ALONE = 2**16
"""Bytes of a tensor from which on it travels in the memory it has, where the carrier allows it."""
FINITE = (Kind.MODEL, Kind.GRADIENT, Kind.EMBEDDING, Kind.FEATURE, Kind.RANDOM_START)
# Possessive, and closed by the end of the text: nothing to backtrack into, so hostile quotes cost linear time.
_STRINGS = re.compile(r'"(?:[^"\\]++|\\.?)*+(?:"|\Z)', re.DOTALL)
_BRACKETS = re.compile(r"[\[\]{}]")


class Pieces:
    """The bytes of a large record as stretches of memory in their order, which need not be joined: its header, views of
    its large tensors, the small ones between them. To be sent before anybody changes these tensors.
    """

    def __init__(self, stretches: Sequence[Buffer]) -> None:
        self.stretches = tuple(stretches)

    def __len__(self) -> int:
        return sum(map(len, self.stretches))


Part = bytes | memoryview | Pieces


@dataclass(frozen=True)
class Limits:
    """What a receiver accepts before it looks any closer."""

    max_bytes: int = 2**30
    max_tensors: int = 100_000
    max_rank: int = 8
    max_header: int = 16 * 2**20
    max_depth: int = 32


LIMITS = Limits()


def encode(record: Record) -> bytes:
    """The bytes of a record."""
    return b"".join(pieces(record))


def encode_large(record: Record) -> Part:
    """The same; of a large record no tensor of some size is copied."""
    parts = pieces(record)
    if sum(map(len, parts)) < LARGE:
        return b"".join(parts)
    stretches, small = list[Buffer](), list[Buffer]()
    for part in parts:
        if len(part) < ALONE:
            small.append(part)
            continue
        stretches += [b"".join(small), part] if small else [part]
        small = []
    return Pieces([*stretches, b"".join(small)] if small else stretches)


def pieces(record: Record) -> list[Buffer]:
    """The bytes of a record one part after the other: views of its tensors, nothing is copied."""
    header, parts = _layout(record)
    return [len(header).to_bytes(8, "little"), header, *(_raw(part) for part in parts)]


def digest(record: Record) -> str:
    """SHA-256 of a record's type and bytes: the same wherever it is computed, as encoding is."""
    found = hashlib.sha256(type(record).__name__.encode() + b"\0")
    for piece in pieces(record):
        found.update(piece)
    return found.hexdigest()


def size(record: Record) -> int:
    """Exactly ``len(encode(record))``, without copying a tensor. Does not depend on the values of numbers."""
    header, parts = _layout(record)
    return 8 + len(header) + sum(part.numel() * part.element_size() for part in parts)


def measure(message: Message) -> tuple[int, dict[str, int]]:
    """Size of a message, and how many of its bytes carry which kind (the rest is header)."""
    kind = type(message)
    return _measured(kind, schema(kind).footprint(message), lambda: message)


def measure_row(stack: Message) -> tuple[int, dict[str, int]]:
    """`measure` of each message of a stack (`isthmus.federation.interface.Stacked`): all are of one size."""
    node = schema(type(stack))
    return _measured(type(stack), node.footprint_of_row(stack), lambda: node.row(stack, 0))


def _measured(kind: type[Message], footprint: Hashable, message: Callable[[], Message]) -> tuple[int, dict[str, int]]:
    """Clients send the same shapes round after round: a message is looked at where its footprint is new."""
    if (found := _MEASURED.get((kind, footprint))) is None:
        if len(_MEASURED) >= MOST_MEASURED:
            _MEASURED.clear()
        by_kind: dict[str, int] = {}
        whole = message()
        _by_kind(whole, by_kind)
        found = _MEASURED[kind, footprint] = size(whole), by_kind
    return found[0], dict(found[1])


_MEASURED: dict[tuple[type[Message], Hashable], tuple[int, dict[str, int]]] = {}
MOST_MEASURED = 4096
"""Footprints of messages whose measures are remembered."""


def finite(message: Message) -> bool:
    """Whether all models, gradients and embeddings in a message are finite numbers."""
    kind = type(message)
    if not looked_at(kind):  # type: ignore[arg-type]
        return True
    node = schema(kind)
    for name, nested, numbers in _looked_into(kind):  # type: ignore[arg-type]
        value = getattr(message, name)
        if nested and not all(map(finite, messages_inside(value))):
            return False
        if numbers:
            sink = Sink()
            node.fields[name].write(value, sink)
            if not all(_finite(tensor) for tensor in sink.tensors if tensor.is_floating_point()):
                return False
    return True


@cache
def _looked_into(message: type[Message]) -> tuple[tuple[str, bool, bool], ...]:
    """Fields of a message, whether messages are inside, and whether their own numbers must be finite."""
    kinds = kinds_of(message)
    nested = _nested(kinds)
    return tuple((name, name in nested, kinds.get(name) in FINITE) for name in schema(message).fields)


@cache
def looked_at(message: type[Message]) -> bool:
    """Whether anything in messages of this type must be finite."""
    return any(kind in FINITE for kind in kinds_of(message).values())


def _finite(tensor: Tensor) -> bool:
    # A sum is cheap and finite almost always; only if it is not is every element looked at.
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def _nested(kinds: Mapping[str, Kind]) -> set[str]:
    """Fields with messages inside."""
    return {name.partition(".")[0] for name in kinds if "." in name}


def _by_kind(message: Message, by_kind: dict[str, int]) -> None:
    """Add up the bytes of each kind: a message inside a field counts by its own kinds, the rest by the field's."""
    kinds = kinds_of(type(message))
    nested = _nested(kinds)
    for name, node in schema(type(message)).fields.items():
        value = getattr(message, name)
        if type(value) in (int, float) and name in kinds and name not in nested:
            by_kind[kinds[name]] = by_kind.get(kinds[name], 0) + 8
            continue
        before = sum(by_kind.values())
        if name in nested:
            for inner in messages_inside(value):
                _by_kind(inner, by_kind)
        if name in kinds:
            sink = Sink()
            node.write(value, sink)
            numbers = 8 * (len(sink.floats) + len(sink.integers))
            size = (
                sum(tensor.numel() * tensor.element_size() for tensor in sink.tensors)
                + sum(map(len, sink.blobs))
                + numbers
            )
            size -= sum(by_kind.values()) - before
            by_kind[kinds[name]] = by_kind.get(kinds[name], 0) + size


def decode(data: Part, expected: type[R], limits: Limits = LIMITS) -> R:
    """Read a record of exactly the type the receiver declares; anything else is a :class:`ProtocolError`.

    Bytes are read by the safetensors library. A memoryview or pieces, which only an engine of one trust domain hands
    over, are read here, because the library would have them copied once more.
    """
    tree, tensors = _open(data, limits)
    source = _source(tensors)
    node = schema(expected)
    try:
        record = node.read(tree, source)
    except ProtocolError:
        raise
    except Exception as error:  # torch and a record's own __post_init__ raise what they like at hostile values
        raise ProtocolError(f"malformed {expected.__name__}: {type(error).__name__}") from None
    if not source.finished():
        raise ProtocolError(f"malformed {expected.__name__}: values left over")
    assert isinstance(record, expected)
    return record


def copy(record: R) -> R:
    """A checked deep copy: what :func:`decode` of :func:`encode` gives, bit for bit, without the bytes."""
    duplicate = schema(type(record)).copy(record)
    assert isinstance(duplicate, type(record))
    return duplicate


def _layout(record: Record) -> tuple[bytes, list[Tensor]]:
    sink = Sink()
    tree = schema(type(record)).write(record, sink)
    named = {str(i): tensor for i, tensor in enumerate(sink.tensors)}
    named |= {
        f"y{i}": torch.from_numpy(np.frombuffer(blob, dtype=np.uint8).copy()) for i, blob in enumerate(sink.blobs)
    }
    if sink.floats:
        named["f"] = torch.tensor(sink.floats, dtype=torch.float64)
    if sink.integers:
        named["i"] = torch.tensor(sink.integers, dtype=torch.int64)
    # Widest elements first keeps every tensor aligned in the buffer.
    ordered = sorted(named.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {
        "__metadata__": {"isthmus": json.dumps(tree, separators=(",", ":"), ensure_ascii=True)}
    }
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8), [tensor for _, tensor in ordered]


def _raw(tensor: Tensor) -> Buffer:
    # Not reshape: one number is contiguous whatever its stride, and keeps it.
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return (
        flat.view(torch.uint8).numpy().data if flat.numel() else b""
    )  # a view: the bytes are copied once, where they are joined


def _open(data: Part, limits: Limits) -> tuple[Json, dict[str, Tensor]]:
    if len(data) > limits.max_bytes:
        raise ProtocolError(f"message of {len(data)} bytes exceeds the limit of {limits.max_bytes}")
    head, *others = data.stretches if isinstance(data, Pieces) else (data,)
    length = int.from_bytes(head[:8], "little") if len(head) >= 8 else -1
    if not 0 < length <= min(len(head) - 8, limits.max_header):
        raise ProtocolError("message is truncated or has no valid header")
    try:
        header = json.loads(bytes(head[8 : 8 + length]), object_pairs_hook=_no_duplicates)
        metadata = header.pop("__metadata__")
        text = metadata.pop("isthmus")
        if metadata:
            raise ProtocolError("message header holds metadata nobody declared")
        if len(header) > limits.max_tensors or any(len(entry["shape"]) > limits.max_rank for entry in header.values()):
            raise ProtocolError(
                f"message has more than {limits.max_tensors} tensors or a tensor of more than {limits.max_rank} "
                "dimensions"
            )
        if _depth(text) > limits.max_depth:
            raise ProtocolError(f"message is nested deeper than {limits.max_depth}")
        tree = json.loads(text, object_pairs_hook=_no_duplicates)
        body = [memoryview(head)[8 + length :], *(memoryview(each) for each in others)]
        tensors = safetensors.torch.load(data) if isinstance(data, bytes) else _tensors(header, body)
    except ProtocolError:
        raise
    except Exception as error:
        raise ProtocolError(f"message is not a valid safetensors buffer ({type(error).__name__})") from None
    return tree, tensors


def _tensors(header: Mapping[str, Mapping[str, Json]], body: Sequence[memoryview]) -> dict[str, Tensor]:
    """Tensors copied out of stretches of memory, each out of one, with the library's checks: known types, sizes that
    fit, no gap, no overlap, nothing left over.
    """
    tensors, at, which, start = dict[str, Tensor](), 0, 0, 0
    for name, entry in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        dtype, shape, (begin, end) = _TYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if set(entry) != {"dtype", "shape", "data_offsets"} or not all(
            type(n) is int and n >= 0 for n in (*shape, begin, end)
        ):
            raise ProtocolError("message header is malformed")
        while which + 1 < len(body) and begin >= start + len(body[which]):
            start, which = start + len(body[which]), which + 1
        if (
            begin != at
            or end - begin != math.prod(shape) * dtype.itemsize
            or not start <= begin <= end <= start + len(body[which])
        ):
            raise ProtocolError("message header does not fit its tensors")
        own = np.empty(end - begin, dtype=np.uint8)
        own[:] = np.frombuffer(body[which], dtype=np.uint8)[begin - start : end - start]
        tensors[name] = (
            torch.from_numpy(own).view(dtype).reshape(shape) if own.size else torch.empty(shape, dtype=dtype)
        )
        at = end
    if at != sum(map(len, body)):
        raise ProtocolError("message has bytes left over")
    return tensors


_TYPES = {name: dtype for dtype, name in DTYPES.items()}


def _no_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ProtocolError("message header repeats a key")
    return entries


def _depth(text: str) -> int:
    """Deepest bracket level, counted before the JSON parser recurses."""
    level = deepest = 0
    for character in _BRACKETS.findall(_STRINGS.sub("", text)):
        level += 1 if character in "[{" else -1
        deepest = max(deepest, level)
    return deepest


def _source(tensors: dict[str, Tensor]) -> Source:
    tensors = dict(tensors)
    for tensor in tensors.values():
        if tensor.dtype not in DTYPES:
            raise ProtocolError(f"malformed message: tensors of type {tensor.dtype} do not travel")
        # torch trusts a bool to be 0 or 1; another byte would count as more than one True.
        if tensor.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
            raise ProtocolError("malformed message: a bool that is neither 0 nor 1")
    floats, integers = tensors.pop("f", None), tensors.pop("i", None)
    if floats is not None and (floats.dtype != torch.float64 or floats.dim() != 1):
        raise ProtocolError("malformed message: numbers")
    if integers is not None and (integers.dtype != torch.int64 or integers.dim() != 1):
        raise ProtocolError("malformed message: integers")
    blobs = []
    for i in range(sum(name.startswith("y") for name in tensors)):
        blob = tensors.pop(f"y{i}", None)
        if blob is None or blob.dtype != torch.uint8 or blob.dim() != 1:
            raise ProtocolError("malformed message: bytes")
        blobs.append(blob.numpy().tobytes())
    if set(tensors) != {str(i) for i in range(len(tensors))}:
        raise ProtocolError("malformed message: unexpected tensor names")
    return Source(
        [tensors[str(i)] for i in range(len(tensors))],
        blobs,
        [] if floats is None else floats.tolist(),
        [] if integers is None else integers.tolist(),
    )
