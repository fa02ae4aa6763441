"""Backbones by name: every file of `isthmus.nn.architectures` is one, for node and for graph tasks; and modules of the
user's own (`register_backbone`), for node tasks.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

import torch
from torch import nn

from isthmus.errors import ConfigError, unknown
from isthmus.nn import architectures
from isthmus.nn.architecture import Architecture
from isthmus.nn.backbone import Backbone
from isthmus.nn.graph_models import GraphModel
from isthmus.nn.own_module import BackboneFactory, build_module
from isthmus.registry import Registry
from isthmus.seeds import Stream

OWN_BACKBONES: Registry[BackboneFactory] = Registry("own backbone", "isthmus.nn.architectures")
"""Modules of the user's own, by name."""


def register_backbone(name: str, factory: BackboneFactory) -> None:
    """Make a model of your own known as ``backbone=name``; registering a name again replaces it.

    Args:
        name: Not that of a backbone that comes with Isthmus.
        factory: ``(num_features, num_classes) -> torch.nn.Module`` whose ``forward(x, edge_index)`` gives logits, one
            row per node. Widths, dropout and the like are its own affair: ``hidden``, ``dropout``, ``head`` and
            ``input_norm`` have no effect on it.
    """
    known = _architectures()
    if name in known or any(name in kind.aliases for kind in known.values()):
        raise ConfigError(f"backbone {name!r} comes with Isthmus: give yours another name")
    if not callable(factory):
        raise ConfigError(f"the factory of backbone {name!r} cannot be called: give a function or a class")
    OWN_BACKBONES.add(name, factory, replace=True)


def build_own_backbone(
    name: str, *, num_features: int, num_classes: int, stream: Stream, dtype: torch.dtype
) -> nn.Module:
    """A module of the user's own with its first weights."""
    factory = OWN_BACKBONES.find(name)
    return build_module(name, factory, num_features=num_features, num_classes=num_classes, stream=stream, dtype=dtype)


@cache
def _architectures() -> dict[str, type[Architecture]]:
    """Name of the file -> the one architecture it defines."""
    found = {}
    for _, name, _ in pkgutil.iter_modules(architectures.__path__):
        module = importlib.import_module(f"{architectures.__name__}.{name}")
        kinds = [
            kind
            for kind in vars(module).values()
            if isinstance(kind, type) and issubclass(kind, Architecture) and kind.__module__ == module.__name__
        ]
        if len(kinds) != 1:
            raise ConfigError(f"{module.__name__} defines {len(kinds)} sub-classes of Architecture; it must define one")
        found[name] = kinds[0]
    return found


def backbones() -> tuple[str, ...]:
    """Names of all backbones, sorted; aliases left out."""
    return tuple(sorted(_architectures()))


def find_architecture(name: str) -> type[Architecture]:
    """The architecture called ``name``, or with that alias."""
    known = _architectures()
    aliases = {alias: kind for kind in known.values() for alias in kind.aliases}
    kind = known.get(name) or aliases.get(name)
    if kind is None and name in OWN_BACKBONES:
        raise ConfigError(
            f"backbone {name!r} is a module of your own, which this method or task cannot use: it works with layers it "
            f"knows ({', '.join(sorted(known))}); methods like fedavg, fedprox, fedper and local take yours on nodes"
        )
    if kind is None:
        raise unknown("backbone", name, [*known, *aliases, *OWN_BACKBONES])
    return kind


def backbone_options(name: str) -> dict[str, Any]:
    """What this backbone takes besides the common arguments, with defaults."""
    return {field.name: field.default for field in fields(find_architecture(name))}


def build_backbone(
    name: str,
    *,
    num_features: int,
    num_classes: int,
    hidden: Sequence[int] = (64,),
    dropout: float = 0.0,
    input_norm: bool = False,
    head: bool = False,
    stream: Stream,
    **options: Any,
) -> Backbone:
    """A node classifier with its first weights, drawn from ``stream`` only.

    Args:
        name: One of `backbones`, or an alias such as ``graphsage``.
        num_features, num_classes: Of the task.
        hidden: Widths of the hidden layers.
        dropout: After every hidden layer, in training.
        input_norm: Learnable layer norm on the input features.
        head: Linear classifier on top of the last hidden layer; without it the last layer puts out the classes.
        stream: Same stream, same weights.
        options: Of this backbone alone (`backbone_options`).
    """
    return Backbone(
        _architecture(name, options),
        num_features=num_features,
        num_classes=num_classes,
        hidden=tuple(hidden),
        dropout=dropout,
        input_norm=input_norm,
        head=head,
        stream=stream,
    )


def build_graph_model(
    name: str,
    *,
    num_features: int,
    num_classes: int,
    hidden: Sequence[int] = (64, 64, 64),
    dropout: float = 0.5,
    stream: Stream,
    **options: Any,
) -> GraphModel:
    """A graph classifier with its first weights, drawn from ``stream`` only; arguments as of `build_backbone`."""
    return GraphModel(
        _architecture(name, options),
        num_features=num_features,
        num_classes=num_classes,
        hidden=tuple(hidden),
        dropout=dropout,
        stream=stream,
    )


def _architecture(name: str, options: Mapping[str, Any]) -> Architecture:
    _check_options(name, options, backbone_options(name))
    return find_architecture(name)(**options)


def _check_options(name: str, given: Collection[str], allowed: Mapping[str, Any]) -> None:
    """Refuse an option this backbone does not have."""
    for option in given:
        if not allowed:
            raise ConfigError(f"{name} has no options besides the common ones, got {option!r}")
        if option not in allowed:
            raise unknown(f"option of {name}", option, allowed)
