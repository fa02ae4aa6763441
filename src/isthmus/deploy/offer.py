"""An organisation's offer: with which client, data and methods it takes part, without any of the data.

Checked twice. Each client job checks a run against its own ``client.toml`` when the run begins; that check decides. And
so that a run nobody would accept costs no job, ``isthmus submit`` first checks it against the offers it was given:
``isthmus client offer`` prints one at the organisation, the coordinator keeps it as ``offers/<organisation>.toml``::

    client = "bank-a"

    [policy]                     # what it asks of a run; without it, nothing
    secure_sum = true

    [schema]                     # of own tables, a hash of every table and feature; or
    "feature balance" = "5d1c..."

    [data]                       # the public data set of a trial
    dataset = "cora"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w

from isthmus.data.graphscenario import task_of
from isthmus.data.own_dataset import SITE_TABLES
from isthmus.deploy.policy import TABLE, Policy
from isthmus.deploy.roster import check_client_name
from isthmus.errors import ConfigError
from isthmus.experiments.config import RunConfig, Settings
from isthmus.experiments.config_values import read_toml
from isthmus.experiments.contract import contract_of
from isthmus.experiments.scenarios import DEFAULTS
from isthmus.federation.contract import Contract
from isthmus.federation.interface import View

SCENARIO = ("dataset", "partition", "clients", "split", "seed", "undirected", "edge_weights")
_DEFAULTS: dict[str, Any] = {
    "dataset": None,
    "partition": DEFAULTS["node"][0],
    "clients": None,
    "split": DEFAULTS["node"][1],
    "seed": 0,
    "undirected": False,
    "edge_weights": "ignore",
}


@dataclass(frozen=True)
class DataShape:
    """What the server is told of a client's data when a run begins, without the number of samples."""

    features: int
    classes: int
    task: str

    @classmethod
    def read(cls, raw: Mapping[str, Any], path: Path) -> DataShape:
        try:
            return cls(int(raw["features"]), int(raw["classes"]), str(raw["task"]))
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{path} is not an offer: ask for the output of `isthmus client offer` again") from None


@dataclass(frozen=True)
class Offer:
    """What one organisation takes part with.

    Args:
        policy: What it asks of a run. Budgets are checked by the site alone: only it knows what is spent.
        data: The scenario of a public data set; empty with own tables.
        schema: Hashes of the schema of own tables (:func:`~isthmus.data.tables.schema.digests`); None without.
        shape: Of its data, which the contract of a run may depend on; None where not known.
    """

    client: str
    policy: Policy
    data: Mapping[str, Any]
    schema: Mapping[str, str] | None = None
    shape: DataShape | None = None

    @classmethod
    def read(cls, path: Path) -> Offer:
        raw = read_toml(path, "the offer ")
        client, policy, data, schema, shape = (raw.get(key) for key in ("client", TABLE, "data", "schema", "shape"))
        if (
            isinstance(client, str)
            and isinstance(policy, dict)
            and isinstance(data if schema is None else schema, dict)
            and (shape is None or isinstance(shape, dict))
        ):
            asked = Policy.read(policy, path.name)
            return cls(client, asked, data or {}, schema, None if shape is None else DataShape.read(shape, path))
        raise ConfigError(f"{path} is not an offer: ask for the output of `isthmus client offer` again")

    def to_toml(self) -> str:
        content = {"data": dict(self.data)} if self.schema is None else {"schema": dict(self.schema)}
        shape = {} if self.shape is None else {"shape": asdict(self.shape)}
        return tomli_w.dumps({"client": self.client, TABLE: self.policy.to_table(), **shape, **content})

    def check_data(self, settings: Settings, file: str = "client.toml") -> None:
        """Raise unless such a run is about the organisation's data; the error names what differs."""
        run = settings.run
        if settings.method.pooled:
            raise ConfigError(f"{run.method} needs all data in one place: run it with `isthmus run {run.method}`")
        if self.schema is not None:
            _check_tables(run, file)
            return
        for key in SCENARIO:
            asked = getattr(run, key)
            if key in self.data and asked != self.data[key]:
                raise ConfigError(f"{key} is {self.data[key]!r} in its {file}, but {asked!r} in the run: agree on one")
            if key not in self.data and asked != _DEFAULTS[key]:
                raise ConfigError(f"{key} is {asked!r} in the run, but its {file} does not give it: agree on one")


