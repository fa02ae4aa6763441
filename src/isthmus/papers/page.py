"""The results page of a paper, in Markdown, from run folders alone: no figure on it is typed by hand, and no run means
no line.

Nothing on it depends on when it is written: the date is that of the newest run.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.papers.counts import count, sentence
from isthmus.papers.judge import Comparison
from isthmus.papers.tables import SPREADS, Paper, Table

Run = Mapping[str, Any]


def write_page(
    paper: Paper,
    tables: Sequence[tuple[Table, Sequence[Comparison]]],
    runs: Sequence[Run],
    figures: Mapping[str, Sequence[tuple[str, str]]] | None = None,
) -> str:
    """The page.

    Args:
        tables: Every table with its cells; cells without a result are counted, not shown.
        runs: Results of all runs the tables draw on.
        figures: Table key -> its figures: file, relative to the page, and verdict.
    """
    parts = [
        f"# {paper.title}",
        "",
        f"{paper.cite}. Written by `isthmus reproduce {paper.name} --docs` from run folders; do not edit by hand.",
        "",
    ]
    if runs:
        parts += [_provenance(runs), ""]
    if any(row.mean is not None for _, rows in tables for row in rows):
        parts += [sentence(count(tables)), ""]
    parts += _findings(tables)
    for table, rows in tables:
        parts += _section(table, rows)
        for file, verdict in (figures or {}).get(table.key, ()):
            parts += [f"![{table.title}]({file})", "", verdict, ""]
    return "\n".join(parts).rstrip() + "\n"


def _provenance(runs: Sequence[Run]) -> str:
    versions = sorted(
        {", ".join(f"{name} {version}" for name, version in run.get("versions", {}).items()) for run in runs}
    )
    sources = sorted({str(run.get("source")) for run in runs})
    newest = max(str(run.get("finished", "")) for run in runs)[:10]
    seeds = sorted({run["seed"] for run in runs})
    return (
        f"{len(runs)} runs, the newest of {newest}; seeds {_seeds(seeds)}: a cell has the first of them, as many as "
        "its table says, so "
        "that differences within a table are paired. "
        f"Data: {', '.join(sources)}. Versions: {'; '.join(versions)}."
    )


def _findings(tables: Sequence[tuple[Table, Sequence[Comparison]]]) -> list[str]:
    """Findings about cells that were run here, then what is further off than two deviations for no known reason."""
    lines, open_ = [], list[str]()
    for table, rows in tables:
        found: dict[str, list[Comparison]] = {}
        for row in rows:
            for note in row.cell.notes:
                if note.finding and row.mean is not None:
                    found.setdefault(note.text, []).append(row)
        for text, cells in found.items():
            lines.append(f"- **{table.key}: {_named(cells)}.** {text}")
        open_ += [
            f"{table.key}: {row.cell.name} {ours_text(row)} (published {published_text(row)})"
            for row in rows
            if row.cause == "not reproduced"
        ]
    if open_:
        lines.append(f"- **Not reproduced, cause not known:** {'; '.join(open_)}.")
    return ["## Where we differ", "", *lines, ""] if lines else []


def _named(cells: Sequence[Comparison], most: int = 6) -> str:
    """Cells with both numbers; many of them by their rows and columns, since the table below has the rest."""
    if len(cells) > most:
        return _listed(cells, most)
    known = [f" (published {published_text(row)})" if row.cell.published.mean is not None else "" for row in cells]
    return ", ".join(f"{row.cell.name} {ours_text(row)}{paper}" for row, paper in zip(cells, known, strict=True))


def _listed(cells: Sequence[Comparison], most: int = 3) -> str:
    """Names of cells; many of them by their rows and columns."""
    if len(cells) <= most:
        return ", ".join(row.cell.name for row in cells)
    rows, columns = (
        ", ".join(dict.fromkeys(names))
        for names in ([each.cell.row for each in cells], [each.cell.column for each in cells])
    )
    return f"{rows} / {columns} ({len(cells)} cells)"


def _section(table: Table, rows: Sequence[Comparison]) -> list[str]:
    shown = [row for row in rows if row.mean is not None]
    parts = [f"## {table.key} {table.title}", ""]
    parts += [f"- {note.text}" for note in table.notes if not note.only] + (
        [""] if any(not note.only for note in table.notes) else []
    )
    if not shown:
        reasons = _reasons(rows)
        return [*parts, f"{len(rows)} cells, none run yet{f': {reasons}' if reasons else ''}.", ""]
    reference = any(row.paired for row in shown)
    apart = table.spread == "client-stds"  # then the score's own spread is another number, and a smaller one
    headings = [
        "cell",
        "published",
        "ours",
        *(["std over seeds"] if apart else []),
        "seeds",
        "difference",
        "verdict",
        *([f"to {table.reference}, paired"] if reference else []),
        "parameters (shared)",
        "s / run",
    ]
    parts += [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    for row in shown:
        cells = [
            row.cell.name,
            published_text(row),
            ours_text(row),
            *([_over_seeds(row)] if apart else []),
            f"{row.seeds}{UNRECORDED if row.earlier_seeds else ''}",
            difference_text(row),
            verdict_text(row),
            *([paired_text(row)] if reference else []),
            _parameters(row),
            "" if row.seconds is None else f"{row.seconds:.1f}",
        ]
        parts.append(f"| {' | '.join(cells)} |")
    parts += ["", f"± is the {SPREADS[table.spread]}."]
    if any(row.earlier_seeds for row in shown):
        parts[-1] += f" {UNRECORDED} These runs were made before records were kept."
    if apart:
        parts[-1] += (
            ' "std over seeds" is the population standard deviation of the score itself. Verdicts measure with ± '
            "over the root "
            "of the number of clients: so much does the mean of clients vary that vary each by itself."
        )
    if reference and any(row.paired and row.paired.seeds > 1 for row in shown):
        listed = "; ".join(
            f"{row.cell.name} {', '.join(f'{value:+.2f}' for value in row.paired.values)}"
            for row in shown
            if row.paired
        )
        parts += ["", f"Seed by seed, to {table.reference}: {listed}."]
    if means := _mean_differences(shown):
        parts += ["", f"Mean over cells, to {table.reference}: {'; '.join(means)}."]
    remarks: dict[str, list[Comparison]] = {}
    for row in shown:
        for text in dict.fromkeys(note.text for note in row.cell.notes if not note.finding):
            remarks.setdefault(text, []).append(row)
    parts += ["", *(f"- {_listed(cells)}: {text}" for text, cells in remarks.items())] if remarks else []
    if len(shown) < len(rows):
        reasons = _reasons(rows)
        parts += ["", f"{len(rows) - len(shown)} of {len(rows)} cells not run{f': {reasons}' if reasons else ''}."]
    return [*parts, ""]


def _mean_differences(shown: Sequence[Comparison]) -> list[str]:
    """Of each row that stands beside the reference in several cells; scores of different kinds are never mixed."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row in shown:
        if row.paired is not None:
            groups.setdefault((row.cell.row, row.cell.score), []).append(row.paired.mean)
    several = len({score for _, score in groups}) > 1
    return [
        f"{name}{f' ({score})' if several else ''} {statistics.fmean(means):+.2f} over {len(means)} cells"
        for (name, score), means in groups.items()
        if len(means) > 1
    ]


