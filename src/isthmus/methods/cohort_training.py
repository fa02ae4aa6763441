"""Clients with the same model trained and evaluated together: the `Cohort` of clients that are `ModelClient`s."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isthmus.errors import RunError
from isthmus.federation.interface import Stacked
from isthmus.federation.roles import Cohort
from isthmus.federation.schema import ScaledRows
from isthmus.methods.evaluation import Evaluation, Tally
from isthmus.methods.learners import NodeLearner, SampledLearner, dropout_source
from isthmus.methods.training import Deployed, ModelClient
from isthmus.nn.backbone import Backbone
from isthmus.nn.buffers import Workspace
from isthmus.nn.cohort import stack_states, stack_weights, unstack_states, unstack_weights
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.inputs import stack_inputs
from isthmus.nn.optim import OptimizerState
from isthmus.nn.train import ExtraGradient, Proximal, predict, train_locally
from isthmus.tensors import Weights


class ModelCohort(Cohort[Any]):
    """Clients with the same model, trained together: weights and moments stacked (K, ...), one block-diagonal product
    for all.
    """

    MAX_PADDING = 4.0

    @classmethod
    def worthwhile(cls, clients: Sequence[Any]) -> bool:
        """Every client is padded to the largest; beyond this factor the padding costs more than it saves."""
        learners = [client.learner for client in clients]
        if len(learners) < 2 or clients[0].config.one_by_one:
            return False
        if not all(isinstance(each, NodeLearner) and getattr(each.model, "cohort", True) for each in learners):
            return False
        if any(isinstance(each, SampledLearner) for each in learners):
            return False
        rows: list[int] = [max(1, learner.inputs.rows[0][0]) for learner in learners]
        return len(rows) * max(rows) <= cls.MAX_PADDING * sum(rows)

    def __init__(self, clients: Sequence[Any]) -> None:
        super().__init__(clients)
        self.model, self.config = clients[0].learner.model, clients[0].config
        self.parties = tuple(client.party for client in clients)
        self.inputs = stack_inputs([client.learner.inputs for client in clients])
        self.workspace = Workspace()
        self._evaluation: _StackedEvaluation | None = None
        self.weights: dict[str, Tensor]
        self.optimizer: OptimizerState

    def load(self) -> None:
        self.weights = stack_weights([client.state.weights for client in self.clients])
        self.optimizer = stack_states([client.state.optimizer for client in self.clients]).copy()

    def store(self) -> None:
        weights = unstack_weights(self.weights)
        for client, own, optimizer in zip(self.clients, weights, unstack_states(self.optimizer), strict=True):
            client.state = replace(client.state, weights=_clone(own), optimizer=optimizer.copy())

    def dropout(self) -> DropoutSource | None:
        """Every client's own generator of this call."""
        return dropout_source(self.config, [client.stream for client in self.clients])

    def train_together(self, received: Weights) -> None:
        """One round of local epochs at every client, from ``received`` where given and from its own weights
        elsewhere.
        """
        config = self.config
        own = {name: tensor for name, tensor in self.weights.items() if name not in received}
        result = train_locally(
            self.model,
            {name: own[name] if name in own else received[name] for name in self.weights},
            self.optimizer,
            self.inputs,
            epochs=config.local_epochs,
            lr=config.rate(self.clients[0].round),
            weight_decay=config.weight_decay,
            optimizer=config.optimizer,
            loss=config.loss,
            extra_gradient=self.extra_gradient(received),
            frozen=self.frozen(),
            dropout=self.dropout(),
            donate=True,
            workspace=self.workspace,
        )
        self.weights, self.optimizer = result.weights, result.optimizer_state

    def extra_gradient(self, received: Weights) -> ExtraGradient | None:
        """Every client's own further loss term: one object where all have the same, else client after client."""
        terms: list[ExtraGradient | None] = [client.extra_gradient(received) for client in self.clients]
        first = terms[0]
        if all(term is first for term in terms) or (
            isinstance(first, Proximal)
            and all(isinstance(t, Proximal) and t.mu == first.mu and t.anchor is first.anchor for t in terms)
        ):
            return first

        def each_its_own(weights: Weights, grads: Mapping[str, Tensor]) -> None:
            for k, term in enumerate(terms):
                if term is not None:
                    term(
                        {name: tensor[k] for name, tensor in weights.items()},
                        {name: tensor[k] for name, tensor in grads.items()},
                    )

        return each_its_own

    def frozen(self) -> Collection[str]:
        """Names of weights that no client trains."""
        names = {frozenset(client.frozen()) for client in self.clients}
        if len(names) > 1:
            raise RunError("clients that train together must freeze the same weights: run with execution=each")
        return names.pop()

    def evaluate(self) -> Stacked[Evaluation]:
        """`ModelClient.evaluate` for all."""
        if self._evaluation is None:
            self._evaluation = _StackedEvaluation(self.clients)
        return self.scored(self._evaluation.score(self.model, self.weights))

    def deploy(self, common: Deployed) -> Stacked[Evaluation]:
        """`ModelClient.deploy` for all."""
        expanded = {name: tensor.expand(len(self.clients), *tensor.shape) for name, tensor in common.weights.items()}
        self.weights = {**self.weights, **expanded}
        if self._evaluation is None:
            self._evaluation = _StackedEvaluation(self.clients)
        # Plain weights where nothing is personal: one product for the whole cohort.
        weights = dict(common.weights) if common.weights.keys() == self.weights.keys() else self.weights
        return self.scored(self._evaluation.score(self.model, weights))

    def scored(self, evaluation: Evaluation) -> Stacked[Evaluation]:
        """Evaluations of all; each client finds its own again when it is asked for its bins."""
        stacked = Stacked(evaluation, self.parties)
        for k, client in enumerate(self.clients):
            client.scratch.scored = partial(stacked.row, k)
        return stacked

    def shares(self, total: float) -> Any:
        """n_k / n of all clients (K,); stands for a number in a stacked message."""
        return torch.tensor([client.samples() / total for client in self.clients], dtype=torch.float64)

    def scaled(self, weights: Mapping[str, Tensor], shares: Tensor) -> Any:
        """Pre-weighted tensors of all clients, not yet multiplied out; stands for weights in a stacked message."""
        return {name: ScaledRows(tensor, shares) for name, tensor in weights.items()}