def check_kind(settings: Settings) -> None:
    """Raise if a run is of a kind that organisations take no part in, whatever their policy."""
    run = settings.run
    if settings.method.script is None:
        raise ConfigError(
            f"{run.method} declares no script, so nobody could refuse what is not agreed: its author adds script= to "
            "its Method"
        )
    if run.transcript:
        raise ConfigError("transcript=true keeps what protections hide, which is for simulations: leave it out")


def _check_tables(run: RunConfig, file: str) -> None:
    if run.dataset != SITE_TABLES:
        raise ConfigError(
            f"dataset is {run.dataset!r} in the run, but {file} has [tables]: write dataset = "
            f'"{SITE_TABLES}" in the run, or agree on a trial with [data]'
        )
    if run.link == "plain":
        raise ConfigError("link=plain compares edges in the clear, which is for one process: leave it out")


def check_offers(offers: Mapping[str, Offer], settings: Settings) -> None:
    """Raise unless every organisation whose offer is known takes part in such a run; the error names all that do
    not.
    """
    refusals = []
    contract = offered_contract(offers, settings)
    for organisation, offer in offers.items():
        try:
            offer.check_data(settings)
            offer.policy.check(settings, contract)
        except ConfigError as error:
            refusals.append(f"{organisation}: {error}")
    if refusals:
        raise ConfigError(
            f"{'; '.join(refusals)} (an organisation that has changed its client.toml must send a new offer)"
        )
    owners_of({organisation: (offer.client,) for organisation, offer in offers.items()})
    check_schemas({organisation: offer.schema or {} for organisation, offer in offers.items()})


def offered_contract(offers: Mapping[str, Offer], settings: Settings) -> Contract:
    """The contract of a run between these organisations, for their policies. Names and shapes that are not known yet
    are made up: only its hash depends on them (:func:`contract_hash`).
    """
    check_kind(settings)
    names = sorted({offer.client for offer in offers.values()})
    missing = max(0, int(settings.run.clients or 0) - len(names))
    clients = (*names, *(f"client-{number}?" for number in range(missing)))
    shapes = {offer.shape for offer in offers.values()}
    known = shapes.pop() if len(shapes) == 1 else None
    task: Any = known.task if known is not None else task_of(settings.run.dataset)
    if known is None:
        return contract_of(settings, View(clients, 1, 2, task=task, alike=False))
    return contract_of(settings, View(clients, known.features, known.classes, task=task))


def contract_hash(offers: Mapping[str, Offer], settings: Settings) -> str | None:
    """The hash every site will derive, where all have sent an offer that says enough."""
    if len(offers) != settings.run.clients or any(offer.shape is None for offer in offers.values()):
        return None
    return offered_contract(offers, settings).hash


def owners_of(clients: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The organisation of every client, from the clients of every organisation; raises if two claim the same."""
    owners: dict[str, str] = {}
    for organisation, names in clients.items():
        for client in names:
            check_client_name(client, organisation)
            if client in owners:
                raise ConfigError(
                    f"{owners[client]} and {organisation} both say they are {client}: one of them must change its "
                    "client.toml"
                )
            owners[client] = organisation
    return owners


def check_schemas(schemas: Mapping[str, Mapping[str, str]]) -> None:
    """Raise if two organisations describe their tables differently; the error names tables and features."""
    items = iter(schemas.items())
    first, reference = next(items, ("", {}))
    for other, own in items:
        different = [name for name in sorted(own.keys() | reference.keys()) if own.get(name) != reference.get(name)]
        if different:
            raise ConfigError(
                f"{other} and {first} have different schemas ({', '.join(different)}): all need the same schema.toml"
            )
