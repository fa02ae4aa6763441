"""Loops as machine code (numba), for every package that has some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def machine_code(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The compiled function, without the interpreter's lock, kept on disk between processes where there is a place to
    keep it; ``options`` are numba's.

    When editing a loop that loops in other files call, touch those files too: what is kept is renewed by file.
    """
    options = {"nogil": True} | options
    try:
        compiled: Callable[..., Any] = njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package folder nor the user's cache folder can be written
        compiled = njit(**options)(function)
    return compiled
