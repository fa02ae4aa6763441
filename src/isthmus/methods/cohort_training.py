"""Clients with the same model trained and evaluated together: the `Cohort` of clients that are `ModelClient`s."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from isthmus.errors import RunError
from isthmus.federation.interface import Stacked
from isthmus.federation.roles import Cohort
from isthmus.federation.schema import LazyRows, ScaledRows
from isthmus.methods.evaluation import Counter, Evaluation
from isthmus.methods.learners import NodeLearner, SampledLearner, dropout_source
from isthmus.methods.training import Deployed, ModelClient
from isthmus.nn.backbone import Backbone
from isthmus.nn.buffers import Workspace
from isthmus.nn.client_program import Program, build_program, in_one_loop
from isthmus.nn.client_stack import ClientStack
from isthmus.nn.client_training import aim_of, known_loss, pull_fits
from isthmus.nn.cohort import stack_states, stack_weights, unstack_states, unstack_weights
from isthmus.nn.dropout import DropoutSource
from isthmus.nn.inputs import Inputs, join_inputs, stack_inputs
from isthmus.nn.loss import Loss
from isthmus.nn.optim import OptimizerState, fresh_state
from isthmus.nn.train import ExtraGradient, Proximal, parameter_shapes, predict, train_locally
from isthmus.tensors import Weights

LARGE = 16_384
"""Nodes of a client, on average, above which clients are evaluated one by one: calls then cost nothing beside the
products, and everybody's inputs in one piece would be a second copy of them."""


class ModelCohort(Cohort[Any]):
    """Clients with the same model, trained together: weights and moments stacked (K, ...), one block-diagonal product
    for all.
    """

    MAX_PADDING = 4.0
    pads_less: ClassVar[bool] = False
    """Whether it trains by `train_together` alone, which pads nothing where clients run in one compiled loop."""

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
        if cls.pads_less and in_one_loop(learners[0].model, [learner.inputs for learner in learners]):
            return True  # nothing is padded
        return padding([learner.inputs.rows[0][0] for learner in learners]) <= cls.MAX_PADDING

    def __init__(self, clients: Sequence[Any]) -> None:
        super().__init__(clients)
        self.model, self.config = clients[0].learner.model, clients[0].config
        self.parties = tuple(client.party for client in clients)
        self.workspace = Workspace()
        self._evaluation: _StackedEvaluation | None = None
        self._program: tuple[Program | None, ...] = ()
        self._stack: ClientStack | None = None
        self._weights: dict[str, Tensor] | None = None
        self._optimizer: OptimizerState | None = None

    @cached_property
    def inputs(self) -> Inputs:
        """Training inputs of all clients, padded; only what is not trained by one compiled loop needs them."""
        return stack_inputs(self.training_inputs())

    def training_inputs(self) -> list[Inputs]:
        """What each client trains on."""
        return [client.learner.inputs for client in self.clients]

    def forget_inputs(self) -> None:
        """Clients have other inputs now."""
        self.__dict__.pop("inputs", None)
        self._program, self._evaluation = (), None

    @property
    def weights(self) -> dict[str, Tensor]:
        """Weights of all clients, stacked (K, ...)."""
        if self._weights is None:
            self._weights = (
                stack_weights([client.state.weights for client in self.clients])
                if self._stack is None
                else self._stack.weights()
            )
        return self._weights

    @weights.setter
    def weights(self, weights: dict[str, Tensor]) -> None:
        self._leave_stack()
        self._weights = weights

    @property
    def optimizer(self) -> OptimizerState:
        """Optimiser states of all clients, stacked."""
        self._leave_stack()
        if self._optimizer is None:
            self._optimizer = stack_states([client.state.optimizer for client in self.clients]).copy()
        return self._optimizer

    @optimizer.setter
    def optimizer(self, state: OptimizerState) -> None:
        self._leave_stack()
        self._optimizer = state

    def _leave_stack(self) -> None:
        """Go on with stacked tensors."""
        if self._stack is None:
            return
        states = [self._stack.client(k) for k in range(len(self.clients))]
        self._stack = None
        self._weights = stack_weights([weights for weights, _ in states])
        self._optimizer = stack_states([state for _, state in states])

    def load(self) -> None:
        self._stack, self._weights, self._optimizer = None, None, None  # read where they are needed

    def store(self) -> None:
        if self._stack is not None:
            for k, client in enumerate(self.clients):
                weights, optimizer = self._stack.client(k)
                client.state = replace(client.state, weights=weights, optimizer=optimizer)
            return
        if self._weights is None and self._optimizer is None:
            return
        own = unstack_weights(self.weights)
        for client, weights, optimizer in zip(self.clients, own, unstack_states(self.optimizer), strict=True):
            client.state = replace(client.state, weights=_clone(weights), optimizer=optimizer.copy())

    def dropout(self) -> DropoutSource | None:
        """Every client's own generator of this call."""
        return dropout_source(self.config, [client.stream for client in self.clients])

    def train_together(self, received: Weights, shares: Tensor | None = None, loss: Loss | None = None) -> None:
        """One round of local epochs at every client, from ``received`` where given and from its own weights
        elsewhere.

        Args:
            shares: With which `scaled_weights` will be asked for.
            loss: In the place of the config's, for `inputs`.
        """
        config = self.config
        goal = config.loss if loss is None else loss
        if self._train_in_one_loop(received, shares, goal):
            return
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
            loss=goal,
            extra_gradient=self.extra_gradient(received),
            frozen=self.frozen(),
            dropout=self.dropout(),
            donate=True,
            workspace=self.workspace,
        )
        self.weights, self.optimizer = result.weights, result.optimizer_state

    def _train_in_one_loop(self, received: Weights, shares: Tensor | None, loss: str | Loss) -> bool:
        """`train_together` by `ClientStack` where model, loss and further terms allow it."""
        config, term, frozen = self.config, self.extra_gradient(received), frozenset(self.frozen())
        if not known_loss(loss) or not (term is None or isinstance(term, Proximal)):
            return False
        program = self.program()
        pull = (term.mu, term.anchor) if isinstance(term, Proximal) else None
        if program is None or frozen.intersection(program.first) or not pull_fits(program, pull):
            return False
        if self._stack is None:
            if self._weights is None and self._optimizer is None:
                states = [client.state for client in self.clients]
                self._stack = ClientStack(program, [s.weights for s in states], [s.optimizer for s in states])
            else:
                self._stack = ClientStack(program, unstack_weights(self.weights), unstack_states(self.optimizer))
        self._weights, self._optimizer = None, None
        aim, _ = aim_of(loss, program, lambda rows: self.inputs.unpad(rows))
        self._stack.train(
            received,
            optimizer=config.optimizer,
            epochs=config.local_epochs,
            lr=config.rate(self.clients[0].round),
            weight_decay=config.weight_decay,
            pull=pull,
            trained=[name for name in self._stack.names if name not in frozen],
            dropout=self.dropout(),
            aim=aim,
            shares=shares,
        )
        return True

    def program(self) -> Program | None:
        """The compiled loop of all clients, None where there is none."""
        if not self._program:
            self._program = (build_program(self.model, self.training_inputs(), compact=True),)
        return self._program[0]

    def restart_optimizer(self) -> None:
        """A fresh optimiser at every client."""
        if self._stack is not None:
            self._stack.restart()
        else:
            self.optimizer = fresh_state(self.config.optimizer, self.weights, clients=len(self.clients))

    def extra_gradient(self, received: Weights) -> ExtraGradient | None:
        """Every client's own further loss term: one object where all have the same, else client after client."""
        if type(self.clients[0]).extra_gradient is ModelClient.extra_gradient:
            return None
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
        if type(self.clients[0]).frozen is ModelClient.frozen:
            return ()
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
        if self._stack is None:
            whole = {name: tensor.expand(len(self.clients), *tensor.shape) for name, tensor in common.weights.items()}
            self.weights = {**self.weights, **whole}
        else:
            self._stack.receive(common.weights)
            self._weights = None
        if self._evaluation is None:
            self._evaluation = _StackedEvaluation(self.clients)
        # Plain weights where nothing is personal: one product for the whole cohort.
        names = parameter_shapes(self.model).keys()
        weights = dict(common.weights) if common.weights.keys() == names else self.weights
        return self.scored(self._evaluation.score(self.model, weights))

    def scored(self, evaluation: Evaluation) -> Stacked[Evaluation]:
        """Evaluations of all; each client finds its own again when it is asked for its bins."""
        stacked = Stacked(evaluation, self.parties)
        for k, client in enumerate(self.clients):
            client.scratch.scored, client.scratch.logits = partial(stacked.row, k), None
        return stacked

    def shares(self, total: float) -> Any:
        """n_k / n of all clients (K,); stands for a number in a stacked message."""
        return torch.tensor([client.samples() / total for client in self.clients], dtype=torch.float64)

    def scaled(self, weights: Mapping[str, Tensor], shares: Tensor) -> Any:
        """Pre-weighted tensors of all clients, not yet multiplied out; stands for weights in a stacked message."""
        return {name: ScaledRows(tensor, shares) for name, tensor in weights.items()}

    def scaled_weights(self, names: Iterable[str], shares: Tensor) -> Any:
        """`scaled` of the clients' weights of these names."""
        stack = self._stack
        if stack is None:
            return self.scaled({name: self.weights[name] for name in names}, shares)
        return {
            name: LazyRows(
                partial(_scaled_row, stack, name, shares), partial(stack.total, name, shares), stack.like(name)
            )
            for name in names
        }


