"""A startup kit: the folder with which one party joins a federation (its certificate, its key, the server's address).

Made by ``isthmus client join`` (``join_files``) and ``isthmus server init`` (``provisioning``); read and checked
whenever a server, a client or ``isthmus submit`` starts. Which jobs and requests its owner accepts is written into it
at every start (``kit_policy``).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import re
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cryptography import x509
from cryptography.x509.oid import NameOID

from isthmus.deploy.certificates import CLOCK_TOLERANCE
from isthmus.deploy.certificates import read_certificate as _load_certificate
from isthmus.errors import ConfigError

logger = logging.getLogger(__name__)

WARN_DAYS, KEEP_JOBS = 30, 20
JOB_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
Kind = Literal["server", "client", "admin"]
CONFIG_FILES: dict[str, Kind] = {
    "fed_server.json": "server",
    "fed_client.json": "client",
    "fed_admin.json": "admin",
}


@dataclass(frozen=True)
class StartupKit:
    """A startup kit on disk.

    Args:
        kind: Whether it belongs to the server, to an organisation (``client``) or to the coordinator, who submits runs
            (``admin``).
        name: As in its certificate; the address of an organisation.
        target: Host and port of the server.
    """

    path: Path
    kind: Kind
    name: str
    organisation: str
    target: tuple[str, int]

    @classmethod
    def read(cls, path: Path) -> StartupKit:
        """Read a kit; an error names what is missing in it."""
        path = path.absolute()
        startup = path / "startup"
        found = [name for name in CONFIG_FILES if (startup / name).is_file()]
        if len(found) != 1:
            raise ConfigError(
                f"{path} is not a kit (no startup/fed_client.json or fed_server.json): `isthmus client join` makes one"
            )
        kind = CONFIG_FILES[found[0]]
        try:
            config = json.loads((startup / found[0]).read_text())
            target = _target(config, kind)
        except (OSError, ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{startup / found[0]} is damaged ({type(error).__name__}): ask for the kit again"
            ) from None
        subject = _load_certificate(startup / certificate_file(kind)).subject
        name, organisation = _field(subject, NameOID.COMMON_NAME), _field(subject, NameOID.ORGANIZATION_NAME)
        return cls(path, kind, name, organisation, target)

    @property
    def startup(self) -> Path:
        return self.path / "startup"

    @property
    def local(self) -> Path:
        """The owner's own rules; where they differ from ``startup`` they win."""
        return self.path / "local"

    @property
    def job_store(self) -> Path:
        """Jobs the server was given."""
        return self.path / "jobs"

    def warn_about_certificates(self) -> None:
        """Log a warning for every certificate that expires soon; raise if one cannot be used."""
        for warning in self.check_certificates():
            logger.warning("%s", warning)

    def check_certificates(self, now: datetime.datetime | None = None) -> list[str]:
        """Warnings, one per certificate that expires within 30 days. One that does not match, has expired or is not
        valid yet is an error.
        """
        now = now or datetime.datetime.now(datetime.UTC)
        own = _load_certificate(self.startup / certificate_file(self.kind))
        root = _load_certificate(self.startup / "rootCA.pem")
        warnings = []
        for what, certificate in (("certificate", own), ("root certificate", root)):
            begins, expires = certificate.not_valid_before_utc, certificate.not_valid_after_utc
            if expires <= now:
                raise ConfigError(
                    f"the {what} of {self.name} expired on {expires:%Y-%m-%d}: renew it (`isthmus "
                    "client renew`, at the hub `isthmus server renew`)"
                )
            if begins > now + CLOCK_TOLERANCE:
                raise ConfigError(
                    f"the {what} of {self.name} is valid from {begins:%Y-%m-%d} on: set this machine's clock"
                )
            if expires - now < datetime.timedelta(days=WARN_DAYS):
                warnings.append(
                    f"the {what} of {self.name} expires on {expires:%Y-%m-%d}, in {(expires - now).days} days: "
                    "renew it (`isthmus client renew`, at the hub `isthmus server renew`)"
                )
        try:
            own.verify_directly_issued_by(root)
        except Exception:  # cryptography raises several types here
            raise ConfigError(
                f"the certificate of {self.name} was not issued by the root certificate in its kit: ask for the kit "
                "again"
            ) from None
        return warnings

    def check_port(self) -> None:
        """Raise if another process listens on this server's port."""
        port = self.target[1]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                reason = os.strerror(error.errno or 0)
                raise ConfigError(
                    f"port {port} cannot be used ({reason}): stop what uses it, or make kits with another --port"
                ) from None

    def prune_jobs(self, keep: int = KEEP_JOBS, running: frozenset[str] = frozenset()) -> int:
        """Remove all but the newest folders of jobs that do not run, which NVIDIA FLARE never does; results are
        elsewhere.
        """
        count = 0
        for place in (self.path, self.job_store):
            jobs = []
            for path in place.glob("*"):
                with contextlib.suppress(FileNotFoundError):  # somebody else removed it
                    if JOB_ID.fullmatch(path.name) and path.name not in running and path.is_dir():
                        jobs.append((path.stat().st_mtime, path))
            for _, path in sorted(jobs)[:-keep]:
                shutil.rmtree(path, ignore_errors=True)
                count += 1
        return count

    def abandon_stale_jobs(self) -> int:
        """Mark the jobs of a server that was killed as abandoned; otherwise they would be listed as running for ever.
        Only while the server is down.
        """
        count = 0
        for path in self.job_store.glob("*/meta"):
            try:
                meta = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if isinstance(meta, dict) and meta.get("status") in ("RUNNING", "DISPATCHED"):
                temporary = path.with_name(".meta.tmp")
                temporary.write_text(json.dumps(meta | {"status": "FINISHED:ABANDONED"}))
                temporary.rename(path)
                count += 1
        return count


def _target(config: dict[str, Any], kind: Kind) -> tuple[str, int]:
    if kind == "admin":
        return str(config["admin"]["host"]), int(config["admin"]["port"])
    host, _, port = config["servers"][0]["service"]["target"].rpartition(":")
    return host, int(port)


def certificate_file(kind: Kind) -> str:
    return "server.crt" if kind == "server" else "client.crt"


def _field(subject: x509.Name, oid: x509.ObjectIdentifier) -> str:
    values = subject.get_attributes_for_oid(oid)
    return str(values[0].value) if values else ""
