"""Backbones by name."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.errors import unknown
from isthmus.nn.backbone import Backbone
from isthmus.nn.gcn import GCN
from isthmus.nn.mlp import MLP
from isthmus.nn.sage import SAGE
from isthmus.seeds import Stream

_BACKBONES: dict[str, type[Backbone]] = {"gcn": GCN, "mlp": MLP, "sage": SAGE}
_ALIASES = {"graphsage": "sage"}


def backbones() -> tuple[str, ...]:
    """Names `build_backbone` knows, sorted; aliases left out."""
    return tuple(sorted(_BACKBONES))


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
) -> Backbone:
    """A backbone with its first weights, drawn from ``stream`` only.

    Args:
        name: One of `backbones`, or the alias ``graphsage``.
        num_features, num_classes: Of the task.
        hidden: Widths of the hidden layers.
        dropout: After every hidden layer, in training.
        input_norm: Learnable layer norm on the input features.
        head: Linear classifier on top of the last hidden layer; without it the last layer puts out the classes.
        stream: Same stream, same weights.
    """
    kind = _BACKBONES.get(_ALIASES.get(name, name))
    if kind is None:
        raise unknown("backbone", name, [*_BACKBONES, *_ALIASES])
    return kind(
        num_features=num_features,
        num_classes=num_classes,
        hidden=tuple(hidden),
        dropout=dropout,
        input_norm=input_norm,
        head=head,
        stream=stream,
    )
