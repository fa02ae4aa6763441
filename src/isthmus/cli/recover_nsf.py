"""What FedStruct's structure features and queries for them tell a client (FedStruct spec, 6.2, 13.8)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from isthmus.data.node_data import NodeData
from isthmus.errors import DataError
from isthmus.experiments.config import Settings
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.model_package import MODELS, read_packages
from isthmus.federation.audit import MATCHING, SOLVING
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.kept import restore_kept
from isthmus.federation.messages import PartyId
from isthmus.federation.roles import RoleTable
from isthmus.federation.transcript import received
from isthmus.methods.fedstruct import block_of
from isthmus.methods.fedstruct.private import Queries, Sums
from isthmus.privacy.attacks.nsf import labels_by_matching, rows_from_queries, score_labels
from isthmus.seeds import Stream

Told = tuple[str, str, str, str, dict[str, float]]
Asked = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Coefficients of answered queries, and the answers."""


def matched_features(folder: RunFolder, settings: Settings, parts: Mapping[PartyId, NodeData]) -> Iterator[Told]:
    """Every client on the rows of S it was sent last, which the owners' packages hold: foreign training nodes get the
    label of the own training node with the most similar row.
    """
    try:
        packages = read_packages(folder.path / MODELS)
    except DataError:
        return
    engine = LocalEngine(parts, settings.method.table, settings.method_config, Stream(settings.run.seed, ("audit",)))
    rows: dict[PartyId, NDArray[np.floating]] = {}
    for name in parts:
        client: Any = engine.party(name).client
        restore_kept(client, packages[name].weights, packages[name].structure, as_trained=True)
        if client.state.own_nsf is None:
            return
        rows[name] = client.state.own_nsf.numpy()
    claimed = correct = 0
    by_chance = 0.0
    for name, data in parts.items():
        others = [other for other in parts if other != name and bool(parts[other].train.any())]
        if not others or not bool(data.train.any()):
            continue
        own = data.y[data.train].numpy()
        foreign = np.vstack([rows[other][parts[other].train.numpy()] for other in others])
        truth = np.concatenate([parts[other].y[parts[other].train].numpy() for other in others])
        score = score_labels(labels_by_matching(rows[name][data.train.numpy()], own, foreign), truth, name)
        claimed, correct = claimed + score.claimed, correct + score.correct
        shares = [np.bincount(labels, minlength=data.num_classes) / len(labels) for labels in (own, truth)]
        by_chance += float(shares[0] @ shares[1]) * len(truth)
    if claimed:
        outcome = (
            f"named: labels of {claimed} foreign training rows, precision {correct / claimed:.3f} (guesses by the "
            f"client's own classes: {by_chance / claimed:.3f})"
        )
        numbers = {"claimed": claimed, "correct": correct, "of": claimed, "by_chance": by_chance}
        yield MATCHING, "client", "structure features of all nodes", outcome, numbers


def solved_queries(run: Path, parts: Mapping[PartyId, NodeData], table: RoleTable) -> Iterator[Told]:
    """Clients on the answers to their queries (appendix G.1): rows of S that these determine, for one client by itself
    and for all but the owner together.
    """
    asked: dict[tuple[PartyId, PartyId], NDArray[np.float64]] = {}
    answers: dict[tuple[PartyId, PartyId], Asked] = {}
    for owner in parts:
        for line, message in received(run, owner, table):
            if isinstance(message, Queries):
                asked[line.sender, owner] = sp.csr_matrix(block_of(message.rows)).toarray().astype(np.float64)
    for client in parts:
        for line, message in received(run, client, table):
            queries = asked.get((client, line.sender))
            if isinstance(message, Sums) and queries is not None and len(message.sums) == len(queries):
                kept = message.answered.numpy()
                answers[client, line.sender] = queries[kept], message.sums.numpy()[kept]
    if not answers:
        return
    nodes = sum(data.num_nodes for data in parts.values())
    together = alone = 0
    for owner in parts:
        given = [answer for (_, other), answer in answers.items() if other == owner and len(answer[0])]
        alone += sum(len(rows_from_queries(*answer).nodes) for answer in given)
        if given:
            coefficients, sums = (np.vstack(part) for part in zip(*given, strict=True))
            together += len(rows_from_queries(coefficients, sums).nodes)
    pairs = nodes * (len(parts) - 1)
    for who, found, of in (("client", alone, pairs), ("all clients but the owner", together, nodes)):
        outcome = f"read: {found} rows of S of others exactly (of {of})"
        yield SOLVING, who, "answered queries", outcome, {"determined": found, "of": of}
