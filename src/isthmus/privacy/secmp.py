"""Secret message passing: every node learns the sum over its neighbours, nobody a neighbour's part (HiFGL, Guo et al.,
KDD 2024).

    spec                       here
    T                          SecretSums.threshold     holders besides the target; fewer than all of them with the
                                                        target learn only sums
    m = enc(clip(h_v))         FixedPoint.encode
    s_1                        SecretSums.hide          what the source sends to the target
    s_2 .. s_{T+1}             SecretSums.held          never sent: expanded from a key that source and holder share for
                                                        this edge
    degree bucket, handles     deal_slots               what a holder sees of a target: a number of slots under a
                                                        random pseudonym
    (ours)                     SecretSums.check         one more element per message, linear in the others: a sum that
                                                        lost or changed a
                                                        share on its way is refused, never decoded to something wrong

``hardened`` (spec 11.3). Per edge and holder the source makes one key and sends it once, in a sealed box through the
target, who shuffles the boxes and pads their number to a power of two with boxes of its own. From then on, in every
exchange, source and holder expand the key under the exchange's own nonce to the holder's share of this message; the
source completes share 1, which is all that travels. So masks are fresh in every (edge, layer, round, direction), an
exchange costs d + 1 elements per edge whatever T is, and the holder needs no message at all.

# Differs from the spec: it seals a new 32-byte seed per exchange; one key per run and a nonce give the same
distribution and less traffic.

``published`` (spec 3.3): masks common to all sources of a silo, all T + 1 shares to the target, the silo decodes. Kept
for the attacks in the tests.

Functions of arrays only; which party holds which of them is decided in `isthmus.methods.hifgl`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import ConfigError, ProtocolError
from isthmus.privacy.chacha import KEY_BYTES, Nonce, expand, expand_sum
from isthmus.privacy.edge_keys import Bytes
from isthmus.privacy.field import Elements, Field
from isthmus.privacy.fixedpoint import Encoded, FixedPoint, Reals
from isthmus.privacy.lagrange import LagrangeCode
from isthmus.privacy.prg import Keystream

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Exchange:
    """Which exchange of a run this is. No two have the same nonce, and keys belong to one run.

    Args:
        round: Of its phase; 0 in setup.
        layer: From 1.
        backward: Gradients over reversed edges instead of values along them.
        evaluation: For prediction, between rounds.
        part: Block of columns, where raw features travel in several.
    """

    round: int
    layer: int
    backward: bool = False
    evaluation: bool = False
    part: int = 0

    def nonce(self) -> Nonce:
        if not (0 <= self.round < 2**32 and 0 < self.layer < 2**16 and 0 <= self.part < 2**32):
            raise ConfigError(f"{self} cannot be numbered: use fewer than 2^32 rounds and 2^16 layers")
        return self.round, self.layer | self.backward << 16 | self.evaluation << 17, self.part


class SecretSums:
    """The hardened protocol's arithmetic for one format and threshold."""

    def __init__(self, format: FixedPoint, threshold: int) -> None:
        self.format, self.field, self.threshold = format, format.field, threshold
        self.code = LagrangeCode(format.field, threshold)

    def encode(self, values: Reals, nonce: Nonce) -> Encoded:
        """Values of sources in fixed point, with their check: (n, d) -> (n, d + 1)."""
        encoded = self.format.encode(values)
        return Encoded(np.concatenate([encoded.values, self.check(encoded.values, nonce)], axis=1), encoded.clipped)

    def hide(self, encoded: Elements, rows: Rows, times: Rows, keys: Bytes, nonce: Nonce) -> Elements:
        """Share 1 of every message, (E, d + 1): the source.

        Args:
            encoded: (n, d + 1), from `encode`, one row per source.
            rows: (E,), row of the source of each edge.
            times: (E,), how often its value counts; 0 sends a sharing of zero.
            keys: (E, T, 32), of each edge with each holder.
        """
        return self._first(gather(self.field, encoded, rows, times), keys, nonce)

    def check(self, values: Elements, nonce: Nonce) -> Elements:
        """One element per row, a combination of the others by factors that belong to the exchange: (n, d) -> (n, 1)."""
        if not values.shape[1]:
            return np.zeros((values.shape[0], 1), np.uint64)
        factors = expand(self.field, np.zeros((1, KEY_BYTES), np.uint8), nonce, values.shape[1])
        return self.field.combine(factors.tolist(), np.ascontiguousarray(values.T)).reshape(-1, 1)

    def zeros(self, keys: Bytes, width: int, nonce: Nonce) -> Elements:
        """Share 1 of sharings of zero: the target's padding. (P, T, 32) -> (P, d + 1)"""
        return self._first(np.zeros((keys.shape[0], width + 1), np.uint64), keys, nonce)

    def held(self, keys: Bytes, sizes: Rows, width: int, nonce: Nonce) -> Elements:
        """A holder's sums by pseudonym: slots (n, 32) in groups of ``sizes`` (H,) -> (H, d + 1). It decodes nothing."""
        return expand_sum(self.field, keys, sizes, nonce, width + 1)

    def open(self, first: Elements, others: Sequence[Elements], terms: int, nonce: Nonce) -> NDArray[np.float64]:
        """The sums of values, at the target: its own sums of share 1 and those of all other holders, (n, d + 1) each ->
        (n, d).
        """
        if len(others) != self.threshold:
            raise ProtocolError(
                f"{self.threshold + 1} share holders are needed, {len(others) + 1} answered: repeat the round with all "
                "of them"
            )
        sums = self.code.decode(np.stack([first, *others]))
        values = np.ascontiguousarray(sums[:, :-1])
        wrong = int(np.count_nonzero(self.check(values, nonce)[:, 0] != sums[:, -1]))
        if wrong:
            raise ProtocolError(
                f"{wrong} sums do not pass their check: shares were lost or changed on the way, or do not belong "
                "together; "
                "repeat the round"
            )
        return self.format.decode(values, terms)

    def _first(self, secret: Elements, keys: Bytes, nonce: Nonce) -> Elements:
        others = np.stack([expand(self.field, keys[:, j], nonce, secret.shape[1]) for j in range(self.threshold)])
        return self.code.complete(secret, others)


