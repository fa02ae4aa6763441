"""The model that a run built (``model`` of its result), as a line for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def model_words(model: Mapping[str, Any] | None) -> str:
    """``sage, layers 1433-64-7, dropout 0.5, no input norm, no linear head``."""
    if model is None:
        return "not described by its settings"
    if model["layers"] is None:
        return f"{model['backbone']}, a module of your own, {model['parameters']:,} parameters"
    parts = [model["backbone"], "layers " + "-".join(map(str, model["layers"]))]
    if model["dropout"] is not None:
        parts.append(f"dropout {model['dropout']:g}")
    parts.append("input norm" if model["input_norm"] else "no input norm")
    parts.append("linear head" if model["head"] else "no linear head")
    return ", ".join(parts)