def padding(rows: Sequence[int]) -> float:
    """How many rows there are with every client padded to the largest, for each that is one."""
    counts = [max(1, count) for count in rows]
    return len(counts) * max(counts) / sum(counts)


class _StackedEvaluation:
    """Tallies of all clients at once."""

    def __init__(self, clients: Sequence[ModelClient[Any]]) -> None:
        self.learners: Any = [client.learner for client in clients]
        self.counter = Counter([learner.y for learner in self.learners], [learner.masks for learner in self.learners])

    @cached_property
    def joined(self) -> Inputs:
        """Everybody's nodes, for a model that all share."""
        return join_inputs([learner.everything for learner in self.learners])

    @cached_property
    def stacked(self) -> Inputs:
        """Everybody's nodes, padded, for a model of each."""
        return stack_inputs([learner.everything for learner in self.learners])

    def score(self, model: Backbone, weights: Weights) -> Evaluation:
        common = all(weights[name].shape == shape for name, shape in parameter_shapes(model).items())
        counts = [learner.num_samples for learner in self.learners]
        large = sum(counts) > LARGE * len(counts)
        if common and not large:
            logits = predict(model, weights, self.joined)
        elif not common and not large and padding(counts) <= ModelCohort.MAX_PADDING:
            logits = predict(model, weights, self.stacked)
        else:
            own = [weights] * len(counts) if common else unstack_weights(weights)
            logits = torch.cat([predict(model, own[k], each.everything) for k, each in enumerate(self.learners)])
        return self.counter.stacked(logits)


def _scaled_row(stack: ClientStack, name: str, shares: Tensor, k: int) -> Tensor:
    return stack.row(name, k) * shares[k]


def _clone(weights: Weights) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}
