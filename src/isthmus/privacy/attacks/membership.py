"""Was this record trained on? A model that has memorised its training data shows small losses there (Yeom et al.,
2018).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.privacy.attacks.result import Recovery

Reals = NDArray[np.floating]


@dataclass(frozen=True)
class Membership:
    """How well losses tell members from others.

    Args:
        auc: Chance that a member has the smaller loss; 0.5 is guessing.
        advantage: Largest difference of true and false positive rate over all thresholds; 0 is guessing.
        threshold: The loss at which it is reached.
    """

    auc: float
    advantage: float
    threshold: float


def guess_members(losses: Reals, threshold: float) -> NDArray[np.bool_]:
    """Records whose loss is at most ``threshold``, e.g. the mean training loss a client reports."""
    guessed: NDArray[np.bool_] = losses <= threshold
    return guessed


def membership_by_loss(members: Reals, others: Reals) -> Membership:
    """What whoever holds the model can tell, at the best threshold there is."""
    if not members.size or not others.size:
        raise ValueError("the attack needs losses of members and of others")
    if not (np.isfinite(members).all() and np.isfinite(others).all()):
        raise ValueError("losses must be finite")
    losses = np.unique(np.concatenate([members, others]))
    hit = np.searchsorted(np.sort(members), losses, side="right") / members.size
    false = np.searchsorted(np.sort(others), losses, side="right") / others.size
    best = int((hit - false).argmax())
    ordered = np.sort(others)
    larger = others.size - np.searchsorted(ordered, members, side="right")
    equal = np.searchsorted(ordered, members, side="right") - np.searchsorted(ordered, members, side="left")
    auc = float((larger + 0.5 * equal).sum()) / (members.size * others.size)
    return Membership(auc, max(0.0, float(hit[best] - false[best])), float(losses[best]))


def score_guesses(guessed: NDArray[np.bool_], truth: NDArray[np.bool_], party: str) -> Recovery:
    """Guessed members against true ones."""
    return Recovery("membership_by_loss", party, int(guessed.sum()), int((guessed & truth).sum()), int(truth.sum()))
