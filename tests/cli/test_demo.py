"""``isthmus demo``: the whole story in small, with and without AMLSim's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from isthmus.cli.demo import METHODS, learned
from isthmus.cli.main import main
from isthmus.data import amlsim_sample
from isthmus.data.amlsim_sample import BANKS, sample_accounts, sampled_banks
from isthmus.data.datasets import load_nodes
from isthmus.errors import DataError
from isthmus.seeds import Stream


def test_the_story_on_generated_banks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise DataError("not here")

    monkeypatch.setattr(amlsim_sample, "sampled_banks", missing)
    out = tmp_path / "demo"
    assert main(["demo", "--out", str(out), "--seeds", "1", "--accounts", "300", "--rounds", "2"]) == 0
    shown = capsys.readouterr().out
    assert "generated" in shown and "references, not federations" in shown and "made for sets of graphs" in shown
    assert "one seed, spread unknown" in shown and "1 seeds" not in shown
    results = {m: json.loads((out / f"{m}-s0" / "result.json").read_text()) for m in METHODS}
    lines = {line.split()[0]: line for line in shown.splitlines() if line.split()[:1] and line.split()[0] in METHODS}
    for method, result in results.items():  # each figure is that of this run
        assert f"{100 * result['score']:.2f}" in lines[method]
        assert (result["split"], result["metric"], result["preset"]) == ("stratified:40/20/40", "auprc", "general")
        if method != "local":
            assert f"{100 * (result['score'] - results['local']['score']):+.2f}" in lines[method]
    assert (out / "report.html").is_file() and len((out / "predictions-client-0.csv").read_text().splitlines()) > 10
    assert "embedding" in learned(out / "fedggr-s0") and "model" not in learned(out / "local-s0")


def test_the_sample_keeps_whole_rings() -> None:
    try:
        graph = load_nodes("amlsim-cycle", Stream(0))
    except DataError as error:
        pytest.skip(str(error))
    rows = sample_accounts(graph, 1000, Stream(0))
    ring = torch.as_tensor(graph.columns["ring"])
    kept = torch.zeros(len(ring), dtype=torch.bool)
    kept[rows] = True
    inside = ring[kept & (ring >= 0)].unique()
    assert len(rows) == 1000 and torch.equal(kept & (ring >= 0), torch.isin(ring, inside))
    share = float(graph.data.y[rows].float().mean())
    assert abs(share - float(graph.data.y.float().mean())) < 0.02
    data = sampled_banks(1000)
    assert set(data.owner) == set(BANKS) and torch.equal(data.y, sampled_banks(1000).y)
