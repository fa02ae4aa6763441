"""The script of the preparation: the calls of `isthmus.preparation.rounds`, in phases before the method's own."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.federation.contract import Contract, ScheduledPhase, compiled
from isthmus.federation.messages import ClientId
from isthmus.federation.script import Script, ask, mail, total
from isthmus.preparation import LINKING, SCALING, Link
from isthmus.preparation.owner import OwnerClient
from isthmus.preparation.plain_links import PlainOwnerClient
from isthmus.preparation.rounds import COMMITTED, TABLES


def preparation_contract(link: Link, clients: Sequence[ClientId], *, secure: bool, scale: bool = True) -> Contract:
    """What owners may be asked before the first round, or before a prediction (``scale=False``: nothing of scaling)."""
    script = preparation_script(link, len(clients))
    if not scale:
        script = {phase: lines for phase, lines in script.items() if phase != SCALING}
    scaling = (ScheduledPhase(SCALING, 1, 1, resumes=False),) if scale else ()
    return Contract(
        lines=compiled(script, TABLES[link]),
        schedule=(*scaling, ScheduledPhase(LINKING, COMMITTED, 1, resumes=False)),
        clients=tuple(sorted(clients)),
        roles=("client",),
        secure=secure,
        method="preparation",
    )


def preparation_script(link: Link, clients: int) -> Script:
    """``link``: how owners find the edges between them; an owner that is alone has none to find."""
    scaling = (
        total(OwnerClient.count_cells),
        total(OwnerClient.add_up),
        total(OwnerClient.add_squares),
        total(OwnerClient.add_shapes),
        ask(OwnerClient.settle),
    )
    if link == "none" or clients < 2:
        return {SCALING: scaling}
    private = (
        mail(OwnerClient.request_links, OwnerClient.take_requests),
        mail(OwnerClient.answer_links, OwnerClient.take_answers),
    )
    plain = (mail(PlainOwnerClient.show_edges, PlainOwnerClient.compare_edges),)
    linking = (
        mail(OwnerClient.share_key, OwnerClient.take_key, some=True),  # the first owner draws it
        *(plain if link == "plain" else private),
        mail(OwnerClient.confirm_links, OwnerClient.take_confirmed),
    )
    return {SCALING: scaling, LINKING: linking}
