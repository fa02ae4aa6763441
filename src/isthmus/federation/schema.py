"""The shape of a record, compiled once from its annotations.

One tree of nodes per record type does everything that needs to walk a message: check it, copy it (isolation in
process), write and read it (codec), tell messages of different sizes apart (ledger), add messages up (``sum``) and take
one client's row out of a stack (cohort).
Reading is driven by what the *receiver* declares, never by what the bytes claim.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from isthmus.errors import ProtocolError
from isthmus.records import Record

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
}
"""Types of tensors that travel, with their names in a safetensors header."""

Json = Any
"""A tree of JSON values. Numbers are never in it: they live in two 8-byte arrays, so size does not depend on values."""


@dataclass
class Sink:
    """Where a record's leaves go while its tree is written."""

    tensors: list[Tensor] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)
    integers: list[int] = field(default_factory=list)


@dataclass
class Source:
    """The leaves a tree is read with. Each leaf must be used exactly once, in order: no aliasing, no leftovers."""

    tensors: Sequence[Tensor]
    blobs: Sequence[bytes]
    floats: Sequence[float]
    integers: Sequence[int]
    next_tensor: int = 0
    next_blob: int = 0
    next_float: int = 0
    next_integer: int = 0

    def take_tensor(self) -> Tensor:
        self.next_tensor += 1
        return self.tensors[self.next_tensor - 1]

    def finished(self) -> bool:
        return (self.next_tensor, self.next_blob, self.next_float, self.next_integer) == (
            len(self.tensors),
            len(self.blobs),
            len(self.floats),
            len(self.integers),
        )


@dataclass(frozen=True)
class ScaledRows:
    """A stack (K, ...) whose row k stands for ``scale[k] * tensor[k]``; sums without forming the product."""

    tensor: Tensor
    scale: Tensor


@dataclass(frozen=True)
class LazyRows:
    """A stack that is never formed: ``row(k)`` gives one party's tensor, ``total()`` the sum over all; ``like`` is a
    tensor of a row's shape and type.
    """

    row: Callable[[int], Tensor]
    total: Callable[[], Tensor]
    like: Tensor


@dataclass(frozen=True)
class OnlyTotal:
    """A stack of ``parties`` rows of which only the sum was ever formed: for cohorts whose replies go into
    ``federation.sum``.

    A single row stands for an equal part of the total. It has the right shape and the rows add up, but it is nobody's
    own message.
    """

    total: Tensor
    parties: int


class Node:
    """One place in a record. ``where`` names it in errors."""

    def __init__(self, where: str) -> None:
        self.where = where

    def wrong(self, value: object, wanted: str) -> ProtocolError:
        return ProtocolError(f"{self.where} must be {wanted}, got {type(value).__name__}")

    def copy(self, value: Any) -> Any:
        """A checked copy that shares no memory with ``value``."""
        raise NotImplementedError

    def write(self, value: Any, sink: Sink) -> Json:
        raise NotImplementedError

    def read(self, tree: Json, source: Source) -> Any:
        raise NotImplementedError

    def footprint(self, value: Any) -> Hashable:
        """What the size of a value depends on: two values of one footprint take the same bytes. Checks what `write`
        checks.
        """
        raise NotImplementedError

    def footprint_of_row(self, stack: Any) -> Hashable:
        """`footprint` of every `row` of a stack, which is not formed."""
        return self.footprint(self.row(stack, 0))

    def add(self, a: Any, b: Any) -> Any:
        """a + b; a may be re-used. Raises for things that have no sum."""
        raise ProtocolError(f"{self.where} cannot be summed: only tensors and numbers can")

    def row(self, stack: Any, k: int) -> Any:
        """Client k's value out of a cohort's stack."""
        raise ProtocolError(f"{self.where} cannot be stacked: only tensors and numbers can")

    def rows(self, stack: Any, count: int) -> list[Any]:
        """`row` of every k."""
        return [self.row(stack, k) for k in range(count)]

    def sum_rows(self, stack: Any) -> Any:
        raise ProtocolError(f"{self.where} cannot be summed: only tensors and numbers can")


