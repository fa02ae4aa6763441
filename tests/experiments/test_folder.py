"""The run folder: whole files, damaged files, and a process that dies at any write."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from run_helpers import assert_same_run, result, run_in_folder, small

import isthmus
from isthmus.errors import ConfigError, DataError, RunError
from isthmus.experiments import folder as folder_module
from isthmus.experiments import model_package
from isthmus.experiments.callbacks import Callback
from isthmus.experiments.config import Settings
from isthmus.experiments.folder import RunFolder, write_atomic
from isthmus.experiments.run import SimulatedRun


class Killed(BaseException):
    """Stands for ``kill -9``: nothing catches it."""


def settings(**changes: Any) -> Settings:
    return small(
        "fedavg",
        {"checkpoint.every": changes.pop("every", 1)},
        rounds=3,
        dropout=0.4,
        selection="best_val_loss",
        **changes,
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "run"
    run_in_folder(settings(), path)
    return path


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stopped") / "run"

    def die(*given: Any) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(SimulatedRun, "_write_models", die)
        run_in_folder(settings(), path)
    return path


@pytest.fixture
def stopped(stopped_once: Path, tmp_path: Path) -> Path:
    """A run that was stopped after its last checkpoint (steps 3 and 4), before its result."""
    path = tmp_path / "stopped"
    shutil.copytree(stopped_once, path)
    return path


# -- death at any write ----------------------------------------------------------------------------


class Reaper:
    """Kills the process at its n-th write, in the middle of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 10**9
        self.writes = 0
        write, append = folder_module.write_atomic, RunFolder.append_round

        def write_or_die(path: Path, *parts: Any) -> None:
            if self.now():
                data = b"".join(parts)
                path.with_name(f".{path.name}.tmp").write_bytes(data[: len(data) // 2])
                raise Killed
            write(path, *parts)
            if self.now():
                raise Killed

        def append_or_die(folder: RunFolder, step: int, entries: Any, metrics: Any) -> None:
            if self.now():
                text = "".join(entry.to_json() + "\n" for entry in entries)
                (folder.path / "ledger" / f"{step:06d}.jsonl").write_text(text[: len(text) // 2])
                raise Killed
            append(folder, step, entries, metrics)
            if self.now():
                if metrics is not None:
                    path = folder.path / "metrics.jsonl"
                    path.write_text(path.read_text()[:-20])
                raise Killed

        monkeypatch.setattr(folder_module, "write_atomic", write_or_die)
        monkeypatch.setattr(model_package, "write_atomic", write_or_die)
        monkeypatch.setattr(RunFolder, "append_round", append_or_die)

    def now(self) -> bool:
        self.left -= 1
        self.writes += 1
        return self.left == 0


def test_killed_at_every_write_and_once_more_while_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reaper, plain = Reaper(monkeypatch), tmp_path / "plain"
    given = small("fedavg", {"checkpoint.every": 1}, rounds=2, clients=2, dropout=0.4, selection="best_val_loss")
    run_in_folder(given, plain)
    total = reaper.writes
    assert total >= 40
    for death in range(
        5, total + 1
    ):  # the first four are those of run-id and config.toml, before which there is no run
        path = tmp_path / f"run-{death}"
        reaper.left = death
        with pytest.raises(Killed):
            run_in_folder(given, path)
        if death > 6:
            reaper.left = 1 + 7 * death % 11
            with suppress(Killed):  # near the end there are fewer writes left than that
                isthmus.resume(path)
        reaper.left = 10**9
        isthmus.resume(path)
        assert_same_run(path, plain)
        assert not list(path.rglob("checkpoints/*/.*.tmp")), "half-written tags are cleared away"
        shutil.rmtree(path)


def test_killed_before_the_config_is_written_leaves_a_usable_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reaper = Reaper(monkeypatch)
    for death in range(1, 4):
        reaper.left = death
        with pytest.raises(Killed):
            run_in_folder(settings(), tmp_path / "r")
        with pytest.raises(DataError, match="is not a run folder"):
            isthmus.resume(tmp_path / "r")
    run_in_folder(settings(), tmp_path / "r")


def test_killed_before_the_first_tag(plain: Path, tmp_path: Path) -> None:
    class Stop(Callback):
        def on_start(self, *rest: Any) -> None:
            raise Killed

    with pytest.raises(Killed):
        run_in_folder(settings(), tmp_path / "r", callbacks=[Stop()])
    assert not list((tmp_path / "r" / "checkpoints").iterdir())
    isthmus.resume(tmp_path / "r")
    assert_same_run(tmp_path / "r", plain)


# -- damage ----------------------------------------------------------------------------------------


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncated, flipped, emptied, Path.unlink])
@pytest.mark.parametrize("party", ["server", "client-1"])
def test_a_damaged_newest_tag_falls_back_to_the_one_before(
    damage: Callable[[Path], None], party: str, stopped: Path, plain: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = sorted((stopped / "checkpoints" / party).glob("*.tag"))[-1]
    assert newest.stem == "0000004"
    damage(newest)
    (newest.with_name(".0000005.tag.tmp")).write_bytes(b"half of")
    seen: list[int] = []

    class Start(Callback):
        def on_start(self, settings: Any, folder: Path, step: int, steps: int) -> None:
            seen.append(step)

    isthmus.resume(stopped, [Start()])
    assert seen == [3]
    assert_same_run(stopped, plain)
    if damage is not Path.unlink:
        assert f"{party}/0000004.tag is damaged" in caplog.text


@pytest.mark.parametrize("party", ["server", "client-2"])
def test_all_tags_damaged(party: str, stopped: Path) -> None:
    for tag in (stopped / "checkpoints" / party).glob("*.tag"):
        flipped(tag)
    before = {path: path.read_bytes() for path in stopped.rglob("*.json*")}
    with pytest.raises(
        DataError, match=r"no checkpoint that all parties hold .*checksum differs.*; start the run again"
    ) as caught:
        isthmus.resume(stopped)
    assert caught.value.exit_code == 3 and "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in stopped.rglob("*.json*")} == before, "the traces are not touched"


def test_all_tags_gone(stopped: Path) -> None:
    shutil.rmtree(stopped / "checkpoints")
    (stopped / "checkpoints").mkdir()
    with pytest.raises(DataError, match="no checkpoint"):
        isthmus.resume(stopped)


def first_line_broken(path: Path) -> None:
    path.write_text("{" + path.read_text())


@pytest.mark.parametrize("damage", [first_line_broken, emptied, Path.unlink, lambda path: path.write_text("[]\n")])
def test_damaged_metrics_are_not_passed_over(damage: Callable[[Path], None], stopped: Path) -> None:
    damage(stopped / "metrics.jsonl")
    with pytest.raises(DataError, match=r"metrics\.jsonl is damaged"):
        isthmus.resume(stopped)


@pytest.mark.parametrize(
    "damage", [truncated, Path.unlink, lambda path: path.write_text("[1]\n"), lambda path: path.write_text("{}\n")]
)
def test_a_damaged_ledger_is_not_passed_over(damage: Callable[[Path], None], stopped: Path) -> None:
    damage(stopped / "ledger" / "000002.jsonl")
    with pytest.raises(DataError, match=r"ledger.* is damaged"):
        isthmus.resume(stopped)


def test_damaged_after_the_last_tag_is_just_played_again(plain: Path, stopped: Path) -> None:
    """What came after the newest tag does not count, whole or broken."""
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "val": 1')
    (stopped / "ledger" / "000005.jsonl").write_text("{")
    isthmus.resume(stopped)
    assert_same_run(stopped, plain)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"score": '])
def test_a_half_result_is_none(text: str, stopped: Path, plain: Path) -> None:
    (stopped / "result.json").write_text(text)
    isthmus.resume(stopped)
    assert_same_run(stopped, plain)


def test_damaged_config(stopped: Path) -> None:
    (stopped / "config.toml").write_bytes(b"\xff\xff")
    with pytest.raises(DataError, match=r"config\.toml cannot be read"):
        isthmus.resume(stopped)
    (stopped / "config.toml").write_text("[run")
    with pytest.raises(ConfigError, match=r"config\.toml is damaged"):
        isthmus.resume(stopped)


# -- the folder itself -----------------------------------------------------------------------------


def test_write_atomic_replaces_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomic(tmp_path / "f", b"old")

    def die(self: Path, target: Path) -> None:
        raise Killed

    monkeypatch.setattr(Path, "rename", die)
    with pytest.raises(Killed):
        write_atomic(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"old"


def test_an_existing_run_is_refused(plain: Path) -> None:
    before = result(plain)
    with pytest.raises(
        ConfigError, match=r"already holds a run: continue it with `isthmus resume .*`, choose another --out, or"
    ):
        isthmus.run("fedavg", dataset="csbm", out=plain)
    assert result(plain) == before


def test_files_of_another_run_are_refused(stopped: Path) -> None:
    (stopped / "config.toml").unlink()
    with pytest.raises(ConfigError, match="files of a run"):
        isthmus.run("fedavg", dataset="csbm", out=stopped)


def test_an_empty_folder_is_fine(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    run_in_folder(small(rounds=1), tmp_path / "r")


def test_one_process_at_a_time(stopped: Path) -> None:
    folder = RunFolder.open(stopped)
    with pytest.raises(RunError, match="in use by another process"):
        isthmus.resume(stopped)
    folder.close()
    isthmus.resume(stopped)


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_unwritable_folders(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"cannot (write|use) the run folder .*choose another --out"):
        isthmus.run("fedavg", dataset="csbm:nodes=60", clients=2, out=tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_checkpoints_keep_the_last_two_tags_until_the_run_is_finished(stopped: Path, plain: Path) -> None:
    for party in (stopped / "checkpoints").iterdir():
        assert [path.name for path in sorted(party.iterdir())] == ["0000003.tag", "0000004.tag"]
    isthmus.resume(stopped)
    for path in (stopped, plain):
        for party in (path / "checkpoints").iterdir():
            assert [tag.name for tag in party.iterdir()] == ["0000004.tag"], "the last one is enough for more rounds"


def test_checkpoints_left_behind_by_a_finished_run_go_when_it_is_resumed(stopped: Path, plain: Path) -> None:
    shutil.copy(plain / "result.json", stopped)
    assert isthmus.resume(stopped) == result(plain)
    for party in (stopped / "checkpoints").iterdir():
        assert [tag.name for tag in party.iterdir()] == ["0000004.tag"]


def test_checkpoints_of_another_run_are_refused(
    stopped: Path, plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same settings, the same step, a whole file: still not this run's."""
    other = tmp_path / "other"
    shutil.copytree(stopped, other)
    (other / "run-id").write_text("00" * 16)
    with pytest.raises(
        DataError, match=r"no checkpoint that all parties hold can be read: checkpoint .* of another run"
    ):
        isthmus.resume(other)
    # One foreign tag among our own is passed over for the one before it.
    foreign = RunFolder(tmp_path / "foreign")
    foreign.path.mkdir()
    (foreign.path / "run-id").write_text("11" * 16)
    ours = stopped / "checkpoints" / "client-1" / "0000004.tag"
    raw = ours.read_bytes()[32 + 16 :]
    data = foreign.run_id + raw
    ours.write_bytes(hashlib.sha256(data).digest() + data)
    isthmus.resume(stopped)
    assert_same_run(stopped, plain)
    assert "client-1/0000004.tag is of another run" in caplog.text


@pytest.mark.parametrize("text", ["", "zz", "00"])
def test_a_damaged_run_id(text: str, stopped: Path) -> None:
    (stopped / "run-id").write_text(text)
    with pytest.raises(DataError, match=r"run-id (is damaged|cannot be read).*; start the run again"):
        isthmus.resume(stopped)


def test_metrics_are_plain_json(plain: Path) -> None:
    for line in (plain / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_resume_that_fails_takes_nothing_away(stopped: Path) -> None:
    """Damaged tags of one client must not cost another its good ones."""
    for tag in (stopped / "checkpoints" / "client-1").glob("*.tag"):
        tag.write_bytes(tag.read_bytes()[:100])
    before = {path: path.read_bytes() for path in stopped.rglob("*.tag")}
    with pytest.raises(DataError, match="no checkpoint"):
        isthmus.resume(stopped)
    assert {path: path.read_bytes() for path in stopped.rglob("*.tag")} == before


def test_a_changed_config_is_not_resumed(stopped: Path) -> None:
    config = stopped / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.05", "lr = 0.5"))
    with pytest.raises(ConfigError, match=r"config.toml was changed"):
        isthmus.resume(stopped)
