"""The numbers of a message as 64-bit words, and back: what a masked sum adds up.

Real numbers become signed fixed point with ``fraction_bits`` after the point, integers stay as they are; both modulo
2^64. A number for which the sum of all parties could leave the 64 bits is refused, never wrapped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.errors import ConfigError, ProtocolError, RunError
from isthmus.privacy.kernels import fixed_point
from isthmus.privacy.prg import Words

Leaf = Tensor | int | float
Integers = NDArray[np.int64]

FRACTION_BITS = 40
"""Default resolution 9e-13. Sums over n parties then hold numbers up to 8e6 / n."""
LEAST_FRACTION_BITS = 32
_MOST_WORDS = 2**40

_REAL = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INTEGER = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_DTYPES = _REAL | _INTEGER
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_FLOAT, _INT = "float", "int"


@dataclass(frozen=True)
class LeafTemplate:
    """Types and shapes of a message's numbers in order: public, and the same at every party of a sum."""

    leaves: tuple[tuple[str, tuple[int, ...]], ...]

    def __post_init__(self) -> None:
        for name, shape in self.leaves:
            if name not in _DTYPES and name not in (_FLOAT, _INT):
                raise ProtocolError(
                    f"numbers of type {name!r} cannot be summed: send {', '.join(_DTYPES)} tensors, ints or floats"
                )
            if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in shape) or (
                shape and name in (_FLOAT, _INT)
            ):
                raise ProtocolError(f"a leaf of type {name} cannot have shape {shape}")
        if self.words > _MOST_WORDS:
            raise ProtocolError(f"a message of {self.words} numbers is too large to sum")

    @property
    def words(self) -> int:
        return sum(math.prod(shape) for _, shape in self.leaves)

    def to_json(self) -> list[list[str | int]]:
        """For a message header: one ``[type, *shape]`` per leaf."""
        return [[name, *shape] for name, shape in self.leaves]

    @staticmethod
    def from_json(value: object) -> LeafTemplate:
        """Read what another party sent."""
        if not isinstance(value, list) or not all(
            isinstance(leaf, list) and leaf and isinstance(leaf[0], str) for leaf in value
        ):
            raise ProtocolError("a leaf template must be a list of [type, *shape]")
        return LeafTemplate(tuple((leaf[0], tuple(leaf[1:])) for leaf in value))


def template_of_leaves(leaves: Sequence[Leaf]) -> LeafTemplate:
    return LeafTemplate(tuple(_describe(leaf) for leaf in leaves))


def largest(parties: int, fraction_bits: int = FRACTION_BITS) -> float:
    """Magnitude below which every party's real numbers must stay."""
    return 2.0 ** (63 - fraction_bits) / parties


def error_bound(parties: int, fraction_bits: int = FRACTION_BITS) -> float:
    """Largest error of a summed real number before it is rounded to its own type."""
    return parties * 2.0 ** -(fraction_bits + 1)


class WordRows:
    """Room for ``count`` vectors of one length that is used again and again: fresh memory for each of many clients in
    every round would cost more than all that is written to it.
    """

    def __init__(self, count: int) -> None:
        self._count, self._left, self._rows = count, count, np.empty((0, 0), np.int64)

    def begin(self) -> WordRows:
        """All vectors may be overwritten now."""
        self._left = self._count
        return self

    def take(self, words: int) -> Integers:
        """A vector that nobody else has until the next :meth:`begin`."""
        if self._left == self._count and self._rows.shape[1] != words:
            self._rows = np.empty((self._count, words), np.int64)
        if self._left < 1 or self._rows.shape[1] != words:
            return np.empty(words, np.int64)
        self._left -= 1
        row: Integers = self._rows[self._left]
        return row


def encode_all(
    leaves: Sequence[Leaf],
    *,
    parties: int,
    fraction_bits: int = FRACTION_BITS,
    spare: int = 0,
    rows: WordRows | None = None,
) -> Words:
    """Leaves in any order as one vector of words.

    Args:
        parties: How many such vectors will be added.
        spare: Words at the end that are left for the caller to fill.
        rows: Where the vector is made; default an array of its own.
    """
    if parties < 1:
        raise ConfigError(f"a sum needs at least one party, got {parties}")
    check_fraction_bits(fraction_bits)
    words = (rows or WordRows(1)).take(template_of_leaves(leaves).words + spare)
    at = 0
    for leaf in leaves:
        part = words[at : at + (leaf.numel() if isinstance(leaf, Tensor) else 1)]
        at += part.size
        if isinstance(leaf, int):
            _check_integer(abs(leaf), parties)
            part[0] = leaf
        elif isinstance(leaf, float):
            _encode_real(np.array([leaf]), parties, fraction_bits, part)
        elif leaf.is_floating_point():
            wide = torch.float32 if leaf.dtype == torch.float32 else torch.float64
            _encode_real(leaf.detach().reshape(-1).to("cpu", wide).numpy(), parties, fraction_bits, part)
        else:
            _encode_integer(leaf.detach().reshape(-1).to("cpu", torch.int64).numpy(), parties, part)
    return words.view(np.uint64)


