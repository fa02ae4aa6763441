"""The same run with several seeds: each result, and mean and spread over them."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from isthmus.metrics.spread import spread

if TYPE_CHECKING:
    from isthmus.api.result import Result

SCORES = ("score", "test", "test_last", "test_client_mean", "val")
"""Numbers of which mean and spread are formed."""
COMMON = ("method", "dataset", "partition", "clients", "split", "rounds", "preset", "metric", "score_rule")


class Results(dict[str, Any]):
    """Results of one run with several seeds, a mapping: what they have in common, ``seeds``, mean and spread of the
    scores (``results["test"]["mean"]``), and each result under ``results``. ``±`` is the population's standard
    deviation; of one seed it is None.
    """

    def __init__(self, results: Sequence[Result]) -> None:
        super().__init__(
            {key: results[0].get(key) for key in COMMON},
            seeds=[result["seed"] for result in results],
            **{key: summary([result[key] for result in results]) for key in SCORES},
            results=list(results),
        )

    def __repr__(self) -> str:
        return f"<Results of {self['method']} on {self['dataset']}, seeds {self['seeds']}: test {self._shown('test')}>"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th style='text-align:left'>{key}</th><td>{self._shown(key)}</td></tr>" for key in SCORES)
        title = f"{self['method']} on {self['dataset']}, {self['clients']} clients, seeds {self['seeds']}"
        return f"<div><b>{html.escape(title)}</b><table>{rows}</table></div>"

    def _shown(self, key: str) -> str:
        return percent_spread(self[key])

    def singles(self) -> Iterator[Result]:
        """The results, seed by seed."""
        yield from self["results"]


def summary(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Mean, spread and number of runs; None where a value is missing."""
    found = spread(values)
    return None if found is None else {"mean": found.mean, "std": found.std, "runs": found.runs}


SPREAD = "± is the standard deviation over seeds; one seed has none"
"""What the tables of runs say of their spread; it is that of a population."""


def percent_spread(value: Mapping[str, Any] | None, *, sign: bool = False) -> str:
    """``64.80 ± 1.50`` in percent; without the spread where there is one seed, which has none."""
    if value is None:
        return "-"
    std = "" if value["std"] is None else f" ± {100 * value['std']:.2f}"
    mean = round(100 * value["mean"], 2) + 0.0  # no minus before a zero
    return f"{mean:{'+' if sign else ''}.2f}{std}"
