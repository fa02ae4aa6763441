"""``isthmus trilemma``: score, bytes and what attacks recover, of several methods on one scenario."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.cli.main import main
from isthmus.cli.recovered_share import Audited, Leak, share_of
from isthmus.cli.trilemma import largest, taking, undominated
from isthmus.report.tradeoff import Point

SCENARIO = ["--dataset", "csbm:nodes=60,features=6", "--clients", "3", "--partition", "random", "--split", "30/20/50"]


def test_a_method_that_sends_updates_tells_more_than_one_that_masks_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["fedavg", "fedavg:secure_sum=true", "fedlit", "central", *SCENARIO, "--rounds", "2", "--runs", "1"]
    assert main(["trilemma", *words, "--jobs", "1", "--out", str(tmp_path), "--json"]) == 0
    found = {row["method"]: row for row in json.loads(capsys.readouterr().out)["methods"]}
    plain, masked = (
        {(leak["adversary"], leak["attack"]): leak["share"] for leak in found[name]["audit"]["leaks"]}
        for name in ("fedavg", "fedavg:secure_sum=true")
    )
    assert ("server", "labels from output gradients") in plain
    assert masked["server", "plain reading"] == 0.0 and masked["server", "mask used twice"] == 0.0
    assert "holder of a model" in found["fedlit"]["audit"]["unmeasured"]  # its model cannot be tried on records here
    assert found["central"]["audit"]["failed"] and found["fedavg"]["ran"].startswith("general")
    page = (tmp_path / "trilemma.html").read_text()
    assert "Seen by the server" in page and 'id="f2"' in page
    assert (tmp_path / "trilemma.svg").read_text().startswith("<svg")
    assert not list(tmp_path.glob("audit/*/transcript")), "what protections hide must not be left behind"


def test_methods_that_do_not_take_the_data_are_named() -> None:
    chosen, refused = taking({"dataset": "motifs:graphs=20", "preset": "own"}, {}, None)
    assert chosen[0] == "fedavg" and "fedstar" in chosen
    assert "learns from the nodes of one graph" in refused["fedstruct"]


@pytest.mark.parametrize(
    ("numbers", "share"),
    [
        ({"exact": 1, "of": 4}, 0.25),
        ({"claimed": 6, "correct": 5, "of": 6, "by_chance": 4.0}, 0.5),
        ({"claimed": 6, "correct": 3, "of": 6, "by_chance": 4.0}, 0.0),
        ({"advantage": 0.5, "untrained_advantage": 0.2}, 0.3),
        ({"claimed": 4, "correct": 3, "nodes": 9}, 0.75),
        ({"helpers": 2.0}, None),
    ],
)
def test_shares_are_beyond_chance(numbers: dict[str, float], share: float | None) -> None:
    assert share_of(numbers) == (None if share is None else pytest.approx(share))


def test_who_is_dominated() -> None:
    def row(name: str, score: float, up: int) -> dict[str, object]:
        return {"method": name, "score": {"mean": score}, "bytes": {"up": up}}

    leak = Audited((Leak("server", "a", "b", "c", 0.5),))
    rows = [row("best", 0.9, 10), row("worse", 0.8, 20), row("private", 0.7, 30), row("unknown", 0.95, 1)]
    audited = {"best": leak, "worse": leak, "private": Audited(()), "unknown": Audited((), failed="no run")}
    assert undominated(rows, audited) == {"best", "private"}


def test_what_nobody_tried_is_not_drawn_as_nothing_recovered() -> None:
    def point(recovered: dict[str, tuple[float, str]], untried: dict[str, str], failed: str = "") -> Point:
        return Point("m", "general", 0.5, None, 10, recovered, failed, untried)

    assert largest(point({"server": (0.1, "a"), "client": (0.3, "b")}, {"server": "c"})) == 0.3
    assert largest(point({}, {})) == 0.0  # no attack applies
    assert largest(point({}, {"server": "c"})) is None
    assert largest(point({}, {}, "all data in one place")) is None
