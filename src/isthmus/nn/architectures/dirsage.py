r"""GraphSAGE that tells incoming from outgoing arcs -- Dir-GNN of Rossi et al., LoG 2023,
https://arxiv.org/abs/2305.10498.

.. math:: h_v' = W_{root}\, h_v + W_{in}\, \mathrm{mean}_{u \to v} h_u + W_{out}\, \mathrm{mean}_{v \to u} h_u + b

A repeated arc counts as often as it occurs; a mean over nothing is zero. Where every arc runs both ways the two means
are equal and it says no more than ``sage``. Initialised uniform +-1/sqrt(fan_in). PyG: ``DirGNNConv`` of ``SAGEConv``.
Shapes: x (n, F), edges (2, E) -> logits (n, C); W (in, out), b (out,).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.errors import ConfigError, DataError
from isthmus.graph.normalise import adjacency
from isthmus.nn.architecture import Architecture
from isthmus.nn.dense import add_bias
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.kernels import Array, Csr, compiled
from isthmus.nn.layers import Conv, Hop, fan_in
from isthmus.tensors import Weights

BASE = 1 << 12
"""A model has one matrix of arcs, so an entry holds two counts, incoming + BASE * outgoing: exact in float32, whose
integers go up to BASE^2."""


def two_way_adjacency(edge_index: Tensor, num_nodes: int, edge_weight: Tensor | None = None) -> sp.csr_matrix:
    """Entry (v, u) holds the number of arcs u -> v, and `BASE` times the number of arcs v -> u."""
    if edge_weight is not None:
        raise ConfigError("dirsage counts arcs and has no room for weights: set edge_weights=ignore")
    outgoing = adjacency(edge_index, num_nodes)
    if outgoing.nnz and outgoing.data.max() >= BASE:
        raise DataError(f"an arc occurs {int(outgoing.data.max())} times, dirsage counts to {BASE - 1}: merge them")
    return sp.csr_matrix(outgoing.T + np.float32(BASE) * outgoing)


class DirSAGEConv(Conv):
    """The node itself, the mean over incoming and the mean over outgoing arcs, with a weight matrix each."""

    weight_terms: ClassVar[Mapping[str, bool]] = {"root": False, "incoming": False, "outgoing": False}
    attends: ClassVar[bool] = True
    propagation = staticmethod(two_way_adjacency)

    def __init__(self, in_channels: int, out_channels: int, generator: torch.Generator) -> None:
        super().__init__()
        shape = (in_channels, out_channels)
        self.root, self.incoming, self.outgoing = (fan_in(shape, in_channels, generator) for _ in range(3))
        self.bias = fan_in((out_channels,), in_channels, generator)

    def finish(
        self, weights: Weights, products: Mapping[str, Tensor], hop: Hop, dropout: DropoutSource | None = None
    ) -> Tensor:
        arcs = hop.propagator.forward
        means: Tensor = _Means.apply(products["incoming"], products["outgoing"], arcs)  # type: ignore[no-untyped-call]
        return add_bias(hop.itself(products["root"]) + means, weights["bias"])


@dataclass(frozen=True)
class DirSAGE(Architecture):
    """Means of both neighbourhoods of a directed graph."""

    conv_type: ClassVar[type[Conv]] = DirSAGEConv


class _Means(torch.autograd.Function):
    """The two means added up, every entry visited once forward and once backward."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, incoming: Tensor, outgoing: Tensor, matrix: Csr) -> Tensor:
        out = torch.zeros(len(matrix.indptr) - 1, incoming.shape[1], dtype=incoming.dtype)
        arrays = (tensor.detach().contiguous().numpy() for tensor in (incoming, outgoing, out))
        _means(matrix.indptr, matrix.indices, matrix.data, *arrays)
        ctx.matrix, ctx.rows = matrix, len(incoming)  # type: ignore[attr-defined]
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        matrix: Csr = ctx.matrix  # type: ignore[attr-defined]
        found = [grads[0].new_zeros(ctx.rows, grads[0].shape[1]) for _ in range(2)]  # type: ignore[attr-defined]
        arrays = (tensor.numpy() for tensor in (grads[0].contiguous(), *found))
        _means_grad(matrix.indptr, matrix.indices, matrix.data, *arrays)
        return found[0], found[1], None


@compiled
def _degrees(begin: int, end: int, counts: Array) -> tuple[float, float]:
    """Incoming and outgoing arcs of a row, at least 1."""
    into, out_of = 0, 0
    for j in range(begin, end):
        code = int(counts[j])
        into += code % BASE
        out_of += code // BASE
    return float(max(into, 1)), float(max(out_of, 1))


@compiled
def _means(indptr: Array, indices: Array, counts: Array, incoming: Array, outgoing: Array, out: Array) -> None:
    for row in range(len(indptr) - 1):
        begin, end = indptr[row], indptr[row + 1]
        into, out_of = _degrees(begin, end, counts)
        for j in range(begin, end):
            code, other = int(counts[j]), indices[j]
            if code % BASE:
                share = (code % BASE) / into
                for h in range(out.shape[1]):
                    out[row, h] += share * incoming[other, h]
            if code // BASE:
                share = (code // BASE) / out_of
                for h in range(out.shape[1]):
                    out[row, h] += share * outgoing[other, h]


@compiled
def _means_grad(
    indptr: Array, indices: Array, counts: Array, grad: Array, incoming_grad: Array, outgoing_grad: Array
) -> None:
    # One thread: rows add to the gradients of their neighbours.
    for row in range(len(indptr) - 1):
        begin, end = indptr[row], indptr[row + 1]
        into, out_of = _degrees(begin, end, counts)
        for j in range(begin, end):
            code, other = int(counts[j]), indices[j]
            if code % BASE:
                share = (code % BASE) / into
                for h in range(grad.shape[1]):
                    incoming_grad[other, h] += share * grad[row, h]
            if code // BASE:
                share = (code // BASE) / out_of
                for h in range(grad.shape[1]):
                    outgoing_grad[other, h] += share * grad[row, h]
