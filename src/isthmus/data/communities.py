"""Groups of nodes and how to deal them out to clients of about equal size (FedStruct spec, section 7)."""

from __future__ import annotations

import random

import igraph
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.seeds import Stream

Groups = list[NDArray[np.int64]]
"""Disjoint lists of rows."""


def louvain(data: NodeData, stream: Stream) -> Groups:
    """Louvain communities of the graph read as undirected, largest first; isolated nodes together form one more
    community.
    """
    source, target = data.edge_index.numpy()
    low, high = np.minimum(source, target), np.maximum(source, target)
    edges = np.unique(np.stack([low, high])[:, low != high], axis=1)
    connected = np.unique(edges)
    row = np.full(data.num_nodes, -1)
    row[connected] = np.arange(len(connected))
    graph = igraph.Graph(n=len(connected), edges=row[edges].T)
    # igraph draws from one generator of the process: lend it ours, and give Python's back.
    igraph.set_random_number_generator(random.Random(stream.integer()))
    try:
        member = np.array(graph.community_multilevel().membership, dtype=np.int64)
    finally:
        igraph.set_random_number_generator(random)
    isolated = np.setdiff1d(np.arange(data.num_nodes), connected)
    groups = groups_of(member, connected)
    return by_size([*groups, isolated] if len(isolated) else groups)


def groups_of(label: NDArray[np.int64], rows: NDArray[np.int64] | None = None) -> Groups:
    """Rows with the same label, in ascending order; ``rows`` names the rows where they are not 0 ... n-1."""
    if not len(label):
        return []
    order = np.argsort(label, kind="stable")
    cuts = np.flatnonzero(np.diff(label[order])) + 1
    return np.split(order if rows is None else rows[order], cuts)


def by_size(groups: Groups) -> Groups:
    """Largest first; equal sizes in order of their first row, so that the result is one and not one of many."""
    return sorted((group for group in groups if len(group)), key=lambda group: (-len(group), int(group[0])))


def cut_oversize(groups: Groups, limit: int) -> Groups:
    """Cut groups of more than ``limit`` rows into stretches of ``limit`` and a remainder."""
    return [group[start : start + limit] for group in groups for start in range(0, len(group), limit)]


def deal_by_pointer(groups: Groups, clients: int, target: int, limit: int) -> list[Groups]:
    """The rule of FedStruct's code.

    The current client takes the next group unless that would exceed ``limit`` or it holds ``target`` already; else the
    next client in turn is asked; after a full circle the group goes to the smallest client.
    """
    held: list[Groups] = [[] for _ in range(clients)]
    sizes = [0] * clients
    current = 0
    for group in groups:
        for _ in range(clients):
            if sizes[current] < target and sizes[current] + len(group) <= limit:
                chosen = current
                break
            current = (current + 1) % clients
        else:
            chosen = min(range(clients), key=sizes.__getitem__)
        held[chosen].append(group)
        sizes[chosen] += len(group)
    return held


def deal_first_fit(groups: Groups, clients: int, target: int) -> list[Groups]:
    """The rule of FedStruct's text: one group to every client, then the first client that stays within ``target``, else
    the smallest.
    """
    held: list[Groups] = [[] for _ in range(clients)]
    sizes = [0] * clients
    for index, group in enumerate(groups):
        fits = (client for client in range(clients) if sizes[client] + len(group) <= target)
        chosen = index if index < clients else next(fits, min(range(clients), key=sizes.__getitem__))
        held[chosen].append(group)
        sizes[chosen] += len(group)
    return held


def feed_the_empty(held: list[Groups]) -> None:
    """Give a client that got nothing half of the last group of the largest client, in place.

    Differs from the paper: with K * slack > n / K its rule can run out of nodes before the last client (Cora, K-means,
    20 clients).
    """
    for client, mine in enumerate(held):
        if not mine:
            largest = max(held, key=lambda groups: sum(map(len, groups)))
            if sum(map(len, largest)) > 1:
                group = largest.pop()
                half = (len(group) + 1) // 2 if not largest else len(group) // 2
                largest.append(group[:half])
                held[client] = [group[half:]]


def balanced(groups: Groups, num_nodes: int, clients: int, *, rule: str, slack: int) -> Tensor:
    """Cut, sort, deal: client index of every row. ``m = floor(n / K)``, and but for the last resort nobody holds more
    than m + slack.
    """
    size = num_nodes // clients
    groups = by_size(cut_oversize(groups, max(size + slack, 1)))
    held = (
        deal_by_pointer(groups, clients, size, size + slack)
        if rule == "code"
        else deal_first_fit(groups, clients, size)
    )
    feed_the_empty(held)
    return owners_of([np.concatenate(mine) if mine else np.empty(0, dtype=np.int64) for mine in held], num_nodes)


def owners_of(lists: Groups, num_nodes: int) -> Tensor:
    """Client index of every row from one list of rows per client; -1 for rows in no list."""
    owner = torch.full((num_nodes,), -1)
    for client, rows in enumerate(lists):
        owner[torch.from_numpy(rows)] = client
    return owner
