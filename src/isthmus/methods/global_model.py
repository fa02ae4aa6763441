"""What a method with one model common to all clients need not write: the server's state, its start, its evaluation.

The field ``weights`` of a server state is that model. A method whose state has no such field keeps models at the
clients only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from isthmus.errors import ConfigError
from isthmus.federation.interface import Federation, View
from isthmus.federation.messages import PartyId
from isthmus.methods.evaluation import Evaluation, scores_of
from isthmus.methods.training import Deployed, ModelClient, TrainConfig
from isthmus.records import Record
from isthmus.seeds import Stream
from isthmus.tensors import Weights, get_weights, num_values


@dataclass(frozen=True)
class GlobalModel(Record):
    """State of a server that remembers the common weights and nothing else."""

    weights: Weights


def first_global_model(view: View, config: TrainConfig, common: Stream) -> GlobalModel:
    """The common first weights; clients that differ in features or classes cannot have any."""
    if not view.alike:
        raise ConfigError(
            "this method trains one common model: clients with different features or classes cannot use it; try fedavg"
        )
    return GlobalModel(get_weights(config.first_model(view, common)))


def evaluate_models(state: Record, federation: Federation, config: object) -> Mapping[PartyId, Evaluation]:
    """Every client scores its model on its own data, after taking over the common weights where the server has any
    (not with ``score_model=after_local``).
    """
    weights: Weights | None = getattr(state, "weights", None)
    if weights is None or getattr(config, "score_model", "received") == "after_local":
        return scores_of(federation, ModelClient.evaluate)
    return scores_of(federation, ModelClient.deploy, Deployed(weights))


def num_shared_values(state: Record) -> int:
    """How many numbers the common weights hold."""
    return num_values(getattr(state, "weights", {}))
