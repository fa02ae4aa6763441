"""A whole secure sum at one place."""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.privacy.flatten import FRACTION_BITS, Leaf, LeafTemplate
from isthmus.privacy.masks import SumRoster, SumServer, SumTag, Words


def unmask_total(
    masked: Mapping[str, Words],
    roster: SumRoster,
    tag: SumTag,
    template: LeafTemplate,
    *,
    fraction_bits: int = FRACTION_BITS,
) -> list[Leaf]:
    """The sum of all parties' vectors as tensors and numbers, or an error that says who is missing."""
    server = SumServer(roster, tag)
    for party in sorted(masked):
        server.add(party, masked[party])
    return server.total(template, fraction_bits=fraction_bits)
