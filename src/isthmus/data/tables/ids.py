"""Ids of nodes in tables: the form in which they are compared, and what is wrong with them."""

from __future__ import annotations

from typing import Any

import numpy as np

from isthmus.data.tables.frames import pl
from isthmus.data.tables.reader import Table
from isthmus.data.tables.schema import Schema


def normalised(table: Table, column: str, schema: Schema) -> pl.Series:
    """Ids of a column in the form in which they are compared."""
    ids = table.texts(column)
    for rule in schema.nodes.normalise:
        if rule == "no-spaces":
            ids = ids.str.replace_all(r"\s", "")
        elif rule == "upper":
            ids = ids.str.to_uppercase()
        elif rule == "lower":
            ids = ids.str.to_lowercase()
        elif rule == "digits":
            ids = ids.str.replace_all(r"\D", "")
        elif rule == "no-leading-zeros":
            ids = ids.str.replace(r"^0+(\S)", "$1")
    return ids.rename("id")


def check_filled(table: Table, column: str, ids: Any, what: str) -> None:
    """Every row must have an id, and one without white space in it."""
    empty = ids.is_null().to_numpy() | (ids == "").fill_null(True).to_numpy()
    if empty.any():
        table.report(np.flatnonzero(empty), column, f"is empty: every row needs {what}")
    spaced = ids.str.contains(r"\s").fill_null(False).to_numpy()
    if spaced.any():
        table.report(
            np.flatnonzero(spaced),
            column,
            'has white space inside: if it means nothing, write normalise = ["no-spaces"] in [nodes] of schema.toml',
        )
