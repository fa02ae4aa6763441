"""Advice: the facts are right, the rules follow them, and validation alone decides."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data

import isthmus
from isthmus.cli.main import main
from isthmus.data.reach import Reach
from isthmus.data.scenario import Scenario
from isthmus.errors import ConfigError
from isthmus.experiments.advice.auto import advice_for
from isthmus.experiments.advice.facts import Facts, measure
from isthmus.experiments.advice.plans import GRAPH_PLANS, PLANS
from isthmus.experiments.advice.rules import _RULES, advise
from isthmus.experiments.config import resolve
from isthmus.experiments.scenarios import build

FACTS = Facts(
    task="node",
    metric="accuracy",
    clients=5,
    nodes=1000,
    edges=5000,
    features=30,
    classes=4,
    training=100,
    unlabelled=0,
    homophily=0.7,
    cross_share=0.6,
    label_skew=0.05,
    rarest=0.2,
    alike=True,
    reach=Reach(alone=0.5, local=0.45, together=0.6, across=0.8, smoothed=0.8, links=0.4),
)


def scenario(dataset: str, **keys: object) -> Scenario:
    made = build(**{"partition": None, "clients": 4, "split": "40/30/30", "seed": 0, **keys}, dataset=dataset)  # type: ignore[arg-type]
    assert isinstance(made, Scenario)
    return made


def names(facts: Facts) -> list[str]:
    return [choice.plan.name for choice in advise(facts).choices]


# -- facts -----------------------------------------------------------------------------------------


def test_cross_edges_are_worth_something_where_neighbours_share_a_class() -> None:
    facts = measure(scenario("csbm:nodes=800,homophily=0.9,degree=8", partition="random", clients=10))
    assert facts.reach is not None and facts.homophily == pytest.approx(0.87, abs=0.06)
    assert facts.reach.across > facts.reach.together + 0.05 and facts.reach.together > facts.reach.local
    assert facts.cross_share == pytest.approx(0.9, abs=0.03)


def test_without_homophily_and_signal_nothing_is_worth_anything() -> None:
    facts = measure(scenario("csbm:nodes=800,homophily=0.25,signal=0", partition="random"))
    assert facts.reach is not None and facts.homophily == pytest.approx(0.0, abs=0.06)
    assert max(vars(facts.reach).values()) < 0.4
    assert any("neighbours add nothing" in remark for remark in advise(facts).remarks)


def test_a_rare_class_changes_the_metric_unless_one_is_given() -> None:
    made = scenario("banks:banks=4,accounts=400", split="stratified:40/30/30", clients=None)
    assert measure(made).metric == "auprc" and measure(made, "accuracy").metric == "accuracy"
    assert measure(scenario("csbm:nodes=200")).metric == "accuracy"


def test_the_test_part_is_not_looked_at() -> None:
    made = scenario("csbm:nodes=400")
    wrong = torch.where(made.whole.test, (made.whole.y + 1) % 4, made.whole.y)
    other = replace(made, whole=replace(made.whole, y=wrong))
    assert measure(made) == measure(other)


def test_owners_with_one_class_or_no_training_node() -> None:
    y = torch.tensor([0] * 20 + [1] * 20)
    train = torch.zeros(40, dtype=torch.bool)
    train[:10] = True
    masks = {"train_mask": train, "val_mask": torch.arange(40) % 2 == 1, "test_mask": torch.zeros(40, dtype=torch.bool)}
    masks["val_mask"] &= ~train
    masks["test_mask"][[12, 30]] = True
    data = Data(x=torch.randn(40, 3), edge_index=torch.tensor([[0, 1], [1, 0]]), y=y, owner=(y).clone(), **masks)
    facts = advice_for({"dataset": isthmus.experiments.run.by_name({"dataset": data})["dataset"]}).facts
    assert facts.unlabelled == 1 and facts.label_skew == 0.5 and facts.cross_share == 0.0


# -- rules -----------------------------------------------------------------------------------------


def test_every_plan_has_a_rule_and_settings_that_its_method_takes() -> None:
    assert set(PLANS) == set(_RULES)
    for plan in PLANS.values():
        resolve(plan.method, {"dataset": "csbm", **plan.settings})
    # Also on data sets of a paper: nobody is compared on another split, other arcs or another scale.
    for dataset in ("citeseer", "pubmed", "cora"):
        runs = [resolve(plan.method, {"dataset": dataset, **plan.settings}).run for plan in PLANS.values()]
        assert len({(run.partition, run.clients, run.split, run.undirected, run.scale) for run in runs}) == 1
    for plan in GRAPH_PLANS.values():
        resolve(plan.method, {"dataset": "motifs", **plan.settings})


def test_methods_for_cross_edges_come_first_where_these_pay() -> None:
    assert set(names(FACTS)[:3]) == {"fedgcn", "fedstruct", "hifgl"}
    assert names(FACTS)[-1] == "local"


def test_without_homophily_own_features_need_a_path_of_their_own() -> None:
    order = names(replace(FACTS, homophily=0.0, reach=Reach(0.5, 0.45, 0.6, 0.8, smoothed=0.5, links=0.4)))
    assert order[:2] == ["hifgl", "fedstruct"]
    assert order.index("fedgcn") > order.index("fedavg")


def test_structure_is_expected_to_do_what_its_best_variant_does() -> None:
    def expected(homophily: float, reach: Reach) -> tuple[float | None, str]:
        choices = advise(replace(FACTS, homophily=homophily, reach=reach)).choices
        return next((choice.expected, choice.reason) for choice in choices if choice.plan.name == "fedstruct")

    read_directly = expected(0.0, Reach(0.5, 0.45, 0.6, 0.8, smoothed=0.5, links=0.4))
    assert read_directly[0] == pytest.approx(0.78) and "read directly" in read_directly[1]
    mixing_loses_nothing = expected(0.0, Reach(0.5, 0.45, 0.6, 0.8, smoothed=0.8, links=0.4))
    assert mixing_loses_nothing[0] == pytest.approx(0.62)
    alike = expected(0.7, Reach(0.5, 0.45, 0.6, 0.8, smoothed=0.8, links=0.4))
    assert alike[0] == pytest.approx(0.78) and "homophily is 0.70" in alike[1]
    linked = expected(0.0, Reach(0.5, 0.45, 0.6, 0.65, smoothed=0.5, links=0.75))
    assert linked[0] == pytest.approx(0.75) and "connected to whom" in linked[1]


def test_where_links_tell_more_than_features_structure_comes_first() -> None:
    facts = replace(FACTS, homophily=0.0, reach=Reach(0.5, 0.45, 0.6, 0.65, smoothed=0.5, links=0.75))
    assert names(facts)[0] == "fedstruct"


def test_without_cross_edges_methods_about_them_do_not_fit() -> None:
    advice = advise(replace(FACTS, cross_share=0.0, reach=Reach(0.5, 0.45, 0.6, 0.6, 0.6, 0.4)))
    assert {"fedstruct", "hifgl", "fedgcn"} <= set(advice.unfit)
    assert advice.choices[0].plan.method in ("fedavg", "fedspray", "fedsgd")


def test_where_the_graph_adds_nothing_features_alone_are_named() -> None:
    facts = replace(
        FACTS, homophily=0.0, reach=Reach(0.8, local=0.5, together=0.7, across=0.72, smoothed=0.6, links=0.4)
    )
    assert "fedavg-mlp" in names(facts)[:2]


def test_skewed_owners_get_personal_models() -> None:
    facts = replace(FACTS, cross_share=0.0, label_skew=0.5, reach=Reach(0.5, 0.7, 0.6, 0.6, 0.6, 0.4))
    assert names(facts)[0] == "fedper"
    assert any("personal models" in remark for remark in advise(facts).remarks)


def test_a_single_owner_trains_alone() -> None:
    assert names(replace(FACTS, clients=1, cross_share=0.0)) == ["local"]


# -- auto ------------------------------------------------------------------------------------------

RUN = {"dataset": "csbm:nodes=120", "clients": 3, "rounds": 2}


def test_auto_keeps_the_best_on_validation(tmp_path: Path) -> None:
    result = isthmus.run("auto", **RUN, out=tmp_path / "auto")
    tried = {row["plan"]: row["val"] for row in result["auto"]["tried"]}
    assert len(tried) == 3
    assert result["val"] == max(tried.values()) == tried[result["auto"]["chosen"]]
    assert result["method"] == PLANS[result["auto"]["chosen"]].method
    written = json.loads((tmp_path / "auto" / "auto.json").read_text())
    assert written["chosen"] == result["auto"]["chosen"] and written["facts"]["clients"] == 3
    again = isthmus.run("auto", **RUN, out=tmp_path / "auto")  # finished runs are used again
    assert again["finished"] == result["finished"]


def test_what_is_given_wins_over_a_plan(tmp_path: Path) -> None:
    result = isthmus.run("auto", **RUN, lr=0.02, metric="macro_f1", out=tmp_path / "auto")
    for row in result["auto"]["tried"]:
        config = (Path(row["run_dir"]) / "config.toml").read_text()
        assert "lr = 0.02" in config and 'metric = "macro_f1"' in config and "rounds = 2" in config


def test_auto_on_sets_of_graphs(tmp_path: Path) -> None:
    keys = {"dataset": "motifs:graphs=30", "clients": 2, "rounds": 1, "hidden": (8,)}
    result = isthmus.run("auto", **keys, out=tmp_path / "auto")
    assert [row["plan"] for row in result["auto"]["tried"]] == ["fedavg", "gcflplus", "fedstar"]


def test_mistakes_in_python() -> None:
    with pytest.raises(ConfigError, match="one seed"):
        isthmus.run("auto", seed=[0, 1], **RUN)
    with pytest.raises(ConfigError, match="all data in one place"):
        isthmus.run("auto", engine="nvflare", **RUN)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = ["--dataset", "csbm:nodes=120", "--clients", "3"]
    assert main(["advise", *scenario]) == 0
    out = capsys.readouterr().out
    assert "1. " in out and "a plain model" in out and "--set preset=general" in out
    # What is printed can be typed as it stands.
    (first, *_) = [line.strip() for line in out.splitlines() if line.startswith("   isthmus run ")]
    assert main([*shlex.split(first)[1:], "--rounds", "1", "--quiet", "--out", str(tmp_path / "advised")]) == 0
    assert "csbm:nodes=120 (generated), 3 clients" in capsys.readouterr().out
    assert main(["advise", *scenario, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["choices"][0]["settings"]["preset"] == "general" and plain["facts"]["clients"] == 3
    assert main(["run", "auto", *scenario, "--rounds", "1", "--out", str(tmp_path / "auto")]) == 0
    assert "chosen on validation" in capsys.readouterr().out
    assert main(["advise"]) == 2 and "no data set given" in capsys.readouterr().err
    assert main(["run", "auto", *scenario, "--runs", "2"]) == 2 and "one seed" in capsys.readouterr().err
    assert main(["advise", "--dataset", "coraa"]) == 2
