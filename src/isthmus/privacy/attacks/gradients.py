"""The gradient of a linear layer for one record *is* the record (HiFGL spec, section 11.5).

For y = W s + b and one record, grad W = delta s^T and grad b = delta, so s = grad W[j] / grad b[j] for any j with
delta_j != 0. A gradient summed over records is of higher rank and gives only a mixture.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.privacy.attacks.result import Recovery

Reals = NDArray[np.floating]


@dataclass(frozen=True)
class LayerInput:
    """Input of a layer as read from its gradient.

    Args:
        values: s, (in,); zeros where the gradient is zero.
        residual: Share of grad W that a single record does not explain: near zero means the values are exact, known
            without the truth.
    """

    values: NDArray[np.float64]
    residual: float

    @property
    def exact(self) -> bool:
        return self.residual < 1e-4

    def score(self, truth: Reals, party: str, tolerance: float = 1e-3) -> Recovery:
        """Entries of the input that were read to ``tolerance`` (relative to its largest entry)."""
        near = np.abs(self.values - truth) <= tolerance * max(float(np.abs(truth).max(initial=0.0)), 1e-300)
        return Recovery("inputs_from_linear_gradient", party, truth.size, int(near.sum()), truth.size)


def inputs_from_linear_gradient(weight_gradient: Reals, bias_gradient: Reals) -> LayerInput:
    """What whoever is sent the gradient of one layer reads from it: (out, in), (out,) -> (in,)."""
    gradient, delta = weight_gradient.astype(np.float64), bias_gradient.astype(np.float64)
    if gradient.ndim != 2 or delta.shape != gradient.shape[:1]:
        raise ValueError(f"gradients of weight {gradient.shape} and bias {delta.shape} are not of one linear layer")
    row = int(np.abs(delta).argmax())
    if delta[row] == 0:
        return LayerInput(np.zeros(gradient.shape[1]), 1.0)
    values = gradient[row] / delta[row]
    size = float(np.linalg.norm(gradient))
    residual = float(np.linalg.norm(gradient - np.outer(delta, values))) / size if size else 0.0
    return LayerInput(values, residual)
