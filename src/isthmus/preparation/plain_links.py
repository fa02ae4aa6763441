"""Links found by comparing edges in the clear: for one process, which holds all owners' tables anyway.

A class and a role table of its own, so that the handler that shows edges does not exist at an organisation.
"""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.federation.messages import PartyId
from isthmus.federation.roles import Role, RoleTable, handler
from isthmus.preparation.linking import split_items
from isthmus.preparation.messages import ListedEdges, Partners
from isthmus.preparation.owner import OwnerClient


class PlainOwnerClient(OwnerClient):
    """An owner that shows its edges towards others to the others."""

    @handler
    def show_edges(self, partners: Partners) -> Mapping[PartyId, ListedEdges]:
        """The owner with the larger name shows, the other one finds what both list and confirms it."""
        self.start_linking(partners)
        return {owner: ListedEdges(b"".join(self.items())) for owner in partners.owners if owner < self.party}

    @handler
    def compare_edges(self, mail: Mapping[PartyId, ListedEdges]) -> None:
        for owner, sent in mail.items():
            theirs = set(split_items(sent.items))
            self.agree_with(owner, [place for place, item in enumerate(self.items()) if item in theirs])


PLAIN_TABLE = RoleTable({"client": Role(PlainOwnerClient)})
