r"""A classifier over two channels: a backbone's output and rows that come from elsewhere.

.. math:: q = [\,a(Z_{loc}),\, Z\,] W + b, \qquad Z_{loc} = f_\theta(X, A)

a is the identity, or ReLU; in training, dropout may act on what is joined. Z is constant for this party but its
gradient is wanted (split
learning: Vepakomma et al., 2018, https://arxiv.org/abs/1812.00564). `Joined` is everything after the backbone, shaped
as a loss of the backbone's output, so the backbone is differentiated by the same loop as everywhere
(`isthmus.nn.train.gradients`).

Shapes: Z_loc (n, F_l), Z (n, F_g), W (F_l + F_g, C), b (C,).
"""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.nn.inputs import Inputs
from isthmus.nn.layers import fan_in_
from isthmus.nn.loss import Loss
from isthmus.seeds import Stream
from isthmus.tensors import Weights

HEAD = ("head.weight", "head.bias")


def first_head(
    local_width: int, global_width: int, num_classes: int, stream: Stream, dtype: torch.dtype
) -> dict[str, Tensor]:
    """First weights of the head, as ``torch.nn.Linear`` starts."""
    width = local_width + global_width
    if min(local_width, global_width, num_classes) < 1:
        raise ConfigError(
            f"widths must be at least 1, got local_width {local_width}, global_width {global_width}, classes "
            f"{num_classes}"
        )
    generator = stream.torch()
    weight, bias = torch.empty(width, num_classes), torch.empty(num_classes)
    fan_in_(weight, width, generator)
    fan_in_(bias, width, generator)
    return {"head.weight": weight.to(dtype), "head.bias": bias.to(dtype)}


def classify(
    head: Weights, local: Tensor, rows: Tensor, *, activate: bool = False, mask: Tensor | None = None
) -> Tensor:
    """Logits q, in training behind a mask of what is joined. (n, C)"""
    both = torch.cat([torch.relu(local) if activate else local, rows], dim=1)
    return (both if mask is None else both * mask) @ head["head.weight"] + head["head.bias"]


class Joined:
    """The head and the loss behind it, seen from the backbone.

    Args:
        loss: Of the logits.
        head: Weights of which ``head.weight`` is W and ``head.bias`` b.
        rows: Z of the output rows of the inputs.
        activate: Whether a is ReLU.
        mask: Dropout of what is joined (n, F_l + F_g), or None.

    After `gradients` has run, ``head_grads`` and ``rows_grad`` hold the gradients of the head and of Z.
    """

    def __init__(
        self, loss: Loss, head: Weights, rows: Tensor, *, activate: bool = False, mask: Tensor | None = None
    ) -> None:
        self._loss, self._rows, self._activate, self._mask = loss, rows, activate, mask
        self._weight, self._bias = (head[name] for name in HEAD)
        self.head_grads: dict[str, Tensor] = {}
        self.rows_grad = torch.zeros_like(rows)

    def as_loss(self) -> Loss:
        return Loss(self._value, self._value_and_grad)

    def _value_and_grad(self, local: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        read = torch.relu(local) if self._activate else local
        both = torch.cat([read, self._rows], dim=1)
        both = both if self._mask is None else both * self._mask
        value, grad = self._loss.value_and_grad(both @ self._weight + self._bias, inputs)
        both_grad = grad @ self._weight.mT
        both_grad = both_grad if self._mask is None else both_grad * self._mask
        self.head_grads = {"head.weight": both.mT @ grad, "head.bias": grad.sum(0)}
        self.rows_grad = both_grad[:, local.shape[1] :].contiguous()
        local_grad = both_grad[:, : local.shape[1]]
        return value, (local_grad * (local > 0) if self._activate else local_grad).contiguous()

    def _value(self, local: Tensor, inputs: Inputs) -> Tensor:
        """The same for autograd: the value, with the gradient just found."""
        value, grad = self._value_and_grad(local.detach(), inputs)
        return value + ((local - local.detach()) * grad).view(inputs.clients, -1).sum(1)
