"""Small random clients for the tests of this room."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn

from isthmus.data.node_data import NodeData
from isthmus.graph.normalise import to_torch_csr
from isthmus.nn import Backbone, build_backbone
from isthmus.seeds import Stream
from isthmus.tensors import get_weights

NUM_FEATURES, NUM_CLASSES = 12, 3


def client(
    num_nodes: int,
    seed: int,
    *,
    num_edges: int | None = None,
    train: float = 0.4,
    sparse: bool = True,
    density: float = 0.15,
) -> NodeData:
    """A random directed graph with (mostly) sparse features."""
    rng = np.random.default_rng(seed)
    x = (rng.random((num_nodes, NUM_FEATURES)) < density) * rng.normal(size=(num_nodes, NUM_FEATURES))
    edges = rng.integers(0, num_nodes, size=(2, 2 * num_nodes if num_edges is None else num_edges))
    mask = torch.from_numpy(rng.random(num_nodes) < train)
    dense = torch.from_numpy(x.astype(np.float32))
    return NodeData(
        x=to_torch_csr(sp.csr_matrix(x.astype(np.float32))) if sparse else dense,
        edge_index=torch.from_numpy(edges),
        y=torch.from_numpy(rng.integers(0, NUM_CLASSES, size=num_nodes)),
        train=mask,
        val=~mask,
        test=~mask,
        node_id=torch.arange(num_nodes),
        num_classes=NUM_CLASSES,
    )


def uneven_clients() -> list[NodeData]:
    """Sizes far apart, a client without edges, one with a single node, one without training nodes, one with dense
    features.
    """
    return [
        client(30, 1),
        client(6, 2, num_edges=0, train=0.6),
        client(1, 3, num_edges=0, train=1.1),
        client(9, 4, train=0.0),
        client(14, 5, train=0.1, density=0.9),
        client(11, 6, sparse=False),
    ]


def model(
    name: str = "gcn", *, hidden: tuple[int, ...] = (5,), seed: int = 0, dropout: float = 0.0, **options: bool
) -> Backbone:
    return build_backbone(
        name,
        num_features=NUM_FEATURES,
        num_classes=NUM_CLASSES,
        hidden=hidden,
        dropout=dropout,
        stream=Stream(seed, ("init",)),
        **options,
    )


def jittered(backbone: Backbone, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Its weights, each moved at random: zeros and ones of a fresh model would hide mistakes."""
    generator = Stream(seed).torch()
    return {
        name: (tensor + 0.3 * torch.randn(tensor.shape, generator=generator)).to(dtype)
        for name, tensor in get_weights(backbone).items()
    }


class TwoWays(nn.Module):
    """The equation of dirsage with dense matrices."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.root = nn.Linear(width, out)
        self.incoming, self.outgoing = nn.Linear(width, out, bias=False), nn.Linear(width, out, bias=False)

    def parts(self) -> dict[str, nn.Parameter]:
        """Our name -> its parameter."""
        found = {name: getattr(self, name).weight for name in ("root", "incoming", "outgoing")}
        return found | {"bias": self.root.bias}

    def forward(self, h: Tensor, edge_index: Tensor) -> Tensor:
        arcs = torch.zeros(len(h), len(h), dtype=h.dtype)
        arcs.index_put_((edge_index[0], edge_index[1]), torch.ones(1, dtype=h.dtype), accumulate=True)
        into, out_of = (matrix / matrix.sum(1, keepdim=True).clamp(min=1) for matrix in (arcs.T, arcs))
        return self.root(h) + into @ self.incoming(h) + out_of @ self.outgoing(h)
