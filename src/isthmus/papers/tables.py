"""The tables of the papers: TOML files read, checked as a whole, and searched.

A file holds the paper's ``[label]`` table (what a row, column or part of a column means for a run), named
``[settings]`` that labels ``use``, and ``[[table]]`` entries whose ``rows`` carry the numbers. A cell is run with: the
paper's ``run``, the table's, the ``settings`` its labels use, then its column's, its part's and its row's own, later
ones winning.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from isthmus.errors import ConfigError, DataError, unknown
from isthmus.papers.cells import UNITS, Cell, Note, parse_cell

SPREADS: dict[str, str] = {
    "population": "population standard deviation over runs",
    "client-stds": "mean over clients of each client's sample standard deviation over runs",
    "unstated": "standard deviation over runs, which kind the paper does not say (ours: population)",
}
PARTS = " / "
PLOTS = ("lines", "bars", "curves", "clients", "client-bars")
_ABOUT = ("score", "unit", "skip", "use")
"""Keys of a label that are no settings of a run."""


@dataclass(frozen=True)
class Gain:
    """Bracketed numbers: the difference to row ``low`` in points, or with ``high`` the share of the way from ``low`` to
    it in percent.

    Args:
        high: The upper row by the backbone a row's label ends in.
    """

    low: str
    high: Mapping[str, str]
    without: tuple[str, ...] = ()
    """Columns in which rows have settings of their own, so that a gain would mix them."""


@dataclass(frozen=True)
class Plot:
    """How a table is drawn (`isthmus.papers.figures`).

    Args:
        cells: Words that pick the cells it shows, as `matching` reads them; all if empty.
        score: Key of a client's row in a result that bars of clients show.
    """

    kind: str
    x: str
    axis: str
    claim: str
    holds: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()
    score: str = "test_score"

    def __post_init__(self) -> None:
        if self.kind not in PLOTS or self.x not in ("rows", "columns"):
            raise DataError(f"a plot is {', '.join(PLOTS)} over rows or columns, not {self.kind} over {self.x}")


@dataclass(frozen=True)
class Table:
    """One published table or figure."""

    paper: str
    key: str
    aliases: tuple[str, ...]
    title: str
    figure: bool
    plots: tuple[Plot, ...]
    ours: bool
    """A check of our own, not a table of the paper."""
    runs: int
    spread: str
    reference: str | None
    gain: Gain | None
    columns: tuple[str, ...]
    parts: tuple[str, ...]
    notes: tuple[Note, ...]
    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        return f"{self.paper}/{self.key}"

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.row for cell in self.cells))


@dataclass(frozen=True)
class Paper:
    """A paper's published results."""

    name: str
    title: str
    cite: str
    tables: tuple[Table, ...]


def paper_names() -> list[str]:
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in resources.files(__package__).iterdir()
        if entry.name.endswith(".toml")
    )


