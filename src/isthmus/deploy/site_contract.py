"""The contract of a run as one organisation derives it for itself, and in words: who will see what, how often, under
which protection, and what it costs of the budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from isthmus.data.graph_set import GraphSetData
from isthmus.deploy.approval import SHORT, keep_derived
from isthmus.deploy.audit_chain import AuditChain
from isthmus.deploy.offer import DataShape, Offer
from isthmus.deploy.policy import Policy, what_is_shown
from isthmus.deploy.roster import ANY_CLIENT, OrganisationKeys
from isthmus.deploy.run_file import resolve_run_file
from isthmus.deploy.site_settings import SiteSettings
from isthmus.errors import ConfigError
from isthmus.experiments.config import Settings
from isthmus.experiments.contract import contract_of
from isthmus.experiments.scenarios import parts_for, scenario_of, view_of
from isthmus.federation.contract import Contract, Line
from isthmus.federation.interface import View
from isthmus.federation.messages import SERVER
from isthmus.federation.script import EVALUATION
from isthmus.preparation import SCALING
from isthmus.seeds import Stream


@dataclass(frozen=True)
class DerivedContract:
    """A contract this site derived, before it takes part in anything.

    Args:
        privacy: The method's statement of privacy for these settings; None where it makes none.
    """

    settings: Settings
    contract: Contract
    privacy: Mapping[str, Any] | None

    @classmethod
    def of(cls, settings: Settings, view: View) -> DerivedContract:
        return cls(settings, contract_of(settings, view), privacy_of(settings, view))

    @classmethod
    def of_file(cls, site: SiteSettings, file: Path) -> DerivedContract:
        """From a run file that somebody sent; nothing is joined."""
        settings = resolve_run_file(file, own_code=False)
        site.check(settings)
        return cls.of(settings, site_view(site, settings))

    def keep(self, state: Path) -> None:
        """Remember that this site derived it, so that it can be approved."""
        keep_derived(state, self.contract.hash, self.contract.canonical)


def privacy_of(settings: Settings, view: View) -> Mapping[str, Any] | None:
    """The differential privacy a run has by its own settings, whatever the server says of it."""
    method, run = settings.method, settings.run
    if run.predict is not None:  # its messages have no noise; of a method without messages nothing leaves
        return {"epsilon": 0.0, "delta": 0.0, "unit": "client"} if method.predict is None else None
    if method.privacy is None:
        return None
    state = method.init(view, settings.method_config, Stream(run.seed, ("common",)))
    return method.privacy(state, settings.method_config, run.rounds, len(view.clients), run.secure_sum)


def listed_clients(site: SiteSettings, settings: Settings) -> tuple[str, ...] | None:
    """Clients of a run: those of the roster, if they are as many as the run has."""
    if site.roster is None:
        return None
    listed = OrganisationKeys.read(site.roster).keys
    return tuple(sorted(listed)) if ANY_CLIENT not in listed and len(listed) == settings.run.clients else None


def site_view(site: SiteSettings, settings: Settings) -> View:
    """What this site knows of a run by itself. Of tables only the schema is read."""
    if site.tables is None:
        return view_of(parts_for(settings, scenario_of(settings)))
    from isthmus.data.tables.schema import read_schema

    schema, clients = read_schema(site.tables.folder), listed_clients(site, settings)
    if clients is None:
        wanted = settings.run.clients
        raise ConfigError(
            f"the run is for {wanted} clients and the roster here has another number: apply every change of the roster "
            "first (`isthmus client roster`), or submit it for as many clients as the roster has"
        )
    task: Any = schema.task
    return View(clients, len(schema.columns), len(schema.labels.classes), task=task)


def full_offer(site: SiteSettings) -> Offer:
    """What this organisation takes part with, with the shape of its data; a public data set is loaded for it."""
    offered = site.offer()
    if site.tables is not None:
        from isthmus.data.tables.schema import read_schema

        schema = read_schema(site.tables.folder)
        return replace(offered, shape=DataShape(len(schema.columns), len(schema.labels.classes), schema.task))
    part = site.trial_part()
    task = "graph" if isinstance(part, GraphSetData) else "node"
    return replace(offered, shape=DataShape(part.num_features, part.num_classes, task))


# -- in words --------------------------------------------------------------------------------------


class Showing(NamedTuple):
    """One line for people: what leaves this organisation."""

    phase: str
    sender: str
    seen_by: str
    message: str
    kinds: str
    protection: str
    times: str


_SEEN = {
    "clear": "each one",
    "summed": "the total; single ones travel unmasked",
    "masked": "only the total",
}


def showings(contract: Contract) -> list[Showing]:
    """What parties of this organisation show to whom, how often at most."""
    return [
        Showing(
            line.phase,
            line.role,
            {SERVER: "server"}.get(shown.to, f"other {shown.to}s"),
            shown.message.__name__,
            ", ".join(shown.kinds),
            _SEEN[shown.protection],
            _times(contract, line),
        )
        for line, shown in what_is_shown(contract)
    ]


def _times(contract: Contract, line: Line) -> str:
    rounds = sum(each.rounds for each in contract.schedule if each.phase == line.phase)
    if line.phase == EVALUATION:
        rounds = sum(sum(map(each.evaluates, range(1, each.rounds + 1))) for each in contract.schedule)
    return f"{rounds}" if line.most == 1 else f"{rounds} x {line.most}"


def summary(derived: DerivedContract, policy: Policy, chain: AuditChain) -> list[str]:
    """The frame of a contract in sentences."""
    contract, run = derived.contract, derived.settings.run
    clients = ", ".join(contract.clients)
    masks = "behind masks" if contract.secure else "WITHOUT masks"
    lines = [
        f"{run.method} on {run.dataset}, {run.rounds} rounds, between {len(contract.clients)} clients ({clients})",
        f"sums {masks}; whatever is not listed above cannot be asked for",
    ]
    spent, _ = chain.spent
    left = "" if policy.epsilon is None else f"; {max(0.0, policy.epsilon - spent):.4g} of {policy.epsilon:g} is left"
    stated = derived.privacy
    scaled = "; sums by which features are scaled" if any(line.phase == SCALING for line in contract.lines) else ""
    if stated is None or stated.get("epsilon") is None:
        lines.append(f"no differential privacy is promised{left}")
    else:
        lines.append(
            f"epsilon {stated['epsilon']:.4g}, delta {stated['delta']:g} per {stated['unit']}{left}; not covered: "
            f"{stated['not_covered']}{scaled}"
        )
        if "relies_on" in stated:
            lines.append(f"epsilon rests on {stated['relies_on']}")
    return [*lines, f"contract {contract.hash[:SHORT]} ({contract.hash})"]
