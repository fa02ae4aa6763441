"""FedStruct's pre-training protocol: every client obtains its rows of Abar = sum_l beta_l Ah^l (spec 5.1), with messages alone.

    paper              here
    At_j^[i], At_i^[j] `PowerClient.edges_of`      own rows, and arcs that enter from others, read from the client's own edges
    Dt^[i]             `PowerClient.degree`
    B_ijk              `Product.rows`              At_k^[i] [Ah^{l-1}]_j^[k], by client k for client i, columns of the stripe
    [Ah^l]^[i]         `PowerState.power`
    Abar^[i]           `PowerState.combined`

Everybody's columns have one numbering, the directory. ``protocol=published``: columns are global ids, and B_ijk arrives sender by sender.
``protocol=hardened`` (spec 13.1): an owner numbers its columns in an order only it knows, and a client is given only the sum over k;
with ``secure_sum`` the sum is masked, so that it can read no more.

A row of B_ijk is addressed by its *slot*: every client numbers its nodes with outgoing cross edges and tells the other end of each edge
the number. Both ends know the edge already. The same exchange shows whether both ends agree on their edges.

Where powers are cut (``prune``):

    block    by the sender: the ceil(p/K) n_i largest entries of B_ijk (the paper's protocol); never at l = 1
    row      by the owner: the p largest entries of each of its rows, before they are multiplied into anything that leaves
    global   by all: the p n largest entries of Ah^l (the reference code, also at l = 1), by counting digits (`graph.powers.Selection`)

With L_s = 1 nothing is ever cut.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.data.nodes import CrossEdges
from isthmus.errors import ConfigError, DataError
from isthmus.federation.interface import Federation
from isthmus.federation.ledger import Disclosure
from isthmus.federation.messages import Count, Identifier, Message, PartyId, Structure
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
from isthmus.methods.training import ModelState, WeightedClient, WeightedConfig
from isthmus.records import Record

STRIPE_BYTES = 256 * 2**20
"""About how much the products of one stripe may take at all clients together."""


@dataclass(frozen=True)
class PowerConfig(WeightedConfig):
    """How Abar is obtained.

    Args:
        structure_hops: L_s, the highest power.
        betas: Weight of each power 1 ... L_s; not given = only the last (the paper's experiments).
        beta0: Weight of the identity.
        train_betas: Learn beta0 and betas with the rest, from these values.
        prune: p, entries kept per row on average; 0 keeps all.
        prune_mode: ``block``, ``row`` or ``global``, see above.
        renormalise: Scale cut rows back to sum 1 (the paper does not).
        protocol: ``published``, or ``hardened``: own numbering of columns, delivery of sums only.
    """

    structure_hops: int = 2
    betas: tuple[float, ...] = ()
    beta0: float = 0.0
    train_betas: bool = False
    prune: int = 30
    prune_mode: Literal["block", "row", "global"] = "row"
    renormalise: bool = False
    protocol: Literal["published", "hardened"] = "hardened"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.structure_hops < 1:
            raise ConfigError(f"structure_hops must be at least 1, got {self.structure_hops}")
        if self.prune < 0:
            raise ConfigError(f"prune must be at least 0 (0 keeps everything), got {self.prune}")
        if self.betas and len(self.betas) != self.structure_hops:
            raise ConfigError(f"betas must name one weight per power: structure_hops={self.structure_hops}, got {len(self.betas)}")
        if self.dp_clip:
            raise ConfigError("fedstruct has no differential privacy: leave dp_clip out, or use fedsgd")
        if self.protocol == "hardened" and self.prune and self.prune_mode == "block":
            raise ConfigError("prune_mode=block is the published protocol's: use prune_mode=row, or protocol=published")

    @property
    def power_weights(self) -> tuple[float, ...]:
        """beta_1 ... beta_Ls."""
        return self.betas or (0.0,) * (self.structure_hops - 1) + (1.0,)

    @property
    def prunes(self) -> bool:
        return self.prune > 0 and self.structure_hops > 1


ConfigT = TypeVar("ConfigT", bound=PowerConfig)


# -- messages ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Enrolment(Message):
    """What a client brings to the directory: how many nodes; which, by global id, only in the published protocol."""

    nodes: Count[int]
    ids: Identifier[Tensor]


@dataclass(frozen=True)
class Directory(Message):
    """Owner of every column, by number, and in the published protocol its global id."""

    clients: Identifier[tuple[str, ...]]
    owner: Identifier[Tensor]
    ids: Identifier[Tensor]


@dataclass(frozen=True)
class EdgeList(Message):
    """All cross edges the sender shares with the receiver, seen from the sender; with slots, -1 for arcs that enter the sender."""

    own: Identifier[Tensor]
    other: Identifier[Tensor]
    outgoing: Structure[Tensor]
    weight: Structure[Tensor]
    slot: Identifier[Tensor]
    slots: Count[int]


@dataclass(frozen=True)
class EdgeCheck(Message):
    """What does not fit together: edges only the other end lists, edges only this one lists, far ends nobody owns."""

    missing: Count[int]
    unanswered: Count[int]
    unknown: Count[int]


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
    """Decide the digit before (keep bins below ``bin``, and all of it if ``whole``), then count this one. The first decides nothing."""

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


# -- state -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PowerState(ModelState):
    """What a client has of the graph.

    Args:
        secret: Where its numbering of columns comes from; never leaves it.
        owner: Number of the owner of every column (n,), from the directory.
        columns: Columns of its own nodes (n_i,).
        entering: Client -> arcs that enter from it, (slots of that client, n_i); None before the edge lists have come.
        power: [Ah^l]^[i] (n_i, n), sparse or dense.
        combined: Abar^[i], or all powers 0 ... L_s where the betas are trained.
        far: Columns of the far ends of its outgoing cross edges; only in the published protocol, where they are known.
        diagonal: (Ah^l)_vv of its own nodes (n_i, L_s).
    """

    secret: bytes
    owner: Tensor
    columns: Tensor
    far: Tensor
    entering: Mapping[str, Tensor]
    power: Tensor | None
    combined: tuple[Tensor, ...]
    diagonal: Tensor


class PowerClient(WeightedClient[ConfigT], Generic[ConfigT]):
    """A client that takes part in the powers. It reads its own nodes and edges, its state and its mail."""

    state: PowerState

    def setup(self) -> None:
        super().setup()
        data = self.data
        if data.cross is None:
            raise DataError("fedstruct needs the cross edges of every client: give them, or use fedsgd")
        self.cross: CrossEdges = data.cross
        self.out = np.flatnonzero(self.cross.outgoing.numpy())
        source, target = data.edge_index.numpy()
        loops = np.arange(data.num_nodes)
        ones = np.ones(len(source) + len(loops))
        self.inner = as_csr(sp.csr_matrix((ones, (np.append(source, loops), np.append(target, loops))), shape=(len(loops), len(loops))))
        weight = self.cross.weight.numpy().astype(np.float64)
        if (weight < 0).any():
            raise DataError(f"{self.party} has cross edges of negative weight; random walks need weights of at least 0")
        crossing = np.bincount(self.cross.own.numpy()[self.out], weights=weight[self.out], minlength=len(loops))
        self.degree = row_mass(self.inner) + crossing  # Dt^[i], self-loop included
        self.boundary = np.unique(self.cross.own.numpy()[self.out])
        self.kind = np.float64 if self.config.precision == "float64" else np.float32

    def power_state(self) -> dict[str, object]:
        """Fields of `PowerState` before anything has arrived."""
        none = torch.zeros(0, dtype=torch.int64)
        diagonal = torch.zeros(self.data.num_nodes, self.config.structure_hops, dtype=self.config.dtype)
        return {"secret": secrets.token_bytes(32), "owner": none, "columns": none, "far": none, "entering": {}, "power": None, "combined": (),
                "diagonal": diagonal}  # fmt: skip

    @property
    def hardened(self) -> bool:
        return self.config.protocol == "hardened"

    # -- directory ---------------------------------------------------------------------------------------------------------------

    @handler
    def enrol(self) -> Enrolment:
        ids = torch.zeros(0, dtype=torch.int64) if self.hardened else self.data.node_id
        return Enrolment(self.data.num_nodes, ids)

    @handler
    def list_edges(self, directory: Directory) -> Mapping[PartyId, EdgeList]:
        """Take the directory; tell every other client the edges shared with it."""
        owner, me = directory.owner, directory.clients.index(self.party)
        if self.hardened:
            mine = torch.nonzero(owner == me).flatten()
            order = np.random.Generator(np.random.Philox(key=int.from_bytes(self.state.secret[:16], "big"))).permutation(len(mine))
            columns, far = mine[torch.from_numpy(order)], torch.zeros(0, dtype=torch.int64)
        else:
            columns = torch.searchsorted(directory.ids, self.data.node_id)
            # An id nobody owns gets a column all the same; its owner finds out when the edge lists are compared.
            far = torch.searchsorted(directory.ids, self.cross.other[torch.from_numpy(self.out)]).clamp(max=owner.numel() - 1)
        self.state = replace(self.state, owner=owner, columns=columns, far=far)
        slot = np.full(self.data.num_nodes, -1)
        slot[self.boundary] = np.arange(len(self.boundary))
        mail = {}
        for client in directory.clients:
            arcs = self._shared_with(client)
            outgoing = self.cross.outgoing[arcs]
            own = self.cross.own[arcs]
            slots = torch.where(outgoing, torch.from_numpy(slot)[own], torch.tensor(-1))
            if client != self.party:
                mail[client] = EdgeList(self.data.node_id[own], self.cross.other[arcs], outgoing.long(), self.cross.weight[arcs], slots,
                                        len(self.boundary))  # fmt: skip
        unknown = ~np.isin(np.array(self.cross.owners), [c for c in directory.clients if c != self.party])
        self.scratch.unknown = int(unknown[self.cross.owner.numpy()].sum())
        return mail

    @handler
    def check_edges(self, mail: Mapping[PartyId, EdgeList]) -> EdgeCheck:
        """Keep the arcs that enter; count what only one end knows."""
        row = {int(node): r for r, node in enumerate(self.data.node_id.tolist())}
        missing = unanswered = 0
        entering = {}
        for client, edges in mail.items():
            arcs = self._shared_with(client)
            mine = _arc_set(self.data.node_id[self.cross.own[arcs]], self.cross.other[arcs], self.cross.outgoing[arcs].long(),
                            self.cross.weight[arcs])  # fmt: skip
            theirs = _arc_set(edges.other, edges.own, 1 - edges.outgoing, edges.weight)
            missing, unanswered = missing + _surplus(theirs, mine), unanswered + _surplus(mine, theirs)
            arriving = np.flatnonzero(edges.outgoing.numpy())
            rows, weight = edges.slot.numpy()[arriving], edges.weight.numpy()[arriving].astype(self.kind)
            targets = np.array([row.get(node, -1) for node in edges.other.numpy()[arriving].tolist()], dtype=np.int64)
            known = (targets >= 0) & (rows >= 0) & (rows < edges.slots)
            shape = (edges.slots, self.data.num_nodes)
            entering[client] = _tensor(as_csr(sp.csr_matrix((weight[known], (rows[known], targets[known])), shape=shape)))
        self.state = replace(self.state, entering=entering)
        return EdgeCheck(missing, unanswered, self.scratch.unknown)

    def _shared_with(self, client: str) -> Tensor:
        if client not in self.cross.owners:
            return torch.zeros(0, dtype=torch.int64)
        return torch.nonzero(self.cross.owner == self.cross.owners.index(client)).flatten()

    # -- powers ------------------------------------------------------------------------------------------------------------------

    def _columns_of(self, stripe: Stripe) -> NDArray[np.int64]:
        return np.flatnonzero(self.state.owner.numpy() % stripe.stripes == stripe.stripe)

    def _factor(self, stripe: Stripe) -> Block:
        """[Ah^{l-1}]_j^[k] for all j of a stripe; of l = 1 the identity."""
        columns = self._columns_of(stripe)
        if stripe.power == 1:
            size = self.state.owner.numel()
            own = self.state.columns.numpy()
            power: Block = sp.csr_matrix((np.ones(len(own), dtype=self.kind), (np.arange(len(own)), own)), shape=(len(own), size))
        else:
            assert self.state.power is not None
            power = block_of(self.state.power)
        return power if stripe.stripes == 1 else power[:, columns]

    @handler
    def multiply(self, stripe: Stripe) -> Mapping[PartyId, Product]:
        """Step 1 to 3: B_ijk for every client i, cut, and sent; k = i is mail to oneself."""
        factor, owner = self._factor(stripe), self.state.owner.numpy()[self._columns_of(stripe)]
        mail = {}
        for client, arcs in {**self.state.entering, self.party: None}.items():
            left = self.inner.astype(self.kind) if arcs is None else from_torch_csr(arcs)
            product: Block = left @ factor
            if isinstance(product, sp.csr_matrix | sp.csr_array):
                product = as_csr(product)
            if self.config.prunes and self.config.prune_mode == "block" and stripe.power > 1:
                product = keep_largest_by_owner(as_csr(product), owner, self._block_limit(client))
            if self.hardened or client == self.party or entries(product):
                mail[client] = Product(_tensor(as_csr(product) if self.hardened else stored(product)))
        return mail

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
    def own_product(self, stripe: Stripe) -> None:
        """k = i of a hardened exchange: it must not be mixed with slots of others."""
        self._add(as_csr(self.inner.astype(self.kind) @ self._factor(stripe)), own=True)

    @handler
    def multiply_for_sum(self, stripe: Stripe) -> Mapping[PartyId, Product]:
        """Steps 1 and 3 for delivery as a sum: everybody writes to everybody, so that who writes tells nothing."""
        return {client: product for client, product in self.multiply(stripe).items() if client != self.party}

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
                whole = np.hstack([part if isinstance(part, np.ndarray) else part.toarray() for part in stripes])[:, place]
            else:
                whole = as_csr(sp.hstack(stripes, format="csr")[:, place])
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
        tensor = _tensor(block.astype(self.kind))
        self.state = replace(self.state, power=tensor if power < config.structure_hops else None, diagonal=diagonal,
                             combined=self._combined(power, tensor))  # fmt: skip
        mass = row_mass(block)
        return Kept(entries(block), float(mass.sum()), int((mass == 0).sum()))

    def _combined(self, power: int, tensor: Tensor) -> tuple[Tensor, ...]:
        """Abar so far."""
        config = self.config
        if config.train_betas:
            return (*(self.state.combined or (self._identity(),)), tensor)
        weight = config.power_weights[power - 1]
        parts = list(self.state.combined) if power > 1 else [self._scaled(self._identity(), config.beta0)] if config.beta0 else []
        if weight:
            scaled = tensor if weight == 1.0 else self._scaled(tensor, weight)
            parts = [scaled] if not parts else [_tensor(add(block_of(parts[0]), block_of(scaled)).astype(self.kind))]
        return tuple(parts)

    def _identity(self) -> Tensor:
        own = self.state.columns.numpy()
        shape = (len(own), self.state.owner.numel())
        return _tensor(as_csr(sp.csr_matrix((np.ones(len(own), dtype=self.kind), (np.arange(len(own)), own)), shape=shape)))

    def _scaled(self, tensor: Tensor, factor: float) -> Tensor:
        return _tensor(scaled_rows(block_of(tensor), np.full(tensor.shape[0], factor)))


# -- server ------------------------------------------------------------------------------------------------------------------------


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


def make_directory(federation: Federation, config: PowerConfig) -> Directory:
    """Everybody's columns in one numbering."""
    enrolled = federation.call(PowerClient.enrol)
    clients = tuple(enrolled)
    if config.protocol == "hardened":
        sizes = torch.tensor([reply.nodes for reply in enrolled.values()])
        return Directory(clients, torch.repeat_interleave(torch.arange(len(clients)), sizes), torch.zeros(0, dtype=torch.int64))
    ids = torch.cat([reply.ids for reply in enrolled.values()])
    owner = torch.repeat_interleave(torch.arange(len(clients)), torch.tensor([reply.ids.numel() for reply in enrolled.values()]))
    order = torch.argsort(ids, stable=True)
    ids = ids[order]
    twice = torch.nonzero(ids[1:] == ids[:-1]).flatten()
    if twice.numel():
        raise DataError(f"node {int(ids[twice[0]])} has two owners: every node belongs to one client; correct the clients' node ids")
    return Directory(clients, owner[order], ids)


def agree_on_edges(federation: Federation, directory: Directory) -> None:
    """Hand out the directory and compare both ends of every cross edge."""
    checks = federation.exchange(PowerClient.list_edges, PowerClient.check_edges, directory)
    for client, check in checks.items():
        if check.unknown:
            raise DataError(f"{client} has {check.unknown} cross edges to clients that take no part: remove them, or let those clients in")
        if check.missing or check.unanswered:
            raise DataError(
                f"cross edges of {client} and of the others do not match: {check.missing} it does not list but the other end does, "
                f"{check.unanswered} it lists but the other end does not own or list; both ends must list every cross edge"
            )


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
        lines += [Disclosure(powers, "server", "client", Digit), Disclosure(powers, "client", "server", DigitCounts, "summed")]
    return tuple(lines)


# -- tools -------------------------------------------------------------------------------------------------------------------------


def _tensor(block: Block) -> Tensor:
    if isinstance(block, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(block))
    matrix = block if block.has_sorted_indices else block.sorted_indices()
    return torch.sparse_csr_tensor(
        torch.from_numpy(matrix.indptr.astype(np.int64)), torch.from_numpy(matrix.indices.astype(np.int64)),
        torch.from_numpy(np.ascontiguousarray(matrix.data)), size=(int(matrix.shape[0]), int(matrix.shape[1])), check_invariants=False,
    )  # fmt: skip


def block_of(tensor: Tensor) -> Block:
    return tensor.numpy() if tensor.layout == torch.strided else from_torch_csr(tensor)


def _diagonal(block: Block, columns: NDArray[np.int64]) -> NDArray[np.floating]:
    if isinstance(block, np.ndarray):
        return block[np.arange(len(columns)), columns]
    rows = np.repeat(np.arange(len(columns)), np.diff(block.indptr))
    found = block.indices == columns[rows]
    return np.bincount(rows[found], weights=block.data[found], minlength=len(columns))


def _arc_set(own: Tensor, other: Tensor, outgoing: Tensor, weight: Tensor) -> NDArray[np.float64]:
    """Rows (own, other, direction, weight), sorted."""
    rows = np.stack([tensor.numpy().astype(np.float64) for tensor in (own, other, outgoing, weight)], axis=1)
    return rows[np.lexsort(rows.T[::-1])]


def _surplus(a: NDArray[np.float64], b: NDArray[np.float64]) -> int:
    """Rows of a that are not in b."""
    if a.shape == b.shape and np.array_equal(a, b):
        return 0
    return (Counter(map(tuple, a.tolist())) - Counter(map(tuple, b.tolist()))).total()
