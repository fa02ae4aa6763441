"""What the preparation discloses, stated in advance: the messages of `isthmus.preparation.rounds`."""

from __future__ import annotations

from isthmus.federation.ledger import Disclosure
from isthmus.federation.messages import SERVER
from isthmus.preparation import LINKING, SCALING
from isthmus.preparation import messages as m

OWNER = "client"


def preparation_sheet(*, link: bool) -> tuple[Disclosure, ...]:
    """Lines of the preparation; ``link``: whether owners also look for the edges between them."""
    sums = tuple(
        Disclosure(SCALING, OWNER, SERVER, kind, "summed") for kind in (m.CellCounts, m.FeatureSums, m.FeatureShapes)
    )
    known = tuple(Disclosure(SCALING, SERVER, OWNER, kind) for kind in (m.Known, m.Totals))
    if not link:
        return (*sums, *known)
    mail = tuple(Disclosure(LINKING, OWNER, OWNER, kind) for kind in (m.LinkKey, m.LinkRequest, m.LinkAnswer, m.Links))
    return (*sums, *known, Disclosure(LINKING, SERVER, OWNER, m.Partners), *mail)
