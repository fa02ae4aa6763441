r"""Isthmus' models as plain PyTorch Geometric modules with the same outputs, for use without Isthmus' own kernels.

    backbone   PyG
    gcn        ``GCNConv``
    sage       ``SAGEConv`` (mean)
    dirsage    ``DirGNNConv`` of ``SAGEConv``
    gat        ``GATConv``
    gin        ``GINConv`` with a two-layer perceptron
    sgc        ``SGConv``
    mlp        ``Linear``
    gprgnn     ``Linear``, then `PageRank`, whose norm is that of ``GCNConv``
    dgcn       ``Linear``, then `RowMeans`

A node model is ``forward(x, edge_index) -> logits``, a graph model ``forward(x, edge_index, batch) -> logits``. Both
are in evaluation mode: nothing is dropped.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.nn.conv.gcn_conv import gcn_norm as pyg_gcn_norm

from isthmus.errors import ConfigError
from isthmus.nn.architecture import Architecture
from isthmus.nn.architectures.dgcn import DGCN
from isthmus.nn.architectures.dirsage import DirSAGEConv
from isthmus.nn.architectures.gat import SLOPE, GATConv
from isthmus.nn.architectures.gcn import GCNConv
from isthmus.nn.architectures.gin import GINConv
from isthmus.nn.architectures.gprgnn import GPRGNN
from isthmus.nn.architectures.sage import SAGEConv
from isthmus.nn.architectures.sgc import SGConv
from isthmus.nn.backbone import Backbone
from isthmus.nn.first_layer_input import LAYER_NORM_EPS
from isthmus.nn.graph_models import GraphModel
from isthmus.nn.layers import Conv, LinearLayer, convs_of


class PageRank(pyg.MessagePassing):  # type: ignore[misc]
    r""":math:`\sum_k \gamma_k \hat A^k h` (GPR-GNN)."""

    def __init__(self, gamma: Tensor) -> None:
        super().__init__(aggr="add")
        self.gamma = nn.Parameter(gamma.detach().clone())

    def forward(self, h: Tensor, edge_index: Tensor) -> Tensor:
        arcs, weight = pyg_gcn_norm(edge_index, None, h.size(0), dtype=h.dtype)
        total = h * self.gamma[0]
        for k in range(1, len(self.gamma)):
            h = self.propagate(arcs, x=h, weight=weight)
            total = total + h * self.gamma[k]
        return total

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return weight.view(-1, 1) * x_j


class RowMeans(pyg.MessagePassing):  # type: ignore[misc]
    r""":math:`(\tilde D^{-1} (A + I))^L h`, row = source (the decoupled GCN)."""

    def __init__(self, hops: int) -> None:
        super().__init__(aggr="add", flow="target_to_source")
        self.hops = hops

    def forward(self, h: Tensor, edge_index: Tensor) -> Tensor:
        ones = torch.ones(edge_index.size(1), dtype=h.dtype, device=h.device)
        degree = torch.ones(h.size(0), dtype=h.dtype, device=h.device).scatter_add(0, edge_index[0], ones)
        for _ in range(self.hops):
            h = (h + self.propagate(edge_index, x=h)) / degree.view(-1, 1)
        return h


def _hops(layer: nn.Module) -> int:
    match layer:
        case PageRank():
            return len(layer.gamma) - 1
        case RowMeans():
            return layer.hops
        case pyg.SGConv():
            return int(layer.K)
    return int(isinstance(layer, pyg.MessagePassing))


class PlainNet(nn.Module):
    """Layers of PyTorch and PyTorch Geometric, one after the other, for nodes or for graphs.

    Args:
        num_features: F, of the input.
        norm: Layer norm on the input features.
        layers: Convolutions and linear maps, with whether ReLU comes before each.
        after: Propagation after the last layer.
        pooled: ReLU after the last layer?, then sum over each graph, ``post``, ReLU, ``readout``.

    ``scale`` may be set to what features as they are given go through first (`isthmus.nn.input_scale`).
    """

    def __init__(
        self,
        num_features: int,
        layers: list[tuple[nn.Module, bool]],
        *,
        norm: nn.Module | None = None,
        after: nn.Module | None = None,
        pooled: tuple[bool, nn.Module, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.num_features, self.norm, self.after = num_features, norm, after
        self.scale: nn.Module | None = None
        self.layers = nn.ModuleList(layer for layer, _ in layers)
        self.activated = [activated for _, activated in layers]
        self.activate_last = pooled is not None and pooled[0]
        self.post: nn.Module | None = None if pooled is None else pooled[1]
        self.readout: nn.Module | None = None if pooled is None else pooled[2]

    @property
    def pools(self) -> bool:
        """Whether it classifies graphs, not nodes."""
        return self.post is not None

    @property
    def hops(self) -> int:
        """How many edges away a node can be and still count."""
        return sum(_hops(layer) for layer in (*self.layers, *([] if self.after is None else [self.after])))

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None) -> Tensor:
        """Logits, a row per node or per graph. ``batch``: the graph of each node; all in one where it is None."""
        x = x if self.scale is None else self.scale(x)
        return self.from_normed(self.normed(x), edge_index, batch)

    def normed(self, x: Tensor) -> Tensor:
        """The input features after their layer norm, if there is one."""
        return x if self.norm is None else self.norm(x)

    def from_normed(self, h: Tensor, edge_index: Tensor, batch: Tensor | None = None) -> Tensor:
        """What follows the norm of the input."""
        for layer, activated in zip(self.layers, self.activated, strict=True):
            h = torch.relu(h) if activated else h
            h = layer(h) if isinstance(layer, nn.Linear) else layer(h, edge_index)
        h = torch.relu(h) if self.activate_last else h
        h = h if self.after is None else self.after(h, edge_index)
        if self.post is None or self.readout is None:
            return h
        logits: Tensor = self.readout(torch.relu(self.post(_sums(h, batch))))
        return logits

    def to_pyg(self) -> PlainNet:
        """It is a module of PyTorch Geometric's layers already."""
        return self

    def to_onnx(self, path: str | os.PathLike[str]) -> Path:
        """Write the model as ONNX, for any number of nodes and edges; returns the path. Inputs are ``x`` (float32),
        ``edge_index`` (int64) where the model looks at edges, and ``batch`` (int64) where it classifies graphs.
        """
        example: dict[str, Tensor] = {
            "x": torch.zeros(3, self.num_features),
            "edge_index": torch.tensor([[0, 1, 2], [1, 2, 0]]),
            **({"batch": torch.tensor([0, 0, 1])} if self.pools else {}),
        }
        sizes = {"x": {0: "nodes"}, "edge_index": {1: "edges"}, "batch": {0: "nodes"}, "logits": {0: "rows"}}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the tracer, about shapes that are dynamic on purpose
                torch.onnx.export(
                    self.float().eval(),
                    tuple(example.values()),
                    os.fspath(path),
                    input_names=list(example),
                    output_names=["logits"],
                    dynamic_axes={name: axes for name, axes in sizes.items() if name in (*example, "logits")},
                    opset_version=18,
                    dynamo=False,
                )
        except (ModuleNotFoundError, torch.onnx.errors.OnnxExporterError) as error:
            cause = error.__cause__ or error  # torch wraps what it could not import
            if not isinstance(cause, ModuleNotFoundError):
                raise
            raise ConfigError(f"ONNX needs the package {cause.name!r}: pip install 'isthmus[onnx]'") from None
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; choose another file") from None
        return Path(path)


