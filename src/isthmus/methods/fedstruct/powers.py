"""FedStruct's pre-training (spec 5.1): every client obtains its rows of Abar = sum_l beta_l Ah^l by messages alone.

    paper              here
    At_i^[i], At_k^[i] `DirectoryClient.inner`, and at client k `FedStructState.entering`
    Dt^[i]             `DirectoryClient.degree`
    B_ijk              `PowerClient.product`    At_k^[i] [Ah^{l-1}]_j^[k], by client k for client i
    [Ah^l]^[i]         `FedStructState.power`
    Abar^[i]           `FedStructState.combined`

This file has what every protocol shares: products, pruning, and what a client does with the sum. How products travel is
a protocol's own (`powers_published.py`, `powers_hardened.py`); `PowerProtocol` is what such a module defines.

Products are exchanged by stripes: all columns of some owners at a time, so that memory stays bounded.

Where powers are pruned (``prune_mode``):

    block    by the sender: the ceil(p/K) n_i largest entries of B_ijk (the paper's choice); never at l = 1
    row      by the owner: the p largest entries of each of its rows, before they are multiplied into anything that
             leaves
    global   by all: the p n largest entries of Ah^l (the reference code, also at l = 1), by counting digits
             (`graph.powers.Selection`)

With L_s = 1 nothing is ever pruned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.federation.interface import Federation, View
from isthmus.federation.messages import Count, Message, PartyId, Structure
from isthmus.federation.roles import handler
from isthmus.federation.script import Script, ScriptLine, total
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
from isthmus.methods.fedstruct.config import FedStructConfig
from isthmus.methods.fedstruct.directory import DirectoryClient
from isthmus.methods.fedstruct.state import block_of, tensor_of

STRIPE_BYTES = 256 * 2**20
"""About how much the products of one stripe may take at all clients together."""


class PowerProtocol(Protocol):
    """What a module defines that is a protocol of the powers.

    setup: Number the columns of all clients, compare both ends of every cross edge; returns n.
    exchange: Send products until every client has gathered all stripes of a power.
    script: Its calls in setup and in every power.
    """

    def setup(self, federation: Federation) -> int: ...
    def exchange(self, federation: Federation, power: int, stripes: int) -> None: ...
    def script(self, config: FedStructConfig, view: View) -> Script: ...


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
    """What a client, or all clients together, hold of a power: entries, mass of rows, rows without any."""

    entries: Structure[int]
    mass: Structure[float]
    empty: Structure[int]


NOTHING_KEPT = Kept(0, 0.0, 0)


# -- client ----------------------------------------------------------------------------------------


class PowerClient(DirectoryClient):
    """A client that takes part in the powers."""

    def factor(self, stripe: Stripe) -> Block:
        """[Ah^{l-1}]_j^[k] for all j of a stripe; of l = 1 the identity."""
        tensor = self._identity() if stripe.power == 1 else self.state.power
        assert tensor is not None
        power = block_of(tensor)
        return power if stripe.stripes == 1 else power[:, self._columns_of(stripe)]

    def product(self, client: PartyId, factor: Block, stripe: Stripe) -> Block:
        """Steps 1 and 2: B_ijk for i = ``client`` and all j of a stripe, pruned where the sender prunes."""
        own = client == self.party
        left = self.inner.astype(self.config.numpy_dtype) if own else from_torch_csr(self.state.entering[client])
        product: Block = left @ factor  # At_k^[i] [Ah^{l-1}]_j^[k]
        if not isinstance(product, np.ndarray):
            product = as_csr(product)
        if self.config.prunes and self.config.prune_mode == "block" and stripe.power > 1:
            owner = self.state.owner.numpy()[self._columns_of(stripe)]
            product = keep_largest_by_owner(as_csr(product), owner, self._block_limit(client))
        return product

    def _columns_of(self, stripe: Stripe) -> NDArray[np.int64]:
        return np.flatnonzero(self.state.owner.numpy() % stripe.stripes == stripe.stripe)

    def _block_limit(self, receiver: PartyId) -> int:
        """ceil(p / K) n_i."""
        clients = sorted([*self.state.entering, self.party])
        nodes = int((self.state.owner == clients.index(receiver)).sum())
        return -(-self.config.prune // len(clients)) * nodes

    def add_own(self, product: Block) -> None:
        """Add B_iji: a row for every own node."""
        total = getattr(self.scratch, "total", None)
        self.scratch.total = product if total is None else add(total, product)

    def add_received(self, product: Block) -> None:
        """Add B_ijk of another client, or the sum over them: a row for every slot."""
        nodes, rows = self.data.num_nodes, self.boundary
        if isinstance(product, np.ndarray):
            spread = np.zeros((nodes, product.shape[1]), dtype=product.dtype)
            spread[rows] = product
            self.add_own(spread)
        else:
            counts = np.zeros(nodes, dtype=np.int64)
            counts[rows] = np.diff(product.indptr)
            indptr = np.append(0, np.cumsum(counts))
            self.add_own(sp.csr_matrix((product.data, product.indices, indptr), shape=(nodes, product.shape[1])))

    def close_stripe(self) -> None:
        """All products of a stripe have been added."""
        self.scratch.stripes = [*getattr(self.scratch, "stripes", []), self.scratch.total]
        self.scratch.total = None

    def _gathered(self) -> Block:
        """Step 4: [Ah^l]^[i] = (Dt^[i])^-1 sum_k B_ijk, from all stripes."""
        stripes: list[Block] = self.scratch.stripes
        whole = stripes[0]
        if len(stripes) > 1:
            place = np.argsort(np.argsort(self.state.owner.numpy() % len(stripes), kind="stable"))
            if any(isinstance(part, np.ndarray) for part in stripes):
                dense = [part if isinstance(part, np.ndarray) else part.toarray() for part in stripes]
                whole = np.hstack(dense)[:, place]
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
        """Prune what the owner prunes, add to Abar, keep the diagonal."""
        config, power = self.config, done.power
        selection: Selection | None = getattr(self.scratch, "selection", None)
        block = self._gathered() if selection is None else selection.kept()
        self.scratch.stripes, self.scratch.selection = [], None  # a prediction makes all powers in one round
        if config.prunes and config.prune_mode == "row":
            block = keep_largest_per_row(as_csr(block), config.prune)
        if config.renormalise:
            mass = row_mass(block)
            block = scaled_rows(block, np.divide(1.0, mass, out=np.zeros_like(mass), where=mass > 0))
        block = stored(block) if not config.prunes else block
        diagonal = self.state.diagonal.clone()
        diagonal[:, power - 1] = torch.from_numpy(_diagonal(block, self.state.columns.numpy())).to(diagonal.dtype)
        tensor = tensor_of(block.astype(config.numpy_dtype))
        self.state = replace(
            self.state,
            power=tensor if power < config.powers else None,
            diagonal=diagonal,
            combined=self._combined(power, tensor),
        )
        mass = row_mass(block)
        return Kept(entries(block), float(mass.sum()), int((mass == 0).sum()))

    def _combined(self, power: int, tensor: Tensor) -> tuple[Tensor, ...]:
        """Abar^[i] += beta_l [Ah^l]^[i]; all powers apart where the betas are trained."""
        config, before = self.config, self.state.combined
        if power > config.structure_hops:  # for return probabilities only
            return before
        if config.train_betas:
            return (*(before or (self._identity(),)), tensor)
        if power == 1 and config.beta0:
            before = (_times(self._identity(), config.beta0),)
        weight = config.power_weights[power - 1]
        if not weight:
            return before
        term = tensor if weight == 1.0 else _times(tensor, weight)
        if not before:
            return (term,)
        return (tensor_of(add(block_of(before[0]), block_of(term)).astype(config.numpy_dtype)),)

    def _identity(self) -> Tensor:
        """Own rows of the identity."""
        own = self.state.columns.numpy()
        ones = np.ones(len(own), dtype=self.config.numpy_dtype)
        return tensor_of(sp.csr_matrix((ones, (np.arange(len(own)), own)), shape=(len(own), self.state.owner.numel())))


# -- server ----------------------------------------------------------------------------------------


def next_power(
    power: int, nodes: int, federation: Federation, config: FedStructConfig, protocol: PowerProtocol
) -> Kept:
    """[Ah^l]^[i] at every client i, from [Ah^{l-1}]; returns what all clients together hold of it."""
    protocol.exchange(federation, power, stripes_of(nodes, len(federation.clients), config))
    if config.prunes and config.prune_mode == "global":
        _select_globally(federation, config.prune * nodes)
    return federation.sum(PowerClient.finish_power, PowerDone(power))


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


def stripes_of(nodes: int, clients: int, config: FedStructConfig) -> int:
    """How many stripes of columns keep the products of one exchange near `STRIPE_BYTES`."""
    per_row = min(float(nodes), float(config.prune * clients)) if config.prunes else float(nodes)
    return int(min(clients, max(1, -(-nodes * per_row * 12 // STRIPE_BYTES))))


def _times(tensor: Tensor, factor: float) -> Tensor:
    return tensor_of(scaled_rows(block_of(tensor), np.full(tensor.shape[0], factor)))


def _diagonal(block: Block, columns: NDArray[np.int64]) -> NDArray[np.floating]:
    """Entry ``columns[r]`` of every row r."""
    if isinstance(block, np.ndarray):
        return block[np.arange(len(columns)), columns]
    rows = np.repeat(np.arange(len(columns)), np.diff(block.indptr))
    found = block.indices == columns[rows]
    return np.bincount(rows[found], weights=block.data[found], minlength=len(columns)).astype(np.float64)


def script(config: FedStructConfig) -> tuple[ScriptLine, ...]:
    """What every protocol asks besides its products: the search has a question per digit, one before and one after."""
    searched = (total(PowerClient.count_digit, most=Selection.DIGITS + 2),)
    return (
        *(searched if config.prunes and config.prune_mode == "global" else ()),
        total(PowerClient.finish_power),
    )
