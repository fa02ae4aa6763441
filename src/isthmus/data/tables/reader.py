"""CSV and Parquet files to typed columns.

A wrong cell is a `Problem` that names file, line and column. Problems are collected, so that ``isthmus data check``
shows them all; whoever wants to go on calls `Problems.stop`.

CSV is parsed by pyarrow, which refuses rows that are too short, as a file that was cut off has them (polars fills them
up); everything after that is polars.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.data.tables.frames import arrow_csv, pl, pyarrow
from isthmus.errors import DataError, unknown

ENDINGS = (".csv", ".parquet")
DELIMITERS = ",;\t|"
SHOWN = 5
"""Problems of one kind that are listed one by one."""
TRUE, FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")
DAY = 86_400.0


@dataclass(frozen=True)
class Problem:
    """Something wrong in a table. ``line`` counts from 1, the header of a CSV file included."""

    file: str
    text: str
    column: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        place = [self.file]
        if self.line is not None:
            place.append(f"line {self.line}")
        if self.column is not None:
            place.append(f"column {self.column}")
        return f"{', '.join(place)}: {self.text}"


@dataclass
class Problems:
    """What was found so far: errors stop a run, warnings do not."""

    errors: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)

    def stop(self) -> None:
        """Raise if there is an error."""
        if self.errors:
            more = len(self.errors) - 1
            rest = f" (and {more} more: `isthmus data check FOLDER` lists them)" if more else ""
            raise DataError(f"{self.errors[0]}{rest}")


def find_file(folder: Path, pattern: str) -> Path:
    """The one file of the folder that fits, e.g. ``accounts.*``: CSV or Parquet."""
    if "/" in pattern or "\\" in pattern or pattern.startswith("."):
        raise DataError(f"file {pattern!r} of {folder.name} must lie in the folder itself: give its plain name")
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder")
    found = sorted(path for path in folder.glob(pattern) if path.suffix.lower() in ENDINGS and path.is_file())
    if not found:
        raise DataError(f"{folder} holds no file {pattern} that ends in {' or '.join(ENDINGS)}")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise DataError(f"{folder} holds several files {pattern} ({names}): keep one, or name it in schema.toml")
    return found[0]


def columns_of(path: Path) -> list[str]:
    """Names of the columns of a file."""
    if path.suffix.lower() == ".parquet":
        return list(_parquet_schema(path))
    return _header(path)[0]


class Table:
    """Some columns of one file, as they are written.

    Args:
        path: The file.
        columns: Columns to read; None passed over, so that optional ones can be listed.
        missing_values: Texts that mean an empty cell.
        problems: Where problems go.
    """

    def __init__(
        self, path: Path, columns: Sequence[str | None], missing_values: Sequence[str], problems: Problems
    ) -> None:
        self.path, self.problems = path, problems
        wanted = list(dict.fromkeys(column for column in columns if column is not None))
        parquet = path.suffix.lower() == ".parquet"
        present = columns_of(path)
        for column in wanted:
            if column not in present:
                raise DataError(f"{path.name}: {unknown('column', column, present)}")
            if present.count(column) > 1:
                raise DataError(f"{path.name} has two columns {column!r}: rename one")
        self._first_line = 1 if parquet else 2
        self._kept: NDArray[np.int64] | None = None
        self.frame: pl.DataFrame = _read_parquet(path, wanted) if parquet else _read_csv(path, wanted)
        self._rows = self.frame.height
        empty = [text for text in missing_values if text]
        if empty:
            texts = [name for name in wanted if self.frame.schema[name] == pl.String]
            self.frame = self.frame.with_columns(
                pl.when(pl.col(name).is_in(empty)).then(None).otherwise(pl.col(name)).alias(name) for name in texts
            )

    def __len__(self) -> int:
        return self._rows

    def keep(self, rows: pl.Series) -> None:
        """Keep some rows only; lines are still those of the file."""
        self._kept = np.flatnonzero(rows.to_numpy())
        self.frame = self.frame.filter(rows)
        self._rows = self.frame.height

    def forget(self, column: str) -> None:
        """Give the memory of a column back."""
        self.frame = self.frame.drop(column)

    def line(self, row: int) -> int:
        """Line of a row in the file."""
        return int(row if self._kept is None else self._kept[row]) + self._first_line

    def report(self, rows: NDArray[np.int64], column: str | None, text: str, *, warning: bool = False) -> None:
        """Note a problem at these rows: the first few one by one, the rest as a number."""
        found = self.problems.warnings if warning else self.problems.errors
        for row in rows[:SHOWN].tolist():
            found.append(Problem(self.path.name, text, column, self.line(row)))
        if len(rows) > SHOWN:
            found.append(Problem(self.path.name, f"{len(rows) - SHOWN} more lines like this: {text}", column))

    def texts(self, column: str) -> pl.Series:
        """Cells as text, white space at both ends removed; an empty cell is null."""
        series = self.frame[column]
        if series.dtype != pl.String:
            series = series.cast(pl.String)
        series = series.str.strip_chars()
        return series.set(series == "", None)

    def numbers(self, column: str) -> NDArray[np.float64]:
        """Cells as numbers, NaN where empty. What is no finite number is a problem."""
        series = self.frame[column]
        if series.dtype == pl.Boolean:
            series = series.cast(pl.Int8)
        texts = self.texts(column) if series.dtype == pl.String else series
        values = texts.cast(pl.Float64, strict=False)
        found: NDArray[np.float64] = values.to_numpy().astype(np.float64, copy=True)
        wrong = ~np.isfinite(found) & texts.is_not_null().to_numpy()
        if wrong.any():
            hint = " (write numbers with a point, not a comma)" if series.dtype == pl.String else ""
            self.report(np.flatnonzero(wrong), column, f"is not a finite number{hint}")
            found[wrong] = np.nan
        return found

    def categories(self, column: str, values: Sequence[str]) -> NDArray[np.int64]:
        """Position of each cell in ``values``, -1 where empty. Anything else is a problem."""
        texts = self.texts(column)
        codes = texts.replace_strict(list(values), list(range(len(values))), default=None, return_dtype=pl.Int64)
        found: NDArray[np.int64] = codes.fill_null(-1).to_numpy().astype(np.int64)
        wrong = (found < 0) & texts.is_not_null().to_numpy()
        if wrong.any():
            shown = ", ".join(values[:8]) + (", ..." if len(values) > 8 else "")
            self.report(np.flatnonzero(wrong), column, f"is none of {shown}")
        return found

    def flags(self, column: str) -> NDArray[np.float64]:
        """Cells as 0 and 1, NaN where empty."""
        series = self.frame[column]
        if series.dtype == pl.Boolean:
            return series.cast(pl.Float64).to_numpy().astype(np.float64)
        texts = self.texts(column).str.to_lowercase()
        texts = texts.str.replace(r"^([01])\.0$", "$1")  # a Parquet file may hold flags as numbers
        found: NDArray[np.float64] = (
            texts.replace_strict(
                [*TRUE, *FALSE], [1.0] * len(TRUE) + [0.0] * len(FALSE), default=None, return_dtype=pl.Float64
            )
            .to_numpy()
            .astype(np.float64)
        )
        wrong = np.isnan(found) & texts.is_not_null().to_numpy()
        if wrong.any():
            self.report(np.flatnonzero(wrong), column, "is neither true nor false (1/0, yes/no)")
        return found

    def times(self, column: str) -> NDArray[np.float64]:
        """Cells as days: numbers as they are, dates and times (ISO 8601) since 1970. NaN where empty."""
        series = self.frame[column]
        if series.dtype.is_temporal():
            return series.cast(pl.Datetime("us")).to_physical().to_numpy().astype(np.float64) / (1e6 * DAY)
        if series.dtype != pl.String:
            return self.numbers(column)
        texts = self.texts(column)
        values = texts.cast(pl.Float64, strict=False)
        if values.null_count() > texts.null_count():
            moments = texts.str.to_datetime(strict=False, time_unit="us", time_zone="UTC")
            if moments.null_count() < values.null_count():
                values = moments.to_physical().cast(pl.Float64) / (1e6 * DAY)
        found: NDArray[np.float64] = values.to_numpy().astype(np.float64)
        wrong = ~np.isfinite(found) & texts.is_not_null().to_numpy()
        if wrong.any():
            self.report(np.flatnonzero(wrong), column, "is neither a number of days nor a date like 2026-01-31")
        return found


def all_texts(path: Path) -> pl.DataFrame:
    """All columns of a file, every cell as text."""
    parquet = path.suffix.lower() == ".parquet"
    columns = columns_of(path)
    frame = _read_parquet(path, columns) if parquet else _read_csv(path, columns)
    return frame.with_columns(pl.all().cast(pl.String))


def has_rows(path: Path) -> bool:
    """Whether a file holds more than the names of its columns."""
    if path.suffix.lower() == ".parquet":
        _parquet_schema(path)
        return bool(pl.scan_parquet(path).head(1).collect().height)
    _header(path)
    with path.open("rb") as file:
        next(file)
        return any(line.strip() for line in file)


def _parquet_schema(path: Path) -> dict[str, Any]:
    try:
        return dict(pl.read_parquet_schema(path))
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(
            f"{path.name} is not a Parquet file that can be read ({_first(error)}): write it again"
        ) from None


def _read_parquet(path: Path, columns: list[str]) -> pl.DataFrame:
    types = _parquet_schema(path)
    for column in columns:
        if types[column].is_nested():
            raise DataError(f"{path.name}, column {column}: holds lists or structures; give it plain values")
        if isinstance(types[column], pl.Binary):
            raise DataError(f"{path.name}, column {column}: holds bytes; write it as text or numbers")
    try:
        frame: pl.DataFrame = pl.read_parquet(path, columns=columns)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"{path.name} cannot be read ({_first(error)}): it may be cut off, write it again") from None
    texts = [name for name, kind in frame.schema.items() if kind in (pl.Categorical, pl.Enum)]
    return _with_rows(path, frame.with_columns(pl.col(texts).cast(pl.String)))


def _header(path: Path) -> tuple[list[str], str]:
    """Names in the first line, and the character between them."""
    try:
        with path.open("rb") as file:
            line = file.readline(1 << 20)
    except OSError as error:
        raise DataError(f"cannot read {path.name}: {error.strerror}") from None
    if not line.strip():
        raise DataError(f"{path.name} is empty: its first line must name the columns")
    try:
        text = line.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError:
        raise DataError(f"{path.name}, line 1: is not UTF-8 text; save the file as UTF-8") from None
    delimiter = max(DELIMITERS, key=text.count)
    return next(csv.reader([text], delimiter=delimiter)), delimiter


def _read_csv(path: Path, columns: list[str]) -> pl.DataFrame:
    names, delimiter = _header(path)

    def read(*, threads: bool) -> Any:
        return arrow_csv.read_csv(
            path,
            read_options=arrow_csv.ReadOptions(
                use_threads=threads, block_size=1 << 24, skip_rows=1, column_names=names
            ),
            parse_options=arrow_csv.ParseOptions(delimiter=delimiter),
            convert_options=arrow_csv.ConvertOptions(
                include_columns=columns,
                column_types={column: pyarrow.string() for column in columns},
                strings_can_be_null=True,
                null_values=[""],
            ),
        )

    try:
        return _with_rows(path, pl.from_arrow(read(threads=True)))
    except pyarrow.ArrowInvalid:
        pass
    except OSError as error:
        raise DataError(f"cannot read {path.name}: {error.strerror or error}") from None
    try:  # once more on one thread, which knows the line
        read(threads=False)
    except pyarrow.ArrowInvalid as error:
        raise DataError(_csv_mistake(path, str(error))) from None
    raise AssertionError


def _csv_mistake(path: Path, text: str) -> str:
    """What is wrong with a CSV file, without its contents."""
    short = re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+)", text)
    if short:
        row, wanted, got = map(int, short.groups())
        return (
            f"{path.name}, line {row}: has {got} cells where the first line has {wanted}; "
            "the file may be cut off, or a text with the separator in it lacks quotes"
        )
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return f"{path.name}, line {number}: is not UTF-8 text; save the file as UTF-8"
    if "Empty CSV" in text:
        return f"{path.name} has no rows"
    return f"{path.name} cannot be read as CSV ({text.splitlines()[0][:120]})"


def _with_rows(path: Path, frame: Any) -> pl.DataFrame:
    if frame.height == 0:
        raise DataError(f"{path.name} has no rows")
    found: pl.DataFrame = frame
    return found


def _first(error: Exception) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__
