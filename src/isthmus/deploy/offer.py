"""An organisation's offer: with which client, data and methods it takes part, without any of the data.

Checked twice. Each client job checks a run against its own ``client.toml`` when the run begins; that check decides. And
so that a run nobody would accept costs no job, ``isthmus submit`` first checks it against the offers it was given:
``isthmus client offer`` prints one at the organisation, the coordinator keeps it as ``offers/<organisation>.toml``::

    client = "bank-a"
    methods = ["fedavg"]         # none: any

    [schema]                     # of own tables, a hash of every table and feature; or
    "feature balance" = "5d1c..."

    [data]                       # the public data set of a trial
    dataset = "cora"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from isthmus.data.own_dataset import SITE_TABLES
from isthmus.errors import ConfigError
from isthmus.experiments.config import RunConfig, Settings
from isthmus.experiments.config_values import read_toml
from isthmus.experiments.scenarios import DEFAULTS

SCENARIO = ("dataset", "partition", "clients", "split", "seed", "undirected")
_DEFAULTS: dict[str, Any] = {
    "dataset": None,
    "partition": DEFAULTS["node"][0],
    "clients": None,
    "split": DEFAULTS["node"][1],
    "seed": 0,
    "undirected": False,
}


@dataclass(frozen=True)
class Offer:
    """What one organisation takes part with.

    Args:
        data: The scenario of a public data set; empty with own tables.
        schema: Hashes of the schema of own tables (:func:`~isthmus.data.tables.schema.digests`); None without.
    """

    client: str
    methods: tuple[str, ...]
    data: Mapping[str, Any]
    schema: Mapping[str, str] | None = None

    @classmethod
    def read(cls, path: Path) -> Offer:
        raw = read_toml(path, "the offer ")
        client, methods, data, schema = (raw.get(key) for key in ("client", "methods", "data", "schema"))
        if (
            isinstance(client, str)
            and isinstance(methods, list)
            and all(isinstance(name, str) for name in methods)
            and isinstance(data if schema is None else schema, dict)
        ):
            return cls(client, tuple(methods), data or {}, schema)
        raise ConfigError(f"{path} is not an offer: ask for the output of `isthmus client offer` again")

    def to_toml(self) -> str:
        content = {"data": dict(self.data)} if self.schema is None else {"schema": dict(self.schema)}
        return tomli_w.dumps({"client": self.client, "methods": list(self.methods), **content})

    def check(self, settings: Settings, file: str = "client.toml") -> None:
        """Raise unless the organisation takes part in such a run; the error names what differs."""
        run = settings.run
        check_method(self.methods, settings, file)
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


def check_method(methods: Sequence[str], settings: Settings, file: str) -> None:
    """Raise unless the method and what is recorded of it are allowed."""
    run = settings.run
    if methods and run.method not in methods:
        raise ConfigError(f"method {run.method!r} is not allowed by {file} ({', '.join(methods)}): agree on one")
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
    for organisation, offer in offers.items():
        try:
            offer.check(settings)
        except ConfigError as error:
            refusals.append(f"{organisation}: {error}")
    if refusals:
        raise ConfigError(
            f"{'; '.join(refusals)} (an organisation that has changed its client.toml must send a new offer)"
        )
    owners_of({organisation: (offer.client,) for organisation, offer in offers.items()})
    check_schemas({organisation: offer.schema or {} for organisation, offer in offers.items()})


def owners_of(clients: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The organisation of every client, from the clients of every organisation; raises if two claim the same."""
    owners: dict[str, str] = {}
    for organisation, names in clients.items():
        for client in names:
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
