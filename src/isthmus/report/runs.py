"""Run folders, read back.

The report sees nothing but what a run left on disk, and it trusts none of it: every value is checked for its type here,
once, so that the rest of the report works on plain, typed records. `result.json` is what makes a folder usable.
Where anything else is missing or damaged, its own figure is left out and one line on the page says so.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.errors import DataError
from isthmus.metrics.score_bins import BINS, WIDTH, mean_of_bins, std_of_bins

REQUIRED = ("method", "dataset", "seed", "test")

_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True)
class Point:
    """One evaluated round. `step` counts rounds through all phases; scores lie in 0..1, None where not measured."""

    step: int
    val: float | None
    test: float | None
    minority: float | None = None
    """Test accuracy on nodes of other classes than their client's majority class, whatever the score is."""
    train_loss: float | None = None
    val_loss: float | None = None
    sent: float | None = None
    """Bytes until then, setup included, evaluations not."""
    seconds: float | None = None
    accuracy: float | None = None
    """On all test nodes, whatever the score is."""


@dataclass(frozen=True)
class ClientScore:
    """One client at the selected round: its sizes and its scores (None where it has nothing to score)."""

    client: str
    nodes: int | None
    train: int | None
    val: int | None
    test: int | None
    test_score: float | None


@dataclass(frozen=True)
class Disclosure:
    """One row of the disclosure sheet: what one role sent another, how protected, how often, how large."""

    phase: str
    sender: str
    receiver: str
    message: str
    kinds: tuple[str, ...]
    protection: str
    times: float
    bytes: float
    bytes_by_kind: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Partition:
    """How the graph is split. `clients` fixes the order of every other field; a field the run did not record is
    None.
    """

    clients: tuple[str, ...]
    sizes: tuple[int, ...]
    cross_edges: tuple[tuple[int, ...], ...] | None
    cross_share: float | None
    labels: tuple[tuple[int, ...], ...] | None
    homophily: tuple[float | None, ...]
    edges_inside: tuple[int | None, ...]
    things: str = "nodes"
    """What clients hold and sizes count: nodes of one graph, or graphs."""


@dataclass(frozen=True)
class Confusion:
    """Test samples of all clients by true class (row) and class they were given (column)."""

    classes: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Run:
    """One finished run. `settings` is its configuration without what may differ between repetitions (seed, folders)."""

    path: Path
    method: str
    dataset: str
    partition_name: str
    clients: int | None
    split: str
    seed: int
    metric: str
    result: Mapping[str, Any]
    settings: Mapping[str, Any]
    config_text: str
    curve: tuple[Point, ...]
    per_client: tuple[ClientScore, ...]
    disclosure: tuple[Disclosure, ...] | None
    protections: Mapping[str, str]
    partition: Partition | None
    notes: tuple[str, ...]
    confusion: Confusion | None = None

    @property
    def chosen(self) -> str:
        """The variant of the method that validation chose among several; empty where nothing was chosen."""
        return self.text("variant") if self.result.get("variants") and self.result.get("varied") else ""

    @property
    def reference(self) -> bool:
        """Whether it is no federation: every client alone, or all data in one place."""
        return self.method in ("local", "central") or self.pooled

    @property
    def pooled(self) -> bool:
        """Whether the run had all data in one place, so that its scores are not those of the scenario's clients."""
        owners = self.partition.clients if self.partition is not None else ()
        return len(owners) > 1 and bool(self.per_client) and not {row.client for row in self.per_client} & set(owners)

    @property
    def things(self) -> str:
        """What is classified: nodes, or graphs."""
        return "nodes" if self.partition is None else self.partition.things

    def number(self, *keys: str) -> float | None:
        """The finite number at this path of `result.json`, None where there is none."""
        value: Any = self.result
        for key in keys:
            if not isinstance(value, Mapping):
                return None
            value = value.get(key)
        return as_number(value)

    def text(self, key: str) -> str:
        """The value at this key of `result.json` as text, empty where there is none."""
        value = self.result.get(key)
        return "" if value is None else str(value)


@dataclass(frozen=True)
class LeftOut:
    """A folder the page could not use, and why."""

    path: Path
    reason: str


