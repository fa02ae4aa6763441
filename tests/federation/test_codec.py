"""The codec: what goes in comes out bit for bit, and whatever another party sends instead is a ProtocolError."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from isthmus.errors import ProtocolError
from isthmus.federation import codec
from isthmus.federation.messages import Count, Embedding, Identifier, Message, Model, Share, Structure
from isthmus.federation.schema import DTYPES, LazyRows, OnlyTotal, ScaledRows, add_csr, schema
from isthmus.records import Record, make_record

DTYPE_LIST = tuple(DTYPES)
COMMON = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


# -- records with every kind of value --------------------------------------------------------------


@dataclass(frozen=True)
class Nothing(Message):
    pass


@dataclass(frozen=True)
class Numbers(Message):
    count: Count[int]
    rate: Count[float]


@dataclass(frozen=True)
class Words(Message):
    name: Identifier[str]
    more: Identifier[tuple[str, ...]] = ()


@dataclass(frozen=True)
class Inner(Message):
    tensor: Model[Tensor]
    count: Count[int]
    rate: Count[float]


@dataclass(frozen=True)
class Everything(Message):
    inner: Inner
    maybe: Model[Inner | None]
    tensor: Embedding[Tensor]
    maybe_tensor: Embedding[Tensor | None]
    weights: Model[Mapping[str, Tensor]]
    nested: Structure[tuple[tuple[int, str], ...]]
    pair: Count[tuple[float, bool]]
    deep: Count[Mapping[str, tuple[Mapping[str, int | None], ...]]]
    inners: Model[tuple[Inner, ...]]
    flag: Count[bool]
    nothing: Count[None]
    text: Identifier[str]
    blob: Share[bytes]
    blobs: Share[tuple[bytes, ...]]
    integer: Count[int]
    number: Count[float]


def _raw_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Random *bits* of a type, so that NaN payloads and infinities occur; bools are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.empty(0, dtype=dtype).element_size()
    count = 1
    for n in shape:
        count *= n
    return torch.randint(0, 256, (count * size,), generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)


def _strided(tensor: Tensor, how: str) -> Tensor:
    """The same values in another memory layout."""
    if how == "transposed" and tensor.dim() >= 2:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "stepped" and tensor.dim() >= 1:
        wide = torch.zeros((*tensor.shape[:-1], tensor.shape[-1] * 2), dtype=tensor.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if how == "expanded":
        return tensor.unsqueeze(0).expand(2, *tensor.shape)
    return tensor


@st.composite
def dense(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPE_LIST))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    tensor = _raw_tensor(dtype, shape, draw(st.integers(0, 2**32)))
    return _strided(tensor, draw(st.sampled_from(["plain", "transposed", "stepped", "expanded"])))


@st.composite
def csr(draw: st.DrawFn) -> Tensor:
    rows, columns = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    index = draw(st.sampled_from([torch.int64, torch.int32]))
    picked = [sorted(draw(st.sets(st.integers(0, columns - 1)))) if columns else [] for _ in range(rows)]
    pointers = [0]
    for row in picked:
        pointers.append(pointers[-1] + len(row))
    values = _raw_tensor(draw(st.sampled_from(DTYPE_LIST)), (pointers[-1],), draw(st.integers(0, 2**32)))
    flat = [column for row in picked for column in row]
    parts = torch.tensor(pointers, dtype=index), torch.tensor(flat, dtype=index), values
    return torch.sparse_csr_tensor(*parts, size=(rows, columns), check_invariants=False)


tensors = st.one_of(dense(), csr())
integers = st.one_of(st.sampled_from([-(2**63), 2**63 - 1, 0, -1]), st.integers(-(2**63), 2**63 - 1))
numbers = st.one_of(st.sampled_from([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 5e-324]), st.floats())
texts = st.one_of(
    st.sampled_from(["", '"', "\\", "[{", "]}", '\\"', "\n\t\x00", "ß漢字🧪", "s", "__metadata__", "\u2028"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)
inners = st.builds(Inner, tensors, integers, numbers)
everythings = st.builds(
    Everything,
    inner=inners,
    maybe=st.none() | inners,
    tensor=tensors,
    maybe_tensor=st.none() | tensors,
    weights=st.dictionaries(texts, dense(), max_size=3),
    nested=st.lists(st.tuples(integers, texts), max_size=3).map(tuple),
    pair=st.tuples(numbers, st.booleans()),
    deep=st.dictionaries(
        texts, st.lists(st.dictionaries(texts, st.none() | integers, max_size=2), max_size=2).map(tuple), max_size=2
    ),
    inners=st.lists(inners, max_size=2).map(tuple),
    flag=st.booleans(),
    nothing=st.none(),
    text=texts,
    blob=st.binary(max_size=20),
    blobs=st.lists(st.binary(max_size=3), max_size=12).map(tuple),
    integer=integers,
    number=numbers,
)


def _bytes_of(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _same(a: Any, b: Any) -> bool:
    """Equality bit by bit, types included."""
    if isinstance(a, Tensor):
        if not isinstance(b, Tensor) or (a.layout, a.dtype, a.shape) != (b.layout, b.dtype, b.shape):
            return False
        if a.layout == torch.sparse_csr:
            return all(_same(x, y) for x, y in zip(_parts(a), _parts(b), strict=True))
        return _bytes_of(a) == _bytes_of(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, Record):
        return all(_same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    return bool(a == b)


def _parts(matrix: Tensor) -> list[Tensor]:
    return [matrix.crow_indices(), matrix.col_indices(), matrix.values()]


def _memory(value: Any) -> list[int]:
    """Addresses of all tensor memory in a value."""
    if isinstance(value, Tensor):
        parts = _parts(value) if value.layout == torch.sparse_csr else [value]
        return [part.untyped_storage().data_ptr() for part in parts if part.numel()]
    if isinstance(value, Record):
        return [pointer for f in fields(value) for pointer in _memory(getattr(value, f.name))]
    if isinstance(value, tuple):
        return [pointer for item in value for pointer in _memory(item)]
    if isinstance(value, dict):
        return [pointer for item in value.values() for pointer in _memory(item)]
    return []


@COMMON
@given(everythings)
def test_round_trip_copy_and_size(record: Everything) -> None:
    data = codec.encode(record)
    decoded = codec.decode(data, Everything)
    copied = codec.copy(record)
    assert _same(decoded, record)
    assert _same(copied, record)
    assert not set(_memory(copied)) & set(_memory(record))
    assert codec.size(record) == len(data) == codec.size(decoded) == codec.size(copied)
    total, by_kind = codec.measure(record)
    assert total == len(data)
    assert 0 <= sum(by_kind.values()) <= total - 8
    assert codec.encode(decoded) == data  # one record, one encoding
    viewed = codec.decode(memoryview(data), Everything)
    assert _same(viewed, record)
    assert codec.encode(viewed) == data


@COMMON
@given(everythings)
def test_the_safetensors_library_reads_the_buffer(record: Everything) -> None:
    loaded = safetensors.torch.load(codec.encode(record))
    held = sum(tensor.numel() * tensor.element_size() for tensor in loaded.values())
    assert held == sum(codec.measure(record)[1].values())
    if not isinstance(record.tensor, Tensor) or record.tensor.layout == torch.strided:
        assert any(_same(tensor, record.tensor.contiguous()) for tensor in loaded.values())


@COMMON
@given(st.builds(Inner, dense(), integers, numbers), integers, numbers, st.integers(0, 2**32))
def test_size_does_not_depend_on_numbers(record: Inner, integer: int, number: float, seed: int) -> None:
    other = Inner(_raw_tensor(record.tensor.dtype, tuple(record.tensor.shape), seed), integer, number)
    assert codec.size(record) == codec.size(other)


def test_numbers_start_on_their_own_boundary() -> None:
    """Alignment in the buffer: header padded, widest elements first."""
    data = codec.encode(Inner(torch.ones(3, dtype=torch.int8), 1, 2.0))
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    for name, width in (("f", 8), ("i", 8), ("0", 1)):
        assert header[name]["data_offsets"][0] % width == 0


@pytest.mark.parametrize("record", [Nothing(), Words(""), Words("a", ("b", '"]}', "\\")), Words("s" * 1000)])
def test_records_without_tensors(record: Message) -> None:
    assert _same(codec.decode(codec.encode(record), type(record)), record)
    assert _same(codec.copy(record), record)
    assert codec.size(record) == len(codec.encode(record)) == codec.measure(record)[0]


def test_measures_are_not_those_of_another_message() -> None:
    """Remembered by everything that a size depends on."""
    messages = [Words("ab"), Words("abc"), Words("a\u00e9c"), Nothing()]
    for _ in range(2):
        for message in messages:
            assert codec.measure(message)[0] == len(codec.encode(message))
    codec.measure(messages[0])[1]["model"] = 5
    assert "model" not in codec.measure(messages[0])[1], "what is remembered cannot be changed"


def test_measure_counts_bytes_by_kind() -> None:
    message = Inner(torch.zeros(5, dtype=torch.float32), 3, 1.0)
    assert codec.measure(message)[1] == {"model": 20, "count": 16}


@dataclass(frozen=True)
class Holding(Message):
    by_name: Identifier[Mapping[str, Inner]]
    several: Share[tuple[Inner | None, ...]]


def test_messages_inside_fields_count_by_their_own_kinds() -> None:
    inner = Inner(torch.zeros(5), 3, 1.0)
    message = Holding({"a": inner, "b": inner}, (inner, None))
    assert codec.measure(message)[1] == {"model": 60, "count": 48, "identifier": 0, "share": 0}


def test_plain_values_leave_their_subclasses_at_home() -> None:
    class Colour(StrEnum):
        RED = "red"

    for transfer in (codec.copy, lambda words: codec.decode(codec.encode(words), Words)):
        assert type(transfer(Words(Colour.RED)).name) is str


def test_a_parameter_travels_without_its_graph() -> None:
    parameter = torch.nn.Parameter(torch.arange(4.0))
    for value in (
        codec.copy(Inner(parameter * 2, 1, 1.0)),
        codec.decode(codec.encode(Inner(parameter, 1, 1.0)), Inner),
    ):
        assert not value.tensor.requires_grad and value.tensor.grad_fn is None


def test_records_made_at_run_time_travel() -> None:
    made = make_record("Pair", left=Inner, right=Inner | None)
    values: dict[str, Any] = {"left": Inner(torch.ones(2), 1, 2.0), "right": None}
    assert _same(codec.decode(codec.encode(made(**values)), made), made(**values))


WRONG: list[tuple[str, Callable[[], Record]]] = [
    ("a bool for an integer", lambda: Inner(torch.ones(1), True, 1.0)),
    ("a float for an integer", lambda: Inner(torch.ones(1), 1.0, 1.0)),  # type: ignore[arg-type]
    ("2**63", lambda: Inner(torch.ones(1), 2**63, 1.0)),
    ("-2**63 - 1", lambda: Inner(torch.ones(1), -(2**63) - 1, 1.0)),
    ("an integer beyond floats", lambda: Inner(torch.ones(1), 1, 10**400)),
    ("a string for a number", lambda: Inner(torch.ones(1), 1, "1.0")),  # type: ignore[arg-type]
    ("a list for a tensor", lambda: Inner([1.0], 1, 1.0)),  # type: ignore[arg-type]
    ("COO", lambda: Inner(torch.eye(2).to_sparse(), 1, 1.0)),
    ("CSC", lambda: Inner(torch.eye(2).to_sparse_csc(), 1, 1.0)),
    ("complex", lambda: Inner(torch.ones(1, dtype=torch.complex64), 1, 1.0)),
    ("float8", lambda: Inner(torch.ones(1).to(torch.float8_e4m3fn), 1, 1.0)),
    ("complex CSR", lambda: Inner(torch.eye(2, dtype=torch.complex64).to_sparse_csr(), 1, 1.0)),
    ("batched CSR", lambda: Inner(torch.stack([torch.eye(2), torch.eye(2)]).to_sparse_csr(), 1, 1.0)),
    ("CSR of vectors", lambda: Inner(torch.ones(2, 2, 3).to_sparse_csr(dense_dim=1), 1, 1.0)),
    ("no string", lambda: Words(None)),  # type: ignore[arg-type]
    ("bytes for a string", lambda: Words(b"a")),  # type: ignore[arg-type]
    ("a set for a tuple", lambda: Words("a", {"b"})),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("what", "make"), WRONG, ids=[what for what, _ in WRONG])
def test_copy_and_encode_refuse_alike(what: str, make: Callable[[], Record]) -> None:
    for transfer in (codec.copy, codec.encode, codec.size):
        with pytest.raises(ProtocolError):
            transfer(make())


def test_a_relative_of_the_declared_type_is_refused() -> None:
    @dataclass(frozen=True)
    class Inner2(Inner):
        pass

    @dataclass(frozen=True)
    class Outer(Message):
        inner: Model[Inner]

    Outer.__annotations__["inner"] = Model[Inner]
    outer = Outer(Inner2(torch.ones(1), 1, 1.0))
    with pytest.raises(ProtocolError):
        codec.copy(outer)
    with pytest.raises(ProtocolError):
        codec.decode(codec.encode(Inner2(torch.ones(1), 1, 1.0)), Inner)


def test_what_cannot_travel_is_reported_to_the_author() -> None:
    for hint in (int | str, list[int], Mapping, Mapping[int, str], tuple, object, set[str]):
        made = make_record("Bad", value=hint)
        with pytest.raises(TypeError, match=r"Bad\.value"):
            schema(made)


# -- hostile bytes ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Small(Message):
    matrix: Structure[Tensor]
    names: Identifier[tuple[str, ...]]
    flag: Count[bool]
    rate: Count[float]
    blob: Share[bytes]


SMALL = Small(torch.eye(3).to_sparse_csr(), ("a", "b"), True, 0.5, b"xyz")
SMALL_BYTES = codec.encode(SMALL)


def _refused(data: bytes, expected: type[Record] = Small, limits: codec.Limits = codec.LIMITS) -> str:
    with pytest.raises(ProtocolError):
        codec.decode(memoryview(data), expected, limits)
    with pytest.raises(ProtocolError) as caught:
        codec.decode(data, expected, limits)
    return str(caught.value)


def _decoded_or_refused(data: bytes) -> None:
    """Anything but a ProtocolError propagates and fails the test; what is accepted must be a sound record, the same
    from a view.
    """
    try:
        record = codec.decode(data, Small)
    except ProtocolError:
        with pytest.raises(ProtocolError):
            codec.decode(memoryview(data), Small)
        return
    assert _same(codec.decode(memoryview(data), Small), record)
    assert type(record) is Small
    assert _same(codec.copy(record), record)
    record.matrix.to_dense() if record.matrix.layout == torch.sparse_csr and record.matrix.numel() < 10**4 else None


def test_large_records_are_written_the_same_and_read_without_sharing_memory() -> None:
    record = Inner(torch.arange(codec.LARGE, dtype=torch.float32), 3, 0.5)
    data = codec.encode_large(record)
    assert isinstance(data, codec.Pieces) and b"".join(data.stretches) == codec.encode(record)
    assert len(data) == codec.size(record)
    assert isinstance(codec.encode_large(SMALL), bytes)
    decoded = codec.decode(data, Inner)
    decoded.tensor.zero_()
    assert _same(codec.decode(data, Inner), record)


def test_a_record_of_numbers_is_copied_and_checked_too() -> None:
    numbers = Numbers(3, 0.5)
    copied = codec.copy(numbers)
    assert copied == numbers and copied is not numbers
    assert type(codec.copy(Numbers(3, 1)).rate) is float
    for wrong in (Numbers(True, 0.5), Numbers(2**63, 0.5), Numbers(3, "0.5")):  # type: ignore[arg-type]
        for work in (codec.copy, codec.encode, codec.measure):
            with pytest.raises(ProtocolError):
                work(wrong)


def test_large_tensors_are_not_copied_where_they_are_written() -> None:
    record = Inner(torch.zeros(codec.LARGE), 3, 0.5)
    data = codec.encode_large(record)
    record.tensor.fill_(1.0)
    assert float(codec.decode(data, Inner).tensor.sum()) == codec.LARGE


@pytest.mark.parametrize("change", ["shorter", "longer", "cut elsewhere", "empty"])
def test_pieces_that_do_not_fit_are_refused(change: str) -> None:
    data = codec.encode_large(Inner(torch.ones(codec.LARGE), 3, 0.5))
    assert isinstance(data, codec.Pieces)
    whole = b"".join(data.stretches)
    first = len(data.stretches[0])
    for stretches in {
        "shorter": [(whole[:first], whole[first:-1])],
        "longer": [(whole[:first], whole[first:] + b"0"), (whole[:first], whole[first:], b"0")],
        "cut elsewhere": [(whole[: first + 4], whole[first + 4 :]), (whole[:first], whole[first:-4], whole[-4:])],
        "empty": [(b"",), (whole[:5], whole[5:])],
    }[change]:
        with pytest.raises(ProtocolError):
            codec.decode(codec.Pieces(stretches), Inner)


def test_every_truncation_is_refused() -> None:
    for length in range(len(SMALL_BYTES)):
        _refused(SMALL_BYTES[:length])


def test_trailing_bytes_are_refused() -> None:
    _refused(SMALL_BYTES + b"\0")


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(SMALL_BYTES) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes(changes: list[tuple[int, int]]) -> None:
    data = bytearray(SMALL_BYTES)
    for position, value in changes:
        data[position] = value
    _decoded_or_refused(bytes(data))


def test_every_single_bit_flip() -> None:
    for position in range(len(SMALL_BYTES)):
        for bit in (0, 3, 7):
            data = bytearray(SMALL_BYTES)
            data[position] ^= 1 << bit
            _decoded_or_refused(bytes(data))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    _refused(data)
    _refused(len(data).to_bytes(8, "little") + data)


def test_pickle_is_refused() -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        _refused(pickle.dumps(SMALL.names, protocol))
        payload = pickle.dumps({"names": ("a",)}, protocol)
        _refused(len(payload).to_bytes(8, "little") + payload)


def test_another_record_is_refused() -> None:
    assert "must be a Small" in _refused(codec.encode(Words("a")))
    assert "must be a Words" in _refused(SMALL_BYTES, Words)


def _forge(
    tree: object,
    parts: Mapping[str, tuple[str, list[int], bytes]] | None = None,
    *,
    header: Mapping[str, object] | None = None,
    text: str | None = None,
    metadata: Mapping[str, object] | None = None,
) -> bytes:
    """A safetensors buffer written by somebody else."""
    entries: dict[str, object] = {
        "__metadata__": {"isthmus": json.dumps(tree) if text is None else text, **(metadata or {})}
    }
    body = b""
    for name, (dtype, shape, raw) in (parts or {}).items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    encoded = json.dumps(entries | dict(header or {})).encode()
    return len(encoded).to_bytes(8, "little") + encoded + body


def _ints(*values: int) -> tuple[str, list[int], bytes]:
    return "I64", [len(values)], struct.pack(f"<{len(values)}q", *values)


def _floats(*values: float) -> tuple[str, list[int], bytes]:
    return "F64", [len(values)], struct.pack(f"<{len(values)}d", *values)


def _single(*values: float) -> tuple[str, list[int], bytes]:
    return "F32", [len(values)], struct.pack(f"<{len(values)}f", *values)


INNER_TREE = {"": "Inner", "tensor": "t", "count": "i", "rate": "f"}
INNER_PARTS = {"0": _single(1.0), "i": _ints(7), "f": _floats(0.5)}


def test_the_forge_makes_sound_messages() -> None:
    """So that what the tests below refuse is refused for the one thing they change."""
    decoded = codec.decode(_forge(INNER_TREE, INNER_PARTS), Inner)
    assert _same(decoded, Inner(torch.ones(1), 7, 0.5))
    matrix = codec.decode(_forge(CSR_TREE, _csr_parts()), Inner).tensor
    assert torch.equal(matrix.to_dense(), torch.tensor([[1.0, 2.0], [0.0, 0.0]]))


TREES: dict[str, object] = {
    "extra field": INNER_TREE | {"more": "t"},
    "missing field": {"": "Inner", "tensor": "t", "count": "i"},
    "other order": {"": "Inner", "count": "i", "tensor": "t", "rate": "f"},
    "no type": {"tensor": "t", "count": "i", "rate": "f"},
    "type not text": INNER_TREE | {"": ["Inner"]},
    "a list": ["Inner", "t", "i", "f"],
    "none": None,
    "text": "Inner",
    "number": 3,
    "nan": float("nan"),
    "number inside": INNER_TREE | {"count": 7},
    "none inside": INNER_TREE | {"rate": None},
    "wrong mark": INNER_TREE | {"count": "f"},
    "bool mark": INNER_TREE | {"count": "b"},
    "nested record": INNER_TREE | {"tensor": INNER_TREE},
    "list mark": INNER_TREE | {"tensor": ["t"]},
}


@pytest.mark.parametrize("name", TREES)
def test_forged_trees(name: str) -> None:
    _refused(_forge(TREES[name], INNER_PARTS), Inner)


PARTS: dict[str, Mapping[str, tuple[str, list[int], bytes]]] = {
    "no tensor": {"i": _ints(7), "f": _floats(0.5)},
    "a tensor too many": {**INNER_PARTS, "1": _single(1.0)},
    "an integer too many": {**INNER_PARTS, "i": _ints(7, 8)},
    "a float too many": {**INNER_PARTS, "f": _floats(0.5, 0.5)},
    "bytes nobody asked for": {**INNER_PARTS, "y0": ("U8", [1], b"x")},
    "no integers": {"0": _single(1.0), "f": _floats(0.5)},
    "empty integers": {**INNER_PARTS, "i": _ints()},
    "integers as floats": {**INNER_PARTS, "i": _floats(7.0)},
    "floats as integers": {**INNER_PARTS, "f": _ints(7)},
    "floats of 4 bytes": {**INNER_PARTS, "f": _single(0.5)},
    "integers as a scalar": {**INNER_PARTS, "i": ("I64", [], struct.pack("<q", 7))},
    "integers as a matrix": {**INNER_PARTS, "i": ("I64", [1, 1], struct.pack("<q", 7))},
    "a gap in the names": {"1": _single(1.0), "i": _ints(7), "f": _floats(0.5)},
    "names with zeros": {"00": _single(1.0), "i": _ints(7), "f": _floats(0.5)},
    "a stranger's name": {**INNER_PARTS, "weights": _single(1.0)},
    "bytes without number": {**INNER_PARTS, "y": ("U8", [1], b"x")},
    "float8": {**INNER_PARTS, "0": ("F8_E4M3", [1], b"\x01")},
    "a bool of 2": {**INNER_PARTS, "0": ("BOOL", [2], b"\x01\x02")},
    "an unknown type": {**INNER_PARTS, "0": ("X32", [1], b"abcd")},
    "shape too large": {**INNER_PARTS, "0": ("F32", [2**40], b"abcd")},
    "shape overflows": {**INNER_PARTS, "0": ("F32", [2**62, 2**62], b"abcd")},
    "empty with a huge side": {**INNER_PARTS, "0": ("F32", [0, 2**62, 2**62], b"")},
    "negative shape": {**INNER_PARTS, "0": ("F32", [-1], b"abcd")},
    "too many dimensions": {**INNER_PARTS, "0": ("F32", [1] * 9, b"abcd")},
}


@pytest.mark.parametrize("name", PARTS)
def test_forged_parts(name: str) -> None:
    _refused(_forge(INNER_TREE, PARTS[name]), Inner)


def test_aliased_tensors_are_refused() -> None:
    tree = {"": "Everything"}
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    _refused(_forge(tree, {"0": _single(1.0)}, header={"1": entry}), Everything)

    two = make_record("Two", a=Tensor, b=Tensor)
    alias = _forge({"": "Two", "a": "t", "b": "t"}, {"0": _single(1.0)}, header={"1": entry})
    _refused(alias, two)
    _refused(_forge({"": "Two", "a": "t", "b": "t"}, {"0": _single(1.0)}), two)


@pytest.mark.parametrize("number", [2, -1, 2**62])
def test_a_bool_is_0_or_1(number: int) -> None:
    flag = make_record("Flag", flag=bool)
    assert codec.decode(_forge({"": "Flag", "flag": "b"}, {"i": _ints(1)}), flag) == flag(flag=True)
    _refused(_forge({"": "Flag", "flag": "b"}, {"i": _ints(number)}), flag)


CSR_TREE = {"": "Inner", "tensor": ["c", 2, 2], "count": "i", "rate": "f"}


def _csr_parts(
    columns: tuple[str, list[int], bytes] | None = None,
    pointers: tuple[str, list[int], bytes] | None = None,
    values: tuple[str, list[int], bytes] | None = None,
) -> dict[str, tuple[str, list[int], bytes]]:
    """[[1, 2], [0, 0]] by default."""
    return {
        "0": values or _single(1.0, 2.0),
        "1": columns or _ints(0, 1),
        "2": pointers or _ints(0, 2, 2),
        "i": _ints(7),
        "f": _floats(0.5),
    }


BAD_CSR: dict[str, bytes] = {
    "negative column": _forge(CSR_TREE, _csr_parts(columns=_ints(0, -1))),
    "column out of range": _forge(CSR_TREE, _csr_parts(columns=_ints(0, 2))),
    "far column": _forge(CSR_TREE, _csr_parts(columns=_ints(0, 2**62))),
    "pointers fall": _forge(CSR_TREE, _csr_parts(pointers=_ints(0, 3, 2))),
    "pointers start late": _forge(CSR_TREE, _csr_parts(pointers=_ints(1, 2, 2))),
    "pointers end early": _forge(CSR_TREE, _csr_parts(pointers=_ints(0, 1, 1))),
    "pointers end late": _forge(CSR_TREE, _csr_parts(pointers=_ints(0, 2, 3))),
    "pointers negative": _forge(CSR_TREE, _csr_parts(pointers=_ints(0, -1, 2))),
    "too few pointers": _forge(CSR_TREE, _csr_parts(pointers=_ints(0, 2))),
    "too many pointers": _forge(CSR_TREE, _csr_parts(pointers=_ints(0, 2, 2, 2))),
    "no pointers": _forge(CSR_TREE, _csr_parts(pointers=_ints())),
    "fewer values than columns": _forge(CSR_TREE, _csr_parts(values=_single(1.0))),
    "columns as floats": _forge(CSR_TREE, _csr_parts(columns=_floats(0.0, 1.0))),
    "columns narrower than pointers": _forge(CSR_TREE, _csr_parts(columns=("I32", [2], struct.pack("<2i", 0, 1)))),
    "columns as a matrix": _forge(CSR_TREE, _csr_parts(columns=("I64", [1, 2], struct.pack("<2q", 0, 1)))),
    "values as a matrix": _forge(CSR_TREE, _csr_parts(values=("F32", [2, 1], struct.pack("<2f", 1, 2)))),
    "negative shape": _forge(CSR_TREE | {"tensor": ["c", -1, 2]}, _csr_parts(pointers=_ints())),
    "shape not numbers": _forge(CSR_TREE | {"tensor": ["c", "2", 2]}, _csr_parts()),
    "shape of bools": _forge(CSR_TREE | {"tensor": ["c", True, 2]}, _csr_parts(pointers=_ints(0, 2))),
    "shape of floats": _forge(CSR_TREE | {"tensor": ["c", 2.0, 2]}, _csr_parts()),
    "three sides": _forge(CSR_TREE | {"tensor": ["c", 2, 2, 2]}, _csr_parts()),
    "one side": _forge(CSR_TREE | {"tensor": ["c", 2]}, _csr_parts()),
    "a huge side": _forge(CSR_TREE | {"tensor": ["c", 2, 2**60]}, _csr_parts()),
    "sides whose product overflows": _forge(
        CSR_TREE | {"tensor": ["c", 2**17, 2**48 - 1]},
        _csr_parts(_ints(), ("I64", [2**17 + 1], bytes(8 * (2**17 + 1))), _single()),
    ),
    "parts missing": _forge(CSR_TREE, {"0": _single(1.0, 2.0), "1": _ints(0, 1), "i": _ints(7), "f": _floats(0.5)}),
}


@pytest.mark.parametrize("name", BAD_CSR)
def test_forged_csr(name: str) -> None:
    _refused(BAD_CSR[name], Inner)


def test_repeated_keys_are_refused() -> None:
    words = '{"":"Words","name":"sa","name":"sb","more":[]}'
    assert "repeats" in _refused(_forge(None, text=words), Words)
    body = b'{"__metadata__":{"isthmus":"{\\"\\":\\"Nothing\\"}"},"__metadata__":{"isthmus":"{\\"\\":\\"Nothing\\"}"}}'
    assert "repeats" in _refused(len(body).to_bytes(8, "little") + body, Nothing)


def test_undeclared_metadata_is_refused() -> None:
    assert codec.decode(_forge({"": "Nothing"}), Nothing) == Nothing()
    _refused(_forge({"": "Nothing"}, metadata={"note": "my neighbour's labels"}), Nothing)


def test_deep_nesting_is_refused() -> None:
    for depth in (33, 1000, 100_000, 1_000_000):
        assert "nested deeper" in _refused(_forge(None, text="[" * depth + "]" * depth), Words)
    body = b"[" * 1_000_000
    _refused(len(body).to_bytes(8, "little") + body)


@pytest.mark.parametrize("end", ["", "\\", '"', "["])
def test_hostile_quotes_take_linear_time(end: str) -> None:
    """A backtracking pattern would take minutes over these."""
    _refused(_forge(None, text='"' + '\\"' * 200_000 + end), Words)
    _refused(_forge(None, text='"' * 200_001 + end), Words)


def test_brackets_inside_strings_are_no_nesting() -> None:
    words = Words("[{" * 100 + '\\"', ("\\" * 7, '"' * 9, "[" * 40))
    assert codec.decode(codec.encode(words), Words) == words


def test_limits() -> None:
    size = len(SMALL_BYTES)
    codec.decode(SMALL_BYTES, Small, codec.Limits(max_bytes=size))
    assert "exceeds" in _refused(SMALL_BYTES, limits=codec.Limits(max_bytes=size - 1))
    header = int.from_bytes(SMALL_BYTES[:8], "little")
    codec.decode(SMALL_BYTES, Small, codec.Limits(max_header=header))
    _refused(SMALL_BYTES, limits=codec.Limits(max_header=header - 1))
    codec.decode(SMALL_BYTES, Small, codec.Limits(max_tensors=6))
    assert "more than 5 tensors" in _refused(SMALL_BYTES, limits=codec.Limits(max_tensors=5))
    tensor = Inner(torch.ones(1, 1, 1), 1, 1.0)
    codec.decode(codec.encode(tensor), Inner, codec.Limits(max_rank=3))
    _refused(codec.encode(tensor), Inner, codec.Limits(max_rank=2))
    codec.decode(SMALL_BYTES, Small, codec.Limits(max_depth=2))
    assert "nested deeper" in _refused(SMALL_BYTES, limits=codec.Limits(max_depth=1))


@pytest.mark.parametrize("length", [0, 2**63, 2**64 - 1, 2**32])
def test_declared_header_length(length: int) -> None:
    _refused(length.to_bytes(8, "little") + SMALL_BYTES[8:])


def test_a_record_that_refuses_its_values_is_a_protocol_error() -> None:
    good = Positive(2.0)
    assert codec.decode(codec.encode(good), Positive) == good
    data = codec.encode(good).replace(struct.pack("<d", 2.0), struct.pack("<d", 0.0))
    _refused(data, Positive)


@dataclass(frozen=True)
class Positive(Message):
    rate: Count[float]
    inverse: Count[float] = field(default=0.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inverse", 1.0 / self.rate)


def test_no_error_quotes_what_a_stranger_sent() -> None:
    """An error's text ends up in logs: it names types and places, not contents."""
    trees = (
        {"name": ["secret"], "more": []},
        {"name": "sa", "secret": [], "more": []},
        {"name": "not marked: secret", "more": []},
    )
    for tree in trees:
        assert "secret" not in _refused(_forge({"": "Words", **tree}), Words)


