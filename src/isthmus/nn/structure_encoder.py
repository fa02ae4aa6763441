r"""The feature-structure encoder of FedSpray: soft labels from a node's features and a vector that stands for its
neighbourhood.

.. math::
    e_i = \mathrm{ReLU}(x_i W_e + b_e), \quad q_i = \mathrm{softmax}(e_i W_q + b_q), \quad p_i = \mathrm{softmax}((e_i +
    s_i) W_p + b_p)

    symbol     here
    omega_e    ``embed.weight`` (F, d), ``embed.bias`` (d,)
    omega_p    ``classify.weight`` (d, C), ``classify.bias`` (C,)
    omega_q    ``project.weight`` (d, C), ``project.bias`` (C,)
    S          class proxies (C, d)
    s_i        labelled: a row of ``proxies`` (m, d); any other node: the expectation :math:`\sum_j q_{ij} s_j`, never
               stored

All functions work on K clients side by side, rows padded to the largest client, as `isthmus.nn.inputs` does. Clients'
own encoders carry a leading client dimension; K = 1 has none. Gradients are written by hand: the network is three
affine maps, and the first one reads sparse features (`isthmus.nn.first_layer_input`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from isthmus.nn.dense import add_bias, bias_grad, matmul, matmul_grads
from isthmus.nn.first_layer_input import Operand, build_operand, stack_operands
from isthmus.nn.fused_optimizer import StepPlan, StepTensors, step_dense
from isthmus.nn.inputs import Nodes
from isthmus.nn.kernels import activate, activate_grad
from isthmus.nn.loss import cross_entropies
from isthmus.nn.optim import OptimizerState, Stepper, step_plan
from isthmus.nn.sparse import as_csr
from isthmus.nn.train import local_epochs
from isthmus.seeds import Stream
from isthmus.tensors import Weights

PROXIES = "proxies"
"""Name of the node proxies among an optimiser's moments."""


@dataclass(frozen=True, eq=False)
class EncoderInputs:
    """What the encoder reads of K clients; constant over rounds.

    Args:
        clients: K.
        nodes: Features of all nodes (K p, F).
        labelled: Features of the training nodes (K m, F).
        at: Row of each training node among all nodes (M,), M training nodes in all.
        slot: Its row among the padded training nodes (M,).
        owner: Client of each row of ``nodes`` (K p,); -1 in padding.
        y: Class of each padded training node (K m,); 0 in padding.
        weight: What each counts in its client's mean (K m,), 1 / (its training nodes) unless classes are
            weighted; 0 in padding.
    """

    clients: int
    nodes: Operand
    labelled: Operand
    at: Tensor
    slot: Tensor
    owner: Tensor
    y: Tensor
    weight: Tensor

    def truth(self, num_classes: int) -> Tensor:
        """The labels as rows that sum to their weight (K m, C)."""
        if num_classes not in self._truth:
            self._truth[num_classes] = torch.nn.functional.one_hot(self.y, num_classes).to(
                self.weight.dtype
            ) * self.weight.unsqueeze(1)
        return self._truth[num_classes]

    @cached_property
    def _truth(self) -> dict[int, Tensor]:
        return {}


@dataclass(frozen=True)
class EncoderResult:
    """What training the encoder ends with; ``loss`` (K,) is L_F before the last step."""

    weights: dict[str, Tensor]
    proxies: Tensor
    optimizer_state: OptimizerState
    loss: Tensor


def first_encoder(
    num_features: int, width: int, num_classes: int, stream: Stream, *, classifier: bool = True
) -> dict[str, Tensor]:
    """omega_0: weights and biases uniform +-1/sqrt(out), fan-*out*, as the reference code draws them."""
    shapes = {"embed": (num_features, width), "classify": (width, num_classes), "project": (width, num_classes)}
    weights: dict[str, Tensor] = {}
    for part, (fan_in, fan_out) in shapes.items():
        if part == "classify" and not classifier:
            continue
        generator, bound = stream.child(part).torch(), 1.0 / math.sqrt(fan_out)
        weights[f"{part}.weight"] = torch.empty(fan_in, fan_out).uniform_(-bound, bound, generator=generator)
        weights[f"{part}.bias"] = torch.empty(fan_out).uniform_(-bound, bound, generator=generator)
    return weights


