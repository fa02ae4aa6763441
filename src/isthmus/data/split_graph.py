"""From one graph and an owner per node to one `NodeData` per client.

Everything is sorted once and cut: no Python work over nodes or edges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.data.node_data import CrossEdges, NodeData
from isthmus.data.whole_graph import select_rows


def split_graph(whole: NodeData, owner: Tensor, clients: tuple[str, ...]) -> dict[str, NodeData]:
    """The induced subgraph of every client, with its cross edges.

    Rows of a client are in ascending order of global id. Arcs keep the order of ``whole``; of cross edges the outgoing
    come first.

    Args:
        whole: The graph; ``node_id`` must be 0 ... n-1.
        owner: Index into ``clients`` for every node (n,).
        clients: Client ids, sorted.
    """
    count = len(clients)
    order = torch.argsort(owner, stable=True)  # nodes by owner
    sizes = torch.bincount(owner, minlength=count)
    row = torch.empty_like(order)  # position of a node among its owner's nodes
    row[order] = torch.arange(order.numel()) - (torch.cumsum(sizes, 0) - sizes)[owner[order]]
    nodes = torch.split_with_sizes(order, sizes.tolist())

    source, target = whole.edge_index
    own = owner[source] == owner[target]
    inner = _by_owner(torch.nonzero(own).flatten(), owner[source], count)
    crossing = torch.nonzero(~own).flatten()
    out = _by_owner(crossing, owner[source], count)
    into = _by_owner(crossing, owner[target], count)

    parts = {}
    for index, client in enumerate(clients):
        rows, arcs = nodes[index], inner[index]
        parts[client] = NodeData(
            x=select_rows(whole.x, rows),
            edge_index=row[whole.edge_index[:, arcs]],
            y=whole.y[rows],
            train=whole.train[rows],
            val=whole.val[rows],
            test=whole.test[rows],
            node_id=whole.node_id[rows],
            num_classes=whole.num_classes,
            cross=CrossEdges(
                own=row[torch.cat([source[out[index]], target[into[index]]])],
                owner=owner[torch.cat([target[out[index]], source[into[index]]])],
                other=whole.node_id[torch.cat([target[out[index]], source[into[index]]])],
                outgoing=torch.cat(
                    [
                        torch.ones(out[index].numel(), dtype=torch.bool),
                        torch.zeros(into[index].numel(), dtype=torch.bool),
                    ]
                ),
                weight=torch.ones(out[index].numel() + into[index].numel()),
                owners=clients,
            ),
        )
    return parts


def _by_owner(arcs: Tensor, owner_of_arc: Tensor, count: int) -> tuple[Tensor, ...]:
    """Arcs grouped by an owner, each group in its old order."""
    owners = owner_of_arc[arcs]
    return tuple(
        torch.split_with_sizes(
            arcs[torch.argsort(owners, stable=True)], torch.bincount(owners, minlength=count).tolist()
        )
    )
