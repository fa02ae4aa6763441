"""One published number, and what it takes to run it.

The grammar of a cell: ``79.34+-.85`` (mean and spread), ``66.3`` (no spread printed), ``80.95+-1.49 (80.14)`` (a gain
in brackets), ``~76`` (read off a figure or the text), ``?`` (drawn, never printed), ``-`` (no such cell).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from isthmus.errors import DataError

_NUMBER = r"\d+(?:\.\d*)?|\.\d+"
_CELL = re.compile(rf"(~)?({_NUMBER})(?:\+-({_NUMBER}))?(?: \((-?(?:{_NUMBER}))\))?")

Unit = Literal["%", "s", "GB"]
UNITS: tuple[Unit, ...] = ("%", "s", "GB")


def measured(result: Mapping[str, Any], score: str) -> Any:
    """What a result says under a key, or under keys inside (``facts.learned_graph.cross_share``); None if nothing."""
    found: Any = result
    for key in score.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


@dataclass(frozen=True)
class Published:
    """A number as printed, in the unit of its cell (accuracies in percent, whatever the paper prints).

    Args:
        text: As it stands in the table.
        mean: None where nothing is printed.
        spread: None where none is printed.
        gain: The bracketed number.
        approximate: Read off a figure or the text.
    """

    text: str
    mean: float | None
    spread: float | None = None
    gain: float | None = None
    approximate: bool = False


def parse_cell(text: str, *, fraction: bool = False) -> Published | None:
    """Read a cell; None for a cell that does not exist. ``fraction``: the table prints 0..1 and we show percent.

    Example:
        >>> parse_cell("79.34+-.85").spread
        0.85
    """
    text = text.strip()
    if text == "-":
        return None
    if text == "?":
        return Published(text, None)
    match = _CELL.fullmatch(text)
    if match is None:
        raise DataError(f"{text!r} is not a cell: write 79.34+-.85, 66.3, 80.95+-1.49 (80.14), ~76, ? or -")
    about, mean, spread, gain = match.groups()
    factor = 100.0 if fraction else 1.0
    return Published(
        text=text,
        mean=round(float(mean) * factor, 10),
        spread=None if spread is None else round(float(spread) * factor, 10),
        gain=None if gain is None else float(gain),
        approximate=about is not None,
    )


@dataclass(frozen=True)
class Note:
    """What is known about some cells.

    Args:
        text: One or two sentences.
        only: Words a cell must match, or several such texts of which it must match one; none = a remark on the whole
            table.
        finding: True for what our own runs showed, False for what is known of the published number.
        memory: GB that a run of these cells took, where that is more than a usual machine has.
        cause: Why these cells lie off, where the finding says so: ``shown`` by runs that change one thing and close the
            gap, or ``guessed``.
        shown_by: Of a shown cause, the cell whose runs close the gap, ``TABLE / CELL`` with {row}, {column} and {part}
            of the cell in question. It counts only where those runs are here, are other runs or scored otherwise, and
            lie within 2 of the published number.
        printed: What the paper really prints, where we compare with something else (a misprint).
        spread: Printed with the same number in another table of the paper, where this one prints none.
    """

    text: str
    only: tuple[str, ...] = ()
    finding: bool = False
    printed: str | None = None
    memory: float | None = None
    cause: Literal["", "shown", "guessed"] = ""
    shown_by: str = ""
    spread: float | None = None

    def closing(self, cell: Cell) -> tuple[str, str]:
        """Table and name of the cell that closes the gap of a cell."""
        part = cell.parts[0] if len(cell.parts) == 1 else ""
        table, _, name = self.shown_by.partition(" / ")
        return table, name.format(row=cell.row, column=cell.column, part=part).removesuffix(" / ")


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        paper, table: Where it stands.
        row, column: Its labels.
        parts: Labels of the parts of the column it stands for: one, or all where a number spans them; empty without
            parts.
        published: The number.
        run: Method and settings of its runs, without the seed.
        score: Key of ``result.json`` that is compared; ``facts.eps_p`` is a key of its ``facts``.
        unit: Of both numbers. Only accuracies are judged.
        skip: Why it is not run at all.
        memory: GB that a run of it took, where a note says so.
        notes: Those that name this cell.
        spread_elsewhere: Of the paper, where a note says so.
    """

    paper: str
    table: str
    row: str
    column: str
    parts: tuple[str, ...]
    published: Published
    run: Mapping[str, Any]
    score: str = "score"
    unit: Unit = "%"
    skip: str | None = None
    memory: float | None = None
    notes: tuple[Note, ...] = ()
    spread_elsewhere: float | None = None

    @property
    def name(self) -> str:
        """``FedSGD GNN / Cora / 10 clients``."""
        return " / ".join([self.row, self.column, *(self.parts if len(self.parts) == 1 else ())])

    @property
    def labels(self) -> str:
        """Row, column and parts, for ``--only``."""
        return " ".join([self.row, self.column, *self.parts])

    @property
    def scenario(self) -> str:
        """Method and scenario, for ``--only``."""
        return " ".join(
            str(self.run[key]) for key in ("method", "backbone", "dataset", "partition", "clients") if key in self.run
        )
