"""What methods share whose server reads every client's model: FedGTA and FED-PUB, which form an average of its own for
each client, FedTAD, which learns from all models, and GCFL, which compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from isthmus.errors import ConfigError
from isthmus.federation.interface import Federation, PerClient, View
from isthmus.federation.messages import Count, Message, Model, PartyId
from isthmus.methods.evaluation import Evaluation, scores_of
from isthmus.methods.fedavg import FedAvgClient, FedAvgConfig
from isthmus.methods.training import Deployed
from isthmus.records import Record
from isthmus.seeds import Stream
from isthmus.tensors import Weights, get_weights


@dataclass(frozen=True)
class SingleModelsConfig(FedAvgConfig):
    """FedAvg's settings, but for those that hide or leave out a client's model."""

    why_everybody: ClassVar[str] = "every client gets an average of its own in every round"

    def __post_init__(self) -> None:
        if self.dp_clip:  # before others say what else it would need
            raise ConfigError(
                "this method's server needs the clients' models as they are: leave dp_clip at 0, or use fedavg"
            )
        super().__post_init__()
        if self.fraction < 1.0:
            raise ConfigError(f"{self.why_everybody}: leave fraction at 1")


@dataclass(frozen=True)
class LocalModel(Message):
    """W_k after the client's epochs, and n_k."""

    weights: Model[Weights]
    samples: Count[float]


@dataclass(frozen=True)
class OwnModel(Message):
    """W_i, the client's own average."""

    weights: Model[Weights]


@dataclass(frozen=True)
class OwnModels(Record):
    """A server's state with a model for every client."""

    clients: tuple[PartyId, ...]
    models: tuple[Weights, ...]

    def each(self, kind: type[Any]) -> PerClient[Any]:
        """To each client a message of a kind, with its own average."""
        return PerClient({client: kind(model) for client, model in zip(self.clients, self.models, strict=True)})


def first_models(view: View, config: FedAvgConfig, common: Stream) -> OwnModels:
    """The shared part of the common first model, for every client."""
    model = config.first_model(view, common)
    weights = get_weights(model)
    shared = {name: weights[name] for name in config.shared_names(model, view)}
    return OwnModels(tuple(view.clients), (shared,) * len(view.clients))


def score_own_models(state: OwnModels, federation: Federation, config: FedAvgConfig) -> Mapping[PartyId, Evaluation]:
    """Every client scores its own average, or with ``score_model=after_local`` what its epochs made of the one
    before.
    """
    if config.score_model == "after_local":
        return scores_of(federation, FedAvgClient.evaluate)
    return scores_of(federation, FedAvgClient.deploy, state.each(Deployed))