# -- sums and rows ---------------------------------------------------------------------------------


@COMMON
@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 2**32))
def test_csr_sums_equal_dense_sums(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-2, 3, (rows, columns), generator=generator).double() for _ in range(2))
    total = add_csr(a.to_sparse_csr(), b.to_sparse_csr())
    assert torch.equal(total.to_dense(), a + b)
    crow, col = total.crow_indices(), total.col_indices()
    for row in range(rows):
        own = col[crow[row] : crow[row + 1]]
        assert torch.equal(own, own.sort().values)


SUMMABLE = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", SUMMABLE)
def test_a_stack_sums_like_its_rows(dtype: torch.dtype) -> None:
    stack = torch.tensor([[1, 2], [3, 4], [5, 6]]).to(dtype)
    node = schema(Inner)
    message = Inner(stack, torch.tensor([1, 2, 3]), torch.tensor([0.5, 0.25, 1.0]))  # type: ignore[arg-type]
    rows = [node.row(message, k) for k in range(3)]
    assert rows[1].count == 2 and rows[1].rate == 0.25 and torch.equal(rows[1].tensor, stack[1])
    assert not set(_memory(rows[1])) & set(_memory(message))
    summed = node.add(node.add(rows[0], rows[1]), rows[2])
    assert _same(node.sum_rows(message), summed)


