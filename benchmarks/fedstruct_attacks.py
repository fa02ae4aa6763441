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

import numpy as np
import scipy.sparse as sp

import isthmus
from isthmus.cli.recover import Recovered, recover
from isthmus.cli.recover_nsf import matched_features
from isthmus.cli.recover_streamed import sums_told
from isthmus.cli.replay_streamed import played_again
from isthmus.experiments.config import resolve, settings_from_toml
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.scenarios import parts_for, scenario_of
from isthmus.federation.audit import LABELS, MATCHING, NEIGHBOURS, SOLVING, SUPPORT
from isthmus.privacy.determined import Equations
from isthmus.seeds import Stream

CLOSED = {"withhold_exposed": True}
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


def streamed(folder: Path, given: Mapping[str, Any], together: int) -> Iterator[tuple[str, Recovered]]:
    """One run, and who is given what of it with masks, without, and with masks to clients that pool what they see."""
    run = played(folder, "fedstruct", {**given, "protocol": "streamed"})  # masks change no value
    settings = settings_from_toml(run.config)
    parts = parts_for(settings, scenario_of(settings))
    again = played_again(run, settings, parts)
    assert again is not None
    for count in range(1, together + 1):
        yield from (("masked", Recovered(*each)) for each in sums_told(again, parts, True, together=count))
    if not given.get("forward_noise"):
        yield from (("plain", Recovered(*each)) for each in sums_told(again, parts, False))


def after_changes(given: Mapping[str, Any], share: float) -> Recovered:
    """Masked sums of the last evaluation, and of a prediction after a share of the cross edges is new: g(S) of nodes
    that were there is the same in both, so a client has the equations of both.
    """
    settings = resolve("fedstruct", {**given, "protocol": "streamed"})
    parts = parts_for(settings, scenario_of(settings))
    exposed = before = of = 0
    for data in parts.values():
        assert data.cross is not None
        out = data.cross.outgoing.numpy()
        far, own = data.cross.other.numpy()[out], data.cross.own.numpy()[out]
        ends = np.sort(np.column_stack([far, data.node_id.numpy()[own]]), axis=1)
        old = np.array([Stream(0, ("changed", int(a), int(b))).numpy().random() >= share for a, b in ends])
        nodes, column = np.unique(far, return_inverse=True)
        edges = [sp.csr_matrix((kept.astype(float), (own, column))) for kept in (old, np.ones(len(old)))]
        before += int(Equations(edges[1]).determined.sum())
        exposed += int(Equations(sp.csr_matrix(sp.vstack(edges))).determined.sum())
        of += len(nodes)
    outcome = f"read: values of {exposed} of {of} foreign neighbours; {before} from the sums of now alone"
    return Recovered(
        SOLVING, "client", f"Forward: {share:.0%} of the cross edges are new", outcome, {"exposed": exposed, "of": of}
    )


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
    parser.add_argument("--together", type=int, default=3, help="clients that pool what they see of sums of hops")
    parser.add_argument(
        "--changed", type=float, nargs="*", default=[0.01, 0.05], help="cross edges new in a prediction"
    )
    parser.add_argument("--noise", type=float, nargs="*", default=[0.5, 2.0], help="forward_noise of sums of hops")
    parser.add_argument("--only", default="", help="protocols whose name (and, but for streamed, sums) have this text")
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
    print("| protocol | sums | who | attack; on | precision | recall | what came out |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name, sums, found in cases:
        for each in found if options.only in f"{name}, {sums}" else ():
            if each.attack in SHOWN:
                print(line(name, sums, each), flush=True)
    for share in options.changed if options.only in "streamed" else ():
        print(line("streamed, prediction", "masked", after_changes(given, share)), flush=True)
    variants: list[tuple[str, dict[str, Any]]] = [("streamed", {}), ("streamed, withhold_exposed", CLOSED)]
    variants += [(f"streamed, forward_noise={noise}", {"forward_noise": noise}) for noise in options.noise]
    for number, (name, settings) in enumerate(variants):
        if options.only in name:
            changed = {**given, "structure_hops": options.hops, **settings}
            for sums, each in streamed(folder / f"streamed-{number}", changed, options.together):
                print(line(name, sums, each), flush=True)


if __name__ == "__main__":
    main()