@functools.cache
def load_paper(name: str) -> Paper:
    """The published results of a paper."""
    if name not in paper_names():
        raise unknown("paper", name, paper_names())
    return read_paper(name, resources.files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8"))


def find_tables(target: str) -> tuple[Paper, list[Table]]:
    """``PAPER`` or ``PAPER/TABLE``; a table by its key, an alias (``table2``, ``fig4a``), or the section several tables
    stand in (``fedstar/8``).
    """
    name, slash, wanted = target.strip().strip("/").lower().partition("/")
    wanted = re.sub(r"^fig(?=\d)", "figure", wanted)
    paper = load_paper(name)
    if not slash:
        return paper, list(paper.tables)
    exact = [table for table in paper.tables if wanted == table.key.lower() or wanted in table.aliases]
    found = exact or [
        table for table in paper.tables if re.match(rf"{re.escape(wanted)}(\.|[a-z](\.|$))", table.key.lower())
    ]
    if not found:
        raise unknown(
            f"table of {name}", wanted, [entry for table in paper.tables for entry in (table.key, *table.aliases)]
        )
    return paper, found


# -- searching -------------------------------------------------------------------------------------


def select(tables: Sequence[Table], only: str | None) -> list[Cell]:
    """Cells of all tables whose labels or scenario match every word of ``only``, or whose printed name it is; with
    `` or `` between several such, those that match any. No match of one of them is an error that lists what there is.
    """
    if not only:
        return [cell for table in tables for cell in table.cells]
    chosen: set[int] = set()
    for words in only.split(" or "):
        chosen |= {id(cell) for cell in _matching_any(tables, words)}
    return [cell for table in tables for cell in table.cells if id(cell) in chosen]


def _matching_any(tables: Sequence[Table], only: str) -> list[Cell]:
    cells = [cell for table in tables for cell in matching(table.cells, only)]
    if not cells:
        labels = dict.fromkeys(label for table in tables for label in (*table.rows, *table.columns, *table.parts))
        where = ", ".join(table.name for table in tables)
        raise ConfigError(f"no cell of {where} matches {only!r}; rows, columns and parts are: {', '.join(labels)}")
    return cells


def matching(cells: Sequence[Cell], only: str) -> list[Cell]:
    """Cells that match every word. A word means a whole word of a label where some cell has it, else of a method or
    scenario, else a piece of a word, else the beginning of one. The name of a cell as it is printed means that cell
    alone: where rows and columns have the same labels, words cannot tell ``FE GCN / GIN`` from ``FE GIN / GCN``."""
    if named := [cell for cell in cells if cell.name.lower() == " ".join(only.lower().split())]:
        return named
    readings: tuple[Callable[[Cell, str], bool], ...] = (
        lambda cell, word: word in _words(cell.labels),
        lambda cell, word: word in _words(cell.scenario),
        lambda cell, word: word in _pieces(f"{cell.labels} {cell.scenario}"),
        lambda cell, word: (
            len(word) >= 3 and any(other.startswith(word) for other in _words(f"{cell.labels} {cell.scenario}"))
        ),
    )
    found = list(cells)
    for word in _words(only):
        levels = ([cell for cell in cells if reads(cell, word)] for reads in readings)
        best = {id(cell) for cell in next((level for level in levels if level), [])}
        found = [cell for cell in found if id(cell) in best]
    return found


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[\s,]+", text.lower()) if word]


def _pieces(text: str) -> set[str]:
    return {piece for piece in re.split(r"[^a-z0-9]+", text.lower()) if piece}


# -- reading ---------------------------------------------------------------------------------------


def read_paper(name: str, text: str) -> Paper:
    """Read and check one file. Everything wrong with it is a DataError that names the place."""
    try:
        raw = tomllib.loads(text)
        tables = tuple(_table(name, raw, entry) for entry in raw["table"])
    except DataError as error:
        raise DataError(f"papers/{name}.toml: {error}") from None
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"papers/{name}.toml is damaged ({type(error).__name__}: {error})") from None
    keys = [key for table in tables for key in (table.key, *table.aliases)]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise DataError(f"papers/{name}.toml: {', '.join(twice)} names two tables")
    return Paper(name, raw["title"], raw["cite"], tables)


def _table(paper: str, raw: Mapping[str, Any], entry: Mapping[str, Any]) -> Table:
    key = str(entry["key"])
    spread = entry.get("spread", raw["spread"])
    if spread not in SPREADS:
        raise unknown(f"kind of spread in table {key}", str(spread), SPREADS, error=DataError)
    gain = entry.get("gain")
    table = Table(
        paper=paper,
        key=key,
        aliases=tuple(entry.get("alias", ())),
        title=entry["title"],
        figure=entry.get("figure", False),
        plots=_plots(entry.get("plot", ())),
        ours=entry.get("ours", False),
        runs=entry.get("runs", raw["runs"]),
        spread=spread,
        reference=entry.get("reference", raw.get("reference")) or None,
        gain=None if gain is None else Gain(gain["low"], dict(gain.get("high", {})), tuple(gain.get("except", ()))),
        columns=tuple(entry["columns"]),
        parts=tuple(entry.get("parts", ())),
        notes=tuple(_note(note) for note in entry.get("note", ())),
        cells=(),
    )
    labels = {**raw.get("label", {}), **entry.get("label", {})}
    base = [raw.get("run", {}), entry.get("run", {})]
    settings, fraction = raw.get("settings", {}), entry.get("scale", "percent") == "fraction"
    cells = [cell for row in entry["rows"] for cell in _cells(table, row, base, labels, settings, fraction)]
    if len({cell.row for cell in cells}) < len(entry["rows"]):
        raise DataError(f"table {key} has a row twice, or a row without numbers")
    table = replace(table, cells=tuple(_noted(cells, table.notes, key)))
    if slips := [words for plot in table.plots for words in plot.cells if not matching(cells, words)]:
        raise DataError(f"table {key}: no cell matches the plot's {slips[0]!r}")
    for row in (table.reference, table.gain and table.gain.low, *(table.gain.high.values() if table.gain else ())):
        # A paper-wide reference row need not be in every table.
        if row is not None and row not in table.rows and (row == entry.get("reference") or table.gain is not None):
            raise DataError(f"table {key} has no row {row!r} to refer to")
    return table