def _over_seeds(row: Comparison) -> str:
    return "unknown" if row.run_spread is None or row.seeds < 2 else f"{row.run_spread:.2f}"


def _parameters(row: Comparison) -> str:
    if row.trainable is None:
        return ""
    return f"{row.trainable:,}" + (f" ({row.shared:,})" if row.shared is not None else "")


def _reasons(rows: Sequence[Comparison]) -> str:
    return "; ".join(dict.fromkeys(row.reason for row in rows if row.mean is None and row.reason))


def _seeds(seeds: Sequence[int]) -> str:
    if len(seeds) > 2 and seeds[-1] - seeds[0] == len(seeds) - 1:
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds))


UNRECORDED = "†"
"""Marks the seeds of runs that were not recorded."""


def verdict_text(row: Comparison) -> str:
    """``below, cause shown (check.chameleon / FedSGD GNN, undirected / random)``."""
    if not row.cause:
        return row.verdict
    return f"{row.verdict}, {row.cause}" + (f" ({row.shown_by})" if row.shown_by else "")


def number(mean: float | None, spread: float | None, gain: float | None = None, *, unknown: str = "") -> str:
    """``66.00 ± 1.51 (80.14)``; an unknown spread is said to be so."""
    if mean is None:
        return "–"  # noqa: RUF001 (a dash, not a minus)
    text = f"{mean:.2f} ± {spread:.2f}" if spread is not None else f"{mean:.2f}{unknown}"
    return text if gain is None else f"{text} ({gain:.2f})"


def published_text(row: Comparison) -> str:
    """The published number, with what was printed where that is a misprint."""
    paper = row.cell.published
    if paper.mean is None:
        return "not printed"
    printed = next((note.printed for note in row.cell.notes if note.printed), None)
    about = "about " if paper.approximate else ""
    return about + number(paper.mean, paper.spread, paper.gain) + (f" [printed {printed}]" if printed else "")


def ours_text(row: Comparison) -> str:
    """Our number; with one seed the spread is unknown."""
    return number(row.mean, row.spread, row.gain, unknown=" ± unknown" if row.seeds == 1 else "")


def difference_text(row: Comparison) -> str:
    return "" if row.difference is None else f"{row.difference:+.2f}"


def paired_text(row: Comparison) -> str:
    """Mean and spread of the seed-by-seed differences to the reference row."""
    if row.paired is None:
        return ""
    return f"{row.paired.mean:+.2f} ± {'unknown' if row.paired.std is None else f'{row.paired.std:.2f}'}"
