"""Keys stay home: request, approval, joining, renewing; and every mistake on the way."""

from __future__ import annotations

import ssl
import stat
import threading
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="the engine nvflare is an extra")

import tomli_w

from isthmus.cli.main import main
from isthmus.deploy import join_files
from isthmus.deploy.certificates import digest, read_certificate, root_fingerprint
from isthmus.deploy.federation_folder import FederationFolder
from isthmus.deploy.join_files import NEXT_KEY, Approval, JoinRequest, join, request
from isthmus.deploy.members import Members
from isthmus.deploy.membership import add, approve, fingerprint_of, renew_hub, revoke
from isthmus.deploy.provisioning import COORDINATOR_KIT, SERVER_KIT, FederationConfig
from isthmus.deploy.state_folder import open_state
from isthmus.errors import ConfigError, RunError
from isthmus.experiments.config import resolve
from isthmus.experiments.variants import first_variant
from isthmus.privacy.keys import Identity


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> FederationFolder:
    return FederationFolder.create(
        tmp_path_factory.mktemp("founded") / "hub", FederationConfig("x", ("bank-a", "bank-b"))
    )


def ask(folder: Path, name: str = "bank-a", identity: Identity | None = None) -> tuple[Path, JoinRequest]:
    made = request(folder / "kit", name, f"client-of-{name}", identity or Identity())
    (folder / "request").write_text(made.to_toml())
    return folder / "request", made


def joined(founded: FederationFolder, folder: Path, name: str = "bank-a") -> Identity:
    identity = Identity()
    file, made = ask(folder, name, identity)
    answer, _ = approve(founded, file, founded.path / "root", made.fingerprint)
    join(folder / "kit", answer, fingerprint_of(founded))
    return identity


def private_keys(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()]


def test_the_hub_never_holds_a_key_of_an_organisation(founded: FederationFolder, tmp_path: Path) -> None:
    before = set(private_keys(founded.path))
    assert {path.parent.parent.name for path in before} <= {SERVER_KIT, COORDINATOR_KIT, "x"}, "its own and the root's"
    identity = joined(founded, tmp_path)
    assert set(private_keys(founded.path)) == before
    (key,) = private_keys(tmp_path)
    assert key == tmp_path / "kit" / "startup" / "client.key" and stat.S_IMODE(key.stat().st_mode) == 0o600
    assert identity.seed.hex() not in (tmp_path / "request").read_text()


def test_other_users_of_the_machine_see_nothing(founded: FederationFolder, tmp_path: Path) -> None:
    """Models of the hub, logs, models and checkpoints of an organisation."""
    ask(tmp_path)
    open_state(tmp_path / "state")
    for folder in (founded.path, founded.path / "root", tmp_path / "kit", tmp_path / "state"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder.name


def test_a_kit_that_joined_can_be_used_and_holds_our_policy(founded: FederationFolder, tmp_path: Path) -> None:
    from isthmus.deploy.startup_kit import StartupKit

    joined(founded, tmp_path)
    kit = StartupKit.read(tmp_path / "kit")
    assert (kit.kind, kit.name, kit.organisation, kit.target) == ("client", "bank-a", "bank_a", ("localhost", 8002))
    assert kit.check_certificates() == []
    assert "JobValidator" in (kit.local / "resources.json").read_text()
    assert not (kit.startup / NEXT_KEY).exists()


def test_a_request_is_confirmed_by_a_person(founded: FederationFolder, tmp_path: Path) -> None:
    file, made = ask(tmp_path, "bank-b")
    root = founded.path / "root"
    with pytest.raises(ConfigError, match="by another way than this file came"):
        approve(founded, file, root, None)
    with pytest.raises(ConfigError, match="somebody changed it on the way"):
        approve(founded, file, root, "0" * 32)
    approve(founded, file, root, made.fingerprint.upper().replace("-", " "))


@pytest.mark.parametrize(
    ("field", "value"),
    [("client", "other"), ("organisation", "bank-b"), ("key", "07" * 32), ("signature", "00" * 64)],
)
def test_a_request_that_was_changed_is_refused(tmp_path: Path, field: str, value: str) -> None:
    file, _ = ask(tmp_path)
    file.write_text(tomli_w.dumps(tomllib.loads(file.read_text()) | {field: value}))
    with pytest.raises(ConfigError, match=r"somebody changed it|refuse it"):
        JoinRequest.read(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("protocol = 0\n", "of protocol 0, this version reads 2"),
        ("protocol = 2\n", "is not a request"),
        ("protocol = 2\norganisation = [1]\n", "is not a request"),
        ("no toml", "not valid TOML"),
        ("x" * 100_000, "too large"),
        ("a = " + "[" * 5000, "nested too deeply"),
    ],
)
def test_a_file_that_is_no_request(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "file").write_text(content)
    with pytest.raises(ConfigError, match=message):
        JoinRequest.read(tmp_path / "file")


