"""The powers with less to see (``protocol=hardened``, the default; spec 13.1).

# Differs from the paper: an owner numbers its columns in an order only it knows (13.1e), and a client receives only the
sum of the products over k, which with ``secure_sum`` is masked, so that it can read no more (13.1b). The published
products tell neighbour lists. Without pruning Abar is the same; with it, only the places where powers are cut differ.
The order of columns and HOP2VEC's first values are secrets of their owners, so two hardened runs of one seed differ, as
two runs with noise do; a resumed run goes on with the same secrets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.federation.interface import Federation, View
from isthmus.federation.messages import Message, PartyId
from isthmus.federation.roles import handler
from isthmus.federation.script import Script, ask, mail
from isthmus.graph.normalise import from_torch_csr
from isthmus.graph.powers import as_csr
from isthmus.methods.fedstruct.config import FedStructConfig
from isthmus.methods.fedstruct.directory import Directory, EdgeList, Enrolment, agree_on_edges, check_hidden
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
        factor = self.scratch.factor = self.factor(stripe)
        return {
            client: Product(tensor_of(as_csr(self.product(client, factor, stripe)))) for client in self.state.entering
        }

    def dummy_positions(self, receiver: PartyId, content: Message) -> Sequence[Tensor]:
        """Positions that false edges of the receiver would fill, in every power the same ones. Dummies drawn anew and
        anywhere would stand out: true entries of the first power lie in the sender's columns, and return in the second.
        """
        product = (self._false_edges(receiver) @ abs(as_csr(self.scratch.factor)).sign()).tocoo()
        return (torch.from_numpy(product.row.astype(np.int64) * product.shape[1] + product.col),)

    def _false_edges(self, client: PartyId) -> sp.csr_matrix:
        """Pairs of a slot of ``client`` and an own end of some cross edge, at least as many as there are edges, so that
        both together are a power of two.
        """
        true = from_torch_csr(self.state.entering[client])
        slots, ends = true.shape[0], self.cross.own.numpy()
        if not slots or not ends.size:
            return sp.csr_matrix(true.shape)
        wanted = (1 << max(4, int(2 * true.nnz - 1).bit_length())) - true.nnz
        generator = self.secret_generator(f"false edges {client}")
        drawn = generator.integers(0, slots, 2 * wanted), ends[generator.integers(0, ends.size, 2 * wanted)]
        rows, columns = true.nonzero()
        pairs = np.setdiff1d(drawn[0] * true.shape[1] + drawn[1], rows * true.shape[1] + columns)
        pairs = generator.permutation(pairs)[:wanted]
        where = pairs // true.shape[1], pairs % true.shape[1]
        return sp.csr_matrix((np.ones(pairs.size), where), shape=true.shape)

    @handler
    def take_sum(self, mail: Product | None) -> None:
        """Step 4, of the sum."""
        if mail is not None:
            self.add_received(block_of(mail.rows))
        self.close_stripe()


def setup(federation: Federation) -> int:
    """Columns client by client; the server learns how many each has."""
    check_hidden(federation)
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


def script(config: FedStructConfig, view: View) -> Script:
    """There are never more stripes than clients."""
    stripes = len(view.clients)
    return {
        "setup": (
            ask(HardenedPowers.enrol_by_count),
            mail(HardenedPowers.list_edges_in_secret_order, HardenedPowers.check_edges),
        ),
        "powers": (
            ask(HardenedPowers.add_own_product, most=stripes),
            mail(HardenedPowers.send_summands, HardenedPowers.take_sum, summed=True, most=stripes),
        ),
    }