def test_scaled_rows_stand_for_the_product() -> None:
    stack, scale = (
        torch.arange(12.0, dtype=torch.float64).reshape(3, 2, 2),
        torch.tensor([0.5, 0.25, 2.0], dtype=torch.float64),
    )
    node = schema(Inner).fields["tensor"]
    rows = ScaledRows(stack, scale)
    assert torch.equal(node.row(rows, 2), stack[2] * 2.0)
    assert torch.equal(node.sum_rows(rows), (stack * scale[:, None, None]).sum(0))


@pytest.mark.parametrize("stands", ["stack", "scaled rows", "lazy rows", "only the total"])
def test_a_stack_is_measured_like_its_rows(stands: str) -> None:
    stack = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tensor: Any = {
        "stack": stack,
        "scaled rows": ScaledRows(stack, torch.ones(3, dtype=torch.float64)),
        "lazy rows": LazyRows(lambda k: stack[k], lambda: stack.sum(0), torch.empty(()).expand(4)),
        "only the total": OnlyTotal(stack.sum(0), 3),
    }[stands]
    message = Inner(tensor, torch.tensor([1, 2, 3]), torch.ones(3))  # type: ignore[arg-type]
    node = schema(Inner)
    for k in range(3):
        row = node.row(message, k)
        assert node.footprint_of_row(message) == node.footprint(row)
        assert codec.measure_row(message) == codec.measure(row) == (len(codec.encode(row)), {"model": 16, "count": 16})


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.uint32, torch.uint64])
def test_tensors_without_a_sum(dtype: torch.dtype) -> None:
    message = Inner(torch.ones(2).to(dtype), 1, 1.0)
    with pytest.raises(ProtocolError, match="summed"):
        schema(Inner).add(message, message)
    with pytest.raises(ProtocolError, match="summed"):
        schema(Inner).sum_rows(replace(message, count=torch.ones(2), rate=torch.ones(2)))  # type: ignore[arg-type]


