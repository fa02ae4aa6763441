"""Runs between organisations, without processes: bit-equal to a local run, clear errors where organisations differ,
continuation from the newest common checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from in_process_sites import InProcessTransport, federation, organisation, run_in_process, settings_of
from packages import weight_hashes

from isthmus.deploy import server_run
from isthmus.deploy.handshake import BEGIN, BeginRun, JoinReply
from isthmus.deploy.run_status import RunFailure, committed_rounds
from isthmus.deploy.site_runtime import SiteRuntime
from isthmus.errors import ConfigError, DataError
from isthmus.experiments.config import Settings
from isthmus.experiments.folder import NO_RUN
from isthmus.experiments.result import versions
from isthmus.experiments.run import start
from isthmus.federation import codec
from isthmus.federation.codec import Limits
from isthmus.federation.host import Answer, Order
from isthmus.federation.interface import QuorumError
from isthmus.federation.wire import pack, unpack
from isthmus.privacy.guard import fixed_groups


def local(folder: Path, **more: Any) -> dict[str, str]:
    settings = settings_of(**more)
    start(replace(settings, run=replace(settings.run, engine="local")), folder / "local")
    return weight_hashes(folder / "local")


def test_bit_equal_to_a_local_run_and_models_stay_at_the_sites(tmp_path: Path) -> None:
    expected = local(tmp_path)
    transport = federation(tmp_path)
    folder = run_in_process(tmp_path, transport, settings_of())
    result = folder.result()
    assert result is not None and result["engine"] == "nvflare" and result["clients"] == 2
    assert weight_hashes(tmp_path / "bank-0") | weight_hashes(tmp_path / "bank-1") == expected
    assert not (folder.path / "models").exists()
    assert set(weight_hashes(tmp_path / "bank-0")) == {"client-0"}
    left = [path for path in tmp_path.rglob("checkpoints") if "local" not in path.parts]
    assert not left, "between organisations a finished run keeps none, here and at the sites"
    assert json.loads((folder.path / "scenario.json").read_text())["sizes"].keys() == {"client-0", "client-1"}


def interrupted_run(folder: Path, requests: int) -> tuple[Settings, InProcessTransport]:
    """A run whose sites are lost after so many requests, in the middle of a round."""
    settings = settings_of(rounds=4)
    settings = replace(settings, run=replace(settings.run, checkpoint_every=1))
    transport = federation(folder)
    transport.fail_after = requests
    with pytest.raises(QuorumError):
        run_in_process(folder, transport, settings)
    return settings, transport


def test_a_lost_site_needs_another_attempt_with_the_same_result(tmp_path: Path) -> None:
    expected = local(tmp_path, rounds=4)
    settings, transport = interrupted_run(tmp_path, 30)
    failure = RunFailure.read(tmp_path / "runs" / "r")
    assert failure is not None and failure.again
    assert 0 < committed_rounds(tmp_path / "runs" / "r") < 5
    run_in_process(tmp_path, transport.restarted(), settings, attempt=1)
    assert weight_hashes(tmp_path / "bank-0") | weight_hashes(tmp_path / "bank-1") == expected


def test_checkpoints_of_another_run_of_the_same_name_are_refused(tmp_path: Path) -> None:
    settings, transport = interrupted_run(tmp_path, 31)
    (tmp_path / "runs" / "r" / "run-id").write_text("00" * 16)
    with pytest.raises(DataError, match="is of another run"):
        run_in_process(tmp_path, transport.restarted(), settings, attempt=1)


def test_an_incomplete_checkpoint_is_skipped(tmp_path: Path) -> None:
    expected = local(tmp_path, rounds=4)
    settings, transport = interrupted_run(tmp_path, 31)
    newest = max((tmp_path / "bank-1" / "state" / "r" / "checkpoints" / "client-1").glob("*.tag"))
    newest.write_bytes(newest.read_bytes()[:-7])
    run_in_process(tmp_path, transport.restarted(), settings, attempt=1)
    assert weight_hashes(tmp_path / "bank-0") | weight_hashes(tmp_path / "bank-1") == expected


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"seed": 4}, "bank-0: seed is 3 in its client.toml, but 4 in the run: agree on one"),
        (
            {"dataset": "csbm:nodes=70"},
            "bank-0: dataset is 'csbm:nodes=60,classes=3,features=5' in its client.toml, but 'csbm:nodes=70'",
        ),
        ({"undirected": True}, "bank-0: undirected is True in the run, but its client.toml does not give it"),
        ({"edge_weights": "use"}, "bank-0: edge_weights is 'use' in the run, but its client.toml does not give it"),
        ({"method": "central"}, "bank-0: central needs all data in one place"),
        ({"transcript": True}, "bank-0: transcript=true keeps what protections hide"),
    ],
)
def test_a_mismatch_is_named(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_in_process(tmp_path, federation(tmp_path), settings_of(**more))
    assert message in str(error.value)
    failure = RunFailure.read(tmp_path / "runs" / "r")
    assert failure is not None and not failure.again and isinstance(failure.error(), ConfigError)


def test_organisations_that_contradict_each_other(tmp_path: Path) -> None:
    roster = tmp_path / "roster.toml"
    one = organisation(tmp_path, 0, roster)
    with pytest.raises(ConfigError, match="both say they are client-0"):
        run_in_process(tmp_path, InProcessTransport({"a": SiteRuntime(one), "b": SiteRuntime(one)}), settings_of())
    with pytest.raises(ConfigError, match="the run is for 2 clients, but 1 joined"):
        run_in_process(tmp_path, InProcessTransport({"a": SiteRuntime(one)}), settings_of(), run="r2")
    two = organisation(tmp_path, 1, roster)
    two = replace(two, policy=replace(two.policy, methods=("fedper",)))
    with pytest.raises(ConfigError, match=r"b: method 'fedavg' is not allowed by methods = \['fedper'\]"):
        run_in_process(
            tmp_path, InProcessTransport({"a": SiteRuntime(one), "b": SiteRuntime(two)}), settings_of(), run="r3"
        )


def test_an_organisation_missing_in_the_roster(tmp_path: Path) -> None:
    transport = federation(tmp_path)
    roster = (tmp_path / "roster.toml").read_text().replace("client-1", "client-7")
    (tmp_path / "roster.toml").write_text(roster)
    with pytest.raises(ConfigError, match="the roster has no organisation for 'client-1'"):
        run_in_process(tmp_path, transport, settings_of())


@pytest.mark.parametrize("package", ["isthmus", "torch", "python"])
def test_another_version_is_named(tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_run, "versions", lambda: versions() | {package: "9.9.9"})
    with pytest.raises(ConfigError, match=rf"bank-0: {package} is .* here and 9\.9\.9 at the server"):
        run_in_process(tmp_path, federation(tmp_path), settings_of())


@pytest.mark.parametrize("run", ["../up", "a/b", "", "x" * 101, ".hidden", "a b"])
def test_a_run_name_that_could_be_a_path(tmp_path: Path, run: str) -> None:
    runtime = SiteRuntime(organisation(tmp_path, 0, tmp_path / "roster.toml"))
    begin = pack((codec.encode(BeginRun(run, NO_RUN, 0, settings_of().to_toml(), versions())),))
    assert "cannot be called" in _text(runtime.handle(run, BEGIN, begin))
    assert not (tmp_path / "bank-0" / "state").exists()


def _text(data: bytes) -> str:
    return codec.decode(unpack(data)[0], Answer).text


@pytest.mark.parametrize("secure", [False, True])
def test_a_site_tells_its_size_only_where_sums_are_not_secure(tmp_path: Path, secure: bool) -> None:
    transport, settings = federation(tmp_path), settings_of(secure_sum=secure)
    begin = pack((codec.encode(BeginRun("r", NO_RUN, 0, settings.to_toml(), versions())),))
    replies = [
        codec.decode(unpack(site.handle("r", BEGIN, begin))[0], JoinReply) for site in transport.runtimes.values()
    ]
    told = [facts.samples for reply in replies for facts in (reply.clients or {}).values()]
    assert len(told) == 2 and all((size == 0) == secure for size in told)
    folder = run_in_process(tmp_path, transport.restarted(), settings, run="whole")
    result = folder.result()
    assert result is not None and (result["per_client"] is None) == secure
    assert ("sizes" in json.loads((folder.path / "scenario.json").read_text())) == (not secure)


@pytest.mark.parametrize(
    "options", [{"groups": 3, "aggregation": "median"}, {"fraction": 0.4}], ids=["groups", "draws"]
)
def test_fixed_groups_between_organisations(tmp_path: Path, options: dict[str, Any]) -> None:
    """Sites admit exactly the groups they derive themselves, round after round."""
    more = {**options, "clients": 9, "secure_sum": True, "rounds": 3}
    roster = tmp_path / "roster.toml"
    sites = {f"bank-{k}": SiteRuntime(organisation(tmp_path, k, roster, clients=9)) for k in range(9)}
    folder = run_in_process(tmp_path, InProcessTransport(sites), settings_of(**more))
    rosters = {
        tuple(sorted(entry.sender))
        for step in range(1, 5)
        for entry in folder.ledger(step)
        if entry.message == "Update" and entry.protection == "masked"
    }
    names = [f"client-{k}" for k in range(9)]
    assert rosters and rosters <= set(fixed_groups(names, 3 if "groups" in options else 2))
    found = weight_hashes(tmp_path)
    assert found == local(tmp_path / "local", **more)


def test_oversized_and_malformed_requests_are_refused(tmp_path: Path) -> None:
    runtime = SiteRuntime(organisation(tmp_path, 0, tmp_path / "roster.toml"), Limits(max_bytes=1000))
    begin = pack((codec.encode(BeginRun("r", NO_RUN, 0, settings_of().to_toml(), versions())),))
    joined = codec.decode(unpack(runtime.handle("r", BEGIN, begin))[0], JoinReply)
    assert not joined.error and joined.clients is not None
    assert "exceeds the limit of 1000" in _text(runtime.handle("r", "call", b"isthmus1" + b"0" * 1000))
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
    answered = _text(runtime.handle("r", "order", pack((codec.encode(Order("tags")),))))
    assert answered == "the parties have not exchanged keys yet", "it is read, and nothing is done before"


def test_of_an_error_in_a_sites_code_only_the_type_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SiteRuntime(organisation(tmp_path, 0, tmp_path / "roster.toml"))
    monkeypatch.setattr("isthmus.deploy.site_runtime.unpack", lambda data, limits: 1 / 0 if data else None)
    text = _text(runtime.handle("r", BEGIN, b"secret"))
    assert text == "a site failed (ZeroDivisionError): see its log"


def test_words_of_another_party_are_one_printable_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are shown in terminals and logs, where control characters make lines that nobody wrote."""

    class Refusing(InProcessTransport):
        def request(self, *_: Any) -> dict[str, bytes]:
            said = "no\x1b[2K\rall is well\n2026-11-19 - INFO - approved"
            return {"bank-a": pack((codec.encode(JoinReply(error="ConfigError", text=said)),))}

    begin = BeginRun("r", NO_RUN, 0, settings_of().to_toml(), versions())
    with pytest.raises(ConfigError) as refused:
        server_run._begin(begin, Refusing({}))
    assert str(refused.value) == "bank-a: no [2K all is well 2026-11-19 - INFO - approved"
    runtime = SiteRuntime(organisation(tmp_path, 0, tmp_path / "roster.toml"))
    hostile = replace(begin, versions={**versions(), "python": "3.1\nrefused: nobody\x1b[8m"})
    runtime.handle("r", BEGIN, pack((codec.encode(hostile),)))
    assert caplog.messages and all(line.isprintable() for line in caplog.messages)
