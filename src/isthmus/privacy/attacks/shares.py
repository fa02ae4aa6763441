"""HiFGL's coded embeddings as published, opened (HiFGL spec, section 11.2a-d).

There the masks are part of what a silo hands to every source, the same for all, and the target is sent all T + 1
shares.
"""

from __future__ import annotations

import numpy as np

from isthmus.privacy.attacks.result import Recovery
from isthmus.privacy.field import Elements
from isthmus.privacy.lagrange import LagrangeCode


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


def score_elements(recovered: Elements, truth: Elements, party: str, attack: str) -> Recovery:
    """Recovered field elements against the true ones, entry by entry."""
    return Recovery(attack, party, truth.size, int((recovered == truth).sum()), truth.size)


def _over(code: LagrangeCode, values: Elements, divisor: int) -> Elements:
    scaled: Elements = code.field.combine([[pow(divisor, -1, code.field.prime)]], values[None])[0]
    return scaled
