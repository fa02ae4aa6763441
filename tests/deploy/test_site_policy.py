"""Sites with a strict policy, their audit chains and approvals, in whole runs without processes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hostile_server import HostileServer, Refused, hostile_settings, join
from in_process_sites import InProcessTransport, federation, run_in_process, settings_of
from typer.testing import CliRunner

from isthmus.cli.main import app, main
from isthmus.deploy.approval import Approvals
from isthmus.deploy.audit_chain import AUDIT, CALL, END, INDEX, JOIN, MEET, ORDER, REFUSED, AuditChain, verify
from isthmus.deploy.handshake import KEYS, PeerKeys, SignedHead
from isthmus.deploy.roster import OrganisationKeys, read_identity
from isthmus.deploy.run_status import RunFailure
from isthmus.deploy.server_run import HEADS, SitesEngine
from isthmus.deploy.site_settings import SiteSettings
from isthmus.errors import ConfigError, DataError, ProtocolError
from isthmus.experiments.config import Settings
from isthmus.federation import codec
from isthmus.federation.host import Answer
from isthmus.federation.interface import Failure, QuorumError
from isthmus.federation.party import Turn
from isthmus.federation.watch import AdmittedCall
from isthmus.federation.wire import pack, unpack
from isthmus.methods.fedavg import Broadcast
from isthmus.privacy.keys import signed_by

STRICT = "[policy]\n"
SETUP = Turn(0, "setup", 1, 1)
SITES = ("bank-0", "bank-1", "bank-2")


def strict(folder: Path, more: str = "") -> InProcessTransport:
    return federation(folder, STRICT + more, sites=3)


def secure(**more: Any) -> Settings:
    return settings_of(clients=3, secure_sum=True, **more)


def state(folder: Path, site: str = "bank-0") -> Path:
    return folder / site / "state"


def records(folder: Path, site: str = "bank-0") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (state(folder, site) / AUDIT).read_text().splitlines()]


def models(folder: Path) -> dict[str, str]:
    return {
        path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("bank-*/state/*/models/*/weights.safetensors"))
    }


# -- a whole run -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fedspray", "fedstruct", "hifgl"])
def test_three_sites_under_strict_policies(tmp_path: Path, method: str) -> None:
    folder = run_in_process(tmp_path, strict(tmp_path), secure(method=method))
    result = folder.result()
    assert result is not None and result["clients"] == 3
    for site in SITES:
        found = records(tmp_path, site)
        assert found[0]["kind"] == JOIN and found[-1]["kind"] == END and found[1]["kind"] == MEET
        assert {record["kind"] for record in found} == {JOIN, MEET, CALL, ORDER, END}, "nothing was refused"
        assert verify(state(tmp_path, site)).number == len(found)
        sums = [parties for record in found if record["kind"] == CALL for parties in record["rosters"].values()]
        assert sums and all(len(parties) >= 2 for parties in sums)


def test_the_chain_holds_no_value(tmp_path: Path) -> None:
    run_in_process(tmp_path, strict(tmp_path), secure())
    keys = {key for record in records(tmp_path) if record["kind"] == CALL for key in record}
    place = {"run", "mark", "party", "phase", "round", "step", "attempt", "sequence"}
    assert keys == {"number", "prev", "kind", *place, "handler", "count", "request", "rosters", "changed"}


def test_heads_are_kept_by_the_server_and_the_others(tmp_path: Path) -> None:
    transport = strict(tmp_path)
    folder = run_in_process(tmp_path, transport, secure())
    kept = [json.loads(line) for line in (folder.path / HEADS).read_text().splitlines()]
    assert [(one["site"], one["when"]) for one in kept] == [(s, w) for w in ("join", "end") for s in SITES]
    for one in kept:
        head = SignedHead(one["number"], one["head"], bytes.fromhex(one["signature"]))
        key = read_identity(tmp_path / one["site"] / "identity.key").public
        assert signed_by(key, head.signed(one["client"]), head.signature)
        assert not signed_by(key, replace(head, number=99).signed(one["client"]), head.signature)
        assert AuditChain(state(tmp_path, one["site"])).open().has_head(head.hash) == head.number
    (met,) = (record for record in records(tmp_path) if record["kind"] == MEET)
    assert met["heads"]["client-2"] == [kept[2]["number"], kept[2]["head"]]


def test_a_refusal_is_told_before_anything_is_sent_and_noted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        run_in_process(tmp_path, strict(tmp_path), settings_of(clients=3))
    assert "bank-0: " in str(error.value) and "secure_sum = true forbids" in str(error.value)
    (only,) = records(tmp_path)
    assert only["kind"] == REFUSED and "secure_sum = true forbids" in only["text"]
    assert not list(tmp_path.glob("bank-*/state/r/*"))


def test_a_refused_call_is_noted(tmp_path: Path) -> None:
    """A total over fewer than everybody, and an order to mask for a key that nobody signed."""
    server = HostileServer(tmp_path, hostile_settings())
    everybody = dict.fromkeys(("client-0", "client-1", "client-2", "client-3"))
    server.keys["client-3"] = bytes(32)
    assert all(isinstance(one, Failure) for one in server.ask(server.calls("size", SETUP, everybody)).values())
    with pytest.raises(Refused):
        server.total(server.calls("size", SETUP, dict.fromkeys(("client-0", "client-1"))))
    texts = [record["text"] for record in records(tmp_path) if record["kind"] == REFUSED]
    assert len(texts) == 2 and "is not the one its organisation signed" in texts[0] and "over everybody" in texts[1]
    assert not [record for record in records(tmp_path) if record["kind"] == CALL]


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", range(15, 40, 4))
def test_sites_killed_after_any_call_end_with_the_same_bits(tmp_path: Path, requests: int) -> None:
    settings = secure(rounds=3)
    settings = replace(settings, run=replace(settings.run, checkpoint_every=1))
    run_in_process(tmp_path / "calm", _made(tmp_path / "calm"), settings)
    transport = _made(tmp_path / "torn")
    transport.fail_after = requests
    with pytest.raises(QuorumError):
        run_in_process(tmp_path / "torn", transport, settings)
    before = records(tmp_path / "torn")
    run_in_process(tmp_path / "torn", transport.restarted(), settings, attempt=1)
    assert models(tmp_path / "torn") == models(tmp_path / "calm") and len(models(tmp_path / "torn")) == 3
    after = records(tmp_path / "torn")
    assert after[: len(before)] == before and not [record for record in after if record["kind"] == REFUSED]
    assert sum(record["kind"] == JOIN for record in after) == 2


def _made(folder: Path) -> InProcessTransport:
    folder.mkdir()
    return strict(folder)


def test_a_restarted_site_still_knows_whom_it_summed_with(tmp_path: Path) -> None:
    """Whatever a new process is begun with, its guards hold what the chain says."""
    transport = strict(tmp_path)
    run_in_process(tmp_path, transport, secure())
    shutil.rmtree(state(tmp_path) / "r")
    again = transport.restarted().runtimes["bank-0"]
    log = [record for record in records(tmp_path) if record["kind"] == CALL]
    mark = records(tmp_path)[0]["mark"]
    from isthmus.deploy.audit_chain import RunLog

    calls = [call for call in RunLog(again.chain, "r", mark).calls() if isinstance(call, AdmittedCall)]
    assert len(calls) == len(log) > 0 and any(call.rosters for call in calls)


def test_a_restarted_site_refuses_what_only_its_chain_knows(tmp_path: Path) -> None:
    """Between new processes and the roll-back nothing is left of the first round but its lines in the chain."""
    server = HostileServer(tmp_path, hostile_settings(), f"{STRICT}changes = 0\n")
    server.engine.commit(0)
    server.total(server.calls("size", SETUP, dict.fromkeys(server.parts)))
    server.engine.commit(1)
    weights, first = server.party("client-0").client.state.weights, Turn(0, "train", 1, 2)
    asked = dict.fromkeys(server.parts, Broadcast(weights, 96.0))
    server.total(server.calls("local_update", first, asked))
    server.transport = server.transport.restarted()
    server.begin()
    again = replace(first, incarnation=1)
    with pytest.raises(Refused):  # before it went back to its checkpoint
        server.total(server.calls("local_update", again, asked))
    server.engine.rollback(1)
    with pytest.raises(Refused) as refused:
        server.total(server.calls("local_update", again, dict.fromkeys(server.parts, Broadcast(weights, 97.0))))
    assert set(refused.value.failures) == set(server.parts)
    for number, party in enumerate(sorted(server.parts)):
        texts = [one["text"] for one in records(tmp_path, f"bank-{number}") if one["kind"] == REFUSED]
        assert texts == [
            f"{party}: step 2 does not follow from the state of step 0",
            f"{party}: step 2 was run before, and client.local_update now asks for something else; 0 such changes are "
            "allowed in a run",
        ]
    server.total(server.calls("local_update", again, asked))  # what was asked before is answered


def test_a_run_keeps_its_contract(tmp_path: Path) -> None:
    transport = strict(tmp_path)
    run_in_process(tmp_path, transport, secure())
    (tmp_path / "runs" / "r" / "result.json").unlink()
    config = tmp_path / "runs" / "r" / "config.toml"
    config.write_text(secure(rounds=3).to_toml())
    with pytest.raises(ConfigError, match=r"r was joined under contract \w{16}, and now it would be \w{16}"):
        run_in_process(tmp_path, transport.restarted(), secure(rounds=3), attempt=1)


def test_runs_are_counted_after_their_folders_are_deleted(tmp_path: Path) -> None:
    transport = strict(tmp_path, "runs = 1\n")
    run_in_process(tmp_path, transport, secure())
    for site in SITES:
        shutil.rmtree(state(tmp_path, site) / "r")
    with pytest.raises(ConfigError, match=r"has taken part in 1 runs, runs = 1 in \[policy\]"):
        run_in_process(tmp_path, transport.restarted(), secure(), run="r2")


def test_epsilon_is_enforced_over_runs(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="the accountant is an extra")
    private = secure(dp_clip=1.0, dp_noise=20.0, weighting="uniform")
    transport = strict(tmp_path, "epsilon = 1.0\n")
    result = run_in_process(tmp_path, transport, private).result()
    assert result is not None
    spent = records(tmp_path)[0]["epsilon"]
    assert spent == result["privacy"]["epsilon"] and 0.5 < spent < 1.0, "the second run must be too much"
    for site in SITES:
        shutil.rmtree(state(tmp_path, site) / "r")
    with pytest.raises(ConfigError, match=r"would spend epsilon .* of this site's budget"):
        run_in_process(tmp_path, transport.restarted(), private, run="r2")


# -- the chain under attack and on a full disk -------------------------------------------------------


def test_a_broken_chain_joins_nothing(tmp_path: Path) -> None:
    transport = strict(tmp_path)
    run_in_process(tmp_path, transport, secure())
    file = state(tmp_path) / AUDIT
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:4], *lines[5:]]))
    with pytest.raises(ConfigError, match=r"bank-0: .*audit chain audit\.jsonl is broken: .*line 5 does not follow"):
        run_in_process(tmp_path, transport.restarted(), secure(), run="r2")


def test_a_torn_line_is_cut_and_the_run_goes_on(tmp_path: Path) -> None:
    transport = strict(tmp_path)
    run_in_process(tmp_path, transport, secure())
    with (state(tmp_path) / AUDIT).open("ab") as file:
        file.write(b'{"number":')
    run_in_process(tmp_path, transport.restarted(), secure(), run="r2")
    assert verify(state(tmp_path)).number == len(records(tmp_path))


def test_a_full_disk_refuses_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = strict(tmp_path)
    append = AuditChain.append

    def full(chain: AuditChain, kind: str, **fields: Any) -> None:
        if kind == CALL and fields["handler"] == "local_update":
            monkeypatch.setattr(os, "fsync", _full)
        append(chain, kind, **fields)

    with monkeypatch.context():
        monkeypatch.setattr(AuditChain, "append", full)
        with pytest.raises(QuorumError, match=r"chain audit\.jsonl cannot be written \(No space left on device\)"):
            run_in_process(tmp_path, transport, secure())
    failure = RunFailure.read(tmp_path / "runs" / "r")
    assert failure is not None and failure.again and failure.kind == "StorageError", "another attempt may find room"
    monkeypatch.undo()
    assert all(record["handler"] != "local_update" for record in records(tmp_path) if record["kind"] == CALL)
    run_in_process(tmp_path, transport.restarted(), secure(), attempt=1)


def _full(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_nothing_depends_on_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_process(tmp_path / "now", _made(tmp_path / "now"), secure())
    wrong = iter(range(10**9, 0, -(10**5)))
    monkeypatch.setattr(time, "time", lambda: float(next(wrong)))
    monkeypatch.setattr(time, "strftime", lambda *_: "1970-01-01")
    run_in_process(tmp_path / "then", _made(tmp_path / "then"), secure())
    assert models(tmp_path / "now") == models(tmp_path / "then")
    kept = ("kind", "handler", "request", "contract", "rosters", "count")
    brief = [
        [{key: record.get(key) for key in kept} for record in records(tmp_path / name)] for name in ("now", "then")
    ]
    assert brief[0] == brief[1]


# -- approval --------------------------------------------------------------------------------------


def client(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["client", *arguments])
    assert done.exit_code == 0, done.output + str(done.exception)
    return done.stdout


def test_a_contract_must_be_approved(tmp_path: Path) -> None:
    transport = strict(tmp_path, "approve = true\n")
    with pytest.raises(ConfigError, match=r"bank-0: contract \w{16} is not approved here") as error:
        run_in_process(tmp_path, transport, secure())
    digits = str(error.value).split("contract ")[1][:16]
    for site in SITES:
        config = str(tmp_path / site / "client.toml")
        assert f"approved: {digits}" in client("approve", digits, "--config", config, "--by", "alice")
        assert f"{digits}" in client("approve", "--list", "--config", config) and "alice" in client(
            "approve", "--list", "--config", config
        )
    result = run_in_process(tmp_path, transport.restarted(), secure(), attempt=1).result()
    assert result is not None
    with pytest.raises(ConfigError, match="is not approved here"):  # other settings, another contract
        run_in_process(tmp_path, transport.restarted(), secure(rounds=3), run="r2")
    config = str(tmp_path / "bank-1" / "client.toml")
    assert "withdrawn" in client("approve", "--withdraw", digits, "--config", config, "--by", "bob")
    with pytest.raises(ConfigError, match="bank-1: contract"):
        run_in_process(tmp_path, transport.restarted(), secure(), run="r3")
    orders = [(record["name"], record["by"]) for record in records(tmp_path, "bank-1") if record.get("by")]
    assert orders == [("approve", "alice"), ("withdraw", "bob")]


def test_only_a_derived_contract_can_be_approved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strict(tmp_path, "approve = true\n")
    config = str(tmp_path / "bank-0" / "client.toml")
    assert main(["client", "approve", "ab" * 32, "--config", config]) == 2
    assert "has derived no contract" in capsys.readouterr().err
    assert main(["client", "approve", "abc", "--config", config]) == 2
    assert main(["client", "approve", "--config", config]) == 2
    assert "give the hash of a contract, --list, or --withdraw HASH" in capsys.readouterr().err


def test_an_approval_that_nobody_signed_is_refused(tmp_path: Path) -> None:
    transport = strict(tmp_path, "approve = true\n")
    with pytest.raises(ConfigError):
        run_in_process(tmp_path, transport, secure())
    (contract,) = (path.stem for path in (state(tmp_path) / "contracts").iterdir())
    theirs = Approvals(state(tmp_path), read_identity(tmp_path / "bank-1" / "identity.key"))
    theirs.approve(contract, "mallory")
    with pytest.raises(
        ConfigError, match=r"bank-0: approved.toml holds .* that this organisation's identity\.key did not sign"
    ):
        run_in_process(tmp_path, transport.restarted(), secure(), attempt=1)
    (state(tmp_path) / "contracts" / f"{contract}.json").write_text("{}")
    with pytest.raises(DataError, match="kept here was changed"):
        theirs.find(contract)


# -- commands --------------------------------------------------------------------------------------

RUN = 'method = "fedavg"\ndataset = "csbm:nodes=60,classes=3,features=5"\npartition = "random"\nclients = 3\n'
RUN += 'split = "40/20/40"\nseed = 3\nrounds = 2\nhidden = 4\n'


def test_the_contract_in_words_is_the_one_that_is_joined(tmp_path: Path) -> None:
    transport = strict(tmp_path)
    (tmp_path / "run.toml").write_text(f"{RUN}secure_sum = true\n")
    config = str(tmp_path / "bank-2" / "client.toml")
    text = client("contract", str(tmp_path / "run.toml"), "--config", config)
    for part in ("Update", "only the total", "sums behind masks", "no differential privacy is promised"):
        assert part in text
    assert "refuses" not in text and not (state(tmp_path, "bank-2") / "r").exists()
    run_in_process(tmp_path, transport, secure())
    assert records(tmp_path)[0]["contract"] in text
    printed = json.loads(client("contract", str(tmp_path / "run.toml"), "--config", config, "--json"))
    assert printed["hash"] == records(tmp_path)[0]["contract"] and printed["refused"] == []


def test_the_contract_in_words_says_what_the_policy_refuses(tmp_path: Path) -> None:
    strict(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    text = client("contract", str(tmp_path / "run.toml"), "--config", str(tmp_path / "bank-0" / "client.toml"))
    assert "WITHOUT masks" in text and "refuses it: train: fedavg sums Update without masks" in text


def test_the_audit_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_in_process(tmp_path, strict(tmp_path), secure())
    config = str(tmp_path / "bank-0" / "client.toml")
    text = client("audit", config)
    assert "local_update, sum over 3" in text and len(text.splitlines()) == len(records(tmp_path))
    assert client("audit", config, "--run", "other") == ""
    assert "lines, unbroken; head" in client("audit", config, "--verify")
    head = json.loads((folder.path / HEADS).read_text().splitlines()[3])["head"]
    assert "nothing up to it was changed" in client("audit", config, "--head", head)
    file = state(tmp_path) / AUDIT
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]))
    (state(tmp_path) / INDEX).unlink()
    assert main(["client", "audit", config, "--head", head]) == 3
    assert "it was cut or rewritten since that head was kept" in capsys.readouterr().err
    file.write_bytes(b"".join([*lines[:2], *lines[3:]]))
    assert main(["client", "audit", config, "--verify"]) == 3
    assert "line 3 does not follow from the line before" in capsys.readouterr().err


def test_identity_writes_a_strict_client_toml_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "identity.key"
    assert main(["client", "identity", "bank-a", "--client", "bank-a", "--out", str(out)]) == 0
    assert "secure_sum = true" in (tmp_path / "client.toml").read_text()
    out.unlink()
    (tmp_path / "client.toml").write_text("mine")
    assert main(["client", "identity", "bank-a", "--client", "bank-a", "--out", str(out)]) == 0
    assert (tmp_path / "client.toml").read_text() == "mine" and "is kept" in capsys.readouterr().err


# -- what a run leaves at a site -----------------------------------------------------------------------


def test_models_are_not_replaced_by_a_run_of_the_same_name(tmp_path: Path) -> None:
    transport = strict(tmp_path)
    run_in_process(tmp_path, transport, secure())
    kept = models(tmp_path)
    shutil.rmtree(tmp_path / "runs")  # another run of that name, with an id of its own
    with pytest.raises(ConfigError, match="holds models of another run called r, which would be replaced"):
        run_in_process(tmp_path, transport.restarted(), secure(method="fedsgd"))
    assert models(tmp_path) == kept


def test_a_state_that_is_not_of_the_run_is_not_kept_as_its_model(tmp_path: Path) -> None:
    """The run is over and begun again; a fresh state would take the place of the trained model."""
    transport = strict(tmp_path)
    run_in_process(tmp_path, transport, secure())
    kept = models(tmp_path)
    (tmp_path / "runs" / "r" / "result.json").unlink()
    again, settings = transport.restarted(), secure()
    joined = join(again, "r", settings, 1, bytes.fromhex(records(tmp_path)[0]["mark"]))
    places = {site: tuple(one.clients or {}) for site, one in joined.items()}
    engine = SitesEngine(places, settings.method.table, again, "r")
    with pytest.raises(ProtocolError, match="have not exchanged keys yet"):
        engine.commit(0)
    keys = {party: pair for one in joined.values() for party, pair in (one.keys or {}).items()}
    request = pack((codec.encode(PeerKeys(keys)),))
    again.request("r", KEYS, dict.fromkeys(again.sites, request), None)
    with pytest.raises(ProtocolError, match="its state is not that of the run"):
        list(engine.export(False))
    assert models(tmp_path) == kept and len(kept) == 3


@pytest.mark.parametrize(
    "name", ["../bank", "a/devices", "server", "..", "", "bank\n", "bank?", "\uff42ank", " bank", "x" * 101]
)
def test_names_of_clients_are_names(tmp_path: Path, name: str) -> None:
    text = f'client = {json.dumps(name)}\n[data]\ndataset = "cora"\nclients = 3\n'
    (tmp_path / "client.toml").write_text(text)
    with pytest.raises(ConfigError, match="a client cannot be called"):
        SiteSettings.read(tmp_path / "client.toml")
    (tmp_path / "roster.toml").write_text(f'[a]\nclient = {json.dumps(name)}\nkey = "{"00" * 32}"\n')
    with pytest.raises(ConfigError, match="a client cannot be called"):
        OrganisationKeys.read(tmp_path / "roster.toml")


@pytest.mark.parametrize("run", ["../x", "a/b", "contracts", "Contracts", "", "ﬁ", "x" * 101])
def test_names_of_runs_are_names(tmp_path: Path, run: str) -> None:
    transport = strict(tmp_path)
    reply = transport.runtimes["bank-0"].handle(run, "begin", b"")
    assert "a run cannot be called" in codec.decode(unpack(reply)[0], Answer).text
    assert not (tmp_path / "bank-0" / "state").exists()


def test_only_one_job_of_a_site_answers_for_a_run(tmp_path: Path) -> None:
    """Several jobs of one run at the same time would each know only what was asked before they began."""
    server = HostileServer(tmp_path, hostile_settings(), STRICT)
    first, second = server.engine, server.transport.restarted()
    keys, everybody = dict(server.keys), dict.fromkeys(server.parts)
    first.commit(0)
    server.transport = second
    server.begin()
    server.total(server.calls("size", replace(SETUP, incarnation=1), everybody))
    mine, server.engine, server.keys = server.engine, first, keys
    with pytest.raises(Refused):
        server.total(server.calls("size", SETUP, everybody))

    def take_back() -> None:
        first.away = frozenset(server.parts)
        first.take_back(0)

    for order in (lambda: first.commit(0), lambda: first.rollback(0), lambda: list(first.export(False)), take_back):
        with pytest.raises(ProtocolError, match="r was begun again in another job of this site: this one is over"):
            order()
    mine.commit(1)
    assert "was begun again in another job" in records(tmp_path)[-1]["text"]
