r"""Scaling and imputation that owners agree on by sums alone, and features made from them.

Every owner adds its part to four sums, one after the other; where sums are masked, nobody sees a single owner's part of
any of them. With t the value of a cell, transformed as its scale says (``log-standard``: sign(x) log(1 + |x|)):

    step      summed                                                         known after it
    counts    cells in 257 fixed buckets: 0 and +-[2^k, 2^(k+1))             number of cells, largest magnitude 2^e
    sums      :math:`\sum t / 2^e`                                           a first mean
    squares   :math:`\sum ((t - \mathrm{mean}) / 2^e)^2`                     a first deviation
    shape     :math:`z = (t - \mathrm{mean}) / \mathrm{deviation}`: sums of   mean and deviation to full precision,
              z and z^2, cells in fine bins of z                             median, ranks

What is summed stays of the order of the number of cells whatever the unit of a column, as the fixed-point numbers under
masks need it. A median lies within one deviation of the mean, so 4,096 bins there give it to 2^-11 of the deviation;
ranks come from 64 bins in every power of two of z.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from isthmus.data.tables.schema import Feature, Schema
from isthmus.errors import DataError

Array = NDArray[np.float64]
LOWEST, HIGHEST = -64, 63
BUCKETS = 2 * (HIGHEST - LOWEST + 1) + 1
ZERO = BUCKETS // 2
MEDIAN_BINS, RANK_BINS = 4096, 64


def numeric(schema: Schema) -> list[Feature]:
    """Features that need something agreed on: the numbers."""
    return [feature for feature in schema.all_features if feature.type == "number"]


def transformed(feature: Feature, values: Array) -> Array:
    """Values as they are counted and averaged."""
    return np.sign(values) * np.log1p(np.abs(values)) if feature.scale == "log-standard" else values


def bucket(values: Array) -> NDArray[np.int64]:
    """Fixed bucket of each value, in the order of values: by sign and power of two."""
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log2(np.abs(values)))
    magnitude = np.clip(exponent, LOWEST, HIGHEST) - LOWEST + 1
    return np.where(values == 0, ZERO, ZERO + np.sign(values) * magnitude).astype(np.int64)


def bounds(index: NDArray[np.int64]) -> tuple[Array, Array]:
    """Lower and upper end of buckets."""
    side = np.sign(index - ZERO).astype(np.float64)
    low = np.ldexp(1.0, np.abs(index - ZERO) - 1 + LOWEST)
    ends = side * low, side * low * 2
    return np.where(side < 0, ends[1], ends[0]), np.where(side < 0, ends[0], ends[1])


def count(schema: Schema, raw: Mapping[str, Array]) -> Array:
    """An owner's part of the first sum: cells of every numeric feature in every bucket (J, 257)."""
    found = np.zeros((len(numeric(schema)), BUCKETS))
    for row, feature in enumerate(numeric(schema)):
        found[row] = np.bincount(bucket(_present(feature, raw)), minlength=BUCKETS)
    return found


@dataclass(frozen=True)
class Spread:
    """What is known so far of numeric features (J,): cells, largest magnitude as a power of two, mean, deviation."""

    number: Array
    exponent: NDArray[np.int64]
    mean: Array
    std: Array


def after_counts(total: Array) -> Spread:
    """From the first sum."""
    filled = total > 0
    distance = np.abs(np.arange(BUCKETS) - ZERO)
    exponent = np.where(filled.any(1), (filled * distance).max(1) + LOWEST, 0).astype(np.int64)
    return Spread(total.sum(1), exponent, np.zeros(len(total)), np.ones(len(total)))


def add_up(schema: Schema, raw: Mapping[str, Array], spread: Spread) -> Array:
    """An owner's part of the second sum (J,)."""
    shifts = spread.exponent.tolist()
    return np.array(
        [np.ldexp(_present(one, raw), -shift).sum() for one, shift in zip(numeric(schema), shifts, strict=True)]
    )


def after_sums(spread: Spread, total: Array) -> Spread:
    """From the second sum."""
    return replace(spread, mean=np.ldexp(total / np.maximum(spread.number, 1), spread.exponent))


def squares(schema: Schema, raw: Mapping[str, Array], spread: Spread) -> Array:
    """An owner's part of the third sum (J,)."""
    found = np.zeros(len(spread.mean))
    for row, feature in enumerate(numeric(schema)):
        apart = np.ldexp(_present(feature, raw) - spread.mean[row], -int(spread.exponent[row]))
        found[row] = (apart**2).sum()
    return found


def after_squares(spread: Spread, total: Array) -> Spread:
    """From the third sum. A column with one value has deviation 1, so that it becomes zero and not nothing."""
    std = np.ldexp(np.sqrt(np.maximum(total, 0) / np.maximum(spread.number, 1)), spread.exponent)
    return replace(spread, std=np.where(std <= 1e-12 * np.maximum(np.abs(spread.mean), 1e-300), 1.0, std))


@dataclass(frozen=True)
class Shape:
    """The fourth sum, or an owner's part of it: sums of z and z^2 (J,), cells below -1 and in bins of [-1, 1] (J, 4097)
    for medians, cells in bins of z (R, B) for ranks.
    """

    first: Array
    second: Array
    median_bins: Array
    rank_bins: Array


