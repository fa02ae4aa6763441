"""The powers as the paper prints them (``protocol=published``): columns are global ids, and B_ijk arrives sender by
sender.

It leaks: a client reads neighbour lists of others from the products of hop 2 (spec 13.1, docs/methods/fedstruct.md).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import scipy.sparse as sp
import torch

from isthmus.errors import DataError
from isthmus.federation.interface import Federation, View
from isthmus.federation.messages import PartyId
from isthmus.federation.roles import handler
from isthmus.federation.script import Script, ask, mail
from isthmus.graph.powers import Block, as_csr, entries
from isthmus.methods.fedstruct.config import FedStructConfig
from isthmus.methods.fedstruct.directory import Directory, EdgeList, Enrolment, agree_on_edges
from isthmus.methods.fedstruct.powers import PowerClient, Product, Stripe
from isthmus.methods.fedstruct.state import block_of, tensor_of


class PublishedPowers(PowerClient):
    """A client's part of the published protocol."""

    @handler
    def enrol_by_id(self) -> Enrolment:
        return Enrolment(self.data.num_nodes, self.data.node_id)

    @handler
    def list_edges_by_id(self, directory: Directory) -> Mapping[PartyId, EdgeList]:
        """A column's number is the rank of its global id."""
        columns = torch.searchsorted(directory.ids, self.data.node_id)
        # An id nobody owns gets a column all the same; its owner finds out when the edge lists are compared.
        far = torch.searchsorted(directory.ids, self.cross.other[torch.from_numpy(self.out)])
        return self.edge_lists(directory, columns, far.clamp(max=directory.ids.numel() - 1))

    @handler
    def first_power(self) -> None:
        """l = 1, Ah^[i] from own edges alone: the columns of their far ends are known."""
        own, far = self.state.columns.numpy(), self.state.far.numpy()
        rows = np.repeat(np.arange(self.data.num_nodes), np.diff(self.inner.indptr))
        rows = np.append(rows, self.cross.own.numpy()[self.out])
        columns = np.append(own[self.inner.indices], far)
        values = np.append(self.inner.data, self.cross.weight.numpy()[self.out].astype(np.float64))
        shape = (self.data.num_nodes, self.state.owner.numel())
        self.add_own(as_csr(sp.csr_matrix((values, (rows, columns)), shape=shape)))
        self.close_stripe()

    @handler
    def send_products(self, stripe: Stripe) -> Mapping[PartyId, Product]:
        """Steps 1 to 3: B_ijk for every client i, pruned, and sent; k = i is mail to oneself."""
        factor, mail = self.factor(stripe), {}
        for client in (*self.state.entering, self.party):
            product = self.product(client, factor, stripe)
            if client == self.party or entries(product):
                mail[client] = Product(tensor_of(_smaller(product)))
        return mail

    @handler
    def take_products(self, mail: Mapping[PartyId, Product]) -> None:
        """Step 4, sender by sender."""
        for sender in sorted(mail):
            add = self.add_own if sender == self.party else self.add_received
            add(block_of(mail[sender].rows))
        self.close_stripe()


def setup(federation: Federation) -> int:
    """Columns in the order of global ids, which the server collects."""
    enrolled = federation.call(PublishedPowers.enrol_by_id)
    ids = torch.cat([reply.ids for reply in enrolled.values()])
    sizes = torch.tensor([reply.ids.numel() for reply in enrolled.values()])
    owner = torch.repeat_interleave(torch.arange(len(enrolled)), sizes)
    order = torch.argsort(ids, stable=True)
    ids = ids[order]
    twice = torch.nonzero(ids[1:] == ids[:-1]).flatten()
    if twice.numel():
        raise DataError(
            f"node {int(ids[twice[0]])} has two owners: every node belongs to one client; correct the clients' node ids"
        )
    agree_on_edges(federation, PublishedPowers.list_edges_by_id, Directory(tuple(enrolled), owner[order], ids))
    return ids.numel()


def exchange(federation: Federation, power: int, stripes: int) -> None:
    """The first power needs no message; the others go stripe by stripe."""
    if power == 1:
        federation.call(PublishedPowers.first_power)
        return
    for stripe in range(stripes):
        request = Stripe(power, stripe, stripes)
        federation.exchange(PublishedPowers.send_products, PublishedPowers.take_products, request)


def script(config: FedStructConfig, view: View) -> Script:
    """There are never more stripes than clients."""
    products = mail(PublishedPowers.send_products, PublishedPowers.take_products, most=len(view.clients))
    return {
        "setup": (
            ask(PublishedPowers.enrol_by_id),
            mail(PublishedPowers.list_edges_by_id, PublishedPowers.check_edges),
        ),
        "powers": (ask(PublishedPowers.first_power), *((products,) if config.powers > 1 else ())),
    }


def _smaller(block: Block) -> Block:
    """Dense or sparse, whichever takes less on the wire: a sparse entry is a value and a column of 8 bytes."""
    size, found = block.shape[0] * block.shape[1], entries(block)
    dense = size * block.dtype.itemsize < found * (block.dtype.itemsize + 8)
    if isinstance(block, np.ndarray):
        return block if dense else as_csr(block)
    return block.toarray() if dense else block
