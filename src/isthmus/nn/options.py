"""Other names of backbones, and options that only some of them have; the same for node and graph tasks."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from isthmus.errors import ConfigError, unknown

ALIASES = {"graphsage": "sage", "gpr-gnn": "gprgnn", "decoupled-gcn": "dgcn"}


def own_options(kind: type, base: type) -> dict[str, Any]:
    """Keyword arguments of ``kind`` that ``base`` does not have, with their defaults."""
    common = inspect.signature(base).parameters
    own = inspect.signature(kind).parameters.values()
    named = [parameter for parameter in own if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    return {parameter.name: parameter.default for parameter in named if parameter.name not in common}


def check_options(name: str, given: Collection[str], allowed: Mapping[str, Any]) -> None:
    """Refuse an option this backbone does not have."""
    for option in given:
        if not allowed:
            raise ConfigError(f"{name} has no options besides the common ones, got {option!r}")
        if option not in allowed:
            raise unknown(f"option of {name}", option, allowed)
