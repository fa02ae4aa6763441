"""What two of the papers draw of their data alone, beside ours: no run is needed.

    python benchmarks/paper_data.py [--page]

FedSpray, Table 1 and the reason for its figure 2: nodes of a client's most frequent class and the others, and the mean
share of a node's neighbours with its label, for both, on the published parts of PubMed. FedStar, figure 1b: how far the
degree distributions of its data sets lie apart (Jensen-Shannon divergence, in bits), and how far each lies from random
graphs with its numbers of nodes and edges (Erdős-Rényi; their distribution is computed, not drawn). ``--page`` writes
docs/results/data.md and its two figures.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binom

from isthmus.data.graphsets import load_graphs
from isthmus.experiments.config import resolve
from isthmus.experiments.scenarios import scenario_of
from isthmus.graph.homophily import node_homophily
from isthmus.papers.svg import Series, chart

PRINTED = (
    (1384, 384, 0.91, 0.33),
    (1263, 152, 0.97, 0.24),
    (2001, 286, 0.92, 0.17),
    (1236, 97, 0.98, 0.48),
    (1160, 140, 0.95, 0.41),
    (934, 467, 0.84, 0.47),
    (948, 806, 0.83, 0.70),
)
"""FedSpray, Table 1, PubMed: nodes of the majority class and the others, homophily of both, client by client."""
DOMAINS = {
    "molecules": ("mutag", "bzr", "cox2", "dhfr", "ptc_mr", "aids", "nci1"),
    "proteins": ("enzymes", "dd", "proteins"),
    "social": ("collab", "imdb-binary", "imdb-multi"),
    "letters": ("letter-low", "letter-high", "letter-med"),
}
TINY = 1e-200
"""Shares below it count as none: half of the smallest number would be 0."""
DOCS = Path(__file__).parents[1] / "docs" / "results"


def client_rows() -> list[tuple[int, int, float, float]]:
    """As `PRINTED`, computed, and in its order: a run hands the parts out in an order of its own, so clients are found
    by their counts.
    """
    scenario = scenario_of(resolve("local", {"dataset": "pubmed", "partition": "fedspray", "preset": "fedspray"}))
    rows = []
    for data in scenario.parts.values():
        major = data.y == int(torch.bincount(data.y).argmax())
        share = node_homophily(data.edge_index, data.y)
        means = [float(share[group & ~share.isnan()].mean()) for group in (major, ~major)]
        rows.append((int(major.sum()), int((~major).sum()), means[0], means[1]))
    return [min(rows, key=lambda row: abs(row[0] - theirs[0]) + abs(row[1] - theirs[1])) for theirs in PRINTED]


def degrees(name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Degree distribution over all nodes of a data set, and of random graphs of the same sizes."""
    graphs, _ = load_graphs(name)
    found = torch.bincount(graphs.edge_index[1], minlength=int(graphs.ptr[-1])).numpy()
    sizes = np.diff(graphs.ptr.numpy())
    edges = np.diff(graphs.edge_ptr.numpy()) / 2
    random = np.zeros(int(sizes.max()) + 1)
    for (nodes, count), times in Counter(zip(sizes.tolist(), edges.tolist(), strict=True)).items():
        if nodes > 1:
            chance = min(1.0, 2.0 * count / (nodes * (nodes - 1)))
            random[:nodes] += times * nodes * binom.pmf(np.arange(nodes), nodes - 1, chance)
        else:
            random[0] += times
    real = np.bincount(found).astype(np.float64)
    return real / real.sum(), random / random.sum()