def encoder_inputs(
    data: Nodes, train: Tensor, dtype: torch.dtype, class_weights: Tensor | None = None
) -> EncoderInputs:
    """Inputs of one client. ``class_weights``: what a training node counts by its class (C,), 1 on average."""
    x = as_csr(data.x)
    at = train.nonzero().flatten()
    count, rows = int(at.numel()), data.num_nodes
    y, weight = torch.zeros(max(1, count), dtype=torch.int64), torch.zeros(max(1, count), dtype=dtype)
    y[:count] = data.y[at]
    weight[:count] = 1.0 / max(1, count)
    if class_weights is not None:
        weight[:count] *= class_weights[y[:count]]
    return EncoderInputs(
        clients=1,
        nodes=build_operand(x, None, np.arange(rows), rows, input_norm=False, dtype=dtype),
        labelled=build_operand(x, None, at.numpy(), max(1, count), input_norm=False, dtype=dtype),
        at=at,
        slot=torch.arange(count),
        owner=torch.zeros(rows, dtype=torch.int64),
        y=y,
        weight=weight,
    )


def stack_encoder_inputs(items: Sequence[EncoderInputs]) -> EncoderInputs:
    """Many clients' inputs as one cohort, in the given order."""
    rows, labelled = max(len(item.owner) for item in items), max(len(item.y) for item in items)
    y, weight = items[0].y.new_zeros(len(items), labelled), items[0].weight.new_zeros(len(items), labelled)
    owner = torch.full((len(items), rows), -1, dtype=torch.int64)
    for k, item in enumerate(items):
        y[k, : len(item.y)], weight[k, : len(item.y)], owner[k, : len(item.owner)] = item.y, item.weight, k
    return EncoderInputs(
        clients=len(items),
        nodes=stack_operands([item.nodes for item in items], rows),
        labelled=stack_operands([item.labelled for item in items], labelled),
        at=torch.cat([item.at + k * rows for k, item in enumerate(items)]),
        slot=torch.cat([item.slot + k * labelled for k, item in enumerate(items)]),
        owner=owner.view(-1),
        y=y.view(-1),
        weight=weight.view(-1),
    )


def embed(weights: Weights, features: Operand) -> Tensor:
    """e_i of the rows of ``features`` (R, d)."""
    e = add_bias(features.forward(weights["embed.weight"]), weights["embed.bias"])
    activate(e, None)
    return e


def head(weights: Weights, part: str, e: Tensor) -> Tensor:
    """Logits of the classifier or the projector on ``e``."""
    return add_bias(matmul(e, weights[f"{part}.weight"]), weights[f"{part}.bias"])


@torch.no_grad()
def soft_labels(weights: Weights, classes: Tensor, proxies: Tensor, inputs: EncoderInputs) -> tuple[Tensor, Tensor]:
    """(p, q) of all nodes under the common encoder, (K p, C) each; without a classifier p is q.

    The proxy of a node without label is an expectation, so its part in the logits is ``q (S W_p)``: no (nodes, d)
    matrix is made.

    Args:
        classes: S (C, d).
        proxies: s_i of the training nodes (K m, d).
    """
    e = embed(weights, inputs.nodes)
    q = torch.softmax(head(weights, "project", e), dim=-1)
    if "classify.weight" not in weights:
        return q, q
    mapped = q @ (classes @ weights["classify.weight"])
    mapped[inputs.at] = (proxies @ weights["classify.weight"])[inputs.slot]
    return torch.softmax(head(weights, "classify", e) + mapped, dim=-1), q


def taught(q: Tensor, inputs: EncoderInputs, confidence: float) -> Tensor:
    """Which rows the encoder teaches (K p,): training nodes, and others with max_j q_ij above ``confidence``."""
    chosen = (q.max(dim=-1).values > confidence) & (inputs.owner >= 0)
    chosen[inputs.at] = True
    return chosen


def teaching_weight(q: Tensor, inputs: EncoderInputs, confidence: float, strength: float) -> Tensor:
    """``strength`` times the mean over the rows each client is taught at, as weights of rows (K p,)."""
    rows = taught(q, inputs, confidence).to(q.dtype).view(inputs.clients, -1)
    return (rows * (strength / rows.sum(dim=1, keepdim=True).clamp(min=1.0))).view(-1)


