"""A site's own settings, ``client.toml``: the data and methods it takes part with. A run cannot change them.

Written by the organisation, read by ``isthmus client start`` and by each of its client jobs.

::

    client = "client-0"          # which client of the runs this organisation is
    state = "state"              # checkpoints and final models, beside this file
    roster = "roster.toml"       # long-term keys of all organisations, agreed outside
    identity = "identity.key"    # this organisation's own
    methods = ["fedavg"]         # optional: the only methods it takes part in
    plugins = ["my_method.py"]   # optional: files of own methods and backbones it runs, beside this file

    [tables]                     # this organisation's own tables, or
    folder = "data"              # with schema.toml
    seed = 0                     # of a split by rule

    [data]                       # for trials: a public data set; a run on other data is refused
    dataset = "cora"
    partition = "louvain"
    clients = 3
    split = "10/10/80"
    seed = 0

    [policy]                     # what it asks of a run (`isthmus.deploy.policy`); without it, nothing
    secure_sum = true
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.data.edge_weights import EdgeWeights
from isthmus.data.graph_set import GraphSetData
from isthmus.data.node_data import NodeData
from isthmus.deploy.offer import SCENARIO, Offer, check_kind
from isthmus.deploy.policy import NOTHING_ASKED, TABLE, Policy, limited
from isthmus.deploy.roster import check_client_name
from isthmus.errors import ConfigError, unknown
from isthmus.experiments.config import RunConfig, Settings
from isthmus.experiments.config_values import coerce, read_toml
from isthmus.experiments.scenarios import build
from isthmus.methods.training import TrainConfig

logger = logging.getLogger(__name__)

_TOP = ("client", "state", "roster", "identity", "methods", "plugins", "data", "tables", TABLE)
_TABLES = ("folder", "seed", "max_ids")


@dataclass(frozen=True)
class SimulatedShare:
    """Clients of a simulated site: every ``of``-th of a run's clients, beginning with ``number``."""

    number: int
    of: int


@dataclass(frozen=True)
class SiteTables:
    """``[tables]``: the organisation's own data."""

    folder: Path
    seed: int


@dataclass(frozen=True)
class SiteSettings:
    """``client.toml``, read and checked. ``asks``: it has a ``[policy]``."""

    path: Path
    client: str | None
    state: Path
    roster: Path | None
    identity: Path | None
    data: Mapping[str, Any]
    share: SimulatedShare | None = None
    tables: SiteTables | None = None
    plugins: tuple[Path, ...] = ()
    policy: Policy = NOTHING_ASKED
    asks: bool = False

    @classmethod
    def read(cls, path: Path) -> SiteSettings:
        """Read a file; an error names an unknown key or a wrong type."""
        path = path.absolute()
        if not path.exists():
            raise ConfigError(f"cannot read {path}: there is no such file; `isthmus client identity` writes one")
        raw = read_toml(path)
        for key in raw:
            if key not in _TOP:
                raise unknown(f"key in {path.name}", key, _TOP)
        tables = _tables(path, raw["tables"]) if "tables" in raw else None
        data = raw.get("data", {} if tables is not None else None)
        if not isinstance(data, dict) or (tables is not None and data):
            raise ConfigError(
                f"{path.name} needs either [tables] with the folder of the organisation's own tables, or [data] with "
                "a public data set: dataset, partition, clients, split and seed"
            )
        simulated = data.pop("simulated", None)
        share = SimulatedShare(*_pair(simulated, path)) if simulated is not None else None
        for key in data:
            if key not in SCENARIO:
                raise unknown(f"key in [data] of {path.name}", key, SCENARIO)
        if share is None and tables is None and not {"dataset", "clients"} <= data.keys():
            raise ConfigError(f"[data] of {path.name} must hold at least dataset and clients")
        types: dict[str, Any] = {key: str for key in ("dataset", "partition", "split")}
        types |= {"clients": int, "seed": int, "undirected": bool, "edge_weights": EdgeWeights}
        checked = {key: coerce(value, types[key], f"{key} in [data] of {path.name}") for key, value in data.items()}
        client = raw.get("client")
        if share is None and not isinstance(client, str):
            raise ConfigError(
                f'{path.name} does not say which client this organisation is: add e.g. client = "client-0"'
            )
        if client is not None:
            check_client_name(client, path.name)
        return cls(
            path,
            client,
            _beside(path, raw.get("state", "state")) or path.parent,
            _beside(path, raw.get("roster")),
            _beside(path, raw.get("identity")),
            checked,
            share,
            tables,
            tuple(path.parent / each for each in _texts(raw, "plugins", path)),
            _policy(raw, path),
            TABLE in raw,
        )

    def offer(self) -> Offer:
        """What this organisation takes part with; of tables only ``schema.toml`` is read."""
        schema = None
        if self.tables is not None:
            from isthmus.data.tables.schema import digests, read_schema

            schema = digests(read_schema(self.tables.folder))
        return Offer(str(self.client), self.policy, self.data, schema)

    def check(self, settings: Settings) -> None:
        """Raise unless this organisation takes part in such a run; the error names what differs."""
        check_kind(settings)
        if self.share is None:
            config = settings.method_config
            why = config.why_not_unmasked() if isinstance(config, TrainConfig) and not settings.secure else ""
            if why:
                raise ConfigError(why)
            self.offer().check_data(settings, self.path.name)

    def trial_part(self) -> NodeData | GraphSetData:
        """This organisation's part of the public data set of ``[data]``."""
        given = self.data
        parts: Mapping[str, NodeData | GraphSetData] = build(
            dataset=given["dataset"],
            partition=given.get("partition"),
            clients=given["clients"],
            split=given.get("split"),
            seed=given.get("seed", 0),
            undirected=given.get("undirected", False),
            edge_weights=given.get("edge_weights", "ignore"),
        ).parts
        (client,) = self.clients_of(sorted(parts))
        return parts[client]

    def clients_of(self, names: Sequence[str]) -> tuple[str, ...]:
        """Which of a run's clients this site hosts."""
        if self.share is not None:
            return tuple(sorted(names))[self.share.number :: self.share.of]
        if self.client not in names:
            raise unknown(f"client in {self.path.name}", str(self.client), names)
        return (str(self.client),)


