"""Features from embeddings: what an encoder was trained to keep, a decoder gives back.

FedGGR's server is sent embeddings of all nodes. Where the auto-encoder is federated, it holds the decoder as well;
where it is not, anybody who knows features of some nodes (one client in league with the server) can learn one (FedGGR
spec, section 10).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from isthmus.privacy.attacks.result import Recovery

Reals = NDArray[np.floating]


def learn_decoder(embeddings: Reals, features: Reals, ridge: float = 1e-3) -> NDArray[np.float64]:
    """A linear decoder from nodes whose features are known: (m, p), (m, F) -> (p + 1, F), the last row for the mean."""
    if embeddings.ndim != 2 or features.ndim != 2 or len(embeddings) != len(features):
        raise ValueError(f"embeddings {embeddings.shape} and features {features.shape} are not of the same nodes")
    rows = np.concatenate([embeddings.astype(np.float64), np.ones((len(embeddings), 1))], axis=1)
    gram = rows.T @ rows + ridge * len(rows) * np.eye(rows.shape[1])
    decoder: NDArray[np.float64] = np.linalg.solve(gram, rows.T @ features.astype(np.float64))
    return decoder


def decode_linear(embeddings: Reals, decoder: Reals) -> NDArray[np.float64]:
    """Scores of all features of each node. (n, F)"""
    rows = np.concatenate([embeddings.astype(np.float64), np.ones((len(embeddings), 1))], axis=1)
    return rows @ decoder.astype(np.float64)


def words_from_scores(scores: Reals, truth: Reals, party: str, attack: str = "features_from_embeddings") -> Recovery:
    """Claim for every node its features of highest score, as many as it has, against the true ones (both (n, F), true =
    above 0).

    Compare with the same scores for every node (the mean): what anybody could claim without an embedding.
    """
    true = truth > 0
    order = np.argsort(-scores, axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(scores.shape[1])[None, :].repeat(len(scores), axis=0), axis=1)
    claimed = rank < true.sum(1, keepdims=True)
    return Recovery(attack, party, int(claimed.sum()), int((claimed & true).sum()), int(true.sum()))
