"""HiFGL's messages, opened: as published (HiFGL spec, section 11.2a-d), and those of the hardened protocol by whoever
holds the keys of all shares.

As published the masks are part of what a silo hands to every source, the same for all, and the target is sent all T + 1
shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.privacy.attacks.result import Recovery
from isthmus.privacy.chacha import Nonce, expand
from isthmus.privacy.field import Elements
from isthmus.privacy.lagrange import LagrangeCode
from isthmus.privacy.secmp import SecretSums


def open_with_all_shares(code: LagrangeCode, shares: Elements) -> Elements:
    """(a) The target interpolates one neighbour's T + 1 shares, (T + 1, d) -> (d,)."""
    return code.decode(shares)


def open_with_masks(code: LagrangeCode, holder: int, share: Elements, masks: Elements) -> Elements:
    """(b) Whoever knows the common masks needs one share: (share - sum_j z_j L_j(alpha)) / L_1(alpha)."""
    basis = code.basis(code.alphas[holder])
    rest = code.field.combine([basis[1:]], masks)[0]
    return _over(code, code.field.sub(share, rest), basis[0])


def open_with_known_neighbour(
    code: LagrangeCode, holder: int, share: Elements, known_share: Elements, known: Elements
) -> Elements:
    """(c) Without any key: share_v - share_w = L_1(alpha) (m_v - m_w), so one known embedding (e.g. zero) opens all
    others.
    """
    difference = _over(code, code.field.sub(share, known_share), code.basis(code.alphas[holder])[0])
    return code.field.add(known, difference)


def degree_from_sums(code: LagrangeCode, summed: Elements, masks: Elements) -> int:
    """(d) The silo interpolates the summed shares at beta_2 and finds |N_u| z_2. Returns -1 if no single number
    explains all entries.
    """
    at_mask = code.evaluate(summed, code.betas[1]).ravel()
    usable = masks[0].ravel() != 0
    degrees = np.unique(code.field.mul(at_mask[usable], code.field.inverse(masks[0].ravel()[usable])))
    return int(degrees[0]) if degrees.size == 1 else -1


@dataclass(frozen=True)
class Slots:
    """What an attacker holds of the keys of messages to some targets.

    Args:
        handle: (n,), pseudonym of each target.
        sizes: (n,), slots of each pseudonym.
        keys: For every share holder the keys of all slots, (slots, 32), or None where the attacker has none.
    """

    handle: NDArray[np.int64]
    sizes: NDArray[np.int64]
    keys: Sequence[NDArray[np.uint8] | None]


def open_with_keys(
    sums: SecretSums, shares: Elements, target: NDArray[np.int64], held: Slots, nonce: Nonce
) -> tuple[Elements, NDArray[np.bool_]]:
    """Messages to ``target`` (E,) from their share 1, (E, d + 1), and the keys of the other shares: which slot belongs
    to which message is tried out, since a message that is opened passes its check. A share whose key is missing is
    taken for zero. Returns the messages (E, d) and which of them were opened.
    """
    begin = np.cumsum(held.sizes) - held.sizes
    opened, found = np.zeros((shares.shape[0], shares.shape[1] - 1), np.uint64), np.zeros(shares.shape[0], bool)
    pseudonym = held.handle[target]
    for number in range(int(held.sizes.max(initial=0))):
        rows = np.flatnonzero(~found & (held.sizes[pseudonym] > number))
        slots = begin[pseudonym[rows]] + number
        nothing = np.zeros((rows.size, shares.shape[1]), np.uint64)
        others = [nothing if k is None else expand(sums.field, k[slots], nonce, shares.shape[1]) for k in held.keys]
        tried = sums.code.decode(np.stack([shares[rows], *others]))
        values = np.ascontiguousarray(tried[:, :-1])
        right = sums.check(values, nonce)[:, 0] == tried[:, -1]
        opened[rows[right]], found[rows[right]] = values[right], True
    return opened, found


def score_elements(recovered: Elements, truth: Elements, party: str, attack: str) -> Recovery:
    """Recovered field elements against the true ones, entry by entry."""
    return Recovery(attack, party, truth.size, int((recovered == truth).sum()), truth.size)


def _over(code: LagrangeCode, values: Elements, divisor: int) -> Elements:
    scaled: Elements = code.field.combine([[pow(divisor, -1, code.field.prime)]], values[None])[0]
    return scaled
