"""``isthmus data describe``: a draft of ``schema.toml`` from the files of a folder, to be edited by a person."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from isthmus.data.tables.frames import pl
from isthmus.data.tables.reader import ENDINGS, Problems, Table, columns_of
from isthmus.errors import DataError

CATEGORIES = 20
"""Most values of a column that is taken for a category."""
CLASSES = 100
"""Most values of a column that is taken for the label."""
_NODE_FILES = ("node", "account", "customer", "user", "client", "patient", "item", "entity", "atom")
_EDGE_FILES = ("edge", "transfer", "transaction", "link", "relation", "interaction", "payment", "bond")
_SOURCES = ("source", "src", "from", "sender", "orig", "payer", "source_id", "from_id", "sourcenodeid")
_TARGETS = ("target", "dst", "to", "receiver", "dest", "payee", "target_id", "to_id", "targetnodeid")
_LABELS = ("label", "class", "y", "target", "fraud", "isfraud", "is_fraud", "outcome")
_TIMES = ("time", "date", "timestamp", "booked", "day", "created")
_WEIGHTS = ("weight", "amount", "value", "sum")

_EMPTY = ("NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "-", "?")
"""Texts that mean an empty cell in a column of numbers."""


def draft_schema(folder: Path) -> str:
    """The text of a ``schema.toml`` for these files. Guesses are marked."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder")
    files = [path for path in sorted(folder.iterdir()) if path.suffix.lower() in ENDINGS and path.is_file()]
    if not files:
        raise DataError(f"{folder} holds no file that ends in {' or '.join(ENDINGS)}")
    edges = _pick(files, _EDGE_FILES) or next((path for path in files if _ends(columns_of(path)) is not None), None)
    nodes = _pick([path for path in files if path != edges], _NODE_FILES) or next(
        (path for path in files if path != edges), None
    )
    if nodes is None:
        raise DataError(f"{folder} holds edges only: a table of nodes is needed, one row per node with its id")
    return "\n".join([*_nodes(nodes), *(_edges(edges) if edges is not None else [])]) + "\n"


def _pick(files: list[Path], words: tuple[str, ...]) -> Path | None:
    return next((path for path in files if any(word in path.stem.lower() for word in words)), None)


def _ends(columns: list[str]) -> tuple[str, str] | None:
    source = next((column for column in columns if column.lower() in _SOURCES), None)
    target = next((column for column in columns if column.lower() in _TARGETS and column != source), None)
    return None if source is None or target is None else (source, target)


def _nodes(path: Path) -> list[str]:
    columns = columns_of(path)
    texts = _texts(path, columns, ())
    empty = sorted({text for series in texts.values() for text in _empty_cells(series)})
    if empty:
        texts = _texts(path, columns, empty)
    unique = [column for column in columns if not texts[column].null_count() and texts[column].is_unique().all()]
    if not unique:
        raise DataError(f"{path.name} has no column whose values are all different and filled: nodes need an id")
    identity = next((column for column in unique if "id" in column.lower()), unique[0])
    few = {column: sorted(texts[column].drop_nulls().unique().to_list()) for column in columns if column != identity}
    named = [column for column in few if column.lower() in _LABELS]
    label = next((column for column in named if 2 <= len(few[column]) <= CLASSES), None)
    split = next((c for c in few if few[c] and set(few[c]) <= {"train", "val", "test"}), None)
    lines = [f"missing_values = {_list(['', *empty])}", ""] if empty else []
    lines += ["[nodes]", f'file = "{path.stem}.*"', f"id = {_quoted(identity)}"]
    if label is None:
        lines += [f"# {_key(column)}: {len(few[column])} different values, no classes as they are" for column in named]
        lines += ['label = "LABEL"                # no label column was recognised: name it', "classes = []"]
    else:
        lines += [f"label = {_quoted(label)}", f"classes = {_list(few[label])}      # check their order"]
    lines += [f"split = {_quoted(split)}" if split else 'split = "stratified:40/20/40"', "", "[features]"]
    lines += ["# Take out what is not known when a prediction is made, or gives the label away."]
    for column in columns:
        if column not in (identity, split, *([label] if label else named)):
            lines.append(_feature(column, texts[column], few[column]))
    return lines


def _texts(path: Path, columns: list[str], empty: Sequence[str]) -> dict[str, pl.Series]:
    table = Table(path, columns, ["", *empty], Problems())
    return {column: table.texts(column) for column in columns}


def _empty_cells(texts: pl.Series) -> set[str]:
    """What stands for an empty cell in a column that otherwise holds numbers."""
    found = {text for text in texts.drop_nulls().unique().to_list() if text in _EMPTY}
    rest = texts.drop_nulls().filter(~texts.drop_nulls().is_in(list(found)))
    return found if len(rest) and rest.cast(pl.Float64, strict=False).null_count() == 0 else set()


def _feature(column: str, texts: pl.Series, values: list[str]) -> str:
    empty = texts.null_count() > 0
    numbers = texts.cast(pl.Float64, strict=False)
    if {value.lower() for value in values} <= {"0", "1", "true", "false", "yes", "no"} and len(values) == 2:
        described, missing = 'type = "flag"', "own"
    elif numbers.null_count() == texts.null_count():
        least, most = (float(end) if isinstance(end, float) else 0.0 for end in (numbers.min(), numbers.max()))
        scale = "log-standard" if least >= 0 and most > 100 else "standard"
        described, missing = f'type = "number", scale = "{scale}"', "median"
    elif len(values) <= CATEGORIES:
        described, missing = f'type = "category", values = {_list(values)}', "own"
    else:
        return f"# {_key(column)}: {len(values)} different texts, no feature as it is"
    return f"{_key(column)} = {{ {described}" + (f', missing = "{missing}"' if empty else "") + " }"


def _edges(path: Path) -> list[str]:
    columns = columns_of(path)
    source, target = _ends(columns) or (columns[0], columns[1] if len(columns) > 1 else columns[0])
    time = next((column for column in columns if column.lower() in _TIMES), None)
    weight = next((column for column in columns if column.lower() in _WEIGHTS), None)
    lines = ["", "[edges]", f'file = "{path.stem}.*"', f"source = {_quoted(source)}", f"target = {_quoted(target)}"]
    lines += ["directed = true"]
    lines += [f"weight = {_quoted(weight)}"] if weight else []
    lines += [f"time = {_quoted(time)}"] if time else []
    lines += ['duplicates = "sum"', "", "[edges.features]", "in_count = true", "out_count = true"]
    if weight:
        lines += [f"in_sum = {_quoted(weight)}", f"out_sum = {_quoted(weight)}"]
    return lines


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _list(values: list[str]) -> str:
    return "[" + ", ".join(_quoted(value) for value in values) + "]"


def _key(column: str) -> str:
    plain = column.replace("_", "").replace("-", "")
    return column if plain.isalnum() and plain.isascii() else _quoted(column)
