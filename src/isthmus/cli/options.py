"""Options that several commands have: each is described once, and a command takes them as one object."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from isthmus.cli.known import check_run
from isthmus.experiments.config_values import parse_override

Dataset = Annotated[str | None, typer.Option(help="Data set; isthmus datasets lists them.")]
Partition = Annotated[
    str | None, typer.Option(help="How the data are divided between clients; isthmus partitions lists them.")
]
Clients = Annotated[int | None, typer.Option(help="Number of clients.")]
Split = Annotated[
    str | None,
    typer.Option(help="Train/validation/test in percent, e.g. 10/10/80, or a rule."),
]
Preset = Annotated[str | None, typer.Option(help="Settings to start from: general, or a paper's, e.g. fedstruct.")]
Profile = Annotated[
    str | None, typer.Option(help="paper = as published, with corrections; reference = as the published code did.")
]
Metric = Annotated[str | None, typer.Option(help="Score to report and to pick a round by, e.g. auprc.")]
Config = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Any setting, as key=value; may be repeated.")]
Plugin = Annotated[
    list[str] | None,
    typer.Option("--plugin", help="Own code to load first: ./file.py or an importable module; may be repeated."),
]
Jobs = Annotated[int | None, typer.Option(help="Runs at a time (default: one per core).", min=1)]
TableFile = Annotated[
    Path | None, typer.Option("--table", help="Also write the table into this file: .csv, .md or .tex.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


@dataclass(frozen=True)
class RunOptions:
    """What is run: the scenario and the settings."""

    dataset: Dataset = None
    partition: Partition = None
    clients: Clients = None
    split: Split = None
    rounds: Annotated[int | None, typer.Option(help="Rounds of the main phase.")] = None
    preset: Preset = None
    profile: Profile = None
    metric: Metric = None
    engine: Annotated[str | None, typer.Option("--engine", help="Where parties run: local, ray or nvflare.")] = None
    config: Config = None
    set_: Set = None
    plugin: Plugin = None

    @property
    def overrides(self) -> dict[str, Any]:
        """What ``--set`` gives."""
        return dict(parse_override(text) for text in self.set_ or ())

    @property
    def flags(self) -> dict[str, Any]:
        """What the other options give, as `isthmus.experiments.config.resolve` takes it."""
        names = ("dataset", "partition", "clients", "split", "rounds", "preset", "profile", "metric", "engine")
        return {name: getattr(self, name) for name in names} | {"plugins": self.plugin}

    def check(self, methods: Sequence[str], keys: Collection[str] = ()) -> None:
        """Raise what can be told to be wrong before anything is imported; ``keys``: further settings that are given."""
        check_run(methods, self.dataset, [*self.overrides, *keys], self.config, self.plugin, self.preset)


@dataclass(frozen=True)
class BatchOptions(RunOptions):
    """What is run, and how many of it, of commands that run more than one."""

    runs: Annotated[int, typer.Option(help="Number of seeds; all methods use the same.", min=1)] = 3
    jobs: Jobs = None
    out: Annotated[
        Path | None, typer.Option(help="Folder of runs and report; finished runs in it are used, begun ones continued.")
    ] = None
    table: TableFile = None
    json_: Json = False


def takes(
    kind: type[RunOptions], *, without: Collection[str] = (), **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command with a parameter ``options`` of this kind gets an option on the command line for every field of it.

    Args:
        without: Fields that are no options of this command.
        defaults: Of fields that have another one in this command.
    """
    hints = get_type_hints(kind, include_extras=True)
    shared = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(field.name, field.default),
            annotation=hints[field.name],
        )
        for field in fields(kind)
        if field.name not in without
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def flat(**given: Any) -> None:
            options = kind(**{one.name: given.pop(one.name) for one in shared})
            command(options=options, **given)

        own = inspect.signature(command, eval_str=True)
        parameters = [
            each
            for one in own.parameters.values()
            for each in (shared if one.name == "options" else [one.replace(kind=inspect.Parameter.KEYWORD_ONLY)])
        ]
        flat.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return flat

    return decorate
