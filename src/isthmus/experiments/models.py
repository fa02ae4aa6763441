"""The models a run left, ready to predict: ``isthmus.load_models(RUN_DIR).predict(part="test")``."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.data.feature_scaling import UNSCALED
from isthmus.data.graph_set import GraphSetData
from isthmus.data.node_data import NodeData
from isthmus.data.own_dataset import SITE_TABLES
from isthmus.data.own_graph import OwnGraphs, from_pyg
from isthmus.data.partition import client_ids
from isthmus.data.scenario import as_used
from isthmus.data.split_graph import split_graph
from isthmus.data.tables.model import TablesModel
from isthmus.data.whole_graph import Loaded
from isthmus.errors import ConfigError, DataError, unknown
from isthmus.experiments.model_package import MODELS, ModelPackage, read_packages
from isthmus.experiments.prediction import check_predicts, predict_logits
from isthmus.experiments.scenarios import parts_for, scenario_of
from isthmus.federation.ledger import Entry
from isthmus.federation.messages import SERVER, ClientId
from isthmus.methods.explain import Explanation
from isthmus.methods.explain import explain as explain_nodes

PARTS = ("train", "val", "test")
Ids = Sequence[Any]


@dataclass(frozen=True)
class Predictions:
    """What one client's model says of its samples, one row each.

    Args:
        client: Whose they are.
        id: Of each node or graph, as its owner calls it.
        predicted: Class index (n,).
        probability: Of every class (n, C).
        label: Class index where known, else -1 (n,).
        class_names: By class index.
        parts: Masks of the split (n,), where there is one.
        explanations: One each, with the owner's names of nodes and columns, where they were asked for.
    """

    client: ClientId
    id: Ids
    predicted: Tensor
    probability: Tensor
    label: Tensor
    class_names: tuple[str, ...]
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    explanations: Sequence[Explanation] | None = None

    def __len__(self) -> int:
        return int(self.predicted.numel())

    def __repr__(self) -> str:
        """Whose, how many, and how often each class: rows are in the fields."""
        counts = self.predicted.bincount(minlength=len(self.class_names)).tolist()
        classes = ", ".join(f"{name}: {count}" for name, count in zip(self.class_names, counts, strict=False))
        return f"Predictions({self.client}, {len(self)} rows, predicted {classes})"

    def of_part(self, part: str | None) -> Predictions:
        """Those of ``train``, ``val`` or ``test``; all for None or ``all``."""
        if part in (None, "all"):
            return self
        if part not in PARTS:
            raise unknown("part", str(part), ("all", *PARTS))
        if part not in self.parts:
            raise ConfigError(f"these data have no split: leave part={part} out")
        return self.rows(self.parts[part])

    def rows(self, mask: Tensor) -> Predictions:
        """Some of the samples."""
        chosen = torch.nonzero(mask).flatten()
        return Predictions(
            self.client,
            [self.id[row] for row in chosen.tolist()],
            self.predicted[chosen],
            self.probability[chosen],
            self.label[chosen],
            self.class_names,
            {part: each[chosen] for part, each in self.parts.items()},
            None if self.explanations is None else [self.explanations[row] for row in chosen.tolist()],
        )

    def of_ids(self, ids: Collection[str] | None) -> Predictions:
        """Those of some samples, by id as text; all for None."""
        return self if ids is None else self.rows(torch.tensor([str(one) in ids for one in self.id], dtype=torch.bool))

    @property
    def correct(self) -> int:
        """Predictions that are right, among those with a label."""
        return int(((self.predicted == self.label) & (self.label >= 0)).sum())

    @property
    def labelled(self) -> int:
        return int((self.label >= 0).sum())

    def columns(self) -> dict[str, list[Any]]:
        """As a table: id, predicted, a column per class, the label where any is known, and explanations where there
        are any: JSON objects of contributions by name, the largest first.
        """
        names = self.class_names
        found: dict[str, list[Any]] = {
            "id": list(self.id),
            "predicted": [names[number] for number in self.predicted.tolist()],
        }
        for number, name in enumerate(names):
            found[f"probability_{name}"] = self.probability[:, number].tolist()
        found["label"] = [names[number] if number >= 0 else None for number in self.label.tolist()]
        if self.explanations is not None:
            found["top_features"] = [_as_json(one.features) for one in self.explanations]
            found["top_neighbours"] = [_as_json(one.neighbours) for one in self.explanations]
            found["own_features"] = [one.own for one in self.explanations]
            found["margin"] = [one.margin for one in self.explanations]
        return found


def _as_json(contributions: Sequence[tuple[Any, float]]) -> str:
    return json.dumps({str(name): float(f"{part:.6g}") for name, part in contributions}, ensure_ascii=False)


def pooled_accuracy(predictions: Mapping[ClientId, Predictions]) -> float | None:
    """Right over all, of all clients' labelled samples."""
    total = sum(one.labelled for one in predictions.values())
    return sum(one.correct for one in predictions.values()) / total if total else None


