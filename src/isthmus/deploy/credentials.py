"""A kit: the folder with which one party joins a federation (its certificate, its key, whom to connect to).

:meth:`Kit.close_down` writes the site's own rules into ``local/``, where they win over what came with the kit: exactly
the classes of our job, our gate, no shipped code, no remote commands, no log streaming, state inside the kit instead of
a shared temporary folder. It is done at every start, so a kit that arrived with laxer rules is closed down too.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cryptography import x509
from cryptography.x509.oid import NameOID

from isthmus.deploy.job import SERVER_CLASSES, SITE_CLASSES
from isthmus.errors import ConfigError

logger = logging.getLogger(__name__)

WARN_DAYS = 30
SILENT = 60
"""Seconds after which a server takes an organisation it does not hear of for gone (the library: ten minutes)."""
GATE = "isthmus.deploy.gate.ConfigOnly"
RIGHTS = (
    "submit_job",
    "clone_job",
    "manage_job",
    "download_job",
    "view",
    "operate",
    "shell_commands",
    "byoc",
    "server-predeployed-flwr",
)
GRANTED = {"submit_job": "any", "manage_job": "n:submitter", "view": "any"}
"""What a ``lead`` may do; nobody may do anything else. ``project_admin`` would by default be allowed everything, code
included.
"""


@dataclass(frozen=True)
class Kit:
    """A kit on disk.

    Args:
        kind: Whether it is the server's, an organisation's (``client``) or the coordinator's who submits runs
            (``admin``).
        name: As its certificate says; the address of an organisation.
        target: Host and port of the server.
    """

    path: Path
    kind: Literal["server", "client", "admin"]
    name: str
    organisation: str
    target: tuple[str, int]

    @classmethod
    def read(cls, path: Path) -> Kit:
        """Read a kit; what is missing in it is named."""
        path = path.absolute()
        startup = path / "startup"
        kinds: dict[str, Literal["server", "client", "admin"]] = {
            "fed_server.json": "server",
            "fed_client.json": "client",
            "fed_admin.json": "admin",
        }
        found = [name for name in kinds if (startup / name).is_file()]
        if len(found) != 1:
            raise ConfigError(
                f"{path} is not a kit (no startup/fed_client.json or fed_server.json): `isthmus server init` makes them"
            )
        kind = kinds[found[0]]
        try:
            config = json.loads((startup / found[0]).read_text())
            target = _target(config, kind)
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(
                f"{startup / found[0]} is damaged ({type(error).__name__}): ask for the kit again"
            ) from None
        subject = _load(startup / ("server.crt" if kind == "server" else "client.crt")).subject
        name, organisation = _one(subject, NameOID.COMMON_NAME), _one(subject, NameOID.ORGANIZATION_NAME)
        return cls(path, kind, name, organisation, target)

    @property
    def startup(self) -> Path:
        return self.path / "startup"

    @property
    def local(self) -> Path:
        return self.path / "local"

    # -- dates -------------------------------------------------------------------------------------

    def check_certificates(self, now: datetime.datetime | None = None) -> list[str]:
        """Warnings, one per certificate that ends within 30 days. One that does not fit, has ended or not begun is an
        error.
        """
        now = now or datetime.datetime.now(datetime.UTC)
        own, root = (
            self.startup / ("server.crt" if self.kind == "server" else "client.crt"),
            self.startup / "rootCA.pem",
        )
        warnings = []
        for what, path in (("certificate", own), ("root certificate", root)):
            certificate = _load(path)
            until = certificate.not_valid_after_utc
            if until <= now:
                raise ConfigError(
                    f"the {what} of {self.name} ended on {until:%Y-%m-%d}: have new kits made with `isthmus server "
                    "init`"
                )
            if certificate.not_valid_before_utc > now + datetime.timedelta(minutes=5):
                begins = certificate.not_valid_before_utc
                raise ConfigError(f"the {what} of {self.name} begins on {begins:%Y-%m-%d}: set this machine's clock")
            if until - now < datetime.timedelta(days=WARN_DAYS):
                warnings.append(
                    f"the {what} of {self.name} ends on {until:%Y-%m-%d}, in {(until - now).days} days: have new kits "
                    "made"
                )
        try:
            _load(own).verify_directly_issued_by(_load(root))
        except Exception:  # the library has several kinds of no
            raise ConfigError(
                f"the certificate of {self.name} is not of the root certificate in its kit: ask for the kit again"
            ) from None
        return warnings

    # -- rules -------------------------------------------------------------------------------------

    def close_down(self) -> None:
        """Write this party's own rules."""
        if self.kind == "admin":
            return
        self.local.mkdir(exist_ok=True)
        self._write("resources.json", self._resources())
        roles = {role: dict.fromkeys(RIGHTS, "none") for role in ("project_admin", "org_admin", "lead", "member")}
        roles["lead"] |= GRANTED
        self._write("authorization.json", {"format_version": "1.0", "permissions": roles})
        self._write("log_config.json", self._logging())
        # Without this the server gains a thread that waits a minute with every reply.
        self._write("comm_config.json", {"streaming_retry_timeout": 3.0})

    def _resources(self) -> dict[str, Any]:
        try:
            resources: dict[str, Any] = json.loads((self.local / "resources.json.default").read_text())
        except (OSError, ValueError):
            raise ConfigError(
                f"{self.local / 'resources.json.default'} is missing or damaged: ask for the kit again"
            ) from None
        resources["class_list_enforcement_mode"] = "enforce"
        resources["class_allow_list"] = list(SERVER_CLASSES if self.kind == "server" else SITE_CLASSES)
        resources["allow_log_streaming"] = False
        resources["app_validator"] = {"path": GATE, "args": {}}
        unwanted = ("site_log_streamer", "log_receiver")
        resources["components"] = [part for part in resources["components"] if part["id"] not in unwanted]
        if self.kind == "server":
            resources["servers"][0]["heart_beat_timeout"] = SILENT
            resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(self.path / "snapshots")
            for part in resources["components"]:
                if part["id"] == "job_manager":
                    part["args"]["uri_root"] = str(self.job_store)
        return resources

    def _logging(self) -> dict[str, Any]:
        """As the kit says, but of the library only what went wrong: it writes several lines for every call."""
        try:
            config: dict[str, Any] = json.loads((self.local / "log_config.json.default").read_text())
        except (OSError, ValueError):
            raise ConfigError(
                f"{self.local / 'log_config.json.default'} is missing or damaged: ask for the kit again"
            ) from None
        config["loggers"] |= {"nvflare": {"level": "WARNING"}, "isthmus": {"level": "INFO"}}
        return config

    def _write(self, name: str, content: Any) -> None:
        temporary = self.local / f".{name}.tmp"
        temporary.write_text(json.dumps(content, indent=2))
        temporary.rename(self.local / name)

    # -- the server's jobs -------------------------------------------------------------------------

    @property
    def job_store(self) -> Path:
        return self.path / "jobs"

    def sweep_jobs(self) -> int:
        """Mark jobs of a server that was killed as abandoned; otherwise they would be listed as running for good. Only
        while it is down.
        """
        swept = 0
        for path in self.job_store.glob("*/meta"):
            try:
                meta = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if isinstance(meta, dict) and meta.get("status") in ("RUNNING", "DISPATCHED"):
                temporary = path.with_name(".meta.tmp")
                temporary.write_text(json.dumps(meta | {"status": "FINISHED:ABANDONED"}))
                temporary.rename(path)
                swept += 1
        return swept

    def check_port(self) -> None:
        """Raise if somebody else listens where this server would."""
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


def _target(config: dict[str, Any], kind: str) -> tuple[str, int]:
    if kind == "admin":
        return str(config["admin"]["host"]), int(config["admin"]["port"])
    host, _, port = config["servers"][0]["service"]["target"].rpartition(":")
    return host, int(port)


def _load(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError):
        raise ConfigError(f"{path} is missing or no certificate: ask for the kit again") from None


def _one(subject: x509.Name, oid: x509.ObjectIdentifier) -> str:
    values = subject.get_attributes_for_oid(oid)
    return str(values[0].value) if values else ""


def warn_dates(kits: Sequence[Kit]) -> None:
    """Check kits and say what will end soon."""
    for kit in kits:
        for warning in kit.check_certificates():
            logger.warning("%s", warning)
