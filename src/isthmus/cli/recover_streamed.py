"""What the sums of FedStruct's hops tell a client, measured on the models a run ended with.

Masked messages cannot be opened by anybody but their receiver, and the clients' rows of S are secrets. So the last
round is played again from the model packages, with several draws of dropout, and every client is given exactly the sums
it would be given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from isthmus.federation.audit import LABELS, MATCHING, NEIGHBOURS, SOLVING
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.kept import restore_kept
from isthmus.federation.messages import PartyId
from isthmus.federation.session import Session
from isthmus.methods.fedstruct.config import FedStructConfig
from isthmus.methods.fedstruct.streamed import agree
from isthmus.methods.fedstruct.streamed_client import StreamedClient
from isthmus.methods.fedstruct.streamed_hops import Hop, Start
from isthmus.privacy.attacks.hop_sums import (
    SumsOfHops,
    edges_by_regression,
    labels_from_first_hop_back,
    single_residuals,
)
from isthmus.seeds import Stream

ROUNDS = 8
"""Rounds that an attacker looks at: draws of dropout with the same model."""
MOST_EXPOSED = 2000
"""Exposed nodes of one client up to which edges between them are fitted."""
COUNTS = (
    "trained",
    "argmax",
    "exposed",
    "neighbours",
    "claimed",
    "correct",
    "of",
    "labels",
    "right",
    "training",
    "slots",
    "slots right",
)
Told = tuple[str, str, str, str, dict[str, float]]


@dataclass(frozen=True)
class Played:
    """Values of all nodes by round and hop, and the residuals that the backward pass begins with.

    Args:
        values: [round][hop] (n, c), hop 0 ... L, rows in the order of ``ids``.
        start_back: G^(L) / Dt of the last round (n, c).
        used: For each client, which of its cross edges are used.
    """

    ids: NDArray[np.int64]
    values: list[list[NDArray[np.float64]]]
    start_back: NDArray[np.float64]
    used: Mapping[PartyId, NDArray[np.bool_]]


def hop_sums(folder: RunFolder, settings: Settings, parts: Mapping[PartyId, NodeData]) -> Iterator[Told]:
    """Every client by itself: exposed values, edges between exposed nodes, labels of the first hop back."""
    played = _played(folder, settings, parts)
    if played is None:
        return
    found: dict[str, float] = dict.fromkeys(COUNTS, 0)
    for name in parts:
        _attack(name, parts, played, settings.secure, found)
    how = "sums over senders" if settings.secure else "sums of each sender"
    share = found["exposed"] / max(1, found["neighbours"])
    yield (
        SOLVING,
        "client",
        f"Forward: {how}",
        f"read: values of {found['exposed']} of {found['neighbours']} foreign neighbours ({share:.3f}), by "
        f"{len(parts)} clients",
        {"exposed": found["exposed"], "of": found["neighbours"]},
    )
    precision, recall = found["correct"] / max(1, found["claimed"]), found["correct"] / max(1, found["of"])
    yield (
        NEIGHBOURS,
        "client",
        f"Forward: {how}, {ROUNDS} rounds",
        f"named: {found['claimed']} edges between foreign nodes, precision {precision:.3f}, recall {recall:.4f} "
        f"(of {found['of']} neighbours of adjacent foreign nodes)",
        {"claimed": found["claimed"], "correct": found["correct"], "of": found["of"]}
        | {"precision": precision, "recall": recall},
    )
    yield (
        MATCHING,
        "client",
        f"Forward, last hop: {how}",
        f"named: labels of {found['trained']} training nodes by their largest value, {found['argmax']} of them right "
        f"(of {found['training']} adjacent ones)",
        {"claimed": found["trained"], "correct": found["argmax"], "of": found["training"]},
    )
    yield (
        LABELS,
        "client",
        f"Backward, first hop: {how}",
        f"read: {found['labels']} labels of adjacent training nodes, {found['right']} of them right (of "
        f"{found['training']}); {found['slots']} sums look like one node's residual, and for {found['slots right']} of "
        "them some foreign neighbour has that label",
        {"claimed": found["labels"], "correct": found["right"], "of": found["training"]}
        | {"slots": found["slots"], "slots_right": found["slots right"]},
    )


def _played(folder: RunFolder, settings: Settings, parts: Mapping[PartyId, NodeData]) -> Played | None:
    """The last round again, several times."""
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
    used = {name: _used(client) for name, client in clients.items()}
    weights = next(iter(clients.values())).state.weights
    total = sum(client.samples() for client in clients.values())

    def everybody(name: str) -> NDArray[np.float64]:
        return np.concatenate([getattr(c.scratch.hops, name).double().numpy() for c in clients.values()])

    values = []
    for round in range(1, ROUNDS + 1):
        session.clock.begin("train", round, round + 1)
        session.call(StreamedClient.begin, Start(weights, total, True))
        series = [everybody("values")]
        for hop in range(1, config.structure_hops + 1):
            session.exchange(StreamedClient.send_forward, StreamedClient.take_forward, Hop(hop), combine="sum")
            series.append(everybody("values"))
        values.append(series)
        session.call(StreamedClient.differentiate)
    inverse = np.concatenate([client.inverse.double().numpy() for client in clients.values()])
    ids = np.concatenate([client.data.node_id.numpy() for client in clients.values()])
    return Played(ids, values, everybody("grad") * inverse, used)


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


def _attack(
    client: PartyId, parts: Mapping[PartyId, NodeData], played: Played, secure: bool, found: dict[str, float]
) -> None:
    """One client's attacks, added to what all found."""
    data, used = parts[client], played.used[client]
    position = {node: row for row, node in enumerate(played.ids.tolist())}
    truth = _truth(parts, position)
    own = np.zeros(len(position), dtype=bool)
    own[[position[node] for node in data.node_id.tolist()]] = True
    classes = np.full(len(position), -1)
    for part in parts.values():
        rows = [position[node] for node in part.node_id[part.train].tolist()]
        classes[rows] = part.y[part.train].numpy()
    forward = _sums_of(data, position, used, outgoing=True, by_sender=not secure)
    near = _neighbours(data, position, outgoing=True)
    found["neighbours"] += len(near)
    found["of"] += int(truth[near][:, np.flatnonzero(~own)].nnz)
    exposed, series = [], []
    for sums in forward:
        exposed.append(sums.nodes[sums.exposed])
        series.append([[sums.solved(sums.edges @ hop[sums.nodes]) for hop in hops[:-1]] for hops in played.values])
    nodes = np.concatenate(exposed) if exposed else np.zeros(0, dtype=np.int64)
    found["exposed"] += len(nodes)
    if len(nodes):
        last = np.concatenate([part[-1][-1] for part in series])  # Z^(L-1), all but the logits of the structure branch
        found["trained"] += int((classes[nodes] >= 0).sum())
        found["argmax"] += int((classes[nodes] == last.argmax(axis=1)).sum())
    if 1 < len(nodes) <= MOST_EXPOSED and len(played.values[0]) > 2:
        read = [
            [np.concatenate([part[r][h] for part in series]) for h in range(len(played.values[0]) - 1)]
            for r in range(ROUNDS)
        ]
        beside = sp.csr_matrix(truth[nodes][:, np.flatnonzero(own)])  # the client's own edges
        after, before, known = [], [], []
        for r in range(ROUNDS):
            for h in range(len(read[r]) - 1):
                after.append(read[r][h + 1])
                before.append(read[r][h])
                known.append(read[r][h] + beside @ played.values[r][h][own])
        claims = edges_by_regression(after, before, known)
        true = truth[nodes][:, nodes].toarray() > 0
        found["claimed"] += int(claims.sum())
        found["correct"] += int((claims & true).sum())
    backward = _sums_of(data, position, used, outgoing=False, by_sender=not secure)
    found["training"] += int((classes[_neighbours(data, position, outgoing=False)] >= 0).sum())
    for sums in backward:
        alone, labels = labels_from_first_hop_back(sums, sums.edges @ played.start_back[sums.nodes])
        found["labels"] += int(labels.certain.sum())
        found["right"] += int((labels.certain & (labels.labels == classes[alone])).sum())
        single = single_residuals(sums.edges @ played.start_back[sums.nodes])
        entries = sums.edges.tocoo()
        hit = (classes[sums.nodes[entries.col]] == single.labels[entries.row]) & (entries.data > 0)
        around = np.bincount(entries.row[hit], minlength=len(single.labels)) > 0
        found["slots"] += int(single.certain.sum())
        found["slots right"] += int((single.certain & around).sum())


