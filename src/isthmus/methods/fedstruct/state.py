"""What a client of FedStruct remembers between rounds; and blocks of powers as tensors, which can be kept and sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from isthmus.graph.normalise import from_torch_csr
from isthmus.graph.powers import Block
from isthmus.methods.training import ModelState
from isthmus.nn.optim import OptimizerState

NO_COLUMNS = torch.zeros(0, dtype=torch.int64)
NO_STEPS = OptimizerState((0,), {}, {})
"""State of an optimiser that has nothing to step on."""


@dataclass(frozen=True)
class FedStructState(ModelState):
    """The model it was given last, and what it has of the graph.

    Args:
        diagonal: (Ah^l)_vv of its own nodes (n_i, L_s).
        secret: Source of the randomness nobody else can repeat; never leaves the client. Empty in the published
            protocol.
        owner: Number of the owner of every column (n,), from the directory.
        columns: Columns of its own nodes (n_i,).
        far: Columns of the far ends of its outgoing cross edges; only in the published protocol, where they are known.
        entering: Client -> arcs that enter from it, (slots of that client, n_i): At_i^[k] at client i, see
            `directory.py`.
        power: [Ah^l]^[i] (n_i, n), sparse or dense; None before the first and after the last.
        combined: Abar^[i], or all powers 0 ... L_s where the betas are trained.
        nsf: S (n, d_s): fixed features of all nodes, or the replica of HOP2VEC's; None where the server holds S.
        nsf_optimizer: Of the replica, or of FedAvg's local steps on S.
        scored: What the model said of its nodes when it was scored last (n_i, C).
        own_nsf, own_ids: Its rows of a learned S as they were then, and whose they are: all of S a client takes away.
    """

    diagonal: Tensor
    secret: bytes
    owner: Tensor = NO_COLUMNS
    columns: Tensor = NO_COLUMNS
    far: Tensor = NO_COLUMNS
    entering: Mapping[str, Tensor] = field(default_factory=dict)
    power: Tensor | None = None
    combined: tuple[Tensor, ...] = ()
    nsf: Tensor | None = None
    nsf_optimizer: OptimizerState = NO_STEPS
    scored: Tensor | None = None
    own_nsf: Tensor | None = None
    own_ids: Tensor = NO_COLUMNS


def tensor_of(block: Block) -> Tensor:
    """Dense or ``torch.sparse_csr``, as the block is; of its own precision."""
    if isinstance(block, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(block))
    matrix = block if block.has_sorted_indices else block.sorted_indices()
    return torch.sparse_csr_tensor(
        torch.from_numpy(matrix.indptr.astype(np.int64)),
        torch.from_numpy(matrix.indices.astype(np.int64)),
        torch.from_numpy(np.ascontiguousarray(matrix.data)),
        size=(int(matrix.shape[0]), int(matrix.shape[1])),
        check_invariants=False,
    )


def block_of(tensor: Tensor) -> Block:
    """The inverse of `tensor_of`."""
    return tensor.numpy() if tensor.layout == torch.strided else from_torch_csr(tensor)
