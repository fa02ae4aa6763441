"""Manual gradients of the structure branch against autograd (FedStruct, propositions 2 and 3)."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.nn.structure import Group, Reach, StructureNet
from isthmus.seeds import Stream

N, CLASSES = 30, 3


def rows(seed: int, count: int, density: float = 0.15) -> sp.csr_matrix:
    return sp.random(count, N, density=density, random_state=seed, format="csr", dtype=np.float64)


def net(hidden: tuple[int, ...] | None, dropout: float = 0.0) -> StructureNet:
    return StructureNet(width=CLASSES if hidden is None else 5, num_classes=CLASSES, hidden=hidden, dropout=dropout)


def plain(model: StructureNet, weights: dict[str, Tensor], nsf: Tensor) -> Tensor:
    """g(S) with torch's own layers."""
    if model.widths is None:
        return nsf
    h = torch.nn.functional.layer_norm(nsf, (model.width,), weights["norm.gamma"], weights["norm.beta"])
    for i in range(model.depth):
        h = h @ weights[f"layers.{i}.weight"] + weights[f"layers.{i}.bias"]
        h = torch.relu(h) if i < model.depth - 1 else h
    return h


@pytest.mark.parametrize("hidden", [None, (), (4,), (6, 4)])
@pytest.mark.parametrize("dense", [False, True])
def test_gradients_of_a_group_equal_autograd(hidden: tuple[int, ...] | None, dense: bool) -> None:
    model = net(hidden)
    generator = torch.Generator().manual_seed(1)
    weights = {
        k: t + 0.1 * torch.randn(t.shape, generator=generator, dtype=t.dtype)
        for k, t in model.first_weights(Stream(0), torch.float64).items()
    }
    nsf = torch.randn(N, model.width, dtype=torch.float64, generator=generator)
    blocks = [rows(k, 4 + k) for k in range(3)]
    shares = [0.5, 0.2, 0.3]
    residuals = [torch.randn(4 + k, CLASSES, dtype=torch.float64, generator=generator) for k in range(3)]
    group = Group.of([Reach.of([block.toarray() if dense else block], torch.float64) for block in blocks])
    run = model.run(weights, nsf, group, None)
    grads, nsf_grad = run.gradients(residuals, shares, nsf=True)

    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    s = nsf.clone().requires_grad_()
    embedded = plain(model, leaves, s)
    z = [torch.from_numpy(block.toarray()) @ embedded for block in blocks]
    for one, expected in zip(run.clients, z, strict=True):
        torch.testing.assert_close(one.z, expected.detach(), atol=1e-12, rtol=0)
    loss = sum(share * (part * residual).sum() for share, part, residual in zip(shares, z, residuals, strict=True))
    expected_grads = torch.autograd.grad(loss, [*leaves.values(), s])  # type: ignore[arg-type]
    for name, expected in zip(leaves, expected_grads, strict=False):
        torch.testing.assert_close(grads[name], expected, atol=1e-10, rtol=0)
    assert nsf_grad is not None
    torch.testing.assert_close(nsf_grad, expected_grads[-1], atol=1e-10, rtol=0)
    torch.testing.assert_close(model.embed(weights, nsf), embedded.detach(), atol=1e-12, rtol=0)


def test_direct_form_is_proposition_2() -> None:
    """dL_i/dS = Abar^T R, row by row."""
    block, residual = (
        rows(0, 6),
        torch.randn(6, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    )
    run = net(None).run(
        {}, torch.zeros(N, CLASSES, dtype=torch.float64), Group.of([Reach.of([block], torch.float64)]), None
    )
    _, grad = run.gradients([residual], [1.0], nsf=True)
    assert grad is not None
    torch.testing.assert_close(grad, torch.from_numpy(block.toarray().T) @ residual, atol=1e-12, rtol=0)


def test_trained_betas_are_differentiated_too() -> None:
    model = net((4,))
    weights = model.first_weights(Stream(3), torch.float64) | {
        "betas": torch.tensor([0.2, 0.5, 1.0], dtype=torch.float64)
    }
    nsf = torch.randn(N, model.width, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    powers = [rows(k, 5) for k in range(3)]
    residual = torch.randn(5, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    grads, nsf_grad = model.run(weights, nsf, Group.of([Reach.of(powers, torch.float64)]), None).gradients(
        [residual], [1.0], nsf=True
    )
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    s = nsf.clone().requires_grad_()
    embedded = plain(model, leaves, s)
    z = torch.stack(
        [beta * (torch.from_numpy(p.toarray()) @ embedded) for beta, p in zip(leaves["betas"], powers, strict=True)]
    ).sum(0)
    expected = torch.autograd.grad((z * residual).sum(), [leaves["betas"], s])
    torch.testing.assert_close(grads["betas"], expected[0], atol=1e-10, rtol=0)
    assert nsf_grad is not None
    torch.testing.assert_close(nsf_grad, expected[1], atol=1e-10, rtol=0)


def test_every_client_draws_its_own_dropout_alone_or_together() -> None:
    model = net((8, 6), dropout=0.5)
    weights = model.first_weights(Stream(0), torch.float64)
    nsf = torch.randn(N, model.width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    reaches = [Reach.of([rows(k, 5)], torch.float64) for k in range(2)]
    residuals = [torch.ones(5, CLASSES, dtype=torch.float64)] * 2

    def generators() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(k) for k in range(2)]

    together, nsf_together = model.run(weights, nsf, Group.of(reaches), generators()).gradients(
        residuals, [0.4, 0.6], nsf=True
    )
    alone = [
        model.run(weights, nsf, Group.of([reach]), [generator]).gradients([residuals[0]], [share], nsf=True)
        for reach, generator, share in zip(reaches, generators(), [0.4, 0.6], strict=True)
    ]
    for name, tensor in together.items():
        torch.testing.assert_close(tensor, alone[0][0][name] + alone[1][0][name], atol=1e-12, rtol=0)
    assert nsf_together is not None and alone[0][1] is not None and alone[1][1] is not None
    torch.testing.assert_close(nsf_together, alone[0][1] + alone[1][1], atol=1e-12, rtol=0)
    still = model.run(weights, nsf, Group.of(reaches), None)
    assert not torch.equal(still.clients[0].z, model.run(weights, nsf, Group.of(reaches), generators()).clients[0].z)


def test_dropout_keeps_the_mean() -> None:
    model = net((400,), dropout=0.3)
    weights = model.first_weights(Stream(0), torch.float64)
    nsf = torch.randn(N, model.width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    group = Group.of([Reach.of([sp.eye(N, format="csr")], torch.float64)])
    exact = model.run(weights, nsf, group, None).clients[0].z
    mean = torch.stack(
        [model.run(weights, nsf, group, [torch.Generator().manual_seed(k)]).clients[0].z for k in range(300)]
    ).mean(0)
    assert float((mean - exact).abs().max()) < 0.1 * float(exact.abs().max())


def test_widths_are_checked() -> None:
    with pytest.raises(ConfigError, match="nsf_dim 0"):
        StructureNet(width=0, num_classes=2, hidden=(3,), dropout=0.0)
    with pytest.raises(ConfigError, match="one value per class"):
        StructureNet(width=5, num_classes=2, hidden=None, dropout=0.0)
