"""``isthmus data check``: what is wrong with an owner's folder, by file, line and column, and a summary to send around.

Everything is local. The summary holds counts and names of columns of the schema, no cell of a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isthmus.data.tables.owner import OwnerTables, owners_in, read_owner
from isthmus.data.tables.reader import Problem, Problems
from isthmus.data.tables.schema import FILE, Schema, differences, read_schema
from isthmus.errors import DataError

TELLING = 0.99
"""Share of labelled rows a single feature may sort right before it looks like the label itself."""


@dataclass(frozen=True)
class Checked:
    """What was found in one owner's folder."""

    owner: str
    problems: Problems
    summary: tuple[tuple[str, str], ...]


def owner_folders(folder: Path) -> dict[str, Path]:
    """Owner -> its folder, of a folder of folders, one per owner; empty where the folder itself holds tables."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder of tables; a graph saved with torch.save must end in .pt")
    if (folder / FILE).exists() and not any((child / FILE).exists() for child in folder.iterdir() if child.is_dir()):
        return {}
    found = {
        child.name: child for child in sorted(folder.iterdir()) if child.is_dir() and not child.name.startswith(".")
    }
    if not found:
        raise DataError(
            f"{folder} holds no {FILE} and no folders of owners: `isthmus data describe {folder}` drafts one"
        )
    return found


def first_schema(folder: Path) -> Schema:
    """The schema of a folder, or of the first owner of a folder of folders."""
    apart = owner_folders(folder)
    return read_schema(next(iter(apart.values())) if apart else folder)


def check_folder(
    folder: Path, *, against: Path | None = None, seed: int = 0, owner: str | None = None
) -> list[Checked]:
    """Check one owner's folder, all owners of a shared folder, or a folder of folders.

    ``owner``: name of the one owner of a folder; default the name of the folder.
    """
    apart = owner_folders(folder)
    wanted = read_schema(against) if against is not None else None
    if apart:
        schemas = {owner: read_schema(path) for owner, path in apart.items()}
        first = wanted if wanted is not None else next(iter(schemas.values()))
        return [_check(path, name, schemas[name], first, seed) for name, path in apart.items()]
    schema = read_schema(folder)
    names: list[str | None] = [None] if schema.owner is None else [*owners_in(folder, schema)]
    return [_check(folder, name or owner or folder.absolute().name, schema, wanted, seed, only=name) for name in names]


def _check(
    folder: Path, owner: str, schema: Schema, wanted: Schema | None, seed: int, only: str | None = None
) -> Checked:
    problems = Problems()
    if wanted is not None and schema.hash != wanted.hash:
        found = differences(schema, wanted) or ["its bytes differ, though it says the same: copy the file"]
        problems.errors += [Problem(f"{owner}/{FILE}", f"is not the schema of the others: {text}") for text in found]
    summary: tuple[tuple[str, str], ...] = ()
    try:
        tables = read_owner(folder, owner, seed=seed, schema=schema, problems=problems, only=only)
        if not problems.errors:
            problems.warnings += _telling(tables)
            summary = summarise(tables)
    except DataError as error:
        problems.errors.append(Problem(owner, str(error)))
    return Checked(owner, problems, summary)


def summarise(tables: OwnerTables) -> tuple[tuple[str, str], ...]:
    """Counts that give nothing away but sizes."""
    edges, graphs = tables.edges, tables.graph is not None
    far = len(edges.own) if tables.schema.edges is None or tables.schema.edges.directed else len(edges.own) // 2
    inside = (
        len(edges.source) if tables.schema.edges is None or tables.schema.edges.directed else len(edges.source) // 2
    )
    labelled = int((tables.y >= 0).sum())
    parts = [f"{name} {int((tables.part == number).sum())}" for number, name in enumerate(("train", "val", "test"))]
    lines = [
        ("schema", tables.schema.hash[:16]),
        *([("graphs", f"{len(tables.y)}")] if graphs else []),
        ("nodes", f"{tables.num_nodes}"),
        ("features", f"{len(tables.schema.columns)} columns of {len(tables.schema.all_features)} features"),
        ("labelled", f"{labelled} ({', '.join(parts)})"),
        ("edges", f"{inside} inside, {far} towards others (candidates for linking), {edges.lines} rows"),
    ]
    return tuple(lines)


def _telling(tables: OwnerTables) -> list[Problem]:
    """Features that sort two classes almost perfectly: often the label in another form."""
    from sklearn.metrics import roc_auc_score

    labels = tables.schema.labels
    if tables.graph is not None or len(labels.classes) != 2:
        return []
    rows = np.flatnonzero((tables.y >= 0) & (tables.part == 0))
    y = tables.y[rows]
    if len(rows) < 20 or min((y == 0).sum(), (y == 1).sum()) < 5:
        return []
    found = []
    for name, values in tables.features.items():
        known = ~np.isnan(values[rows])
        if known.sum() < 20 or len(np.unique(y[known])) < 2:
            continue
        area = roc_auc_score(y[known], values[rows][known])
        if max(area, 1 - area) >= TELLING:
            found.append(Problem(FILE, "predicts the label almost alone: is it known when a prediction is made?", name))
    return found
