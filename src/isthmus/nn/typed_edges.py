r"""A network with one channel per latent type of edge, and how edges get their types -- FedLit (Xie, Xiong & Yang, WWW
2023).

.. math::
    f = X W_f + b_f, \qquad z^{(t)} = \mathrm{conv}_2(\mathrm{conv}_1(f W_t + b_t)) \text{ over edges of type } t,
    \qquad \text{logits} = \big(\textstyle\sum_t z^{(t)}\big) W_c + b_c

All channels run side by side: their weights carry a leading dimension T, the propagation is block diagonal. The
embedding of an edge is ``[f_u | f_v]`` of its ends, the end with the smaller node id first, so that both directions of
an edge are one.

Shapes: n nodes, E edges (each once), T types, h hidden, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.graph.normalise import gcn_norm
from isthmus.nn.dense import add_bias, matmul
from isthmus.nn.first_layer_input import Operand, build_operand
from isthmus.nn.inputs import Nodes
from isthmus.nn.layers import Conv, Hop
from isthmus.nn.registry import find_architecture
from isthmus.nn.sparse import Sparse, as_csr, block_diagonal, canonical
from isthmus.seeds import Stream
from isthmus.tensors import Weights

CONVOLUTIONS = ("gcn", "sage", "sgc", "mlp")
"""What a channel is made of; ``mlp`` is blind to edges, a control."""
BRANCH = "branch."
"""Prefix of what every type has its own of."""


@dataclass(frozen=True, eq=False)
class TypedInputs:
    """What never changes of one client's nodes.

    Args:
        x: Features (n, F).
        edges: Every undirected edge once (2, E), the smaller node id above; self loops left out.
        arcs: Every stored arc (2, A), self loops left out.
        edge_of: Edge of each arc (A,).
        num_nodes: n.
    """

    x: Operand
    edges: Tensor
    arcs: Tensor
    edge_of: Tensor
    num_nodes: int


def typed_inputs(data: Nodes, dtype: torch.dtype) -> TypedInputs:
    """Prepare one client's nodes."""
    x = as_csr(data.x)
    arcs = data.edge_index[:, data.edge_index[0] != data.edge_index[1]]
    ends = torch.stack([arcs.min(dim=0).values, arcs.max(dim=0).values]) if arcs.numel() else arcs
    edges, edge_of = torch.unique(ends, dim=1, return_inverse=True)
    operand = build_operand(x, None, np.arange(data.num_nodes), data.num_nodes, input_norm=False, dtype=dtype)
    return TypedInputs(operand, edges, arcs, edge_of, data.num_nodes)


def first_typed(
    convolution: str, num_features: int, hidden: int, num_classes: int, types: int, stream: Stream
) -> dict[str, Tensor]:
    """First weights, uniform +-1/sqrt(fan_in)."""
    if convolution not in CONVOLUTIONS:
        raise ConfigError(f"fedlit's channels are {', '.join(CONVOLUTIONS)}, got backbone {convolution!r}")
    square = (types, hidden, hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "feature.weight": (num_features, hidden),
        "feature.bias": (hidden,),
        "branch.input.weight": square,
        "branch.input.bias": (types, hidden),
    }
    for layer in range(_num_layers(convolution)):
        shapes |= {name: square for name in _layer_names(convolution, layer).values()}
        shapes[f"branch.{layer}.bias"] = (types, hidden)
    shapes |= {"classify.weight": (hidden, num_classes), "classify.bias": (num_classes,)}
    weights = {}
    for name, shape in shapes.items():
        bound = (num_features if name.startswith("feature.") else hidden) ** -0.5
        weights[name] = torch.empty(shape).uniform_(-bound, bound, generator=stream.child(name).torch())
    return weights


@cache
def _conv(convolution: str) -> Conv:
    """The layer of a channel; its first weights are not used."""
    return find_architecture(convolution)().conv(1, 1, torch.Generator())


def _num_layers(convolution: str) -> int:
    return 1 if find_architecture(convolution).linear else 2


def _layer_names(convolution: str, layer: int) -> dict[str, str]:
    """The layer's own name of each weight matrix -> its name here: the first is ``weight`` whatever the layer."""
    terms = _conv(convolution).weight_terms
    return {name: f"branch.{layer}.{name if i else 'weight'}" for i, name in enumerate(terms)}


