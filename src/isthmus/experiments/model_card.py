"""The model card: what a reviewer of models asks of a client's trained model, from counts alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isthmus.methods.evaluation import detail
from isthmus.metrics.groups import minority_mask
from isthmus.metrics.registry import METRICS

PARTS = ("train", "val", "test")
CALIBRATION_BINS = 10


@dataclass(frozen=True)
class Calibration:
    """How far the stated probabilities are from the shares that come true, on one part of the samples.

    Args:
        error: Expected calibration error: over 10 bins of the highest probability, the mean of |share right - mean
            probability|, weighted by samples.
        brier: Mean squared distance of the probabilities to the true class (0 to 2).
        bins: Samples, mean probability and share right of each bin that has samples.
    """

    error: float
    brier: float
    bins: tuple[tuple[int, float, float], ...]


def calibration(probability: Tensor, y: Tensor) -> Calibration | None:
    """Of labelled samples; None without any."""
    if not len(y):
        return None
    highest, predicted = probability.double().max(1)
    right = (predicted == y).double()
    place = (highest * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    bins, error = [], 0.0
    for number in range(CALIBRATION_BINS):
        inside = place == number
        if bool(inside.any()):
            mean, share = float(highest[inside].mean()), float(right[inside].mean())
            bins.append((int(inside.sum()), mean, share))
            error += float(inside.sum()) / len(y) * abs(share - mean)
    true = torch.nn.functional.one_hot(y, probability.shape[1]).double()
    brier = float(((probability.double() - true) ** 2).sum(1).mean())
    return Calibration(error, brier, tuple(bins))


def scores_of(logits: Tensor, data: Any, class_names: Sequence[str]) -> dict[str, Any]:
    """Scores of one client's model on its own samples, by part; nothing of a single sample."""
    found: dict[str, Any] = {}
    minority = minority_mask(data.y, data.train)
    for part in PARTS:
        mask = getattr(data, part) & (data.y >= 0)
        rows, y = logits[mask], data.y[mask]
        if not len(y):
            continue
        right = rows.argmax(1) == y
        counts = detail(rows, y, {part: torch.ones_like(y, dtype=torch.bool)})
        confusion, histogram = counts.confusion[part], counts.histogram[part]
        calibrated = calibration(torch.softmax(rows.double(), 1), y)
        assert calibrated is not None
        found[part] = {
            "samples": len(y),
            "accuracy": float(right.double().mean()),
            **{name: METRICS[name](confusion, histogram) for name in ("macro_f1", "auroc", "auprc")},
            "minority": _share(right[minority[mask]]),
            "confusion": confusion.tolist(),
            "classes": [_class_scores(confusion, number, name) for number, name in enumerate(class_names)],
            "calibration_error": calibrated.error,
            "brier": calibrated.brier,
            "calibration_bins": [list(one) for one in calibrated.bins],
        }
    return found


def _class_scores(confusion: Tensor, number: int, name: str) -> dict[str, Any]:
    hit, actual, predicted = (
        int(value) for value in (confusion[number, number], confusion[number].sum(), confusion[:, number].sum())
    )
    return {
        "class": name,
        "samples": actual,
        "precision": hit / predicted if predicted else None,
        "recall": hit / actual if actual else None,
    }


def _share(right: Tensor) -> float | None:
    return float(right.double().mean()) if len(right) else None


