"""The model package: a folder with all that one owner needs to use its model after the run.

    weights.safetensors      the model; its metadata name format, method and a hash of model.toml
    model.toml               what the model is: method, settings, sizes, classes, round, who took part
    schema.toml              of tables: what columns mean
    scaling.safetensors      what features were scaled by: for tables what the owners agreed on
    structure.safetensors    what the method keeps beside weights (rows of S and of Abar, types of edges, ...)
    card.md                  for people: scores, calibration, protections, what not to use it for
    scores.json              the numbers of the card
    disclosure.json          what left this owner in training

``model.toml`` has the SHA-256 of every other file and the weights have one of ``model.toml``, so a package that was
damaged, cut off or edited in part is refused. That tells nothing of its origin: a package is its owner's own file and
is not signed. Everything is read as safetensors, TOML or JSON; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import tomli_w
import torch
from torch import Tensor, nn

import isthmus
from isthmus.data.feature_scaling import UNSCALED, Scaling
from isthmus.data.graph_set import GraphSetData
from isthmus.data.tables.model import TablesModel
from isthmus.errors import ConfigError, DataError, no_package
from isthmus.experiments.config import Settings, settings_from_toml
from isthmus.experiments.disclosure import sheet_of_settings
from isthmus.experiments.folder import write_atomic
from isthmus.experiments.model_card import card_text, scores_of
from isthmus.federation.engine import Export
from isthmus.federation.messages import SERVER, ClientId
from isthmus.methods.plain_model import of_raw_features, plain_model
from isthmus.methods.registry import Method
from isthmus.tensors import Weights, num_values

FORMAT = 1
MODELS = "models"
"""Folder of the packages of a run."""
MODEL, WEIGHTS, STRUCTURE, CARD = "model.toml", "weights.safetensors", "structure.safetensors", "card.md"
SCHEMA, SCALING, SCORES, DISCLOSURE = "schema.toml", "scaling.safetensors", "scores.json", "disclosure.json"
_SETTINGS = ("run", "method_config", "score")


@dataclass(frozen=True)
class Training:
    """What an owner knows of the training that ended, for its package.

    Args:
        settings: Resolved.
        clients: Everybody who took part.
        source: Where the data came from.
        privacy: Differential privacy of the run, as in its result.
        tables: By client, of a run on tables.
        split_seed: Of a split of tables by rule; None where it is the run's seed.
        scaling: Of one graph's features.
    """

    settings: Settings
    clients: Sequence[ClientId]
    source: str
    privacy: Mapping[str, Any] | None = None
    tables: Mapping[ClientId, TablesModel] = field(default_factory=dict)
    split_seed: int | None = None
    scaling: Scaling = UNSCALED


@dataclass(frozen=True)
class ModelPackage:
    """A package that was read and checked.

    Args:
        path: Its folder.
        facts: What ``model.toml`` says.
        weights: The model.
        structure: What the method keeps beside it, as bytes (`isthmus.federation.kept`).
        tables: Schema and scaling, of a model of tables.
        scaling: Of one graph's features; None where the package does not say.
    """

    path: Path
    facts: Mapping[str, Any]
    weights: Weights
    structure: bytes = b""
    tables: TablesModel | None = None
    scaling: Scaling | None = None

    @cached_property
    def settings(self) -> Settings:
        """Of the run that made it."""
        return settings_from_toml(_settings_text(self.facts))

    @property
    def method(self) -> Method:
        return self.settings.method

    @property
    def client(self) -> ClientId:
        """Whose package it is; ``server`` for what the server keeps."""
        return str(self.facts["client"])

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """Everybody who took part in the training."""
        return tuple(self.facts["clients"])

    @property
    def task(self) -> str:
        return str(self.facts["task"])

    @property
    def num_features(self) -> int:
        return int(self.facts["sizes"]["features"])

    @property
    def num_classes(self) -> int:
        return int(self.facts["sizes"]["classes"])

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(self.facts["class_names"])

    def plain_model(self) -> nn.Module:
        """The model as a plain module, see `isthmus.methods.plain_model.plain_model`; refused where it is more."""
        if self.settings.run.edge_weights != "ignore":
            raise ConfigError(
                "a model trained with edge_weights=use reads weights of edges, which a plain module does not: predict "
                "with `isthmus predict`, without explanations"
            )
        return plain_model(
            self.method,
            self.settings.method_config,
            self.weights,
            task=self.task,
            num_features=self.num_features,
            num_classes=self.num_classes,
        )

    def model_of_raw(self) -> nn.Module:
        """The same for features as they were given to the training: on their scale they are put by the module."""
        return of_raw_features(self.plain_model(), UNSCALED if self.scaling is None else self.scaling)

    @property
    def split_seed(self) -> int:
        """What the split of tables by rule was drawn with: an organisation chooses it itself."""
        return int(self.facts["data"].get("split_seed", self.settings.run.seed))

    def fits(self, data: Any) -> bool:
        """Whether these are, bit for bit, the data the model was trained on (labels and split aside)."""
        return data_digest(data) == str(self.facts["data"]["digest"])

    def check(self, data: Any) -> None:
        """Refuse data of another shape than the model's."""
        task = "graph" if isinstance(data, GraphSetData) else "node"
        if task != self.task:
            wanted = "sets of graphs" if self.task == "graph" else "nodes of one graph"
            raise DataError(f"the model of {self.client} classifies {wanted}: give such data")
        if data.num_features != self.num_features:
            raise DataError(
                f"the model of {self.client} takes {self.num_features} features, the data have {data.num_features}: "
                "give the columns it was trained on, in the same order"
            )
        if data.y.numel() and int(data.y.max()) >= self.num_classes:
            raise DataError(
                f"the data have class {int(data.y.max())}, and the model of {self.client} knows classes 0 to "
                f"{self.num_classes - 1}: give labels as in training, or none"
            )


