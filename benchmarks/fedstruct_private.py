"""What FedStruct's private variant (appendix G.1) costs and what it stops, beside the published protocol.

    python benchmarks/fedstruct_private.py --dataset cora --clients 10 --rounds 40

Adversaries are honest but curious. *Rows of S*: all clients but the target together solve the answered queries for
single rows (`isthmus.privacy.attacks.nsf.rows_from_queries`). *Labels by matching*: one client gives every training
node of the others the label of its own training node with the most similar row of S; in the private variant nobody
holds a foreign row, so there is nothing to match.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import scipy.sparse as sp

from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.experiments.scenarios import scenario_of
from isthmus.methods.fedstruct import block_of
from isthmus.privacy.attacks.nsf import labels_by_matching, rows_from_queries, score_labels


def states_of(run: SimulatedRun) -> dict[str, Any]:
    return {client: run.engine.party(client).client.state for client in run.engine.parties("client")}


def solved_rows(run: SimulatedRun) -> tuple[int, int]:
    """Rows that are recovered exactly, of all."""
    found = total = 0
    for state in states_of(run).values():
        asked = np.vstack(
            [
                sp.csr_matrix(block_of(queries)).toarray()[state.answered[client].numpy()]
                for client, queries in state.asked.items()
            ]
        )
        truth = state.own_s.double().numpy()
        solved = rows_from_queries(asked, asked.astype(np.float64) @ truth)
        found += solved.score(truth, "all others", tolerance=1e-4).correct
        total += len(truth)
    return found, total


def matched_labels(run: SimulatedRun, parts: Any) -> float:
    """Share of right labels, over all clients as adversaries."""
    everyone, right, claimed = states_of(run), 0, 0
    nsf = run.loop.state.nsf.numpy()  # type: ignore[attr-defined] -- the server's: every client is sent it
    for client, data in parts.items():
        others = [name for name in parts if name != client]
        if not bool(data.train.any()):
            continue
        guessed = labels_by_matching(
            nsf[everyone[client].columns.numpy()[data.train.numpy()]],
            data.y[data.train].numpy(),
            np.vstack([nsf[everyone[name].columns.numpy()[parts[name].train.numpy()]] for name in others]),
        )
        truth = np.concatenate([parts[name].y[parts[name].train].numpy() for name in others])
        score = score_labels(guessed, truth, client)
        right, claimed = right + score.correct, claimed + score.claimed
    return right / claimed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dataset", default="cora")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--hops", type=int, default=10)
    options = parser.parse_args()
    given = {"dataset": options.dataset, "clients": options.clients, "partition": "random", "rounds": options.rounds}
    given |= {"profile": "paper", "form": "direct", "protocol": "published", "prune_mode": "global"}
    given |= {"eval_every": options.rounds, "structure_hops": options.hops}
    print("| variant | test | queries refused | rows of S recovered | labels by matching |")
    print("|---|---|---|---|---|")
    base = resolve("fedstruct", given)
    scenario = scenario_of(base)
    run = SimulatedRun(base, scenario)
    run.loop.play()
    classes = scenario.whole.num_classes
    told = f"{matched_labels(run, scenario.parts):.2f} ({1 / classes:.2f} by chance)"
    print(
        f"| published protocol | {run.loop.lines[-1]['test']:.4f} | | all: everybody is sent S | {told} |", flush=True
    )
    for rule in ("none", "counted", "safe"):
        run = SimulatedRun(resolve("fedstruct-private", {**given, "queries": rule}), scenario)
        run.loop.play()
        state: Any = run.loop.state
        found, total = solved_rows(run)
        print(
            f"| private, queries={rule} | {run.loop.lines[-1]['test']:.4f} | {state.refused} of {state.asked} | "
            f"{found} of {total} | none: no foreign row |",
            flush=True,
        )


if __name__ == "__main__":
    main()
