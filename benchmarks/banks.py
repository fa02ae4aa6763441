"""Whether the generated network of banks behaves like one: what training together and edges between banks are worth.

    python benchmarks/banks.py --seeds 3

Per seed a network of its own; test AUPRC at the round that validation picked. ``cut`` is one place without the edges
between banks, ``trees`` are boosted trees on the same features without any graph.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import isthmus
from isthmus.data.scenario import build_scenario
from isthmus.experiments.scenarios import owner_of

SETTINGS = {
    "preset": "fedstruct",
    "metric": "auprc",
    "selection": "best_val_acc",
    "backbone": "sage",
    "hidden": (64, 64),
    "lr": 0.01,
    "dropout": 0.2,
    "rounds": 100,
    "eval_every": 2,
}


def main() -> None:
    """Print a row per seed and the means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="banks")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    rows = [scores(options.dataset, options.first + number) for number in range(options.seeds)]
    print("seed   " + "  ".join(f"{name:>8s}" for name in rows[0]))
    for number, row in enumerate(rows):
        print(f"{options.first + number:<5d}  " + "  ".join(f"{value:8.3f}" for value in row.values()))
    print("mean   " + "  ".join(f"{statistics.mean(row[name] for row in rows):8.3f}" for name in rows[0]))


def scores(dataset: str, seed: int) -> dict[str, float]:
    """Test AUPRC by method."""
    from torch_geometric.data import Data

    scenario = build_scenario(dataset=dataset, partition="owner", split="stratified:40/20/40", seed=seed)
    whole, owner = scenario.whole, owner_of(scenario)
    inside = whole.edge_index[:, owner[whole.edge_index[0]] == owner[whole.edge_index[1]]]
    masks = {"train_mask": whole.train, "val_mask": whole.val, "test_mask": whole.test}
    data = Data(x=whole.x, edge_index=whole.edge_index, y=whole.y, owner=owner, **masks)
    cut = Data(x=whole.x, edge_index=inside, y=whole.y, owner=owner, **masks)
    return {
        "trees": _trees(data),
        "local": _run("local", data, seed),
        "fedavg": _run("fedavg", data, seed),
        "cut": _run("central", cut, seed),
        "central": _run("central", data, seed),
    }


def _run(method: str, data: object, seed: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        result = isthmus.run(method, dataset=data, seed=seed, out=Path(folder) / "run", set=SETTINGS)
    return float(result["test"])


def _trees(data: object) -> float:
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.metrics import average_precision_score

    x, y = data.x.numpy(), data.y.numpy()  # type: ignore[attr-defined]
    train, test = data.train_mask.numpy(), data.test_mask.numpy()  # type: ignore[attr-defined]
    model = HistGradientBoostingClassifier(
        learning_rate=0.05, max_leaf_nodes=15, l2_regularization=1.0, random_state=0
    ).fit(x[train], y[train])
    return float(average_precision_score(y[test], model.predict_proba(x[test])[:, 1]))


if __name__ == "__main__":
    main()
