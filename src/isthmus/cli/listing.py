"""``isthmus methods``: what there is, and the settings of one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from isthmus.cli.console import print_table
from isthmus.cli.known import known
from isthmus.cli.options import Plugin
from isthmus.errors import ConfigError, unknown


def methods(
    name: Annotated[str | None, typer.Argument(help="Show the settings of this method instead.")] = None,
    plugin: Plugin = None,
    script: Annotated[
        bool, typer.Option("--script", help="Run the method briefly and print the script of its calls.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the methods, or the settings of one with their defaults and meaning; with --script which of its handlers
    are called in each phase, for its author to paste.
    """
    found = None if plugin else known()
    if name is None and found is not None and not script:
        _list(found["methods"], json_)
        return
    if (
        name is not None
        and found is not None
        and not name.partition(":")[0].endswith(".py")
        and name not in found["methods"]
    ):
        raise unknown("method", name, found["methods"])
    from isthmus.methods.own_parts import find_method, load_all

    load_all(plugin or ())
    name = find_method(name)[0] if name is not None else None
    if script:
        if name is None:
            raise ConfigError("--script prints the script of one method: name it, e.g. isthmus methods --script fedavg")
        from isthmus.testing import recorded_script

        print(recorded_script(name), end="")
        return
    if name is not None:
        _settings(name, json_)
        return
    from isthmus.methods.registry import all_methods

    _list({each.name: vars(each) for each in all_methods()}, json_)


def _list(methods: Mapping[str, Mapping[str, Any]], json_: bool) -> None:
    fields = ("summary", "preset", "reference")
    found = [{"name": name} | {field: facts[field] for field in fields} for name, facts in methods.items()]
    if json_:
        print(json.dumps({"methods": found}))
        return
    rows = [(str(row["name"]), str(row["summary"]), row["preset"] or "by task", str(row["reference"])) for row in found]
    print_table(("method", "what it does", "preset", "reference"), rows)


def _settings(method: str, json_: bool) -> None:
    from isthmus.experiments.describe import settings_of

    found = settings_of(method)
    if json_:
        print(json.dumps({"method": method, "settings": [asdict(each) for each in found]}))
        return
    for group, title in (("method", f"Settings of {method} (--set key=value)"), ("run", "Settings of every run")):
        print_table(
            ("key", "default", "meaning"),
            [(s.key, _default(s.default), s.meaning) for s in found if s.group == group],
            title,
        )
        print()
    print(
        "Defaults are those without a preset; the paper's preset sets some by data set, and config.toml of a run holds "
        "what it used."
    )


def _default(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
