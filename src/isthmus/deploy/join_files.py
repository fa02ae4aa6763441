"""The two files by which an organisation joins or renews: its request, and the hub's approval. Neither holds a secret.

``isthmus client request`` makes the key in the organisation's own kit and writes the request; ``isthmus server
approve`` signs it; ``isthmus client join`` puts the certificate beside the key. The request also holds the
organisation's line of the roster and is signed with its long-term key, so one comparison of fingerprints vouches for
both keys, and a later request (``isthmus client renew``) is known by that signature.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from isthmus.deploy.certificates import (
    Root,
    common_name,
    fingerprint,
    make_key,
    make_request,
    pem,
    read_certificate,
    read_key,
    root_fingerprint,
    same_fingerprint,
    signed_by_root,
)
from isthmus.deploy.kit_policy import write_policy
from isthmus.deploy.provisioning import NAME
from isthmus.deploy.roster import check_client_name
from isthmus.deploy.startup_kit import StartupKit
from isthmus.errors import ConfigError
from isthmus.experiments.config_values import read_toml
from isthmus.privacy.keys import PUBLIC_BYTES, Identity, frame, signed_by

PROTOCOL = 2
"""Of these files; in 1 nobody had signed where the server is. A file of another number is refused by name."""
NEXT_KEY, REQUEST = "next.key", "request.toml"
MAX_FILE_BYTES = 1 << 16
_T = TypeVar("_T")


def _read(kind: type[_T], path: Path, what: str) -> _T:
    try:
        large = path.stat().st_size > MAX_FILE_BYTES
    except OSError:
        large = False
    if large:
        raise ConfigError(f"{path} is too large to be {what}: ask for it again")
    raw: dict[str, Any] = read_toml(path, f"{what} ")
    if "protocol" not in raw:
        raise ConfigError(f"{path} is not {what}: ask for it again")
    if raw["protocol"] != PROTOCOL:
        raise ConfigError(
            f"{path} is of protocol {raw['protocol']}, this version reads {PROTOCOL}: install the same version of "
            "Isthmus at both ends and make the file again"
        )
    fields = set(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    if raw.keys() != fields or not all(type(raw[key]) is (int if key in ("protocol", "port") else str) for key in raw):
        raise ConfigError(f"{path} is not {what}: ask for it again")
    return kind(**raw)


@dataclass(frozen=True)
class JoinRequest:
    """An organisation asks for a certificate."""

    protocol: int
    organisation: str
    client: str
    key: str
    csr: str
    signature: str

    @classmethod
    def make(cls, organisation: str, client: str, identity: Identity, csr: str) -> JoinRequest:
        unsigned = cls(PROTOCOL, organisation, client, identity.public.hex(), csr, "")
        return cls(PROTOCOL, organisation, client, unsigned.key, csr, identity.sign_bytes(unsigned.signed()).hex())

    @classmethod
    def read(cls, path: Path) -> JoinRequest:
        """A request whose two keys are proven: the request for a certificate and the file are signed with them."""
        found = _read(cls, path, "a request")
        check_client_name(found.client, path.name)
        if not NAME.fullmatch(found.organisation):
            raise ConfigError(f"{path} names an organisation as none can be called: ask for it again")
        try:
            key, signature = bytes.fromhex(found.key), bytes.fromhex(found.signature)
            csr = x509.load_pem_x509_csr(found.csr.encode())
            valid = csr.is_signature_valid and isinstance(csr.public_key(), RSAPublicKey)
        except ValueError:
            raise ConfigError(f"{path} is damaged: ask for the request again") from None
        if not valid or len(key) != PUBLIC_BYTES or not signed_by(key, found.signed(), signature):
            raise ConfigError(f"{path} is not signed with the keys it names, so somebody changed it: ask for it again")
        if common_name(csr.subject) != found.organisation:
            raise ConfigError(f"{path} is of {found.organisation} and asks for a certificate of another: refuse it")
        return found

    def signed(self) -> bytes:
        return frame("isthmus/join-request/1", self.organisation, self.client, self.key, self.csr)

    @property
    def public(self) -> RSAPublicKey:
        key = x509.load_pem_x509_csr(self.csr.encode()).public_key()
        assert isinstance(key, RSAPublicKey)
        return key

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.signed())

    @property
    def roster_lines(self) -> str:
        return f'[{self.organisation}]\nclient = "{self.client}"\nkey = "{self.key}"\n'

    def to_toml(self) -> str:
        return tomli_w.dumps(asdict(self), multiline_strings=True)


@dataclass(frozen=True)
class Approval:
    """The hub's answer: a certificate, the root, and where the server is."""

    protocol: int
    federation: str
    organisation: str
    host: str
    port: int
    certificate: str
    root: str
    signature: str

    @classmethod
    def make(
        cls, federation: str, organisation: str, target: tuple[str, int], certificate: x509.Certificate, root: Root
    ) -> Approval:
        made = cls(PROTOCOL, federation, organisation, *target, pem(certificate), pem(root.certificate), "")
        return replace(made, signature=root.sign(made.signed()).hex())

    @classmethod
    def read(cls, path: Path) -> Approval:
        """An approval of which every word is signed by the root it names; whose root that is, ``join`` decides."""
        found = _read(cls, path, "an approval")
        try:
            x509.load_pem_x509_certificate(found.certificate.encode())
            root, signature = x509.load_pem_x509_certificate(found.root.encode()), bytes.fromhex(found.signature)
        except ValueError:
            raise ConfigError(f"{path} is damaged: ask for the approval again") from None
        if not signed_by_root(root, found.signed(), signature):
            raise ConfigError(f"{path} is not signed by the root it names, so somebody changed it: ask for it again")
        return found

    def signed(self) -> bytes:
        words = (self.federation, self.organisation, self.host, self.port, self.certificate, self.root)
        return frame("isthmus/approval-of-request/1", *words)

    def to_toml(self) -> str:
        return tomli_w.dumps(asdict(self), multiline_strings=True)


