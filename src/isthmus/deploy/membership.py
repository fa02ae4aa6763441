"""An organisation's side: everything about its kit and its settings is checked before it connects to anybody."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from isthmus.deploy import require_nvflare
from isthmus.deploy.credentials import Kit, warn_dates
from isthmus.deploy.processes import Keeper
from isthmus.deploy.roster import EVERYBODY, Organisations, read_identity
from isthmus.deploy.runtime import SITE_SETTINGS
from isthmus.deploy.settings import SiteSettings
from isthmus.errors import ConfigError, unknown
from isthmus.experiments.scenarios import build


@dataclass(frozen=True)
class Membership:
    """A kit and settings that fit together."""

    kit: Kit
    settings: SiteSettings
    lines: tuple[str, ...]

    @classmethod
    def check(cls, kit: Path, config: Path) -> Membership:
        require_nvflare()
        found, settings = Kit.read(kit), SiteSettings.read(config)
        if found.kind != "client":
            owner = "server" if found.kind == "server" else "coordinator"
            raise ConfigError(f"{kit} is the kit of the {owner}: take the one of your organisation")
        warn_dates([found])
        return cls(found, settings, (*_keys(found, settings), *_data(settings)))

    def keep(self) -> Keeper:
        """Connect, and stay connected."""
        self.kit.close_down()
        self.settings.state.mkdir(parents=True, exist_ok=True)
        return Keeper(self.kit, {SITE_SETTINGS: str(self.settings.path)}, self.kit.path / "isthmus.log").start()


def _keys(kit: Kit, settings: SiteSettings) -> list[str]:
    if settings.share is not None:
        return []
    if settings.identity is None or settings.roster is None:
        raise ConfigError(
            f"{settings.path.name} must name identity and roster, or the server could read mail and masks: "
            "make them with `isthmus client identity`"
        )
    identity, roster = read_identity(settings.identity), Organisations.read(settings.roster)
    if EVERYBODY in roster.keys:
        raise ConfigError(
            f"{settings.roster.name} gives one key to everybody, which is for simulations: list every organisation"
        )
    client, file = str(settings.client), settings.roster.name
    if client not in roster.keys:
        raise unknown(f"client in {file}", client, roster.keys)
    if roster.organisations[client] != kit.name:
        raise ConfigError(f"{file} says {client} is {roster.organisations[client]}, but this is the kit of {kit.name}")
    if roster.keys[client] != identity.public:
        raise ConfigError(
            f"{file} holds another key of {kit.name} than {settings.identity.name}: send the others your lines again"
        )
    return [f"{kit.name} is {client}; the roster has {len(set(roster.organisations.values()))} organisations"]


def _data(settings: SiteSettings) -> list[str]:
    """Load the data once, so that a mistake shows here and not in the middle of a run."""
    if settings.share is not None:
        return []
    given = settings.data
    scenario = build(
        dataset=given["dataset"],
        partition=given.get("partition"),
        clients=given["clients"],
        split=given.get("split"),
        seed=given.get("seed", 0),
        undirected=given.get("undirected", False),
    )
    (client,) = settings.clients_of(sorted(scenario.parts))
    part = scenario.parts[client]
    count = part.num_graphs if hasattr(part, "num_graphs") else part.num_nodes
    what = "graphs" if hasattr(part, "num_graphs") else "nodes"
    return [
        f"{client} holds {count} {what} of {scenario.dataset}, {part.num_features} features, {part.num_classes} classes"
    ]
