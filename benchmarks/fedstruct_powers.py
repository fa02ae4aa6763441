"""What pruning leaves of Abar = Ah^L, the matrix FedStruct spreads structure features with: the paper's figure 3.

    python benchmarks/fedstruct_powers.py [--dataset cora] [--partition random] [--hops 10] [--out FILE.svg]

Nodes are ordered by client. A cell of the map is the mean entry between two groups of nodes. Printed beside it: entries
per row, mass per row, share of it inside the client, and share of the un-pruned mass where entries stay.
Pruned is every power, as the published code does it: the p n largest entries of the whole matrix (``global``), or p of
every row (``row``, what the hardened protocol does).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from isthmus.data.scenario import Scenario, build_scenario
from isthmus.graph.normalise import row_norm
from isthmus.graph.powers import as_csr, keep_largest_by_owner, keep_largest_per_row
from isthmus.papers.svg import Map, heat_maps

GROUPS = 6
"""Groups of nodes per client in the map."""


def ordered(scenario: Scenario) -> tuple[sp.csr_matrix, NDArray[np.int64]]:
    """Ah with nodes ordered by client, and the client of each."""
    ids = [part.node_id.numpy() for part in scenario.parts.values()]
    known = scenario.whole.node_id.numpy()
    by_id = np.argsort(known)
    order = by_id[np.searchsorted(known, np.concatenate(ids), sorter=by_id)]
    walk = sp.csr_matrix(row_norm(scenario.whole.edge_index, scenario.whole.num_nodes))
    return walk[order][:, order], np.repeat(np.arange(len(ids)), [len(own) for own in ids])


def power(walk: sp.csr_matrix, hops: int, prune: int, rule: str) -> sp.csr_matrix:
    """Ah^hops, cut after every product."""
    found = walk
    for hop in range(hops):
        found = as_csr(walk @ found) if hop else walk
        if prune and rule == "row":
            found = keep_largest_per_row(found, prune)
        elif prune:
            found = keep_largest_by_owner(found, np.zeros(found.shape[1], dtype=np.int64), prune * found.shape[0])
    return found


def mapped(matrix: sp.csr_matrix, owner: NDArray[np.int64]) -> list[list[float | None]]:
    """Mean entry between groups of nodes."""
    group = np.concatenate(
        [number * GROUPS + np.arange(size) * GROUPS // size for number, size in enumerate(np.bincount(owner))]
    )
    member = sp.csr_matrix((np.ones(len(group)), (group, np.arange(len(group)))))
    sums, sizes = (member @ matrix @ member.T).toarray(), np.bincount(group)
    means = sums / np.outer(sizes, sizes)
    return [[float(value) if value > 0.0 else None for value in row] for row in means]


def told(name: str, matrix: sp.csr_matrix, full: sp.csr_matrix, owner: NDArray[np.int64]) -> str:
    entries = matrix.tocoo()
    mass, nodes = float(matrix.sum()), matrix.shape[0]
    inside = float(entries.data[owner[entries.row] == owner[entries.col]].sum()) / mass
    covered = float(full.multiply(matrix != 0).sum()) / float(full.sum())
    empty = int((np.diff(matrix.indptr) == 0).sum())
    return f"| {name} | {matrix.nnz / nodes:.1f} | {mass / nodes:.3f} | {inside:.3f} | {covered:.3f} | {empty} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dataset", default="cora")
    parser.add_argument("--partition", default="random")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--hops", type=int, default=10)
    parser.add_argument("--prune", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    scenario = build_scenario(dataset=options.dataset, partition=options.partition, clients=options.clients, seed=0)
    walk, owner = ordered(scenario)
    full = power(walk, options.hops, 0, "")
    cut = {rule: power(walk, options.hops, options.prune, rule) for rule in ("global", "row")}
    print(f"{options.dataset}, {options.clients} clients, {options.partition}, Ah^{options.hops}")
    print("| Abar | entries per row | mass per row | of it inside the client | un-pruned mass there | empty rows |")
    print("|---|---|---|---|---|---|")
    for name, matrix in {"un-pruned": full, **{f"p = {options.prune}, {rule}": cut[rule] for rule in cut}}.items():
        print(told(name, matrix, full, owner))
    if options.out:
        maps = [
            Map("un-pruned", mapped(full, owner)),
            Map(f"pruned, p = {options.prune}, over the whole matrix", mapped(cut["global"], owner)),
        ]
        where = f"{options.dataset}, nodes by client ({options.partition})"
        note = f"mean entry of Ah^{options.hops}, {where}: row a node, column what it reaches"
        options.out.write_text(heat_maps(maps, every=GROUPS, note=note))
        print(f"{options.out}: {options.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
