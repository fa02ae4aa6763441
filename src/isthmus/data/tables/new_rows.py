"""An owner's tables to predict for: the folder, with rows that came later, and without labels where there are none."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from isthmus.data.tables.frames import pl
from isthmus.data.tables.owner import LINK_KEY, OwnerTables, read_owner
from isthmus.data.tables.reader import Problem, Problems, all_texts, columns_of, find_file, has_rows
from isthmus.data.tables.schema import Schema
from isthmus.errors import DataError, unknown


@dataclass(frozen=True)
class Merged:
    """A file made of others: ``rows`` rows of ``file``, then those of ``more``."""

    name: str
    file: Path
    rows: int
    more: Path | None

    def place(self, problem: Problem) -> Problem:
        """A problem where the owner can find it: in the file it came from."""
        if problem.file != self.name:
            return problem
        line = problem.line
        source = self.more if line is not None and line > self.rows and self.more is not None else self.file
        if line is None:
            return replace(problem, file=source.name)
        header = 0 if source.suffix.lower() == ".parquet" else 1
        return replace(problem, file=source.name, line=line + header - (self.rows if source is self.more else 0))


def read_to_predict(
    folder: Path, owner: str, schema: Schema, *, seed: int, nodes: Path | None = None, edges: Path | None = None
) -> OwnerTables:
    """Read an owner's tables as a model was trained on them.

    Args:
        folder: The owner's tables; labels and a column of the split may be missing.
        schema: Of the model.
        nodes, edges: Further rows, with the columns of the files in the folder; none are fine.
    """
    labels = schema.labels
    optional = {str(labels.column), *([labels.split.column] if labels.split.column is not None else [])}
    with tempfile.TemporaryDirectory(prefix="isthmus-tables-") as merged:
        into = Path(merged)
        labelled_nodes = optional if schema.graphs is None else set[str]()
        merged_files = [_merge(find_file(folder, schema.nodes.file), nodes, into, labelled_nodes)]
        if schema.graphs is not None:
            merged_files.append(_merge(find_file(folder, schema.graphs.file), None, into, optional))
        if schema.edges is not None:
            merged_files.append(_merge(find_file(folder, schema.edges.file), edges, into, set()))
        elif edges is not None:
            raise DataError(f"the model was trained without edges, so {edges} cannot be used: leave it out")
        if (folder / LINK_KEY).exists():
            shutil.copyfile(folder / LINK_KEY, into / LINK_KEY)
        problems = Problems()
        found = read_owner(into, owner, seed=seed, schema=schema, labelled=False, problems=problems)
        for one in merged_files:
            problems.errors = [one.place(problem) for problem in problems.errors] if one else problems.errors
        problems.stop()
        return found


def _merge(file: Path, more: Path | None, into: Path, optional: set[str]) -> Merged | None:
    """A table in a folder of its own: a link to the file where nothing changes, else its rows and the further ones."""
    missing = sorted(optional - set(columns_of(file)))
    if more is not None and not more.is_file():
        raise DataError(f"there is no file {more}: give CSV or Parquet with the columns of {file.name}")
    if more is not None and not has_rows(more):
        more = None
    if more is None and not missing:
        (into / file.name).symlink_to(file.absolute())
        return None
    frame = all_texts(file)
    rows = frame.height
    if more is not None:
        further = all_texts(more)
        for column in further.columns:
            if column not in frame.columns:
                raise DataError(f"{more.name}: {unknown('column', column, frame.columns)}")
        absent = [column for column in frame.columns if column not in further.columns and column not in optional]
        if absent:
            raise DataError(f"{more.name} lacks the columns {', '.join(absent)} of {file.name}")
        frame = pl.concat([frame, further], how="diagonal")
    frame = frame.with_columns(pl.lit(None, dtype=pl.String).alias(column) for column in missing)
    name = f"{file.stem}.parquet"
    frame.write_parquet(into / name)
    return Merged(name, file, rows, more)
