"""The feature-structure encoder: its algebra on small numbers, its written-out gradients against autograd, and
padding.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div

from isthmus.data.node_data import NodeData
from isthmus.nn.inputs import build_inputs
from isthmus.nn.loss import cross_entropies, distilled, get_loss
from isthmus.nn.optim import fresh_state
from isthmus.nn.registry import build_backbone
from isthmus.nn.structure_encoder import (
    PROXIES,
    EncoderInputs,
    class_means,
    embed,
    encoder_inputs,
    first_encoder,
    gradients,
    head,
    soft_labels,
    stack_encoder_inputs,
    taught,
    train_encoder,
)
from isthmus.seeds import Stream

WIDTH, CLASSES, FEATURES = 5, 3, 7


def nodes(count: int, seed: int, *, train: int, sparse: bool = False) -> NodeData:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, FEATURES, generator=generator, dtype=torch.float64)
    if sparse:
        x = x * (torch.rand(count, FEATURES, generator=generator) < 0.2)
    y = torch.randint(0, CLASSES, (count,), generator=generator)
    mask = torch.zeros(count, dtype=torch.bool)
    mask[torch.randperm(count, generator=generator)[:train]] = True
    edges = torch.randint(0, count, (2, 2 * count), generator=generator)
    edges = torch.cat([edges, edges.flip(0)], dim=1)
    return NodeData(x.float(), edges, y, mask, ~mask, torch.zeros_like(mask), torch.arange(count), CLASSES)


def encoder(seed: int = 0) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in first_encoder(FEATURES, WIDTH, CLASSES, Stream(seed)).items()}


def inputs_of(data: NodeData) -> EncoderInputs:
    return encoder_inputs(data, data.train, torch.float64)


def random(*shape: int, seed: int = 3) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference_loss(
    weights: dict[str, Tensor], x: Tensor, y: Tensor, s: Tensor, predicted: Tensor, lambda2: float
) -> Tensor:
    """L_F as the paper writes it, all dense."""
    e = torch.relu(x @ weights["embed.weight"] + weights["embed.bias"])
    q = e @ weights["project.weight"] + weights["project.bias"]
    log_p = torch.log_softmax((e + s) @ weights["classify.weight"] + weights["classify.bias"], dim=-1)
    kl = (predicted * (predicted.log() - log_p)).sum(-1).mean()
    return torch.nn.functional.cross_entropy(q, y) + lambda2 * kl


@pytest.mark.parametrize("sparse", [False, True])
def test_manual_gradients_are_autograds(sparse: bool) -> None:
    data = nodes(12, 1, train=6, sparse=sparse)
    inputs, predicted = inputs_of(data), torch.softmax(random(6, CLASSES), dim=-1)
    weights = {name: tensor.requires_grad_() for name, tensor in encoder().items()}
    s = random(6, WIDTH, seed=8).requires_grad_()
    loss = reference_loss(weights, data.x[data.train].double(), data.y[data.train], s, predicted, 0.7)
    loss.backward()  # type: ignore[no-untyped-call]
    plain = {name: tensor.detach() for name, tensor in weights.items()}
    e, grads, e_grad, node_grad, value = gradients(plain, s.detach(), inputs, predicted, 0.7)
    assert value.item() == pytest.approx(loss.item(), rel=1e-12)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, weights[name].grad, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(node_grad, s.grad, rtol=1e-10, atol=1e-14)
    z_grad = e_grad * (e > 0)
    torch.testing.assert_close(
        data.x[data.train].double().T @ z_grad, weights["embed.weight"].grad, rtol=1e-10, atol=1e-14
    )


def test_the_projector_hears_labels_and_the_classifier_predictions() -> None:
    data = nodes(12, 1, train=6)
    inputs, weights, s = inputs_of(data), encoder(), random(6, WIDTH)
    predictions = [torch.softmax(random(6, CLASSES, seed=seed), dim=-1) for seed in (1, 2)]
    first, second = (gradients(weights, s, inputs, predicted, 1.0)[1] for predicted in predictions)
    assert torch.equal(first["project.weight"], second["project.weight"])
    assert not torch.equal(first["classify.weight"], second["classify.weight"])
    relabelled = replace(inputs, y=(inputs.y + 1) % CLASSES)
    third = gradients(weights, s, relabelled, predictions[0], 1.0)[1]
    assert torch.equal(first["classify.weight"], third["classify.weight"])
    assert not torch.equal(first["project.weight"], third["project.weight"])


def test_training_equals_adam_on_the_dense_formula() -> None:
    data = nodes(14, 4, train=6, sparse=True)
    inputs, predicted = inputs_of(data), torch.softmax(random(6, CLASSES), dim=-1)
    start, s0 = encoder(), random(6, WIDTH, seed=8)
    state = fresh_state("adam", {**start, PROXIES: s0})
    result = train_encoder(start, s0, state, inputs, predicted, epochs=4, lr=0.01, proxy_lr=0.05, lambda2=0.7)
    again = train_encoder(
        result.weights,
        result.proxies,
        result.optimizer_state,
        inputs,
        predicted,
        epochs=3,
        lr=0.01,
        proxy_lr=0.05,
        lambda2=0.7,
    )
    weights, s = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}, s0.clone().requires_grad_()
    adam = torch.optim.Adam([{"params": list(weights.values()), "lr": 0.01}, {"params": [s], "lr": 0.05}])
    for _ in range(7):
        adam.zero_grad()
        reference_loss(weights, data.x[data.train].double(), data.y[data.train], s, predicted, 0.7).backward()  # type: ignore[no-untyped-call]
        adam.step()
    for name, tensor in weights.items():
        torch.testing.assert_close(again.weights[name], tensor.detach(), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(again.proxies, s.detach(), rtol=1e-9, atol=1e-11)
    assert torch.equal(start["embed.weight"], encoder()["embed.weight"])  # what was given is not changed


def test_soft_labels_are_the_full_tensors() -> None:
    """Rows of unlabelled nodes are never stored; p is what it would be with the whole (n, d) tensor of proxies."""
    data = nodes(12, 1, train=5)
    inputs, weights, classes, s = inputs_of(data), encoder(), random(CLASSES, WIDTH), random(5, WIDTH, seed=9)
    p, q = soft_labels(weights, classes, s, inputs)
    full = q @ classes
    full[data.train] = s
    e = torch.relu(data.x.double() @ weights["embed.weight"] + weights["embed.bias"])
    expected = torch.softmax((e + full) @ weights["classify.weight"] + weights["classify.bias"], dim=-1)
    torch.testing.assert_close(p, expected, rtol=1e-12, atol=1e-14)
    low, high = classes.min(0).values, classes.max(0).values
    assert bool(((full[~data.train] >= low - 1e-12) & (full[~data.train] <= high + 1e-12)).all())  # convex combinations


def test_a_certain_projector_picks_one_proxy() -> None:
    data = nodes(6, 1, train=1)
    weights, classes = encoder(), random(CLASSES, WIDTH)
    weights["project.bias"][2] = 800.0  # q is one-hot exactly
    inputs = inputs_of(data)
    p, q = soft_labels(weights, classes, torch.zeros(1, WIDTH, dtype=torch.float64), inputs)
    assert q[~data.train, 2].tolist() == [1.0] * 5
    logits = head(weights, "classify", embed(weights, inputs.nodes) + classes[2])
    torch.testing.assert_close(p[~data.train], torch.softmax(logits, dim=-1)[~data.train], rtol=1e-12, atol=1e-14)


def test_who_is_taught() -> None:
    data = nodes(12, 1, train=5)
    inputs, q = inputs_of(data), torch.softmax(4 * random(12, CLASSES), dim=-1)
    assert bool(taught(q, inputs, 0.0).all())
    assert torch.equal(taught(q, inputs, 1.0), data.train)
    some = taught(q, inputs, 0.7)
    assert torch.equal(some, data.train | (q.max(1).values > 0.7))
    assert bool((some & ~data.train).any())


def test_cross_entropies_by_hand() -> None:
    """Two clients of two rows; a row without weight counts nothing, and a target may be zero."""
    logits = random(4, 3).requires_grad_()
    targets = torch.tensor([[0.5, 0.5, 0.0], [0.1, 0.2, 0.1], [0.0, 0.0, 2.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    loss, grad = cross_entropies(logits.detach(), targets, targets.sum(1), 2)
    by_hand = -(targets * torch.log_softmax(logits, -1)).sum(1).view(2, 2).sum(1)
    torch.testing.assert_close(loss, by_hand.detach())
    by_hand.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(grad, logits.grad)


def test_class_means() -> None:
    data = nodes(9, 2, train=5)
    inputs, s = inputs_of(data), random(5, WIDTH)
    means = class_means(s, inputs, CLASSES + 1)[0]
    for j in range(CLASSES):
        rows = s[inputs.y == j]
        torch.testing.assert_close(means[j], rows.mean(0) if len(rows) else torch.zeros(WIDTH, dtype=torch.float64))
    assert torch.equal(means[CLASSES], torch.zeros(WIDTH, dtype=torch.float64))  # a class the client has not


@pytest.mark.parametrize("sparse", [False, True])
def test_clients_side_by_side_end_where_they_end_alone(sparse: bool) -> None:
    datas = [
        nodes(12, 1, train=6, sparse=sparse),
        nodes(9, 2, train=3, sparse=sparse),
        nodes(5, 3, train=0, sparse=sparse),
    ]
    single, common, classes = [inputs_of(data) for data in datas], encoder(), random(CLASSES, WIDTH)
    stacked = stack_encoder_inputs(single)
    rows = len(stacked.y) // len(datas)
    s = torch.zeros(len(datas), rows, WIDTH, dtype=torch.float64)
    predicted = torch.full((len(datas), rows, CLASSES), 1 / CLASSES, dtype=torch.float64)
    for k, inputs in enumerate(single):
        s[k, : len(inputs.y)] = random(len(inputs.y), WIDTH)
        predicted[k, : len(inputs.y)] = torch.softmax(random(len(inputs.y), CLASSES), -1)
    p, q = soft_labels(common, classes, s.view(-1, WIDTH), stacked)
    weights = {name: tensor.expand(len(datas), *tensor.shape) for name, tensor in common.items()}
    settings = {"epochs": 3, "lr": 0.01, "proxy_lr": 0.05, "lambda2": 0.7}
    state = fresh_state(
        "adam", {**{n: t.contiguous() for n, t in weights.items()}, PROXIES: s.view(-1, WIDTH)}, clients=len(datas)
    )
    together = train_encoder(weights, s.view(-1, WIDTH), state, stacked, predicted.view(-1, CLASSES), **settings)  # type: ignore[arg-type]
    padded = len(stacked.owner) // len(datas)
    for k, (inputs, data) in enumerate(zip(single, datas, strict=True)):
        own_p, own_q = soft_labels(common, classes, s[k, : len(inputs.y)], inputs)
        torch.testing.assert_close(p.view(len(datas), padded, -1)[k, : data.num_nodes], own_p)
        chosen = taught(q, stacked, 0.4).view(len(datas), padded)[k]
        assert torch.equal(chosen[: data.num_nodes], taught(own_q, inputs, 0.4))
        assert not bool(chosen[data.num_nodes :].any())
        own = s[k, : len(inputs.y)]
        alone = train_encoder(
            common,
            own,
            fresh_state("adam", {**common, PROXIES: own}),
            inputs,
            predicted[k, : len(inputs.y)],
            **settings,
        )  # type: ignore[arg-type]
        for name, tensor in alone.weights.items():
            torch.testing.assert_close(together.weights[name][k], tensor, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(together.proxies.view(len(datas), rows, -1)[k, : len(inputs.y)], alone.proxies)
        torch.testing.assert_close(
            class_means(together.proxies, stacked, CLASSES)[k], class_means(alone.proxies, inputs, CLASSES)[0]
        )


def test_first_weights_are_bounded_by_fan_out() -> None:
    weights = first_encoder(400, 16, 4, Stream(0))
    assert 0.24 < weights["embed.weight"].abs().max() <= 0.25  # 1 / sqrt(16)
    assert 0.45 < weights["project.weight"].abs().max() <= 0.5  # 1 / sqrt(4)


@pytest.mark.parametrize("labels", ["ce", "double_softmax"])
def test_distilled_loss_is_that_of_the_labels_plus_divergence(labels: str) -> None:
    data = nodes(10, 6, train=4)
    model = build_backbone("gcn", num_features=FEATURES, num_classes=CLASSES, hidden=(4,), stream=Stream(1))
    inputs = build_inputs(data, model, data.train, restrict=False, dtype=torch.float64)
    logits = random(10, CLASSES).requires_grad_()
    targets, weight = torch.softmax(random(10, CLASSES, seed=5), dim=-1), random(10, seed=6)
    loss = distilled(targets, weight, inputs, labels)
    value, grad = loss.value_and_grad(logits.detach(), inputs)
    divergence = kl_div(torch.log_softmax(logits, -1), targets, reduction="none").sum(1)
    by_hand = get_loss(labels).value(logits, inputs) + (weight * divergence).sum()
    torch.testing.assert_close(value, by_hand.detach())
    torch.testing.assert_close(loss.value(logits, inputs), by_hand)
    by_hand.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(grad, logits.grad)
    same = distilled(torch.softmax(logits.detach(), -1), weight, inputs, labels).value_and_grad(logits.detach(), inputs)
    torch.testing.assert_close(
        same[0], get_loss(labels).value(logits.detach(), inputs)
    )  # no divergence where they agree


def test_without_classifier_the_projector_teaches() -> None:
    data = nodes(12, 1, train=5)
    bare = {name: tensor for name, tensor in encoder().items() if not name.startswith("classify")}
    p, q = soft_labels(bare, random(CLASSES, WIDTH), random(5, WIDTH), inputs_of(data))
    assert torch.equal(p, q)
    torch.testing.assert_close(q, torch.softmax(head(bare, "project", embed(bare, inputs_of(data).nodes)), dim=-1))
