r"""FedStruct's structure branch: z = Abar g(S), with an MLP g on every node's structure feature, for one client or for
many at once.

.. math:: g(s) = W_m\,\mathrm{drop}(\mathrm{relu}(\dots W_1\,\mathrm{LN}(s) + b_1)) + b_m, \qquad
          z_v = \sum_u \bar A_{vu}\, g(s_u), \quad \bar A = \sum_l \beta_l P_l

What comes before the first dropout is the same for all clients, and the server needs only the sum of their gradients.
So with S (n, d) the big products LN(S) W_1 and their gradients are made once, however many clients there are; what a
client does alone (its dropout mask, the narrow last layers, its rows of Abar) is done on the nodes its training rows
reach. A client by itself is a group of one: same code.

Shapes: n nodes, d structure features, H first hidden width, C classes; t training rows of a client that reach m nodes.
Without hidden layers g is linear; without layers at all (the direct form of HOP2VEC) g(s) = s and d = C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.nn.kernels import Array, compiled, split, spmm
from isthmus.nn.layers import LinearLayer
from isthmus.nn.sparse import Sparse, canonical
from isthmus.seeds import Stream
from isthmus.tensors import Weights

LAYER_NORM_EPS = 1e-5
_LEVELS = 2**16


@dataclass(frozen=True, eq=False)
class Matrix:
    """A constant matrix, sparse or dense, applied to values of nodes or, transposed, to gradients of rows; None is the
    identity.
    """

    values: Sparse | Tensor | None

    @classmethod
    def of(cls, block: sp.csr_matrix | NDArray[np.floating], dtype: torch.dtype) -> Matrix:
        if isinstance(block, np.ndarray):
            return cls(torch.from_numpy(np.ascontiguousarray(block)).to(dtype))
        return cls(Sparse(canonical(block, dtype)))

    def times(self, dense: Tensor) -> Tensor:
        if self.values is None:
            return dense
        return self.values @ dense if isinstance(self.values, Tensor) else spmm(self.values.csr, dense)

    def transposed_times(self, dense: Tensor) -> Tensor:
        if self.values is None:
            return dense
        return self.values.mT @ dense if isinstance(self.values, Tensor) else spmm(self.values.transposed, dense)


@dataclass(frozen=True, eq=False)
class Reach:
    """Rows of one client's Abar, on the nodes they reach.

    Args:
        nodes: The m nodes, ascending.
        powers: (t, m) each; one, or one per beta where those are trained.
    """

    nodes: NDArray[np.int64]
    powers: tuple[Matrix, ...]

    @classmethod
    def itself(cls, nodes: int) -> Reach:
        """Every one of so many nodes reaches itself alone: z = g(S)."""
        return cls(np.arange(nodes), (Matrix(None),))

    @classmethod
    def of(cls, blocks: Sequence[sp.csr_matrix | NDArray[np.floating]], dtype: torch.dtype) -> Reach:
        """Of rows over all nodes; columns without any entry go."""
        touched = np.zeros(blocks[0].shape[1], dtype=bool)
        for block in blocks:
            touched |= (
                (block != 0).any(axis=0)
                if isinstance(block, np.ndarray)
                else np.bincount(block.indices, minlength=len(touched)) > 0
            )
        nodes = np.flatnonzero(touched)
        return cls(nodes, tuple(Matrix.of(block[:, nodes], dtype) for block in blocks))


@dataclass(frozen=True, eq=False)
class Group:
    """The clients that are differentiated together.

    Args:
        nodes: Nodes that any of them reaches, ascending.
        reaches: Of each client; ``places[k]`` are the positions of its nodes in ``nodes``.
    """

    nodes: NDArray[np.int64]
    reaches: tuple[Reach, ...]
    places: tuple[NDArray[np.int64], ...]

    @classmethod
    def of(cls, reaches: Sequence[Reach]) -> Group:
        nodes = np.unique(np.concatenate([reach.nodes for reach in reaches])) if len(reaches) > 1 else reaches[0].nodes
        return cls(nodes, tuple(reaches), tuple(np.searchsorted(nodes, reach.nodes) for reach in reaches))


class StructureNet:
    """g, and how z = Abar g(S) is differentiated.

    Args:
        width: d, values of a structure feature.
        num_classes: C.
        hidden: Hidden widths of the MLP; None for g(s) = s.
        dropout: Share of hidden values dropped in training.
    """

    BETAS = "betas"

    def __init__(self, *, width: int, num_classes: int, hidden: Sequence[int] | None, dropout: float) -> None:
        if hidden is not None and min((width, num_classes, *hidden)) < 1:
            raise ConfigError(
                f"widths must be at least 1, got nsf_dim {width}, structure_hidden {tuple(hidden)}, classes "
                f"{num_classes}"
            )
        if hidden is None and width != num_classes:
            raise ConfigError(f"without a head a structure feature has one value per class: {num_classes}, got {width}")
        self.width, self.num_classes, self.dropout = width, num_classes, dropout
        self.widths = None if hidden is None else [width, *hidden, num_classes]

    @property
    def depth(self) -> int:
        return 0 if self.widths is None else len(self.widths) - 1

    def first_weights(self, stream: Stream, dtype: torch.dtype) -> dict[str, Tensor]:
        """LayerNorm at one and zero, linear layers as ``torch.nn.Linear`` starts them."""
        if self.widths is None:
            return {}
        generator = stream.torch()
        weights = {"norm.gamma": torch.ones(self.width, dtype=dtype), "norm.beta": torch.zeros(self.width, dtype=dtype)}
        for i, (a, b) in enumerate(pairwise(self.widths)):
            layer = LinearLayer(a, b, generator)
            weights |= {
                f"layers.{i}.weight": layer.weight.detach().to(dtype),
                f"layers.{i}.bias": layer.bias.detach().to(dtype),
            }
        return weights

    # -- prediction --------------------------------------------------------------------------------

    def embed(self, weights: Weights, nsf: Tensor) -> Tensor:
        """g(S) of all nodes, without dropout. (n, C)"""
        if self.widths is None:
            return nsf
        h = self._first(weights, nsf).z
        for i in range(1, self.depth):
            h = torch.addmm(weights[f"layers.{i}.bias"], torch.relu(h), weights[f"layers.{i}.weight"])
        return h

    # -- training ----------------------------------------------------------------------------------

    def run(self, weights: Weights, nsf: Tensor, group: Group, generators: Sequence[torch.Generator] | None) -> Pass:
        """z of every client's training rows, and what the backward pass needs.

        Args:
            generators: Of each client's dropout; None drops nothing.
        """
        first = self._first(weights, nsf[torch.from_numpy(group.nodes)])
        rate = min(round(self.dropout * _LEVELS), _LEVELS - 1) if generators is not None and self.depth > 1 else 0
        clients = [
            self._client(
                weights, first.z, places, reach, generators[k] if generators is not None and rate else None, rate
            )
            for k, (reach, places) in enumerate(zip(group.reaches, group.places, strict=True))
        ]
        return Pass(self, weights, group, first, clients, int(nsf.shape[0]), _LEVELS / (_LEVELS - rate))

    def _first(self, weights: Weights, nsf: Tensor) -> First:
        if self.widths is None:
            return First(None, None, nsf)
        normed = nsf - nsf.mean(dim=1, keepdim=True)
        inverse = ((normed * normed).mean(dim=1, keepdim=True) + LAYER_NORM_EPS).rsqrt_()
        normed.mul_(inverse)
        weight = weights["layers.0.weight"]
        shift = torch.addmv(weights["layers.0.bias"], weight.mT, weights["norm.beta"])
        return First(normed, inverse, torch.addmm(shift, normed, weights["norm.gamma"].unsqueeze(1) * weight))

    def _client(
        self,
        weights: Weights,
        z: Tensor,
        places: NDArray[np.int64],
        reach: Reach,
        generator: torch.Generator | None,
        rate: int,
    ) -> ClientPass:
        hidden: list[Tensor] = []
        if self.depth > 1:
            h = _dropped(z, places, generator, rate)
            for i in range(1, self.depth):
                hidden.append(h)
                h = torch.addmm(weights[f"layers.{i}.bias"], h, weights[f"layers.{i}.weight"])
                if i < self.depth - 1:
                    h = _dropped(h, None, generator, rate)
        else:
            h = z[torch.from_numpy(places)]
        spread = [power.times(h) for power in reach.powers]
        return ClientPass(hidden, spread, combined(spread, weights.get(self.BETAS)))


@dataclass(frozen=True, eq=False)
class First:
    """LN(S) without its gain and shift, one over the deviations, and the first layer's output."""

    normed: Tensor | None
    inverse: Tensor | None
    z: Tensor


