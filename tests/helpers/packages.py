"""What tests compare of model packages."""

from __future__ import annotations

import hashlib
from pathlib import Path

from isthmus.experiments.model_package import MODEL, MODELS, read_package
from isthmus.federation.messages import SERVER


def weight_hashes(folder: Path) -> dict[str, str]:
    """A hash of the weights of every client's package below a folder, whatever run and engine wrote it."""
    found = {}
    for path in sorted(one.parent for one in folder.rglob(MODEL) if one.parent.parent.name == MODELS):
        package = read_package(path)
        if package.client == SERVER:
            continue
        parts = [name.encode() + tensor.numpy().tobytes() for name, tensor in sorted(package.weights.items())]
        found[package.client] = hashlib.sha256(b"".join(parts)).hexdigest()
    return found
