"""Makes a federation: a root certificate and the kits of server and coordinator, with NVIDIA FLARE's provisioner,
offline. Organisations make their own keys and ask for certificates (``join_files``).

Run once, by ``isthmus server init``. ``FOLDER/root`` holds the root key, which signs certificates: it should be kept
offline, by somebody who does not run the server. A certificate it signs is let in only if the server's register has it.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.deploy import require_nvflare
from isthmus.deploy.kit_policy import MOST_JOBS, write_policy
from isthmus.deploy.run_queue import AT_ONCE
from isthmus.deploy.startup_kit import StartupKit
from isthmus.errors import ConfigError

logger = logging.getLogger(__name__)

SERVER_KIT, COORDINATOR_KIT = "server", "coordinator"
NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,62}[A-Za-z0-9])?")
VALID_DAYS = 90
"""Of certificates; they are renewed one by one. The root lives as long as the federation."""
ROOT_DAYS = 3650


@dataclass(frozen=True)
class FederationConfig:
    """Who takes part in a federation and where its server is (``federation.toml``).

    Args:
        host: Name under which the organisations reach the server; its certificate is issued to it.
        organisations: One client each.
        runs_at_once: Further runs wait in the queue (``run_queue``).
    """

    name: str
    organisations: tuple[str, ...]
    host: str = "localhost"
    port: int = 8002
    days: int = VALID_DAYS
    runs_at_once: int = AT_ONCE

    def __post_init__(self) -> None:
        for what, given in (("federation", self.name), *(("organisation", one) for one in self.organisations)):
            if not NAME.fullmatch(given):
                raise ConfigError(f"{what} {given!r}: use lower-case letters, digits and '-', at most 40, e.g. bank-a")
        taken = {SERVER_KIT, COORDINATOR_KIT, "admin", "common"} & set(self.organisations)
        if taken:
            raise ConfigError(
                f"an organisation cannot be called {taken.pop()!r}: choose another name, this one is reserved"
            )
        if len(set(self.organisations)) != len(self.organisations):
            raise ConfigError("name every organisation once, e.g. --organisation bank-a --organisation bank-b")
        if not HOST.fullmatch(self.host):
            raise ConfigError(
                f"host {self.host!r}: give the name or address under which the organisations reach the server"
            )
        if not 0 < self.port < 65536:
            raise ConfigError(f"port must lie between 1 and 65535, got {self.port}")
        if self.days < 1:
            raise ConfigError(f"certificates must be valid for at least a day, got {self.days}")
        if not 0 < self.runs_at_once <= MOST_JOBS // 2:
            raise ConfigError(f"runs_at_once must lie between 1 and {MOST_JOBS // 2}, got {self.runs_at_once}")

    @property
    def coordinator(self) -> str:
        """Name of the party that submits runs."""
        return f"coordinator@{self.name}.isthmus"

    def participants(self) -> list[dict[str, Any]]:
        return [
            {
                "name": self.host,
                "type": "server",
                "org": _org(self.name),
                "fed_learn_port": self.port,
                "admin_port": self.port,
            },
            {"name": self.coordinator, "type": "admin", "org": _org(self.name), "role": "lead"},
        ]

    def clients(self) -> list[dict[str, Any]]:
        return [{"name": one, "type": "client", "org": _org(one)} for one in self.organisations]


def provision(
    config: FederationConfig, folder: Path, extra: Sequence[Mapping[str, Any]] = (), *, clients: bool = True
) -> dict[str, StartupKit]:
    """Make the kits of a federation in a new folder.

    Args:
        extra: Further participants, as the provisioner expects them (for tests).
        clients: Make the kits of the organisations too, with their keys: for simulations on one machine only. Between
            organisations each makes its own key (``join_files``).
    """
    require_nvflare()
    from nvflare.lighter.constants import CtxKey
    from nvflare.lighter.entity import participant_from_dict
    from nvflare.lighter.impl.cert import CertBuilder
    from nvflare.lighter.impl.signature import SignatureBuilder
    from nvflare.lighter.impl.static_file import StaticFileBuilder
    from nvflare.lighter.impl.workspace import WorkspaceBuilder
    from nvflare.lighter.provisioner import Provisioner
    from nvflare.lighter.spec import Project

    kits = folder / "kits"
    if kits.exists():
        raise ConfigError(f"{folder} already holds a federation: choose another folder, or delete it")
    try:
        for one in (folder, folder / "root"):  # a mode is not that of the parents
            one.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"cannot make {folder}: {error.strerror}; choose another folder") from None
    project = Project(name=config.name, description="", props={"api_version": 3, "gen_scripts": False})
    for participant in [*config.participants(), *(config.clients() if clients else ()), *extra]:
        project.add_participant(participant_from_dict(dict(participant)))
    builders = [
        WorkspaceBuilder(),
        StaticFileBuilder(config_folder="config", scheme="grpc"),
        CertBuilder(root_valid_days=ROOT_DAYS),
        SignatureBuilder(),
    ]
    context = Provisioner(str(folder / "root"), builders).provision(project, logger=logger)
    if context.get(CtxKey.BUILD_ERROR):
        raise ConfigError(
            f"the kits could not be made: {'; '.join(map(str, context.get(CtxKey.ERRORS, ['see the log'])))}"
        )
    made = folder / "root" / config.name / "prod_00"
    kits.mkdir(mode=0o700)
    names = {config.host: SERVER_KIT, config.coordinator: COORDINATOR_KIT}
    found = {}
    for path in sorted(made.iterdir()):
        name = names.get(path.name, path.name)
        shutil.move(path, kits / name)
        found[name] = StartupKit.read(kits / name)
        write_policy(found[name])
        for script in found[name].startup.glob("*.sh"):  # they would bypass parent_process
            script.unlink()
    made.rmdir()
    return found


def _org(name: str) -> str:
    """The name of an organisation as the provisioner allows it."""
    return name.replace("-", "_")
