"""Bytes of a round beside the formulas of docs/methods.md and the specification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import isthmus
from isthmus.methods.fedsageplus.algorithm import FedSagePlusClient

CLIENTS, ROUNDS, FEATURES, WIDTH, CLASSES = 4, 2, 300, 32, 3
P = FEATURES * WIDTH + WIDTH + WIDTH * CLASSES + CLASSES
"""Numbers of the GCN below."""
OVERHEAD = 1_500
"""Bytes of a message beside its numbers, at most: names, shapes, kinds."""
UP = {
    "local": 0,
    "fedavg": P,
    "fedprox": P,
    "moon": P,
    "ditto": P,
    "scaffold": 2 * P,
    "fedproto": CLASSES * (WIDTH + 1),
    "fedgta": P + 2 * 6 * CLASSES + 1,
    "fedpub": P + WIDTH,
    "fedtad": P,
    "adafgl": P,
}
SETTINGS: dict[str, Any] = {
    "dataset": f"csbm:nodes=80,classes={CLASSES},features={FEATURES},degree=4",
    "partition": "random",
    "split": "50/20/30",
    "clients": CLIENTS,
    "seed": 1,
    "rounds": ROUNDS,
    "hidden": (WIDTH,),
    "backbone": "gcn",
    "input_norm": False,
    "head": False,
    "preset": "fedtad",
}
FEW: dict[str, dict[str, Any]] = {
    "fedgta": {"order": 6, "moments": "hybrid"},
    "fedpub": {"proxy_nodes": 10, "proxy_graphs": 1},
    "fedtad": {"distil_epochs": 1, "model_steps": 1, "pseudo_nodes": 12},
    "adafgl": {"extractor_rounds": ROUNDS, "head_width": 4},
}


@pytest.mark.parametrize("method", UP)
def test_bytes_of_a_round_are_those_of_the_formula(method: str, tmp_path: Path) -> None:
    result = isthmus.run(method, **SETTINGS, **FEW.get(method, {}), out=tmp_path / "run", quiet=True)
    sent = result["bytes"]["up"] / (ROUNDS * CLIENTS)
    assert 4 * UP[method] <= sent <= 4 * UP[method] + (OVERHEAD if UP[method] else 0)


def test_fedsageplus_sends_rows_and_not_generators(tmp_path: Path) -> None:
    small = {"encoder_width": 8, "code_width": 8, "generator_widths": (16,), "generator_rank": 4}
    common = {**SETTINGS, **small, "hide": "nodes", "hidden_share": 0.3, "generator_epochs": 40, "generator_lr": 0.02}
    sent = []
    for widths in ((16,), (512,)):
        common |= {"generator_widths": widths, "cross_rounds": 1, "backbone": "gcn"}
        result = isthmus.run("fedsageplus", **common, out=tmp_path / str(widths[0]), quiet=True)
        assert 4 * P <= result["bytes"]["up"] / (ROUNDS * CLIENTS) <= 4 * P + OVERHEAD
        sent.append(result["bytes"]["peer"])
    generator = 4 * 512 * 8 * CLIENTS * (CLIENTS - 1)
    assert sent[0] > 0 and abs(sent[1] - sent[0]) < generator


def test_bytes_between_clients_of_fedsageplus_are_those_of_the_formula(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 S F (K - 1) numbers of a client that generated S rows: the rows to every other, and every other's answer."""
    rows: list[int] = []
    original = FedSagePlusClient.generate

    def counted(self: FedSagePlusClient) -> None:
        original(self)
        rows.append(len(self.settled().known.which))

    monkeypatch.setattr(FedSagePlusClient, "generate", counted)
    small = {"encoder_width": 8, "code_width": 8, "generator_widths": (16,), "generator_rank": 4, "cross_rounds": 2}
    found = {"hide": "nodes", "hidden_share": 0.3, "generator_epochs": 40, "generator_lr": 0.02}
    result = isthmus.run("fedsageplus", **SETTINGS, **small, **found, out=tmp_path / "run", quiet=True)
    formula = 4 * 2 * sum(rows) * FEATURES * (CLIENTS - 1)
    assert len(rows) == 2 * CLIENTS and sum(rows) > 0
    assert formula <= result["bytes"]["peer"] <= formula * 1.05 + 2 * 2 * CLIENTS * (CLIENTS - 1) * OVERHEAD
