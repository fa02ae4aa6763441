"""``isthmus audit``: which attacks apply to what each party of a run received, and, with a transcript, what they
recover.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli.console import print_table, stdout
from isthmus.cli.options import Json
from isthmus.errors import DataError, check_run_folder

if TYPE_CHECKING:
    from isthmus.cli.recover import Recovered
    from isthmus.experiments.folder import RunFolder
    from isthmus.federation.audit import Finding, Training

NAME = "audit"

POSSIBLE = (
    "This says what is possible for a party that follows the protocol and looks at all it received, judged from the "
    "ledger; it recovers nothing. Stopped: an attack was run and failed. Not tried: no attack was run, and nothing is "
    "claimed."
)
HOW = "To run the attacks on the messages themselves, repeat the run as a simulation with --set transcript=true."


def command(
    run_dir: Annotated[Path, typer.Argument(help="The run folder.")],
    beside: Annotated[
        list[Path] | None,
        typer.Option(help="Another run of the same parties, whose totals count too; repeatable."),
    ] = None,
    json_: Json = False,
) -> None:
    """List the attacks that apply to what each party of a run received; with a transcript, run them and report what
    they recover.
    """
    for path in (run_dir, *(beside or ())):
        check_run_folder(path)
    from isthmus.cli.recover import recover
    from isthmus.federation.audit import ATTACKS, judge
    from isthmus.federation.transcript import FOLDER

    folder = _run(run_dir)
    entries = list(folder.ledger())
    if not entries and folder.result() is None:
        raise DataError(
            f"{run_dir} holds no finished round to audit: continue it first with `isthmus resume {run_dir}`"
        )
    others = [entry for other in beside or () for entry in _run(other).ledger()]
    recovered = recover(folder) if (run_dir / FOLDER).is_dir() else None
    findings = tried(judge(entries, _training(folder), others), recovered or [])
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


def _run(run_dir: Path) -> RunFolder:
    from isthmus.experiments.folder import RunFolder

    check_run_folder(run_dir)
    return RunFolder(run_dir)


def tried(findings: Sequence[Finding], recovered: Sequence[Recovered]) -> list[Finding]:
    """Findings with the outcome of attacks that were run on the messages; what was not tried stays so."""
    from dataclasses import replace

    outcomes: dict[tuple[str, str], list[Recovered]] = {}
    for each in recovered:
        outcomes.setdefault((each.attack, each.who), []).append(each)
    judged = []
    for finding in findings:
        ran = outcomes.get((finding.attack, finding.who), [])
        if finding.verdict == "not tried" and ran:
            told = "; ".join(f"{each.on}: {each.outcome}" for each in ran)
            verdict: Any = "stopped" if all(each.stopped for each in ran) else "possible"
            finding = replace(finding, verdict=verdict, why=f"{finding.why}; {told}")
        judged.append(finding)
    return judged


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
