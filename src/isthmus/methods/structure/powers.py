"""FedStruct's pre-training protocol: every client obtains its rows of Abar = sum_l beta_l Ah^l (spec 5.1), with
messages alone.

    paper              here
    At_i^[i], At_k^[i] `DirectoryClient.inner`, and at client k `PowerState.entering`
    Dt^[i]             `DirectoryClient.degree`
    B_ijk              `Product.rows`              At_k^[i] [Ah^{l-1}]_j^[k], by client k for client i, columns of the
                                                   stripe
    [Ah^l]^[i]         `PowerState.power`
    Abar^[i]           `PowerState.combined`

``protocol=published``: B_ijk arrives sender by sender. ``protocol=hardened`` (spec 13.1): a client is given only the
sum over k, which with ``secure_sum`` is masked, so that it can read no more. Columns and slots are those of
`directory.py`.

Where powers are cut (``prune``):

    block    by the sender: the ceil(p/K) n_i largest entries of B_ijk (the paper's choice); never at l = 1
    row      by the owner: the p largest entries of each of its rows, before they are multiplied into anything that
             leaves
    global   by all: the p n largest entries of Ah^l (the reference code, also at l = 1), by counting digits
             (`graph.powers.Selection`)

With L_s = 1 nothing is ever cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.federation.interface import Federation
from isthmus.federation.ledger import Disclosure
from isthmus.federation.messages import Count, Message, PartyId, Structure
from isthmus.federation.roles import handler
from isthmus.graph.normalise import from_torch_csr
from isthmus.graph.powers import (
    Block,
    Selection,
    add,
    as_csr,
    entries,
    find_bin,
    keep_largest_by_owner,
    keep_largest_per_row,
    row_mass,
    scaled_rows,
    stored,
)
from isthmus.methods.structure.config import PowerConfig
from isthmus.methods.structure.directory import (
    Directory,
    DirectoryClient,
    EdgeCheck,
    EdgeList,
    Enrolment,
    block_of,
    tensor_of,
)
from isthmus.records import Record

STRIPE_BYTES = 256 * 2**20
"""About how much the products of one stripe may take at all clients together."""


ConfigT = TypeVar("ConfigT", bound=PowerConfig)


# -- messages --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stripe(Message):
    """Which power, for which stripe of columns of how many."""

    power: Count[int]
    stripe: Count[int]
    stripes: Count[int]


@dataclass(frozen=True)
class Product(Message):
    """B_ijk for all j of a stripe: rows are slots of the receiver."""

    rows: Structure[Tensor]


@dataclass(frozen=True)
class Digit(Message):
    """Decide the digit before (keep bins below ``bin``, and all of it if ``whole``), then count this one. The first
    decides nothing.
    """

    digit: Count[int]
    bin: Count[int]
    whole: Count[int]


@dataclass(frozen=True)
class DigitCounts(Message):
    """How many undecided entries have each value of a digit."""

    counts: Structure[Tensor]


@dataclass(frozen=True)
class PowerDone(Message):
    """All stripes of a power have arrived."""

    power: Count[int]


@dataclass(frozen=True)
class Kept(Message):
    """What a client holds of a power: entries, mass of its rows, rows without any."""

    entries: Structure[int]
    mass: Structure[float]
    empty: Structure[int]


class PowerClient(DirectoryClient[ConfigT], Generic[ConfigT]):
    """A client that takes part in the powers."""

    def _columns_of(self, stripe: Stripe) -> NDArray[np.int64]:
        return np.flatnonzero(self.state.owner.numpy() % stripe.stripes == stripe.stripe)

    def _factor(self, stripe: Stripe) -> Block:
        """[Ah^{l-1}]_j^[k] for all j of a stripe; of l = 1 the identity."""
        columns = self._columns_of(stripe)
        if stripe.power == 1:
            size = self.state.owner.numel()
            own = self.state.columns.numpy()
            power: Block = sp.csr_matrix(
                (np.ones(len(own), dtype=self.kind), (np.arange(len(own)), own)), shape=(len(own), size)
            )
        else:
            assert self.state.power is not None
            power = block_of(self.state.power)
        return power if stripe.stripes == 1 else power[:, columns]

    @handler
    def multiply(self, stripe: Stripe) -> Mapping[PartyId, Product]:
        """Steps 1 to 3: B_ijk for every client i, cut, and sent; k = i is mail to oneself."""
        factor, mail = self._factor(stripe), {}
        for client in (*self.state.entering, self.party):
            product = self._product(client, factor, stripe)
            if client == self.party or entries(product):
                mail[client] = Product(tensor_of(_smaller(product)))
        return mail

    @handler
    def multiply_for_sum(self, stripe: Stripe) -> Mapping[PartyId, Product]:
        """The same for delivery as a sum: everybody writes to everybody, so that who writes tells nothing."""
        factor = self._factor(stripe)
        return {
            client: Product(tensor_of(as_csr(self._product(client, factor, stripe)))) for client in self.state.entering
        }

    @handler
    def own_product(self, stripe: Stripe) -> None:
        """k = i of a hardened exchange: its rows are all own nodes, not slots, so it is no part of the sum."""
        self._add(self._product(self.party, self._factor(stripe), stripe), own=True)

    def _product(self, client: PartyId, factor: Block, stripe: Stripe) -> Block:
        """B_ijk for i = ``client`` and all j of a stripe, cut where the sender cuts."""
        left = self.inner.astype(self.kind) if client == self.party else from_torch_csr(self.state.entering[client])
        product: Block = left @ factor
        if not isinstance(product, np.ndarray):
            product = as_csr(product)
        if self.config.prunes and self.config.prune_mode == "block" and stripe.power > 1:
            owner = self.state.owner.numpy()[self._columns_of(stripe)]
            product = keep_largest_by_owner(as_csr(product), owner, self._block_limit(client))
        return product

    def _block_limit(self, receiver: str) -> int:
        """ceil(p / K) n_i."""
        clients = int(self.state.owner.max()) + 1
        number = sorted([*self.state.entering, self.party]).index(receiver)
        return -(-self.config.prune // clients) * int((self.state.owner == number).sum())

    @handler
    def gather(self, mail: Mapping[PartyId, Product]) -> None:
        """Step 4, sender by sender."""
        for sender in sorted(mail):
            self._add(block_of(mail[sender].rows), own=sender == self.party)
        self._close_stripe()

    @handler
    def gather_sum(self, mail: Product | None) -> None:
        """Step 4, of the sum."""
        if mail is not None:
            self._add(block_of(mail.rows), own=False)
        self._close_stripe()

    def _add(self, block: Block, *, own: bool) -> None:
        if not own:
            rows = self.boundary
            if isinstance(block, np.ndarray):
                spread = np.zeros((self.data.num_nodes, block.shape[1]), dtype=block.dtype)
                spread[rows] = block
                block = spread
            else:
                counts = np.zeros(self.data.num_nodes, dtype=np.int64)
                counts[rows] = np.diff(block.indptr)
                indptr = np.append(0, np.cumsum(counts))
                block = sp.csr_matrix((block.data, block.indices, indptr), shape=(self.data.num_nodes, block.shape[1]))
        total = getattr(self.scratch, "total", None)
        self.scratch.total = block if total is None else add(total, block)

    def _close_stripe(self) -> None:
        self.scratch.stripes = [*getattr(self.scratch, "stripes", []), self.scratch.total]
        self.scratch.total = None

    @handler
    def first_power(self) -> None:
        """P_1 = Ah^[i] from own edges alone (published protocol: ids of far ends are columns)."""
        own, far = self.state.columns.numpy(), self.state.far.numpy()
        rows = np.repeat(np.arange(self.data.num_nodes), np.diff(self.inner.indptr))
        rows = np.append(rows, self.cross.own.numpy()[self.out])
        columns = np.append(own[self.inner.indices], far)
        values = np.append(self.inner.data, self.cross.weight.numpy()[self.out].astype(np.float64))
        block = as_csr(sp.csr_matrix((values, (rows, columns)), shape=(self.data.num_nodes, self.state.owner.numel())))
        self.scratch.stripes = [block]

    def _gathered(self) -> Block:
        """[Ah^l]^[i] from all stripes, normalised."""
        stripes: list[Block] = self.scratch.stripes
        if len(stripes) == 1:
            whole = stripes[0]
        else:
            owner = self.state.owner.numpy()
            order = np.concatenate([np.flatnonzero(owner % len(stripes) == s) for s in range(len(stripes))])
            place = np.empty_like(order)
            place[order] = np.arange(len(order))
            if any(isinstance(part, np.ndarray) for part in stripes):
                whole = np.hstack([part if isinstance(part, np.ndarray) else part.toarray() for part in stripes])[
                    :, place
                ]
            else:
                whole = as_csr(sp.hstack([as_csr(part) for part in stripes]).tocsr()[:, place])
        return scaled_rows(whole, 1.0 / self.degree)

    @handler
    def count_digit(self, asked: Digit) -> DigitCounts:
        """One question of the search for the p n largest entries."""
        if asked.digit == 0:
            block = as_csr(self._gathered()).astype(np.float32)
            block.eliminate_zeros()
            self.scratch.selection = Selection(block, self.state.columns.numpy())
        else:
            self.scratch.selection.decide(asked.digit - 1, asked.bin, bool(asked.whole))
        done = asked.digit >= Selection.DIGITS or (asked.digit > 0 and bool(asked.whole))
        counts = np.zeros(1, dtype=np.int64) if done else self.scratch.selection.counts(asked.digit)
        return DigitCounts(torch.from_numpy(counts))

    @handler
    def finish_power(self, done: PowerDone) -> Kept:
        """Cut what the owner cuts, add to Abar, note the diagonal."""
        config, power = self.config, done.power
        selection: Selection | None = getattr(self.scratch, "selection", None)
        block = self._gathered() if selection is None else selection.kept()
        if config.prunes and config.prune_mode == "row":
            block = keep_largest_per_row(as_csr(block), config.prune)
        if config.renormalise:
            mass = row_mass(block)
            block = scaled_rows(block, np.divide(1.0, mass, out=np.zeros_like(mass), where=mass > 0))
        block = stored(block) if not config.prunes else block
        diagonal = self.state.diagonal.clone()
        diagonal[:, power - 1] = torch.from_numpy(_diagonal(block, self.state.columns.numpy())).to(diagonal.dtype)
        tensor = tensor_of(block.astype(self.kind))
        self.state = replace(
            self.state,
            power=tensor if power < config.structure_hops else None,
            diagonal=diagonal,
            combined=self._combined(power, tensor),
        )
        mass = row_mass(block)
        return Kept(entries(block), float(mass.sum()), int((mass == 0).sum()))

    def _combined(self, power: int, tensor: Tensor) -> tuple[Tensor, ...]:
        """Abar so far."""
        config = self.config
        if config.train_betas:
            return (*(self.state.combined or (self._identity(),)), tensor)
        weight = config.power_weights[power - 1]
        parts = (
            list(self.state.combined)
            if power > 1
            else [self._scaled(self._identity(), config.beta0)]
            if config.beta0
            else []
        )
        if weight:
            scaled = tensor if weight == 1.0 else self._scaled(tensor, weight)
            parts = [scaled] if not parts else [tensor_of(add(block_of(parts[0]), block_of(scaled)).astype(self.kind))]
        return tuple(parts)

    def _identity(self) -> Tensor:
        own = self.state.columns.numpy()
        shape = (len(own), self.state.owner.numel())
        return tensor_of(
            as_csr(sp.csr_matrix((np.ones(len(own), dtype=self.kind), (np.arange(len(own)), own)), shape=shape))
        )

    def _scaled(self, tensor: Tensor, factor: float) -> Tensor:
        return tensor_of(scaled_rows(block_of(tensor), np.full(tensor.shape[0], factor)))


# -- server ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Structured(Record):
    """What the server knows of the powers.

    Args:
        nodes: n.
        power: The last one that is complete.
        entries, mass, empty: Of Ah^Ls over all clients.
    """

    nodes: int
    power: int
    entries: int
    mass: float
    empty: int


def next_power(known: Structured, federation: Federation, config: PowerConfig) -> Structured:
    """[Ah^l]^[i] at every client i, from [Ah^{l-1}]."""
    power, stripes = known.power + 1, stripes_of(known.nodes, len(federation.clients), config)
    if config.protocol == "published" and power == 1:
        federation.call(PowerClient.first_power)
    else:
        for stripe in range(stripes):
            request = Stripe(power, stripe, stripes)
            if config.protocol == "published":
                federation.exchange(PowerClient.multiply, PowerClient.gather, request)
                continue
            federation.call(PowerClient.own_product, request)
            federation.exchange(PowerClient.multiply_for_sum, PowerClient.gather_sum, request, combine="sum")
    if config.prunes and config.prune_mode == "global":
        _select_globally(federation, config.prune * known.nodes)
    kept = federation.sum(PowerClient.finish_power, PowerDone(power))
    return Structured(known.nodes, power, kept.entries, kept.mass, kept.empty)


def _select_globally(federation: Federation, wanted: int) -> None:
    """Find the ``wanted`` largest entries of all clients, digit by digit; the server sees counts only."""
    bin, whole, digit = 0, False, 0
    while True:
        counts = federation.sum(PowerClient.count_digit, Digit(digit, bin, int(whole))).counts.numpy()
        if whole or digit >= Selection.DIGITS:
            return
        if int(counts.sum()) <= wanted:
            bin, whole = len(counts), True  # everything is below this bin
        else:
            bin, wanted, whole = find_bin(counts, wanted)
        digit += 1


def stripes_of(nodes: int, clients: int, config: PowerConfig) -> int:
    """How many stripes of columns keep the products of one exchange near `STRIPE_BYTES`."""
    per_row = min(float(nodes), float(config.prune * clients)) if config.prunes else float(nodes)
    return int(min(clients, max(1, -(-nodes * per_row * 12 // STRIPE_BYTES))))


def power_sheet(config: PowerConfig, setup: str, powers: str) -> tuple[Disclosure, ...]:
    """What the protocol shows to whom."""
    hardened = config.protocol == "hardened"
    lines = [
        Disclosure(setup, "client", "server", Enrolment),
        Disclosure(setup, "server", "client", Directory),
        Disclosure(setup, "client", "client", EdgeList),
        Disclosure(setup, "client", "server", EdgeCheck),
        Disclosure(powers, "server", "client", PowerDone),
        Disclosure(powers, "client", "server", Kept, "summed"),
    ]
    if hardened or config.structure_hops > 1:
        lines.append(Disclosure(powers, "server", "client", Stripe))
        lines.append(Disclosure(powers, "client", "client", Product, "summed" if hardened else "clear"))
    if config.prunes and config.prune_mode == "global":
        lines += [
            Disclosure(powers, "server", "client", Digit),
            Disclosure(powers, "client", "server", DigitCounts, "summed"),
        ]
    return tuple(lines)


# -- tools -----------------------------------------------------------------------------------------


def _smaller(block: Block) -> Block:
    """Dense or sparse, whichever takes less on the wire: a sparse entry is a value and a column of 8 bytes."""
    size, found = block.shape[0] * block.shape[1], entries(block)
    dense = size * block.dtype.itemsize < found * (block.dtype.itemsize + 8)
    if isinstance(block, np.ndarray):
        return block if dense else as_csr(block)
    return block.toarray() if dense else block


def _diagonal(block: Block, columns: NDArray[np.int64]) -> NDArray[np.floating]:
    if isinstance(block, np.ndarray):
        return block[np.arange(len(columns)), columns]
    rows = np.repeat(np.arange(len(columns)), np.diff(block.indptr))
    found = block.indices == columns[rows]
    diagonal: NDArray[np.float64] = np.bincount(rows[found], weights=block.data[found], minlength=len(columns)).astype(
        np.float64
    )
    return diagonal
