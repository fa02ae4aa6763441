"""Sums of ciphertexts (CKKS through TenSEAL, extra ``he``): whoever adds up holds no key that could open anything.

The clients of a run share a secret key made for that run; the adder gets a :class:`CiphertextAdder`, which has the
public half only. Sums need no multiplication, so one data prime is enough and the parameters follow from the error that
is asked for:

    error of a sum of n numbers  ~  sqrt(n) sqrt((1 + 2N/3) / 12) sqrt(N/2) / scale        (rounding after the special
                                    prime, N slots x 2)

Decrypted CKKS numbers carry noise that depends on the secret key (Li and Micciancio, 2021):
:meth:`HomomorphicKeys.decrypt` rounds to the stated error before it returns, and totals should still not be handed to
the adder in bulk.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import ConfigError, ProtocolError, RunError

Ciphertexts = tuple[bytes, ...]

_SIGMAS = 20.0
"""Half of the stated error is that many standard deviations away. How noisy a slot is depends on the secret key, which
gives the noise
Laplace tails: it goes beyond once in 10^12 numbers."""
_CHOICES = ((4096, (54, 55)), (8192, (60, 60)), (8192, (60, 60, 60)))
"""Degrees and prime sizes with 128-bit security, cheapest first. The last prime is used for keys only."""


@dataclass(frozen=True)
class CkksParameters:
    """What keys are made for.

    Args:
        error: Largest error of one number of the sum.
        terms: Most vectors that are added up.
        bound: Largest magnitude of a number before it is summed.
    """

    error: float
    terms: int
    bound: float

    def __post_init__(self) -> None:
        if not (0 < self.error < math.inf and self.terms >= 1 and 0 < self.bound < math.inf):
            raise ConfigError(f"homomorphic sums need error > 0, terms >= 1 and bound > 0; got {self}")
        self.choose()

    def choose(self) -> tuple[int, tuple[int, ...], int]:
        """Polynomial degree, prime sizes and scale bits: the cheapest that keeps the error and holds the sum."""
        # Half of the error is for rounding what was decrypted; of the other half, 64-bit floats inside the encoder take
        # their part.
        room = self.error / 2 - self.terms * self.bound * 2.0**-50
        for degree, primes in _CHOICES if room > 0 else ():
            deviation = math.sqrt((1 + 2 * degree / 3) / 12) * math.sqrt(degree / 2) * math.sqrt(self.terms)
            scale = max(1, math.ceil(math.log2(_SIGMAS * deviation / room)))
            # One bit for the sign, one to spare.
            if self.terms * self.bound * 2.0**scale < 2.0 ** (sum(primes[:-1]) - 2) and scale <= 60:
                return degree, primes, scale
        raise ConfigError(
            f"no CKKS parameters give sums of {self.terms} numbers up to {self.bound:g} with error {self.error:g}: "
            "allow a larger error or a smaller bound"
        )

    @property
    def slots(self) -> int:
        return self.choose()[0] // 2


class CiphertextAdder:
    """The public half of a run's keys: encrypts and adds, cannot open. This is all the summing party is given."""

    def __init__(self, public: bytes, parameters: CkksParameters) -> None:
        self.parameters = parameters
        self._tenseal = _tenseal()
        self._context = self._tenseal.context_from(public)
        if self._context.is_private():
            raise ProtocolError("a context with the secret key reached the summing party: make keys for a new run")

    def encrypt(self, values: NDArray[np.floating]) -> Ciphertexts:
        """A vector, in pieces of as many numbers as a ciphertext holds."""
        return _encrypt(self._tenseal, self._context, self.parameters, values)

    def add(self, vectors: Iterable[Ciphertexts]) -> Ciphertexts:
        """The sum, still closed."""
        total: list[Any] = []
        count = 0
        for vector in vectors:
            pieces = [self._load(piece) for piece in vector]
            if count and len(pieces) != len(total):
                raise ProtocolError(
                    f"ciphertexts of {len(pieces)} and {len(total)} pieces cannot be added: vectors differ in length"
                )
            total = [a + b for a, b in zip(total, pieces, strict=True)] if count else pieces
            count += 1
        if not 0 < count <= self.parameters.terms:
            raise ProtocolError(f"keys were made for sums of 1 to {self.parameters.terms} vectors, got {count}")
        return tuple(piece.serialize() for piece in total)

    def _load(self, piece: bytes) -> Any:
        try:
            return self._tenseal.ckks_vector_from(self._context, piece)
        except (ValueError, RuntimeError) as error:
            raise ProtocolError(f"not a ciphertext of this run ({type(error).__name__}): ask its party again") from None


