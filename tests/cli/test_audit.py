"""``isthmus audit``: what is possible is judged from the ledger; what was recovered comes from kept messages and is
checked.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from isthmus.cli.main import main
from isthmus.cli.recover import recover
from isthmus.errors import ConfigError, DataError
from isthmus.experiments.config import resolve
from isthmus.experiments.folder import RunFolder
from isthmus.federation import audit
from isthmus.federation.audit import (
    ATTACKS,
    DIFFERENCE,
    LABELS,
    MEMBERSHIP,
    NEIGHBOURS,
    RANK_ONE,
    READING,
    REUSE,
    SHARES,
    SOLVING,
    SUPPORT,
    Training,
    judge,
)
from isthmus.federation.ledger import Entry
from isthmus.federation.messages import kinds_of
from isthmus.federation.secure import MailPlan, Masked
from isthmus.federation.transcript import received
from isthmus.methods.fedavg import Broadcast, Update
from isthmus.methods.registry import get_method

SCENARIO = ["--dataset", "csbm:nodes=90,features=6,degree=4", "--clients", "3", "--rounds", "3", "--set", "hidden=8"]


def finished_run(path: Path, method: str, *extra: str) -> Path:
    assert main(["run", method, *SCENARIO, "--set", "transcript=true", *extra, "--out", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("audit")
    mlp = ["--set", "backbone=mlp", "--set", "dropout=0"]
    private = ["--set", "weighting=uniform", "--set", "dp_clip=0.1", "--set", "dp_noise=5"]
    return {
        "gradients": finished_run(folder / "gradients", "fedsgd", *mlp, "--split", "4/10/86"),
        "masked": finished_run(folder / "masked", "fedsgd", *mlp, "--split", "4/10/86", "--set", "secure_sum=true"),
        "noisy": finished_run(folder / "noisy", "fedsgd", *mlp, "--split", "4/10/86", *private),
        "updates": finished_run(
            folder / "updates",
            "fedavg",
            *mlp,
            "--split",
            "4/10/86",
            "--set",
            "optimizer=sgd",
            "--set",
            "lr=0.1",
            "--set",
            "precision=float64",
        ),
        "adam": finished_run(folder / "adam", "fedper", "--set", "optimizer=adam"),
        "alone": finished_run(folder / "alone", "local"),
    }


def audit_json(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["audit", str(path), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert {finding["attack"] for finding in found["findings"]} | set(found["absent"]) == set(ATTACKS)
    return found


def verdicts(found: dict[str, Any], attack: str) -> set[str]:
    return {finding["verdict"] for finding in found["findings"] if finding["attack"] == attack}


def numbers(found: dict[str, Any], attack: str) -> dict[str, float]:
    given: dict[str, float] = next(each["numbers"] for each in found["recovered"] if each["attack"] == attack)
    return given


def test_gradients_in_the_clear_give_records_and_classes_away(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = audit_json(runs["gradients"], capsys)
    assert verdicts(found, RANK_ONE) == verdicts(found, LABELS) == verdicts(found, MEMBERSHIP) == {"possible"}
    inputs, labels = numbers(found, RANK_ONE), numbers(found, LABELS)
    assert inputs["exact"] > 0, "a client with one training record and an MLP: every layer's input"
    assert labels["correct"] == labels["claimed"] > labels["by_chance"]


def test_an_update_of_one_step_is_a_gradient(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    found = audit_json(runs["updates"], capsys)
    assert verdicts(found, RANK_ONE) == {"possible"} and numbers(found, RANK_ONE)["exact"] > 0
    labels = numbers(found, LABELS)
    assert labels["correct"] == labels["claimed"] > labels["by_chance"]


def test_masks_stop_what_they_should_and_nothing_else(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = audit_json(runs["masked"], capsys)
    for attack in (READING, RANK_ONE, LABELS, DIFFERENCE, REUSE):
        assert verdicts(found, attack) == {"stopped"}, attack
    assert verdicts(found, MEMBERSHIP) == {"possible"}
    recovered = {each["attack"] for each in found["recovered"]}
    assert recovered == {READING, RANK_ONE, LABELS, REUSE, MEMBERSHIP}, "stopped is the outcome of an attack that ran"
    assert numbers(found, REUSE)["plausible"] == 0 < numbers(found, REUSE)["of"]
    assert numbers(found, RANK_ONE)["exact"] == 0 < numbers(found, RANK_ONE)["of"]
    assert numbers(found, READING)["read"] < 0.01 * numbers(found, READING)["of"]
    assert all("of" in each["why"] for each in found["findings"] if each["verdict"] == "stopped")


def test_what_was_not_tried_is_not_claimed(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs["masked"], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "transcript")
    found = audit_json(tmp_path / "run", capsys)
    assert {each["attack"] for each in found["findings"] if each["verdict"] == "stopped"} == {DIFFERENCE}
    for attack in (READING, RANK_ONE, LABELS, REUSE):
        assert verdicts(found, attack) == {"not tried"}


def test_missing_masks_are_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The attack on masked messages succeeds where masks are zero, so that it fails says something."""
    monkeypatch.setattr("isthmus.privacy.masks.add_streams", lambda *arguments: None)
    mlp = ["--set", "backbone=mlp", "--set", "dropout=0", "--split", "4/10/86", "--set", "secure_sum=true"]
    path = finished_run(tmp_path / "bare", "fedsgd", *mlp)
    found = {each.attack: each for each in recover(RunFolder(path)) if each.on.startswith("masked")}
    assert not found[READING].stopped and not found[RANK_ONE].stopped and found[RANK_ONE].numbers["exact"] > 0