def write_package(models: Path, client: ClientId, export: Export, data: Any, training: Training) -> None:
    """Write a client's package below ``models``; complete or not at all."""
    settings, weights = training.settings, export.weights or {}
    tables = training.tables.get(client)
    names = list(tables.class_names) if tables is not None else [str(number) for number in range(data.num_classes)]
    round = export.round if export.round is not None else settings.run.rounds
    facts = _facts(client, training, round=round) | {
        "task": "graph" if isinstance(data, GraphSetData) else "node",
        "class_names": names,
        "sizes": _sizes(data, weights),
        "data": {
            "dataset": settings.run.dataset,
            "source": training.source,
            "digest": data_digest(data),
            "scale": training.scaling.kind,
            "split_seed": settings.run.seed if training.split_seed is None else training.split_seed,
        },
    }
    scores = None if export.logits is None else scores_of(export.logits, data, names)
    files: dict[str, bytes] = {DISCLOSURE: _json(_disclosed(settings)), CARD: card_text(facts, scores).encode()}
    files |= {} if scores is None else {SCORES: _json(scores)}
    files |= {STRUCTURE: export.kept} if export.kept else {}
    if tables is not None:
        files |= {SCHEMA: tables.schema.text, SCALING: safetensors.torch.save(tables.tensors())}
    elif training.scaling.tensors():
        files |= {SCALING: safetensors.torch.save(training.scaling.tensors())}
    _write(models / client.replace("/", "."), facts, weights, files)


def write_server_package(models: Path, kept: bytes, training: Training) -> None:
    """Write what the server must keep to predict with messages."""
    facts = _facts(SERVER, training, round=training.settings.run.rounds)
    _write(models / SERVER, facts, {}, {STRUCTURE: kept})


