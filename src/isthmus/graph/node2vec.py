r"""node2vec -- Grover & Leskovec, KDD 2016: embeddings of nodes that meet on biased random walks.

A walk that came from t to v goes on to x with probability proportional to

    1/p  if x = t,      1  if t and x are neighbours,      1/q  otherwise                     (times the arcs v -> x)

and skip-gram with negative sampling makes nodes alike that are less than ``context`` steps apart on it:

    maximise  log sigma(c_x . e_v) + sum over k negatives y of log sigma(-c_y . e_v)

by stochastic gradient ascent with a rate that falls to nearly nothing, as word2vec does; y is drawn as often as it is
walked on, to the power 3/4.

Walks follow arcs as they are stored and end where none leaves. A node that no walk leaves or enters (an isolated one)
has no context: its row is zero.

Why not a library: pecanpy needs gensim, numba-progress and nptyping for these two loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.compiling import machine_code
from isthmus.errors import ConfigError
from isthmus.graph.normalise import adjacency
from isthmus.seeds import Stream

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
SLOWEST = 1e-4
"""Share of the learning rate that is left at the end."""


@dataclass(frozen=True)
class Node2Vec:
    """Settings of node2vec.

    Args:
        dim: Values of an embedding.
        walks: Walks that start at each node, in each epoch.
        walk_length: Nodes of a walk.
        context: Nodes less than this many steps apart are each other's context.
        negatives: Nodes drawn against each context.
        epochs: How often all walks are drawn anew and learned from.
        p, q: Return and in-out parameter.
        lr: First learning rate.
    """

    dim: int = 256
    walks: int = 10
    walk_length: int = 20
    context: int = 10
    negatives: int = 1
    epochs: int = 5
    p: float = 1.0
    q: float = 1.0
    lr: float = 0.05

    def __post_init__(self) -> None:
        for name in ("dim", "walks", "negatives", "epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"node2vec: {name} must be at least 1, got {getattr(self, name)}")
        for name in ("walk_length", "context"):
            if getattr(self, name) < 2:
                raise ConfigError(f"node2vec: {name} must be at least 2, got {getattr(self, name)}")
        for name in ("p", "q", "lr"):
            value = getattr(self, name)
            if not 0.0 < value < float("inf"):
                raise ConfigError(f"node2vec: {name} must be above 0, got {value}")

    def embed(self, edge_index: Tensor, num_nodes: int, stream: Stream) -> Tensor:
        """One row per node. (n, dim)"""
        arcs = adjacency(edge_index, num_nodes)
        indptr, indices = arcs.indptr.astype(np.int64), arcs.indices.astype(np.int64)
        weights = np.cumsum(arcs.data.astype(np.float64))  # parallel arcs are taken more often
        draws = stream.numpy()
        rows = ((draws.random((num_nodes, self.dim)) - 0.5) / self.dim).astype(np.float32)
        other = np.zeros_like(rows)
        touched = np.zeros(num_nodes, dtype=np.bool_)
        starts = np.flatnonzero(np.diff(indptr))
        touched[starts] = True
        touched[indices] = True
        for epoch in range(self.epochs if len(starts) else 0):
            begun = draws.permutation(np.repeat(starts, self.walks))
            walked = _walks(indptr, indices, weights, begun, self.walk_length, 1.0 / self.p, 1.0 / self.q, draws)
            visits = np.bincount(walked[walked >= 0], minlength=num_nodes).astype(np.float64) ** 0.75
            bounds = np.cumsum(visits) / visits.sum()
            first, last = (max(SLOWEST, 1.0 - at / self.epochs) * self.lr for at in (epoch, epoch + 1))
            _learn(walked, self.context, self.negatives, bounds, first, last, draws, rows, other)
        rows[~touched] = 0.0
        return torch.from_numpy(rows)


@machine_code
def _walks(
    indptr: Ints,
    indices: Ints,
    weights: NDArray[np.float64],
    starts: Ints,
    length: int,
    back: float,
    away: float,
    draws: np.random.Generator,
) -> Ints:  # pragma: no cover -- compiled
    """One walk per start; -1 where it has ended."""
    walks = np.full((len(starts), length), -1, dtype=np.int64)
    largest = max(back, 1.0, away)
    for row in range(len(starts)):
        before, here = -1, starts[row]
        walks[row, 0] = here
        for step in range(1, length):
            begin, end = indptr[here], indptr[here + 1]
            if begin == end:
                break
            low = weights[begin - 1] if begin else 0.0
            while True:  # draw an arc, keep it with its probability
                place = np.searchsorted(weights[begin:end], low + draws.random() * (weights[end - 1] - low), "right")
                there = indices[begin + min(place, end - begin - 1)]
                if before < 0 or (back == 1.0 and away == 1.0):
                    break
                share = away
                if there == before:
                    share = back
                else:
                    known = indices[indptr[before] : indptr[before + 1]]
                    at = np.searchsorted(known, there)
                    if at < len(known) and known[at] == there:
                        share = 1.0
                if draws.random() * largest < share:
                    break
            walks[row, step] = there
            before, here = here, there
    return walks


@partial(machine_code, fastmath=True)
def _learn(
    walks: Ints,
    context: int,
    negatives: int,
    bounds: NDArray[np.float64],
    first: float,
    last: float,
    draws: np.random.Generator,
    rows: Floats,
    other: Floats,
) -> None:  # pragma: no cover -- compiled
    """Skip-gram with negative sampling, pair by pair."""
    width = rows.shape[1]
    step = np.zeros(width, dtype=np.float32)
    for number in range(len(walks)):
        walk, lr = walks[number], first + (last - first) * number / len(walks)
        for i in range(len(walk)):
            if walk[i] < 0:
                break
            centre = rows[walk[i]]
            for j in range(max(0, i - context + 1), min(len(walk), i + context)):
                if j == i or walk[j] < 0:
                    continue
                step[:] = 0.0
                for draw in range(negatives + 1):
                    target = walk[j] if draw == 0 else np.searchsorted(bounds, draws.random(), "right")
                    if draw and target == walk[j]:
                        continue
                    there = other[min(target, len(other) - 1)]
                    product = np.float32(0.0)
                    for d in range(width):
                        product += centre[d] * there[d]
                    pull = np.float32(lr * ((1.0 if draw == 0 else 0.0) - 1.0 / (1.0 + np.exp(-product))))
                    for d in range(width):
                        step[d] += pull * there[d]
                        there[d] += pull * centre[d]
                for d in range(width):
                    centre[d] += step[d]