def test_things_that_do_not_add_up() -> None:
    one = Inner(torch.ones(2), 1, 1.0)
    for other in (
        replace(one, tensor=torch.ones(3)),
        replace(one, tensor=torch.ones(2).double()),
        replace(one, tensor=torch.ones(1)),
    ):
        with pytest.raises(ProtocolError, match="different shape"):
            schema(Inner).add(one, other)
    with pytest.raises(ProtocolError, match="64 bits"):
        schema(Inner).add(replace(one, count=2**63 - 1), one)
    with pytest.raises(ProtocolError, match="summed"):
        schema(Words).add(Words("a"), Words("a"))
    maps = make_record("Maps", values=Mapping[str, int], maybe=int | None, items=tuple[int, ...])
    full = maps(values={"a": 1}, maybe=1, items=(1, 2))
    assert schema(maps).add(full, full) == maps(values={"a": 2}, maybe=2, items=(2, 4))
    for changed in ({"values": {"b": 1}}, {"maybe": None}, {"items": (1,)}):
        with pytest.raises(ProtocolError):
            schema(maps).add(full, replace(full, **changed))


# -- finite numbers --------------------------------------------------------------------------------


def test_finite_looks_at_models_gradients_and_embeddings() -> None:
    assert codec.finite(Inner(torch.ones(2), 1, float("nan")))
    assert codec.finite(
        Inner(torch.full((2,), 6e4, dtype=torch.float16), 1, 1.0)
    )  # the sum overflows, the numbers do not
    for bad in (float("nan"), float("inf"), float("-inf")):
        assert not codec.finite(Inner(torch.tensor([1.0, bad]), 1, 1.0))
    assert not codec.finite(Inner(torch.tensor([float("inf"), float("-inf")]), 1, 1.0))


def test_finite_looks_into_maps_and_tuples_of_messages() -> None:
    good, bad = Inner(torch.ones(2), 1, 1.0), Inner(torch.tensor([float("nan")]), 1, 1.0)
    assert codec.finite(Holding({"a": good}, (good, None)))
    assert not codec.finite(Holding({"a": good, "b": bad}, ())) and not codec.finite(Holding({}, (None, bad)))
