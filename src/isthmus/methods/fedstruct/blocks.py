"""Blocks of the powers (`isthmus.graph.powers.Block`) as tensors, which can be sent and kept, and back."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from isthmus.graph.normalise import from_torch_csr
from isthmus.graph.powers import Block


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
