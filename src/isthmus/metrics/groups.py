"""Which nodes are a client's minority nodes (FedSpray spec, sections 1 and 7).

The majority class of a client is the most frequent label among its *training* nodes; nodes of another class are its
minority nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def majority_class(y: Tensor, train: Tensor) -> int | None:
    """Most frequent class among training nodes, the lowest of equals; None without labelled training nodes."""
    labels = y[train]
    labels = labels[labels >= 0]
    return int(torch.bincount(labels).argmax()) if labels.numel() else None


def minority_mask(y: Tensor, train: Tensor) -> Tensor:
    """Labelled nodes of another class than the majority class (n,); all False where there is no majority class."""
    majority = majority_class(y, train)
    return torch.zeros_like(train) if majority is None else (y != majority) & (y >= 0)
