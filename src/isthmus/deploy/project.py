"""Make a federation: a root certificate and a kit for each party, by the provisioner of NVIDIA FLARE, offline.

``FOLDER/kits/<name>`` goes to its party, over a channel the parties trust. ``FOLDER/root`` holds the root key: who has
it can make a kit in anybody's name, so it belongs offline, with somebody who does not run the server.
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
from isthmus.deploy.credentials import Kit
from isthmus.errors import ConfigError

logger = logging.getLogger(__name__)

SERVER_KIT, COORDINATOR_KIT = "server", "coordinator"
NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,62}[A-Za-z0-9])?")
VALID_DAYS = 360


@dataclass(frozen=True)
class Project:
    """A federation to be.

    Args:
        host: Name under which the organisations reach the server; its certificate is made out to it.
        organisations: One client each.
    """

    name: str
    organisations: tuple[str, ...]
    host: str = "localhost"
    port: int = 8002
    days: int = VALID_DAYS

    def __post_init__(self) -> None:
        for what, given in (("project", self.name), *(("organisation", one) for one in self.organisations)):
            if not NAME.fullmatch(given):
                raise ConfigError(f"{what} {given!r}: use lower-case letters, digits and '-', at most 40, e.g. bank-a")
        taken = {SERVER_KIT, COORDINATOR_KIT, "admin", "common"} & set(self.organisations)
        if taken:
            raise ConfigError(f"an organisation cannot be called {taken.pop()!r}: that name is taken")
        if len(set(self.organisations)) != len(self.organisations) or not self.organisations:
            raise ConfigError("name every organisation once, e.g. --organisation bank-a --organisation bank-b")
        if not HOST.fullmatch(self.host):
            raise ConfigError(
                f"host {self.host!r}: give the name or address under which the organisations reach the server"
            )
        if not 0 < self.port < 65536:
            raise ConfigError(f"port must lie between 1 and 65535, got {self.port}")
        if self.days < 1:
            raise ConfigError(f"certificates must be valid for at least a day, got {self.days}")

    @property
    def coordinator(self) -> str:
        """Who submits runs."""
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
            *({"name": one, "type": "client", "org": _org(one)} for one in self.organisations),
            {"name": self.coordinator, "type": "admin", "org": _org(self.name), "role": "lead"},
        ]


def make_kits(project: Project, folder: Path, extra: Sequence[Mapping[str, Any]] = ()) -> dict[str, Kit]:
    """Make the kits of a project in a new folder. ``extra``: further participants, as the provisioner takes them (for
    tests).
    """
    require_nvflare()
    from nvflare.lighter.constants import CtxKey
    from nvflare.lighter.entity import participant_from_dict
    from nvflare.lighter.impl.cert import CertBuilder
    from nvflare.lighter.impl.signature import SignatureBuilder
    from nvflare.lighter.impl.static_file import StaticFileBuilder
    from nvflare.lighter.impl.workspace import WorkspaceBuilder
    from nvflare.lighter.provisioner import Provisioner
    from nvflare.lighter.spec import Project as Provisioned

    kits = folder / "kits"
    if kits.exists():
        raise ConfigError(f"{folder} already holds a federation: choose another folder, or delete it")
    try:
        (folder / "root").mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"cannot make {folder}: {error.strerror}; choose another folder") from None
    plan = Provisioned(name=project.name, description="", props={"api_version": 3, "gen_scripts": False})
    for participant in [*project.participants(), *extra]:
        plan.add_participant(participant_from_dict(dict(participant)))
    builders = [
        WorkspaceBuilder(),
        StaticFileBuilder(config_folder="config", scheme="grpc"),
        CertBuilder(root_valid_days=project.days),
        SignatureBuilder(),
    ]
    context = Provisioner(str(folder / "root"), builders).provision(plan, logger=logger)
    if context.get(CtxKey.BUILD_ERROR):
        raise ConfigError(
            f"the kits could not be made: {'; '.join(map(str, context.get(CtxKey.ERRORS, ['see the log'])))}"
        )
    made = folder / "root" / project.name / "prod_00"
    kits.mkdir(mode=0o700)
    names = {project.host: SERVER_KIT, project.coordinator: COORDINATOR_KIT}
    found = {}
    for path in sorted(made.iterdir()):
        name = names.get(path.name, path.name)
        shutil.move(path, kits / name)
        found[name] = Kit.read(kits / name)
        found[name].close_down()
        for script in found[name].startup.glob("*.sh"):  # they would start a site without our launcher
            script.unlink()
    made.rmdir()
    return found


def _org(name: str) -> str:
    """A name as the provisioner wants it of an organisation."""
    return name.replace("-", "_")
