"""Names are registered where things are defined; nothing else has to know them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor

import isthmus
from isthmus import registry
from isthmus.data import generators, graphset_partition, graphset_split, partition, split
from isthmus.data.blockmodel import ContextualBlockModel
from isthmus.data.catalogue import list_datasets, list_partitions
from isthmus.data.graph_set import GraphSetData
from isthmus.data.graphscenario import build_graph_scenario
from isthmus.data.split import Masks
from isthmus.data.whole_graph import Loaded
from isthmus.errors import ConfigError
from isthmus.metrics import registry as metrics
from isthmus.registry import Registry
from isthmus.seeds import Stream


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is forgotten after it."""
    for each in (
        partition.PARTITIONS,
        split.SPLITS,
        generators.GENERATORS,
        graphset_partition.GRAPH_PARTITIONS,
        graphset_split.GRAPH_SPLITS,
        metrics.METRICS,
        metrics.METRIC_FORMS,
    ):
        monkeypatch.setattr(each, "_entries", dict(each, **each._entries))
    yield


# -- the registry ----------------------------------------------------------------------------------


def test_a_name_stands_for_one_thing() -> None:
    known: Registry[int] = Registry("number", "isthmus.metrics")
    known.add("one", 1)
    known.add("one", 1)
    with pytest.raises(ConfigError, match="number 'one' is registered twice; rename"):
        known.add("one", 2)
    with pytest.raises(ConfigError, match="unknown number 'ome': did you mean 'one'"):
        known.find("ome")
    assert list(known) == ["one"] and known.find("one") == 1 and "two" not in known


def test_a_file_dropped_into_the_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "shapes"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from isthmus.registry import Registry\nSHAPES: Registry[str] = Registry('shape', 'shapes')\n"
    )
    (package / "square.py").write_text("from shapes import SHAPES\nSHAPES.add('square', 'four corners')\n")
    monkeypatch.syspath_prepend(tmp_path)
    import shapes  # type: ignore[import-not-found]

    assert "shapes.square" not in sys.modules
    assert dict(shapes.SHAPES) == {"square": "four corners"}


def test_a_broken_plug_in_does_not_take_the_others_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "plugged").mkdir()
    (tmp_path / "plugged" / "__init__.py").write_text(
        "from isthmus.registry import Registry\nTHINGS: Registry[int] = Registry('thing', 'plugged')\n"
    )
    (tmp_path / "good_plug_in.py").write_text("from plugged import THINGS\nTHINGS.add('good', 1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    points = [EntryPoint(name, f"{name}_plug_in", "plugged") for name in ("bad", "good")]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "plugged" else [])
    import plugged  # type: ignore[import-not-found]

    assert dict(plugged.THINGS) == {"good": 1}
    assert "plug-in 'bad' of plugged could not be loaded" in caplog.text


# -- what is registered ----------------------------------------------------------------------------


@pytest.mark.usefixtures("scratch")
def test_one_class_is_all_a_run_on_nodes_needs(tmp_path: Path) -> None:
    @partition.PARTITIONS.register("consecutive")
    @dataclass(frozen=True)
    class Consecutive(partition.Partitioner):
        """Consecutive nodes, cut into pieces."""

        def assign(self, graph: Loaded, clients: int, stream: Stream) -> Tensor:
            return torch.arange(graph.data.num_nodes) * clients // graph.data.num_nodes

    @split.SPLITS.register("every:4")
    @dataclass(frozen=True)
    class Every:
        """Every n-th node trains, the next validates."""

        step: int

        @classmethod
        def parse(cls, rest: str | None) -> Self:
            return cls(int(rest or 4))

        def draw(self, graph: Loaded, owner: Tensor, stream: Stream) -> Masks:
            rest = torch.arange(graph.data.num_nodes) % self.step
            return Masks(rest == 0, rest == 1, rest > 1)

    @generators.GENERATORS.register("flat")
    @dataclass(frozen=True)
    class Flat:
        """A block model without a signal."""

        nodes: int = 60

        def draw(self, stream: Stream) -> Loaded:
            return ContextualBlockModel(nodes=self.nodes, signal=0.0).draw(stream)

    @metrics.METRICS.register("share_right")
    def share_right(confusion: Tensor, histogram: Tensor) -> float | None:
        return int(confusion.diagonal().sum()) / int(confusion.sum())

    @metrics.METRIC_FORMS.register("times@2")
    def times(parameter: str) -> metrics.Metric:
        return lambda confusion, histogram: float(parameter) * (share_right(confusion, histogram) or 0.0)

    settings: dict[str, Any] = {"dataset": "flat:nodes=80", "partition": "consecutive", "split": "every:5"}
    results = {
        metric: isthmus.run(
            "fedavg", **settings, metric=metric, clients=2, rounds=2, hidden=(4,), out=tmp_path / metric
        )
        for metric in ("accuracy", "share_right", "times@3")
    }
    plain = results["accuracy"]
    assert (plain["dataset"], plain["partition"], plain["split"]) == ("flat:nodes=80", "consecutive", "every:5")
    assert plain["test_last"] == results["share_right"]["test_last"]
    assert results["times@3"]["test_last"] == pytest.approx(3 * plain["test_last"])
    listed = {(row["kind"], row["name"]): row["what"] for row in list_partitions()}
    assert listed["partition", "consecutive"] == "Consecutive nodes, cut into pieces."
    assert listed["split", "every:4"] == "Every n-th node trains, the next validates."
    assert [entry.size for entry in list_datasets() if entry.name == "flat"] == [{"nodes": 60}]
    with pytest.raises(ConfigError, match=r"allowed: .*recall@100, .*share_right, times@2"):
        metrics.parse_metric("shares")


@pytest.mark.usefixtures("scratch")
def test_one_class_is_all_a_scenario_of_graphs_needs() -> None:
    @graphset_partition.GRAPH_PARTITIONS.register("pairs")
    @dataclass(frozen=True)
    class Pairs(graphset_partition.GraphPartitioner):
        """Two clients, graphs in turn."""

        def assign(self, data: GraphSetData, clients: int, stream: Stream) -> Tensor:
            return torch.arange(data.num_graphs) % 2

        def clients_per_set(self) -> int | None:
            return 2

    @graphset_split.GRAPH_SPLITS.register("halves")
    @dataclass(frozen=True)
    class Halves(graphset_split.StratifiedGraphSplit):
        """Half the graphs train."""

        @classmethod
        def parse(cls, rest: str | None) -> Self:
            return cls(split.Shares.parse("50/25/25"))

    scenario = build_graph_scenario(dataset="motifs:graphs=40", partition="pairs", split="halves")
    assert [data.num_graphs for data in scenario.parts.values()] == [20, 20]
    assert [data.num_train for data in scenario.parts.values()] == [10, 10]
    assert scenario.parts["client-1"].graph_id.tolist() == list(range(1, 40, 2))


def test_the_table_of_partitions_is_complete() -> None:
    """The overview at the top of the module names what the module registers, and nothing else."""
    table = {line.split()[0] for line in (partition.__doc__ or "").splitlines() if line.startswith("    ")}
    here = {name for name, cls in partition.PARTITIONS.items() if cls.__module__ == partition.__name__}
    assert table == here
