"""Messages as words: what comes back is the sum, or a refusal."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import ConfigError, ProtocolError, RunError
from isthmus.privacy.flatten import LeafTemplate, decode_leaves, encode_all, error_bound, largest, template_of_leaves


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-1000, 1000), st.integers(-(2**60), 2**60)), min_size=1, max_size=5),
    st.integers(32, 44),
)
def test_sum_of_words_is_the_sum_of_numbers(rows: list[tuple[float, int]], bits: int) -> None:
    parties = len(rows)
    words = [
        encode_all([torch.tensor([[x]], dtype=torch.float64), x, n], parties=parties, fraction_bits=bits)
        for x, n in rows
    ]
    total = np.sum(words, axis=0, dtype=np.uint64)
    template = template_of_leaves([torch.zeros(1, 1, dtype=torch.float64), 0.0, 0])
    tensor, real, integer = decode_leaves(total, template, parties=parties, fraction_bits=bits)
    exact = sum(x for x, _ in rows)
    assert isinstance(tensor, torch.Tensor) and tensor.shape == (1, 1)
    assert (
        abs(float(tensor) - exact) <= error_bound(parties, bits) + 1e-9
        and abs(float(real) - exact) <= error_bound(parties, bits) + 1e-9
    )
    assert integer == sum(n for _, n in rows) and isinstance(integer, int)


def test_types_and_shapes_come_back() -> None:
    reals = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    integers = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    tensors = [torch.arange(6, dtype=dtype).reshape(2, 3) for dtype in reals + integers]
    tensors += [torch.tensor(-2.5), torch.empty(0, 4)]
    template = LeafTemplate.from_json(template_of_leaves([*tensors, 3, -0.5]).to_json())
    words = encode_all([*tensors, 3, -0.5], parties=2)
    leaves = decode_leaves(words + words, template, parties=2)
    for before, after in zip(tensors, leaves, strict=False):
        assert isinstance(after, torch.Tensor) and after.dtype == before.dtype and torch.equal(after, before + before)
    assert leaves[-2:] == [6, -1.0]


def test_non_contiguous_and_gradient_tensors() -> None:
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    assert torch.equal(
        decode_leaves(encode_all([x.T], parties=1), template_of_leaves([x.T]), parties=1)[0], x.detach().T
    )


@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf")))
def test_what_is_no_number_is_refused(value: float) -> None:
    for dtype in (torch.float16, torch.float32, torch.float64):
        with pytest.raises(RunError, match="NaN or infinity"):
            encode_all([torch.tensor([0.0, value], dtype=dtype)], parties=3)
    with pytest.raises(RunError, match="NaN or infinity"):
        encode_all([value], parties=3)


def test_numbers_that_could_wrap_are_refused() -> None:
    for parties in (1, 3, 100):
        limit = largest(parties)
        encode_all([torch.tensor([0.99 * limit], dtype=torch.float64)], parties=parties)
        for bad in (1.0001 * limit, -1.01 * limit, 1e300):
            with pytest.raises(RunError, match="too large"):
                encode_all([torch.tensor([bad], dtype=torch.float64)], parties=parties)
    encode_all([torch.tensor([2**62 - 1]), -(2**62) + 1], parties=2)
    for tensors, numbers in (
        ([torch.tensor([2**62])], []),
        ([], [2**62]),
        ([], [-(2**70)]),
        ([torch.tensor([-(2**63)])], []),
    ):
        with pytest.raises(RunError, match="too large"):
            encode_all([*tensors, *numbers], parties=2)
    # A total that its own type cannot hold.
    words = encode_all([torch.tensor([100], dtype=torch.int8)], parties=2)
    with pytest.raises(ProtocolError, match="does not fit"):
        decode_leaves(words + words, template_of_leaves([torch.zeros(1, dtype=torch.int8)]), parties=2)


def test_what_has_no_sum_is_refused() -> None:
    for leaf in (torch.tensor([True]), torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse_csr()):
        with pytest.raises(ProtocolError):
            encode_all([leaf], parties=2)
    with pytest.raises(ProtocolError, match="no sum"):
        encode_all([True], parties=2)
    for bits in (31, 53):
        with pytest.raises(ConfigError, match="fractional bits"):
            encode_all([1.0], parties=2, fraction_bits=bits)


BAD_TEMPLATES = (
    None,
    [[]],
    [["F32", -1]],
    [["F32", True]],
    [["F32", 2.0]],
    [["Q8", 1]],
    [["int", 3]],
    [["F32", 2**41]],
    [3],
)


@pytest.mark.parametrize("template", BAD_TEMPLATES)
def test_hostile_templates_are_refused(template: object) -> None:
    with pytest.raises(ProtocolError):
        LeafTemplate.from_json(template)
    with pytest.raises(ProtocolError):
        decode_leaves(np.zeros(3, np.uint64), template_of_leaves([torch.zeros(4)]), parties=1)