def check_ending(path: Path) -> None:
    """Refuse a file that predictions cannot be written to, before they are made."""
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise ConfigError(f"{path.name}: predictions are written as .csv or .parquet")


def write_predictions(predictions: Mapping[ClientId, Predictions], path: Path) -> None:
    """One file, CSV or Parquet; with a column ``client`` where there are several."""
    check_ending(path)
    tables = {client: one.columns() for client, one in predictions.items()}
    names = list(dict.fromkeys(name for table in tables.values() for name in table))
    several = len(tables) > 1
    columns: dict[str, list[Any]] = {"client": []} if several else {}
    columns |= {name: [] for name in names}
    for client, table in tables.items():
        count = len(table["id"])
        if several:
            columns["client"] += [client] * count
        for name in names:
            columns[name] += table.get(name, [None] * count)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() == ".parquet":
            from isthmus.data.tables.frames import pl

            pl.DataFrame(columns).write_parquet(path)
            return
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another --out") from None


@dataclass(frozen=True)
class Samples:
    """Data to predict for, and how their owner calls each sample."""

    data: Any
    id: Ids


class Models:
    """Model packages of one run: of all its clients, or of some.

    Args:
        packages: By client; ``server`` for what the server keeps.
    """

    def __init__(self, packages: Mapping[ClientId, ModelPackage]) -> None:
        self.packages = dict(packages)
        self.entries: tuple[Entry, ...] = ()
        """Messages of the last prediction."""

    @property
    def clients(self) -> tuple[ClientId, ...]:
        return tuple(sorted(client for client in self.packages if client != SERVER))

    def predict(
        self,
        client: ClientId | None = None,
        *,
        part: str | None = None,
        data: Any = None,
        tables: str | os.PathLike[str] | None = None,
        nodes: str | os.PathLike[str] | None = None,
        edges: str | os.PathLike[str] | None = None,
        ids: Collection[Any] | None = None,
        explain: int = 0,
    ) -> dict[ClientId, Predictions]:
        """Predictions of one client, or of all, by client.

        Args:
            client: Whose; None for all whose packages are here.
            part: ``train``, ``val`` or ``test`` of the split; None for all samples.
            data: Other data than those of the training, features and edges as they were given then: a torch_geometric
                ``Data`` of one client, one per client by name, or one of all with ``owner``, which a method that uses
                edges between owners needs. New nodes and edges are part of it. A ``NodeData`` is taken as it is.
            tables: Folder of tables: one owner's, or a folder of such folders.
            nodes, edges: Further rows of one owner's tables.
            ids: Only these samples, as their owner calls them; None for all.
            explain: How many features and neighbours are named for each node, of its owner's own; 0 for none. Refused
                where the model is no plain graph neural network on its client's own graph.
        """
        if explain < 0:
            raise ConfigError(f"explain must be at least 0, got {explain}")
        if client is not None and client not in self.clients:
            raise unknown("client", client, self.clients)
        first = self.packages[self.clients[0]] if self.clients else None
        if first is None:
            raise ConfigError("the server's package holds no model: give the packages of the clients")
        check_predicts(first.method)
        alone = first.method.predict is None
        wanted = (client,) if client is not None and alone else self.clients
        plain = {name: explained_model(self.packages[name]) for name in wanted} if explain else {}
        samples = self._samples(wanted, data, tables, nodes, edges)
        chosen = self.packages if not alone else {name: self.packages[name] for name in wanted}
        logits, self.entries = predict_logits(chosen, {name: one.data for name, one in samples.items()})
        found = {
            name: predictions_of(self.packages[name], logits[name], samples[name]).of_part(part)
            for name in sorted(logits)
            if client in (None, name)
        }
        if ids is not None:
            found = _of_ids(found, ids)
        return (
            {name: self._explained(one, plain[name], samples[name], explain) for name, one in found.items()}
            if explain
            else found
        )

    def _explained(self, found: Predictions, model: nn.Module, samples: Samples, top: int) -> Predictions:
        names = dict(zip(samples.data.node_id.tolist(), samples.id, strict=True))
        numbers = {own: number for number, own in names.items()}
        tables = self.packages[found.client].tables
        columns = None if tables is None else tables.schema.columns
        parts = explain_nodes(model, samples.data, [numbers[own] for own in found.id], top=top)
        return replace(found, explanations=[one.named(names, columns) for one in parts])

    def _samples(
        self, clients: Sequence[ClientId], data: Any, tables: Any, nodes: Any, edges: Any
    ) -> dict[ClientId, Samples]:
        if data is not None:
            if tables is not None or nodes is not None or edges is not None:
                raise ConfigError("give data, or tables with further rows, not both")
            return self._given(clients, data)
        settings = self.packages[clients[0]].settings
        if self.packages[clients[0]].tables is not None:
            folder = tables if tables is not None else settings.run.dataset
            if folder == SITE_TABLES:
                raise ConfigError("the model was trained on each organisation's tables: name yours with --tables")
            return self._tables(clients, Path(folder), nodes and Path(nodes), edges and Path(edges))
        if tables is not None or nodes is not None or edges is not None:
            raise ConfigError("the model was not trained on tables: give data of its kind with --data")
        parts = parts_for(settings, scenario_of(settings))
        return {name: Samples(parts[name], own_ids(parts[name])) for name in clients}

    def _given(self, clients: Sequence[ClientId], data: Any) -> dict[ClientId, Samples]:
        by_client = data if isinstance(data, Mapping) and not hasattr(data, "edge_index") else None
        if by_client is None and len(clients) > 1:
            by_client = _by_owner(data, [self.packages[name] for name in clients])
        elif by_client is None:
            by_client = {clients[0]: data}
        missing = sorted(set(clients) - set(by_client))
        if missing:
            raise ConfigError(f"no data for {', '.join(missing)}: give data for every client")
        found = {}
        for name in clients:
            one = _as_samples(by_client[name], self.packages[name])
            found[name] = Samples(one, own_ids(one))
        return found

    def _tables(
        self, clients: Sequence[ClientId], folder: Path, nodes: Path | None, edges: Path | None
    ) -> dict[ClientId, Samples]:
        from isthmus.data.tables.check import owner_folders
        from isthmus.data.tables.new_rows import read_to_predict
        from isthmus.data.tables.schema import FILE, read_schema
        from isthmus.experiments.tables import prepare
        from isthmus.preparation import link_of

        models: dict[ClientId, TablesModel] = {}
        for name in clients:
            model = self.packages[name].tables
            assert model is not None
            models[name] = model
        settings = self.packages[clients[0]].settings
        if (nodes is not None or edges is not None) and len(clients) > 1:
            raise ConfigError("further rows belong to one owner: add them to its tables, then predict for all")
        apart = owner_folders(folder) if folder.is_dir() else {}
        folders = {name: apart.get(name, folder) for name in clients}
        if apart and not set(clients) <= apart.keys():
            raise DataError(f"{folder} has no tables of {', '.join(sorted(set(clients) - apart.keys()))}")
        if not apart and len(clients) > 1:
            raise DataError(
                f"{folder} holds one owner's tables, and {len(clients)} models predict: give a folder of all"
            )
        tables = {}
        for name, path in folders.items():
            if (path / FILE).exists():
                models[name].check(read_schema(path))
            tables[name] = read_to_predict(
                path, name, models[name].schema, seed=self.packages[name].split_seed, nodes=nodes, edges=edges
            )
        link = link_of(settings.run.link, organisations=False) if len(clients) > 1 else "none"
        ready = prepare(
            tables,
            seed=settings.run.seed,
            secure=settings.secure,
            link=link,
            models=models,
            edge_weights=settings.run.edge_weights,
        )
        cross = settings.method.cross_edges
        found = {}
        for name, part in ready.parts.items():
            held = part.without_cross() if isinstance(part, NodeData) and not cross else part
            graphs = tables[name].graph_ids
            found[name] = Samples(held, (tables[name].ids if graphs is None else graphs).to_list())
        return found