def propagation(convolution: str, inputs: TypedInputs, types: Tensor, num_types: int, dtype: torch.dtype) -> Sparse:
    """One block per type: the normalised graph of its edges, over all nodes. Self loops keep the values of nodes
    that no edge of a type touches.
    """
    normalise = _conv(convolution).propagation or gcn_norm
    blocks = [
        canonical(normalise(inputs.arcs[:, types[inputs.edge_of] == t], inputs.num_nodes), dtype)
        for t in range(num_types)
    ]
    return Sparse(block_diagonal(blocks, inputs.num_nodes, inputs.num_nodes))


def features(weights: Weights, inputs: TypedInputs) -> Tensor:
    """f (n, h)."""
    return add_bias(inputs.x.product(weights["feature.weight"]), weights["feature.bias"])


def typed_forward(
    convolution: str,
    weights: Weights,
    f: Tensor,
    matrix: Sparse,
    *,
    rate: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Logits of all nodes (n, C).

    Args:
        f: `features`.
        matrix: `propagation`.
        rate: Share of hidden values dropped, where a generator is given.
    """
    num_types = weights["branch.input.weight"].shape[0]
    h = add_bias(
        matmul(f.repeat(num_types, 1), weights["branch.input.weight"]), weights["branch.input.bias"]
    )  # (T n, h)
    hop = Hop(matrix, num_types, f.shape[0])  # every type has weights of its own, as clients have in a cohort
    for layer in range(_num_layers(convolution)):
        own = {name: weights[ours] for name, ours in _layer_names(convolution, layer).items()}
        h = _conv(convolution).run(own | {"bias": weights[f"branch.{layer}.bias"]}, h, hop)
        if find_architecture(convolution).linear:
            continue
        h = torch.relu(h)
        if generator is not None and rate:
            h = h * ((torch.rand(h.shape, generator=generator, dtype=h.dtype) >= rate).to(h.dtype) / (1.0 - rate))
    total = h.view(num_types, -1, h.shape[-1]).sum(0)
    return add_bias(matmul(total, weights["classify.weight"]), weights["classify.bias"])


def edge_embedding(f: Tensor, inputs: TypedInputs) -> Tensor:
    """``[f_u | f_v]`` (E, 2 h)."""
    return torch.cat([f[inputs.edges[0]], f[inputs.edges[1]]], dim=1)


def assign(embedding: Tensor, centres: Tensor) -> Tensor:
    """Type of each edge: the centre with the largest cosine (E,)."""
    return (torch.nn.functional.normalize(embedding, dim=1) @ torch.nn.functional.normalize(centres, dim=1).T).argmax(
        dim=1
    )


def em_step(embedding: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Types by the given centres, and the means of the edges of each type. A type without edges restarts at the edge
    least like its own
    centre: the mean of nothing would be NaN for ever after."""
    types = assign(embedding, centres)
    counts = torch.bincount(types, minlength=len(centres))
    means = torch.zeros_like(centres).index_add_(0, types, embedding) / counts.clamp(min=1).unsqueeze(1)
    likeness = torch.nn.functional.cosine_similarity(embedding, means[types], dim=1)
    order = likeness.argsort(stable=True)
    for place, t in enumerate((counts == 0).nonzero().flatten().tolist()):
        means[t] = embedding[order[min(place, len(order) - 1)]]
    return types, means


def first_centres(embedding: Tensor, num_types: int, steps: int = 20) -> Tensor:
    """k-means by cosine from far apart edges: no draw, so that clients with equal edges have equal centres. (T, 2 h)"""
    unit = torch.nn.functional.normalize(embedding, dim=1)
    chosen = [int((unit @ unit.mean(0)).argmax())]
    for _ in range(1, num_types):
        chosen.append(int((unit @ unit[chosen].T).max(dim=1).values.argmin()))
    centres = embedding[chosen]
    for _ in range(steps):
        before = centres
        centres = em_step(embedding, centres)[1]
        if torch.equal(before, centres):
            break
    return centres


def align(centroids: Tensor, centres: Tensor) -> list[int]:
    """``order[g]`` = the client's type that is global type g: repeatedly the largest cosine among what is left. A
    permutation.
    """
    cosine = (
        torch.nn.functional.normalize(centroids, dim=1) @ torch.nn.functional.normalize(centres, dim=1).T
    )  # (own, global)
    order = [-1] * len(centres)
    for _ in range(len(centres)):
        own, common = divmod(int(cosine.argmax()), cosine.shape[1])
        order[common] = own
        cosine[own, :], cosine[:, common] = -torch.inf, -torch.inf
    return order


def reorder(weights: Mapping[str, Tensor], order: Tensor) -> dict[str, Tensor]:
    """Branches in another order of types; the rest as it is."""
    return {name: tensor[order] if name.startswith(BRANCH) else tensor for name, tensor in weights.items()}