def _sums(h: Tensor, batch: Tensor | None) -> Tensor:
    """Sum over the nodes of each graph. Written so that ONNX sees the number of graphs as an input's."""
    if batch is None:
        return h.sum(0, keepdim=True)
    sums = torch.zeros_like(h).scatter_add(0, batch.view(-1, 1).expand_as(h), h)
    return sums[: batch.max() + 1]


def to_pyg(model: nn.Module) -> PlainNet:
    """The same model made of PyTorch Geometric's layers, weights included; outputs agree to rounding."""
    if isinstance(model, Backbone):
        net = _node_net(model)
    elif isinstance(model, GraphModel) and type(model) is GraphModel:
        net = _graph_net(model)
    else:
        raise ConfigError(
            f"{type(model).__name__} has no counterpart of PyTorch Geometric's layers: its parts are Isthmus' own"
        )
    return net.to(next(model.parameters()).dtype).eval()


def _node_net(model: Backbone) -> PlainNet:
    norm = None
    if model.input_norm is not None:
        norm = nn.LayerNorm(model.input_norm.gamma.numel(), eps=LAYER_NORM_EPS)
        _copy(norm.weight, model.input_norm.gamma)
        _copy(norm.bias, model.input_norm.beta)
    layers = [(_layer(model.convs[0]), False)]
    layers += [(_layer(place.conv), place.activated) for place in model.layers_after_input]
    return PlainNet(_width(model.convs[0]), layers, norm=norm, after=_after(model.architecture, model))