def read_runs(run_dirs: Sequence[Path]) -> tuple[list[Run], list[LeftOut]]:
    """Every folder that holds a finished run, in the order given, and those that do not.

    Raises:
        DataError: No folder is usable; the message names each with what it lacks.
    """
    runs: list[Run] = []
    left_out: list[LeftOut] = []
    seen: set[Path] = set()
    for path in run_dirs:
        if path.resolve() in seen:
            continue  # the same folder given twice is one run, not two seeds
        seen.add(path.resolve())
        try:
            runs.append(read_run(path))
        except DataError as error:
            left_out.append(LeftOut(path, str(error).removeprefix(f"{path}: ")))
    if not runs:
        if not left_out:
            raise DataError("no run folder given: name at least one folder written by `isthmus run`")
        raise DataError("no usable run folder: " + "; ".join(f"{entry.path}: {entry.reason}" for entry in left_out))
    return runs, left_out


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Run folders: those given, and where a folder holds runs instead (of `isthmus compare`, say) the finished runs in
    it.

    Raises:
        DataError: A folder is no run and holds none.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir() or any((path / name).exists() for name in ("result.json", "config.toml")):
            found.append(path)  # a run, or something `read_run` can say more about
            continue
        inside = [result.parent for depth in ("*", "*/*") for result in path.glob(f"{depth}/result.json")]
        if not inside:
            raise DataError(
                f"{path} holds no finished run: name a folder written by `isthmus run`, `compare` or `sweep`"
            )
        found += sorted(inside, key=lambda folder: natural(str(folder)))
    return found


def read_run(path: Path) -> Run:
    """One run folder.

    Raises:
        DataError: The folder, its `result.json` or a key without which nothing can be shown is missing or damaged.
    """
    if not path.is_dir():
        raise DataError(f"{path}: no such folder")
    result = _result(path)
    notes: list[str] = []
    settings, config_text = _config(path, notes)
    settings = _as_asked(settings, result)
    if "client_scores" in result and result.get("per_client") is None:
        notes.append(_hidden_clients(result["client_scores"]))
    return Run(
        path=path,
        method=str(result["method"]),
        dataset=str(result["dataset"]),
        partition_name=_text(result.get("partition")),
        clients=_whole(result.get("clients")),
        split=_text(result.get("split")),
        seed=int(result["seed"]),
        metric=_text(result.get("metric")) or "accuracy",
        result=result,
        settings=settings,
        config_text=config_text,
        curve=_curve(path, notes),
        per_client=_per_client(result),
        disclosure=_disclosure(path, notes),
        protections=_protections(path),
        partition=_partition(path, notes),
        notes=tuple(notes),
        confusion=_confusion(path),
    )


def natural(name: str) -> list[tuple[int, int | str]]:
    """Sort key under which client-2 comes before client-10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in _DIGITS.split(name) if part]


def as_number(value: object) -> float | None:
    """The value as a finite float; None for anything else (bools, NaN and infinities included)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _whole(value: object) -> int | None:
    number = as_number(value)
    return None if number is None else round(number)


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _result(path: Path) -> dict[str, Any]:
    file = path / "result.json"
    if not file.is_file():
        raise DataError(f"{path}: result.json is missing, so the run has not finished; `isthmus resume` continues it")
    result = _json(file)
    if not isinstance(result, dict):
        raise DataError(f"{path}: result.json is damaged (not a JSON object); run it again")
    missing = [key for key in REQUIRED if result.get(key) is None]
    if missing:
        raise DataError(f"{path}: result.json lacks {', '.join(missing)}; run it again")
    if _whole(result["seed"]) is None or as_number(result["test"]) is None:
        raise DataError(f"{path}: seed or test in result.json is not a finite number; run it again")
    return result


def _json(file: Path) -> object:
    """The parsed file, None if it cannot be read as JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


# What may differ between repetitions of one experiment: the seed, where a run was put, and what it wrote beside its
# results.
_NOT_A_SETTING = frozenset({"seed", "out", "run_dir", "checkpoint", "checkpoint.every", "tensorboard"})


def _config(path: Path, notes: list[str]) -> tuple[dict[str, Any], str]:
    file = path / "config.toml"
    try:
        text = file.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except (OSError, ValueError):
        notes.append(f"config.toml is {'damaged' if file.is_file() else 'missing'}: settings not shown")
        return {}, ""
    run = tables.get("run")
    if isinstance(run, dict):
        tables["run"] = {key: value for key, value in run.items() if key not in _NOT_A_SETTING}
    return tables, text


def _as_asked(settings: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without what validation chose in this run: runs that chose differently were asked the same."""
    varied = result.get("varied")
    if not result.get("variants") or not isinstance(varied, list):
        return dict(settings)
    mine = {"variant", *varied}
    asked = {
        name: {key: value for key, value in table.items() if key not in mine} if isinstance(table, dict) else table
        for name, table in settings.items()
    }
    return asked | {"run": _mapping(asked.get("run")) | {"variant": "auto"}}


