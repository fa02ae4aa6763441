"""The gate at the server: who is let in, and who is cut off."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key

pytest.importorskip("nvflare", reason="the engine nvflare is an extra")

from isthmus.deploy import connection_gate
from isthmus.deploy.certificates import Root, organisation_subject, pem
from isthmus.deploy.connection_gate import SAID_EVERY, ConnectionGate
from isthmus.deploy.members import Members
from isthmus.errors import ConfigError


class Context:
    """A connection, as gRPC shows it to the server."""

    def __init__(self, certificate: x509.Certificate | None) -> None:
        self.certificate, self.cancelled = certificate, False

    def auth_context(self) -> dict[str, tuple[bytes, ...]]:
        return {} if self.certificate is None else {"x509_pem_cert": (pem(self.certificate).encode(),)}

    def cancel(self) -> None:
        self.cancelled = True


@pytest.fixture(scope="module")
def key() -> RSAPrivateKey:
    return generate_private_key(65537, 2048)


@pytest.fixture(scope="module")
def root(key: RSAPrivateKey) -> Root:
    from cryptography.hazmat.primitives import hashes

    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(organisation_subject("x")).issuer_name(organisation_subject("x"))
    builder = builder.public_key(key.public_key()).serial_number(1).not_valid_before(now)
    return Root(builder.not_valid_after(now + datetime.timedelta(days=9)).sign(key, hashes.SHA256()), key)


def issue(root: Root, name: str = "bank-a", valid: datetime.timedelta = datetime.timedelta(days=1)) -> x509.Certificate:
    return root.issue(organisation_subject(name), root.key.public_key(), name, valid)


def gate(path: Path, *certificates: x509.Certificate, most: int = 2) -> ConnectionGate:
    members = Members()
    for one in certificates:
        members = members.issued(one)
    members.write(path / "members.json")
    return ConnectionGate(path / "members.json", most)


def test_only_registered_certificates_enter_even_of_the_right_root(root: Root, tmp_path: Path) -> None:
    registered, forged = issue(root), issue(root)
    made = gate(tmp_path, registered)
    assert made.enter(Context(registered)) == ""
    assert "not in the register" in made.enter(Context(forged))
    made.check()
    assert made.refused == 1 and (tmp_path / "refused-connections").read_text() == "1\n"


def test_a_thief_of_the_root_key_cannot_copy_the_number_of_a_registered_certificate(
    root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered = issue(root)
    monkeypatch.setattr(x509, "random_serial_number", lambda: registered.serial_number)
    forged = root.issue(
        registered.subject, generate_private_key(65537, 2048).public_key(), "bank-a", datetime.timedelta(1)
    )
    assert forged.serial_number == registered.serial_number and forged.subject == registered.subject
    assert "is not in the register" in gate(tmp_path, registered).enter(Context(forged))


def test_jobs_of_the_server_itself_have_no_certificate(root: Root, tmp_path: Path) -> None:
    assert gate(tmp_path).enter(Context(None)) == ""


def test_a_revoked_one_is_cut_off_and_the_others_are_not(root: Root, tmp_path: Path) -> None:
    a, b = issue(root), issue(root, "bank-b")
    made = gate(tmp_path, a, b)
    one, other = Context(a), Context(b)
    assert made.enter(one) == made.enter(other) == ""
    assert made.check() == 0
    Members.read(made.register).revoked("bank-a").write(made.register)
    assert made.check() == 1 and one.cancelled and not other.cancelled
    assert "was revoked" in made.enter(Context(a))
    assert made.check() == 0


def test_one_whose_certificate_expires_meanwhile_is_cut_off(
    root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isthmus.deploy import members

    short = issue(root, valid=datetime.timedelta(minutes=2))
    made, context = gate(tmp_path, short), Context(short)
    assert made.enter(context) == ""
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=3)
    monkeypatch.setattr(members, "now", lambda: later)
    assert made.check() == 1 and context.cancelled
    assert "expired at" in made.enter(Context(short))


def test_no_organisation_takes_the_connections_of_the_others(root: Root, tmp_path: Path) -> None:
    a, b = issue(root), issue(root, "bank-b")
    made = gate(tmp_path, a, b)
    held = [Context(a) for _ in range(2)]
    assert [made.enter(one) for one in held] == ["", ""]
    assert "holds 2 connections already" in made.enter(Context(a))
    assert made.enter(Context(b)) == ""
    made.leave(held[0])
    assert made.enter(Context(a)) == ""


@pytest.mark.parametrize(
    "content", [None, "", "{}", "[" * 100_000, '{"format": 9}', '{"format": 1, "certificates": [{}]}']
)
def test_without_a_register_nobody_enters(root: Root, tmp_path: Path, content: str | None) -> None:
    a = issue(root)
    made = gate(tmp_path, a)
    made.register.unlink() if content is None else made.register.write_text(content)
    assert made.enter(Context(a)) != ""


@pytest.mark.parametrize("expires", ["", "tomorrow", "2030-01-01T00:00:00", 1, None])
def test_a_register_with_a_wrong_date_is_damaged(root: Root, tmp_path: Path, expires: object) -> None:
    """And not an error of another kind, at a connection or in a command."""
    a = issue(root)
    register = gate(tmp_path, a).register
    content = json.loads(register.read_text())
    content["certificates"][0]["expires"] = expires
    register.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="is damaged: restore it from a backup"):
        Members.read(register)


def test_who_is_refused_a_thousand_times_does_not_fill_the_disk(
    root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, stranger, clock = gate(tmp_path), issue(root), [100.0]
    monkeypatch.setattr(connection_gate.time, "monotonic", lambda: clock[0])
    for _ in range(1000):
        assert made.enter(Context(stranger))
    assert [line.getMessage() for line in caplog.records] == [
        "refused: a certificate of 'bank-a' that is not in the register"
    ]
    clock[0] += SAID_EVERY
    made.enter(Context(stranger))
    assert caplog.records[-1].getMessage().endswith("(999 times more since it was last said)") and made.refused == 1001
