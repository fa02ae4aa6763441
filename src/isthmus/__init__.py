"""Isthmus: federated graph learning over graphs that are split between owners."""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "MLflow",
    "Progress",
    "Result",
    "Results",
    "Tables",
    "TensorBoard",
    "WandB",
    "__version__",
    "compare",
    "load",
    "load_models",
    "register_backbone",
    "reproduce",
    "resume",
    "run",
    "sweep",
]

# torch says so at the first CSR tensor of a process; we use only what our tests cover, and a user can do nothing about
# it.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")

if TYPE_CHECKING:
    from isthmus.api.compare import compare
    from isthmus.api.reproduce import reproduce
    from isthmus.api.result import Result, load
    from isthmus.api.runs import resume, run
    from isthmus.api.several import Results
    from isthmus.api.sweep import sweep
    from isthmus.experiments.callbacks import Callback, Progress
    from isthmus.experiments.models import load_models
    from isthmus.experiments.run import Tables
    from isthmus.experiments.tracking import MLflow, TensorBoard, WandB
    from isthmus.nn.registry import register_backbone

_WHERE = {
    "Callback": "isthmus.experiments.callbacks",
    "Progress": "isthmus.experiments.callbacks",
    "Result": "isthmus.api.result",
    "Results": "isthmus.api.several",
    "Tables": "isthmus.experiments.run",
    "compare": "isthmus.api.compare",
    "MLflow": "isthmus.experiments.tracking",
    "TensorBoard": "isthmus.experiments.tracking",
    "WandB": "isthmus.experiments.tracking",
    "load": "isthmus.api.result",
    "load_models": "isthmus.experiments.models",
    "register_backbone": "isthmus.nn.registry",
    "reproduce": "isthmus.api.reproduce",
    "resume": "isthmus.api.runs",
    "run": "isthmus.api.runs",
    "sweep": "isthmus.api.sweep",
}


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `isthmus.errors` or `isthmus --help` does not wait for torch.
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'isthmus' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