def _curve(path: Path, notes: list[str]) -> tuple[Point, ...]:
    file = path / "metrics.jsonl"
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        notes.append("metrics.jsonl is missing or unreadable: no learning curve")
        return ()
    records: dict[tuple[str, int], tuple[float | None, ...]] = {}
    broken = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        index = _whole(record.get("round")) if isinstance(record, dict) else None
        if not isinstance(record, dict) or index is None:
            broken += 1
            continue
        val, test = as_number(record.get("val")), as_number(record.get("test"))
        if val is not None or test is not None:
            # A resumed run may write a round twice: the later line is the one that was kept.
            records[(_text(record.get("phase")), index)] = (
                val,
                test,
                _share(_mapping(record.get("test_groups")).get("minority")),
                as_number(record.get("train_loss")),
                as_number(record.get("val_loss")),
                _sum(record.get("bytes")),
                as_number(record.get("seconds")),
                as_number(record.get("test_accuracy", record.get("test"))),
            )
    if broken:
        notes.append(f"metrics.jsonl: {broken} unreadable line{'s' if broken > 1 else ''} skipped")
    return tuple(_through_phases(records))


def _sum(parts: object) -> float | None:
    """Of all numbers of a map; None where one is none."""
    numbers = [as_number(part) for part in parts.values()] if isinstance(parts, dict) else []
    known = [number for number in numbers if number is not None]
    return sum(known) if known and len(known) == len(numbers) else None


def _confusion(path: Path) -> Confusion | None:
    """Summed over the clients' model packages; None where one has none, or where classes differ."""
    total: list[list[int]] = []
    names: tuple[str, ...] = ()
    for file in sorted((path / "models").glob("*/scores.json")):
        part = _mapping(_mapping(_json(file)).get("test"))
        if not part:
            continue  # a client without test samples
        classes = tuple(str(_mapping(one).get("class")) for one in part.get("classes") or () if isinstance(one, dict))
        counts = _square(part.get("confusion"), range(len(classes)))
        if counts is None or not classes or (names and classes != names):
            return None
        names = classes
        total = total or [[0] * len(classes) for _ in classes]
        total = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(total, counts, strict=True)]
    return Confusion(names, tuple(map(tuple, total))) if total else None


def _share(counts: object) -> float | None:
    """Right answers over all answers, of a pair of counts."""
    right, total = (
        (as_number(count) for count in counts) if isinstance(counts, list) and len(counts) == 2 else (None, None)
    )
    return right / total if right is not None and total else None


def _through_phases(records: Mapping[tuple[str, int], tuple[float | None, ...]]) -> Iterator[Point]:
    """Rounds on one axis: a phase that starts counting anew is put behind the one before it."""
    phases: dict[str, dict[int, tuple[float | None, ...]]] = {}
    for (phase, index), scores in records.items():
        phases.setdefault(phase, {})[index] = scores
    end: int | None = None
    for rounds in phases.values():
        order = sorted(rounds)
        shift = end + 1 - order[0] if end is not None and order[0] <= end else 0
        for index in order:
            yield Point(index + shift, *rounds[index])
        end = order[-1] + shift


def _per_client(result: Mapping[str, Any]) -> tuple[ClientScore, ...]:
    entries = result.get("per_client")
    if not isinstance(entries, list):
        return ()
    rows = [
        ClientScore(
            client=str(entry["client"]),
            nodes=_whole(entry.get("nodes")),
            train=_whole(entry.get("train")),
            val=_whole(entry.get("val")),
            test=_whole(entry.get("test")),
            test_score=as_number(entry.get("test_score")),
        )
        for entry in entries
        if isinstance(entry, dict) and "client" in entry
    ]
    return tuple(sorted(rows, key=lambda row: natural(row.client)))


def _hidden_clients(bins: object) -> str:
    """What a report says of clients under secure sums."""
    known = "secure sums: scores of single clients are not known"
    counts = bins.get("test") if isinstance(bins, Mapping) else None
    if not isinstance(counts, list) or len(counts) != BINS or not all(type(count) is int for count in counts):
        return f"{known}, and too few clients took part for a histogram"
    mean, std = mean_of_bins(counts), std_of_bins(counts)
    if mean is None or std is None:
        return known
    return f"{known}; from a histogram with bins of {WIDTH:g}: mean {100 * mean:.1f} %, deviation {100 * std:.1f}"