def shape(schema: Schema, raw: Mapping[str, Array], spread: Spread) -> Shape:
    """An owner's part of the fourth sum."""
    features = numeric(schema)
    first, second = np.zeros(len(features)), np.zeros(len(features))
    medians = np.zeros((len(features), MEDIAN_BINS + 1))
    ranked = [feature for feature in features if feature.scale == "rank"]
    ranks = np.zeros((len(ranked), BUCKETS * RANK_BINS))
    for row, feature in enumerate(features):
        z = (_present(feature, raw) - spread.mean[row]) / spread.std[row]
        first[row], second[row] = z.sum(), (z**2).sum()
        if feature.missing == "median":
            place = np.clip(np.floor((z + 1) / 2 * MEDIAN_BINS), -1, MEDIAN_BINS).astype(np.int64) + 1
            medians[row] = np.bincount(place, minlength=MEDIAN_BINS + 2)[: MEDIAN_BINS + 1]
        if feature.scale == "rank":
            ranks[ranked.index(feature)] = np.bincount(_rank_bin(z), minlength=BUCKETS * RANK_BINS)
    return Shape(first, second, medians, ranks)


@dataclass(frozen=True)
class Scaling:
    """All that was agreed on, per numeric feature. It travels with the model.

    Args:
        mean, std: Of transformed values (J,).
        fill: What stands for an empty cell (J,), before scaling.
        ranks: Cumulated counts of ranked features in bins of z (R, B).
    """

    mean: Array
    std: Array
    fill: Array
    ranks: Array

    def arrays(self) -> dict[str, Array]:
        """By name, to be stored."""
        return {"mean": self.mean, "std": self.std, "fill": self.fill, "ranks": self.ranks}


def agree(schema: Schema, spread: Spread, total: Shape) -> Scaling:
    """From the fourth sum."""
    features, number = numeric(schema), np.maximum(spread.number, 1)
    shift = total.first / number
    mean = spread.mean + spread.std * shift
    std = spread.std * np.sqrt(np.maximum(total.second / number - shift**2, 0))
    std = np.where(std <= 1e-12 * np.maximum(np.abs(mean), 1e-300), 1.0, std)
    fill = np.zeros(len(features))
    ranked = np.array([feature.scale == "rank" for feature in features], dtype=bool)
    for row, feature in enumerate(features):
        if isinstance(feature.missing, float):
            fill[row] = feature.missing
        elif feature.missing in ("mean", "own", "median"):
            middle = mean[row] if feature.missing != "median" else _median(spread, total, row)
            fill[row] = _back(middle) if feature.scale == "log-standard" else middle
    # Ranks are looked up in bins of the first mean and deviation, which they were counted with.
    return Scaling(
        np.where(ranked, spread.mean, mean), np.where(ranked, spread.std, std), fill, np.cumsum(total.rank_bins, 1)
    )


def encode(schema: Schema, raw: Mapping[str, Array], scaling: Scaling) -> NDArray[np.float32]:
    """The features x (n, F) a model is given, columns as ``schema.columns`` names them."""
    columns: list[Array] = []
    numbers = {feature.name: row for row, feature in enumerate(numeric(schema))}
    ranked = [feature.name for feature in numeric(schema) if feature.scale == "rank"]
    for feature in schema.all_features:
        values = raw[feature.name]
        empty = np.isnan(values)
        if feature.type == "category":
            codes = np.where(empty, _default(feature), values)
            columns += [(codes == code).astype(np.float64) for code in range(len(feature.values))]
        elif feature.type == "flag":
            columns.append(np.where(empty, float(feature.missing is True), values))
        else:
            row = numbers[feature.name]
            filled = np.where(empty, scaling.fill[row], values)
            z = (transformed(feature, filled) - scaling.mean[row]) / scaling.std[row]
            if feature.scale == "rank":
                columns.append(_rank(z, scaling.ranks[ranked.index(feature.name)]))
            else:
                columns.append(filled if feature.scale == "none" else z)
        if feature.own_missing:
            columns.append(empty.astype(np.float64))
    x = np.stack(columns, axis=1).astype(np.float32)
    if not np.isfinite(x).all():
        where = schema.columns[int(np.flatnonzero(~np.isfinite(x).all(0))[0])]
        raise DataError(f'feature {where} is too large for single precision: use scale = "log-standard" or "rank"')
    return x


def _present(feature: Feature, raw: Mapping[str, Array]) -> Array:
    values = raw[feature.name]
    return transformed(feature, values[~np.isnan(values)])


def _rank_bin(z: Array) -> NDArray[np.int64]:
    """Bin of each value: 64 equal ones in every bucket."""
    index = bucket(z)
    low, high = bounds(index)
    width = np.where(high > low, high - low, 1.0)
    inside = np.clip(np.floor((z - low) / width * RANK_BINS), 0, RANK_BINS - 1).astype(np.int64)
    return index * RANK_BINS + np.where(index == ZERO, 0, inside)


def _median(spread: Spread, total: Shape, row: int) -> float:
    before = np.cumsum(total.median_bins[row])
    place = int((before >= spread.number[row] / 2).argmax()) - 1
    return float(spread.mean[row] + spread.std[row] * (2 * (place + 0.5) / MEDIAN_BINS - 1))


def _rank(z: Array, cumulated: Array) -> Array:
    """Share of all values below, half of those in the same bin counted."""
    place = _rank_bin(z)
    before = np.concatenate([[0.0], cumulated])
    total = max(float(cumulated[-1]), 1.0)
    share: Array = (before[place] + before[place + 1]) / (2 * total)
    return share


def _back(value: float) -> float:
    return float(np.sign(value) * np.expm1(np.abs(value)))


def _default(feature: Feature) -> float:
    return float(feature.values.index(feature.missing)) if feature.missing in feature.values else -1.0