class _StackedEvaluation:
    """Tallies of all clients at once."""

    def __init__(self, clients: Sequence[ModelClient[Any]]) -> None:
        learners: Any = [client.learner for client in clients]
        self.inputs = stack_inputs([learner.everything for learner in learners])
        self.owner = torch.repeat_interleave(
            torch.arange(len(clients)), torch.tensor([learner.num_samples for learner in learners])
        )
        self.y = torch.cat([learner.y for learner in learners])
        self.rows = {
            part: torch.cat([learner.masks[part] for learner in learners]).nonzero().flatten()
            for part in learners[0].masks
        }
        self.clients = len(clients)

    def score(self, model: Backbone, weights: Weights) -> Evaluation:
        logits = predict(model, weights, self.inputs)
        loss = torch.nn.functional.cross_entropy(
            logits, self.y.clamp(min=0), reduction="none"
        )  # unlabelled nodes (-1) are in no part
        right = (logits.argmax(1) == self.y).long()
        parts: dict[str, Any] = {}
        for part, rows in self.rows.items():
            owner = self.owner[rows]
            counts: Any = torch.bincount(owner, minlength=self.clients)
            correct: Any = torch.zeros(self.clients, dtype=torch.int64).index_add_(0, owner, right[rows])
            losses: Any = torch.zeros(self.clients, dtype=torch.float64).index_add_(0, owner, loss[rows].double())
            parts[part] = Tally(correct, counts, losses)
        return Evaluation(parts)


def _clone(weights: Weights) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}
