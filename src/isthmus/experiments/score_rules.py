"""How a result's score is formed, in words: apart from the scores themselves, as lists and help load nothing large."""

from __future__ import annotations

_MEAN = "mean of the clients' test accuracies"
SCORE_RULES = {
    "node_weighted_last": ("test_node_weighted", "last", f"{_MEAN} weighted by their number of nodes, last round"),
    "node_weighted_selected": (
        "test_node_weighted",
        "selected",
        f"{_MEAN} weighted by their number of nodes, at the round picked by validation",
    ),
    "client_mean_last": ("test_client_mean", "last", f"unweighted {_MEAN}, last round"),
    "pooled_last": ("test", "last", "pooled test accuracy, last round"),
    "pooled_selected": ("test", "selected", "pooled test accuracy at the round picked by validation"),
    "client_mean_selected": ("test_client_mean", "selected", f"unweighted {_MEAN} at the round picked by validation"),
}
"""Rule -> (column, round, sentence)."""


def rule_words(rule: str, metric: str) -> str:
    """How the score of a run will be formed, as a sentence."""
    return of_metric(metric, SCORE_RULES[rule][2])


def of_metric(metric: str, sentence: str) -> str:
    """A sentence about accuracies, about another metric."""
    if metric == "accuracy":
        return sentence
    return sentence.replace("accuracies", f"{metric} scores").replace("accuracy", metric)
