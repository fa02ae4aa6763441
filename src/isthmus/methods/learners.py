"""What a client learns on: its nodes, or its graphs. One interface for both, so that a classic method is written
once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from isthmus.data.graph_set import GraphSetData
from isthmus.data.node_data import NodeData
from isthmus.errors import ConfigError, DataError
from isthmus.metrics.groups import minority_mask
from isthmus.nn.backbone import Backbone
from isthmus.nn.blocks import predict_blocks
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.graph_batch import Batch, node_batch, pack_graphs
from isthmus.nn.graph_models import GraphModel
from isthmus.nn.graph_train import (
    batch_gradients,
    batches_to_predict,
    graph_gradients,
    predict_batch,
    predict_batches,
    predict_graphs,
    train_batch,
    train_graphs,
)
from isthmus.nn.inputs import Inputs, build_inputs
from isthmus.nn.loss import get_loss
from isthmus.nn.optim import OptimizerState
from isthmus.nn.own_module import ModuleData, module_gradients, predict_module, train_module
from isthmus.nn.registry import find_architecture
from isthmus.nn.sampling import Sampler
from isthmus.nn.train import (
    ExtraGradient,
    TrainResult,
    TrainSettings,
    call_with_embedding,
    gradients,
    predict,
    train_batches,
    train_locally,
)
from isthmus.seeds import Stream
from isthmus.tensors import Weights

PARTS = ("train", "val", "test")
DEGREES = ((0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, None))
Streams = Callable[[str], Stream]
BLOCK = 65_536
"""Nodes that are predicted at a time where a graph has more and nothing is trained."""


class Hyper(Protocol):
    """What a learner reads of a method's config."""

    @property
    def weight_decay(self) -> float: ...
    @property
    def optimizer(self) -> Any: ...
    @property
    def loss(self) -> Any: ...
    @property
    def local_epochs(self) -> int: ...
    @property
    def backbone(self) -> str: ...
    @property
    def dropout(self) -> float: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def batches(self) -> Any: ...
    @property
    def fanout(self) -> tuple[int, ...]: ...
    @property
    def score_train(self) -> bool: ...
    @property
    def class_weight(self) -> Any: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True)
class EmbeddingTerm:
    """A further term of a client's loss, of the embedding the last layer is given (`Backbone.with_embedding`).

    Args:
        value: (embedding (p, d), inputs) -> (1,), differentiable; the first rows are the nodes in order.
        everywhere: The rows are all of the client's nodes; otherwise its training nodes.
    """

    value: Callable[[Tensor, Inputs], Tensor]
    everywhere: bool = False


class Learner(ABC):
    """A model and the samples (nodes or graphs) it is trained and scored on."""

    model: Any
    config: Hyper
    y: Tensor
    masks: dict[str, Tensor]
    """Samples of each part of the split, and of groups of the test part as ``test:<group>``."""
    num_samples: int
    num_train: int

    def train(
        self,
        weights: Weights,
        state: OptimizerState,
        streams: Streams,
        extra: ExtraGradient | None,
        frozen: Collection[str],
        *,
        lr: float,
        term: EmbeddingTerm | None = None,
    ) -> TrainResult:
        """The client's epochs of a round; ``term`` for node models of ours only."""
        settings: TrainSettings = {
            "epochs": self.config.local_epochs,
            "lr": lr,
            "weight_decay": self.config.weight_decay,
            "optimizer": self.config.optimizer,
            "loss": self.config.loss,
            "extra_gradient": extra,
            "frozen": frozen,
            "dropout": self._dropout(streams),
        }
        if term is not None:
            return self._train_with(term, weights, state, settings)
        return self._train(weights, state, streams, settings)

    def _train_with(
        self, term: EmbeddingTerm, weights: Weights, state: OptimizerState, settings: TrainSettings
    ) -> TrainResult:
        raise ConfigError("a loss of embeddings needs one of Isthmus' backbones and a node task: choose a backbone")

    def _dropout(self, streams: Streams) -> DropoutSource | None:
        return dropout_source(self.config, [streams])

    @abstractmethod
    def _train(
        self, weights: Weights, state: OptimizerState, streams: Streams, settings: TrainSettings
    ) -> TrainResult: ...

    @abstractmethod
    def gradients(self, weights: Weights, streams: Streams) -> dict[str, Tensor]:
        """Gradient of the mean training loss; zero without training samples."""

    @abstractmethod
    def logits(self, weights: Weights) -> Tensor:
        """One row per sample; with `scoring`, those of samples that are not scored are zero."""

    @contextmanager
    def scoring(self) -> Iterator[Mapping[str, Tensor]]:
        """While scores are formed: the parts to score. `logits` may leave the rows of other samples out."""
        yield self.masks


