"""From clients' tallies to the numbers of a metrics line and of a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.errors import RunError
from isthmus.methods.evaluation import Evaluation, Tally

Line = Mapping[str, Any]


def evaluation_line(evaluations: Mapping[str, Evaluation], nodes: Mapping[str, int]) -> dict[str, Any]:
    """Scores of one evaluated round. ``nodes``: number of nodes of each client (weights of FedStruct's mean)."""
    line: dict[str, Any] = {}
    for part in ("val", "test"):
        tallies = {client: evaluation.parts[part] for client, evaluation in evaluations.items()}
        line[part] = pooled(tallies.values())
        line[f"{part}_loss"] = _pooled_loss(list(tallies.values()))
        line[f"{part}_client_mean"] = client_mean(tallies.values())
        line[f"{part}_node_weighted"] = node_weighted(tallies, nodes)
    line["train_loss"] = _pooled_loss([evaluation.parts["train"] for evaluation in evaluations.values()])
    line["per_client"] = {
        client: {part: [evaluation.parts[part].correct, evaluation.parts[part].total] for part in ("train", "val", "test")}
        for client, evaluation in evaluations.items()
    }
    return line


def pooled(tallies: Any) -> float | None:
    """Right answers over all answers."""
    tallies = list(tallies)
    total = sum(t.total for t in tallies)
    return sum(t.correct for t in tallies) / total if total else None


def client_mean(tallies: Any) -> float | None:
    """Unweighted mean over clients that have answers."""
    scores = [t.correct / t.total for t in tallies if t.total]
    return sum(scores) / len(scores) if scores else None


def node_weighted(tallies: Mapping[str, Tally], nodes: Mapping[str, int]) -> float | None:
    """``sum_i (n_i / n) acc_i`` with all nodes as weights, over clients that have answers (FedStruct, section 12.4)."""
    rated = {client: tally for client, tally in tallies.items() if tally.total}
    total = sum(nodes[client] for client in rated)
    return sum(nodes[c] * t.correct / t.total for c, t in rated.items()) / total if total else None


def _pooled_loss(tallies: Sequence[Tally]) -> float | None:
    total = sum(t.total for t in tallies)
    return sum(t.loss for t in tallies) / total if total else None


def better(new: Line, old: Line | None, selection: str) -> bool:
    """Did validation improve? Ties go to the earlier round; without validation nodes the later round counts as better."""
    key = "val_loss" if selection == "best_val_loss" else "val"
    if old is None or new[key] is None or old[key] is None:
        return True
    return bool(new[key] < old[key] if key == "val_loss" else new[key] > old[key])


def selected_line(lines: Sequence[Line], selection: str) -> Line:
    """The evaluated round that validation picks."""
    if not lines:
        raise RunError("no round was evaluated; run at least one round")
    best: Line | None = None
    for line in lines:
        if better(line, best, selection):
            best = line
    assert best is not None
    return best


SCORE_RULES = {
    "node_weighted_last": ("test_node_weighted", "last", "mean of the clients' test accuracies weighted by their number of nodes, last round"),
    "client_mean_last": ("test_client_mean", "last", "unweighted mean of the clients' test accuracies, last round"),
    "pooled_last": ("test", "last", "pooled test accuracy, last round"),
    "pooled_selected": ("test", "selected", "pooled test accuracy at the round picked by validation"),
    "client_mean_selected": ("test_client_mean", "selected", "unweighted mean of the clients' test accuracies at the round picked by validation"),
}
"""Rule -> (column, round, sentence)."""
