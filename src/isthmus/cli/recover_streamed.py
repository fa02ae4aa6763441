"""What the sums of FedStruct's hops tell a client, measured on rounds that go on from the models a run ended with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from isthmus.cli.replay_streamed import Given, Mail, Played, equations, played_again
from isthmus.data.node_data import NodeData
from isthmus.experiments.config import Settings
from isthmus.experiments.folder import RunFolder
from isthmus.federation.audit import LABELS, MATCHING, NEIGHBOURS, SOLVING
from isthmus.federation.messages import PartyId
from isthmus.privacy.attacks.hop_sums import edges_by_regression, labels_from_first_hop_back, labels_present

MOST_EXPOSED = 1000
"""Exposed nodes up to which edges between them are fitted."""
COUNTS: tuple[str, ...] = (
    *("neighbours", "exposed", "error", "claimed", "correct", "of", "trained", "argmax", "training"),
    *("labels", "right", "present", "present right", "beside", "beside right"),
)
Told = tuple[str, str, str, str, dict[str, float]]


def hop_sums(folder: RunFolder, settings: Settings, parts: Mapping[PartyId, NodeData]) -> Iterator[Told]:
    """Every client by itself."""
    played = played_again(folder, settings, parts)
    if played is not None:
        yield from sums_told(played, parts, settings.secure)


def sums_told(played: Played, parts: Mapping[PartyId, NodeData], secure: bool, *, together: int = 1) -> Iterator[Told]:
    """Exposed values, edges between exposed nodes, labels of the first two hops back; everybody's added up.

    Args:
        secure: Sums are masked, so a client knows only those over all senders. Masks change no value.
        together: Clients that pool what they see: each with the next ones.
    """
    truth = Truth(played, parts)
    found: dict[str, float] = dict.fromkeys(COUNTS, 0)
    names = list(parts)
    for start in range(len(names)):
        group = [names[(start + place) % len(names)] for place in range(together)]
        _attack(group, played, truth, secure, found)
    yield from _told(found, len(played.sent), len(names), together, secure)


def _told(found: Mapping[str, float], rounds: int, groups: int, together: int, secure: bool) -> Iterator[Told]:
    how = "sums over senders" if secure else "sums of each sender"
    who = "client" if together == 1 else f"{together} clients together"
    share, error = found["exposed"] / max(1, found["neighbours"]), found["error"] / max(1, found["exposed"])
    noise = f", off by {error:.2f} of their deviation" if error > 1e-3 else ""
    yield (
        SOLVING,
        who,
        f"Forward: {how}",
        f"read: values of {found['exposed']} of {found['neighbours']} foreign neighbours ({share:.3f}), by {groups} "
        f"{'clients' if together == 1 else 'groups'}{noise}",
        {"exposed": found["exposed"], "of": found["neighbours"], "error": error},
    )
    precision, recall = found["correct"] / max(1, found["claimed"]), found["correct"] / max(1, found["of"])
    yield (
        NEIGHBOURS,
        who,
        f"Forward: {how}, {rounds} rounds",
        f"named: {found['claimed']} edges between foreign nodes, precision {precision:.3f}, recall {recall:.4f} "
        f"(of {found['of']} neighbours of adjacent foreign nodes)",
        {"claimed": found["claimed"], "correct": found["correct"], "of": found["of"]}
        | {"precision": precision, "recall": recall},
    )
    yield (
        MATCHING,
        who,
        f"Forward, last hop: {how}",
        f"named: labels of {found['trained']} training nodes by their largest value, {found['argmax']} of them right "
        f"(of {found['training']} adjacent ones)",
        {"claimed": found["trained"], "correct": found["argmax"], "of": found["training"]},
    )
    yield (
        LABELS,
        who,
        f"Backward, first hop: {how}",
        f"read: {found['labels']} labels of adjacent training nodes, {found['right']} of them right (of "
        f"{found['training']}); {found['present']} labels that one of several has, {found['present right']} of them "
        "right",
        {"claimed": found["labels"], "correct": found["right"], "of": found["training"]}
        | {"present": found["present"], "present_right": found["present right"]},
    )
    yield (
        LABELS,
        who,
        f"Backward, second hop: {how}",
        f"read: {found['beside']} labels that a neighbour of a named foreign node has, {found['beside right']} of them "
        "right; which neighbour stays open",
        {"claimed": found["beside"], "correct": found["beside right"]},
    )


class Truth:
    """The graph, and labels of training nodes (-1 elsewhere), by rows."""

    def __init__(self, played: Played, parts: Mapping[PartyId, NodeData]) -> None:
        count = len(played.position)
        self.own = {name: played.rows(data.node_id.numpy()) for name, data in parts.items()}
        self.labels = np.full(count, -1)
        sources, targets = [], []
        for name, data in parts.items():
            assert data.cross is not None
            own, out = self.own[name], data.cross.outgoing.numpy()
            self.labels[own[data.train.numpy()]] = data.y[data.train].numpy()
            sources += [own[data.edge_index[0].numpy()], own[data.cross.own.numpy()[out]]]
            targets += [own[data.edge_index[1].numpy()], played.rows(data.cross.other.numpy()[out])]
        place = np.concatenate(sources), np.concatenate(targets)
        arcs = sp.csr_matrix((np.ones(len(place[0])), place), shape=(count, count))
        arcs.setdiag(0)
        arcs.eliminate_zeros()
        self.arcs = sp.csr_matrix(arcs.sign())


def _attack(group: Sequence[PartyId], played: Played, truth: Truth, secure: bool, found: dict[str, float]) -> None:
    """What clients find that pool all they see, added to what others found."""
    mine = np.zeros(len(played.position), dtype=bool)
    mine[np.concatenate([truth.own[name] for name in group])] = True
    forward = equations(played, group, outgoing=True, by_sender=not secure)
    backward = equations(played, group, outgoing=False, by_sender=not secure)
    near, nodes = _neighbours(group, played, mine, outgoing=True), _exposed(forward)
    found["neighbours"] += len(near)
    found["of"] += int(truth.arcs[near][:, np.flatnonzero(~mine)].nnz)
    found["training"] += int((truth.labels[_neighbours(group, played, mine, outgoing=False)] >= 0).sum())
    found["exposed"] += len(nodes)
    if len(nodes):
        true, read = played.values[-1][nodes], _solved(forward, played.sent[-1][0])
        spread = float(np.linalg.norm(true - true.mean(0))) or 1.0
        found["error"] += len(nodes) * float(np.linalg.norm(read - true)) / spread
        last = _solved(forward, played.last)  # Z^(L-1), all but the logits of the structure branch
        found["trained"] += int((truth.labels[nodes] >= 0).sum())
        found["argmax"] += int((truth.labels[nodes] == last.argmax(axis=1)).sum())
    if 1 < len(nodes) <= MOST_EXPOSED and len(played.sent[0]) > 1:
        _edges(nodes, forward, played, mine, truth, found)
    for given in backward:
        _first_hop_back(given, played, truth, found)
        if len(played.back) > 1:
            _second_hop_back(given, played, mine, truth, found)


def _edges(
    nodes: NDArray[np.int64],
    forward: Sequence[Given],
    played: Played,
    mine: NDArray[np.bool_],
    truth: Truth,
    found: dict[str, float],
) -> None:
    """Regression of exposed values after the first hop on those before it, over all rounds."""
    beside = sp.csr_matrix(truth.arcs[nodes][:, np.flatnonzero(mine)])  # own edges are known
    before = [_solved(forward, sent[0]) for sent in played.sent]
    after = [_solved(forward, sent[1]) for sent in played.sent]
    known = [past + beside @ values[mine] for past, values in zip(before, played.values, strict=True)]
    stacked = (np.concatenate([part.T for part in series]) for series in (after, before, known))
    one_way = sp.csr_matrix(truth.arcs[mine] - truth.arcs[:, np.flatnonzero(mine)].T)
    both_ways = not np.any(one_way.data)
    claims = edges_by_regression(*stacked, both_ways=both_ways)
    found["claimed"] += int(claims.sum())
    found["correct"] += int((claims & (truth.arcs[nodes][:, nodes].toarray() > 0)).sum())


def _first_hop_back(given: Given, played: Played, truth: Truth, found: dict[str, float]) -> None:
    """Labels with a name, and labels that one of the nodes of a sum has."""
    sums, first = given.sums, given.right_sides(played.back[0])
    alone, labels = labels_from_first_hop_back(sums, first)
    found["labels"] += int(labels.certain.sum())
    found["right"] += int((labels.certain & (labels.labels == truth.labels[alone])).sum())
    several = np.flatnonzero(np.diff(sums.edges.indptr) > 1)
    present = labels_present(first)[several]
    entries = sp.coo_matrix(sums.edges[several].sign())
    there = np.zeros_like(present)
    trained = truth.labels[sums.nodes[entries.col]] >= 0
    there[entries.row[trained], truth.labels[sums.nodes[entries.col[trained]]]] = True
    found["present"] += int(present.sum())
    found["present right"] += int((present & there).sum())


def _second_hop_back(
    given: Given, played: Played, mine: NDArray[np.bool_], truth: Truth, found: dict[str, float]
) -> None:
    """G of an exposed node after a hop is the sum of its neighbours' residuals over their degrees."""
    nodes = given.sums.nodes[given.sums.exposed]
    if not len(nodes):
        return
    first, second = given.solved(played.back[0]), given.solved(played.back[1])
    silent = np.abs(first).max(axis=1) <= 1e-5 * np.abs(played.start_back).max()  # no training node itself
    into = sp.csr_matrix(truth.arcs[:, nodes].T)  # row u: nodes with an arc to u
    ours = np.abs(into[:, np.flatnonzero(mine)] @ played.start_back[mine]).max(axis=1, initial=0.0)
    clean = np.flatnonzero(silent & (ours == 0))
    present = labels_present(second[clean])
    entries = sp.coo_matrix(into[clean])
    there, trained = np.zeros_like(present), (truth.labels[entries.col] >= 0) & ~mine[entries.col]
    there[entries.row[trained], truth.labels[entries.col[trained]]] = True
    found["beside"] += int(present.sum())
    found["beside right"] += int((present & there).sum())


def _exposed(found: Sequence[Given]) -> NDArray[np.int64]:
    """Nodes whose values follow."""
    return np.concatenate([np.zeros(0, dtype=np.int64), *(each.sums.nodes[each.sums.exposed] for each in found)])


def _solved(found: Sequence[Given], mail: Mail) -> NDArray[np.float64]:
    """Their values (exposed, c)."""
    return np.concatenate([each.solved(mail) for each in found])


def _neighbours(
    group: Sequence[PartyId], played: Played, mine: NDArray[np.bool_], *, outgoing: bool
) -> NDArray[np.int64]:
    """Foreign nodes at the other end of a group's edges."""
    far = [np.zeros(0, dtype=np.int64)]
    for name in group:
        cross = played.seats[name].data.cross
        assert cross is not None
        far.append(played.rows(cross.other.numpy()[cross.outgoing.numpy() == outgoing]))
    nodes = np.unique(np.concatenate(far))
    return nodes[~mine[nodes]]