class NodeLearner(Learner):
    """Node classification on the client's own graph, full batch."""

    def __init__(self, data: NodeData, model: Backbone, config: Hyper) -> None:
        self.data, self.model, self.config = data, model, config
        self.y, self.num_samples, self.num_train = data.y, data.num_nodes, data.num_train
        self.masks: dict[str, Tensor] = {part: getattr(data, part) for part in PARTS} | node_groups(data)
        self.inputs = balanced(build_inputs(data, model, data.train, dtype=config.dtype), data, config)

    @cached_property
    def everything(self) -> Inputs:
        """Inputs for all nodes; only evaluation needs them."""
        return build_inputs(self.data, self.model, dtype=self.config.dtype)

    @cached_property
    def whole(self) -> Inputs:
        """`everything` with the training nodes' loss weights, for a loss that also has terms at other nodes."""
        everything, train = self.everything, self.data.train
        weight = torch.zeros_like(everything.weight)
        weight[: self.num_samples] = train.to(weight.dtype) / max(1, self.num_train)
        return balanced(replace(everything, weight=weight), self.data, self.config)

    def _train(self, weights: Weights, state: OptimizerState, streams: Streams, settings: TrainSettings) -> TrainResult:
        return train_locally(self.model, weights, state, self.inputs, **settings)

    def _train_with(
        self, term: EmbeddingTerm, weights: Weights, state: OptimizerState, settings: TrainSettings
    ) -> TrainResult:
        loss = replace(get_loss(self.config.loss), of_embedding=term.value)
        inputs = self.whole if term.everywhere else self.inputs
        others: Any = {name: value for name, value in settings.items() if name != "loss"}
        return train_locally(self.model, weights, state, inputs, loss=loss, **others)

    @torch.no_grad()
    def embedding(self, weights: Weights, inputs: Inputs) -> Tensor:
        """What the last layer is given, without dropout: the nodes of ``inputs`` first."""
        return call_with_embedding(self.model, weights, inputs)[1]

    @torch.no_grad()
    def dropped_logits(self, weights: Weights, streams: Streams) -> Tensor:
        """`logits` with dropout as in training."""
        dropout = dropout_source(self.config, [streams])
        return self.everything.unpad(call_with_embedding(self.model, weights, self.everything, dropout)[0])

    def gradients(self, weights: Weights, streams: Streams) -> dict[str, Tensor]:
        return gradients(
            self.model, weights, self.inputs, loss=self.config.loss, dropout=dropout_source(self.config, [streams])
        )[0]

    def logits(self, weights: Weights) -> Tensor:
        if not self.num_train and self.num_samples > BLOCK:  # asked once, of many nodes: memory counts, not speed
            return predict_blocks(self.model, weights, self.data, BLOCK, dtype=self.config.dtype)
        return predict(self.model, weights, self.everything)


class SampledLearner(NodeLearner):
    """Node classification by mini-batches (`isthmus.nn.sampling`): no step takes the whole graph, evaluation does."""

    def __init__(self, data: NodeData, model: Backbone, config: Hyper) -> None:
        self.data, self.model, self.config = data, model, config
        self.y, self.num_samples, self.num_train = data.y, data.num_nodes, data.num_train
        self.masks: dict[str, Tensor] = {part: getattr(data, part) for part in PARTS} | node_groups(data)

    @property
    def inputs(self) -> Inputs:  # type: ignore[override]
        raise ConfigError("this method works on all training nodes at once: set batches=full")

    @cached_property
    def sampler(self) -> Sampler:
        config = self.config
        fanout = config.fanout if config.batches == "neighbours" else None
        attends = any(conv.attends for conv in self.model.convs)
        return Sampler(self.whole, config.batch_size, fanout, weighted=not attends)

    def batches(self, stream: Stream) -> list[tuple[Callable[[], Inputs], float]]:
        """The steps of an epoch, and what each counts in the client's mean loss."""
        rows = self.sampler.epoch(stream)
        return [
            (partial(self.sampler.batch, each, stream.child(step)), len(each) / self.num_train)
            for step, each in enumerate(rows)
        ]

    def _train(self, weights: Weights, state: OptimizerState, streams: Streams, settings: TrainSettings) -> TrainResult:
        epochs = [self.batches(streams("batches").child(epoch)) for epoch in range(settings["epochs"])]
        others: Any = {name: value for name, value in settings.items() if name != "epochs"}
        return train_batches(self.model, weights, state, epochs, **others)

    def _train_with(
        self, term: EmbeddingTerm, weights: Weights, state: OptimizerState, settings: TrainSettings
    ) -> TrainResult:
        raise ConfigError("a loss of embeddings works on all training nodes at once: set batches=full")

    def gradients(self, weights: Weights, streams: Streams) -> dict[str, Tensor]:
        dropout = self._dropout(streams)
        total = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        for batch, share in self.batches(streams("batches")):
            found, _ = gradients(self.model, weights, batch(), loss=self.config.loss, dropout=dropout)
            for name, grad in found.items():
                total[name].add_(grad, alpha=share)
        return total


