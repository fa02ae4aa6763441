"""Engines by name.

``local`` (default) keeps all parties in this process, ``ray`` spreads them over cores, ``nvflare`` over organisations.
Each is one module of this package with an :class:`~isthmus.federation.engine.Engine` in it; optional packages are
imported there and nowhere else. To add
one: a module, a line in :data:`ENGINES`, its name in ``RunConfig.engine``, its options in ``RunConfig`` under keys
``<name>.<option>``. An engine of :data:`ELSEWHERE` runs the rounds in another process than the one that asked for the
run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from isthmus.errors import ConfigError, unknown
from isthmus.federation.engine import Engine

ENGINES = {"local": "LocalEngine", "ray": "RayEngine"}
"""Engine -> class in the module of the same name. Built as ``(parts, table, config, stream, *, wire, cohort,
**options)``.
"""


ELSEWHERE = {"nvflare": "isthmus.deploy.loopback"}
"""Engine -> module with ``start(settings, out, callbacks)`` and ``resume(path, settings, callbacks)``."""


def engine_class(name: str) -> Callable[..., Engine]:
    """What makes an engine of this name; a missing package is an error that names the extra."""
    if name in ELSEWHERE:
        raise ConfigError(f"engine {name!r} runs in another process: use start()")
    if name not in ENGINES:
        raise unknown("engine", name, {*ENGINES, *ELSEWHERE})
    try:
        module = importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] == "isthmus":
            raise
        raise ConfigError(f"engine {name!r} needs the package {error.name!r}: pip install 'isthmus[{name}]'") from None
    made: Callable[..., Engine] = getattr(module, ENGINES[name])
    return made
