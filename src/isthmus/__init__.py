"""Isthmus: federated graph learning over graphs that are split between owners."""

import warnings
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Tables", "__version__", "register_backbone", "resume", "run"]

# torch says so at the first CSR tensor of a process; we use only what our tests cover, and a user can do nothing about
# it.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")

if TYPE_CHECKING:
    from isthmus.experiments.run import Tables, resume, run
    from isthmus.nn.registry import register_backbone


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `isthmus.errors` or `isthmus --help` does not wait for torch.
    if name in ("Tables", "run", "resume"):
        from isthmus.experiments import run as module

        return getattr(module, name)
    if name == "register_backbone":
        from isthmus.nn.registry import register_backbone

        return register_backbone
    raise AttributeError(f"module 'isthmus' has no attribute {name!r}")
