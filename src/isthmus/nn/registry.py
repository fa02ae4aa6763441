"""Backbones by name: every file of `isthmus.nn.architectures` is one, for node and for graph tasks."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from isthmus.errors import ConfigError, unknown
from isthmus.nn import architectures
from isthmus.nn.architecture import Architecture
from isthmus.nn.backbone import Backbone
from isthmus.nn.graph_models import GraphModel
from isthmus.seeds import Stream


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
    if kind is None:
        raise unknown("backbone", name, [*known, *aliases])
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