def explained_model(package: ModelPackage) -> nn.Module:
    """The plain module whose predictions of nodes can be explained."""
    model = package.plain_model()
    if package.task != "node":
        raise ConfigError("explanations are of nodes; this model classifies graphs: predict without them")
    return model


def _of_ids(found: Mapping[ClientId, Predictions], ids: Collection[Any]) -> dict[ClientId, Predictions]:
    """Of some samples; clients that have none of them are left out."""
    wanted = {str(one) for one in ids}
    strange = wanted - {str(one) for each in found.values() for one in each.id}
    if strange:
        raise ConfigError(f"no sample {min(strange)!r} among those of {', '.join(found)}: give ids as their owner does")
    chosen = {name: each.of_ids(wanted) for name, each in found.items()}
    return {name: each for name, each in chosen.items() if len(each)}


def _as_samples(given: Any, package: ModelPackage) -> Any:
    """Data as parties hold them."""
    if isinstance(given, NodeData | GraphSetData):
        return given
    if package.task == "graph" and not isinstance(given, Loaded | OwnGraphs):
        given = from_pyg({package.client: list(given)}, labelled=False)
    elif not isinstance(given, Loaded | OwnGraphs):
        given = from_pyg(given, labelled=False)
    if isinstance(given, OwnGraphs) and package.task == "graph":
        graphs = given.parts.get(package.client, next(iter(given.parts.values())))
        return replace(graphs, num_classes=max(package.num_classes, graphs.num_classes))
    loaded = given
    if isinstance(loaded, OwnGraphs):
        raise DataError(f"the model of {package.client} classifies the nodes of one graph: give one Data")
    if package.method.cross_edges and len(package.clients) > 1:
        raise ConfigError(
            f"{package.method.name} uses edges between owners: give one Data of all clients that says whose each node "
            "is (owner), or tables"
        )
    return _as_trained(loaded, package)


