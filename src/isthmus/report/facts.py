"""A method's own facts as lines of a table: any JSON, in few words.

number              mean and spread over seeds; of a class or an id, which is a name, all different ones
text, yes or no     as it is, all different ones where seeds disagree
list of numbers     the numbers where they are few, else how many and from where to where
map                 a line per entry where they are few (``name: key``), else as a list of its values
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from isthmus.report import words
from isthmus.report.runs import as_number
from isthmus.report.tables import mean_and_spread

_NAMES = re.compile(r"(^|[\W_])(class|id|seed)$")
"""Facts whose number is a name."""
FEW = 12
"""Up to so many numbers, or entries of a map, are shown in full."""


def fact_rows(seeds: Sequence[Mapping[str, object]]) -> list[tuple[str, str]]:
    """Name and value of every fact, in the order of the first seed."""
    flat = [dict(_entries("", facts)) for facts in seeds]
    return [
        (name, _told([facts[name] for facts in flat if name in facts], named=bool(_NAMES.search(name))))
        for name in dict.fromkeys(name for one in flat for name in one)
    ]


def _entries(prefix: str, value: object) -> Iterator[tuple[str, object]]:
    """Maps opened up, as long as they are small."""
    if isinstance(value, Mapping) and (len(value) <= FEW or not prefix):
        for key, inner in value.items():
            yield from _entries(f"{prefix}: {key}" if prefix else str(key), inner)
    else:
        yield prefix, list(value.values()) if isinstance(value, Mapping) else value


def _told(values: Sequence[object], *, named: bool = False) -> str:
    """One fact over all seeds; a mean of names, of classes say, would mean nothing."""
    numbers = [number for value in values if (number := as_number(value)) is not None]
    if len(numbers) == len(values) and not named:
        mean, spread = mean_and_spread(numbers)
        return _number(mean) + (f" ± {_number(spread)}" if spread is not None else "")
    return "; ".join(dict.fromkeys(_text(value) for value in values))


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return _listed(value)
    number = as_number(value)
    return _number(number) if number is not None else words.ABSENT if value is None else str(value)


def _listed(values: Sequence[object]) -> str:
    if len(values) <= FEW and not any(isinstance(value, list | tuple | Mapping) for value in values):
        return ", ".join(_text(value) for value in values) if values else "none"
    numbers = list(_numbers(values))
    among = f", {_number(min(numbers))} to {_number(max(numbers))}" if numbers else ""
    inner = {len(value) for value in values if isinstance(value, list | tuple)}
    each = f" of {min(inner)} each" if len(inner) == 1 else ""
    return f"{words.plural(len(values), 'row' if inner else 'value')}{each}{among}"


def _numbers(value: object) -> Iterator[float]:
    """All numbers in a value."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner)
    elif (number := as_number(value)) is not None:
        yield number


def _number(value: float | None) -> str:
    if value is None:
        return words.ABSENT
    whole = (value == round(value) or abs(value) >= 1000) and abs(value) < 1e15
    return f"{value:,.0f}" if whole else f"{value:.4g}"
