"""From one graph and an owner per node to one `NodeData` per client.

Everything is sorted once and cut: no Python work over nodes or edges.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from isthmus.data.node_data import CrossEdges, NodeData
from isthmus.data.whole_graph import select_rows


def split_graph(
    whole: NodeData, owner: Tensor, clients: tuple[str, ...], *, cross_edges: bool = True
) -> dict[str, NodeData]:
    """The induced subgraph of every client, with its cross edges.

    Rows of a client are in ascending order of global id. Arcs keep the order of ``whole``; of cross edges the outgoing
    come first.

    Args:
        whole: The graph; ``node_id`` must be 0 ... n-1.
        owner: Index into ``clients`` for every node (n,).
        clients: Client ids, sorted.
        cross_edges: False leaves cross edges out, which are most of a large graph between many owners.
    """
    count = len(clients)
    if count == 1:  # it has the graph itself, not a copy
        return {clients[0]: replace(whole, cross=_no_edges(clients) if cross_edges else None)}
    order = torch.argsort(owner, stable=True)  # nodes by owner
    sizes = torch.bincount(owner, minlength=count)
    row = torch.empty_like(order)  # position of a node among its owner's nodes
    row[order] = torch.arange(order.numel()) - (torch.cumsum(sizes, 0) - sizes)[owner[order]]
    nodes = torch.split_with_sizes(order, sizes.tolist())

    source, target = whole.edge_index
    # An owner's number takes as few bytes as it can: there is one at either end of every arc.
    small = owner.to(torch.int16 if count < 2**15 else torch.int32)
    from_owner, to_owner = small[source], small[target]
    own = from_owner == to_owner
    inner = _by_owner(torch.nonzero(own).flatten(), from_owner, count)
    out = into = (torch.empty(0, dtype=torch.int64),) * count
    if cross_edges:
        crossing = torch.nonzero(~own).flatten()
        out, into = _by_owner(crossing, from_owner, count), _by_owner(crossing, to_owner, count)
        del crossing
    del own, from_owner, to_owner

    parts = {}
    for index, client in enumerate(clients):
        rows, arcs = nodes[index], inner[index]
        cross = None
        if cross_edges:
            far = torch.cat([target[out[index]], source[into[index]]])
            cross = CrossEdges(
                own=row[torch.cat([source[out[index]], target[into[index]]])],
                owner=owner[far],
                other=whole.node_id[far],
                outgoing=torch.arange(far.numel()) < out[index].numel(),
                weight=_weights(whole, torch.cat([out[index], into[index]])),
                owners=clients,
            )
        parts[client] = NodeData(
            x=select_rows(whole.x, rows),
            edge_index=row[whole.edge_index[:, arcs]],
            y=whole.y[rows],
            train=whole.train[rows],
            val=whole.val[rows],
            test=whole.test[rows],
            node_id=whole.node_id[rows],
            num_classes=whole.num_classes,
            cross=cross,
            edge_weight=None if whole.edge_weight is None else whole.edge_weight[arcs],
        )
    return parts


def _weights(whole: NodeData, arcs: Tensor) -> Tensor:
    return torch.ones(arcs.numel()) if whole.edge_weight is None else whole.edge_weight[arcs]


def _no_edges(clients: tuple[str, ...]) -> CrossEdges:
    none = torch.empty(0, dtype=torch.int64)
    return CrossEdges(none, none, none, torch.empty(0, dtype=torch.bool), torch.empty(0), clients)


def _by_owner(arcs: Tensor, owner_of_arc: Tensor, count: int) -> tuple[Tensor, ...]:
    """Arcs grouped by an owner, each group in its old order."""
    owners = owner_of_arc[arcs]
    sizes = torch.bincount(owners, minlength=count).tolist()
    return tuple(torch.split_with_sizes(arcs[torch.argsort(owners, stable=True)], sizes))
