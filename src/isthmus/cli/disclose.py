"""``isthmus disclose``: what each party of a method receives, before anything runs."""

from __future__ import annotations

from typing import Annotated

import typer

from isthmus.cli.console import print_table, stdout
from isthmus.cli.known import check_run
from isthmus.cli.options import Plugin, Preset, Profile
from isthmus.experiments.config_values import parse_override

NAME = "disclose"


def command(
    method: Annotated[str, typer.Argument(help="Method; isthmus methods lists them.")],
    metric: Annotated[
        str, typer.Option(help="Score of the run; others than accuracy need more from the clients.")
    ] = "accuracy",
    secure_sum: Annotated[bool, typer.Option("--secure-sum", help="As with --set secure_sum=true.")] = False,
    dataset: Annotated[
        str,
        typer.Option(
            help="Data set. With own tables (a folder, or 'tables' at sites) the sheet includes their preparation."
        ),
    ] = "csbm",
    preset: Preset = None,
    profile: Profile = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Setting of the method as key=value, e.g. protocol=published.")
    ] = None,
    plugin: Plugin = None,
) -> None:
    """Print a method's disclosure sheet: which kinds of content each party receives, and how they are protected, with
    the settings a run would have.
    """
    overrides = dict(map(parse_override, set_ or ()))
    check_run([method], dataset, overrides, None, plugin, preset)
    from isthmus.experiments.config import resolve
    from isthmus.experiments.disclosure import sheet_of_settings
    from isthmus.federation.ledger import PROTECTIONS
    from isthmus.methods.registry import get_method
    from isthmus.preparation import LINKING
    from isthmus.preparation.messages import ListedEdges

    flags = {
        "dataset": dataset,
        "metric": metric,
        "preset": preset,
        "profile": profile,
        "secure_sum": secure_sum or None,
        "plugins": plugin,
    }
    settings = resolve(method, flags, overrides)
    entry = get_method(settings.run.method)
    lines = sheet_of_settings(settings)
    rows = [
        (line.phase, line.sender, line.receiver, line.message.__name__, ", ".join(line.kinds), line.protection)
        for line in lines
    ]
    print_table(
        ("phase", "from", "to", "message", "kinds of content", "protection"),
        rows,
        f"What leaves a party in {entry.name}",
    )
    console = stdout()
    for name in sorted({line.protection for line in lines}):
        console.print(f"{name}: {PROTECTIONS[name]}")
    if remains := getattr(settings.method_config, "remains", lambda secure: "")(settings.secure):
        console.print(f"What was seen to remain: {remains}")
    if entry.pooled:
        console.print("This method pools all data in one place before it starts: a reference, not a federation.")
    elif any(line.phase == LINKING for line in lines):
        clear = any(line.message is ListedEdges for line in lines)
        console.print(
            "In one process owners compare their edges in the clear (link=plain); between organisations, and with "
            "--set link=psi, each pair of owners learns only the edges both of them list, and the server learns none."
            if clear
            else "Before the first round each pair of owners learns the edges both list; the server learns none."
        )
    elif not entry.cross_edges:
        console.print(
            "Cross edges are not given to this method. No message holds features, edges or labels as such; what can "
            "still be "
            "worked out from those above is what isthmus audit judges and measures."
        )