class ModuleLearner(Learner):
    """Node classification with a module of the user's own, full batch."""

    def __init__(self, data: NodeData, model: nn.Module, config: Hyper) -> None:
        self.model, self.config = model, config
        self.y, self.num_samples, self.num_train = data.y, data.num_nodes, data.num_train
        self.masks: dict[str, Tensor] = {part: getattr(data, part) for part in PARTS} | node_groups(data)
        share = data.train.to(config.dtype)
        if config.class_weight == "balanced":
            share /= torch.bincount(data.y[data.train], minlength=data.num_classes).clamp(min=1)[data.y.clamp(min=0)]
        share /= share.sum().clamp(min=torch.finfo(config.dtype).tiny)
        x = data.x.to_dense() if data.x.layout != torch.strided else data.x
        self.module_data = ModuleData(x.to(config.dtype), data.edge_index, data.y.clamp(min=0), share)

    def _dropout(self, streams: Streams) -> DropoutSource | None:
        return None  # its own layers draw

    def _train(self, weights: Weights, state: OptimizerState, streams: Streams, settings: TrainSettings) -> TrainResult:
        return train_module(self.model, weights, state, self.module_data, streams("dropout"), **settings)

    def gradients(self, weights: Weights, streams: Streams) -> dict[str, Tensor]:
        return module_gradients(self.model, weights, self.module_data, streams("dropout"), self.config.loss)

    def logits(self, weights: Weights) -> Tensor:
        return predict_module(self.model, weights, self.module_data)


def node_learner(data: NodeData, model: nn.Module, config: Hyper) -> NodeLearner | ModuleLearner:
    """The learner of nodes that suits a model: one of ours, or a module of the user's own."""
    if isinstance(model, Backbone) or hasattr(model, "shared_groups"):
        learner = NodeLearner if config.batches == "full" else SampledLearner
        return learner(data, model, config)  # type: ignore[arg-type]
    if config.batches != "full":
        raise ConfigError("mini-batches need one of Isthmus' backbones: choose one, or set batches=full")
    return ModuleLearner(data, model, config)


def need_features(data: GraphSetData | NodeData) -> None:
    """Raise unless nodes have features: every model starts with a map of them."""
    if data.num_features < 1:
        raise DataError("the data have no node features: give them at least one column, e.g. a constant or the degree")


