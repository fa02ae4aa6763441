"""``isthmus client start``: checks an organisation's kit, keys and data before it connects, then starts its client.

Runs at the organisation, in the process of the command, which afterwards supervises the client's parent process.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from isthmus.data.graph_set import GraphSetData
from isthmus.deploy import require_nvflare
from isthmus.deploy.job_template import AT_ONCE, SITE_SETTINGS
from isthmus.deploy.keeper import Order
from isthmus.deploy.kit_policy import write_policy
from isthmus.deploy.processes import hold
from isthmus.deploy.roster import ANY_CLIENT, OrganisationKeys, read_identity
from isthmus.deploy.site_settings import SiteSettings
from isthmus.deploy.startup_kit import StartupKit
from isthmus.deploy.state_folder import open_state
from isthmus.errors import ConfigError, unknown

logger = logging.getLogger(__name__)

CLIENT_PID = "client.pid"


@dataclass(frozen=True)
class ClientSetup:
    """A kit and settings that match. ``summary`` says in a few lines what was found."""

    kit: StartupKit
    settings: SiteSettings
    summary: tuple[str, ...]

    @classmethod
    def check(cls, kit: Path, config: Path) -> ClientSetup:
        require_nvflare()
        found, settings = StartupKit.read(kit), SiteSettings.read(config)
        if found.kind != "client":
            owner = "server" if found.kind == "server" else "coordinator"
            raise ConfigError(f"{kit} is the kit of the {owner}: use that of your organisation")
        found.warn_about_certificates()
        if not settings.asks:
            logger.warning(
                "%s has no [policy], so nothing is asked of a run: docs/policy.md says what to write", config.name
            )
        return cls(found, settings, (*_check_keys(found, settings), *_check_data(settings)))

    def order(self, metrics: int | None = None, at_once: int = 4) -> Order:
        """What the keeper of this site runs: it connects to the server and stays connected.

        Args:
            at_once: Most jobs that run at the same time.
        """
        if at_once < 1:
            raise ConfigError(f"--at-once must be at least 1, got {at_once}: a site that wants no runs is stopped")
        if (pid := hold(self.kit.path / CLIENT_PID)) is not None:
            raise ConfigError(f"{self.kit.name} takes part already (process {pid}): end that one first")
        write_policy(self.kit)
        open_state(self.settings.state)
        environment = {SITE_SETTINGS: str(self.settings.path), AT_ONCE: str(at_once)}
        log = self.kit.path / "isthmus.log"
        return Order(str(self.kit.path), environment, str(log), str(self.settings.state), metrics)


def _check_keys(kit: StartupKit, settings: SiteSettings) -> list[str]:
    if settings.share is not None:
        return []
    if settings.identity is None or settings.roster is None:
        raise ConfigError(
            f"{settings.path.name} must name identity and roster, or the server could read mail and masks: "
            "make them with `isthmus client identity`"
        )
    identity, roster = read_identity(settings.identity), OrganisationKeys.read(settings.roster)
    if ANY_CLIENT in roster.keys:
        raise ConfigError(
            f"{settings.roster.name} gives one key to all clients, which is for simulations: list every organisation"
        )
    client, file = str(settings.client), settings.roster.name
    if client not in roster.keys:
        raise unknown(f"client in {file}", client, roster.keys)
    if roster.organisations[client] != kit.name:
        raise ConfigError(
            f"{file} says {client} is {roster.organisations[client]}, but this is the kit of {kit.name}: use "
            "the kit or the client that belongs to you"
        )
    if roster.keys[client] != identity.public:
        raise ConfigError(
            f"{file} holds another key of {kit.name} than {settings.identity.name}: send the others your roster lines "
            "again"
        )
    return [f"{kit.name} is {client}; the roster has {len(set(roster.organisations.values()))} organisations"]


def _check_data(settings: SiteSettings) -> list[str]:
    """Load the data once, so that a mistake shows now and not during a run."""
    if settings.share is not None:
        return []
    if settings.tables is not None:
        from isthmus.data.tables.check import summarise
        from isthmus.data.tables.owner import read_owner

        tables = read_owner(settings.tables.folder, str(settings.client), seed=settings.tables.seed)
        return [f"{name}: {value}" for name, value in summarise(tables)]
    part = settings.trial_part()
    count, what = (part.num_graphs, "graphs") if isinstance(part, GraphSetData) else (part.num_nodes, "nodes")
    return [
        f"{settings.client} holds {count} {what} of {settings.data['dataset']}, {part.num_features} features, "
        f"{part.num_classes} classes"
    ]