def train_encoder(
    weights: Weights,
    proxies: Tensor,
    optimizer_state: OptimizerState,
    inputs: EncoderInputs,
    predicted: Tensor,
    *,
    epochs: int,
    lr: float,
    proxy_lr: float,
    lambda2: float,
    optimizer: str = "adam",
    weight_decay: float = 0.0,
    train_proxies: bool = True,
) -> EncoderResult:
    """``epochs`` full-batch steps on omega and the training nodes' proxies.

    .. math:: L_F = \\mathrm{mean}_{V_L} CE(y_i, q_i) + \\lambda_2\\, \\mathrm{mean}_{V_L} KL(\\hat y_i \\| p_i)

    Args:
        weights: To start from; for K > 1 stacked (K, ...). Not changed.
        proxies: s_i (K m, d). Not changed.
        optimizer_state: Moments of the weights and, as ``proxies``, of the proxies. Not changed.
        predicted: yhat_i of the training nodes (K m, C), a constant here.
        train_proxies: False leaves the proxies where they are.
    """
    current = {name: tensor.clone() for name, tensor in weights.items()}
    moved = current | {PROXIES: proxies.clone()}
    stepper = Stepper(optimizer, moved, optimizer_state.copy(), steps=epochs, lr=lr, weight_decay=weight_decay)
    proxy_plan = step_plan(optimizer, optimizer_state.steps, epochs, proxy_lr, 0.0, proxies.dtype)

    def step_gradients(_: None) -> tuple[dict[str, Tensor], Tensor]:
        e, grads, e_grad, node_grad, loss = gradients(current, moved[PROXIES], inputs, predicted, lambda2)
        e_grad = activate_grad(e_grad, e, None)
        grads["embed.bias"] = bias_grad(e_grad, current["embed.bias"])
        _step_features(inputs.labelled, e_grad, stepper.tensors("embed.weight"), stepper.plan)
        if train_proxies and node_grad is not None:  # at a rate of their own
            step_dense(node_grad, stepper.tensors(PROXIES), replace(proxy_plan, step=stepper.taken))
        return grads, loss

    loss = local_epochs(step_gradients, stepper, epochs).to(proxies.dtype)
    return EncoderResult(current, moved[PROXIES], stepper.state, loss)


def gradients(
    weights: Weights, proxies: Tensor, inputs: EncoderInputs, predicted: Tensor, lambda2: float
) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor | None, Tensor]:
    """L_F and its gradients on the training nodes.

    Returns:
        e_i; gradients of the two heads by name; of e_i; of s_i (None without the second term); the loss of each client
        (K,). The projector learns from the labels only, the classifier from the predictions only.
    """
    e = embed(weights, inputs.labelled)
    q = head(weights, "project", e)
    loss, q_grad = cross_entropies(q, inputs.truth(q.shape[-1]), inputs.weight, inputs.clients)
    e_grad, weight_grad = matmul_grads(e, weights["project.weight"], q_grad)
    grads = {"project.weight": weight_grad, "project.bias": bias_grad(q_grad, weights["project.bias"])}
    node_grad: Tensor | None = None
    if lambda2 and "classify.weight" in weights:
        combined, share = e + proxies, lambda2 * inputs.weight
        targets = predicted * share.unsqueeze(1)
        entropy = torch.xlogy(targets, predicted).view(inputs.clients, -1).sum(1)
        second, p_grad = cross_entropies(head(weights, "classify", combined), targets, share, inputs.clients)
        loss = loss + entropy + second
        node_grad, weight_grad = matmul_grads(combined, weights["classify.weight"], p_grad)
        grads |= {"classify.weight": weight_grad, "classify.bias": bias_grad(p_grad, weights["classify.bias"])}
        e_grad = e_grad + node_grad
    return e, grads, e_grad, node_grad, loss


def class_means(proxies: Tensor, inputs: EncoderInputs, num_classes: int) -> Tensor:
    """s_j^k: mean of the final s_i over the client's training nodes of class j, zero where it has none. (K, C, d)"""
    group = inputs.slot // (len(inputs.y) // inputs.clients) * num_classes + inputs.y[inputs.slot]
    counts = torch.bincount(group, minlength=inputs.clients * num_classes).clamp(min=1).to(proxies.dtype)
    sums = proxies.new_zeros(len(counts), proxies.shape[1]).index_add_(0, group, proxies[inputs.slot])
    return (sums / counts.unsqueeze(1)).view(inputs.clients, num_classes, -1)


def _step_features(operand: Operand, grad: Tensor, tensors: StepTensors, plan: StepPlan) -> None:
    if operand.blocks is not None:
        operand.step(grad, tensors, plan)
    else:
        step_dense(operand.backward(grad, tensors.weight)[0], tensors, plan)