def request(kit: Path, organisation: str, client: str, identity: Identity) -> JoinRequest:
    """Make a new key in a kit and the request for its certificate; a kit in use goes on with its old key meanwhile."""
    startup = kit / "startup"
    try:
        for folder in (kit, startup):  # a mode is not that of the parents
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"cannot make {kit}: {error.strerror}; choose another --kit") from None
    key = make_key(startup / NEXT_KEY)
    made = JoinRequest.make(organisation, client, identity, pem(make_request(key, organisation)))
    (kit / REQUEST).write_text(made.to_toml())
    return made


def join(kit: Path, approval: Approval, root: str | None) -> StartupKit:
    """Put an approved certificate beside its key. The first time ``root``, the fingerprint that the hub's operator told
    by another way, decides whether this is the right hub; later the root in the kit does.
    """
    with _alone(kit):
        return _join(kit, approval, root)


@contextlib.contextmanager
def _alone(kit: Path) -> Iterator[None]:
    """While no other process puts a certificate into this kit."""
    if not kit.is_dir():
        raise _no_request(kit)
    descriptor = os.open(kit, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _no_request(kit: Path) -> ConfigError:
    return ConfigError(
        f"no request of {kit} waits for an answer: make one with `isthmus client request`, or, if {kit} is in use, "
        "`isthmus client renew`"
    )


def _join(kit: Path, approval: Approval, root: str | None) -> StartupKit:
    startup = kit / "startup"
    if not (kit / REQUEST).exists():
        raise _no_request(kit)
    asked = JoinRequest.read(kit / REQUEST)
    made = startup / NEXT_KEY if (startup / NEXT_KEY).exists() else startup / "client.key"  # or it was cut off below
    key = read_key(made)
    certificate = x509.load_pem_x509_certificate(approval.certificate.encode())
    authority = x509.load_pem_x509_certificate(approval.root.encode())
    if approval.organisation != asked.organisation or common_name(certificate.subject) != asked.organisation:
        raise ConfigError(
            f"this approval is for {approval.organisation}, but {kit} belongs to {asked.organisation}: use your own"
        )
    if certificate.public_key() != key.public_key():
        raise ConfigError(f"this approval answers an older request of {asked.organisation}: use that of the last one")
    try:
        certificate.verify_directly_issued_by(authority)
    except Exception:  # cryptography raises several types here
        raise ConfigError("the certificate was not issued by the root of this approval: ask for it again") from None
    _check_root(startup, authority, root)
    _write(startup, approval, asked.organisation)
    made.replace(startup / "client.key")
    _replace(startup / "client.crt", approval.certificate)
    joined = StartupKit.read(kit)
    _write_defaults(joined)
    write_policy(joined)
    (kit / REQUEST).unlink()
    return joined


def _check_root(startup: Path, authority: x509.Certificate, given: str | None) -> None:
    found = root_fingerprint(authority)
    if (startup / "rootCA.pem").exists():
        if root_fingerprint(read_certificate(startup / "rootCA.pem")) != found:
            raise ConfigError(
                "this approval comes from a hub with another root, whatever its name: ask the operator of yours, or "
                "join a new federation with a new --kit"
            )
    elif given is None or not same_fingerprint(given, found):
        told = "no --fingerprint was given" if given is None else f"its fingerprint is {found}, not {given}"
        raise ConfigError(
            f"the root of this hub is not confirmed ({told}): ask its operator, by another way than this file came, "
            "for what `isthmus server fingerprint` prints"
        )


def _write(startup: Path, approval: Approval, name: str) -> None:
    """What a kit needs beside key and certificate; nothing in it is taken from the hub but name, host and port."""
    service = {"target": f"{approval.host}:{approval.port}", "scheme": "grpc"}
    config = {
        "format_version": 2,
        "servers": [{"name": approval.federation, "service": service, "identity": approval.host}],
        "client": {
            "ssl_private_key": "client.key",
            "ssl_cert": "client.crt",
            "ssl_root_cert": "rootCA.pem",
            "fqsn": name,
            "is_leaf": True,
            "connection_security": "mtls",
        },
    }
    _replace(startup / "fed_client.json", json.dumps(config, indent=2))
    _replace(startup / "rootCA.pem", approval.root)


def _write_defaults(kit: StartupKit) -> None:
    """What NVIDIA FLARE ships as defaults of a client, from the package installed here."""
    import nvflare.lighter
    from nvflare.lighter.utils import load_yaml

    template = load_yaml(str(Path(nvflare.lighter.__file__).parent / "templates" / "master_template.yml"))
    values = {"class_allow_list": "[]", "allow_log_streaming": "false", "num_gpus": "0", "gpu_mem": "0"}
    kit.local.mkdir(exist_ok=True)
    for section, name in {"local_client_resources": "resources.json", "log_config": "log_config.json"}.items():
        text = template[section]
        for key, value in values.items():
            text = text.replace(f"{{~~{key}~~}}", value)
        (kit.local / f"{name}.default").write_text(text)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.rename(path)