def _neighbours(data: NodeData, position: Mapping[int, int], *, outgoing: bool) -> NDArray[np.int64]:
    """Foreign nodes at the other end of the client's edges."""
    assert data.cross is not None
    far = data.cross.other.numpy()[data.cross.outgoing.numpy() == outgoing]
    return np.unique(np.array([position[node] for node in far.tolist()], dtype=np.int64))


def _sums_of(
    data: NodeData, position: Mapping[int, int], used: NDArray[np.bool_], *, outgoing: bool, by_sender: bool
) -> list[SumsOfHops]:
    """The client's edges to foreign nodes, in one direction, without closed ones: of all owners, or of each."""
    assert data.cross is not None
    cross = data.cross
    way = (cross.outgoing.numpy() == outgoing) & used
    groups = [way & (cross.owner.numpy() == number) for number in range(len(cross.owners))] if by_sender else [way]
    found = []
    for chosen in groups:
        if not chosen.any():
            continue
        far = np.array([position[node] for node in cross.other.numpy()[chosen].tolist()])
        nodes, columns = np.unique(far, return_inverse=True)
        slots, rows = np.unique(cross.own.numpy()[chosen], return_inverse=True)
        weight = cross.weight.numpy()[chosen].astype(np.float64)
        found.append(SumsOfHops(sp.csr_matrix((weight, (rows, columns)), shape=(len(slots), len(nodes))), nodes))
    return found


def _truth(parts: Mapping[PartyId, NodeData], position: Mapping[int, int]) -> sp.csr_matrix:
    """The adjacency of the whole graph, without loops."""
    rows, columns = [], []
    for data in parts.values():
        assert data.cross is not None
        own = np.array([position[node] for node in data.node_id.tolist()])
        out = data.cross.outgoing.numpy()
        rows += [own[data.edge_index[0].numpy()], own[data.cross.own.numpy()[out]]]
        far = np.array([position[node] for node in data.cross.other.numpy()[out].tolist()], dtype=np.int64)
        columns += [own[data.edge_index[1].numpy()], far]
    place = np.concatenate(rows), np.concatenate(columns)
    whole = sp.csr_matrix((np.ones(len(place[0])), place), shape=(len(position), len(position)))
    whole.setdiag(0)
    whole.eliminate_zeros()
    return sp.csr_matrix(whole.sign())