class GraphLearner(Learner):
    """Graph classification on the client's own graphs, mini-batches."""

    def __init__(
        self, data: GraphSetData, model: GraphModel, config: Hyper, extra: Mapping[str, Tensor] | None = None
    ) -> None:
        self.model, self.config = model, config
        self.y, self.num_samples, self.num_train = data.y, data.num_graphs, data.num_train
        self.masks: dict[str, Tensor] = {part: getattr(data, part) for part in PARTS}
        self.pack = pack_graphs(data, extra=extra, dtype=config.dtype)
        self.sample_weight: Tensor | None = None
        if config.class_weight == "balanced":
            counts = torch.bincount(data.y[data.train], minlength=data.num_classes).clamp(min=1)
            self.sample_weight = (1.0 / counts.to(config.dtype))[data.y]
        self._only_scored = False

    @cached_property
    def scored(self) -> dict[str, Tensor]:
        """The parts that are scored: training graphs only where the run asks for it, as they would be predicted for
        that alone.
        """
        return {part: mask for part, mask in self.masks.items() if part != "train" or self.config.score_train}

    @cached_property
    def scored_rows(self) -> Tensor:
        return torch.stack(list(self.scored.values())).any(0).nonzero().flatten()

    @cached_property
    def scored_batches(self) -> list[Batch]:
        return batches_to_predict(self.pack, self.scored_rows)

    @contextmanager
    def scoring(self) -> Iterator[Mapping[str, Tensor]]:
        self._only_scored = True
        try:
            yield self.scored
        finally:
            self._only_scored = False

    def _train(self, weights: Weights, state: OptimizerState, streams: Streams, settings: TrainSettings) -> TrainResult:
        return train_graphs(
            self.model,
            weights,
            state,
            self.pack,
            self.masks["train"],
            batch_size=self.config.batch_size,
            generator=streams("shuffle").torch(),
            sample_weight=self.sample_weight,
            **settings,
        )

    def gradients(self, weights: Weights, streams: Streams) -> dict[str, Tensor]:
        return graph_gradients(
            self.model,
            weights,
            self.pack,
            self.masks["train"],
            loss=self.config.loss,
            dropout=dropout_source(self.config, [streams]),
            sample_weight=self.sample_weight,
        )[0]

    def logits(self, weights: Weights) -> Tensor:
        if not self._only_scored:
            return predict_graphs(self.model, weights, self.pack)
        found = predict_batches(self.model, weights, self.pack, self.scored_batches)
        logits = torch.zeros(self.num_samples, found.shape[1], dtype=found.dtype)
        logits[self.scored_rows] = found
        return logits


class NodeBatchLearner(Learner):
    """Node classification with a model made for sets of graphs, which does not pool: the client's graph is one
    batch.
    """

    def __init__(
        self, data: NodeData, model: GraphModel, config: Hyper, extra: Mapping[str, Tensor] | None = None
    ) -> None:
        self.model, self.config = model, config
        self.y, self.num_samples, self.num_train = data.y, data.num_nodes, data.num_train
        self.masks: dict[str, Tensor] = {part: getattr(data, part) for part in PARTS} | node_groups(data)
        self.batch = node_batch(data.x, data.edge_index, data.y, data.num_classes, extra=extra, dtype=config.dtype)
        self.share = data.train.to(config.dtype)
        if config.class_weight == "balanced":
            self.share /= torch.bincount(data.y[data.train], minlength=data.num_classes).clamp(min=1)[self.batch.y]
        self.share /= self.share.sum().clamp(min=torch.finfo(config.dtype).tiny)

    def _train(self, weights: Weights, state: OptimizerState, streams: Streams, settings: TrainSettings) -> TrainResult:
        return train_batch(self.model, weights, state, self.batch, self.share, **settings)

    def gradients(self, weights: Weights, streams: Streams) -> dict[str, Tensor]:
        return batch_gradients(
            self.model,
            weights,
            self.batch,
            self.share,
            loss=self.config.loss,
            dropout=dropout_source(self.config, [streams]),
        )

    def logits(self, weights: Weights) -> Tensor:
        return predict_batch(self.model, weights, self.batch)


def dropout_source(config: Hyper, streams: Collection[Streams]) -> DropoutSource | None:
    """One generator per client, from its own stream; None where nothing is dropped."""
    if config.dropout == 0.0 and not find_architecture(config.backbone).own_dropout:
        return None
    return DropoutSource([each("dropout").torch() for each in streams])


def node_groups(data: NodeData) -> dict[str, Tensor]:
    """Groups of the test nodes: the client's minority and majority classes, and degrees inside the client."""
    minority = minority_mask(data.y, data.train)
    known = data.y >= 0
    degree = torch.bincount(data.edge_index[1], minlength=data.num_nodes)
    groups = {
        "test:minority": minority,
        "test:majority": ~minority & known if bool(data.train.any()) else torch.zeros_like(minority),
    }
    for low, high in DEGREES:
        name = (
            f"test:degree {low}"
            if high == low
            else f"test:degree {low}+"
            if high is None
            else f"test:degree {low}-{high}"
        )
        groups[name] = (degree >= low) & (degree <= high) if high is not None else degree >= low
    return {name: mask & data.test for name, mask in groups.items()}


def balanced(inputs: Inputs, data: NodeData, config: Hyper) -> Inputs:
    """With ``class_weight=balanced`` every class the client has training nodes of counts the same in its loss."""
    if config.class_weight == "none" or not data.num_train:
        return inputs
    counts = torch.bincount(data.y[data.train], minlength=data.num_classes).clamp(min=1).to(inputs.weight.dtype)
    weight = inputs.weight / counts[inputs.y]
    return replace(inputs, weight=weight / weight.sum())