def _facts(client: ClientId, training: Training, *, round: int) -> dict[str, Any]:
    settings = training.settings
    method = settings.method
    tables = tomllib.loads(settings.to_toml())
    privacy = {key: value for key, value in (training.privacy or {}).items() if value is not None}
    return {
        "format": FORMAT,
        "isthmus": isthmus.__version__,
        "client": client,
        "method": method.name,
        "reference": method.reference,
        "backbone": str(getattr(settings.method_config, "backbone", method.name)),
        "predicts": method.predicts,
        "no_prediction": method.no_prediction or ("" if method.predicts != "no" else "its clients define no logits()"),
        "round": round,
        "clients": sorted(training.clients),
        "run": tables["run"],
        "method_config": tables["method"],
        "score": tables["score"],
        **({"privacy": privacy} if privacy else {}),
    }


def _sizes(data: Any, weights: Weights) -> dict[str, int]:
    cross = getattr(data, "cross", None)
    return {
        "features": data.num_features,
        "classes": data.num_classes,
        "samples": data.num_graphs if isinstance(data, GraphSetData) else data.num_nodes,
        "edges": int(data.edge_index.shape[1]),
        "cross_edges": 0 if cross is None else cross.num_edges,
        **{part: int(getattr(data, part).sum()) for part in ("train", "val", "test")},
        "parameters": num_values(weights),
    }


def _disclosed(settings: Settings) -> dict[str, Any]:
    """Lines of the run's sheet whose sender is the owner or a device of it."""
    if settings.method.script is None:  # an own method in a simulation
        return {"method": settings.run.method, "rows": None}
    rows = [
        {
            "phase": line.phase,
            "sender": line.sender,
            "receiver": line.receiver,
            "message": line.message.__name__,
            "kinds": [str(kind) for kind in line.kinds],
            "protection": line.protection,
        }
        for line in sheet_of_settings(settings)
        if line.sender != SERVER
    ]
    return {"method": settings.run.method, "rows": rows}


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _write(path: Path, facts: Mapping[str, Any], weights: Weights, files: Mapping[str, bytes]) -> None:
    said = {"format": FORMAT, "method": facts["method"], "model": _model_hash(facts)}
    metadata = {"isthmus": json.dumps(said, sort_keys=True)}  # one key: safetensors writes several in any order
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in weights.items()}
    every = {WEIGHTS: safetensors.torch.save(tensors, metadata=metadata), **files}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(every.items())}
    fresh = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for name, content in every.items():
        write_atomic(fresh / name, content)
    write_atomic(fresh / MODEL, tomli_w.dumps({**facts, "files": hashes}).encode())
    shutil.rmtree(path, ignore_errors=True)
    fresh.rename(path)


