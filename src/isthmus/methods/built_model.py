"""What model a run built: read off the model itself, so that two runs with different ones are told apart."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from isthmus.errors import IsthmusError
from isthmus.federation.interface import View
from isthmus.methods.training import TrainConfig
from isthmus.nn.backbone import Backbone
from isthmus.nn.layers import Conv
from isthmus.nn.registry import OWN_BACKBONES
from isthmus.seeds import Stream


def describe_model(config: Any, view: View) -> dict[str, Any] | None:
    """Backbone, widths of its layers from features to classes, input norm, head, dropout and number of parameters;
    None where the settings name no backbone. What a method trains beside its backbone is not in it.
    """
    backbone = getattr(config, "backbone", None)
    if backbone is None:
        return None
    model: nn.Module | None = None
    if isinstance(config, TrainConfig) and view.alike:
        with contextlib.suppress(IsthmusError):  # a method may build its model in its own way
            model = config.first_model(view, Stream(0))
    hidden, ends = list(getattr(config, "hidden", ())), (view.num_features, view.num_classes)
    found: dict[str, Any] = {
        "backbone": backbone,
        "layers": [ends[0], *hidden, ends[1]] if view.alike else hidden,
        "input_norm": bool(getattr(config, "input_norm", False)),
        "head": bool(getattr(config, "head", False)),
        "dropout": getattr(config, "dropout", None),
        "parameters": None if model is None else sum(value.numel() for value in model.parameters()),
    }
    if isinstance(model, Backbone):
        found |= {"layers": _widths(model), "input_norm": model.input_norm is not None, "head": model.head is not None}
    elif backbone in OWN_BACKBONES:
        found |= {"layers": None, "input_norm": None, "head": None, "dropout": None}
    return found


def _widths(model: Backbone) -> list[int]:
    """Features, what each layer puts out, and the classes."""
    convs: list[Conv] = [*model.convs, *([] if model.head is None else [model.head])]
    shapes = [
        next(value.shape for name, value in conv.named_parameters() if name in conv.weight_terms) for conv in convs
    ]
    return [shapes[0][-2], *(shape[-1] for shape in shapes)]
