"""Lagrange coding: shares of a vector such that any T of T + 1 tell nothing and sums of shares are shares of the sum.

HiFGL (Guo et al., 2024), its hierarchical Lagrangian embedding, with a prime large enough for real embeddings.

    paper            here
    T                LagrangeCode.threshold      colluding share holders that learn nothing
    alpha_i          LagrangeCode.alphas         T + 1 points at which shares are taken
    beta_1           LagrangeCode.betas[0]       point of the secret
    beta_2..T+1      LagrangeCode.betas[1:]      points of the masks z_j

    g(x) = m L_1(x) + sum_j z_j L_j(x),   share_i = g(alpha_i),   L_j(x) = prod_{k != j} (x - beta_k) / (beta_j -
                                                                  beta_k)

Masks are drawn fresh for every encoding. Nobody may hold all T + 1 shares of one vector: they determine it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import numpy as np

from isthmus.errors import ConfigError, ProtocolError
from isthmus.privacy.field import Elements, Field
from isthmus.privacy.prg import KEY_BYTES, Keystream

_BLOCK = 1 << 17


class LagrangeCode:
    """Encode, sum, decode for one threshold.

    Args:
        threshold: T >= 1.
        alphas: T + 1 points for shares; default T + 2 .. 2T + 2.
        betas: T + 1 points for secret and masks; default 1 .. T + 1.
    """

    def __init__(
        self, field: Field, threshold: int = 1, alphas: Sequence[int] | None = None, betas: Sequence[int] | None = None
    ) -> None:
        if threshold < 1:
            raise ConfigError(f"a threshold below 1 protects nothing, got {threshold}")
        holders = threshold + 1
        if 2 * holders > field.prime:
            raise ConfigError(
                f"threshold {threshold} needs {2 * holders} distinct points; the field has {field.prime}: use a larger "
                "prime"
            )
        self.field, self.threshold, self.holders = field, threshold, holders
        self.betas = tuple(betas if betas is not None else range(1, holders + 1))
        self.alphas = tuple(alphas if alphas is not None else range(holders + 1, 2 * holders + 1))
        if len(self.alphas) != holders or len(self.betas) != holders:
            raise ConfigError(
                f"threshold {threshold} needs {holders} points for shares and {holders} for secret and masks"
            )
        if len({point % field.prime for point in self.alphas + self.betas}) != 2 * holders:
            raise ConfigError(
                f"evaluation points must all differ modulo {field.prime}, got {self.alphas} and {self.betas}"
            )
        self._encode = [self.basis(alpha) for alpha in self.alphas]  # U transposed: row i makes share i
        self._decode = [_basis(field, self.alphas, self.betas[0])]
        # Share 1 from the secret and the other shares, for shares that are chosen first.
        self._complete = [_basis(field, (self.betas[0], *self.alphas[1:]), self.alphas[0])]

    def basis(self, x: int) -> list[int]:
        """L_1(x) .. L_{T+1}(x); they sum to 1."""
        return _basis(self.field, self.betas, x)

    def encode(self, secret: Elements) -> Elements:
        """T + 1 shares under fresh masks: (...) -> (T + 1, ...)."""
        stream = Keystream.fresh()
        return self._blocks(
            self._encode, secret, lambda size: [self.field.random(size, stream) for _ in range(self.threshold)]
        )

    def encode_with(self, secret: Elements, masks: Elements) -> Elements:
        """Shares under given masks (T, ...). A mask used twice gives differences away (``attacks.shares``): for tests
        and for protocols shown as they were published; everything else calls :meth:`encode`."""
        return self.field.combine(self._encode, np.concatenate([secret[None], masks]))

    def encode_seeded(self, secret: Elements) -> tuple[Elements, tuple[bytes, ...]]:
        """Share 1, and for every other holder 32 bytes that stand for its share (:meth:`expand`).

        Given the secret, masks and shares 2 .. T + 1 determine each other, so uniform shares are as good as uniform
        masks. Costs d elements and T seeds on the wire instead of (T + 1) d elements.
        """
        seeds = tuple(secrets.token_bytes(KEY_BYTES) for _ in range(self.threshold))
        streams = [Keystream(seed) for seed in seeds]  # read in order, they give what `expand` gives at once
        return self._blocks(
            self._complete, secret, lambda size: [self.field.random(size, stream) for stream in streams]
        )[0], seeds

    def complete(self, secret: Elements, others: Elements) -> Elements:
        """Share 1 from the secret and shares 2 .. T + 1 that were drawn first: (...), (T, ...) -> (...)."""
        share: Elements = self.field.combine(self._complete, np.concatenate([secret[None], others]))[0]
        return share

    def expand(self, seed: bytes, shape: tuple[int, ...]) -> Elements:
        """The share a seed stands for."""
        if len(seed) != KEY_BYTES:
            raise ProtocolError(f"the seed of a share has {KEY_BYTES} bytes, got {len(seed)}")
        return self.field.random(shape, Keystream(seed))

    def sum(self, shares: Elements) -> Elements:
        """What one holder does: add up the shares it was sent, (N, ...) -> (...). It learns nothing."""
        return self.field.sum(self.field.check(shares, "shares"))

    def decode(self, shares: Elements) -> Elements:
        """The vector, or the sum of vectors, behind all T + 1 (summed) shares in the order of ``alphas``: (T + 1, ...)
        -> (...).
        """
        return self._at(self._decode, shares)

    def evaluate(self, shares: Elements, x: int) -> Elements:
        """g(x) from all T + 1 shares; at a beta of a mask, the (sum of) masks."""
        return self._at([_basis(self.field, self.alphas, x)], shares)

    def _blocks(self, rows: list[list[int]], secret: Elements, draw: Callable[[int], list[Elements]]) -> Elements:
        """Combinations of the secret and drawn elements, a stretch at a time: neither masks nor stacks of them fill the
        memory.
        """
        flat = secret.reshape(-1)
        out = np.empty((len(rows), flat.size), np.uint64)
        for begin in range(0, flat.size, _BLOCK):
            part = flat[begin : begin + _BLOCK]
            out[:, begin : begin + _BLOCK] = self.field.combine(rows, np.stack([part, *draw(part.size)]))
        return out.reshape(len(rows), *secret.shape)

    def _at(self, row: list[list[int]], shares: Elements) -> Elements:
        if shares.shape[0] != self.holders:
            raise ProtocolError(f"{self.holders} shares are needed, got {shares.shape[0]}: a holder is missing")
        value: Elements = self.field.combine(row, self.field.check(shares, "shares"))[0]
        return value


def _basis(field: Field, points: Sequence[int], x: int) -> list[int]:
    """Lagrange basis of ``points`` at x, in exact integers."""
    values = []
    for j, own in enumerate(points):
        value = 1
        for k, other in enumerate(points):
            if k != j:
                value = value * (x - other) * pow(own - other, -1, field.prime) % field.prime
        values.append(value)
    return values