class HomomorphicKeys:
    """A run's keys with the secret half, for the clients. :meth:`public` travels to the adder, :meth:`share` only in
    sealed envelopes.
    """

    def __init__(self, parameters: CkksParameters) -> None:
        self.parameters = parameters
        self._tenseal = _tenseal()
        degree, primes, scale = parameters.choose()
        kind = self._tenseal.SCHEME_TYPE.CKKS
        self._context = self._tenseal.context(kind, poly_modulus_degree=degree, coeff_mod_bit_sizes=list(primes))
        self._context.global_scale = 2.0**scale

    def public(self) -> bytes:
        """The context without its secret key (and without keys that only products need)."""
        blob: bytes = self._context.serialize(
            save_public_key=True, save_secret_key=False, save_galois_keys=False, save_relin_keys=False
        )
        return blob

    def adder(self) -> CiphertextAdder:
        """What the summing party builds from :meth:`public`."""
        return CiphertextAdder(self.public(), self.parameters)

    def share(self) -> bytes:
        """The secret context for another client, to travel in a sealed envelope only."""
        blob: bytes = self._context.serialize(
            save_public_key=True, save_secret_key=True, save_galois_keys=False, save_relin_keys=False
        )
        return blob

    @classmethod
    def from_share(cls, blob: bytes, parameters: CkksParameters) -> HomomorphicKeys:
        """Keys another client of the run made."""
        keys = cls.__new__(cls)
        keys.parameters, keys._tenseal = parameters, _tenseal()
        keys._context = keys._tenseal.context_from(blob)
        if not keys._context.is_private():
            raise ProtocolError(
                "the shared context has no secret key: ask for the client's share, not for its public half"
            )
        return keys

    def encrypt(self, values: NDArray[np.floating]) -> Ciphertexts:
        return _encrypt(self._tenseal, self._context, self.parameters, values)

    def decrypt(self, total: Ciphertexts, length: int) -> NDArray[np.float64]:
        """A sum in clear, rounded to the stated error."""
        if len(total) != -(-length // self.parameters.slots):
            raise ProtocolError(
                f"a sum of {length} numbers has {-(-length // self.parameters.slots)} pieces, got {len(total)}"
            )
        pieces = []
        for piece in total:
            try:
                pieces.append(np.array(self._tenseal.ckks_vector_from(self._context, piece).decrypt()))
            except (ValueError, RuntimeError) as error:
                raise ProtocolError(
                    f"not a ciphertext of this run ({type(error).__name__}): ask the adder again"
                ) from None
        values = np.concatenate(pieces) if pieces else np.empty(0)
        if values.size != length or (
            length and float(np.abs(values).max()) > self.parameters.terms * self.parameters.bound * 1.01
        ):
            raise ProtocolError(
                "a decrypted sum has another length or is larger than it can be: it was closed with another key"
            )
        grid = 2.0 ** math.floor(math.log2(self.parameters.error))
        return np.rint(values / grid) * grid

    def __reduce__(self) -> NoReturn:
        raise TypeError("secret keys are never serialised; use public(), or share() inside a sealed envelope")


def _encrypt(tenseal: Any, context: Any, parameters: CkksParameters, values: NDArray[np.floating]) -> Ciphertexts:
    flat: Sequence[float] = values.astype(np.float64).ravel().tolist()
    if not np.isfinite(values).all():
        raise RunError("NaN or infinity cannot be encrypted: training has diverged; lower lr or check the features")
    if values.size and float(np.abs(values).max()) > parameters.bound:
        raise RunError(
            f"a number of magnitude {float(np.abs(values).max()):g} exceeds the bound {parameters.bound:g} of these "
            "keys: "
            "make keys with a larger bound"
        )
    slots = parameters.slots
    return tuple(tenseal.ckks_vector(context, flat[at : at + slots]).serialize() for at in range(0, len(flat), slots))


def _tenseal() -> Any:
    try:
        return importlib.import_module("tenseal")
    except ImportError:
        raise ConfigError("homomorphic sums need TenSEAL: install it with `pip install 'isthmus[he]'`") from None
