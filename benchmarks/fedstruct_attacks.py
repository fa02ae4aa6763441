"""What clients and the server of every FedStruct protocol can work out, side by side.

    python benchmarks/fedstruct_attacks.py --dataset cora --clients 10 --partition random

Every row is an attack of `isthmus audit` on one run, scored against the data. Adversaries follow the protocol and look
at what they receive; "client" is every client by itself, results added up. Edges come from the first two powers, so
runs for them have two hops and one round (`--hops` for streamed and for queries, whose sums depend on them).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import isthmus
from isthmus.cli.recover import Recovered, recover
from isthmus.cli.recover_nsf import matched_features
from isthmus.cli.recover_streamed import hop_sums
from isthmus.experiments.config import settings_from_toml
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.scenarios import parts_for, scenario_of
from isthmus.federation.audit import LABELS, MATCHING, NEIGHBOURS, SOLVING, SUPPORT

SHOWN = (NEIGHBOURS, SUPPORT, SOLVING, MATCHING, LABELS)


def played(folder: Path, method: str, given: Mapping[str, Any]) -> RunFolder:
    isthmus.run(method, **given, out=folder, quiet=True)
    return RunFolder(folder)


def powers(folder: Path, given: Mapping[str, Any], protocol: str, secure: bool) -> Iterator[Recovered]:
    """Edges and the server's view of one round, then labels by matching S of a whole run."""
    short = {"protocol": protocol, "secure_sum": secure, "transcript": True, "rounds": 1, "structure_hops": 2}
    for found in recover(played(folder / "short", "fedstruct", {**given, **short})):
        if found.attack != MATCHING:
            yield found
    run = played(folder / "whole", "fedstruct", {**given, "protocol": protocol})  # masks change no value
    settings = settings_from_toml(run.config)
    yield from (
        Recovered(*each) for each in matched_features(run, settings, parts_for(settings, scenario_of(settings)))
    )


def private(folder: Path, given: Mapping[str, Any], rule: str, hops: int) -> Iterator[Recovered]:
    kept = {"queries": rule, "transcript": True, "rounds": 1, "structure_hops": hops, "protocol": "published"}
    fixed = {key: value for key, value in given.items() if key != "profile"}
    yield from recover(played(folder, "fedstruct-private", {**fixed, **kept, "prune_mode": "global"}))


def streamed(folder: Path, given: Mapping[str, Any], secure: bool, close: bool) -> Iterator[Recovered]:
    run = played(
        folder, "fedstruct", {**given, "protocol": "streamed", "withhold_exposed": close, "secure_sum": secure}
    )
    settings = settings_from_toml(run.config)
    yield from (Recovered(*each) for each in hop_sums(run, settings, parts_for(settings, scenario_of(settings))))


def line(name: str, sums: str, found: Recovered) -> str:
    numbers = found.numbers
    claimed, correct, of = (numbers.get(key) for key in ("claimed", "correct", "of"))
    precision = f"{correct / claimed:.3f}" if correct is not None and claimed else ""
    correct = next((numbers[key] for key in ("correct", "exposed", "determined", "certain") if key in numbers), None)
    recall = f"{correct / of:.4f}" if correct is not None and of else ""
    return f"| {name} | {sums} | {found.who} | {found.attack}; {found.on} | {precision} | {recall} | {found.outcome} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dataset", default="cora")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--partition", default="random")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of whole runs; 0 as in the reference profile")
    parser.add_argument("--hops", type=int, default=10)
    parser.add_argument("--split", default="10/10/80")
    parser.add_argument("--only", default="", help="protocols whose name and sums have this text")
    options = parser.parse_args()
    given = {"dataset": options.dataset, "clients": options.clients, "partition": options.partition, "seed": 0}
    given |= {"preset": "fedstruct", "profile": "reference", "eval_every": 1000, "split": options.split}
    given |= {"rounds": options.rounds} if options.rounds else {}
    folder = Path(tempfile.mkdtemp())
    cases: list[tuple[str, str, Iterator[Recovered]]] = []
    for number, (protocol, secure) in enumerate((p, s) for p in ("published", "hardened") for s in (False, True)):
        cases.append((protocol, "masked" if secure else "plain", powers(folder / str(number), given, protocol, secure)))
    for rule in ("none", "counted", "safe"):
        cases.append((f"private (G.1), queries={rule}", "plain", private(folder / rule, given, rule, options.hops)))
    for secure in (False, True):
        for close in (False, True):
            name = "streamed, withhold_exposed" if close else "streamed"
            hopped = {**given, "structure_hops": options.hops}
            attacks = streamed(folder / f"{secure}{close}", hopped, secure, close)
            cases.append((name, "masked" if secure else "plain", attacks))
    print("| protocol | sums | who | attack; on | precision | recall | what came out |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name, sums, found in cases:
        for each in found if options.only in f"{name}, {sums}" else ():
            if each.attack in SHOWN:
                print(line(name, sums, each), flush=True)


if __name__ == "__main__":
    main()
