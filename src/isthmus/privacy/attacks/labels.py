"""Labels from gradients of the output: softmax minus one-hot is negative at the true class and nowhere else.

FedGGR's server is sent grad z_v = (1/n) (softmax_v - onehot(y_v)) W and knows W; rows of unlabelled nodes are zero
(FedGGR spec, section 10). FedStruct's server is sent rows that are positive combinations of such residuals (FedStruct
spec, section 13.6).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.privacy.attacks.result import Recovery

Reals = NDArray[np.floating]


@dataclass(frozen=True)
class Labels:
    """Labels as read from gradients.

    Args:
        labels: (n,), -1 where the row is zero: this node has no training label, which is itself a secret.
        certain: (n,), rows that look exactly like a residual: one negative entry, sum zero. Known without the truth.
    """

    labels: NDArray[np.int64]
    certain: NDArray[np.bool_]

    def score(self, truth: NDArray[np.integer], party: str, attack: str = "labels_from_embedding_gradient") -> Recovery:
        """Against true training labels, -1 for nodes without one."""
        claimed = self.labels >= 0
        return Recovery(
            attack, party, int(claimed.sum()), int((claimed & (self.labels == truth)).sum()), int((truth >= 0).sum())
        )


def labels_from_embedding_gradient(gradient: Reals, output_weight: Reals) -> Labels:
    """Solve grad Z = R W for the residuals R: (n, F), (c, F) as in ``torch.nn.Linear`` -> labels. Exact where W has
    rank c.
    """
    if gradient.ndim != 2 or output_weight.ndim != 2 or gradient.shape[1] != output_weight.shape[1]:
        raise ValueError(f"gradients {gradient.shape} do not belong to an output layer {output_weight.shape}")
    weight, rows = output_weight.astype(np.float64), gradient.astype(np.float64)
    residuals = np.linalg.lstsq(weight.T, rows.T, rcond=None)[0].T  # (n, c)
    gap = np.linalg.norm(residuals @ weight - rows, axis=1)
    read = labels_from_signs(residuals)
    size = np.linalg.norm(rows, axis=1)
    return Labels(np.where(size > 0, read.labels, -1), read.certain & (gap <= 1e-3 * size))


def labels_from_signs(residuals: Reals) -> Labels:
    """Rows (n, c) that are a positive multiple of softmax minus one-hot: the most negative entry is the label."""
    rows = residuals.astype(np.float64)
    size = np.abs(rows).sum(1)
    some = size > 0
    tiny = 1e-6 * size[:, None]
    one_negative = (rows < -tiny).sum(1) == 1
    balanced = np.abs(rows.sum(1)) <= 1e-3 * size
    return Labels(np.where(some, rows.argmin(1), -1), some & one_negative & balanced)