def test_totals_of_other_runs_count(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    four = ("client-0", "client-1", "client-2", "client-3")
    sums = [entry("Update", "masked", four, ("server",), kinds={"w": "model"})]
    other = [entry("Update", "masked", four[:3], ("server",), kinds={"w": "model"}, round=9)]
    alone = {finding.attack: finding for finding in judge(sums)}[DIFFERENCE]
    both = {finding.attack: finding for finding in judge(sums, beside=other)}[DIFFERENCE]
    assert alone.verdict == "stopped" and both.verdict == "possible" and "run to run" in both.why
    capsys.readouterr()
    assert main(["audit", str(runs["masked"]), "--beside", str(runs["masked"]), "--json"]) == 0
    assert main(["audit", str(runs["masked"]), "--beside", "nowhere"]) == 3


def test_an_organisations_sums_are_solved_and_its_shares_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def audited(name: str, *more: str) -> dict[str, Any]:
        path = finished_run(tmp_path / name, "hifgl", *more)
        return {each["attack"]: each["numbers"] for each in audit_json(path, capsys)["recovered"]}

    allowed, dropped = audited("allow", "--set", "one_neighbour=allow"), audited("drop")
    assert 0 <= dropped[SOLVING]["determined"] < allowed[SOLVING]["determined"] <= allowed[SOLVING]["of"]
    assert allowed[SHARES]["opened"] == 0 < allowed[SHARES]["of"] and allowed[SHARES]["helpers"] == 2


def test_noise_limits(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    found = audit_json(runs["noisy"], capsys)
    assert verdicts(found, RANK_ONE) == verdicts(found, LABELS) == verdicts(found, MEMBERSHIP) == {"limited"}
    epsilon = json.loads((runs["noisy"] / "result.json").read_text())["privacy"]["epsilon"]
    assert all(
        f"epsilon {epsilon:.3g}" in each["why"]
        for each in found["findings"]
        if each["attack"] in (RANK_ONE, MEMBERSHIP)
    )
    assert numbers(found, RANK_ONE)["exact"] == 0
    labels = numbers(found, LABELS)
    assert labels["correct"] < labels["claimed"], "noise names wrong classes"


def test_a_personal_output_layer_names_no_class(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    found = audit_json(runs["adam"], capsys)
    assert verdicts(found, RANK_ONE) == {"limited"}
    assert {each["attack"] for each in found["recovered"]} == {MEMBERSHIP}


def test_who_sends_nothing_is_safe_from_all_but_reading(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = audit_json(runs["alone"], capsys)
    assert {finding["attack"] for finding in found["findings"]} == {READING}


def test_people_get_tables_and_plain_words(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["audit", str(runs["gradients"])]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "it recovers nothing" in out and "read exactly" in out and "delete it when the audit is done" in out
    assert main(["run", "fedavg", *SCENARIO, "--out", str(tmp_path / "r")]) == 0
    assert not (tmp_path / "r" / "transcript").exists(), "nothing is kept unless asked for"
    capsys.readouterr()
    assert main(["audit", str(tmp_path / "r")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "transcript=true" in out and "read exactly" not in out


def test_membership_is_reported_beside_its_control(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    found = numbers(audit_json(runs["gradients"], capsys), MEMBERSHIP)
    assert 0.0 <= found["untrained_auc"] <= 1.0 and found["members"] == 3, (
        "three records: the control shows how little that says"
    )


# -- transcript ------------------------------------------------------------------------------------


def test_the_transcript_holds_what_each_party_was_sent(runs: dict[str, Path]) -> None:
    table = get_method("fedavg").table
    server = list(received(runs["updates"], "server", table))
    assert [line.number for line, _ in server] == list(range(1, len(server) + 1))
    assert sum(isinstance(message, Update) for _, message in server) == 9
    found = [message for _, message in received(runs["updates"], "client-1", table) if isinstance(message, Broadcast)]
    assert len(found) == 3
    counted = sum(len(entry.bytes) for entry in RunFolder(runs["updates"]).ledger())
    kept = sum(len(list(path.glob("*.bin"))) for path in (runs["updates"] / "transcript").iterdir())
    assert kept == counted, "as many as the ledger counts"


def test_masked_messages_are_kept_masked(runs: dict[str, Path]) -> None:
    kinds = {type(message).__name__ for _, message in received(runs["masked"], "server", get_method("fedsgd").table)}
    assert Masked.__name__ in kinds and "Step" not in kinds and "Size" not in kinds


def test_a_damaged_transcript_is_named(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "transcript" / "server"
    folder.mkdir(parents=True)
    source = runs["updates"] / "transcript" / "server"
    (folder / "index.jsonl").write_text((source / "index.jsonl").read_text())
    (folder / "000001.bin").write_bytes((source / "000001.bin").read_bytes()[:-3])
    with pytest.raises(DataError, match="damaged"):
        list(received(tmp_path, "server", get_method("fedavg").table))


def test_transcript_needs_single_clients() -> None:
    with pytest.raises(ConfigError, match="execution=each"):
        resolve("fedavg", {"dataset": "csbm", "transcript": True, "execution": "cohort"})


@pytest.mark.parametrize("content", [None, ""])
def test_what_is_no_run_is_refused(tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        (tmp_path / "config.toml").write_text(content)
    assert main(["audit", str(tmp_path)]) == 3
    assert "isthmus resume" in (err := capsys.readouterr().err) or "not a run folder" in err


# -- judging a ledger ------------------------------------------------------------------------------


def entry(message: str, protection: str, sender: tuple[str, ...], receiver: tuple[str, ...], **changes: Any) -> Entry:
    count = max(len(sender), len(receiver))
    place = {"attempt": 0, "phase": "train", "round": 1, "sequence": 1, "handler": "h"}
    columns = {**place, "kinds": {"x": "structure"}, "by_kind": {}} | changes
    return Entry(
        message=message, protection=protection, sender=sender, receiver=receiver, bytes=(8,) * count, **columns
    )  # type: ignore[arg-type]


def test_products_between_clients() -> None:
    mail = ("client-0", "client-1"), ("client-2", "client-2")
    for protection, verdict in (
        ("clear", "possible"),
        ("sealed", "possible"),
        ("summed", "possible"),
        ("masked", "not tried"),
    ):
        found = [finding for finding in judge([entry("Block", protection, *mail)]) if finding.attack == NEIGHBOURS]
        assert [finding.verdict for finding in found] == [verdict] and found[0].who == "client"


def test_rosters_that_give_a_party_away_are_found() -> None:
    three, two = ("client-0", "client-1", "client-2", "client-3"), ("client-0", "client-1", "client-2")
    sums = [entry("Update", "masked", roster, ("server",), kinds={"w": "model"}) for roster in (three, two)]
    found = {finding.attack: finding for finding in judge(sums)}
    assert found[DIFFERENCE].verdict == "possible" and "client-3" in found[DIFFERENCE].why
    apart = [sums[0], entry("Update", "masked", two, ("server",), kinds={"w": "model"}, round=2)]
    later = {finding.attack: finding for finding in judge(apart)}[DIFFERENCE]
    assert later.verdict == "possible" and "rosters change from round to round" in later.why
    halves = [
        entry("Update", "masked", roster, ("server",), kinds={"w": "model"}, round=round)
        for round, roster in enumerate((three[:3], ("client-4", "client-5", "client-6"), three[:3]))
    ]
    assert {finding.attack: finding for finding in judge(halves)}[DIFFERENCE].verdict == "stopped", "fixed groups"
    pair = {
        finding.attack: finding
        for finding in judge([entry("Update", "masked", two[:2], ("server",), kinds={"w": "model"})])
    }
    assert pair[DIFFERENCE].verdict == "possible" and "two parties" in pair[DIFFERENCE].why


def test_announced_positions_are_told() -> None:
    kinds = {name: str(kind) for name, kind in kinds_of(MailPlan).items()}
    plan = entry("MailPlan", "clear", ("client-0", "client-1"), ("server",), kinds=kinds, by_kind={"structure": 64})
    assert [finding.attack for finding in judge([plan])] == [SUPPORT]
    assert (
        judge(
            [entry("MailPlan", "clear", ("client-0", "client-1"), ("server",), kinds=kinds, by_kind={"identifier": 8})]
        )
        == []
    )


@pytest.mark.parametrize(
    ("training", "verdict"),
    [
        (Training("sgd", 1), "possible"),
        (Training("sgd", 3), "limited"),
        (Training("adam", 1), "limited"),
        (Training("sgd", 1, 2.0, 1.5), "limited"),
    ],
)
def test_how_much_an_update_tells(training: Training, verdict: str) -> None:
    update = entry("Update", "summed", ("client-0", "client-1"), ("server",), kinds={"w": "model"})
    assert {finding.attack: finding.verdict for finding in judge([update], training)} == {
        RANK_ONE: verdict,
        LABELS: verdict,
    }


def test_every_protection_is_explained() -> None:
    for protection in ("clear", "summed", "sealed", "masked"):
        assert audit.Flow("client", "server", "X", protection, frozenset({"model"}), 3).how
