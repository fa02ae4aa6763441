"""Small random graphs that differ by a planted motif, for graph classification."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from isthmus.data.from_arrays import undirected
from isthmus.data.generators import GRAPH_GENERATORS
from isthmus.data.graph_set import GraphSetData
from isthmus.data.parameters import need
from isthmus.data.whole_graph import empty_masks
from isthmus.seeds import Stream

MOTIFS: dict[str, list[tuple[int, int]]] = {
    "triangle": [(0, 1), (1, 2), (2, 0)],
    "hexagon": [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0)],
    "house": [(0, 1), (1, 2), (2, 3), (3, 0), (0, 4), (1, 4)],
    "clique": [(a, b) for a in range(5) for b in range(a)],
    "star": [(0, leaf) for leaf in range(1, 8)],
}


@GRAPH_GENERATORS.register("motifs")
@dataclass(frozen=True)
class Motifs:
    """Random trees with ``copies`` of the motif of their class hung on; features say nothing about the class.

    Args:
        graphs: Number of graphs, classes balanced.
        classes: Number of classes, 2 ... 5: triangle, hexagon, house, clique, star.
        nodes: Mean size of the tree.
        copies: Motifs per graph.
        features: Width of the (random normal) node features.
        noise: Random extra edges per graph, on average.
    """

    graphs: int = 400
    classes: int = 3
    nodes: int = 15
    copies: int = 2
    features: int = 4
    noise: float = 1.0

    def __post_init__(self) -> None:
        need("motifs", "classes", 2 <= self.classes <= len(MOTIFS), f"in 2 ... {len(MOTIFS)}")
        need("motifs", "graphs", self.graphs >= self.classes, "at least one per class")
        need("motifs", "nodes", self.nodes >= 2, "at least 2")
        need("motifs", "copies", self.copies >= 0, "at least 0")
        need("motifs", "features", self.features >= 1, "at least 1")
        need("motifs", "noise", self.noise >= 0, "at least 0")

    def draw(self, stream: Stream) -> GraphSetData:
        rng = stream.child("graphs").numpy()
        y = rng.permutation(np.arange(self.graphs) % self.classes)
        shapes = list(MOTIFS.values())
        made = [self._one(shapes[label], rng) for label in y]
        sizes = np.array([size for size, _ in made])
        ptr = np.concatenate([[0], np.cumsum(sizes)])
        edge_ptr = np.concatenate([[0], np.cumsum([edges.shape[1] for _, edges in made])])
        edge_index = np.concatenate([edges + start for (_, edges), start in zip(made, ptr[:-1], strict=True)], axis=1)
        x = stream.child("features").numpy().normal(size=(int(ptr[-1]), self.features))
        return GraphSetData(
            x=torch.from_numpy(x.astype(np.float32)),
            edge_index=torch.from_numpy(edge_index),
            ptr=torch.from_numpy(ptr),
            edge_ptr=torch.from_numpy(edge_ptr),
            y=torch.from_numpy(y),
            **empty_masks(self.graphs),
            graph_id=torch.arange(self.graphs),
            num_classes=self.classes,
        )

    def _one(self, motif: list[tuple[int, int]], rng: np.random.Generator) -> tuple[int, NDArray[np.int64]]:
        """Number of nodes and arcs of one graph, its nodes in random order."""
        tree = int(rng.integers(max(self.nodes // 2, 2), self.nodes + self.nodes // 2 + 1))
        edges = [(int(rng.integers(node)), node) for node in range(1, tree)]
        size = tree
        for _ in range(self.copies):
            edges += [(a + size, b + size) for a, b in motif] + [(int(rng.integers(tree)), size)]
            size += 1 + max(max(edge) for edge in motif)
        extra = rng.integers(0, size, (2, rng.poisson(self.noise)))
        arcs = np.concatenate([np.array(edges, dtype=np.int64).T, extra], axis=1)
        return size, undirected(rng.permutation(size)[arcs], size)