def test_a_stranger_is_added_first(founded: FederationFolder, tmp_path: Path) -> None:
    file, made = ask(tmp_path, "bank-z")
    with pytest.raises(ConfigError, match="isthmus server add"):
        approve(founded, file, founded.path / "root", made.fingerprint)


def test_the_root_is_confirmed_by_a_person_and_never_changes(founded: FederationFolder, tmp_path: Path) -> None:
    other = FederationFolder.create(tmp_path / "other", FederationConfig("x", ("bank-a",)))  # the same name
    (tmp_path / "home").mkdir()
    file, made = ask(tmp_path / "home")
    false, _ = approve(other, file, other.path / "root", made.fingerprint)
    right, _ = approve(founded, file, founded.path / "root", made.fingerprint)
    kit, told = tmp_path / "home" / "kit", fingerprint_of(founded)
    with pytest.raises(ConfigError, match="no --fingerprint was given"):
        join(kit, right, None)
    with pytest.raises(ConfigError, match="not confirmed"):
        join(kit, false, told)
    join(kit, right, told)
    again = request(kit, "bank-a", "client-of-bank-a", Identity())
    file.write_text(again.to_toml())
    false, _ = approve(other, file, other.path / "root", again.fingerprint)
    with pytest.raises(ConfigError, match="a hub with another root, whatever its name"):
        join(kit, false, root_fingerprint(read_certificate(other.kit(SERVER_KIT).startup / "rootCA.pem")))


def test_an_approval_of_another_organisation_or_request_is_refused(founded: FederationFolder, tmp_path: Path) -> None:
    for name in ("bank-a", "bank-b"):
        (tmp_path / name).mkdir()
    file, made = ask(tmp_path / "bank-a")
    answer, _ = approve(founded, file, founded.path / "root", made.fingerprint)
    ask(tmp_path / "bank-b", "bank-b")
    told = fingerprint_of(founded)
    with pytest.raises(ConfigError, match="this approval is for bank-a"):
        join(tmp_path / "bank-b" / "kit", answer, told)
    (tmp_path / "bank-a" / "kit" / "startup" / NEXT_KEY).unlink()
    ask(tmp_path / "bank-a")
    with pytest.raises(ConfigError, match="an older request"):
        join(tmp_path / "bank-a" / "kit", answer, told)
    with pytest.raises(ConfigError, match="was not issued by the root"):
        file, made = tmp_path / "bank-a" / "request", JoinRequest.read(tmp_path / "bank-a" / "request")
        answer, _ = approve(founded, file, founded.path / "root", made.fingerprint)
        other = FederationFolder.create(tmp_path / "other", FederationConfig("x", ()))
        forged = replace(answer, root=(other.kit(SERVER_KIT).startup / "rootCA.pem").read_text())
        join(tmp_path / "bank-a" / "kit", forged, told)


