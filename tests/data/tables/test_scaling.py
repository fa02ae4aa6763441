"""Scaling agreed on by sums equals what the pooled data would give."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("polars", reason="needs the extra tables")

from isthmus.data.tables import scaling
from isthmus.data.tables.schema import Schema, parse_schema

SCHEMA = b"""
[nodes]
file = "a.*"
id = "id"
label = "y"
classes = ["0", "1"]
[features]
plain = { type = "number", missing = "median" }
money = { type = "number", scale = "log-standard", missing = "own" }
rank = { type = "number", scale = "rank", missing = "mean" }
kind = { type = "category", values = ["x", "y"], missing = "y" }
raw = { type = "number", scale = "none", missing = 7 }
same = { type = "number" }
"""


def owner(rows: int, seed: int, shift: float) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    raw = {
        "plain": draw.normal(shift, 5.0, rows),
        "money": draw.lognormal(5, 3, rows) * draw.choice([-1, 1], rows),
        "rank": -draw.lognormal(1, 1, rows),
        "kind": draw.integers(0, 2, rows).astype(float),
        "raw": draw.normal(size=rows),
    }
    for values in raw.values():
        values[draw.random(rows) < 0.1] = np.nan
    return raw | {"same": np.full(rows, 3.0)}


def agreed(schema: Schema, owners: list[dict[str, np.ndarray]]) -> scaling.Scaling:
    spread = scaling.after_counts(sum(scaling.count(schema, raw) for raw in owners))
    spread = scaling.after_sums(spread, sum(scaling.add_up(schema, raw, spread) for raw in owners))
    spread = scaling.after_squares(spread, sum(scaling.squares(schema, raw, spread) for raw in owners))
    shapes = [scaling.shape(schema, raw, spread) for raw in owners]
    total = scaling.Shape(*(sum(vars(shape)[name] for shape in shapes) for name in vars(shapes[0])))
    return scaling.agree(schema, spread, total)


@pytest.mark.parametrize("shift", [0.0, 1e-9, 1e9])
def test_sums_give_what_pooled_data_give(shift: float) -> None:
    schema = parse_schema(SCHEMA)
    owners = [owner(3000, 0, shift), owner(1500, 1, shift + 1.0), owner(10, 2, shift)]
    found = agreed(schema, owners)
    pooled = {name: np.concatenate([raw[name] for raw in owners]) for name in owners[0]}
    x = scaling.encode(schema, pooled, found)
    assert x.shape == (4510, len(schema.columns))
    column = dict(zip(schema.columns, x.T, strict=True))

    plain = np.where(np.isnan(pooled["plain"]), np.nanmedian(pooled["plain"]), pooled["plain"])
    expected = (plain - np.nanmean(pooled["plain"])) / np.nanstd(pooled["plain"])
    np.testing.assert_allclose(column["plain"], expected, atol=1e-3)  # the median is exact to 2^-11 deviations

    logs = np.sign(pooled["money"]) * np.log1p(np.abs(pooled["money"]))
    expected = (np.where(np.isnan(logs), np.nanmean(logs), logs) - np.nanmean(logs)) / np.nanstd(logs)
    np.testing.assert_allclose(column["money"], expected, atol=1e-5)
    np.testing.assert_array_equal(column["money is missing"], np.isnan(pooled["money"]))

    known = ~np.isnan(pooled["rank"])
    ranks = np.searchsorted(np.sort(pooled["rank"][known]), pooled["rank"][known]) / known.sum()
    assert np.abs(column["rank"][known] - ranks).max() < 0.01

    codes = np.where(np.isnan(pooled["kind"]), 1, pooled["kind"])
    np.testing.assert_array_equal(column["kind=x"], codes == 0)
    np.testing.assert_array_equal(column["raw"], np.where(np.isnan(pooled["raw"]), 7, pooled["raw"]).astype(np.float32))
    np.testing.assert_array_equal(column["same"], 0.0)


def test_what_is_summed_stays_of_the_order_of_the_number_of_cells() -> None:
    """Fixed-point numbers under masks hold 2^23 with full precision, whatever the unit of a column."""
    schema = parse_schema(SCHEMA)
    raw = owner(1000, 0, 1e15)
    spread = scaling.after_counts(scaling.count(schema, raw))
    assert np.abs(scaling.add_up(schema, raw, spread)).max() <= 1000
    spread = scaling.after_sums(spread, scaling.add_up(schema, raw, spread))
    assert scaling.squares(schema, raw, spread).max() <= 4000


def test_an_owner_with_empty_columns_takes_part() -> None:
    schema = parse_schema(SCHEMA)
    empty = {name: np.full(5, np.nan) for name in owner(1, 0, 0.0)}
    found = agreed(schema, [owner(100, 0, 2.0), empty])
    assert np.isfinite(scaling.encode(schema, empty | {"same": np.full(5, 3.0)}, found)).all()
    alone = agreed(schema, [empty])
    assert np.isfinite(alone.mean).all() and (alone.std > 0).all()