def _disclosure(path: Path, notes: list[str]) -> tuple[Disclosure, ...] | None:
    file = path / "disclosure.json"
    sheet = _json(file) if file.is_file() else None
    rows = sheet.get("rows") if isinstance(sheet, dict) else None
    if not isinstance(rows, list):
        notes.append(f"disclosure.json is {'damaged' if file.is_file() else 'missing'}: who saw what is not known")
        return None
    result = []
    for row in rows:
        if not isinstance(row, dict):
            continue
        kinds = row.get("kinds")
        by_kind = row.get("bytes_by_kind")
        result.append(
            Disclosure(
                phase=_text(row.get("phase")),
                sender=_text(row.get("sender")),
                receiver=_text(row.get("receiver")),
                message=_text(row.get("message")),
                kinds=tuple(str(kind) for kind in kinds) if isinstance(kinds, list) else (),
                protection=_text(row.get("protection")),
                times=as_number(row.get("times")) or 0.0,
                bytes=as_number(row.get("bytes")) or 0.0,
                bytes_by_kind=tuple((str(kind), as_number(size) or 0.0) for kind, size in by_kind.items())
                if isinstance(by_kind, dict)
                else (),
            )
        )
    return tuple(result)


def _protections(path: Path) -> dict[str, str]:
    """What each word for a protection means, as the run itself says; empty where it does not."""
    sheet = _json(path / "disclosure.json")
    return {
        word: str(meaning)
        for word, meaning in _mapping(sheet.get("protections") if isinstance(sheet, dict) else None).items()
    }


def _partition(path: Path, notes: list[str]) -> Partition | None:
    file = path / "scenario.json"
    raw = _by_client(_json(file) if file.is_file() else None)
    sizes = _mapping(raw.get("sizes"))
    if not sizes or any(_whole(size) is None for size in sizes.values()):
        notes.append(f"scenario.json is {'damaged' if file.is_file() else 'missing'}: the partition is not shown")
        return None
    written = list(sizes)  # the order of the rows of cross_edges
    order = sorted(range(len(written)), key=lambda i: natural(written[i]))
    clients = tuple(written[i] for i in order)
    labels = _mapping(raw.get("labels"))
    homophily = _mapping(raw.get("homophily"))
    inside = _mapping(raw.get("edges_inside"))
    return Partition(
        clients=clients,
        sizes=tuple(_whole(sizes[client]) or 0 for client in clients),
        cross_edges=_square(raw.get("cross_edges"), order),
        cross_share=as_number(raw.get("cross_share")),
        labels=_label_counts(labels, clients),
        homophily=tuple(as_number(homophily.get(client)) for client in clients),
        edges_inside=tuple(_whole(inside.get(client)) for client in clients),
        things="graphs" if raw.get("task") == "graph" else "nodes",
    )


def _by_client(raw: object) -> dict[str, Any]:
    """The scenario with a map from client per quantity; one that lists its clients (`data.Statistics.to_json`) is
    turned round.
    """
    if not isinstance(raw, dict):
        return {}
    if "sizes" in raw or not isinstance(raw.get("clients"), list):
        return raw
    rows = [row for row in raw["clients"] if isinstance(row, dict) and "client" in row]
    quantities = {"sizes": "nodes", "labels": "classes", "homophily": "homophily", "edges_inside": "edges"}
    turned = {name: {str(row["client"]): row.get(key) for row in rows} for name, key in quantities.items()}
    return {"cross_edges": raw.get("cross_edges"), "cross_share": raw.get("cross_edge_share"), **turned}


def _mapping(value: object) -> dict[str, Any]:
    return {str(key): entry for key, entry in value.items()} if isinstance(value, dict) else {}


def _square(value: object, order: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
    """The K x K counts in the given order of clients; None if it is no such matrix."""
    size = len(order)
    if (
        not isinstance(value, list)
        or len(value) != size
        or not all(isinstance(row, list) and len(row) == size for row in value)
    ):
        return None
    return tuple(tuple(_whole(value[i][j]) or 0 for j in order) for i in order)


def _label_counts(labels: Mapping[str, Any], clients: Sequence[str]) -> tuple[tuple[int, ...], ...] | None:
    """Counts per class for each client, padded to the same number of classes; None unless every client has them."""
    rows = [labels.get(client) for client in clients]
    if not all(isinstance(row, list) and row for row in rows):
        return None
    counts = [[_whole(count) or 0 for count in row] for row in rows if isinstance(row, list)]
    width = max(len(row) for row in counts)
    return tuple(tuple(row + [0] * (width - len(row))) for row in counts)
