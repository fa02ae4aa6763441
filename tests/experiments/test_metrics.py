"""``--metric``: the score that validation picks rounds by, formed from counts that add up over clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as exact

from isthmus.data.scenario import build_scenario
from isthmus.errors import ConfigError
from isthmus.experiments.config import resolve
from isthmus.experiments.disclosure import sheet_of
from isthmus.experiments.run import SimulatedRun
from isthmus.experiments.scenarios import scenario_of
from isthmus.experiments.scoring import evaluation_line
from isthmus.methods.evaluation import Evaluation, Tally, tally
from isthmus.methods.learners import NodeLearner, node_groups
from isthmus.metrics.groups import majority_class
from isthmus.metrics.registry import parse_metric

SMALL: dict[str, Any] = {
    "dataset": "banks:banks=3,accounts=600",
    "partition": "owner",
    "rounds": 6,
    "hidden": (8,),
    "seed": 1,
    "lr": 0.02,
}


def run_in_memory(method: str, **settings: Any) -> SimulatedRun:
    resolved = resolve(method, {**SMALL, **settings})
    simulated = SimulatedRun(resolved, scenario_of(resolved))
    simulated.loop.play()
    return simulated


@pytest.mark.parametrize("metric", ["auprc", "auroc", "balanced_accuracy", "macro_f1", "recall@20", "recall@p0.2"])
def test_pooled_score_equals_the_exact_one_over_all_nodes(metric: str) -> None:
    simulated = run_in_memory("fedavg", metric=metric)
    scores, guesses, truth = [], [], []
    for client in simulated.engine.parties("client"):
        owner = simulated.engine.party(client).client
        logits, test = owner.learner.logits(owner.state.weights), owner.data.test
        scores.append((logits[:, 1] - logits[:, 0])[test])
        guesses.append(logits.argmax(1)[test])
        truth.append(owner.data.y[test])
    score, guess, y = (torch.cat(parts).numpy() for parts in (scores, guesses, truth))
    precision, recall, _ = exact.precision_recall_curve(y, score)
    wanted = {
        "auprc": exact.average_precision_score(y, score),
        "auroc": exact.roc_auc_score(y, score),
        "balanced_accuracy": exact.balanced_accuracy_score(y, guess),
        "macro_f1": exact.f1_score(y, guess, average="macro"),
        "recall@20": y[np.argsort(-score, kind="stable")[:20]].sum() / y.sum(),
        "recall@p0.2": recall[precision >= 0.2].max(),
    }[metric]
    assert simulated.loop.lines[-1]["test"] == pytest.approx(wanted, abs=0.02)
    assert simulated.loop.lines[-1]["test_accuracy"] == pytest.approx(float((guess == y).mean()))


def test_detail_is_asked_for_only_where_a_metric_needs_it() -> None:
    messages = [
        {row["message"] for row in run_in_memory("fedavg", **given).loop.sheet.rows()}
        for given in ({"metric": "accuracy"}, {"metric": "auprc"})
    ]
    assert "Detail" not in messages[0] and "Detail" in messages[1]


def test_a_model_predicts_once_for_all_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = []
    logits = NodeLearner.logits
    monkeypatch.setattr(NodeLearner, "logits", lambda self, weights: predicted.append(1) or logits(self, weights))
    run = run_in_memory("fedper", metric="auprc", execution="each", rounds=2)
    assert len(predicted) == 2 * len(run.parts)


def test_minority_and_degree_groups_add_up_to_the_test_nodes() -> None:
    line = run_in_memory("local").loop.lines[-1]
    groups = line["test_groups"]
    total = sum(counts["test"][1] for counts in line["per_client"].values())
    assert groups["minority"][1] + groups["majority"][1] == total
    assert sum(counts[1] for name, counts in groups.items() if name.startswith("degree")) == total


def test_minority_scores_are_also_averaged_over_clients() -> None:
    parts = [
        {
            "train": Tally(0, 0, 0.0),
            "val": Tally(0, 0, 0.0),
            "test": Tally(1, 4, 0.0),
            "test:minority": Tally(right, total, 0.0),
        }
        for right, total in ((1, 1), (1, 4), (0, 0))
    ]
    line = evaluation_line(
        {f"c{k}": Evaluation(part) for k, part in enumerate(parts)}, dict.fromkeys(("c0", "c1", "c2"), 4)
    )
    assert line["test_groups"] == {"minority": [2, 5]}
    assert line["test_group_client_means"] == {"minority": 0.625}  # who has none does not count


def test_balanced_classes_make_a_rare_class_count() -> None:
    """The same model, the same data: with balanced classes it names far more accounts as members of a ring."""
    named = []
    for weight in ("none", "balanced"):
        rings = {"dataset": "banks:banks=3,accounts=600,rate=0.1", "split": "50/20/30"}
        simulated = run_in_memory(
            "central", class_weight=weight, rounds=40, dropout=0.0, metric="balanced_accuracy", **rings
        )
        owner = simulated.engine.party("central").client
        named.append(int((owner.learner.logits(owner.state.weights).argmax(1) == 1).sum()))
    assert named[1] > named[0] + 20


@pytest.mark.parametrize("name", ["acuracy", "recall@", "recall@0", "recall@p1.5", "recall@x"])
def test_an_unknown_metric_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="metric"):
        parse_metric(name)


def test_where_sums_are_secure_the_counts_are_masked_too() -> None:
    """Then only the score over all clients is known, and it is the same."""
    plain, masked = (run_in_memory("fedavg", metric="auprc", execution="each", secure_sum=on) for on in (False, True))
    shown = {row["message"]: row["protection"] for row in masked.loop.sheet.rows()}
    assert shown["Detail"] == "masked"
    assert masked.loop.lines[-1]["test"] == pytest.approx(plain.loop.lines[-1]["test"], abs=1e-3)
    assert masked.loop.lines[-1]["test_client_mean"] is None and plain.loop.lines[-1]["test_client_mean"] is not None


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("metric", ["accuracy", "auprc"])
def test_the_sheet_of_a_run_is_known_before_it_starts(metric: str, secure: bool) -> None:
    simulated = run_in_memory("fedavg", metric=metric, execution="each", secure_sum=secure, rounds=1)
    stated = {line.key for line in sheet_of(simulated.settings.method, metric=metric, secure_sum=secure)}
    assert stated == set(simulated.loop.sheet.keys())


def test_always_the_majority_class_is_never_right_on_minorities() -> None:
    parts = build_scenario(
        dataset="csbm:nodes=120,classes=3,features=4,degree=4", clients=3, split="client:40/30/30", seed=1
    ).parts
    output = {}
    for name, data in parts.items():
        logits = torch.zeros(data.num_nodes, 3)
        logits[:, majority_class(data.y, data.train)] = 1.0
        masks = {"train": data.train, "val": data.val, "test": data.test} | node_groups(data)
        output[name] = Evaluation({part: tally(logits, data.y, mask) for part, mask in masks.items()})
    line = evaluation_line(output, {name: data.num_nodes for name, data in parts.items()})
    (wrong, few), (right, many) = line["test_groups"]["minority"], line["test_groups"]["majority"]
    assert wrong == 0 < few and right == many and line["test"] == pytest.approx(many / (few + many))
