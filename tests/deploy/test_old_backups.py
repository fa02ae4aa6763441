"""A site whose state was lost or restored: it catches up or says so, and is never silently behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from in_process_sites import federation, run_in_process, settings_of
from packages import weight_hashes

from isthmus.cli.main import main
from isthmus.deploy import server_run
from isthmus.deploy.handshake import PROTOCOL
from isthmus.deploy.run_status import RunFailure, committed_rounds
from isthmus.deploy.server_run import newest_heads
from isthmus.deploy.site_runtime import SiteRuntime
from isthmus.deploy.startup_kit import StartupKit
from isthmus.deploy.state_folder import FILE, FORMAT
from isthmus.errors import ConfigError, DataError, StorageError
from isthmus.experiments import contract
from isthmus.experiments.contract import release
from isthmus.experiments.result import versions
from isthmus.experiments.run import start
from isthmus.federation.interface import QuorumError


def test_an_old_backup_is_refused_until_somebody_writes_that_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, backup = tmp_path / "bank-0" / "state", tmp_path / "backup"
    transport = federation(tmp_path)
    run_in_process(tmp_path, transport, settings_of(), run="first")
    shutil.copytree(state, backup)
    run_in_process(tmp_path, transport.restarted(), settings_of(), run="second")
    newest = newest_heads(tmp_path / "runs")
    assert set(newest) == {"client-0", "client-1"}
    shutil.rmtree(state)
    shutil.copytree(backup, state)
    for attempt in range(12):  # a chain that grows by refusals and joins does not catch up by itself
        with pytest.raises(ConfigError, match=r"bank-0: .* was restored from an old backup"):
            run_in_process(tmp_path, transport.restarted(), settings_of(), run="third", attempt=attempt)
    (settings,) = (tmp_path / "bank-0").glob("*.toml")
    assert main(["client", "restored", "nonsense", "--config", str(settings)]) == 2
    assert "give the digits that the refusal names" in capsys.readouterr().err
    assert main(["client", "restored", newest["client-0"][:16], "--config", str(settings)]) == 0
    run_in_process(tmp_path, transport.restarted(), settings_of(), run="third", attempt=12)
    assert '"restored"' in (state / "audit.jsonl").read_text()


def test_the_newest_backup_is_as_good_as_the_original(tmp_path: Path) -> None:
    state = tmp_path / "bank-0" / "state"
    transport = federation(tmp_path)
    run_in_process(tmp_path, transport, settings_of(), run="first")
    shutil.copytree(state, tmp_path / "backup")
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "backup", state)
    run_in_process(tmp_path, transport.restarted(), settings_of(), run="second")


def test_a_site_that_lost_all_state_is_refused(tmp_path: Path) -> None:
    transport = federation(tmp_path)
    run_in_process(tmp_path, transport, settings_of(), run="first")
    shutil.rmtree(tmp_path / "bank-1" / "state")
    with pytest.raises(ConfigError, match=r"bank-1: .* was restored from an old backup"):
        run_in_process(tmp_path, transport.restarted(), settings_of(), run="second")


def test_checkpoints_of_an_hour_ago_are_caught_up_with_the_same_result(tmp_path: Path) -> None:
    """The chain is up to date and the checkpoints are one round behind: all go back to what all hold."""
    settings = settings_of(rounds=4)
    settings = replace(settings, run=replace(settings.run, checkpoint_every=1))
    start(replace(settings, run=replace(settings.run, engine="local")), tmp_path / "local")
    transport = federation(tmp_path)
    transport.fail_after = 30
    with pytest.raises(QuorumError):
        run_in_process(tmp_path, transport, settings)
    tags = sorted((tmp_path / "bank-0" / "state" / "r" / "checkpoints" / "client-0").iterdir())
    assert len(tags) >= 2
    shutil.rmtree(tags[-1]) if tags[-1].is_dir() else tags[-1].unlink()
    run_in_process(tmp_path, transport.restarted(), settings, attempt=1)
    found = weight_hashes(tmp_path / "bank-0") | weight_hashes(tmp_path / "bank-1")
    assert found == weight_hashes(tmp_path / "local")


def test_a_hub_that_was_restored_says_which_runs_are_lost(tmp_path: Path) -> None:
    """The sites have gone on since the backup and keep only their newest checkpoints: that run is begun again, others
    are not disturbed.
    """
    settings = settings_of(rounds=12)
    settings = replace(settings, run=replace(settings.run, checkpoint_every=1))
    transport, runs, rounds = federation(tmp_path), tmp_path / "runs", []
    for attempt in range(2):
        transport.fail_after = 30
        with pytest.raises(QuorumError):
            run_in_process(tmp_path, transport, settings, attempt=attempt)
        rounds.append(committed_rounds(runs / "r"))
        if not attempt:
            shutil.copytree(runs, tmp_path / "backup")
        transport = transport.restarted()
    assert rounds[0] < rounds[1]
    shutil.rmtree(runs)
    shutil.copytree(tmp_path / "backup", runs)
    with pytest.raises(DataError, match="no checkpoint that all parties hold can be read; start the run again"):
        run_in_process(tmp_path, transport, settings, attempt=2)
    run_in_process(tmp_path, transport.restarted(), settings, run="again")


def test_a_state_folder_says_its_format(tmp_path: Path) -> None:
    """One of an older version is taken over; one of a newer version is refused, and nothing is written to it."""
    state = tmp_path / "bank-0" / "state"
    transport = federation(tmp_path)
    run_in_process(tmp_path, transport, settings_of(), run="first")
    (state / FILE).unlink()
    run_in_process(tmp_path, transport.restarted(), settings_of(), run="second")
    assert f"format = {FORMAT}" in (state / FILE).read_text()
    (state / FILE).write_text(f'format = {FORMAT + 1}\nisthmus = "9.9"\n')
    before = {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=rf"bank-0: .* has format {FORMAT + 1}, written by Isthmus 9.9"):
        run_in_process(tmp_path, transport.restarted(), settings_of(), run="third")
    assert {path: path.read_bytes() for path in state.rglob("*") if path.is_file()} == before


def test_a_state_folder_that_cannot_be_written_is_no_error_without_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that was mounted read-only after an error of its disk."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("isthmus.deploy.state_folder.write_atomic", refuse)
    with pytest.raises(StorageError, match=r"bank-0: nothing can be written to .*Read-only file system.*client.toml"):
        run_in_process(tmp_path, federation(tmp_path), settings_of())
    failure = RunFailure.read(tmp_path / "runs" / "r")
    assert failure is not None and failure.again, "it may be mended while the run waits"


@pytest.mark.parametrize(("number", "joins"), [("2.13.99", True), ("2.99.0", False)])
def test_one_site_is_upgraded_between_two_rounds(
    tmp_path: Path, number: str, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fix of a library at one site: it restarts, and the run continues with the same result. Not with a release."""
    number = number.replace("2.13", torch.__version__.rpartition(".")[0], 1)
    settings = settings_of(rounds=4)
    settings = replace(settings, run=replace(settings.run, checkpoint_every=1))
    start(replace(settings, run=replace(settings.run, engine="local")), tmp_path / "local")
    transport = federation(tmp_path)
    transport.fail_after = 30
    with pytest.raises(QuorumError):
        run_in_process(tmp_path, transport, settings)
    original = SiteRuntime.handle

    def upgraded(self: SiteRuntime, *request: object) -> bytes:
        with monkeypatch.context() as patch:
            if self.settings.client == "client-1":
                patch.setattr(contract, "versions", lambda: versions() | {"torch": number})
            return original(self, *request)

    monkeypatch.setattr(SiteRuntime, "handle", upgraded)
    if not joins:
        with pytest.raises(ConfigError, match=rf"bank-1: torch is {number} here"):
            run_in_process(tmp_path, transport.restarted(), settings, attempt=1)
        return
    run_in_process(tmp_path, transport.restarted(), settings, attempt=1)
    found = weight_hashes(tmp_path / "bank-0") | weight_hashes(tmp_path / "bank-1")
    assert found == weight_hashes(tmp_path / "local")