class NoneNode(Node):
    def copy(self, value: Any) -> None:
        if value is not None:
            raise self.wrong(value, "None")

    def write(self, value: Any, sink: Sink) -> Json:
        return self.copy(value)

    def read(self, tree: Json, source: Source) -> None:
        if tree is not None:
            raise self.wrong(tree, "None")

    def footprint(self, value: Any) -> Hashable:
        self.copy(value)
        return None


class BoolNode(Node):
    def copy(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise self.wrong(value, "a bool")
        return value

    def write(self, value: Any, sink: Sink) -> Json:
        sink.integers.append(int(self.copy(value)))
        return "b"

    def read(self, tree: Json, source: Source) -> bool:
        number = _take_integer(self, tree, "b", source)
        if number not in (0, 1):
            raise ProtocolError(f"{self.where} must be a bool, got {number}")
        return bool(number)

    def footprint(self, value: Any) -> Hashable:
        self.copy(value)
        return "b"


class IntNode(Node):
    def copy(self, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(value, "an integer")
        if not -(2**63) <= value < 2**63:
            raise ProtocolError(f"{self.where} does not fit in 64 bits")
        return int(value)

    def write(self, value: Any, sink: Sink) -> Json:
        sink.integers.append(self.copy(value))
        return "i"

    def read(self, tree: Json, source: Source) -> int:
        return _take_integer(self, tree, "i", source)

    def footprint(self, value: Any) -> Hashable:
        self.copy(value)
        return "i"

    def footprint_of_row(self, stack: Any) -> Hashable:
        return "i"

    def add(self, a: Any, b: Any) -> int:
        return self.copy(a + b)

    def row(self, stack: Any, k: int) -> int:
        return int(stack[k])

    def rows(self, stack: Any, count: int) -> list[Any]:
        return [int(value) for value in torch.as_tensor(stack).tolist()]

    def sum_rows(self, stack: Any) -> int:
        return int(torch.as_tensor(stack).sum())


class FloatNode(Node):
    def copy(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (float, int)):
            raise self.wrong(value, "a number")
        try:
            return float(value)
        except OverflowError:
            raise ProtocolError(f"{self.where} does not fit in a 64-bit float") from None

    def write(self, value: Any, sink: Sink) -> Json:
        sink.floats.append(self.copy(value))
        return "f"

    def read(self, tree: Json, source: Source) -> float:
        if tree != "f" or source.next_float >= len(source.floats):
            raise self.wrong(tree, "a number")
        source.next_float += 1
        return float(source.floats[source.next_float - 1])

    def footprint(self, value: Any) -> Hashable:
        self.copy(value)
        return "f"

    def footprint_of_row(self, stack: Any) -> Hashable:
        return "f"

    def add(self, a: Any, b: Any) -> float:
        return float(a) + float(b)

    def row(self, stack: Any, k: int) -> float:
        return float(stack[k])

    def rows(self, stack: Any, count: int) -> list[Any]:
        return [float(value) for value in torch.as_tensor(stack).tolist()]

    def sum_rows(self, stack: Any) -> float:
        return float(torch.as_tensor(stack, dtype=torch.float64).sum())


class StrNode(Node):
    def copy(self, value: Any) -> str:
        if not isinstance(value, str):
            raise self.wrong(value, "a string")
        return str.__str__(value)  # plain, also where a StrEnum is given

    def write(self, value: Any, sink: Sink) -> Json:
        return "s" + self.copy(value)

    def read(self, tree: Json, source: Source) -> str:
        if not isinstance(tree, str) or not tree.startswith("s"):
            raise self.wrong(tree, "a string")
        return tree[1:]

    def footprint(self, value: Any) -> Hashable:
        return "s" + self.copy(value)


class BytesNode(Node):
    def copy(self, value: Any) -> bytes:
        if not isinstance(value, bytes):
            raise self.wrong(value, "bytes")
        return bytes(value)

    def write(self, value: Any, sink: Sink) -> Json:
        sink.blobs.append(self.copy(value))
        return "y"

    def read(self, tree: Json, source: Source) -> bytes:
        if tree != "y" or source.next_blob >= len(source.blobs):
            raise self.wrong(tree, "bytes")
        source.next_blob += 1
        return source.blobs[source.next_blob - 1]

    def footprint(self, value: Any) -> Hashable:
        return len(self.copy(value))


class TensorNode(Node):
    """Dense tensors travel as they are; CSR as values, column indices, row pointers and shape."""

    def _check(self, value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            raise self.wrong(value, "a tensor")
        if value.dtype not in DTYPES:
            raise ProtocolError(f"{self.where}: tensors of type {value.dtype} do not travel")
        if value.layout == torch.sparse_csr:
            if value.dim() != 2 or value.values().dim() != 1:
                raise ProtocolError(
                    f"{self.where}: a CSR tensor travels as one matrix of numbers, not {tuple(value.shape)}"
                )
        elif value.layout != torch.strided:
            raise ProtocolError(f"{self.where}: tensors travel dense or CSR, not {value.layout}")
        return value.detach()

    def copy(self, value: Any) -> Tensor:
        tensor = self._check(value)
        if tensor.layout == torch.sparse_csr:
            return _csr(
                tensor.crow_indices().clone(),
                tensor.col_indices().clone(),
                tensor.values().clone(),
                tuple(tensor.shape),
            )
        return tensor.clone(memory_format=torch.contiguous_format)

    def write(self, value: Any, sink: Sink) -> Json:
        tensor = self._check(value)
        if tensor.layout == torch.sparse_csr:
            sink.tensors += [tensor.values(), tensor.col_indices(), tensor.crow_indices()]
            return ["c", *(int(n) for n in tensor.shape)]
        sink.tensors.append(tensor)
        return "t"

    def read(self, tree: Json, source: Source) -> Tensor:
        if tree == "t" and source.next_tensor < len(source.tensors):
            return source.take_tensor()
        if (
            isinstance(tree, list)
            and len(tree) == 3
            and tree[0] == "c"
            and source.next_tensor + 3 <= len(source.tensors)
            and all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**48 for n in tree[1:])
        ):
            return self._read_csr(source.take_tensor(), source.take_tensor(), source.take_tensor(), (tree[1], tree[2]))
        raise self.wrong(tree, "a tensor")

    def footprint(self, value: Any) -> Hashable:
        tensor = self._check(value)
        if tensor.layout == torch.sparse_csr:
            parts = tensor.values(), tensor.col_indices(), tensor.crow_indices()
            return (tensor.shape, *((part.dtype, part.shape) for part in parts))
        return tensor.dtype, tensor.shape

    def footprint_of_row(self, stack: Any) -> Hashable:
        if isinstance(stack, LazyRows):
            return self.footprint(stack.like)
        if isinstance(stack, OnlyTotal):
            return self.footprint(stack.total)
        rows = self._check(stack.tensor if isinstance(stack, ScaledRows) else stack)
        return rows.dtype, rows.shape[1:]

    def _read_csr(self, values: Tensor, columns: Tensor, pointers: Tensor, shape: tuple[int, int]) -> Tensor:
        """torch trusts CSR parts by default; from another party each invariant is checked."""
        sound = (
            values.dim() == columns.dim() == pointers.dim() == 1
            and columns.dtype == pointers.dtype
            and columns.dtype in (torch.int64, torch.int32)
            and values.numel() == columns.numel()
            and pointers.numel() == shape[0] + 1
            and int(pointers[0]) == 0
            and int(pointers[-1]) == values.numel()
            and bool((pointers[1:] >= pointers[:-1]).all())
            and (columns.numel() == 0 or (int(columns.min()) >= 0 and int(columns.max()) < shape[1]))
        )
        if not sound:
            raise ProtocolError(f"{self.where} is not a valid CSR matrix of shape {shape}")
        return _csr(pointers, columns, values, shape)

    def add(self, a: Any, b: Any) -> Tensor:
        if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
            raise ProtocolError(f"{self.where}: parties sent tensors of different shape, type or layout")
        self._check_sum(a.dtype)
        if a.layout == torch.sparse_csr:
            return add_csr(a, b)
        total: Tensor = a + b
        return total

    def row(self, stack: Any, k: int) -> Tensor:
        if isinstance(stack, ScaledRows):
            return stack.tensor[k] * stack.scale[k]
        if isinstance(stack, LazyRows):
            return stack.row(k)
        if isinstance(stack, OnlyTotal):
            return stack.total / stack.parties
        tensor: Tensor = stack[k].clone()  # what the server holds must not change while the cohort trains on
        return tensor

    def sum_rows(self, stack: Any) -> Tensor:
        if isinstance(stack, OnlyTotal):
            return stack.total
        if isinstance(stack, LazyRows):
            return stack.total()
        if isinstance(stack, ScaledRows):
            flat = stack.tensor.reshape(stack.tensor.shape[0], -1)
            return (stack.scale.to(flat.dtype) @ flat).reshape(stack.tensor.shape[1:])
        self._check_sum(stack.dtype)
        total: Tensor = stack.sum(
            0, dtype=stack.dtype
        )  # torch would widen small integers; single messages are not widened either
        return total

    def _check_sum(self, dtype: torch.dtype) -> None:
        if dtype in _NO_SUM:
            raise ProtocolError(
                f"{self.where} cannot be summed: tensors of type {dtype} have no sum; send int64 or a float"
            )


class OptionalNode(Node):
    def __init__(self, where: str, inner: Node) -> None:
        super().__init__(where)
        self.inner = inner

    def copy(self, value: Any) -> Any:
        return None if value is None else self.inner.copy(value)

    def write(self, value: Any, sink: Sink) -> Json:
        return None if value is None else self.inner.write(value, sink)

    def read(self, tree: Json, source: Source) -> Any:
        return None if tree is None else self.inner.read(tree, source)

    def add(self, a: Any, b: Any) -> Any:
        if a is None and b is None:
            return None
        if a is None or b is None:
            raise ProtocolError(f"{self.where}: some parties sent a value and some none")
        return self.inner.add(a, b)

    def row(self, stack: Any, k: int) -> Any:
        return None if stack is None else self.inner.row(stack, k)

    def footprint(self, value: Any) -> Hashable:
        return None if value is None else self.inner.footprint(value)

    def footprint_of_row(self, stack: Any) -> Hashable:
        return None if stack is None else self.inner.footprint_of_row(stack)

    def sum_rows(self, stack: Any) -> Any:
        return None if stack is None else self.inner.sum_rows(stack)


class TupleNode(Node):
    """``tuple[X, ...]`` or ``tuple[A, B]``."""

    def __init__(self, where: str, items: tuple[Node, ...], *, repeat: bool) -> None:
        super().__init__(where)
        self.items, self.repeat = items, repeat

    def _nodes(self, value: Any) -> Sequence[Node]:
        if not isinstance(value, (tuple, list)):
            raise self.wrong(value, "a tuple")
        if self.repeat:
            return self.items * len(value)
        if len(value) != len(self.items):
            raise ProtocolError(f"{self.where} must have {len(self.items)} entries, got {len(value)}")
        return self.items

    def copy(self, value: Any) -> tuple[Any, ...]:
        return tuple(node.copy(item) for node, item in zip(self._nodes(value), value, strict=True))

    def write(self, value: Any, sink: Sink) -> Json:
        return [node.write(item, sink) for node, item in zip(self._nodes(value), value, strict=True)]

    def read(self, tree: Json, source: Source) -> tuple[Any, ...]:
        return tuple(node.read(item, source) for node, item in zip(self._nodes(tree), tree, strict=True))

    def add(self, a: Any, b: Any) -> tuple[Any, ...]:
        if len(a) != len(b):
            raise ProtocolError(f"{self.where}: parties sent tuples of different length")
        return tuple(node.add(x, y) for node, x, y in zip(self._nodes(a), a, b, strict=True))

    def row(self, stack: Any, k: int) -> tuple[Any, ...]:
        return tuple(node.row(item, k) for node, item in zip(self._nodes(stack), stack, strict=True))

    def footprint(self, value: Any) -> Hashable:
        return tuple(node.footprint(item) for node, item in zip(self._nodes(value), value, strict=True))

    def footprint_of_row(self, stack: Any) -> Hashable:
        return tuple(node.footprint_of_row(item) for node, item in zip(self._nodes(stack), stack, strict=True))

    def sum_rows(self, stack: Any) -> tuple[Any, ...]:
        return tuple(node.sum_rows(item) for node, item in zip(self._nodes(stack), stack, strict=True))


class MapNode(Node):
    """A string-keyed map; key order is kept."""

    def __init__(self, where: str, value: Node) -> None:
        super().__init__(where)
        self.value = value

    def _items(self, value: Any) -> Any:
        if not isinstance(value, Mapping) or not all([isinstance(key, str) for key in value]):
            raise self.wrong(value, "a map with string keys")
        return value.items()

    def copy(self, value: Any) -> dict[str, Any]:
        return {key: self.value.copy(item) for key, item in self._items(value)}

    def write(self, value: Any, sink: Sink) -> Json:
        return {key: self.value.write(item, sink) for key, item in self._items(value)}

    def read(self, tree: Json, source: Source) -> dict[str, Any]:
        return {key: self.value.read(item, source) for key, item in self._items(tree)}

    def add(self, a: Any, b: Any) -> dict[str, Any]:
        if a.keys() != b.keys():
            raise ProtocolError(f"{self.where}: parties sent different entries ({sorted(a.keys() ^ b.keys())})")
        return {key: self.value.add(a[key], b[key]) for key in a}

    def row(self, stack: Any, k: int) -> dict[str, Any]:
        return {key: self.value.row(item, k) for key, item in stack.items()}

    def footprint(self, value: Any) -> Hashable:
        return tuple([(key, self.value.footprint(item)) for key, item in self._items(value)])

    def footprint_of_row(self, stack: Any) -> Hashable:
        return tuple([(key, self.value.footprint_of_row(item)) for key, item in self._items(stack)])

    def rows(self, stack: Any, count: int) -> list[Any]:
        columns = {key: self.value.rows(item, count) for key, item in stack.items()}
        return [{key: column[k] for key, column in columns.items()} for k in range(count)]

    def sum_rows(self, stack: Any) -> dict[str, Any]:
        return {key: self.value.sum_rows(item) for key, item in stack.items()}


class RecordNode(Node):
    """A record of exactly this type: what arrives is what the receiver declared, not a relative of it."""

    def __init__(self, where: str, record: type[Record]) -> None:
        super().__init__(where)
        self.record = record
        hints = get_type_hints(record, include_extras=True)
        self.fields = {f.name: _compile(f"{record.__name__}.{f.name}", hints[f.name]) for f in fields(record)}
        marks = [_NUMBERS.get(type(node)) for node in self.fields.values()]
        self._numbers = tuple(marks) if marks and None not in marks else None
        self._numbers_footprint = tuple("i" if kind is int else "f" for kind in marks)

    def _check(self, value: Any) -> None:
        if type(value) is not self.record:
            raise self.wrong(value, f"a {self.record.__name__}")

    def _plain(self, value: Any) -> list[Any] | None:
        """The values of a record of numbers alone that need no closer look. Evaluations have a dozen such records for
        every client.
        """
        if self._numbers is None:
            return None
        values = [getattr(value, name) for name in self.fields]
        for k, kind in enumerate(self._numbers):
            if type(values[k]) is not kind or (kind is int and not -(2**63) <= values[k] < 2**63):
                return None
        return values

    def copy(self, value: Any) -> Any:
        self._check(value)
        plain = self._plain(value)
        if plain is not None:
            return self.record(*plain)
        return self.record(**{name: node.copy(getattr(value, name)) for name, node in self.fields.items()})

    def write(self, value: Any, sink: Sink) -> Json:
        self._check(value)
        return {"": self.record.__name__} | {
            name: node.write(getattr(value, name), sink) for name, node in self.fields.items()
        }

    def read(self, tree: Json, source: Source) -> Any:
        if not isinstance(tree, dict) or tree.get("") != self.record.__name__:
            raise self.wrong(tree, f"a {self.record.__name__}")
        if list(tree) != ["", *self.fields]:
            missing, extra = [name for name in self.fields if name not in tree], len(set(tree) - {"", *self.fields})
            raise ProtocolError(
                f"{self.where}: {self.record.__name__} has other fields here: missing {missing}, {extra} unknown"
            )
        return self.record(**{name: node.read(tree[name], source) for name, node in self.fields.items()})

    def add(self, a: Any, b: Any) -> Any:
        return self.record(**{name: node.add(getattr(a, name), getattr(b, name)) for name, node in self.fields.items()})

    def row(self, stack: Any, k: int) -> Any:
        return self.record(**{name: node.row(getattr(stack, name), k) for name, node in self.fields.items()})

    def footprint(self, value: Any) -> Hashable:
        self._check(value)
        if self._plain(value) is not None:
            return self._numbers_footprint
        return tuple([node.footprint(getattr(value, name)) for name, node in self.fields.items()])

    def footprint_of_row(self, stack: Any) -> Hashable:
        self._check(stack)
        if self._numbers is not None:
            return self._numbers_footprint
        return tuple([node.footprint_of_row(getattr(stack, name)) for name, node in self.fields.items()])

    def rows(self, stack: Any, count: int) -> list[Any]:
        columns = [node.rows(getattr(stack, name), count) for name, node in self.fields.items()]
        return [self.record(*values) for values in zip(*columns, strict=True)]  # fields stand in their order

    def sum_rows(self, stack: Any) -> Any:
        return self.record(**{name: node.sum_rows(getattr(stack, name)) for name, node in self.fields.items()})


def schema(record: type[Record]) -> RecordNode:
    """The compiled shape of a record type."""
    if record not in _SCHEMAS:
        _SCHEMAS[record] = RecordNode(record.__name__, record)
    return _SCHEMAS[record]


_SCHEMAS: dict[type[Record], RecordNode] = {}


def add_csr(a: Tensor, b: Tensor) -> Tensor:
    """Sum of two CSR matrices, columns sorted, so the result does not depend on how its parts were stored."""
    rows, columns = a.shape
    index = torch.cat([_flat_index(a, columns), _flat_index(b, columns)])
    values = torch.cat([a.values(), b.values()])
    unique, inverse = torch.unique(index, return_inverse=True)
    summed = torch.zeros(unique.numel(), dtype=values.dtype).index_add_(0, inverse, values)
    pointers = torch.zeros(rows + 1, dtype=torch.int64)
    pointers[1:] = torch.bincount(unique // columns, minlength=rows).cumsum(0) if columns else 0
    return _csr(pointers, unique % columns if columns else unique, summed, (rows, columns))


def _flat_index(matrix: Tensor, columns: int) -> Tensor:
    pointers = matrix.crow_indices().long()
    row = torch.repeat_interleave(torch.arange(matrix.shape[0]), pointers[1:] - pointers[:-1])
    return row * columns + matrix.col_indices().long()


def _csr(pointers: Tensor, columns: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.sparse_csr_tensor(pointers, columns, values, size=tuple(shape), check_invariants=False)


def _take_integer(node: Node, tree: Json, mark: str, source: Source) -> int:
    if tree != mark or source.next_integer >= len(source.integers):
        raise node.wrong(tree, "a bool" if mark == "b" else "an integer")
    source.next_integer += 1
    return int(source.integers[source.next_integer - 1])


_NUMBERS: dict[type[Node], type] = {IntNode: int, FloatNode: float}
"""Types of numbers that are what they say, by their nodes."""

_NO_SUM = (torch.bool, torch.uint16, torch.uint32, torch.uint64)

_SCALARS: dict[object, type[Node]] = {
    bool: BoolNode,
    int: IntNode,
    float: FloatNode,
    str: StrNode,
    bytes: BytesNode,
    Tensor: TensorNode,
    type(None): NoneNode,
}


def _compile(where: str, hint: Any) -> Node:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _compile(where, arguments[0])
    if hint in _SCALARS:
        return _SCALARS[hint](where)
    if isinstance(hint, type) and issubclass(hint, Record):
        return schema(hint)
    if origin in (Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not type(None)]
        if len(inner) == 1 and len(arguments) == 2:
            return OptionalNode(where, _compile(where, inner[0]))
    if origin is tuple and arguments:
        repeat = len(arguments) == 2 and arguments[1] is Ellipsis
        items = arguments[:1] if repeat else arguments
        return TupleNode(where, tuple(_compile(f"{where}[{i}]", item) for i, item in enumerate(items)), repeat=repeat)
    if isinstance(origin, type) and issubclass(origin, Mapping) and len(arguments) == 2 and arguments[0] is str:
        return MapNode(where, _compile(f"{where}[...]", arguments[1]))
    raise TypeError(
        f"{where}: {hint!r} cannot travel; "
        "use tensors, numbers, bool, None, str, bytes, tuple[...], Mapping[str, ...], records, or X | None"
    )