def divergence(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """Jensen-Shannon, in bits: 0 for equal distributions, 1 for disjoint ones."""
    width = max(len(p), len(q))
    p, q = (np.pad(each, (0, width - len(each))) for each in (p, q))
    middle = (p + q) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = [np.where(each > TINY, each * np.log2(each / middle), 0.0).sum() for each in (p, q)]
    return float(sum(terms) / 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="store_true", help="write docs/results/data.md and its figures")
    page = parser.parse_args().page
    rows = client_rows()
    lines = [
        "# What two papers draw of their data",
        "",
        "Written by `python benchmarks/paper_data.py --page`; no training is needed for it.",
        "",
        "## FedSpray, Table 1: majority and minority nodes of PubMed's published parts",
        "",
        "| client | majority, printed | ours | minority, printed | ours | their homophily, printed | ours |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, (theirs, own) in enumerate(zip(PRINTED, rows, strict=True), 1):
        lines.append(
            f"| {number} | {theirs[0]} | {own[0]} | {theirs[1]} | {own[1]} | {theirs[2]:.2f} / {theirs[3]:.2f} | "
            f"{own[2]:.2f} / {own[3]:.2f} |"
        )
    equal = sum(
        theirs[:2] == own[:2] and all(abs(a - b) <= 0.005 + 1e-9 for a, b in zip(theirs[2:], own[2:], strict=True))
        for theirs, own in zip(PRINTED, rows, strict=True)
    )
    lines += [
        "",
        f"Equal to the printed digits at {equal} of {len(rows)} clients.",
        "",
        "![Homophily by client](figures/data-fedspray-homophily.svg)",
        "",
        "Claimed: a minority node has mostly neighbours of other classes. Ours: minority nodes have lower homophily "
        f"at {sum(own[3] < own[2] for own in rows)} of {len(rows)} clients, below one half at "
        f"{sum(own[3] < 0.5 for own in rows)}.",
        "",
    ]
    names = [name for domain in DOMAINS.values() for name in domain]
    domain_of = {name: domain for domain, members in DOMAINS.items() for name in members}
    found = {name: degrees(name) for name in names}
    means: dict[str, tuple[float, float, float]] = {}
    for name in names:
        same = [n for n in names if n != name and domain_of[n] == domain_of[name]]
        others = [n for n in names if domain_of[n] != domain_of[name]]
        real = found[name][0]
        means[name] = (
            float(np.mean([divergence(real, found[n][0]) for n in same])),
            float(np.mean([divergence(real, found[n][0]) for n in others])),
            divergence(real, found[name][1]),
        )
    labels = ("same domain", "other domains", "random graphs of its size")
    lines += [
        "## FedStar, figure 1b: how far degree distributions lie apart",
        "",
        "Jensen-Shannon divergence in bits, of the degrees of all nodes of a data set: mean over data sets of the same "
        "domain, of the other domains, and to random graphs with the same numbers of nodes and edges.",
        "",
        f"| data set | domain | {' | '.join(labels)} |",
        "|---|---|---|---|---|",
        *(f"| {name} | {domain_of[name]} | {' | '.join(f'{value:.3f}' for value in means[name])} |" for name in names),
        "",
        "![Divergence of degree distributions](figures/data-fedstar-degrees.svg)",
        "",
        "The paper's reason to share structure: graphs of different domains have it in common, random graphs do not. "
        "Ours: data sets of the "
        f"same domain are nearer than random graphs of the same size for {sum(m[0] < m[2] for m in means.values())} of "
        f"{len(names)} data sets, those of other domains for {sum(m[1] < m[2] for m in means.values())}.",
        "",
    ]
    text = "\n".join(lines)
    print(text)
    if page:
        figures = DOCS / "figures"
        places = [str(n) for n in range(1, len(rows) + 1)]
        series = [Series(name, tuple(row[i] for row in rows)) for name, i in (("majority", 2), ("minority", 3))]
        (figures / "data-fedspray-homophily.svg").write_text(
            chart(places, series, x="client", y="share of like neighbours", bars=True)
        )
        bars = [Series(label, tuple(means[n][i] for n in names)) for i, label in enumerate(labels)]
        (figures / "data-fedstar-degrees.svg").write_text(
            chart(names, bars, x="data set", y="divergence, bits", bars=True)
        )
        (DOCS / "data.md").write_text(text)


if __name__ == "__main__":
    main()
