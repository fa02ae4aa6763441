"""Node structure features S (spec 3): what an owner can tell of a node's place in the graph, or a free parameter.

degree    one-hot of the degree, clipped to the last of d places; of a directed graph round((in + out) / 2)
walk      (Ah^l)_vv for l = 1 ... L_s, a by-product of the powers, and the degree in the other places (FED*)
hop2vec   learned; N(0, 0.05^2) at the start
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.seeds import Stream

SPREAD = 0.05
"""Standard deviation of HOP2VEC's first values [code]."""


def degrees(data: NodeData) -> NDArray[np.int64]:
    """Of every node, own and cross edges counted; of directed graphs the mean of in and out, rounded."""
    assert data.cross is not None
    own, out = data.cross.own.numpy(), data.cross.outgoing.numpy()
    ends = [*data.edge_index.numpy(), own[out], own[~out]]
    both = np.sum([np.bincount(end, minlength=data.num_nodes) for end in ends], axis=0)
    degree: NDArray[np.int64] = np.rint(both / 2).astype(np.int64)
    return degree


def degree_feature(degree: NDArray[np.int64], width: int) -> Tensor:
    """(n, width), one-hot."""
    out = torch.zeros(len(degree), width)
    out[torch.arange(len(degree)), torch.from_numpy(np.minimum(degree, width - 1))] = 1.0
    return out


def walk_feature(diagonal: Tensor, degree: NDArray[np.int64], width: int) -> Tensor:
    """(n, width): return probabilities of 1 ... L_s steps, then the degree."""
    return torch.cat([diagonal, degree_feature(degree, width - diagonal.shape[1]).to(diagonal.dtype)], dim=1)


def random_feature(nodes: int, width: int, draws: Stream | np.random.Generator) -> Tensor:
    """(n, width), HOP2VEC's start: from the run's streams, or from a generator only its owner can repeat."""
    if isinstance(draws, Stream):
        return torch.randn(nodes, width, generator=draws.torch()) * SPREAD
    return torch.from_numpy(draws.normal(scale=SPREAD, size=(nodes, width)))
