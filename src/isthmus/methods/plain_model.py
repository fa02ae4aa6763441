"""Which methods leave each client with a plain graph neural network, and that network as a torch module."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from isthmus.data.feature_scaling import Scaling
from isthmus.errors import ConfigError
from isthmus.federation.roles import Client
from isthmus.methods.registry import Method
from isthmus.methods.training import ModelClient, TrainConfig
from isthmus.nn.backbone import Backbone
from isthmus.nn.graph_models import GraphModel
from isthmus.nn.input_scale import InputScale, ScaleInput
from isthmus.seeds import Stream
from isthmus.tensors import Weights

_DECIDE = ("setup", "logits")
"""What a client class overrides where its prediction is more than its model on its own graph."""


def has_plain_model(cls: type[Client[Any, Any]]) -> bool:
    """Whether what a client says of a node is its model's output on its own features and edges, and nothing else.

    `ModelClient` says so of itself. A class below it that overrides how it is set up or predicts is asked again: it
    says ``plain_model = True`` where that still holds.
    """
    saying = next((base for base in cls.__mro__ if "plain_model" in vars(base)), None)
    if saying is None or not vars(saying)["plain_model"] or not issubclass(cls, ModelClient):
        return False
    below = [base for base in cls.__mro__ if base not in saying.__mro__]
    return not any(name in vars(base) for base in below for name in _DECIDE)


def plain_model(
    method: Method, config: Any, weights: Weights, *, task: str, num_features: int, num_classes: int
) -> nn.Module:
    """The model of a client as a plain module of PyTorch Geometric's layers: ``forward(x, edge_index)``, for graphs
    ``forward(x, edge_index, batch)``. A module of the user's own is returned as it is, with the trained weights.
    """
    if not has_plain_model(method.roles["client"].cls) or not isinstance(config, TrainConfig):
        raise ConfigError(
            f"a model of {method.name} is more than a graph neural network on the client's own graph, so there is no "
            "plain module that does the same, to hand out or to explain: predict without explanations instead"
        )
    build = config.build_graphs if task == "graph" else config.build
    model: nn.Module = build(num_features=num_features, num_classes=num_classes, stream=Stream(0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    if isinstance(model, Backbone | GraphModel):
        from isthmus.nn.to_pyg import to_pyg  # torch_geometric takes a second or two to import, and few runs need it

        return to_pyg(model)
    return copy.deepcopy(model).eval()


def of_raw_features(model: nn.Module, scaling: Scaling) -> nn.Module:
    """The module for features as they are given, which it puts on the scale of the training first."""
    if scaling.kind == "none":
        return model
    from isthmus.nn.to_pyg import PlainNet

    scale = InputScale(scaling.kind, scaling.mean, scaling.deviation)
    if isinstance(model, PlainNet):
        model.scale = scale
    else:
        model.register_forward_pre_hook(ScaleInput(scale))
    return model
