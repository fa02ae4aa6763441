"""``isthmus demo``: five banks with transfers, the five systems between Local and Central, a report, and one bank's
predictions. Every figure it prints is computed in that run.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.api.progress import ProgressDisplay, size
from isthmus.api.several import percent_spread, summary
from isthmus.cli.console import print_table, received

NAME = "demo"
METHODS = ("local", "fedavg", "fedstruct", "fedggr", "hifgl", "fedspray", "fedstar", "central")
REFERENCES = ("local", "central")
"""Not federations: every bank alone, and all data in one place."""
GENERATED = "banks:banks=5,accounts=3000"
ROUNDS = 60


def command(
    out: Annotated[Path, typer.Option(help="Folder for the runs and the report.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(help="Seeds per method.", min=1)] = 3,
    accounts: Annotated[int, typer.Option(help="Accounts in the sample.", min=300)] = 3000,
    rounds: Annotated[int, typer.Option(help="Rounds per method.", min=1)] = ROUNDS,
) -> None:
    """Five banks look for money laundering: Local, FedAvg, the five systems and Central on the same accounts, splits
    and score; table, report, and the predictions of one bank for its accounts.
    """
    from isthmus.experiments.config import resolve
    from isthmus.experiments.run import start
    from isthmus.report import write_report

    begun = time.monotonic()
    target = _unused(out)
    target.mkdir(parents=True)  # before anything is said or run
    scenario, told = _scenario(target, accounts)
    print(told)
    results: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    for seed in range(seeds):
        for method in METHODS:
            display = ProgressDisplay(f"{method:9s} seed {seed}", lines=1)
            settings = resolve(method, {**scenario, "rounds": rounds, "preset": "general", "seed": seed})
            try:
                results[method].append(start(settings, target / f"{method}-s{seed}", [display]))
            finally:
                display.stop()
    _print_table(results)
    folders = [Path(each["run_dir"]) for method in METHODS for each in results[method]]
    report = write_report(folders, target / "report.html")
    _predict(results, target)
    print(f"\nreport: {report.resolve()}")
    print(f"time: {time.monotonic() - begun:.0f} s. Look closer: isthmus audit {target}/fedggr-s0")


def _scenario(target: Path, accounts: int) -> tuple[dict[str, Any], str]:
    """Flags of every run, and what the data are in words."""
    from isthmus.data.amlsim_sample import sampled_banks
    from isthmus.errors import DataError

    try:
        data = sampled_banks(accounts)
    except DataError:
        name = GENERATED.replace("3000", str(accounts))
        told = (
            f"Data: {name}, generated: five banks, {accounts} accounts, rings of launderers across them (AMLSim's "
            "files are not here, see docs/data.md). What it shows holds for these data only."
        )
        return {"dataset": name, "clients": 5, "split": "stratified:40/20/40", "metric": "auprc"}, told
    import torch

    file = target / "transfers.pt"
    torch.save(data, file)
    fraud, arcs = int(data.y.sum()), data.edge_index.shape[1]
    told = (
        f"Data: a sample of AMLSim ({file}): {data.num_nodes} accounts ({fraud} in laundering rings), {arcs} pairs of "
        "payer and payee.\nAMLSim names no banks: accounts are dealt to five at random, so most transfers cross. A "
        "ring is in one part of the split only."
    )
    name = str(file) if file.is_absolute() else f"./{file}"
    return {"dataset": name, "split": "group:ring:40/20/40", "metric": "auprc"}, told


def _print_table(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    local = results["local"]
    rows = []
    for method, each in results.items():
        gain = summary([one["score"] - base["score"] for one, base in zip(each, local, strict=True)])
        sent = statistics.fmean(sum(one["bytes"][key] for key in BYTES) for one in each)
        rows.append(
            [
                method,
                percent_spread(summary([one["score"] for one in each])),
                "" if method == "local" else percent_spread(gain, sign=True),
                size(sent),
                "all data, in one place" if method == "central" else learned(Path(each[0]["run_dir"])),
            ]
        )
    first = local[0]
    print()
    print_table(
        ("method", "score (%)", "gain over Local", "sent in a run", "what the server learned (disclosure sheet)"),
        rows,
        f"{first['clients']} banks, split {first['split']}, preset {first['preset']}",
    )
    spread = f"± over {len(local)} seeds" if len(local) > 1 else "one seed, spread unknown"
    print(
        f"score: {first['score_rule']}; {spread}, gain paired by seed. Local (each bank alone) and "
        "Central (all data in one place) are references, not federations.\nsent: setup and training, all channels, one "
        "run. FedStar is made for sets of graphs; this is its form for the nodes of one graph. FedGGR does not use the "
        "transfers between banks: it learns a graph instead."
    )


BYTES = ("setup_up", "setup_down", "up", "down", "peer", "device")


def learned(folder: Path) -> str:
    """What the server received in a run, by protection, from its disclosure sheet; scores apart."""
    rows = json.loads((folder / "disclosure.json").read_text())["rows"]
    return received(row for row in rows if row["receiver"] == "server")


def _predict(results: Mapping[str, Sequence[Mapping[str, Any]]], target: Path) -> None:
    """One bank's predictions by the federated method that validation prefers."""
    from isthmus.experiments.models import load_models, write_predictions

    federated = {method: each[0] for method, each in results.items() if method not in REFERENCES}
    method = max(federated, key=lambda name: federated[name]["val"] or 0.0)
    models = load_models(Path(federated[method]["run_dir"]))
    bank = sorted(models.clients)[0]
    found = models.predict(bank, part="test")[bank]
    file = target / f"predictions-{bank}.csv"
    write_predictions({bank: found}, file)
    suspicion = found.probability[:, 1]
    order = suspicion.argsort(descending=True)[:5].tolist()
    print(f"\nPredictions of {bank} for its {len(found)} test accounts ({file})")
    print(f"by {method}, the federated method that is best on validation, seed 0; the most suspicious five:")
    print_table(
        ("account", "suspicion", "in a ring"),
        [(str(found.id[at]), f"{float(suspicion[at]):.3f}", "yes" if int(found.label[at]) else "no") for at in order],
    )


def _unused(out: Path) -> Path:
    """``out``, numbered where it exists."""
    number, path = 1, out
    while path.exists():
        number += 1
        path = out.with_name(f"{out.name}-{number}")
    return path