@dataclass(frozen=True)
class PublicMasks:
    """mu of a silo as printed: points and *masks* that every source of the silo's devices is given.

    Args:
        masks: z_2 .. z_{T+1}, (T, D); a message of width d uses their first d entries.
    """

    code: LagrangeCode
    masks: Elements

    def encode(self, secret: Elements) -> Elements:
        """All T + 1 shares of each message: (E, d) -> (T + 1, E, d)."""
        masks = np.broadcast_to(self.masks[:, None, : secret.shape[1]], (self.code.threshold, *secret.shape))
        return self.code.encode_with(secret, masks)

    def decode(self, summed: Elements) -> Elements:
        """What the silo does: (T + 1, n, d) -> (n, d)."""
        return self.code.decode(summed)


def gather(field: Field, encoded: Elements, rows: Rows, times: Rows) -> Elements:
    """The secret of each edge: ``times`` the encoding of its source."""
    secret = encoded[rows]
    return secret if bool((times == 1).all()) else field.mul(secret, times[:, None].astype(np.uint64))


@dataclass(frozen=True)
class Slots:
    """How the edges and padding of a group of targets are laid out for holders. A handle is a target's pseudonym.

    Args:
        order: (slots,), position in [edges, padding] of each slot; slots of one handle follow each other.
        sizes: (n,), slots of each handle: powers of two.
        handle: (n,), the handle of each target.
        padding: (P,), target of each padding message.
    """

    order: Rows
    sizes: Rows
    handle: Rows
    padding: Rows


def bucket(degree: Rows) -> Rows:
    """The next power of two, at least 1: what a holder learns of a degree."""
    return np.left_shift(1, np.ceil(np.log2(np.maximum(degree, 1))).astype(np.int64))


def deal_slots(target: Rows, count: int, stream: Keystream | None = None) -> Slots:
    """Shuffle, pad and rename. ``target`` (E,): target row of each edge; ``count``: all targets, also without edges."""
    stream = stream or Keystream.fresh()
    degree = np.bincount(target, minlength=count).astype(np.int64)
    wanted = bucket(degree)
    padding = np.repeat(np.arange(count), wanted - degree)
    everyone = np.concatenate([target, padding])
    handle = np.argsort(stream.words(count), kind="stable").astype(np.int64)
    order = np.lexsort((stream.words(everyone.size), handle[everyone])).astype(np.int64)
    sizes = np.empty(count, np.int64)
    sizes[handle] = wanted
    return Slots(order, sizes, handle, padding)