def _as_trained(loaded: Loaded, package: ModelPackage) -> NodeData:
    """A graph as the training saw its own: features on the same scale, arcs read the same way."""
    package.check(loaded.data)
    run, scaling = package.settings.run, package.scaling
    if scaling is None:
        if run.scale != "none":
            raise DataError(f"{package.path} does not say how features were scaled: train again with this version")
        scaling = UNSCALED
    data = as_used(loaded, scaling, undirected=run.undirected, edge_weights=run.edge_weights)
    return replace(data, num_classes=package.num_classes)


def _by_owner(given: Any, packages: Sequence[ModelPackage]) -> dict[ClientId, NodeData]:
    """One graph of all clients, divided as its ``owner`` says."""
    first, clients = packages[0], [package.client for package in packages]
    loaded = given if isinstance(given, Loaded | OwnGraphs) else from_pyg(given, labelled=False)
    if isinstance(loaded, OwnGraphs) or first.task == "graph":
        raise ConfigError(f"sets of graphs, and models of {len(clients)} clients: give a dict of them by client")
    if loaded.owner is None:
        needs = " of all clients" if first.method.predict is not None else ""
        raise ConfigError(
            f"one graph, and models of {len(clients)} clients: say whose they are, that is give one client, data by "
            f"client, or one Data{needs} that says whose each node is (owner)"
        )
    names = loaded.owner_names or client_ids(len(first.clients))
    if strange := sorted(set(names) - set(first.clients)):
        raise DataError(f"owner names {', '.join(strange)}; the models are of {', '.join(first.clients)}")
    if int(loaded.owner.max()) >= len(names):
        raise DataError(f"owner counts to {int(loaded.owner.max())}; there are models of {len(names)} clients, from 0")
    kept = torch.nonzero(loaded.owner >= 0).flatten()
    if kept.numel() < loaded.owner.numel():
        loaded = loaded.restricted(kept)
    assert loaded.owner is not None
    parts = split_graph(_as_trained(loaded, first), loaded.owner, tuple(names))
    return {name: one if first.method.cross_edges else one.without_cross() for name, one in parts.items()}


def own_ids(data: Any) -> list[int]:
    """Ids of the samples of data that are no tables."""
    ids: Tensor = data.graph_id if isinstance(data, GraphSetData) else data.node_id
    return ids.tolist()


def predictions_of(package: ModelPackage, logits: Tensor, samples: Samples) -> Predictions:
    """Predictions of one client from the logits of its model."""
    data = samples.data
    return Predictions(
        package.client,
        samples.id,
        logits.argmax(1),
        torch.softmax(logits, 1),
        data.y,
        package.class_names,
        {part: getattr(data, part) for part in PARTS if bool(getattr(data, part).any())},
    )


def load_models(path: str | os.PathLike[str]) -> Models:
    """Models to predict with.

    Args:
        path: A run folder, its folder ``models`` (or a copy of it), or one model package.
    """
    folder = Path(path)
    inside = folder / MODELS
    return Models(read_packages(inside if inside.is_dir() else folder))