@dataclass(frozen=True, eq=False)
class ClientPass:
    """Inputs of the layers after the first, Abar's parts times g(S), and z. (t, C)"""

    hidden: list[Tensor]
    spread: list[Tensor]
    z: Tensor


@dataclass(frozen=True, eq=False)
class Pass:
    """One forward pass of a group, ready for the backward pass."""

    net: StructureNet
    weights: Weights
    group: Group
    first: First
    clients: list[ClientPass]
    num_nodes: int
    scale: float

    def gradients(
        self, residuals: Sequence[Tensor], shares: Sequence[float], *, nsf: bool
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """``sum_k share_k dL_k / d theta_s``, and the same for S where it is trained (n, d).

        Args:
            residuals: dL_k / dz of each client's training rows (t, C).
            shares: What each client counts.
        """
        grads = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        z_grad = torch.zeros_like(self.first.z)
        for client, reach, places, residual, share in zip(
            self.clients, self.group.reaches, self.group.places, residuals, shares, strict=True
        ):
            self._client(client, reach, places, residual * share, grads, z_grad)
        if self.net.widths is None:
            return grads, self._scattered(z_grad) if nsf else None
        return self._first(grads, z_grad, nsf)

    def _client(
        self,
        client: ClientPass,
        reach: Reach,
        places: NDArray[np.int64],
        residual: Tensor,
        grads: dict[str, Tensor],
        z_grad: Tensor,
    ) -> None:
        betas = self.weights.get(StructureNet.BETAS)
        if betas is None:
            grad = reach.powers[0].transposed_times(residual)  # Abar^T R, Prop. 2
        else:
            grads[StructureNet.BETAS] += torch.stack([(part * residual).sum() for part in client.spread])
            grad = combined([power.transposed_times(residual) for power in reach.powers], betas)
        for i in range(self.net.depth - 1, 0, -1):
            h, name = client.hidden[i - 1], f"layers.{i}"
            grads[f"{name}.weight"].addmm_(h.mT, grad)
            grads[f"{name}.bias"] += grad.sum(0)
            grad = grad @ self.weights[f"{name}.weight"].mT
            if i > 1:
                grad = grad.mul_(h > 0).mul_(self.scale)
            else:
                _scatter(grad, h, places, self.scale, z_grad)
        if self.net.depth <= 1:
            z_grad.index_add_(0, torch.from_numpy(places), grad)

    def _first(self, grads: dict[str, Tensor], z_grad: Tensor, nsf: bool) -> tuple[dict[str, Tensor], Tensor | None]:
        normed, inverse, weight, gamma = (
            self.first.normed,
            self.first.inverse,
            self.weights["layers.0.weight"],
            self.weights["norm.gamma"],
        )
        assert normed is not None and inverse is not None
        sums, products = z_grad.sum(0), normed.mT @ z_grad
        grads["layers.0.bias"] = sums
        grads["layers.0.weight"] = gamma.unsqueeze(1) * products + torch.outer(self.weights["norm.beta"], sums)
        grads["norm.gamma"] = (products * weight).sum(1)
        grads["norm.beta"] = weight @ sums
        if not nsf:
            return grads, None
        grad = z_grad @ (gamma.unsqueeze(1) * weight).mT  # of the normed rows
        along = (grad * normed).mean(1, keepdim=True)
        grad.sub_(grad.mean(1, keepdim=True)).addcmul_(normed, along, value=-1.0).mul_(inverse)
        return grads, self._scattered(grad)

    def _scattered(self, grad: Tensor) -> Tensor:
        """Over all nodes; zero where no client reaches."""
        if len(self.group.nodes) == self.num_nodes:
            return grad
        out = grad.new_zeros(self.num_nodes, grad.shape[1])
        out[torch.from_numpy(self.group.nodes)] = grad
        return out


def combined(parts: Sequence[Tensor], betas: Tensor | None) -> Tensor:
    """``sum_l beta_l parts[l]``; without betas there is one part."""
    if betas is None:
        return parts[0]
    return torch.stack([beta * part for beta, part in zip(betas, parts, strict=True)]).sum(0)


def _dropped(z: Tensor, places: NDArray[np.int64] | None, generator: torch.Generator | None, rate: int) -> Tensor:
    """relu and dropout of the given rows of z. Values are zero where they were negative or dropped, and only there."""
    rows = z if places is None else z[torch.from_numpy(places)]
    if generator is None:
        return torch.relu(rows) if places is None else rows.relu_()
    bits = torch.empty(rows.shape[0], -(-rows.shape[1] // 4), dtype=torch.int64).random_(
        -(2**63), None, generator=generator
    )
    out = rows if places is not None else rows.clone()
    source, target = bits.view(torch.int16).numpy(), out.numpy()
    threshold, scale = rate - _LEVELS // 2, target.dtype.type(_LEVELS / (_LEVELS - rate))

    def work(begin: int, end: int) -> None:
        _drop(begin, end, source, threshold, scale, target)

    split(work, out.shape[0], out.numel())
    return out


def _scatter(grad: Tensor, h: Tensor, places: NDArray[np.int64], scale: float, out: Tensor) -> None:
    """``out[places] += grad * scale`` where h > 0. Places are distinct."""
    arrays = grad.numpy(), h.numpy(), places, out.numpy()
    value = arrays[0].dtype.type(scale)

    def work(begin: int, end: int) -> None:
        _scatter_rows(begin, end, value, *arrays)

    split(work, len(places), grad.numel())


@compiled
def _drop(begin: int, end: int, bits: Array, threshold: int, scale: float, values: Array) -> None:
    for row in range(begin, end):
        source, target = bits[row], values[row]
        for h in range(len(target)):
            target[h] = target[h] * scale if source[h] >= threshold and target[h] > 0 else 0


@compiled
def _scatter_rows(begin: int, end: int, scale: float, grad: Array, kept: Array, places: Array, out: Array) -> None:
    for row in range(begin, end):
        g, h, target = grad[row], kept[row], out[places[row]]
        for i in range(len(g)):
            target[i] += g[i] * scale if h[i] > 0 else 0
