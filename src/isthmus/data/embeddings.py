"""Structure embeddings of an owner's graph or graphs, worked out once and kept in the user cache by what they depend
on.

The key is a hash of the arcs themselves, so a cached embedding can never be that of other data.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.data.cache_format import read_cached, write_cached
from isthmus.data.graph_set import GraphSetData
from isthmus.data.node_data import NodeData
from isthmus.graph.embedding import degree_embedding, walk_embedding
from isthmus.graph.normalise import from_torch_csr, to_torch_csr

Kind = Literal["dse+rwse", "dse", "rwse", "ones"]
KINDS: tuple[Kind, ...] = ("dse+rwse", "dse", "rwse", "ones")
_CACHED_FROM = 4096  # nodes; below, working it out takes no longer than looking it up


def embedding_width(kind: Kind, degrees: int, steps: int) -> int:
    """Columns of `structure_embedding`."""
    return {"dse+rwse": degrees + steps, "dse": degrees, "rwse": steps, "ones": degrees + steps}[kind]


def structure_embedding(data: GraphSetData | NodeData, kind: Kind, degrees: int, steps: int) -> Tensor:
    """s of every node (n, k): DSE then RWSE (k1 + k2), one of them, or ones in their place (k1 + k2).

    Args:
        degrees: k1.
        steps: k2.
    """
    if kind == "ones":
        return torch.ones(data.num_nodes, degrees + steps)
    parts = []
    if "dse" in kind:
        parts.append(degree_embedding(data.edge_index, data.num_nodes, degrees))
    if "rwse" in kind:
        parts.append(_walks(data, steps))
    return torch.cat(parts, dim=1)


def beside(x: Tensor, s: Tensor) -> Tensor:
    """``[x | s]``, sparse where x is."""
    if x.layout != torch.sparse_csr:
        return torch.cat([x, s], dim=1)
    return to_torch_csr(sp.csr_matrix(sp.hstack([from_torch_csr(x), sp.csr_matrix(s.numpy())], format="csr")))


def _walks(data: GraphSetData | NodeData, steps: int) -> Tensor:
    if isinstance(data, GraphSetData):
        ptr, edge_ptr = data.ptr, data.edge_ptr
    else:
        ptr, edge_ptr = torch.tensor([0, data.num_nodes]), torch.tensor([0, data.edge_index.shape[1]])
    if data.num_nodes < _CACHED_FROM:
        return walk_embedding(data.edge_index, ptr, edge_ptr, steps)
    key = _key(steps, data.edge_index, ptr, edge_ptr)
    if (cached := read_cached("rwse", key)) is not None and cached[0]["rwse"].shape == (data.num_nodes, steps):
        return cached[0]["rwse"]
    made = walk_embedding(data.edge_index, ptr, edge_ptr, steps)
    write_cached("rwse", key, {"rwse": made}, "computed")
    return made


def _key(steps: int, *tensors: Tensor) -> str:
    digest = hashlib.sha256(f"rwse/{steps}/".encode())
    for tensor in tensors:
        tensor = tensor.contiguous()
        digest.update(f"{tensor.dtype}/{tuple(tensor.shape)}/".encode())
        digest.update(tensor.view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()[:24]
