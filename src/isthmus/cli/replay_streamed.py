"""Rounds of FedStruct's streamed protocol played again, and what every client is sent in them.

Masked messages cannot be opened by anybody but their receiver, and the clients' rows of S are secrets. So the run goes
on from its model packages, and every client is given exactly the sums it would be given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from isthmus.data.node_data import NodeData
from isthmus.errors import DataError
from isthmus.experiments.config import Settings
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.model_package import MODELS, read_packages
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.kept import restore_kept
from isthmus.federation.messages import PartyId
from isthmus.federation.session import Session
from isthmus.methods.fedstruct.algorithm import step_theta
from isthmus.methods.fedstruct.config import FedStructConfig
from isthmus.methods.fedstruct.streamed import agree
from isthmus.methods.fedstruct.streamed_client import StreamedClient
from isthmus.methods.fedstruct.streamed_hops import Hop, Start
from isthmus.nn.optim import fresh_state
from isthmus.privacy.attacks.hop_sums import SumsOfHops
from isthmus.seeds import Stream

ROUNDS = 40
"""Rounds that an attacker looks at, at most; a run with fewer shows no more."""
MOST_VALUES = 2**27
"""Numbers that are kept of these rounds at most: of large graphs fewer rounds are looked at."""

Real = NDArray[np.floating]
Mail = Mapping[PartyId, Mapping[PartyId, Real]]
"""Receiver -> sender -> sums."""


@dataclass(frozen=True)
class Seat:
    """A client: its data, rows of its nodes with a slot for sums forth (True) and back (False), and which of its cross
    edges are used.
    """

    data: NodeData
    slots: Mapping[bool, NDArray[np.int64]]
    used: NDArray[np.bool_]


@dataclass(frozen=True)
class Played:
    """What happened in the rounds.

    Args:
        position: Row of each node id.
        values: Z^(0) of each round (n, c).
        sent: Of each round the sums of Z^(0), and of Z^(1) where there are two hops.
        last: Sums of Z^(L-1) in the first of them, with the models that the run ended with.
        start_back: G^(L) / Dt in the first (n, c).
        back: Sums of the first hop back in the first, and of the second where there are two.
    """

    seats: Mapping[PartyId, Seat]
    position: Mapping[int, int]
    values: Sequence[Real]
    sent: Sequence[Sequence[Mail]]
    last: Mail
    start_back: Real
    back: Sequence[Mail]

    def rows(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of nodes."""
        return np.array([self.position[node] for node in ids.tolist()], dtype=np.int64)


def played_again(folder: RunFolder, settings: Settings, parts: Mapping[PartyId, NodeData]) -> Played | None:
    """Rounds after the run's last one; None where it left no models."""
    config: FedStructConfig = settings.method_config
    try:
        packages = read_packages(folder.path / MODELS)
    except DataError:
        return None
    table = settings.method.table
    engine = LocalEngine(parts, table, config, Stream(settings.run.seed, ("audit",)))
    clients: dict[PartyId, Any] = {name: engine.party(name).client for name in engine.parties("client")}
    for name, client in clients.items():
        restore_kept(client, packages[name].weights, packages[name].structure, as_trained=True)
    session = Session(engine, table, seed=settings.run.seed)
    session.clock.begin("setup", 1, 1)
    agree(session, config)
    seats = {name: Seat(c.data, {True: c.boundary, False: c.entered}, _used(c)) for name, c in clients.items()}
    weights = next(iter(clients.values())).state.weights
    optimizer = fresh_state(config.optimizer, weights)
    total, hops = sum(client.samples() for client in clients.values()), config.structure_hops
    values: list[Real] = []
    sent: list[list[Mail]] = []
    back: list[Mail] = []
    kept = 0
    while len(sent) < min(settings.run.rounds, ROUNDS) and kept < MOST_VALUES:
        round = len(sent) + 1
        session.clock.begin("train", round, round + 1)
        session.call(StreamedClient.begin, Start(weights, total, True))
        values.append(_all(clients, "values").astype(np.float32))
        forth: list[Mail] = []
        for hop in range(1, hops + 1):
            if hop <= 2 or hop == hops:
                forth.append(_mail(clients, "send_forward", hop))
            session.exchange(StreamedClient.send_forward, StreamedClient.take_forward, Hop(hop), combine="sum")
        session.call(StreamedClient.differentiate)
        if round == 1:
            last, start_back = forth[-1], _all(clients, "grad")
        for hop in range(hops, 0, -1):
            if round == 1 and hop > hops - 2:
                back.append(_mail(clients, "send_backward", hop))
            session.exchange(StreamedClient.send_backward, StreamedClient.take_backward, Hop(hop), combine="sum")
        step = session.sum(StreamedClient.finish)
        weights, optimizer = step_theta(config, weights, step.gradients, optimizer, round)
        sent.append(forth[:2])
        kept += sum(sums.size for mail in forth[:2] for letters in mail.values() for sums in letters.values())
    inverse = np.concatenate([client.inverse.double().numpy() for client in clients.values()])
    ids = np.concatenate([client.data.node_id.numpy() for client in clients.values()])
    position = {node: row for row, node in enumerate(ids.tolist())}
    return Played(seats, position, values, sent, last, start_back * inverse, back)


