"""X.509 keys, requests and certificates of a federation: each party makes its own key, the root only signs.

NVIDIA FLARE's own certificate commands do the same and write into the user's home; this is what of it is needed here.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey, generate_private_key
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from isthmus.errors import ConfigError

KEY_BITS = 2048
CLOCK_TOLERANCE = datetime.timedelta(minutes=5)
_SERVER, _CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
_UNITS = {"d": "days", "h": "hours", "m": "minutes"}


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def duration(text: str) -> datetime.timedelta:
    """``90d``, ``12h`` or ``5m``."""
    match = re.fullmatch(r"([1-9][0-9]{0,4})([dhm])", text)
    if match is None:
        raise ConfigError(f"{text!r} is no time that a certificate can be valid: write 90d, 12h or 5m")
    return datetime.timedelta(**{_UNITS[match[2]]: int(match[1])})


def fingerprint(data: bytes) -> str:
    """A digest of 128 bits that two people can compare on the phone."""
    digits = hashlib.sha256(data).hexdigest()[:32]
    return "-".join(digits[start : start + 4] for start in range(0, len(digits), 4))


def same_fingerprint(given: str, found: str) -> bool:
    return re.sub(r"[^0-9a-f]", "", given.lower()) == found.replace("-", "")


def make_key(path: Path) -> RSAPrivateKey:
    """Make a private key in a file that only its owner can read; an existing one is not replaced."""
    key = generate_private_key(65537, KEY_BITS)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists already: a request was made with it and waits for its answer (`isthmus client join`); "
            "delete it to make another request"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another --kit") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )
    return key


def read_key(path: Path) -> RSAPrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError):
        raise ConfigError(f"{path} is missing or no private key: make a new request") from None
    if not isinstance(key, RSAPrivateKey):
        raise ConfigError(f"{path} is no RSA key: make a new request")
    return key


def read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError):
        raise ConfigError(f"{path} is missing or no certificate: ask for the kit again") from None


def pem(what: x509.Certificate | x509.CertificateSigningRequest) -> str:
    return what.public_bytes(serialization.Encoding.PEM).decode()


def root_fingerprint(certificate: x509.Certificate) -> str:
    return fingerprint(certificate.public_bytes(serialization.Encoding.DER))


def digest(certificate: x509.Certificate) -> str:
    """Of the whole certificate. Its serial number is whatever the holder of the root key wants it to be."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def key_digest(public: PublicKeyTypes) -> str:
    encoded = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(encoded).hexdigest()


def common_name(name: x509.Name) -> str:
    values = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(values[0].value) if len(values) == 1 else ""


def names_of(name: str) -> x509.SubjectAlternativeName:
    """A host's name or address, or the name of an organisation."""
    try:
        return x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(name))])
    except ValueError:
        return x509.SubjectAlternativeName([x509.DNSName(name)])


def organisation_subject(name: str) -> x509.Name:
    """The subject of an organisation: its name, also as NVIDIA FLARE writes organisations."""
    return x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, name),
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, name.replace("-", "_")),
        ]
    )


def make_request(key: RSAPrivateKey, name: str) -> x509.CertificateSigningRequest:
    return x509.CertificateSigningRequestBuilder().subject_name(organisation_subject(name)).sign(key, hashes.SHA256())


@dataclass(frozen=True)
class Root:
    """The federation's root certificate and its key, which should be offline except when something is signed."""

    certificate: x509.Certificate
    key: RSAPrivateKey

    @classmethod
    def read(cls, folder: Path, federation: str) -> Root:
        path = folder / federation / "state" / "cert.json"
        try:
            raw = json.loads(path.read_text())
            certificate = x509.load_pem_x509_certificate(raw["root_cert"].encode())
            key = serialization.load_pem_private_key(raw["root_pri_key"].encode(), None)
        except OSError:
            raise ConfigError(
                f"the root key is not in {folder}: bring it (--root FOLDER), it signs what you ask for"
            ) from None
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{path} is damaged: use your copy of the root key") from None
        if not isinstance(key, RSAPrivateKey):
            raise ConfigError(f"{path} holds no RSA key: use your copy of the root key")
        return cls(certificate, key)

    def issue(
        self,
        subject: x509.Name,
        public: RSAPublicKey,
        name: str,
        valid: datetime.timedelta,
        *,
        server: bool = False,
    ) -> x509.Certificate:
        """A certificate for a public key. It never outlives the root. Only that of the server is good for listening, so
        no member can pass for the hub.
        """
        begin = now()
        end = min(begin + valid, self.certificate.not_valid_after_utc)
        if end <= begin:
            raise ConfigError("the root certificate has expired: found the federation again (`isthmus server init`)")
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.certificate.subject)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin - CLOCK_TOLERANCE)
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([_SERVER if server else _CLIENT]), critical=True)
            .add_extension(names_of(name), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )

    def issue_again(self, old: x509.Certificate, valid: datetime.timedelta, *, server: bool) -> x509.Certificate:
        """The same certificate for another while, for parties beside the root: server and coordinator."""
        public = old.public_key()
        assert isinstance(public, RSAPublicKey)
        return self.issue(old.subject, public, common_name(old.subject), valid, server=server)

    def sign(self, content: bytes) -> bytes:
        return self.key.sign(content, padding.PKCS1v15(), hashes.SHA256())


def signed_by_root(root: x509.Certificate, content: bytes, signature: bytes) -> bool:
    public = root.public_key()
    try:
        assert isinstance(public, RSAPublicKey)
        public.verify(signature, content, padding.PKCS1v15(), hashes.SHA256())
    except (AssertionError, InvalidSignature):
        return False
    return True
