"""How many published numbers have ours beside them, with how many seeds, and how they compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from isthmus.papers.judge import Comparison
from isthmus.papers.tables import Table


@dataclass(frozen=True)
class Counts:
    """Of the tables and figures of a paper, checks of our own left out.

    Args:
        cells: All, printed or only drawn.
        printed: With a published number.
        filled: Of the printed ones, with ours beside it.
        drawn: Filled cells of figures, whose number is not printed.
        one_seed: Of all filled cells, those that rest on one seed.
        unrecorded: Of all filled cells, those whose runs were not recorded.
        within_1, within_2, shown, guessed, not_reproduced, no_spread, not_judged: Of the filled printed ones.
    """

    cells: int = 0
    printed: int = 0
    filled: int = 0
    drawn: int = 0
    one_seed: int = 0
    unrecorded: int = 0
    within_1: int = 0
    within_2: int = 0
    shown: int = 0
    guessed: int = 0
    not_reproduced: int = 0
    no_spread: int = 0
    not_judged: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def count(tables: Iterable[tuple[Table, Sequence[Comparison]]]) -> Counts:
    """Counts of compared tables."""
    total = Counts()
    for table, rows in tables:
        for row in rows if not table.ours else ():
            total += _of(row)
    return total


def _of(row: Comparison) -> Counts:
    printed = row.cell.published.mean is not None
    if row.mean is None:
        return Counts(cells=1, printed=int(printed))
    own = Counts(cells=1, printed=int(printed), one_seed=int(row.seeds == 1), unrecorded=int(row.earlier_seeds > 0))
    if not printed:
        return own + Counts(drawn=1)
    name = {
        "within 1": "within_1",
        "within 2": "within_2",
        "no spread": "no_spread",
        "not judged": "not_judged",
    }.get(row.verdict)
    name = name or {"cause shown": "shown", "cause guessed": "guessed"}.get(row.cause, "not_reproduced")
    return own + Counts(filled=1, **{name: 1})


def sentence(found: Counts) -> str:
    """The counts of one paper, in words."""
    off = found.shown + found.guessed + found.not_reproduced
    return (
        f"Of {found.printed} printed numbers {found.filled} have ours beside them: {found.within_1} within one "
        f"deviation, {found.within_2} within two, {off} further off ({found.shown} with the cause shown by a run, "
        f"{found.guessed} with a guessed cause, {found.not_reproduced} not reproduced), {found.no_spread} without any "
        f"spread to measure with, {found.not_judged} not judged (seconds, memory). {found.drawn} cells of figures "
        f"whose numbers are not printed are filled too. Of all {found.filled + found.drawn} filled cells "
        f"{found.one_seed} rest on one seed, and {found.unrecorded} on runs from before records."
    )


BEGIN, END = "<!-- counts: written by isthmus reproduce --docs -->", "<!-- end of counts -->"


COLUMNS = {
    "printed numbers": "printed",
    "with ours": "filled",
    "within 1": "within_1",
    "within 2": "within_2",
    "off, cause shown": "shown",
    "off, cause guessed": "guessed",
    "off, not reproduced": "not_reproduced",
    "no spread": "no_spread",
    "not judged": "not_judged",
    "drawn cells filled": "drawn",
    "filled, one seed": "one_seed",
    "filled, no record": "unrecorded",
}


def counts_table(before: Mapping[str, Counts], now: Mapping[str, Counts]) -> str:
    """Every paper before and now, as Markdown: ``before -> now`` where they differ."""
    lines = [f"| paper | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    rows = [(name, before.get(name), found) for name, found in now.items()]
    if len(rows) > 1:
        old = [each for _, each, _ in rows if each is not None]
        rows.append(("sum", sum(old, Counts()) if old else None, sum((each for *_, each in rows), Counts())))
    for name, old_counts, new_counts in rows:
        cells = []
        for field in COLUMNS.values():
            new = getattr(new_counts, field)
            old_value = new if old_counts is None else getattr(old_counts, field)
            cells.append(str(new) if old_value == new else f"{old_value} → {new}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