def card_text(facts: Mapping[str, Any], scores: Mapping[str, Any] | None) -> str:
    """``card.md`` from what ``model.toml`` says and the scores."""
    run, sizes = facts["run"], facts["sizes"]
    things = "graphs" if facts["task"] == "graph" else "nodes"
    lines = [
        f"# Model card: {facts['method']} at {facts['client']}",
        "",
        f"A {facts['backbone']} model that classifies {things} into {sizes['classes']} classes, trained with "
        f"{facts['method']} ({facts['reference']}) by Isthmus {facts['isthmus']}. The model is of round "
        f"{facts['round']} of {run['rounds']}, picked by `{run['selection']}`.",
        "",
        "## Trained on",
        "",
        f"- Data: `{facts['data']['dataset']}` ({facts['data']['source']}); the part of {facts['client']}: "
        f"{sizes['samples']} {things}, {sizes['edges']} edges inside"
        + (f", {sizes['cross_edges']} edges to other owners" if sizes.get("cross_edges") else "")
        + f", {sizes['features']} features.",
        f"- Labelled {things} here: {sizes['train']} for training, {sizes['val']} for validation, {sizes['test']} for "
        "testing.",
        f"- Took part: {len(facts['clients'])} ({', '.join(facts['clients'])}).",
        f"- Numbers in the model: {sizes['parameters']}.",
        "",
        "## Scores on the data of this owner",
        "",
        *(_score_lines(scores) if scores else ["This method does not say what its model predicts, so there are none."]),
        "",
        "## Protections",
        "",
        f"- Secure sums: {'on, the server reads totals only' if run['secure_sum'] else 'off'}.",
        *_privacy_lines(facts.get("privacy")),
        "- What left this owner in training is in `disclosure.json`.",
        "",
        "## Use",
        "",
        _use(facts),
        "",
        "Not to be used:",
        "",
        f"- for {things} of another kind, another schema or another owner than those above: scores hold for the test "
        f"{things} of this owner only;",
        f"- where a class or group had few labelled {things} (see the table by class): its scores say little;",
        "- as the only reason for a decision about a person, or for decisions whose errors nobody reviews;",
        "- as proof that training data cannot be inferred: a model can tell members of its training set"
        + (" within the epsilon stated above;" if facts.get("privacy", {}).get("epsilon") else " (`isthmus audit`);"),
        "- after the data have drifted: compare new labels with predictions before relying on it.",
        "",
    ]
    return "\n".join(lines)


def _use(facts: Mapping[str, Any]) -> str:
    if facts["predicts"] == "alone":
        return "`isthmus predict` with this folder; it needs neither the run folder nor the other owners."
    if facts["predicts"] == "messages":
        return (
            "Predictions take messages between all owners, under the rules of training: `isthmus submit --predict`, or "
            "in one process `isthmus predict` with the folder of all packages."
        )
    return f"This model cannot predict: {facts['no_prediction']}."


def _privacy_lines(privacy: Mapping[str, Any] | None) -> list[str]:
    if not privacy:
        return ["- Differential privacy: none."]
    epsilon = privacy.get("epsilon")
    stated = f"epsilon {epsilon:.4g} at delta {privacy.get('delta'):.1e}" if epsilon else "no guarantee (no noise)"
    lines = [f"- Differential privacy: {stated}, per {privacy.get('unit', 'client')}."]
    if privacy.get("relies_on"):
        lines.append(f"- It rests on {privacy['relies_on']}.")
    if privacy.get("not_covered"):
        lines.append(f"- Not covered by it: {privacy['not_covered']}.")
    return lines


def _score_lines(scores: Mapping[str, Any]) -> list[str]:
    rows = (
        ("accuracy", "accuracy"),
        ("minority classes", "minority"),
        ("macro F1", "macro_f1"),
        ("AUROC", "auroc"),
        ("AUPRC", "auprc"),
        ("calibration error", "calibration_error"),
        ("Brier score", "brier"),
    )
    parts = list(scores)
    lines = [f"| | {' | '.join(parts)} |", f"|---|{'---|' * len(parts)}"]
    lines.append(f"| samples | {' | '.join(str(scores[part]['samples']) for part in parts)} |")
    for title, key in rows:
        lines.append(f"| {title} | {' | '.join(_number(scores[part][key]) for part in parts)} |")
    last = parts[-1]
    lines += ["", f"By class, {last}:", "", "| class | samples | precision | recall |", "|---|---|---|---|"]
    lines += [
        f"| {one['class']} | {one['samples']} | {_number(one['precision'])} | {_number(one['recall'])} |"
        for one in scores[last]["classes"]
    ]
    lines += ["", f"Calibration, {last}: samples, mean stated probability, share right, by tenths of it.", ""]
    lines += ["| samples | stated | right |", "|---|---|---|"]
    lines += [f"| {count} | {stated:.3f} | {right:.3f} |" for count, stated, right in scores[last]["calibration_bins"]]
    return lines


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
