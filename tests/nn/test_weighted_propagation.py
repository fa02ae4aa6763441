"""Weights of arcs in every backbone: a weight of 3 is an arc that is listed three times."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nn_helpers import client, model

from isthmus.data.node_data import NodeData
from isthmus.errors import ConfigError
from isthmus.nn.blocks import predict_blocks
from isthmus.nn.inputs import build_inputs
from isthmus.nn.registry import backbones, find_architecture
from isthmus.tensors import get_weights

NAMES = [name for name in backbones() if find_architecture(name).edge_weights]


def weighted(seed: int) -> tuple[NodeData, NodeData]:
    """Arcs with weights 0 to 3, and the same arcs so often."""
    data = client(25, seed)
    arcs = torch.unique(data.edge_index[:, data.edge_index[0] != data.edge_index[1]], dim=1)
    weight = torch.randint(0, 4, (arcs.shape[1],), generator=torch.Generator().manual_seed(seed)).float()
    often = replace(data, edge_index=arcs.repeat_interleave(weight.long(), dim=1))
    return replace(data, edge_index=arcs, edge_weight=weight), often


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_of_three_is_an_arc_listed_three_times(name: str) -> None:
    data, often = weighted(1)
    net = model(name, hidden=(5,))
    net.eval()
    found, wanted = (net(build_inputs(each, net)) for each in (data, often))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    plain = net(build_inputs(replace(data, edge_weight=None), net))
    assert not torch.allclose(found, plain, atol=1e-3)
    blocks = predict_blocks(net, get_weights(net), data, 7, dtype=torch.float32)
    torch.testing.assert_close(blocks, wanted, rtol=1e-5, atol=1e-5)


def test_the_others_refuse_weights() -> None:
    assert NAMES == ["dgcn", "gcn", "gin", "gprgnn", "sage", "sgc"]
    for name in ("gat", "dirsage"):
        with pytest.raises(ConfigError, match=f"^{name} .*: set edge_weights=ignore"):
            build_inputs(weighted(2)[0], model(name))