def _model_hash(facts: Mapping[str, Any]) -> str:
    """Of all that ``model.toml`` says but the hashes of files, which depend on it."""
    said = {key: value for key, value in facts.items() if key != "files"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _settings_text(facts: Mapping[str, Any]) -> str:
    return tomli_w.dumps({"run": facts["run"], "method": facts["method_config"], "score": facts["score"]})


# -- reading ---------------------------------------------------------------------------------------


def read_package(path: Path) -> ModelPackage:
    """Read a package and check it as a whole; what is wrong with it is named."""
    facts = _read_facts(path)
    contents = {name: _checked(path, name, digest) for name, digest in facts["files"].items()}
    if WEIGHTS not in contents:
        raise DataError(f"{path / MODEL} lists no {WEIGHTS}: copy the package again")
    try:
        weights = safetensors.torch.load(contents[WEIGHTS])
        with safetensors.safe_open(path / WEIGHTS, framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get("isthmus", "{}"))
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise DataError(f"{path / WEIGHTS} is no safetensors file ({error}): copy the package again") from None
    if metadata.get("model") != _model_hash(facts):
        raise DataError(f"{path / MODEL} was changed since the weights were written: copy the package again")
    tables, scaling = None, None
    tensors = safetensors.torch.load(contents[SCALING]) if SCALING in contents else {}
    if SCHEMA in contents:
        tables = TablesModel.of(contents[SCHEMA], tensors)
    elif kind := facts.get("data", {}).get("scale"):
        scaling = Scaling.of(kind, tensors)
    return ModelPackage(path, facts, weights, contents.get(STRUCTURE, b""), tables, scaling)


def read_packages(folder: Path) -> dict[ClientId, ModelPackage]:
    """All packages below a folder (``RUN_DIR/models``), or the one it is, by whose they are."""
    if (folder / MODEL).exists():
        package = read_package(folder)
        return {package.client: package}
    found: dict[ClientId, ModelPackage] = {}
    for path in sorted(one.parent for one in folder.glob(f"*/{MODEL}") if not one.parent.name.startswith(".")):
        package = read_package(path)
        if package.client in found:
            raise DataError(f"{path} and {found[package.client].path} are both of {package.client}: take one away")
        found[package.client] = package
    if not found:
        hint = ": a run folder has them under models/" if folder.is_dir() else ": there is no such folder"
        if list(folder.glob("*.safetensors")):
            hint = " (older versions wrote bare weights: train again)"
        raise no_package(folder, hint)
    first, *others = found.values()
    for other in others:
        if _settings_text(other.facts) != _settings_text(first.facts):
            raise DataError(f"{other.path} and {first.path} are of different runs: give the packages of one run")
    return found


def _read_facts(path: Path) -> dict[str, Any]:
    file = path / MODEL
    try:
        facts = tomllib.loads(file.read_text())
    except OSError as error:
        raise DataError(f"{path} is no model package: cannot read {MODEL} ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{file} is damaged ({error}): copy the package again") from None
    version = facts.get("format")
    if not isinstance(version, int):
        raise DataError(f"{file} does not say its format: copy the package again")
    if version > FORMAT:
        raise ConfigError(
            f"{path} has package format {version}, written by Isthmus {facts.get('isthmus', 'of a later version')}; "
            f"this one ({isthmus.__version__}) reads format {FORMAT}: upgrade Isthmus"
        )
    needed = {
        "client": str,
        "method": str,
        "clients": list,
        "files": dict,
        "run": dict,
        "method_config": dict,
        "score": dict,
    }
    for key, kind in needed.items():
        if not isinstance(facts.get(key), kind):
            raise DataError(f"{file} lacks {key!r}: copy the package again")
    return facts


def _checked(path: Path, name: str, digest: object) -> bytes:
    if "/" in name or "\\" in name or name.startswith("."):
        raise DataError(f"{path / MODEL} lists {name!r}, which is no file of a package")
    try:
        content = (path / name).read_bytes()
    except OSError as error:
        raise DataError(f"{path} lacks {name} ({error.strerror}): copy the whole folder") from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise DataError(
            f"{path / name} is not the file this package was written with (its SHA-256 differs): copy the package again"
        )
    return content


def data_digest(data: Any) -> str:
    """SHA-256 of what a model reads of an owner's data: features, edges, ids, edges to other owners."""
    found = hashlib.sha256()
    names = ("x", "edge_index", "edge_weight", "ptr", "edge_ptr", "node_id")
    tensors = [getattr(data, name) for name in names if getattr(data, name, None) is not None]
    cross = getattr(data, "cross", None)
    if cross is not None:
        found.update("\0".join(cross.owners).encode())
        tensors += [cross.own, cross.owner, cross.other, cross.outgoing, cross.weight]
    for tensor in tensors:
        for part in _dense_parts(tensor):
            found.update(f"{part.dtype}{tuple(part.shape)}".encode())
            found.update(part.contiguous().numpy().tobytes())
    return found.hexdigest()


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    if tensor.layout == torch.sparse_csr:
        return [tensor.crow_indices().long(), tensor.col_indices().long(), tensor.values()]
    return [tensor]