def _plots(raw: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> tuple[Plot, ...]:
    """One plot, or several of one table."""
    return tuple(
        Plot(
            one.get("kind", "lines"),
            one.get("x", "columns"),
            one.get("axis", ""),
            one["claim"],
            tuple(one.get("holds", ())),
            tuple(one.get("cells", ())),
            one.get("score", "test_score"),
        )
        for one in ([raw] if isinstance(raw, Mapping) else raw)
    )


def _cells(
    table: Table,
    row: Sequence[str],
    base: Sequence[Mapping[str, Any]],
    labels: Mapping[str, Any],
    settings: Mapping[str, Any],
    fraction: bool,
) -> Iterable[Cell]:
    label, *numbers = row
    if len(numbers) != len(table.columns):
        raise DataError(f"table {table.key}, row {label!r}: {len(numbers)} numbers for {len(table.columns)} columns")
    for column, number in zip(table.columns, numbers, strict=True):
        texts = number.split(PARTS)
        if table.parts and len(texts) not in (1, len(table.parts)):
            raise DataError(f"table {table.key}, {label} / {column}: {len(texts)} numbers for {len(table.parts)} parts")
        spans: list[tuple[str, ...]] = [table.parts] if len(texts) == 1 else [(part,) for part in table.parts]
        for parts, text in zip(spans, texts, strict=True):
            published = parse_cell(text, fraction=fraction)
            if published is not None:
                named = [column, *(parts if len(parts) == 1 else ()), label]
                layers = [_label(name, labels, table.key) for name in named]
                used = [settings[use] for layer in layers for use in layer.get("use", ())]
                run = _merged([*base, *used, *layers])
                about = {key: run.pop(key) for key in _ABOUT if key in run}
                if "method" not in run and "skip" not in about:
                    raise DataError(f"table {table.key}, {label} / {column}: no method")
                if about.get("unit", "%") not in UNITS:
                    raise unknown(f"unit in table {table.key}", str(about["unit"]), UNITS, error=DataError)
                about.pop("use", None)
                yield Cell(table.paper, table.key, label, column, parts, published, run, **about)


def _label(name: str, labels: Mapping[str, Any], table: str) -> Mapping[str, Any]:
    if name not in labels:
        raise unknown(f"label in table {table}", name, labels, error=DataError)
    found: Mapping[str, Any] = labels[name]
    return found


def _merged(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for layer in layers:
        merged |= layer
    return merged


def _note(raw: Mapping[str, Any]) -> Note:
    finding = "finding" in raw
    only = raw.get("only", ())
    cause, shown_by = raw.get("cause", ""), raw.get("shown_by", "")
    if (
        cause not in ("", "shown", "guessed")
        or (cause and not (finding and only))
        or (cause == "shown") != bool(shown_by)
    ):
        raise DataError(
            f"note {raw}: a cause is shown (with shown_by) or guessed, of a finding about some cells (only)"
        )
    return Note(
        raw["finding" if finding else "note"],
        (only,) if isinstance(only, str) else tuple(only),
        finding,
        raw.get("printed"),
        raw.get("memory"),
        cause,
        shown_by,
        raw.get("spread"),
    )


def _noted(cells: Sequence[Cell], notes: Iterable[Note], table: str) -> list[Cell]:
    """Cells with the notes that name them. A note that names none is a slip."""
    noted = list(cells)
    for note in notes:
        chosen = set[int]()
        for words in note.only:
            found = {id(cell) for cell in matching(cells, words)}
            if not found:
                raise DataError(f"table {table}: no cell matches the note for {words!r}")
            if note.cause == "guessed" and len({(c.row, c.column) for c in cells if id(c) in found}) > 1:
                raise DataError(
                    f"table {table}: a guessed cause must name its cells, row and column, and {words!r} matches several"
                )
            chosen |= found
        if chosen:
            noted = [
                replace(
                    new,
                    notes=(*new.notes, note),
                    memory=note.memory or new.memory,
                    spread_elsewhere=note.spread or new.spread_elsewhere,
                )
                if id(old) in chosen
                else new
                for old, new in zip(cells, noted, strict=True)
            ]
    return noted
