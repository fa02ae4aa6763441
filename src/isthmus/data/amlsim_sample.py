"""A sample of AMLSim small enough for a demonstration: whole laundering rings, accounts they deal with, five banks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.data.datasets import load_nodes
from isthmus.data.whole_graph import Loaded
from isthmus.seeds import Stream

BANKS = ("bank-a", "bank-b", "bank-c", "bank-d", "bank-e")


def sample_accounts(graph: Loaded, size: int, stream: Stream) -> Tensor:
    """Rows of about ``size`` accounts, ascending: whole rings until the share of fraudulent accounts is that of the
    whole graph, then ordinary accounts that deal with accounts chosen before.
    """
    draw = stream.numpy()
    fraud, ring = graph.data.y.numpy() == 1, np.asarray(graph.columns["ring"])
    source, target = graph.data.edge_index.numpy()
    kept = np.zeros(len(fraud), dtype=bool)
    for number in draw.permutation(np.unique(ring[ring >= 0])):
        if kept.sum() >= size * fraud.mean():
            break
        kept |= ring == number
    while kept.sum() < min(size, len(fraud)):
        near = np.zeros_like(kept)
        near[target[kept[source]]] = near[source[kept[target]]] = True
        new = np.flatnonzero(near & ~kept & ~fraud)
        new = new if len(new) else np.flatnonzero(~kept & ~fraud)
        if not len(new):
            break
        kept[draw.permutation(new)[: size - kept.sum()]] = True
    return torch.from_numpy(np.flatnonzero(kept))


def sampled_banks(size: int = 3000, seed: int = 0) -> Any:
    """A sample of ``amlsim-cycle`` as a ``torch_geometric`` Data: accounts with features, transfers, labels, the ring
    of each account (for splits) and its bank, drawn, because AMLSim names none.
    """
    from torch_geometric.data import Data

    stream = Stream(seed, ("amlsim sample",))
    graph = load_nodes("amlsim-cycle", stream)
    part = graph.restricted(sample_accounts(graph, size, stream.child("accounts")))
    banks = stream.child("banks").numpy().integers(0, len(BANKS), part.data.num_nodes)
    x = part.data.x
    return Data(
        x=x if x.layout == torch.strided else x.to_dense(),
        edge_index=part.data.edge_index,
        y=part.data.y,
        ring=torch.from_numpy(np.asarray(part.columns["ring"])),
        owner=[BANKS[bank] for bank in banks],
    )
