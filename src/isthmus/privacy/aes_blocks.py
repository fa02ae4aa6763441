"""AES-128 in counter mode, added to numbers where they lie: what masks are made of.

The streams are those of `isthmus.privacy.prg.Keystream` (a library's cipher), bit for bit. Made here by the processor's
AES instructions in one compiled loop over keys and blocks, a stream is never written to memory and read again, and a
key costs no object: several times faster. The instructions take the same time whatever key and data are.

Where the processor has no such instructions, or numba is told to compile for another one, `WIDTH` is 0 and the library
makes the streams.

    block    16 bytes, two words of the target     counter = number of the block, big-endian, from 0
    vector   WIDTH blocks, one register            a turn of the loop has VECTORS of them under way
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, types
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic
from numpy.typing import NDArray

from isthmus.compiling import machine_code

KEY_BYTES = 16
_ROUNDS = 10
_PIECE = 4096
"""Words that all keys are added to before the next ones are begun: they stay in the nearest cache."""


def _width() -> int:
    """Blocks per register that the compiled code may use."""
    given = config.CPU_NAME, config.CPU_FEATURES  # type: ignore[attr-defined]
    if given != (None, None) or config.DISABLE_JIT:  # type: ignore[attr-defined]
        return 0
    if platform.machine() not in ("x86_64", "AMD64"):
        return 0
    known: Any = get_host_cpu_features
    features = set(known().split(","))
    if features >= {"+vaes", "+avx512f", "+avx512bw"}:
        return 4
    return 1 if features >= {"+aes", "+ssse3"} else 0


WIDTH = _width()
_VECTORS = 4 if WIDTH == 4 else 8
_STEP = 2 * max(1, WIDTH) * _VECTORS
"""Words of one turn of the loop."""

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_BLOCK, _FOUR = ir.VectorType(_I64, 2), ir.VectorType(_I32, 4)


def _function(module: Any, name: str, result: Any, arguments: Sequence[Any]) -> Any:
    return module.globals.get(name) or ir.Function(module, ir.FunctionType(result, arguments), name)


_placed: Callable[[Any], Any] = intrinsic
"""Makes a function whose instructions are written where it is called."""


def _lanes(*numbers: int) -> Any:
    return ir.Constant(ir.VectorType(_I32, len(numbers)), list(numbers))


@_placed
def _expand_key(typing: Any, key: Any, out: Any) -> tuple[Any, Callable[..., Any]]:
    """The eleven round keys (FIPS 197, section 5.2); key and room for them are given by address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        assist = _function(builder.module, "llvm.x86.aesni.aeskeygenassist", _BLOCK, [_BLOCK, _I8])
        source, target = (builder.inttoptr(arg, _BLOCK.as_pointer()) for arg in args)
        key, zero = builder.load(source, align=1), ir.Constant(_FOUR, [0] * 4)

        def put(number: int) -> None:
            builder.store(key, builder.gep(target, [ir.Constant(_I64, number)])).align = 1

        put(0)
        for number, constant in enumerate((1, 2, 4, 8, 16, 32, 64, 128, 27, 54), 1):
            last = builder.bitcast(builder.call(assist, [key, ir.Constant(_I8, constant)]), _FOUR)
            words = builder.bitcast(key, _FOUR)
            for shifted in ((0, 4, 5, 6), (0, 1, 4, 5)):  # word i becomes the sum of words 0 to i
                words = builder.xor(words, builder.shuffle_vector(zero, words, _lanes(*shifted)))
            words = builder.xor(words, builder.shuffle_vector(last, last, _lanes(3, 3, 3, 3)))
            key = builder.bitcast(words, _BLOCK)
            put(number)
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp), generate


@_placed
def _add_blocks(typing: Any, target: Any, keys: Any, first: Any, minus: Any) -> tuple[Any, Callable[..., Any]]:
    """Blocks ``first``, ``first + 1``, ... of one stream, added to :data:`_STEP` words, or subtracted."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width, lanes = WIDTH, 2 * WIDTH
        vector = ir.VectorType(_I64, lanes)
        suffix = {1: "", 4: ".512"}[width]
        middle = _function(builder.module, f"llvm.x86.aesni.aesenc{suffix}", vector, [vector, vector])
        final = _function(builder.module, f"llvm.x86.aesni.aesenclast{suffix}", vector, [vector, vector])
        swap = _function(builder.module, f"llvm.bswap.v{lanes}i64", vector, [vector])
        target = builder.inttoptr(args[0], vector.as_pointer())
        keys = builder.inttoptr(args[1], _BLOCK.as_pointer())
        nothing = ir.Constant(vector, ir.Undefined)

        def round_key(number: int) -> Any:
            key = builder.load(builder.gep(keys, [ir.Constant(_I64, number)]), align=1)
            return builder.shuffle_vector(key, key, _lanes(*[0, 1] * width))

        base = builder.insert_element(nothing, args[2], ir.Constant(_I32, 1))
        base = builder.shuffle_vector(base, ir.Constant(vector, [0] * lanes), _lanes(*[lanes, 1] * width))
        key = round_key(0)
        state = []
        for number in range(_VECTORS):
            counters = [count for block in range(width) for count in (0, number * width + block)]
            state.append(builder.xor(builder.call(swap, [builder.add(base, ir.Constant(vector, counters))]), key))
        for number in range(1, _ROUNDS + 1):
            key = round_key(number)
            state = [builder.call(final if number == _ROUNDS else middle, [each, key]) for each in state]
        sign = builder.insert_element(nothing, builder.sext(args[3], _I64), ir.Constant(_I32, 0))
        sign = builder.shuffle_vector(sign, sign, _lanes(*[0] * lanes))  # 0, or -1 for minus
        for number, each in enumerate(state):
            place = builder.gep(target, [ir.Constant(_I64, number)])
            signed = builder.sub(builder.xor(each, sign), sign)
            builder.store(builder.add(builder.load(place, align=1), signed), place).align = 1
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.uint64, types.boolean), generate


@machine_code
def _add(
    target: NDArray[np.uint64],
    keys: NDArray[np.uint8],
    minus: NDArray[np.bool_],
    round_keys: NDArray[np.uint8],
    rest: NDArray[np.uint64],
) -> None:
    count, size = keys.shape[0], target.size
    whole = size - size % _STEP
    for k in range(count):
        _expand_key(keys.ctypes.data + np.uint64(16 * k), round_keys.ctypes.data + np.uint64(176 * k))
    for begin in range(0, whole, _PIECE):
        for k in range(count):
            for at in range(begin, min(begin + _PIECE, whole), _STEP):
                _add_blocks(
                    target.ctypes.data + np.uint64(8 * at),
                    round_keys.ctypes.data + np.uint64(176 * k),
                    np.uint64(at // 2),
                    minus[k],
                )
    rest[: size - whole] = target[whole:]
    for k in range(count):
        _add_blocks(rest.ctypes.data, round_keys.ctypes.data + np.uint64(176 * k), np.uint64(whole // 2), minus[k])
    target[whole:] = rest[: size - whole]


def add_streams(target: NDArray[np.uint64], add: Sequence[bytes], subtract: Sequence[bytes]) -> None:
    """Add the streams of some keys of 16 bytes to an array without gaps, subtract those of others, modulo 2^64."""
    keys = np.frombuffer(b"".join((*add, *subtract)), np.uint8).reshape(-1, KEY_BYTES)
    minus = np.arange(len(keys)) >= len(add)
    _add(target, keys, minus, np.empty((len(keys), 16 * (_ROUNDS + 1)), np.uint8), np.zeros(_STEP, np.uint64))