def test_renewing_touches_nobody_else_and_needs_no_telephone(founded: FederationFolder, tmp_path: Path) -> None:
    for name in ("bank-a", "bank-b"):
        (tmp_path / name).mkdir()
    identity = joined(founded, tmp_path / "bank-a")
    joined(founded, tmp_path / "bank-b", "bank-b")
    others = {path: path.read_bytes() for path in (tmp_path / "bank-b").rglob("*") if path.is_file()}
    kit = tmp_path / "bank-a" / "kit"
    old, old_key = read_certificate(kit / "startup" / "client.crt"), (kit / "startup" / "client.key").read_bytes()
    again = request(kit, "bank-a", "client-of-bank-a", identity)
    assert (kit / "startup" / "client.key").read_bytes() == old_key, "the old key stays in use until the answer comes"
    file = tmp_path / "again"
    file.write_text(again.to_toml())
    answer, _ = approve(founded, file, founded.path / "root", None, "30d")
    join(kit, answer, None)
    new = read_certificate(kit / "startup" / "client.crt")
    assert (kit / "startup" / "client.key").read_bytes() != old_key and digest(new) != digest(old)
    assert {path: path.read_bytes() for path in (tmp_path / "bank-b").rglob("*") if path.is_file()} == others
    register = Members.read(founded.register)
    assert register.refusal(old) == "" and register.refusal(new) == ""
    stranger = request(tmp_path / "thief", "bank-a", "client-of-bank-a", Identity())
    file.write_text(stranger.to_toml())
    with pytest.raises(ConfigError, match="another long-term key"):
        approve(founded, file, founded.path / "root", None)


def test_a_lost_key_is_replaced(founded: FederationFolder, tmp_path: Path) -> None:
    joined(founded, tmp_path)
    old = read_certificate(tmp_path / "kit" / "startup" / "client.crt")
    again = request(tmp_path / "kit", "bank-a", "client-of-bank-a", Identity())
    (tmp_path / "request").write_text(again.to_toml())
    answer, _ = approve(founded, tmp_path / "request", founded.path / "root", again.fingerprint, replaces=True)
    join(tmp_path / "kit", answer, None)
    register = Members.read(founded.register)
    assert "was revoked" in register.refusal(old)
    assert register.refusal(read_certificate(tmp_path / "kit" / "startup" / "client.crt")) == ""


def test_a_request_whose_key_was_lost_is_not_answered_again(founded: FederationFolder, tmp_path: Path) -> None:
    """Whoever stole the key may also have the request it came with, which the long-term key signed."""
    identity, file = Identity(), tmp_path / "stolen"
    made = ask(tmp_path, identity=identity)[1]
    file.write_text(made.to_toml())
    answer = approve(founded, file, founded.path / "root", made.fingerprint)[0]
    join(tmp_path / "kit", answer, fingerprint_of(founded))
    assert approve(founded, file, founded.path / "root", None), "an answer that got lost is made again"
    approve(founded, ask(tmp_path, identity=identity)[0], founded.path / "root", None, replaces=True)
    for fingerprint in (None, made.fingerprint):
        with pytest.raises(ConfigError, match="is an old one: the certificate that answered it was revoked"):
            approve(founded, file, founded.path / "root", fingerprint)


@pytest.mark.parametrize("field, value", [("host", "bank-b.example.org"), ("port", 8003), ("federation", "y")])
def test_an_approval_that_was_changed_is_refused(
    founded: FederationFolder, tmp_path: Path, field: str, value: object
) -> None:
    """With another host an organisation would meet whoever listens there."""
    file, made = ask(tmp_path)
    answer, _ = approve(founded, file, founded.path / "root", made.fingerprint)
    (tmp_path / "approval").write_text(tomli_w.dumps({**tomllib.loads(answer.to_toml()), field: value}))
    with pytest.raises(ConfigError, match="not signed by the root it names"):
        Approval.read(tmp_path / "approval")


def _meets(kit: Path, certificate: Path, key: Path, name: str) -> bool:
    """Whether an organisation takes whoever listens with this certificate for the hub called ``name``."""
    client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client.load_verify_locations(kit / "startup" / "rootCA.pem")
    server.load_cert_chain(certificate, key)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours, theirs = client.wrap_bio(back, there, server_hostname=name), server.wrap_bio(there, back, server_side=True)
    for _ in range(4):
        for end in (ours, theirs):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return False
    return True


