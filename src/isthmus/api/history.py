"""The evaluated rounds of a run as columns."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from isthmus.errors import ConfigError

_NESTED = ("per_client", "test_groups", "test_group_client_means", "test_minority_per_client")
"""Parts of a metrics line that are no column."""


class History(Mapping[str, list[Any]]):
    """Columns of a run's evaluated rounds: ``step``, ``round``, ``val``, ``test``, ``train_loss``, ... one value per
    round each, None where it was not measured. What a method logs is ``log.<name>``, bytes sent so far
    ``bytes.<channel>``.

    Args:
        lines: Lines of ``metrics.jsonl``.
    """

    def __init__(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self.lines = tuple(lines)
        rows = [dict(_flat(line)) for line in lines]
        names = dict.fromkeys(name for row in rows for name in row)
        self._columns = {name: [row.get(name) for row in rows] for name in names}

    def __getitem__(self, column: str) -> list[Any]:
        return self._columns[column]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """Number of columns, as of every mapping; ``num_rounds`` counts the rows."""
        return len(self._columns)

    @property
    def num_rounds(self) -> int:
        """Number of evaluated rounds."""
        return len(self.lines)

    def per_client(self, part: str = "test") -> dict[str, list[float | None]]:
        """Score of each client in each evaluated round; empty where secure sums hide it."""
        rows = [line.get("per_client") or {} for line in self.lines]  # secure sums hide them
        clients = dict.fromkeys(client for row in rows for client in row)
        return {client: [_score(row.get(client), part) for row in rows] for client in clients}

    def to_pandas(self) -> Any:
        """As a ``pandas.DataFrame``, one row per evaluated round."""
        return frames("pandas").DataFrame(self._columns)

    def to_polars(self) -> Any:
        """As a ``polars.DataFrame``, one row per evaluated round."""
        return frames("polars").DataFrame(self._columns, infer_schema_length=None)

    def __repr__(self) -> str:
        return f"History({self.num_rounds} rounds: {', '.join(self._columns)})"


def _flat(line: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in line.items():
        if name in _NESTED:
            continue
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", each) for inner, each in value.items())
        else:
            yield name, value


def _score(client: Mapping[str, Any] | None, part: str) -> float | None:
    """A client's score in a metrics line: that of the run's metric, else the share of right answers."""
    if client is None:
        return None
    if f"{part}_score" in client:
        score: float | None = client[f"{part}_score"]
        return score
    right, total = client[part]
    return right / total if total else None


def frames(name: str) -> Any:
    """A package of data frames, if it is installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise ConfigError(f"this table needs the package {name!r}: pip install {name}") from None
