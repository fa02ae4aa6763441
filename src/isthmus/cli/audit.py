"""``isthmus audit``: which attacks apply to what each party of a run received, and, with a transcript, what they
recover.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli.console import print_table, stdout
from isthmus.cli.run import Json
from isthmus.errors import DataError

if TYPE_CHECKING:
    from isthmus.federation.audit import Training

NAME = "audit"

POSSIBLE = (
    "This says what is possible for a party that looks at what it received, judged from the ledger; it recovers "
    "nothing."
)
HOW = "To run the attacks on the messages themselves, repeat the run as a simulation with --set transcript=true."


def command(run_dir: Annotated[Path, typer.Argument(help="The run folder.")], json_: Json = False) -> None:
    """List the attacks that apply to what each party of a run received; with a transcript, run them and report what
    they recover.
    """
    from isthmus.cli.recover import recover
    from isthmus.experiments.folder import RunFolder
    from isthmus.federation.audit import ATTACKS, judge
    from isthmus.federation.transcript import FOLDER

    if not (run_dir / "config.toml").is_file():
        raise DataError(f"{run_dir} is not a run folder (no config.toml); start one with `isthmus run`")
    folder = RunFolder(run_dir)
    entries = list(folder.ledger())
    if not entries and folder.result() is None:
        raise DataError(
            f"{run_dir} holds no finished round to audit: continue it first with `isthmus resume {run_dir}`"
        )
    findings = judge(entries, _training(folder))
    recovered = recover(folder) if (run_dir / FOLDER).is_dir() else None
    absent = [attack for attack in ATTACKS if attack not in {finding.attack for finding in findings}]
    if json_:
        document = {
            "findings": [finding.to_json() for finding in findings],
            "absent": absent,
            "recovered": None if recovered is None else [each.to_json() for each in recovered],
        }
        print(json.dumps(document))
        return
    console = stdout()
    rows = [(finding.attack, finding.who, finding.on, finding.verdict, finding.why) for finding in findings]
    print_table(("attack", "who", "on", "verdict", "why"), rows, f"What the parties of {run_dir} could do")
    if absent:
        console.print(f"Nothing was sent that these need: {', '.join(absent)}.")
    console.print(POSSIBLE)
    if recovered is None:
        console.print(HOW)
        return
    console.print()
    print_table(
        ("attack", "who", "on", "what came out"),
        [(r.attack, r.who, r.on, r.outcome) for r in recovered],
        "What the attacks recovered from the kept messages",
    )
    console.print("The transcript in this folder holds what the protections hide: delete it when the audit is done.")


def _training(folder: Any) -> Training:
    """The settings the audit depends on; for those a method does not have the worst case is assumed."""
    from isthmus.federation.audit import Training

    try:
        method = tomllib.loads(folder.config).get("method", {})
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"config.toml is damaged ({error}); start the run again") from None
    privacy = (folder.result() or {}).get("privacy") or {}
    return Training(
        method.get("optimizer", "sgd"),
        int(method.get("local_epochs", 1)),
        float(method.get("dp_noise", 0.0)),
        privacy.get("epsilon"),
    )