def _graph_net(model: GraphModel) -> PlainNet:
    convs = convs_of(model.convs)
    layers = [(_layer(model.pre), False), *((_layer(conv), place > 0) for place, conv in enumerate(convs))]
    pooled = not model.architecture.linear, _layer(model.post), _layer(model.readout)
    return PlainNet(_width(model.pre), layers, after=_after(model.architecture, model), pooled=pooled)


def _width(conv: Conv) -> int:
    """Number of features a first layer takes."""
    return int(dict(conv.named_parameters())[next(iter(conv.weight_terms))].shape[0])


def _after(architecture: Architecture, model: nn.Module) -> nn.Module | None:
    if isinstance(architecture, GPRGNN):
        return PageRank(model.gamma)  # type: ignore[arg-type]
    return RowMeans(architecture.hops) if isinstance(architecture, DGCN) else None


def _layer(conv: Conv) -> nn.Module:
    for kind, convert in _LAYERS.items():
        if type(conv) is kind:
            return convert(conv)
    raise ConfigError(f"the layer {type(conv).__name__} has no counterpart in PyTorch Geometric")


def _linear(conv: Any) -> nn.Module:
    layer = nn.Linear(*conv.weight.shape)
    _copy(layer.weight, conv.weight.t())
    _copy(layer.bias, conv.bias)
    return layer


def _gcn(conv: Any) -> Any:
    layer: Any = pyg.GCNConv(*conv.weight.shape)
    _copy(layer.lin.weight, conv.weight.t())
    _copy(layer.bias, conv.bias)
    return layer


def _sage(conv: Any) -> Any:
    layer: Any = pyg.SAGEConv(*conv.neighbour.shape)
    _copy(layer.lin_l.weight, conv.neighbour.t())
    _copy(layer.lin_l.bias, conv.bias)
    _copy(layer.lin_r.weight, conv.root.t())
    return layer


def _dirsage(conv: Any) -> Any:
    layer: Any = pyg.DirGNNConv(pyg.SAGEConv(*conv.root.shape, root_weight=False, bias=False), alpha=0.5)
    _copy(layer.lin.weight, conv.root.t())
    _copy(layer.lin.bias, conv.bias)
    _copy(layer.conv_in.lin_l.weight, 2 * conv.incoming.t())  # it takes alpha, one half, of each mean
    _copy(layer.conv_out.lin_l.weight, 2 * conv.outgoing.t())
    return layer


def _gat(conv: Any) -> Any:
    heads, width = conv.source.shape
    layer: Any = pyg.GATConv(conv.weight.shape[0], width, heads=heads, concat=not conv.average, negative_slope=SLOPE)
    _copy(layer.lin.weight, conv.weight.t())
    _copy(layer.att_src, conv.source.unsqueeze(0))
    _copy(layer.att_dst, conv.target.unsqueeze(0))
    _copy(layer.bias, conv.bias)
    return layer


def _gin(conv: Any) -> Any:
    layer: Any = pyg.GINConv(nn.Sequential(_linear(conv.inner), nn.ReLU(), _linear(conv.outer)))
    for place, ours in ((0, conv.inner), (2, conv.outer)):  # it draws new weights when it is made
        _copy(layer.nn[place].weight, ours.weight.t())
        _copy(layer.nn[place].bias, ours.bias)
    return layer


def _sgc(conv: Any) -> Any:
    layer: Any = pyg.SGConv(*conv.weight.shape, K=conv.propagation.hops)
    _copy(layer.lin.weight, conv.weight.t())
    _copy(layer.lin.bias, conv.bias)
    return layer


_LAYERS: Mapping[type[Conv], Callable[[Any], nn.Module]] = {
    LinearLayer: _linear,
    GCNConv: _gcn,
    SAGEConv: _sage,
    DirSAGEConv: _dirsage,
    GATConv: _gat,
    GINConv: _gin,
    SGConv: _sgc,
}


def _copy(target: Any, values: Tensor) -> None:
    target.data = values.detach().clone(memory_format=torch.contiguous_format)
