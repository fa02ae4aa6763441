"""Things handed over from Python, under a name made from their contents: own graphs, owners, masks.

Settings are text, so a graph that lives in memory stands in them as ``own:<hash>``. The name says which data a run was
about, not what they are: continuing it needs the same data again, and other data have another name.
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from isthmus.errors import DataError

T = TypeVar("T")
OWN, OWNERS, MASKS = "own", "owners", "masks"
_KEPT: dict[str, object] = {}


def digest(*parts: object) -> str:
    """SHA-256 over tensors, texts and numbers, their shapes and types."""
    found = hashlib.sha256(b"isthmus/contents")
    for part in parts:
        if isinstance(part, Tensor):
            if part.layout == torch.sparse_csr:
                found.update(digest(part.crow_indices(), part.col_indices(), part.values()).encode())
                continue
            array = part.detach().cpu().contiguous().numpy()
            found.update(f"{array.dtype} {array.shape} ".encode())
            found.update(np.ascontiguousarray(array).data)
        else:
            text = repr(part).encode()
            found.update(len(text).to_bytes(8, "big") + text)
    return found.hexdigest()


def keep(kind: str, contents: str, thing: object) -> str:
    """Remember a thing for this process; returns the name that stands for it in settings."""
    name = f"{kind}:{contents[:16]}"
    _KEPT[name] = thing
    return name


def is_given(kind: str, name: str) -> bool:
    """Whether a name stands for something handed over from Python."""
    return name.startswith(f"{kind}:") and len(name) == len(kind) + 17


def recall(name: str, expected: type[T]) -> T:
    """The thing behind a name."""
    thing = _KEPT.get(name)
    if thing is None or not isinstance(thing, expected):
        raise DataError(
            f"{name} was handed over from Python and is not here: give the same data again, "
            "e.g. isthmus.resume(RUN_DIR, dataset=data)"
        )
    return thing
