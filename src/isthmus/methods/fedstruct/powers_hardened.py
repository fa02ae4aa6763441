"""The powers with less to see (``protocol=hardened``, the default; spec 13.1).

# Differs from the paper: an owner numbers its columns in an order only it knows (13.1e), and a client receives only the
sum of the products over k, which with ``secure_sum`` is masked, so that it can read no more (13.1b). The published
products tell neighbour lists. Without pruning Abar is the same; with it, only the places where powers are cut differ.
The order of columns and HOP2VEC's first values are secrets of their owners, so two hardened runs of one seed differ, as
two runs with noise do; a resumed run goes on with the same secrets.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from isthmus.federation.interface import Federation
from isthmus.federation.ledger import Disclosure
from isthmus.federation.messages import PartyId
from isthmus.federation.roles import handler
from isthmus.graph.powers import as_csr
from isthmus.methods.fedstruct.config import FedStructConfig
from isthmus.methods.fedstruct.directory import Directory, EdgeList, Enrolment, agree_on_edges
from isthmus.methods.fedstruct.powers import PowerClient, Product, Stripe
from isthmus.methods.fedstruct.state import NO_COLUMNS, block_of, tensor_of


class HardenedPowers(PowerClient):
    """A client's part of the hardened protocol."""

    @handler
    def enrol_by_count(self) -> Enrolment:
        return Enrolment(self.data.num_nodes, NO_COLUMNS)

    @handler
    def list_edges_in_secret_order(self, directory: Directory) -> Mapping[PartyId, EdgeList]:
        """The directory says which columns are the client's; which of them is which node, only its secret."""
        mine = torch.nonzero(directory.owner == directory.clients.index(self.party)).flatten()
        order = self.secret_generator("columns").permutation(len(mine))
        return self.edge_lists(directory, mine[torch.from_numpy(order)], NO_COLUMNS)

    @handler
    def add_own_product(self, stripe: Stripe) -> None:
        """k = i: its rows are all own nodes, not slots, so it is no part of the sum."""
        self.add_own(self.product(self.party, self.factor(stripe), stripe))

    @handler
    def send_summands(self, stripe: Stripe) -> Mapping[PartyId, Product]:
        """Steps 1 to 3 for delivery as a sum: everybody writes to everybody, so that who writes tells nothing."""
        factor = self.factor(stripe)
        return {
            client: Product(tensor_of(as_csr(self.product(client, factor, stripe)))) for client in self.state.entering
        }

    @handler
    def take_sum(self, mail: Product | None) -> None:
        """Step 4, of the sum."""
        if mail is not None:
            self.add_received(block_of(mail.rows))
        self.close_stripe()


def setup(federation: Federation) -> int:
    """Columns client by client; the server learns how many each has."""
    enrolled = federation.call(HardenedPowers.enrol_by_count)
    sizes = torch.tensor([reply.nodes for reply in enrolled.values()])
    owner = torch.repeat_interleave(torch.arange(len(enrolled)), sizes)
    agree_on_edges(federation, HardenedPowers.list_edges_in_secret_order, Directory(tuple(enrolled), owner, NO_COLUMNS))
    return owner.numel()


def exchange(federation: Federation, power: int, stripes: int) -> None:
    """Every power stripe by stripe, the first too: nobody knows the columns of the far ends of its edges."""
    for stripe in range(stripes):
        request = Stripe(power, stripe, stripes)
        federation.call(HardenedPowers.add_own_product, request)
        federation.exchange(HardenedPowers.send_summands, HardenedPowers.take_sum, request, combine="sum")


def sheet(config: FedStructConfig) -> tuple[Disclosure, ...]:
    return (
        Disclosure("powers", "server", "client", Stripe),
        Disclosure("powers", "client", "client", Product, "summed"),
    )
