"""Scores from tallies, and the round validation picks."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from isthmus.errors import DataError, RunError
from isthmus.experiments.score_rules import SCORE_RULES
from isthmus.experiments.scoring import better, evaluation_line, selected_line
from isthmus.federation.interface import Replies, Stacked
from isthmus.methods.evaluation import Counter, Evaluation, Tally, tally

NOTHING = Tally(0, 0, 0.0)


def evaluation(val: Tally, test: Tally, train: Tally = NOTHING) -> Evaluation:
    return Evaluation({"train": train, "val": val, "test": test})


def test_scores_of_a_round_by_hand() -> None:
    line = evaluation_line(
        {
            "a": evaluation(Tally(1, 2, 3.0), Tally(3, 4, 1.0)),
            "b": evaluation(Tally(0, 2, 1.0), Tally(1, 2, 2.0)),
            "c": evaluation(NOTHING, NOTHING),
        },
        {"a": 10, "b": 30, "c": 60},
    )
    assert line["val"] == 1 / 4 and line["val_loss"] == 1.0 and line["val_client_mean"] == 1 / 4
    assert line["test"] == 4 / 6 and line["test_loss"] == 0.5 and line["test_client_mean"] == (3 / 4 + 1 / 2) / 2
    assert line["test_node_weighted"] == pytest.approx((10 * 3 / 4 + 30 * 1 / 2) / 40), (
        "clients without test nodes do not count"
    )
    assert line["train_loss"] is None
    assert line["per_client"]["a"] == {"train": [0, 0], "val": [1, 2], "test": [3, 4]}
    assert "test_minority_per_client" not in line


def test_minority_nodes_are_counted_client_by_client() -> None:
    parts = {"train": NOTHING, "val": NOTHING, "test": Tally(3, 4, 1.0)}
    evaluations = {
        "a": Evaluation({**parts, "test:minority": Tally(1, 2, 0.0)}),
        "b": Evaluation({**parts, "test:minority": NOTHING}),
    }
    line = evaluation_line(evaluations, {"a": 4, "b": 4})
    assert line["test_minority_per_client"] == {"a": [1, 2], "b": [0, 0]}
    assert line["test_groups"]["minority"] == [1, 2]


def test_a_stack_of_clients_has_the_line_of_its_rows() -> None:
    torch.manual_seed(0)
    y = [torch.randint(3, (size,)) for size in (5, 0, 9)]
    masks = [
        {"train": torch.rand(len(own)) < 0.5, "val": torch.rand(len(own)) < 0.5, "test": torch.ones(len(own)).bool()}
        for own in y
    ]
    for each in masks:
        each["test:minority"] = each["test"] & each["val"]
    logits = torch.randn(14, 3)
    stacked = Stacked(Counter(y, masks).stacked(logits), ("a", "b", "c"))
    rows = dict(zip(stacked.parties, stacked.rows(), strict=True))
    nodes = {"a": 5, "b": 7, "c": 9}
    assert evaluation_line(Replies(stacked, {}), nodes) == evaluation_line(rows, nodes)
    for own, mask, part, row in zip(y, masks, logits.split([5, 0, 9]), rows.values(), strict=True):
        alone = Counter([own], [mask]).evaluation(part)
        assert alone == row
        for name, one in mask.items():
            expected = tally(part, own, one)
            assert (row.parts[name].correct, row.parts[name].total) == (expected.correct, expected.total)
            assert row.parts[name].loss == pytest.approx(expected.loss, rel=1e-6)


def test_scores_that_do_not_fit_the_classes_are_refused() -> None:
    counter = Counter([torch.tensor([0, 2])], [{"test": torch.tensor([True, True])}])
    for logits in (torch.zeros(2, 2), torch.zeros(1, 3)):
        with pytest.raises(DataError, match="do not fit 2 samples of 3 classes"):
            counter.evaluation(logits)
    with pytest.raises(DataError, match="negative label"):
        Counter([torch.tensor([0, -1])], [{"test": torch.tensor([True, True])}])


@pytest.mark.parametrize("loss", [math.inf, math.nan])
def test_a_diverged_loss_stays_json(loss: float) -> None:
    line = evaluation_line({"a": evaluation(Tally(1, 2, loss), Tally(1, 1, 1.0))}, {"a": 3})
    assert line["val_loss"] is None and json.loads(json.dumps(line, allow_nan=False)) == line


def rounds(*values: float | None, key: str = "val") -> list[dict[str, Any]]:
    other = "val_loss" if key == "val" else "val"
    return [{"round": i + 1, key: value, other: 0.5} for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("lines", "selection", "picked"),
    [
        (rounds(0.1, 0.3, 0.2), "best_val_acc", 2),
        (rounds(0.1, 0.3, 0.3), "best_val_acc", 2),
        (rounds(0.3, 0.3, 0.3), "last", 1),
        (rounds(0.9, 0.2, 0.4, key="val_loss"), "best_val_loss", 2),
        (rounds(0.9, 0.2, 0.2, key="val_loss"), "best_val_loss", 2),
        (rounds(None, None, None), "best_val_acc", 3),
        (rounds(None, 0.2, None, 0.1), "best_val_acc", 2),
        (rounds(None, 0.9, None, 0.5, key="val_loss"), "best_val_loss", 4),
    ],
)
def test_selection_with_ties_and_holes(lines: list[dict[str, Any]], selection: str, picked: int) -> None:
    assert selected_line(lines, selection)["round"] == picked
    best = None
    for line in lines:  # the loop decides round by round; both must agree
        best = line if better(line, best, selection) else best
    assert best is not None and best["round"] == picked


def test_no_round() -> None:
    with pytest.raises(RunError, match="no round"):
        selected_line([], "last")


def test_every_rule_names_a_column_and_a_round() -> None:
    line = evaluation_line({"a": evaluation(Tally(1, 2, 1.0), Tally(1, 1, 1.0))}, {"a": 3})
    for column, when, sentence in SCORE_RULES.values():
        assert (
            column in line
            and when in ("last", "selected")
            and when.removesuffix("ed") in sentence.replace("picked", "select")
        )
