"""Loops as machine code (numba), for every package that has some, and how many threads products take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def use_threads(count: int) -> None:
    """From now on so many threads for torch and for the products of numpy and of compiled loops, which otherwise take
    all cores whatever torch is told.
    """
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(count)
    threadpool_limits(limits=count, user_api="blas")


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """`use_threads` for a while."""
    import torch
    from threadpoolctl import threadpool_limits

    before = torch.get_num_threads()
    with threadpool_limits(limits=count, user_api="blas"):
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)
