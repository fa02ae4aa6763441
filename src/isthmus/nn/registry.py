"""Backbones by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isthmus.errors import unknown
from isthmus.nn.backbone import Backbone
from isthmus.nn.dgcn import DGCN
from isthmus.nn.gat import GAT
from isthmus.nn.gcn import GCN
from isthmus.nn.gin import GIN
from isthmus.nn.gprgnn import GPRGNN
from isthmus.nn.mlp import MLP
from isthmus.nn.options import ALIASES, check_options, own_options
from isthmus.nn.sage import SAGE
from isthmus.nn.sgc import SGC
from isthmus.seeds import Stream

_BACKBONES: dict[str, type[Backbone]] = {
    "dgcn": DGCN,
    "gat": GAT,
    "gcn": GCN,
    "gin": GIN,
    "gprgnn": GPRGNN,
    "mlp": MLP,
    "sage": SAGE,
    "sgc": SGC,
}


def backbones() -> tuple[str, ...]:
    """Names `build_backbone` knows, sorted; aliases left out."""
    return tuple(sorted(_BACKBONES))


def backbone_options(name: str) -> dict[str, Any]:
    """What `build_backbone` takes for this backbone besides the common arguments, with defaults."""
    return own_options(_find(name), Backbone)


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
    """A backbone with its first weights, drawn from ``stream`` only.

    Args:
        name: One of `backbones`, or an alias such as ``graphsage``.
        num_features, num_classes: Of the task.
        hidden: Widths of the hidden layers.
        dropout: After every hidden layer, in training.
        input_norm: Learnable layer norm on the input features.
        head: Linear classifier on top of the last hidden layer; without it the last layer puts out the classes.
        stream: Same stream, same weights.
        options: Of this backbone alone (`backbone_options`): ``hops`` of dgcn, sgc, gprgnn; ``alpha``, ``dprate`` of
            gprgnn; ``heads``, ``attention_dropout`` of gat.
    """
    kind = _find(name)
    check_options(name, options, backbone_options(name))
    return kind(
        num_features=num_features,
        num_classes=num_classes,
        hidden=tuple(hidden),
        dropout=dropout,
        input_norm=input_norm,
        head=head,
        stream=stream,
        **options,
    )


def _find(name: str) -> type[Backbone]:
    kind = _BACKBONES.get(ALIASES.get(name, name))
    if kind is None:
        raise unknown("backbone", name, [*_BACKBONES, *ALIASES])
    return kind
