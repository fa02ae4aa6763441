"""Our own converted form of a data set: a safetensors file in the cache, sparse where the data are sparse, never a
pickle.

PyG keeps features dense (1.2 GB for Physics) and reopens its caches with pickle. We convert once; afterwards loading
takes milliseconds. A cached file that cannot be read, has other bytes than were written, or other counts than the data
set, is ignored and made anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from isthmus.data import store
from isthmus.errors import DataError

log = logging.getLogger(__name__)

CountsT = TypeVar("CountsT")

SPARSE_BELOW = 0.15  # density under which CSR products beat dense ones (measured on bag-of-words features)


def sparsify(x: Tensor) -> Tensor:
    """Features as CSR where few entries are non-zero, dense float32 otherwise."""
    x = x.to(torch.float32)
    if int(x.count_nonzero()) >= SPARSE_BELOW * x.numel():
        return x.contiguous()
    return x.to_sparse_csr()


def pack(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor under one name, or a CSR matrix under four."""
    if tensor.layout != torch.sparse_csr:
        return {name: tensor.contiguous()}
    return {
        f"{name}.crow": tensor.crow_indices(),
        f"{name}.col": tensor.col_indices(),
        f"{name}.values": tensor.values(),
        f"{name}.size": torch.tensor(tensor.shape),
    }


def unpack(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """The inverse of `pack`."""
    if name in tensors:
        return tensors[name]
    size = [int(value) for value in tensors[f"{name}.size"]]
    parts = (tensors[f"{name}.crow"], tensors[f"{name}.col"], tensors[f"{name}.values"])
    return torch.sparse_csr_tensor(*parts, size=size, check_invariants=True)


def converted(
    name: str,
    key: str,
    published: CountsT,
    count: Callable[[Mapping[str, Tensor]], CountsT],
    read: Callable[[], tuple[dict[str, Tensor], str]],
) -> tuple[dict[str, Tensor], str]:
    """Tensors and source of a data set: from the cache, else read now, counted and kept.

    Args:
        published: What the publisher says the data set has; other counts are refused.
        count: The same of some tensors.
        read: From the raw files. A source with a comma names a variant, which is not kept under the name of the
            published files: these may turn up later.
    """
    if (cached := read_cached(name, key)) is not None and count(cached[0]) == published:
        return cached
    tensors, source = read()
    if count(tensors) != published:
        raise DataError(
            f"{name} ({source}) has {count(tensors)}, published are {published}: replace the files, they are not it"
        )
    if "," not in source:
        write_cached(name, key, tensors, source)
    return tensors, source


@contextlib.contextmanager
def pyg_reading(title: str) -> Iterator[None]:
    """Around PyG's reading of raw files: its progress lines are dropped, its errors name the data set."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    # What parsers raise on files of another format.
    except (ValueError, KeyError, IndexError, OSError, RuntimeError) as error:
        raise DataError(
            f"the raw files of {title} cannot be read ({type(error).__name__}: {error}): replace them"
        ) from error


def read_cached(name: str, key: str) -> tuple[dict[str, Tensor], str] | None:
    """Tensors and source of a converted data set, or None."""
    store.mirror()  # a variable that points nowhere is a mistake to tell of, also where a copy is at hand
    try:
        with safe_open(_path(name, key), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {field: file.get_tensor(field) for field in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError):
        return None
    if metadata.get("digest") != _digest(tensors):
        log.warning("the converted copy of %s in the cache is damaged; it is made anew", name)
        return None
    return tensors, metadata.get("source", "")


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Of names, types, shapes and all bytes: a changed number in the cache must not be trained on."""
    digest = hashlib.sha256()
    for field in sorted(tensors):
        tensor = tensors[field].contiguous()
        digest.update(f"{field}/{tensor.dtype}/{tuple(tensor.shape)}/".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


def write_cached(name: str, key: str, tensors: Mapping[str, Tensor], source: str) -> None:
    """Keep a converted data set. A cache that cannot be written costs time later, not the run."""
    path = _path(name, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".partial")
        os.close(handle)
        save_file(dict(tensors), temporary, metadata={"source": source, "digest": _digest(tensors)})
        Path(temporary).replace(path)  # one step, so that a reader never sees half a file
    except OSError as error:
        log.warning("the converted data set %s could not be cached (%s)", name, error.strerror or type(error).__name__)


def _path(name: str, key: str) -> Path:
    return store.converted(name, key)


def is_cached(name: str, key: str) -> bool:
    """Whether a converted copy lies in the cache (it is not opened)."""
    return _path(name, key).is_file()
