r"""FedStruct's structure model where one party knows the whole graph: z of all nodes from S and the edges.

    dgcn   z = sum_l beta_l Ah^l g(S),  g an MLP behind a LayerNorm (as `isthmus.nn.structure`)
    gnn    GraphSAGE (mean) behind a BatchNorm over all nodes, ReLU and dropout between layers, a linear layer on top

Differentiated by autograd: there is one such model, not one per client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.graph.normalise import mean_norm
from isthmus.nn.layers import LinearLayer
from isthmus.nn.sparse import Sparse, canonical
from isthmus.seeds import Stream
from isthmus.tensors import Weights

EPS = 1e-5


@dataclass(frozen=True, eq=False)
class WholeGraph:
    """Matrices of the whole graph: Ah (row = source, one loop per node added) and the mean over incoming arcs."""

    walk: Sparse
    mean: Sparse

    @classmethod
    def of(cls, arcs: Tensor, weight: Tensor, nodes: int, dtype: torch.dtype) -> WholeGraph:
        source, target = arcs.numpy()
        values = weight.numpy().astype(np.float64)
        loops = sp.identity(nodes, format="csr")
        matrix = sp.csr_matrix((values, (source, target)), shape=(nodes, nodes)) + loops
        degree = np.asarray(matrix.sum(axis=1)).ravel()  # Dt, at least 1: weights are not negative
        walk = sp.csr_matrix(sp.diags(1.0 / degree) @ matrix)
        return cls(Sparse(canonical(walk, dtype)), Sparse(canonical(mean_norm(arcs, nodes), dtype)))


@dataclass(frozen=True)
class GraphStructureNet:
    """The structure model.

    Args:
        kind: ``dgcn`` or ``gnn``.
        width: d, values of a structure feature.
        num_classes: C, values of z.
        hidden: Hidden widths.
        dropout: Share of hidden values dropped in training.
        betas: beta_0 ... beta_Ls of ``dgcn``.
    """

    kind: Literal["dgcn", "gnn"]
    width: int
    num_classes: int
    hidden: tuple[int, ...]
    dropout: float
    betas: tuple[float, ...]

    def first_weights(self, stream: Stream, dtype: torch.dtype) -> dict[str, Tensor]:
        """Norm at one and zero, linear layers as ``torch.nn.Linear`` starts them."""
        generator = stream.torch()
        weights = {"norm.gamma": torch.ones(self.width), "norm.beta": torch.zeros(self.width)}
        widths = (self.width, *self.hidden)
        for i, (a, b) in enumerate(pairwise(widths if self.kind == "gnn" else (*widths, self.num_classes))):
            layer = LinearLayer(a, b, generator)
            weights |= {f"layers.{i}.weight": layer.weight.detach(), f"layers.{i}.bias": layer.bias.detach()}
            if self.kind == "gnn":
                weights[f"layers.{i}.neighbours"] = LinearLayer(a, b, generator).weight.detach()
        if self.kind == "gnn":
            top = LinearLayer(widths[-1], self.num_classes, generator)
            weights |= {"top.weight": top.weight.detach(), "top.bias": top.bias.detach()}
        return {name: tensor.to(dtype) for name, tensor in weights.items()}

    def embed(self, weights: Weights, nsf: Tensor, graph: WholeGraph, generator: torch.Generator | None) -> Tensor:
        """z of all nodes (n, C); without a generator nothing is dropped."""
        axis = 0 if self.kind == "gnn" else 1  # over nodes, without running statistics (12.7), or over values
        centred = nsf - nsf.mean(axis, keepdim=True)
        normed = centred * torch.rsqrt((centred * centred).mean(axis, keepdim=True) + EPS)
        h = normed * weights["norm.gamma"] + weights["norm.beta"]
        if self.kind == "gnn":
            for i in range(len(self.hidden)):
                root = torch.addmm(weights[f"layers.{i}.bias"], h, weights[f"layers.{i}.weight"])
                h = self._dropped(torch.relu(root + graph.mean @ (h @ weights[f"layers.{i}.neighbours"])), generator)
            return torch.addmm(weights["top.bias"], h, weights["top.weight"])
        for i in range(len(self.hidden) + 1):
            h = torch.addmm(weights[f"layers.{i}.bias"], h, weights[f"layers.{i}.weight"])
            h = self._dropped(torch.relu(h), generator) if i < len(self.hidden) else h
        return propagated(h, self.betas, graph)

    def _dropped(self, h: Tensor, generator: torch.Generator | None) -> Tensor:
        if generator is None or not self.dropout:
            return h
        kept = torch.rand(h.shape, generator=generator, dtype=h.dtype) >= self.dropout
        return h * kept / (1.0 - self.dropout)


def propagated(h: Tensor, betas: Sequence[float], graph: WholeGraph) -> Tensor:
    """sum_l beta_l Ah^l h, l = 0 ... (E2), without forming a power."""
    z = betas[0] * h
    for beta in betas[1:]:
        h = graph.walk @ h
        z = z + beta * h if beta else z
    return z
