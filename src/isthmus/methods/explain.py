r"""Why a model says what it says of a node: integrated gradients (Sundararajan, Taly & Yan, ICML 2017,
https://arxiv.org/abs/1703.01365) of the margin of the predicted class, from a graph without features to the real one
(after the model's norm of its input, if it has one).

.. math:: c_{uf} = x_{uf} \int_0^1 \frac{\partial m(t x)}{\partial x_{uf}} dt, \qquad
          \sum_{u f} c_{uf} = m(x) - m(0), \qquad m = z_{predicted} - \mathrm{mean}_{others}\, z

c is what feature f of node u contributes: added up over nodes it ranks features, over features it ranks neighbours. It
is the same every time and what all contributions add up to is known, unlike with learned masks.

Only where the model is a plain graph neural network at its owner, and only with the owner's own nodes and edges:
nothing is asked of anybody else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.errors import ConfigError


@dataclass(frozen=True)
class Explanation:
    """What speaks for and against the class a node was given; the largest contributions first, either sign.

    Args:
        id: Of the node; in a prediction, as its owner calls it.
        predicted: Class index.
        features: Column (its name, where columns have names) and contribution, added up over all nodes.
        neighbours: Id and contribution of other own nodes; empty where the model does not look at edges.
        own: What the node's own features contribute.
        margin: What all contributions add up to, up to the error of the integral: the margin of the class over the
            mean of the others, less that without any features.
    """

    id: Any
    predicted: int
    features: tuple[tuple[Any, float], ...]
    neighbours: tuple[tuple[Any, float], ...]
    own: float
    margin: float

    def named(self, nodes: Mapping[int, Any], columns: Sequence[str] | None) -> Explanation:
        """The same with their owner's names of nodes, and with names of columns where there are any."""
        return replace(
            self,
            id=nodes[self.id],
            features=tuple((columns[at] if columns else at, part) for at, part in self.features),
            neighbours=tuple((nodes[node], part) for node, part in self.neighbours),
        )


def explain(model: nn.Module, data: Any, nodes: Sequence[int], *, top: int = 5, steps: int = 64) -> list[Explanation]:
    """Explain what a plain model says of some nodes.

    Args:
        model: ``forward(x, edge_index)``.
        data: The client's nodes (`isthmus.data.node_data.NodeData`).
        nodes: Their ids.
        top: How many features and neighbours are named.
        steps: Points of the integral.
    """
    from isthmus.nn.to_pyg import PlainNet  # imported when used, as torch_geometric takes a second or two

    if top < 1 or steps < 1:
        raise ConfigError(f"top and steps must be at least 1, got {top} and {steps}")
    place = {number: row for row, number in enumerate(data.node_id.tolist())}
    if strange := [node for node in nodes if node not in place]:
        raise ConfigError(f"node {strange[0]} is none of this client's {len(place)} nodes: explain its own nodes")
    x = data.x if data.x.layout == torch.strided else data.x.to_dense()
    x, arcs = x.to(next(model.parameters()).dtype), data.edge_index
    if isinstance(model, PlainNet):  # a layer norm does not see how large its input is: what it puts out is explained
        with torch.no_grad():
            x = model.normed(x)
        forward: Callable[[Tensor, Tensor], Tensor] = model.from_normed
        hops = model.hops
    else:
        forward, hops = model, None
    with torch.no_grad():
        logits, without = forward(x, arcs), forward(torch.zeros_like(x), arcs)
    ids = data.node_id.tolist()
    found = []
    for node in nodes:
        row = place[node]
        predicted = int(logits[row].argmax())
        rows, inner = _around(row, len(ids), arcs, hops)
        here = int(torch.searchsorted(rows, row))
        parts = _contributions(forward, x[rows], inner, here, predicted, steps)
        by_node = parts.sum(1)
        others = [(ids[at], part) for at, part in zip(rows.tolist(), by_node.tolist(), strict=True) if at != row]
        found.append(
            Explanation(
                node,
                predicted,
                _largest(list(enumerate(parts.sum(0).tolist())), top),
                _largest(others, top),
                float(by_node[here]),
                float(_margin(logits[row], predicted) - _margin(without[row], predicted)),
            )
        )
    return found


def _around(row: int, count: int, edge_index: Tensor, hops: int | None) -> tuple[Tensor, Tensor]:
    """The rows a node's output depends on, ascending, and the edges among them; all where the hops are not known. One
    hop more than the model's: a layer also sees the degrees of the nodes that are furthest away.
    """
    if hops is None:
        return torch.arange(count), edge_index
    if hops == 0:
        return torch.tensor([row]), edge_index[:, :0]
    from torch_geometric.utils import k_hop_subgraph, subgraph

    both = torch.cat([edge_index, edge_index.flip(0)], 1)
    rows = k_hop_subgraph(row, hops + 1, both, num_nodes=count)[0]
    return rows, subgraph(rows, edge_index, relabel_nodes=True, num_nodes=count)[0]


def _contributions(
    forward: Callable[[Tensor, Tensor], Tensor], x: Tensor, edge_index: Tensor, row: int, predicted: int, steps: int
) -> Tensor:
    """c (n, F), by the midpoint rule."""
    total = torch.zeros_like(x)
    for step in range(steps):
        at = ((step + 0.5) / steps * x).requires_grad_()
        margin = _margin(forward(at, edge_index)[row], predicted)
        total += torch.autograd.grad(margin, at)[0]
    return total * x / steps


def _margin(logits: Tensor, predicted: int) -> Tensor:
    others = max(1, logits.numel() - 1)
    return logits[predicted] - (logits.sum() - logits[predicted]) / others


def _largest(pairs: Sequence[tuple[int, float]], top: int) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((pair for pair in pairs if pair[1]), key=lambda pair: -abs(pair[1]))[:top])
