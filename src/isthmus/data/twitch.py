"""Twitch users of seven countries (Rozemberczki et al., MUSAE): seven networks with the same features, no edges between
them. Who streams content for adults is predicted. MIT.

Each country is an owner by nature, so ``partition=owner`` is the default.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from isthmus.data import cache_format, store
from isthmus.data.datasets import NODE_SETS, Counts, NodeSet
from isthmus.data.from_arrays import undirected
from isthmus.graph.normalise import to_torch_csr

COUNTRIES = ("DE", "ENGB", "ES", "FR", "PTBR", "RU", "ZHTW")


def read_twitch(folder: Path) -> dict[str, Tensor]:
    """All countries one after the other, with the country of every user."""
    features, arcs, labels, begin = [], [], [], 0
    for country in COUNTRIES:
        with np.load(folder / f"{country}.npz", allow_pickle=False) as file:
            y = file["y"].astype(np.int64)
            ones = np.ones(len(file["x_indices"]), dtype=np.float32)
            shape = tuple(file["x_shape"].tolist())
            features.append(sp.csr_matrix((ones, file["x_indices"], file["x_indptr"]), shape=shape))
            arcs.append(undirected(file["edges"].astype(np.int64).T, len(y)) + begin)
        labels.append(y)
        begin += len(y)
    owner = np.repeat(np.arange(len(COUNTRIES)), [len(y) for y in labels])
    return {
        **cache_format.pack("x", to_torch_csr(sp.vstack(features, format="csr"))),
        "edge_index": torch.from_numpy(np.concatenate(arcs, axis=1)),
        "y": torch.from_numpy(np.concatenate(labels)),
        "owner": torch.from_numpy(owner),
    }


NODE_SETS.add(
    "twitch",
    NodeSet(
        "twitch",
        store.RawFiles("twitch", "MusaeTwitch/raw", tuple(f"{country}.npz" for country in COUNTRIES), pinned=False),
        Counts(36890, 985150, 3170, 2),
        parse=read_twitch,
        owner_names=COUNTRIES,
        defaults={"partition": "owner"},
    ),
)