@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL + 1])
def test_another_protocol_is_refused_an_older_one_too(
    tmp_path: Path, protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = server_run.BeginRun
    monkeypatch.setattr(server_run, "BeginRun", lambda *a, **k: original(*a, **k, protocol=protocol))
    with pytest.raises(ConfigError, match=f"speaks protocol {protocol} and this site {PROTOCOL}"):
        run_in_process(tmp_path, federation(tmp_path), settings_of())


@pytest.mark.parametrize(
    ("package", "one", "other", "same"),
    [
        ("torch", "2.13.0+cpu", "2.13.1", True),
        ("torch", "2.13.0", "2.14.0", False),
        ("python", "3.11.2", "3.11.9", True),
        ("isthmus", "0.3.1", "0.3.2", False),
    ],
)
def test_which_versions_may_differ(package: str, one: str, other: str, same: bool) -> None:
    assert (release(package, one) == release(package, other)) == same


def test_old_folders_of_jobs_are_removed(kits: dict[str, StartupKit], tmp_path: Path) -> None:
    kit = replace(kits["server"], path=tmp_path)
    for place in (tmp_path, tmp_path / "jobs"):
        for number in range(5):
            folder = place / f"76ca07c9-86b6-47a7-b5e9-63e265e30ff{number}"
            (folder / "deep").mkdir(parents=True)
            os.utime(folder, (number, number))
    for name in ("startup", "local", "notes"):
        (tmp_path / name).mkdir()
    assert kit.prune_jobs(keep=2) == 6
    assert {path.name[-1] for path in (tmp_path / "jobs").iterdir()} == {"3", "4"}
    assert {"startup", "local", "notes"} < {path.name for path in tmp_path.iterdir()}
    assert kit.prune_jobs(keep=2) == 0


def test_heads_of_all_runs_are_looked_at(tmp_path: Path) -> None:
    for run, number in (("a", 9), ("b", 12), ("c", 3)):
        (tmp_path / run).mkdir()
        line = {"client": "client-0", "number": number, "head": f"head-{number}"}
        (tmp_path / run / "heads.jsonl").write_text(json.dumps(line) + "\n")
    assert newest_heads(tmp_path) == {"client-0": "head-12"}
