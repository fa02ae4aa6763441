"""Logits of the nodes of a large graph, some at a time: what a block of nodes depends on, and no more, is in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.graph.normalise import from_torch_csr, to_torch_csr
from isthmus.graph.reach import reach
from isthmus.nn.inputs import Nodes, build_inputs
from isthmus.nn.train import predict
from isthmus.tensors import Weights


@dataclass(frozen=True)
class _Around:
    """The nodes a block depends on, with their edges as steps that were worked out on the whole graph."""

    x: Tensor
    y: Tensor
    edge_index: Tensor
    edge_weight: None = None

    @property
    def num_nodes(self) -> int:
        return int(self.x.shape[0])


def predict_blocks(model: Any, weights: Weights, data: Nodes, block: int, *, dtype: torch.dtype) -> Tensor:
    """The logits of all nodes (n, C), as `isthmus.nn.train.predict` gives them for the whole graph at once.

    Args:
        model: A backbone.
        block: Nodes at a time. What they reach within the model's hops is held beside them.
    """
    count = data.num_nodes
    steps = None if model.propagation is None else model.propagation(data.edge_index, count, data.edge_weight)
    hops = 0 if steps is None else max(1, model.hops)
    features = from_torch_csr(data.x) if data.x.layout == torch.sparse_csr else None
    found: list[Tensor] = []
    for begin in range(0, count, block):
        seeds = np.zeros(count, dtype=bool)
        seeds[begin : begin + block] = True
        needed = np.flatnonzero(seeds if steps is None else reach(steps, seeds, hops))
        inner = None if steps is None else sp.csr_matrix(steps[needed][:, needed])
        rows = torch.from_numpy(needed)
        x = data.x[rows] if features is None else to_torch_csr(sp.csr_matrix(features[needed]))
        around = _Around(x, torch.zeros(len(needed), dtype=torch.int64), torch.empty(2, 0, dtype=torch.int64))
        inputs = build_inputs(around, model, torch.from_numpy(seeds[needed]), dtype=dtype, steps=inner)
        found.append(predict(model, weights, inputs))
    return torch.cat(found) if found else torch.empty(0, 0, dtype=dtype)
