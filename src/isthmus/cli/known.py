"""Names that ``isthmus`` knows, read from ``known.json`` beside this file: lists, misspelt names and wrong paths are
answered without torch, whose import takes seconds.

    python -m isthmus.cli.known      writes the file anew, after a method, data set, partition or setting has changed

Where other packages add things, or a module is here that the file does not know, nothing is read from it: what is
installed is then asked itself. The checks here raise what the run would raise later; they find the first mistake of the
common ones, not all.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from isthmus.data import store
from isthmus.errors import ConfigError, DataError, no_tables, unknown
from isthmus.experiments.config_values import read_toml
from isthmus.experiments.presets import preset_names

FILE = Path(__file__).with_name("known.json")
PACKAGES = ("methods", "data")
"""Folders in which a new file may add a name."""
GROUPS = ("isthmus.methods", "isthmus.data")
AUTO, OWN = "auto", "own"
"""Stand for a choice, not for a name of a method or a preset."""

Known = Mapping[str, Any]


def known() -> Known | None:
    """What there is; None where only the installed modules themselves can tell, or are imported anyway."""
    return None if "isthmus.methods.registry" in sys.modules else read()


@functools.cache
def read() -> Known | None:
    """What the file says; None where that may not be all."""
    try:
        found: Known = json.loads(FILE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if found["modules"] != modules() or any(entry_points(group=group) for group in GROUPS):
        return None
    return found


def modules() -> list[str]:
    """The files that may add names."""
    root = FILE.parents[1]
    found = [path for package in PACKAGES for path in (root / package).iterdir() if path.name != "__pycache__"]
    return sorted(path.relative_to(root).as_posix() for path in found)


def datasets() -> list[dict[str, Any]] | None:
    """What `isthmus.data.catalogue.list_datasets` gives."""
    if (found := known()) is None:
        return None
    where_is = {
        entry["name"]: store.where(entry["name"], [store.RawFiles(entry["name"], *place) for place in entry["places"]])
        for entry in found["datasets"]
        if entry["places"]
    }
    fields = ("name", "task", "kind", "size")
    rows = []
    for entry in found["datasets"]:
        members = entry["size"].get("data sets", ()) if entry["kind"] == "setting" else (entry["name"],)
        where = "generated" if entry["kind"] == "generator" else store.where_all(where_is[name] for name in members)
        rows.append({field: entry[field] for field in fields} | {"where": where})
    return rows


def check_run(
    methods: Sequence[str],
    dataset: str | None,
    overrides: Collection[str] = (),
    config: Path | None = None,
    plugins: Iterable[str] | None = None,
    preset: str | None = None,
) -> None:
    """Raise what can be told to be wrong before anything is imported.

    Args:
        methods: As given, also ``fedavg:lr=0.1`` or ``./file.py``.
        overrides: Keys of ``--set``.
        plugins: With own code, names may be of that code.
    """
    given = read_toml(config, "config file ") if config is not None else None
    names = [method.partition(":")[0] for method in methods]
    files = [name for name in [*names, *(plugins or ())] if name.endswith(".py")]
    for name in files:
        if not Path(name).expanduser().is_file():
            raise ConfigError(f"there is no file {name}")
    found = known()
    if found is None or files or plugins:
        return
    if strange := [name for name in names if name not in (*found["methods"], AUTO)]:
        if len(names) > 1 and (len(strange) > 1 or any(":" in method for method in methods)):
            return  # more may be wrong than one name, and a comparison tells all of it at once
        raise unknown("method", strange[0], found["methods"])
    if names and AUTO not in names:
        allowed = {key for name in names for key in found["methods"][name]["keys"]} | set(found["run keys"])
        for key in overrides:
            if key not in allowed:
                raise unknown("key", key, allowed)
    if dataset is not None:
        check_dataset(dataset)
    elif given is None and "dataset" not in overrides:
        raise ConfigError("no data set given: use --dataset NAME (isthmus datasets lists them)")
    if preset is not None and preset not in (*preset_names(), OWN):
        raise unknown("preset", preset, preset_names())


def check_dataset(dataset: str) -> None:
    """Refuse a data set that is not there."""
    path = Path(dataset).expanduser()
    if dataset.endswith(".pt"):
        if not path.exists():
            raise DataError(f"cannot read {dataset}: No such file or directory")
        return
    if "/" in dataset or "\\" in dataset:
        if not path.exists():
            raise no_tables(dataset)
        return
    found = known()
    if found is None or dataset in found["other data"] or path.is_dir():
        return
    name = dataset.partition(":")[0].lower().replace("_", "-")
    if not any(name in (entry["name"], *entry["aliases"]) for entry in found["datasets"]):
        raise unknown("data set", dataset, [entry["name"] for entry in found["datasets"]])


def collect() -> dict[str, Any]:
    """What the file has to hold, from the modules themselves."""
    from isthmus.data.catalogue import list_datasets, list_partitions, places
    from isthmus.data.datasets import NODE_SETS
    from isthmus.data.own_dataset import SITE_TABLES
    from isthmus.experiments.config import RunConfig
    from isthmus.experiments.config_values import keys_of
    from isthmus.methods.registry import all_methods

    raws = places()
    aliases = {name: entry.aliases for name, entry in NODE_SETS.items()}
    return {
        "modules": modules(),
        "methods": {
            method.name: {
                "summary": method.summary,
                "preset": method.preset,
                "reference": method.reference,
                "keys": sorted(keys_of(method.config)),
            }
            for method in all_methods()
        },
        "run keys": sorted(set(keys_of(RunConfig)) - {"method"}),
        "datasets": [
            {
                "name": entry.name,
                "task": entry.task,
                "kind": entry.kind,
                "size": dict(entry.size),
                "aliases": aliases.get(entry.name, ()),
                "places": [(raw.folder, raw.files) for raw in raws.get(entry.name, ())],
            }
            for entry in list_datasets()
        ],
        "other data": [SITE_TABLES, ".", ".."],
        "partitions": list_partitions(),
    }


def text() -> str:
    """The file as it has to be: a line per name, so that two changes seldom meet."""
    parts = []
    for key, value in collect().items():
        if isinstance(value, dict):
            lines, ends = [f"{json.dumps(name)}: {json.dumps(facts)}" for name, facts in value.items()], "{}"
        else:
            lines, ends = [json.dumps(each) for each in value], "[]"
        parts.append(f"{json.dumps(key)}: {ends[0]}\n " + ",\n ".join(lines) + f"\n{ends[1]}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