def decode_leaves(
    total: Words, template: LeafTemplate, *, parties: int, fraction_bits: int = FRACTION_BITS
) -> list[Leaf]:
    """The sum of ``parties`` encoded messages as leaves, in the order of the template."""
    if total.dtype != np.uint64 or total.shape != (template.words,):
        raise ProtocolError(f"a total of {template.words} words was expected, got {total.dtype} of shape {total.shape}")
    check_fraction_bits(fraction_bits)
    signed = total.view(np.int64)
    leaves: list[Leaf] = []
    at = 0
    for name, shape in template.leaves:
        part = signed[at : at + math.prod(shape)]
        at += part.size
        if name == _INT:
            leaves.append(int(part[0]))
        elif name == _FLOAT:
            leaves.append(float(part[0]) * 2.0**-fraction_bits)
        elif name in _INTEGER:
            leaves.append(_decode_integer(part, name).reshape(shape))
        else:
            leaves.append(
                torch.from_numpy(part.astype(np.float64) * 2.0**-fraction_bits).to(_REAL[name]).reshape(shape)
            )
    return leaves


def check_fraction_bits(bits: int) -> None:
    if not LEAST_FRACTION_BITS <= bits <= 52:
        raise ConfigError(f"secure sums use {LEAST_FRACTION_BITS} to 52 fractional bits, got {bits}")


def _describe(leaf: Leaf) -> tuple[str, tuple[int, ...]]:
    if isinstance(leaf, bool) or not isinstance(leaf, (Tensor, int, float)):
        raise ProtocolError(f"{type(leaf).__name__} has no sum: only tensors, ints and floats can be summed")
    if not isinstance(leaf, Tensor):
        return (_INT if isinstance(leaf, int) else _FLOAT), ()
    if leaf.layout != torch.strided:
        raise ProtocolError("sparse tensors are summed over an announced support: see isthmus.privacy.sparse")
    if leaf.dtype not in _NAMES:
        raise ProtocolError(f"tensors of type {leaf.dtype} cannot be summed: send int64 or a float type")
    return _NAMES[leaf.dtype], tuple(leaf.shape)


def _encode_real(values: NDArray[Any], parties: int, bits: int, out: Integers) -> None:
    if not values.size:
        return
    high, low = float(values.max()), float(values.min())  # NaN if there is one
    top = max(high, -low)
    if not (math.isfinite(high) and math.isfinite(low)):
        raise RunError(
            "a message to be summed holds NaN or infinity: training has diverged; lower lr or check the features"
        )
    # Scaling and rounding are exact; strictly below the limit, so that the sum of all parties stays inside 63 bits and
    # a sign.
    if top * 2.0**bits >= 2.0**63 or round(top * 2.0**bits) * parties >= 2**63:
        raise RunError(
            f"a number of magnitude {top:g} is too large for a secure sum of {parties} parties with {bits} fractional "
            "bits "
            f"(below {largest(parties, bits):g}): scale it down, or set fewer fractional bits (at least "
            f"{LEAST_FRACTION_BITS})"
        )
    fixed_point(values, 2.0**bits, out)


def _encode_integer(values: Integers, parties: int, out: Integers) -> None:
    if values.size:
        _check_integer(max(abs(int(values.max())), abs(int(values.min()))), parties)
        out[:] = values


def _check_integer(top: int, parties: int) -> None:
    if top * parties >= 2**63:
        raise RunError(
            f"an integer of magnitude {top} is too large for a secure sum of {parties} parties in 64 bits: scale it "
            "down"
        )


def _decode_integer(part: Integers, name: str) -> Tensor:
    dtype = _INTEGER[name]
    limits = torch.iinfo(dtype)
    if part.size and not (limits.min <= int(part.min()) and int(part.max()) <= limits.max):
        raise ProtocolError(f"a sum of {name} tensors does not fit in {name}: send int64")
    return torch.from_numpy(part.copy()).to(dtype)
