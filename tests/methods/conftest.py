"""Small graph-classification scenarios that several methods' tests share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isthmus.data.graph_set import GraphSetData
from isthmus.data.graphscenario import GraphScenario, build_graph_scenario


@pytest.fixture(scope="session")
def motifs() -> GraphScenario:
    return build_graph_scenario(dataset="motifs", clients=3, split="stratified:60/20/20", seed=2)


@pytest.fixture(scope="session")
def mixed(motifs: GraphScenario) -> GraphScenario:
    """Clients whose features differ, as in FedStar's settings."""

    def widened(data: GraphSetData, extra: int) -> GraphSetData:
        return replace(data, x=torch.cat([data.x.to_dense(), torch.ones(data.num_nodes, extra)], 1))

    return replace(motifs, parts={client: widened(data, i) for i, (client, data) in enumerate(motifs.parts.items())})