def _texts(raw: Mapping[str, Any], key: str, path: Path) -> tuple[str, ...]:
    found: tuple[str, ...] = coerce(raw.get(key, ()), tuple[str, ...], f"{key} in {path.name}")
    return found


def _beside(path: Path, given: object) -> Path | None:
    if given is None:
        return None
    if not isinstance(given, str) or not given:
        raise ConfigError(f"{path.name}: state, roster and identity must be paths, got {given!r}")
    return (path.parent / given).absolute()


def _tables(path: Path, raw: object) -> SiteTables:
    if not isinstance(raw, dict):
        raise ConfigError(f'[tables] of {path.name} must be a table: [tables] and below it folder = "data"')
    for key in raw:
        if key not in _TABLES:
            raise unknown(f"key in [tables] of {path.name}", key, _TABLES)
    folder = _beside(path, raw.get("folder"))
    if folder is None:
        raise ConfigError(f'[tables] of {path.name} must name the folder of its tables: folder = "data"')
    return SiteTables(folder, coerce(raw.get("seed", 0), int, f"seed in [tables] of {path.name}"))


def _policy(raw: Mapping[str, Any], path: Path) -> Policy:
    """``[policy]``, and what older files say of it elsewhere."""
    policy = Policy.read(raw[TABLE], path.name) if TABLE in raw else NOTHING_ASKED
    methods, cap = _texts(raw, "methods", path), None
    if methods and policy.methods:
        raise ConfigError(f"methods stands twice in {path.name}: write it under [policy] only")
    if "max_ids" in raw.get("tables", {}):
        cap = coerce(raw["tables"]["max_ids"], int | None, f"max_ids in [tables] of {path.name}")
        logger.warning("%s: max_ids in [tables] is old: write link.max_ids under [policy]", path.name)
    return limited(policy, methods, cap)


def _pair(given: object, path: Path) -> tuple[int, int]:
    if (
        isinstance(given, list)
        and len(given) == 2
        and all(type(one) is int for one in given)
        and 0 <= given[0] < given[1]
    ):
        return given[0], given[1]
    raise ConfigError(f"simulated in [data] of {path.name} must be [number, sites], e.g. [0, 3]")


assert set(SCENARIO) <= set(RunConfig.__dataclass_fields__)
