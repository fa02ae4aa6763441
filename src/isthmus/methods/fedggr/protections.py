"""Protections against what FedGGR's messages reveal, and their privacy statement.

    setting                             against
    embedding_bits                      decoding E_i to features
    dummy_gradients                     rows of zeros in a single round; over many rounds it hides nothing
    gradient_clip, gradient_noise       reading the label itself
    dp_clip, dp_noise                   what W_C,i tells about a client (`isthmus.methods.noise`)

All of it is off by default, and none of it is in the paper.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from isthmus.methods.fedggr.config import FedGGRConfig
from isthmus.methods.noise import statement
from isthmus.nn.dropout import DropoutSource
from isthmus.privacy.dp import Mechanism, secret_stream
from isthmus.seeds import Stream
from isthmus.tensors import Weights, num_values


def quantised(rows: Tensor, bits: int) -> Tensor:
    """Every column on 2^bits even steps between its least and its largest value; 0 bits leave it as it is."""
    if not bits or not len(rows):
        return rows
    low, high = rows.amin(0), rows.amax(0)
    step = ((high - low) / ((1 << bits) - 1)).clamp(min=torch.finfo(rows.dtype).tiny)
    steps: Tensor = ((rows - low) / step).round()
    return low + steps * step


def joint_dropout(config: FedGGRConfig, secret: bytes, stream: Stream) -> DropoutSource | None:
    """Masks of [Z_loc, Z_glob] in this round. Drawn from a secret where dummies must look like labelled rows: anyone
    can draw those of the run's seed.
    """
    if not config.joint_dropout:
        return None
    if not config.dummy_gradients:
        return DropoutSource([stream.torch()])
    seed = int(secret_stream(secret, stream.path).uniform(1)[0] * (1 << 62))
    return DropoutSource([torch.Generator().manual_seed(seed)])


def dummy_gradients(logits: Tensor, head: Tensor, secret: bytes, num_train: int) -> Tensor:
    """For every node the gradient of Z that a label would give which is drawn from the model's own prediction: its mean
    is zero. What is drawn for a node stays with it, so that its label changes only where the prediction does.

    Args:
        logits: Of all nodes (n, C).
        head: The classifier's rows that read Z (F_g, C).
    """
    p = torch.softmax(logits.double(), dim=1)
    drawn = secret_stream(secret, ("dummies",)).uniform(len(p))
    label = (p.cumsum(1) < torch.from_numpy(drawn)[:, None]).sum(1).clamp(max=p.shape[1] - 1)
    residual = p - torch.nn.functional.one_hot(label, p.shape[1])
    return (residual @ head.double().mT / max(1, num_train)).to(logits.dtype)


def released_rows(gradient: Tensor, num_train: int, config: FedGGRConfig, secret: bytes, stream: Stream) -> Tensor:
    """What may leave of grad Z^i. Clipped is the gradient of each node's own loss, so clip means the same at every
    client.
    """
    if not config.gradient_clip:
        return gradient
    count, mechanism = max(1, num_train), Mechanism(config.gradient_clip, config.gradient_noise)
    return mechanism.release_rows(gradient * count, secret=secret, purpose=stream.path)[0] / count


def privacy(weights: Weights, config: FedGGRConfig, rounds: int, clients: int, masked: bool) -> dict[str, Any] | None:
    """The guarantee of clipped and noisy updates for a client, or of clipped and noisy rows for a label."""
    state = partial(statement, delta=config.dp_delta, releases=rounds)
    if config.dp_clip:
        values = num_values(weights)
        stated = state(clip=config.dp_clip, noise=config.dp_noise, values=values, parties=clients, masked=masked)
        besides = "embeddings and gradients of rows, which clients send besides"
        besides += "; the auto-encoder's weights of the setup" if config.encoder == "federated" else ""
        return stated | {"not_covered": f"{besides}; {stated['not_covered']}"}
    if not config.gradient_clip:
        return None
    clip, noise = config.gradient_clip, config.gradient_noise
    stated = state(
        clip=clip, noise=noise, values=config.global_width, parties=1, masked=False, setting="gradient_noise"
    )
    if config.class_weight != "none" or (config.local_epochs > 1 and config.returned != "first"):
        stated["epsilon"] = None
        stated["warning"] = (
            "one label changes other rows as well (steps after the first and class weights depend on all labels), so "
            "no epsilon can be stated: use local_epochs=1 or returned=first, and no class_weight"
        )
    beside = f"the weights clients train with their labels (dp_clip covers those); embeddings; {stated['not_covered']}"
    return stated | {
        "unit": "training label of one node",
        "neighbours": "that label replaced, given the weights of each round",
        "not_covered": beside,
    }
