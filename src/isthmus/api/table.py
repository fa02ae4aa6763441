"""A table of results for people, spreadsheets and papers: text, CSV, Markdown, LaTeX."""

from __future__ import annotations

import csv
import html
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.api.history import frames
from isthmus.api.several import percent_spread
from isthmus.errors import ConfigError


@dataclass(frozen=True)
class Cell:
    """One cell.

    Args:
        text: What a person reads, e.g. ``64.80 ± 1.50``.
        value: What a spreadsheet gets, in the unit of ``result.json``; the text where it is None.
        std: Spread of the value: a column of its own in CSV.
    """

    text: str
    value: float | int | None = None
    std: float | None = None


def scored(summary: Mapping[str, Any] | None, *, sign: bool = False) -> Cell:
    """Mean and spread of a score, in percent for people."""
    if summary is None:
        return Cell("-")
    return Cell(percent_spread(summary, sign=sign), summary["mean"], summary["std"])


def counted(value: int | float | None, text: str | None = None) -> Cell:
    """A number, with the text a person reads in its place."""
    if value is None:
        return Cell("")
    return Cell(f"{value:,}" if text is None else text, value)


@dataclass(frozen=True)
class Table:
    """Headings, rows and what has to be said below them.

    Args:
        spreads: Headings of columns whose cells have a spread.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    spreads: frozenset[str] = frozenset()

    @property
    def texts(self) -> list[list[str]]:
        """The rows as a person reads them."""
        return [[cell.text for cell in row] for row in self.rows]

    def records(self) -> list[dict[str, Any]]:
        """The rows as values by heading; the spread of ``score`` is ``score std``."""
        return [
            {
                name: value
                for heading, cell in zip(self.headings, row, strict=True)
                for name, value in self._values(heading, cell)
            }
            for row in self.rows
        ]

    def _values(self, heading: str, cell: Cell) -> list[tuple[str, Any]]:
        value = (cell.text if cell.text not in ("", "-") else None) if cell.value is None else cell.value
        return [(heading, value), *([(f"{heading} std", cell.std)] if heading in self.spreads else [])]

    def to_csv(self) -> str:
        """Numbers as in ``result.json`` (scores in 0..1), spreads in columns of their own."""
        text = io.StringIO()
        records = self.records()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([name for heading in self.headings for name, _ in self._values(heading, Cell(""))])
        writer.writerows(["" if value is None else value for value in record.values()] for record in records)
        return text.getvalue()

    def to_markdown(self) -> str:
        lines = [self.headings, ["---"] * len(self.headings), *self.texts]
        rows = "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines)
        return "\n\n".join([f"**{self.title}**", rows, *self.notes]) + "\n"

    def to_latex(self) -> str:
        """A ``tabular`` for the package booktabs."""
        lines = [" & ".join(map(_latex, line)) + r" \\" for line in (self.headings, *self.texts)]
        columns = "l" + "r" * (len(self.headings) - 1)
        notes = [f"% {line}" for note in (self.title, *self.notes) for line in note.splitlines()]
        body = [
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
        ]
        return "\n".join([*notes, *body]) + "\n"

    def to_pandas(self) -> Any:
        """As a ``pandas.DataFrame`` of values."""
        return frames("pandas").DataFrame(self.records())

    def _repr_html_(self) -> str:
        def line(tag: str, texts: Sequence[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>"

        rows = "".join(line("td", texts) for texts in self.texts)
        notes = "".join(f"<div>{html.escape(note)}</div>" for note in self.notes)
        return f"<div><b>{html.escape(self.title)}</b><table>{line('th', self.headings)}{rows}</table>{notes}</div>"


FORMATS: Mapping[str, Callable[[Table], str]] = {
    ".csv": Table.to_csv,
    ".md": Table.to_markdown,
    ".tex": Table.to_latex,
}
"""Ending of a file -> how a table is written into it."""


def check_table_file(path: str | os.PathLike[str] | None) -> None:
    """Refuse a file that no table can be written to, before hours of work."""
    if path is None:
        return
    if Path(path).suffix.lower() not in FORMATS:
        raise ConfigError(f"a table is written by the ending of its file, one of {', '.join(FORMATS)}; got {path}")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {Path(path).parent} for the table: make it first")


def write_table(tables: Sequence[Table], path: str | os.PathLike[str]) -> Path:
    """Write tables into one file, one below the other; its ending says how."""
    check_table_file(path)
    target = Path(path)
    text = "\n".join(FORMATS[target.suffix.lower()](table) for table in tables)
    try:
        target.write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another file") from None
    return target


_LATEX = {"\\": r"\textbackslash{}", "±": r"$\pm$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    special: f"\\{special}" for special in "&%$#_{}"
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
