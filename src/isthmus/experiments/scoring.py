"""Scores of a metrics line and of a result, from the clients' counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from isthmus.errors import RunError
from isthmus.experiments.score_rules import SCORE_RULES, of_metric
from isthmus.federation.interface import Replies
from isthmus.methods.evaluation import Detail, Evaluation, ScoreBins, SummedScores
from isthmus.metrics.registry import Metric
from isthmus.metrics.score_bins import WIDTH, mean_of_bins
from isthmus.metrics.scores import Count, accuracy, client_mean, weighted_mean

Line = Mapping[str, Any]


def evaluation_line(evaluations: Mapping[str, Evaluation], nodes: Mapping[str, int]) -> dict[str, Any]:
    """Accuracies of one evaluated round. ``nodes``: number of samples of each client (weights of FedStruct's mean)."""
    line: dict[str, Any] = {}
    columns = _columns(evaluations)
    for part in ("val", "test"):
        column = columns[part]
        scores = column.scores()
        line[part] = column.pooled()
        line[f"{part}_loss"] = column.pooled_loss()
        line[f"{part}_client_mean"] = client_mean(scores)
        line[f"{part}_node_weighted"] = weighted_mean(dict(zip(column.clients, scores, strict=True)), nodes)
    groups = _groups(columns)
    line["test_groups"] = {group: column.sums() for group, column in groups.items()}
    line["test_group_client_means"] = {group: client_mean(column.scores()) for group, column in groups.items()}
    if "minority" in groups:
        counts_of = zip(groups["minority"].clients, groups["minority"].counts(), strict=True)
        line["test_minority_per_client"] = dict(counts_of)
    line["train_loss"] = columns["train"].pooled_loss() if "train" in columns else None  # not scored
    shown = {part: columns[part].counts() for part in ("train", "val", "test") if part in columns}
    line["per_client"] = {
        client: dict(zip(shown, counts, strict=True))
        for client, *counts in zip(columns["test"].clients, *shown.values(), strict=True)
    }
    return line


class _Column(NamedTuple):
    """The tallies of one part, client after client."""

    clients: Sequence[str]
    correct: list[int]
    total: list[int]
    loss: list[float]

    def scores(self) -> list[float | None]:
        return [correct / total if total else None for correct, total in zip(self.correct, self.total, strict=True)]

    def counts(self) -> list[list[int]]:
        return [list(counts) for counts in zip(self.correct, self.total, strict=True)]

    def sums(self) -> list[int]:
        return [sum(self.correct), sum(self.total)]

    def pooled(self) -> float | None:
        return accuracy(Count(*self.sums()))

    def pooled_loss(self) -> float | None:
        """Mean loss; None without predictions, or where training has diverged (JSON has no infinity)."""
        loss = sum(self.loss) / total if (total := sum(self.total)) else math.nan
        return loss if math.isfinite(loss) else None


def _groups(columns: Mapping[str, _Column]) -> dict[str, _Column]:
    """Groups of the test part: minority, majority, by degree."""
    return {part.removeprefix("test:"): column for part, column in columns.items() if part.startswith("test:")}


def _columns(evaluations: Mapping[str, Evaluation]) -> dict[str, _Column]:
    """By part. A stack of clients that were scored together is read as it is: a thousand clients have eleven thousand
    tallies.
    """
    stacked = evaluations.stacked if isinstance(evaluations, Replies) else None
    if stacked is not None:
        return {
            part: _Column(stacked.parties, tally.correct.tolist(), tally.total.tolist(), tally.loss.tolist())
            for part, tally in stacked.message.parts.items()
        }
    found: dict[str, list[tuple[str, int, int, float]]] = {}
    for client, evaluation in evaluations.items():
        for part, tally in evaluation.parts.items():
            found.setdefault(part, []).append((client, tally.correct, tally.total, tally.loss))
    return {part: _Column(*map(list, zip(*rows, strict=True))) for part, rows in found.items()}


def summed_line(scores: SummedScores, bins: ScoreBins | None) -> dict[str, Any]:
    """The same where only totals are known (secure sums): no score of a client; means over clients from the histogram
    of their scores, and without one none.
    """
    total, columns = scores.total, _columns(scores)
    means = {part: mean_of_bins(counts.tolist()) for part, counts in bins.counts.items()} if bins is not None else {}
    line: dict[str, Any] = {}
    for part in ("val", "test"):
        line[part] = accuracy(total.parts[part])
        line[f"{part}_loss"] = columns[part].pooled_loss()
        line[f"{part}_client_mean"] = means.get(part)
        line[f"{part}_node_weighted"] = None
    groups = _groups(columns)
    line["test_groups"] = {group: column.sums() for group, column in groups.items()}
    line["test_group_client_means"] = {group: means.get(f"test:{group}") for group in line["test_groups"]}
    line["train_loss"] = columns["train"].pooled_loss() if "train" in columns else None  # not scored
    line["per_client"] = None
    line["client_scores"] = None
    if bins is not None:
        line["client_scores"] = {"bin_width": WIDTH} | {part: bins.counts[part].tolist() for part in ("val", "test")}
    return line


def use_metric_of_totals(line: dict[str, Any], metric: Metric, total: Detail | None) -> None:
    """`use_metric` where only totals are known; clients with different classes have none, and no pooled score."""
    for part in ("val", "test"):
        line[f"{part}_accuracy"] = line[part]
        line[part] = (
            line[f"{part}_client_mean"] if total is None else metric(total.confusion[part], total.histogram[part])
        )


def use_metric(line: dict[str, Any], metric: Metric, details: Mapping[str, Detail], nodes: Mapping[str, int]) -> None:
    """Put another score in the place of accuracy, which stays beside it as ``val_accuracy`` and ``test_accuracy``."""
    for part in ("val", "test"):
        line[f"{part}_accuracy"] = line[part]
        scores = {client: metric(detail.confusion[part], detail.histogram[part]) for client, detail in details.items()}
        for client, score in scores.items():
            line["per_client"][client][f"{part}_score"] = score
        if len({detail.confusion[part].shape for detail in details.values()}) == 1:
            confusion = torch.stack([detail.confusion[part] for detail in details.values()]).sum(0)
            line[part] = metric(confusion, torch.stack([detail.histogram[part] for detail in details.values()]).sum(0))
        else:  # clients with different classes have no pooled score
            line[part] = client_mean(scores.values())
        line[f"{part}_client_mean"] = client_mean(scores.values())
        line[f"{part}_node_weighted"] = weighted_mean(scores, nodes)


def better(new: Line, old: Line | None, selection: str) -> bool:
    """Whether validation improved. Ties go to the earlier round; while no score is defined the later round counts as
    better.
    """
    key = "val_loss" if selection == "best_val_loss" else "val"
    if old is None or old[key] is None:
        return True
    if new[key] is None:
        return False
    return bool(new[key] < old[key] if key == "val_loss" else new[key] > old[key])


def selected_line(lines: Sequence[Line], selection: str) -> Line:
    """The evaluated round that validation selects."""
    if not lines:
        raise RunError("no round was evaluated; run at least one round")
    best: Line | None = None
    for line in lines:
        if better(line, best, selection):
            best = line
    assert best is not None
    return best


def rule_of_selection(rule: str, selection: str) -> str:
    """The rule at the round that a selection other than the preset's keeps."""
    formed = rule.removesuffix("_last").removesuffix("_selected")
    return f"{formed}_{'last' if selection == 'last' else 'selected'}"


def round_of_score(rule: str) -> str:
    """``last`` or ``selected``: the round at which a rule reads its score."""
    return SCORE_RULES[rule][1]


def score_of(selected: Line, last: Line, rule: str, metric: str) -> tuple[float | None, str]:
    """The score of a result, and how it is formed.

    With secure sums a mean over clients comes from the histogram of their scores; where there is none the pooled score
    takes its place, and the sentence says so.
    """
    column, when, sentence = SCORE_RULES[rule]
    line = last if when == "last" else selected
    if line["per_client"] is None and column != "test":
        if line[column] is None:
            column, instead = "test", "last round" if when == "last" else "at the round picked by validation"
            sentence = f"pooled test accuracy, {instead} (secure sums show no mean over clients)"
        else:
            sentence = f"{sentence}, from a histogram with bins of {WIDTH:g}"
    return line[column], of_metric(metric, sentence)