def _all(clients: Mapping[PartyId, Any], name: str) -> NDArray[np.float64]:
    """Values or gradients of all nodes as they are now."""
    return np.concatenate([getattr(client.scratch.hops, name).double().numpy() for client in clients.values()])


def _mail(clients: Mapping[PartyId, Any], handler: str, hop: int) -> Mail:
    """What everybody is sent in a hop: asked before it, since the hop sends the same again."""
    sent: dict[PartyId, dict[PartyId, Real]] = {name: {} for name in clients}
    for sender, client in clients.items():
        for receiver, message in getattr(client, handler)(Hop(hop)).items():
            sent[receiver][sender] = message.sums.numpy()
    return sent


def _used(client: Any) -> NDArray[np.bool_]:
    """Which of a client's cross edges are used: all but those that are left out."""
    if not client.config.withhold_exposed:
        return np.ones(client.cross.num_edges, dtype=bool)
    left = {
        pair
        for edges in client.scratch.arcs.values()
        for pair in zip(edges.other.tolist(), edges.own.tolist(), strict=True)
    }
    ends = zip(client.data.node_id[client.cross.own].tolist(), client.cross.other.tolist(), strict=True)
    return np.array([pair in left for pair in ends], dtype=bool)


# -- what it says to clients that pool what they see -----------------------------------------------


@dataclass(frozen=True)
class Given:
    """Linear equations for values of foreign nodes.

    Args:
        sums: Their weights.
        senders: Whose sums are added up.
        places: For each client of the group, which rows of its mail.
    """

    sums: SumsOfHops
    senders: tuple[PartyId, ...]
    places: Sequence[tuple[PartyId, NDArray[np.int64]]]

    def right_sides(self, mail: Mail) -> NDArray[np.float64]:
        """(s, c). What clients of the group sent each other they know, and it is left out."""
        totals = [np.sum([mail[client][sender] for sender in self.senders], axis=0) for client, _ in self.places]
        return np.concatenate(
            [total[rows].astype(np.float64) for total, (_, rows) in zip(totals, self.places, strict=True)]
        )

    def solved(self, mail: Mail) -> NDArray[np.float64]:
        """Values of the exposed nodes."""
        return self.sums.solved(self.right_sides(mail))


def equations(played: Played, group: Sequence[PartyId], *, outgoing: bool, by_sender: bool) -> list[Given]:
    """What sums forth (``outgoing``) or back say to a group: over all others, or over each other."""
    others = [name for name in played.seats if name not in group]
    found = []
    for senders in [(name,) for name in others] if by_sender else [tuple(others)]:
        places: list[tuple[PartyId, NDArray[np.int64]]] = []
        rows, columns, weights, above = [], [], [], 0
        for client in group:
            seat, cross = played.seats[client], played.seats[client].data.cross
            assert cross is not None
            numbers = [number for number, name in enumerate(cross.owners) if name in senders]
            chosen = (cross.outgoing.numpy() == outgoing) & seat.used & np.isin(cross.owner.numpy(), numbers)
            if not chosen.any():
                continue
            own, row = np.unique(cross.own.numpy()[chosen], return_inverse=True)
            places.append((client, np.searchsorted(seat.slots[outgoing], own)))
            rows.append(row + above)
            columns.append(played.rows(cross.other.numpy()[chosen]))
            weights.append(cross.weight.numpy()[chosen].astype(np.float64))
            above += len(own)
        if places:
            nodes, column = np.unique(np.concatenate(columns), return_inverse=True)
            matrix = sp.csr_matrix((np.concatenate(weights), (np.concatenate(rows), column)), shape=(above, len(nodes)))
            found.append(Given(SumsOfHops(matrix, nodes), senders, places))
    return found
