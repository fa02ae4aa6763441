"""Runs between organisations, without processes: same bits as local, mismatches by name, continuation from the newest
common tag.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sites import Wires, federation, organisation, play, settings_of

from isthmus.deploy import play as playing
from isthmus.deploy.handshake import BEGIN, Begin, Joined
from isthmus.deploy.play import committed_steps, read_failure
from isthmus.deploy.runtime import SiteRuntime
from isthmus.errors import ConfigError, DataError
from isthmus.experiments.folder import NO_RUN as MARK
from isthmus.experiments.result import versions
from isthmus.experiments.run import start
from isthmus.federation import codec
from isthmus.federation.codec import Limits
from isthmus.federation.host import Answer, Order
from isthmus.federation.interface import QuorumError
from isthmus.federation.wire import pack, unpack


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def models(folder: Path) -> dict[str, str]:
    return {
        path.stem: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("models/*.safetensors"))
    }


def local(folder: Path, **more: Any) -> dict[str, str]:
    settings = settings_of(**more)
    start(replace(settings, run=replace(settings.run, engine="local")), folder / "local")
    return models(folder / "local")


def test_the_same_bits_and_models_stay_at_home(tmp_path: Path) -> None:
    expected = local(tmp_path)
    wires = federation(tmp_path)
    folder = play(tmp_path, wires, settings_of())
    result = folder.result()
    assert result is not None and result["engine"] == "nvflare" and result["clients"] == 2
    assert models(tmp_path / "bank-0") | models(tmp_path / "bank-1") == expected
    assert not (folder.path / "models").exists()
    assert set(models(tmp_path / "bank-0")) == {"client-0"}
    assert not list(tmp_path.rglob("checkpoints")), "a finished run needs none, here and at the sites"
    assert json.loads((folder.path / "scenario.json").read_text())["sizes"].keys() == {"client-0", "client-1"}


def test_a_lost_site_is_another_attempt_and_ends_alike(tmp_path: Path) -> None:
    expected = local(tmp_path, rounds=4)
    settings = settings_of(rounds=4)
    settings = replace(settings, run=replace(settings.run, checkpoint_every=1))
    wires = federation(tmp_path)
    wires.after = 30  # in the middle of a round
    with pytest.raises(QuorumError):
        play(tmp_path, wires, settings)
    failure = read_failure(tmp_path / "runs" / "r")
    assert failure is not None and failure.again
    assert 0 < committed_steps(tmp_path / "runs" / "r") < 5
    anew = Wires({site: SiteRuntime(runtime.settings) for site, runtime in wires.runtimes.items()})  # new processes
    play(tmp_path, anew, settings, attempt=1)
    assert models(tmp_path / "bank-0") | models(tmp_path / "bank-1") == expected


def test_checkpoints_of_another_run_of_the_name_are_refused(tmp_path: Path) -> None:
    settings = settings_of(rounds=4)
    settings = replace(settings, run=replace(settings.run, checkpoint_every=1))
    wires = federation(tmp_path)
    wires.after = 31
    with pytest.raises(QuorumError):
        play(tmp_path, wires, settings)
    (tmp_path / "runs" / "r" / "run-id").write_text("00" * 16)
    anew = Wires({site: SiteRuntime(runtime.settings) for site, runtime in wires.runtimes.items()})
    with pytest.raises(DataError, match="is of another run"):
        play(tmp_path, anew, settings, attempt=1)


def test_a_half_written_checkpoint_goes_back_one(tmp_path: Path) -> None:
    expected = local(tmp_path, rounds=4)
    settings = settings_of(rounds=4)
    settings = replace(settings, run=replace(settings.run, checkpoint_every=1))
    wires = federation(tmp_path)
    wires.after = 31
    with pytest.raises(QuorumError):
        play(tmp_path, wires, settings)
    newest = max((tmp_path / "bank-1" / "state" / "r" / "checkpoints" / "client-1").glob("*.tag"))
    newest.write_bytes(newest.read_bytes()[:-7])
    anew = Wires({site: SiteRuntime(runtime.settings) for site, runtime in wires.runtimes.items()})
    play(tmp_path, anew, settings, attempt=1)
    assert models(tmp_path / "bank-0") | models(tmp_path / "bank-1") == expected


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"seed": 4}, "bank-0: seed is 3 in its client.toml, but 4 in the run: agree on one"),
        (
            {"dataset": "csbm:nodes=70"},
            "bank-0: dataset is 'csbm:nodes=60,classes=3,features=5' in its client.toml, but 'csbm:nodes=70'",
        ),
        ({"undirected": True}, "bank-0: undirected is True in the run, but its client.toml does not give it"),
        ({"method": "central"}, "bank-0: central needs all data at one place"),
        ({"transcript": True}, "bank-0: transcript=true keeps what protections hide"),
    ],
)
def test_a_mismatch_is_named(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        play(tmp_path, federation(tmp_path), settings_of(**more))
    assert said in str(error.value)
    failure = read_failure(tmp_path / "runs" / "r")
    assert failure is not None and not failure.again and isinstance(failure.error(), ConfigError)


def test_organisations_that_do_not_fit_together(tmp_path: Path) -> None:
    roster = tmp_path / "roster.toml"
    one = organisation(tmp_path, 0, roster)
    with pytest.raises(ConfigError, match="both say they are client-0"):
        play(tmp_path, Wires({"a": SiteRuntime(one), "b": SiteRuntime(one)}), settings_of())
    with pytest.raises(ConfigError, match="the run is for 2 clients, but 1 joined"):
        play(tmp_path, Wires({"a": SiteRuntime(one)}), settings_of(), run="r2")
    two = replace(organisation(tmp_path, 1, roster), methods=("fedper",))
    with pytest.raises(ConfigError, match="b: method 'fedavg' is not among those run here"):
        play(tmp_path, Wires({"a": SiteRuntime(one), "b": SiteRuntime(two)}), settings_of(), run="r3")


def test_an_organisation_on_nobodys_roster(tmp_path: Path) -> None:
    wires = federation(tmp_path)
    roster = (tmp_path / "roster.toml").read_text().replace("client-1", "client-7")
    (tmp_path / "roster.toml").write_text(roster)
    with pytest.raises(ConfigError, match="the roster has no organisation for 'client-1'"):
        play(tmp_path, wires, settings_of())


@pytest.mark.parametrize("package", ["isthmus", "torch", "python"])
def test_another_version_is_named(tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playing, "versions", lambda: versions() | {package: "9.9.9"})
    with pytest.raises(ConfigError, match=rf"bank-0: {package} is .* here and 9\.9\.9 at the server"):
        play(tmp_path, federation(tmp_path), settings_of())


@pytest.mark.parametrize("run", ["../up", "a/b", "", "x" * 101, ".hidden", "a b"])
def test_a_name_that_could_be_a_path(tmp_path: Path, run: str) -> None:
    runtime = SiteRuntime(organisation(tmp_path, 0, tmp_path / "roster.toml"))
    begin = pack((codec.encode(Begin(run, MARK, 0, settings_of().to_toml(), versions())),))
    assert "cannot be called" in _said(runtime.handle(run, BEGIN, begin))
    assert not (tmp_path / "bank-0" / "state").exists()


def _said(data: bytes) -> str:
    return codec.decode(unpack(data)[0], Answer).text


def test_oversized_and_senseless_requests_are_refused(tmp_path: Path) -> None:
    runtime = SiteRuntime(organisation(tmp_path, 0, tmp_path / "roster.toml"), Limits(max_bytes=1000))
    begin = pack((codec.encode(Begin("r", MARK, 0, settings_of().to_toml(), versions())),))
    joined = codec.decode(unpack(runtime.handle("r", BEGIN, begin))[0], Joined)
    assert not joined.error and joined.clients is not None
    assert "exceeds the limit of 1000" in _said(runtime.handle("r", "call", b"isthmus1" + b"0" * 1000))
    for run, kind, data in (
        ("r", "call", b""),
        ("r", "order", b"x" * 99),
        ("r", 1, b""),
        (None, "call", b""),
        ("r", "call", "text"),
        ("r", "begin", b"isthmus1"),
        ("other", "order", pack((codec.encode(Order("tags")),))),
    ):
        answer = codec.decode(unpack(runtime.handle(run, kind, data))[0], Answer)
        assert answer.error in ("ProtocolError", "ConfigError"), (run, kind, answer)
    assert _said(runtime.handle("r", "order", pack((codec.encode(Order("tags")),)))) == ""


def test_an_error_in_a_sites_code_says_its_type_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SiteRuntime(organisation(tmp_path, 0, tmp_path / "roster.toml"))
    monkeypatch.setattr("isthmus.deploy.runtime.unpack", lambda data, limits: 1 / 0 if data else None)
    said = _said(runtime.handle("r", BEGIN, b"secret"))
    assert said == "a site failed (ZeroDivisionError): see its log"