def test_no_member_passes_for_the_hub(founded: FederationFolder, tmp_path: Path) -> None:
    joined(founded, tmp_path)
    hub, own = founded.kit(SERVER_KIT).startup, tmp_path / "kit" / "startup"
    assert _meets(tmp_path / "kit", hub / "server.crt", hub / "server.key", "localhost")
    assert not _meets(tmp_path / "kit", own / "client.crt", own / "client.key", "bank-a")


def test_a_hub_that_is_known_by_its_address(tmp_path: Path) -> None:
    made = FederationFolder.create(tmp_path / "hub", FederationConfig("x", ("bank-a",), host="127.0.0.1"))
    startup = made.kit(SERVER_KIT).startup
    assert _meets(startup.parent, startup / "server.crt", startup / "server.key", "127.0.0.1")


def test_an_approval_that_nobody_waits_for(founded: FederationFolder, tmp_path: Path) -> None:
    file, made = ask(tmp_path)
    answer, _ = approve(founded, file, founded.path / "root", made.fingerprint)
    join(tmp_path / "kit", answer, fingerprint_of(founded))
    with pytest.raises(ConfigError, match=r"no request of .* waits for an answer"):
        join(tmp_path / "kit", answer, None)


def test_two_joins_at_the_same_time(founded: FederationFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is held up in the middle; the second finds the request answered, and not half a kit."""
    file, made = ask(tmp_path)
    answer, _ = approve(founded, file, founded.path / "root", made.fingerprint)
    found: list[str] = []

    def second() -> None:
        try:
            join(tmp_path / "kit", answer, fingerprint_of(founded))
        except Exception as error:
            found.append(str(error))

    other, write = threading.Thread(target=second), join_files._write

    def held_up(*given: Any) -> None:
        monkeypatch.setattr(join_files, "_write", write)
        other.start()
        other.join(0.5)
        write(*given)

    monkeypatch.setattr(join_files, "_write", held_up)
    join(tmp_path / "kit", answer, fingerprint_of(founded))
    other.join()
    assert len(found) == 1 and "waits for an answer" in found[0]


def test_a_join_that_was_cut_off_is_repeated(founded: FederationFolder, tmp_path: Path) -> None:
    file, made = ask(tmp_path)
    answer, _ = approve(founded, file, founded.path / "root", made.fingerprint)
    startup = tmp_path / "kit" / "startup"
    (startup / NEXT_KEY).rename(startup / "client.key")  # killed after the key was moved
    assert join(tmp_path / "kit", answer, fingerprint_of(founded)).check_certificates() == []


def test_who_was_revoked_is_no_member(tmp_path: Path) -> None:
    federation = FederationFolder.create(tmp_path / "hub", FederationConfig("x", ("bank-a",)))
    assert federation.members() == ()
    federation = add(federation, "bank-b")
    with pytest.raises(ConfigError, match="belongs to the federation already"):
        add(federation, "bank-b")
    with pytest.raises(ConfigError, match="use lower-case letters"):
        add(federation, "Bank C")
    for name in ("bank-a", "bank-b"):
        (tmp_path / name).mkdir()
        joined(federation, tmp_path / name, name)
    assert federation.members() == ("bank-a", "bank-b")
    (federation.path / "offers" / "bank-b.toml").touch()
    settings = resolve("fedavg", {"dataset": "csbm:nodes=30", "clients": 2})
    federation._make_run("agreed", first_variant(settings), federation.members())
    federation = revoke(federation, "bank-b")
    for _ in range(2):  # submitted again it is no other
        with pytest.raises(RunError, match="bank-b was revoked, and agreed was agreed with it"):
            federation.submit("agreed")
        assert str(federation.run_states()[0]["state"]).startswith("failed: bank-b was revoked"), "it does not wait"
    assert FederationFolder.read(federation.path).members() == ("bank-a",) and federation.offers() == {}
    certificate = read_certificate(tmp_path / "bank-b" / "kit" / "startup" / "client.crt")
    assert "was revoked" in Members.read(federation.register).refusal(certificate)
    assert Members.read(federation.register).refusal(read_certificate(tmp_path / "bank-a/kit/startup/client.crt")) == ""
    with pytest.raises(ConfigError, match="unknown organisation"):
        revoke(federation, "bank-b")


def test_commands_at_the_same_time_do_not_undo_each_other(tmp_path: Path) -> None:
    """Each has read the folder before the other changed it."""
    federation = FederationFolder.create(tmp_path / "hub", FederationConfig("y", ("bank-a", "bank-b")))
    (tmp_path / "bank-b").mkdir()
    request_of_b, made = ask(tmp_path / "bank-b", "bank-b")
    read_before = FederationFolder.read(federation.path)
    revoke(federation, "bank-b")
    add(read_before, "bank-c")
    assert FederationFolder.read(federation.path).config.organisations == ("bank-a", "bank-c")
    with pytest.raises(ConfigError, match="unknown organisation"):
        approve(read_before, request_of_b, federation.path / "root", made.fingerprint)
    assert Members.read(federation.register).valid("bank-b") is None
    revoke(read_before, "bank-a")
    assert FederationFolder.read(federation.path).config.organisations == ("bank-c",)


def test_the_hub_renews_its_own(tmp_path: Path) -> None:
    federation = FederationFolder.create(tmp_path / "hub", FederationConfig("x", (), days=20))
    server = federation.kit(SERVER_KIT)
    assert len(server.check_certificates()) == 1, "20 days left"
    old = read_certificate(server.startup / "server.crt")
    federation = federation.with_config(replace(federation.config, days=90))
    renew_hub(federation, federation.path / "root")
    assert federation.kit(SERVER_KIT).check_certificates() == [] == federation.kit(COORDINATOR_KIT).check_certificates()
    register = Members.read(federation.register)
    assert register.refusal(old) == "" == register.refusal(read_certificate(server.startup / "server.crt"))
    (federation.path / "root").rename(tmp_path / "safe")
    with pytest.raises(ConfigError, match="the root key is not in"):
        renew_hub(federation, federation.path / "root")
    renew_hub(federation, tmp_path / "safe")


def test_a_folder_of_an_older_version_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "federation.toml").write_text('name = "x"\norganisations = ["bank-a"]\n')
    with pytest.raises(ConfigError, match="an older version, where the founder held everybody's keys"):
        FederationFolder.read(tmp_path)
    (tmp_path / "federation.toml").write_text('format = 9\nname = "x"\norganisations = ["bank-a"]\n')
    with pytest.raises(ConfigError, match="has format 9, this version reads 2"):
        FederationFolder.read(tmp_path)


def test_an_approval_reads_back(founded: FederationFolder, tmp_path: Path) -> None:
    file, made = ask(tmp_path)
    answer, _ = approve(founded, file, founded.path / "root", made.fingerprint)
    (tmp_path / "answer").write_text(answer.to_toml())
    assert Approval.read(tmp_path / "answer") == answer


def test_mistakes_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "client.toml"
    assert main(["client", "identity", "bank-a", "--client", "c", "--out", str(tmp_path / "identity.key")]) == 0
    ask_ = ["client", "request", "--config", str(config), "--kit", str(tmp_path / "kit"), "--out", str(tmp_path / "r")]
    assert main([*ask_, "Bank A"]) == 2 and "use lower-case letters" in capsys.readouterr().err
    assert main([*ask_, "bank-a"]) == 0
    assert main([*ask_, "bank-a"]) == 2 and "exists already" in capsys.readouterr().err
    assert main(["client", "renew", "--config", str(config), "--kit", str(tmp_path / "kit")]) == 2
    assert "is not a kit" in capsys.readouterr().err
