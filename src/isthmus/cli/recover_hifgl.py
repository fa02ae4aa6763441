"""What HiFGL's messages tell an organisation, i.e. a silo and its devices together: rows of foreign devices that its
sums determine, and shares of foreign messages it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from isthmus.cli.recover_structure import Told
from isthmus.data.node_data import NodeData
from isthmus.federation.audit import SHARES, SOLVING
from isthmus.federation.messages import SERVER, PartyId, client_of
from isthmus.federation.roles import RoleTable
from isthmus.federation.transcript import received
from isthmus.methods.hifgl.config import HiFGLConfig
from isthmus.methods.hifgl.hardened import SlotKeys
from isthmus.methods.hifgl.layers import Neighbourhood, neighbourhood
from isthmus.privacy.attacks.sums import determined_by_sums


def single_rows(parts: Mapping[PartyId, NodeData], config: HiFGLConfig) -> Iterator[Told]:
    """Every organisation on the sums its devices opened: it subtracts what its own devices sent and solves for the
    foreign rows (rank test). The equations are its own edges, the same in every layer and round.
    """
    if config.mode == "cross-device":
        return
    for on, gradients in (("sums of values", False), ("sums of gradients", True)):
        determined = unknown = rank = 0
        for silo, data in parts.items():
            matrix = _sums_of(_where(data, silo, config), _k_min(config), gradients)
            found = determined_by_sums(matrix)
            determined, unknown, rank = (
                determined + int(found.unknowns.sum()),
                unknown + matrix.shape[1],
                rank + found.rank,
            )
        if unknown:
            outcome = (
                f"solved: {determined} of {unknown} rows of adjacent foreign devices ({determined / unknown:.1%}), "
                f"from {rank} independent sums of {len(parts)} organisations"
            )
            numbers: dict[str, float] = {"determined": determined, "of": unknown, "rank": rank}
            yield SOLVING, "one organisation", on, outcome, numbers


def shares_held(run: Path, parts: Mapping[PartyId, NodeData], config: HiFGLConfig, table: RoleTable) -> Iterator[Told]:
    """How many foreign messages have all their shares with one organisation: who was sent keys of them, and who opens
    sums.
    """
    if config.secmp != "hardened":
        return
    holders: dict[str, set[str]] = {silo: set() for silo in parts}
    for party in (SERVER, *parts):
        for line, message in received(run, party, table):
            if isinstance(message, SlotKeys):
                holders[client_of(line.sender)].add(party)
    opened = messages = 0
    for silo, data in parts.items():
        pairs = _where(data, silo, config).pairs
        count = sum(pair.count for peer, pair in pairs.items() if peer != silo)
        messages += count
        opened += count if holders[silo] <= {silo} else 0
    if messages:
        fewest = min(len(names - {silo}) for silo, names in holders.items())
        outcome = (
            f"opened: {opened} of {messages} messages of foreign devices by the organisation that receives them; it "
            f"needs {fewest} other share holders to help"
        )
        yield (
            SHARES,
            "one organisation",
            "ShareRows, SlotKeys",
            outcome,
            {"opened": opened, "of": messages, "helpers": fewest},
        )


def _where(data: NodeData, silo: str, config: HiFGLConfig) -> Neighbourhood:
    return neighbourhood(data, silo, inside=config.mode != "cross-silo", pools=config.mode != "cross-device")


def _k_min(config: HiFGLConfig) -> int:
    return config.k_min if config.one_neighbour == "drop" else 0


def _sums_of(where: Neighbourhood, k_min: int, gradients: bool) -> sp.csr_matrix:
    """Equations of an organisation, (devices, foreign neighbours): how often each is in what a device opened."""
    arrives = where.arrivals(k_min, gradients=gradients).foreign
    foreign = [pair for peer, pair in where.pairs.items() if peer != where.silo]
    none = np.empty(0, np.int64)
    rows = np.concatenate([none, *(pair.source for pair in foreign)])
    ids, columns = np.unique(np.concatenate([none, *(pair.target_id for pair in foreign)]), return_inverse=True)
    times = np.concatenate([none, *(pair.along if gradients else pair.against for pair in foreign)])
    matrix = sp.csr_matrix((times * arrives[rows], (rows, columns)), shape=(where.count, len(ids)))
    matrix.eliminate_zeros()
    return matrix
