"""The round loop: what is evaluated, selected, counted, written."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from packages import weight_hashes
from run_helpers import SMALL, TIMES, assert_same_run, ledger, lines, models, result, run_in_folder, small
from safetensors.torch import load_file

import isthmus
from isthmus.errors import ConfigError, RunError
from isthmus.experiments.callbacks import Callback, Progress
from isthmus.experiments.config import resolve
from isthmus.experiments.disclosure import sheet_of
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.result import form_result
from isthmus.experiments.run import SimulatedRun, scenario_of
from isthmus.experiments.score_rules import SCORE_RULES
from isthmus.federation.ledger import Entry, channel_totals, differences
from isthmus.methods.fedavg import ServerState
from isthmus.methods.registry import all_methods
from isthmus.tensors import equal_weights

METHODS = [method.name for method in all_methods()]


@pytest.mark.parametrize(
    ("rounds", "every", "wanted"), [(7, 3, [3, 6, 7]), (6, 3, [3, 6]), (3, 5, [3]), (3, 1, [1, 2, 3])]
)
def test_evaluation_cadence(rounds: int, every: int, wanted: list[int], tmp_path: Path) -> None:
    run_in_folder(small(rounds=rounds, eval_every=every), tmp_path / "r")
    assert [line["round"] for line in lines(tmp_path / "r")] == wanted, "every so many rounds, the last always"
    assert [line["step"] for line in lines(tmp_path / "r")] == [r + 1 for r in wanted], "after one setup round"
    assert result(tmp_path / "r")["rounds"] == rounds


def test_evaluation_does_not_change_training(tmp_path: Path) -> None:
    run_in_folder(small(rounds=4), tmp_path / "a")
    run_in_folder(small(rounds=4, eval_every=4), tmp_path / "b")
    assert weight_hashes(tmp_path / "a") == weight_hashes(tmp_path / "b") != {}


def test_metrics_lines(tmp_path: Path) -> None:
    simulated = run_in_folder(small(rounds=3), tmp_path / "r")
    found = lines(tmp_path / "r")
    assert found == simulated.loop.lines
    for before, after in itertools.pairwise(found):
        assert after["seconds"] >= before["seconds"] and after["bytes"]["up"] > before["bytes"]["up"]
    sizes = {client: data.num_nodes for client, data in simulated.parts.items()}
    assert {
        client: sum(total for _, total in parts.values()) for client, parts in found[-1]["per_client"].items()
    } == sizes
    assert found[-1]["test"] == sum(p["test"][0] for p in found[-1]["per_client"].values()) / sum(
        p["test"][1] for p in found[-1]["per_client"].values()
    )


def test_totals_are_those_of_the_ledger_files(tmp_path: Path) -> None:
    run_in_folder(small("fedavg", rounds=3), tmp_path / "r")
    entries = [
        Entry.from_json(line)
        for file in (tmp_path / "r" / "ledger").iterdir()
        for line in file.read_text().splitlines()
    ]
    sums = {phase: channel_totals(e for e in entries if e.phase == phase) for phase in ("setup", "train", "evaluation")}
    sent = result(tmp_path / "r")["bytes"]
    assert sent["up"] == sums["train"]["up"] > 0 and sent["down"] == sums["train"]["down"] > 0
    assert sent["setup_up"] == sums["setup"]["up"] > 0 and sent["setup_down"] == sums["setup"]["down"]
    assert (
        sent["evaluation_up"] == sums["evaluation"]["up"] > 0 and sent["evaluation_down"] == sums["evaluation"]["down"]
    )
    assert sent["peer"] == sent["device"] == 0
    assert sum(sum(total.values()) for total in sums.values()) == sum(sent.values())
    assert lines(tmp_path / "r")[-1]["bytes"]["up"] == sent["up"]
    assert sorted(ledger(tmp_path / "r")) == [f"{step:06d}.jsonl" for step in range(1, 5)], (
        "a segment per committed round"
    )


@pytest.mark.parametrize("execution", ["each", "cohort"])
@pytest.mark.parametrize("method", METHODS)
def test_a_run_shows_exactly_what_the_method_declares(method: str, execution: str, tmp_path: Path) -> None:
    # Without masks, which some presets ask for: what a sum would show if it were seen.
    simulated = run_in_folder(small(method, rounds=2, execution=execution, secure_sum=False), tmp_path / "r")
    settings = simulated.settings
    declared = sheet_of(settings.method, config=settings.method_config, view=simulated.view)
    assert differences(simulated.loop.sheet, declared) == []
    written = json.loads((tmp_path / "r" / "disclosure.json").read_text())
    assert written["method"] == method and written["rows"] == simulated.loop.sheet.rows()
    assert {row["protection"] for row in written["rows"]} <= set(written["protections"])


# -- selection -------------------------------------------------------------------------------------


@pytest.mark.parametrize("selection", ["last", "best_val_acc", "best_val_loss"])
@pytest.mark.parametrize("execution", ["each", "cohort"])
def test_models_are_those_of_the_selected_round(selection: str, execution: str, tmp_path: Path) -> None:
    settings = small("local", rounds=8, selection=selection, execution=execution, dropout=0.6)
    run_in_folder(settings, tmp_path / "r")
    found = lines(tmp_path / "r")
    key, best = ("val_loss", min) if selection == "best_val_loss" else ("val", max)
    picked = next(line["round"] for line in found if line[key] == best(other[key] for other in found))
    assert result(tmp_path / "r")["selected_round"] == picked
    # A run that stops at that round ends with the very models that the long run kept.
    stop = 8 if selection == "last" else picked
    run_in_folder(
        dataclasses.replace(settings, run=dataclasses.replace(settings.run, rounds=stop, selection="last")),
        tmp_path / "short",
    )
    assert weight_hashes(tmp_path / "r") == weight_hashes(tmp_path / "short") != {}
    if selection != "last":
        assert picked < 8, "choose another seed: here the last round is the best, and the test shows nothing"


@pytest.mark.parametrize("selection", ["last", "best_val_acc", "best_val_loss"])
def test_test_labels_do_not_touch_training_or_selection(selection: str, tmp_path: Path) -> None:
    settings = small(rounds=6, selection=selection, dropout=0.6)
    scenario = scenario_of(settings)
    generator = torch.Generator().manual_seed(1)

    def permuted(data: Any) -> Any:
        y, rows = data.y.clone(), data.test.nonzero().flatten()
        y[rows] = y[rows[torch.randperm(rows.numel(), generator=generator)]]
        return dataclasses.replace(data, y=y)

    other = dataclasses.replace(scenario, parts={client: permuted(data) for client, data in scenario.parts.items()})
    runs = [SimulatedRun(settings, given) for given in (scenario, other)]
    for simulated in runs:
        simulated.loop.play()
    a, b = (simulated.loop.lines for simulated in runs)
    assert [line["test"] for line in a] != [line["test"] for line in b], "the labels did change"
    strip = {
        "test",
        "test_groups",
        "test_group_client_means",
        "test_minority_per_client",
        "test_loss",
        "test_client_mean",
        "test_node_weighted",
        "per_client",
        "seconds",
    }
    left, right = ([{k: v for k, v in line.items() if k not in strip} for line in found] for found in (a, b))
    assert left == right
    assert runs[0].loop.best is not None and runs[1].loop.best is not None
    assert runs[0].loop.best["round"] == runs[1].loop.best["round"]
    for client in runs[0].engine.parties("client"):
        first, second = (simulated.engine.party(client).client.export() for simulated in runs)
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("rule", sorted(SCORE_RULES))
def test_score_rules(rule: str, tmp_path: Path) -> None:
    settings = dataclasses.replace(small(rounds=5, dropout=0.6), score=rule)
    simulated = run_in_folder(settings, tmp_path / "r")
    found, output = lines(tmp_path / "r"), result(tmp_path / "r")
    column, when, sentence = SCORE_RULES[rule]
    line = found[-1] if when == "last" else found[output["selected_round"] - 1]
    assert output["score"] == line[column] and output["score_rule"] == sentence
    assert output["val"] == max(other["val"] for other in found) and output["test_last"] == found[-1]["test"]
    assert output["test"] == found[output["selected_round"] - 1]["test"]
    loop = simulated.loop
    again = form_result(
        simulated.settings, simulated.scenario, simulated.nodes, loop.lines, loop.totals, {}, [], {}, "x"
    )
    assert again["score"] == output["score"] and again["seconds_per_round"] is None


def test_unknown_score_rule() -> None:
    with pytest.raises(ConfigError, match="unknown score rule 'pooled': did you mean 'pooled_last'"):
        dataclasses.replace(small(), score="pooled")


# -- result and folder -----------------------------------------------------------------------------


def test_python_api_and_what_a_folder_holds(tmp_path: Path) -> None:
    given = isthmus.run("fedavg", **SMALL, out=tmp_path / "r", set={"checkpoint.every": 2})
    assert given == result(tmp_path / "r")
    assert {path.name for path in (tmp_path / "r").iterdir()} == {
        "config.toml",
        "run-id",
        "scenario.json",
        "metrics.jsonl",
        "ledger",
        "checkpoints",
        "disclosure.json",
        "models",
        "log.txt",
        "result.json",
        ".lock",
    }
    assert {file.split("/")[0] for file in models(tmp_path / "r")} == {f"client-{k}" for k in range(3)}
    weights = load_file(tmp_path / "r" / "models" / "client-0" / "weights.safetensors")
    assert given["parameters"]["trainable"] == given["parameters"]["shared"] == sum(w.numel() for w in weights.values())
    assert sum(row["nodes"] for row in given["per_client"]) == 90 and len(given["per_client"]) == 3
    assert given["seconds_per_round"] > 0 and given["run_dir"] == str(tmp_path / "r")
    assert isthmus.resume(tmp_path / "r") == given, "a finished run gives its result again"


def test_resolved_config_repeats_the_run(tmp_path: Path) -> None:
    run_in_folder(small("fedper", seed=4, dropout=0.3), tmp_path / "a")
    again = resolve("fedper", {}, {}, tmp_path / "a" / "config.toml")
    assert again.run.execution in ("each", "cohort"), "auto is resolved"
    run_in_folder(again, tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "config.toml").read_text() == (tmp_path / "b" / "config.toml").read_text()


@pytest.mark.parametrize("method", ["fedavg", "fedsgd", "local"])
def test_wire_gives_the_same_bits(method: str, tmp_path: Path) -> None:
    run_in_folder(small(method, execution="each", dropout=0.3), tmp_path / "a")
    run_in_folder(small(method, wire=True, dropout=0.3), tmp_path / "b")
    assert weight_hashes(tmp_path / "a") == weight_hashes(tmp_path / "b") and ledger(tmp_path / "a") == ledger(
        tmp_path / "b"
    )
    assert result(tmp_path / "b")["execution"] == "each"


def test_clients_follow_the_partition_where_it_brings_them(tmp_path: Path) -> None:
    settings = resolve(
        "fedavg",
        {"dataset": "banks:accounts=120,banks=4", "partition": "owner", "rounds": 1},
        {"hidden": 4, "head": False},
    )
    run_in_folder(settings, tmp_path / "r")
    assert result(tmp_path / "r")["clients"] == 4 and "clients = 4" in (tmp_path / "r" / "config.toml").read_text()


def test_default_folders_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [isthmus.run("local", **SMALL | {"rounds": 1})["run_dir"] for _ in range(2)]
    assert names[1] == f"{names[0]}-2" and (tmp_path / names[1] / "result.json").exists()


def test_no_result_before_the_end_and_no_lock_after_an_error(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Stop(Callback):
        closed = 0

        def on_round(self, progress: Progress) -> None:
            seen.append((tmp_path / "r" / "result.json").exists())
            if progress.step == progress.steps:
                raise KeyboardInterrupt

        def close(self) -> None:
            self.closed += 1

    stop = Stop()
    with pytest.raises(KeyboardInterrupt):
        isthmus.run("fedavg", **SMALL, out=tmp_path / "r", callbacks=[stop])
    assert len(seen) == 5 and not any(seen) and not (tmp_path / "r" / "result.json").exists() and stop.closed == 1
    output = isthmus.resume(tmp_path / "r")  # in the same process: the lock is free
    isthmus.run("fedavg", **SMALL, out=tmp_path / "plain")
    assert_same_run(tmp_path / "r", tmp_path / "plain")
    assert output["seconds_per_round"] > 0


def test_seconds_per_round_is_the_median_over_all_rounds_also_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFolder, "keep_last_checkpoint", lambda *_: None)
    settings = small("local", {"checkpoint.every": 1}, rounds=6)
    run_in_folder(settings, tmp_path / "r")
    (tmp_path / "r" / "result.json").unlink()
    scenario = scenario_of(settings)
    again = SimulatedRun(settings, scenario)
    again.play(RunFolder.open(tmp_path / "r"), resumed=True)
    assert len(again.loop.round_seconds) == 6, "killed after the last round: its seconds are not forgotten"
    assert result(tmp_path / "r")["seconds_per_round"] == statistics.median(again.loop.round_seconds)


def test_the_state_the_server_selected_survives_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunFolder, "keep_last_checkpoint", lambda *_: None)
    settings = small("fedavg", {"checkpoint.every": 1}, rounds=6, dropout=0.6, selection="best_val_acc")
    first = run_in_folder(settings, tmp_path / "r")
    (tmp_path / "r" / "result.json").unlink()
    again = SimulatedRun(settings, scenario_of(settings))
    again.play(RunFolder.open(tmp_path / "r"), resumed=True)
    before, after = (simulated.loop.selected_state for simulated in (first, again))
    assert isinstance(before, ServerState) and isinstance(after, ServerState)
    assert before.round == after.round == result(tmp_path / "r")["selected_round"] and equal_weights(
        before.weights, after.weights
    )


def test_totals_in_memory_after_a_rollback() -> None:
    plain, back = (SimulatedRun(small(rounds=3), scenario_of(small())) for _ in range(2))
    plain.loop.play()
    back.loop.play(until=2)
    back.loop.checkpoint()
    back.loop.play(until=3)
    back.loop.restore()
    assert back.loop.at.step == 2
    back.loop.play()
    assert back.loop.totals == plain.loop.totals and back.loop.sheet.rows() == plain.loop.sheet.rows()
    assert [line["step"] for line in back.loop.lines] == [2, 3, 4]


def test_a_full_disk_is_a_failed_run_that_can_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = RunFolder.append_round

    def full(self: RunFolder, step: int, *rest: Any) -> None:
        if step == 3:
            raise OSError(28, "No space left on device")
        real(self, step, *rest)

    monkeypatch.setattr(RunFolder, "append_round", full)
    with pytest.raises(RunError, match=r"cannot write to .*No space left on device.*isthmus resume"):
        isthmus.run("fedavg", **SMALL, out=tmp_path / "r", set={"checkpoint.every": 1})
    monkeypatch.undo()
    isthmus.resume(tmp_path / "r")
    isthmus.run("fedavg", **SMALL, out=tmp_path / "plain")
    assert_same_run(tmp_path / "r", tmp_path / "plain")


def test_cohort_and_each_agree_on_everything_but_rounding(tmp_path: Path) -> None:
    run_in_folder(small(execution="each", precision="float64"), tmp_path / "a")
    run_in_folder(small(execution="cohort", precision="float64"), tmp_path / "b")
    a, b = result(tmp_path / "a"), result(tmp_path / "b")
    assert (a.pop("execution"), b.pop("execution")) == ("each", "cohort")
    assert {k: v for k, v in a.items() if k not in TIMES} == {k: v for k, v in b.items() if k not in TIMES}
    assert (tmp_path / "a" / "disclosure.json").read_text() == (tmp_path / "b" / "disclosure.json").read_text()
