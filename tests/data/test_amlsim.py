"""AMLSim's samples: what is derived from transfers, and what must not be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from isthmus.data.amlsim import read_amlsim
from isthmus.data.datasets import load_nodes
from isthmus.data.transfers import FEATURES
from isthmus.experiments.config import resolve
from isthmus.experiments.scenarios import build
from isthmus.seeds import Stream

ACCOUNTS = (
    "nodeid,isFraud,init_balance,fraudStep\n0,1,100.0,{step}\n1,1,50.0,{step}\n2,0,10.0,-1\n3,0,7.5,-1\n4,1,3.0,-1\n"
)
TRANSFERS = "sourceNodeId,targetNodeId,value,time\n0,1,3.0,1\n0,1,5.0,3\n2,0,200.0,4\n2,2,300.0,9\n0,4,150.0,6\n"


def sample(folder: Path, step: int = 17) -> dict[str, torch.Tensor]:
    folder.mkdir(exist_ok=True)
    (folder / "nodes.csv").write_text(ACCOUNTS.format(step=step))
    (folder / "transactions.csv").write_text(TRANSFERS)
    return read_amlsim(folder)


def test_features_are_what_an_account_sees_of_its_own_transfers(tmp_path: Path) -> None:
    found = sample(tmp_path)
    nan = np.nan
    raw = np.array(  # balance; in: count, sum, mean, mean day, spread of days; out: the same
        [
            [100, 1, 200, 200, 4, 0, 3, 158, 158 / 3, 10 / 3, np.std([1, 3, 6])],
            [50, 2, 8, 4, 2, 1, 0, 0, nan, nan, nan],
            [10, 0, 0, nan, nan, nan, 1, 200, 200, 4, 0],  # what it paid to itself does not count
            [7.5, 0, 0, nan, nan, nan, 0, 0, nan, nan, nan],
            [3, 1, 150, 150, 6, 0, 0, 0, nan, nan, nan],
        ]
    )
    logs = np.log1p(raw)
    expected = np.nan_to_num((logs - np.nanmean(logs, 0)) / np.nanstd(logs, 0))
    assert found["x"].shape == (5, len(FEATURES))
    np.testing.assert_allclose(found["x"].numpy(), expected, atol=1e-6)
    assert found["edge_index"].tolist() == [[0, 0, 2], [1, 4, 0]]
    assert found["column.ring"].tolist() == [0, 0, -1, -1, 1]  # 0 -> 4 is an ordinary amount: no ring
    assert found["column.first_day"].tolist() == [1, 1, 4, 10, 6]
    assert found["transfers.amount"].tolist() == [3, 5, 200, 300, 150]


def test_the_day_of_the_fraud_is_not_read(tmp_path: Path) -> None:
    once, again = sample(tmp_path, 17), sample(tmp_path, 99)
    assert all(torch.equal(once[name], again[name]) for name in once)


@pytest.mark.parametrize(
    ("name", "fraudulent", "transfers", "rings"), [("amlsim-fanin", 954, 118250, 470), ("amlsim", 1804, 120558, 885)]
)
def test_the_samples(name: str, fraudulent: int, transfers: int, rings: int, need_data: Callable[[str], Path]) -> None:
    need_data("AMLSim")
    loaded = load_nodes(name, Stream(0))
    assert loaded.transfers is not None and loaded.transfers.num_transfers == transfers
    ring = torch.as_tensor(loaded.columns["ring"])
    assert int(loaded.data.y.sum()) == fraudulent == int((ring >= 0).sum())
    assert torch.equal(ring >= 0, loaded.data.y == 1) and int(ring.max()) + 1 == rings
    assert (loaded.data.x.mean(0).abs() < 1e-4).all() and (loaded.data.x.std(0) < 1.01).all()


def test_owners_are_drawn_and_what_is_given_wins(need_data: Callable[[str], Path]) -> None:
    need_data("AMLSim")
    scenario = build(dataset="amlsim", partition=None, clients=None, split=None, seed=1)
    assert (scenario.partition, scenario.clients, scenario.split) == ("random", 5, "stratified:40/20/40")
    run = resolve("fedavg", {"dataset": "amlsim-fanin", "clients": 3, "split": "60/20/20"}).run
    assert (run.partition, run.clients, run.split, run.metric) == ("random", 3, "60/20/20", "auprc")
    run = resolve("fedavg", {"dataset": "amlsim-fanin", "partition": "louvain", "metric": "accuracy"}).run
    assert (run.partition, run.clients, run.metric) == ("louvain", None, "accuracy")


def test_countries_are_owners(need_data: Callable[[str], Path]) -> None:
    need_data("MusaeTwitch")
    scenario = build(dataset="twitch", partition=None, clients=None, split=None, seed=0)
    sizes = {client.client: client.nodes for client in scenario.statistics.clients}  # type: ignore[union-attr]
    assert sizes == {"DE": 9498, "ENGB": 7126, "ES": 4648, "FR": 6549, "PTBR": 1912, "RU": 4385, "ZHTW": 2772}
    assert scenario.statistics.cross_edge_share == 0.0  # type: ignore[union-attr]
    edges = {client.client: client.edges for client in scenario.statistics.clients}  # type: ignore[union-attr]
    assert edges["DE"] == 2 * 153138 and edges["ZHTW"] == 2 * 63462
