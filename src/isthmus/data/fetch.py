"""Download raw files with PyG's own class and stop before it opens them: ``python -m isthmus.data.fetch ROOT CLASS
[NAME]``.

The class is subclassed so that the step after the download does nothing: what was downloaded is not verified yet.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any


class Fetched(Exception):
    """Raised in place of processing."""


def fetch(root: str, name: str, *arguments: str) -> None:
    """Fill ``root`` with the raw files of ``torch_geometric.datasets.<name>(root, *arguments)``."""
    import torch_geometric.datasets

    base: Any = getattr(torch_geometric.datasets, name)

    def stop(self: Any) -> None:
        raise Fetched

    with contextlib.suppress(Fetched):
        type("Fetch", (base,), {"process": stop})(root, *arguments)


if __name__ == "__main__":
    fetch(*sys.argv[1:])
