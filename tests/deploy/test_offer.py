"""Offers: a run that an organisation would refuse is refused when it is submitted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isthmus.cli.main import app
from isthmus.deploy.federation_folder import OFFERS, FederationFolder
from isthmus.deploy.members import Issued, Members
from isthmus.deploy.offer import DataShape, Offer
from isthmus.deploy.policy import NOTHING_ASKED, STRICT, Policy
from isthmus.deploy.provisioning import FederationConfig
from isthmus.deploy.site_settings import SiteSettings
from isthmus.errors import ConfigError

ORGANISATIONS = ("bank-a", "bank-b")
RUN = {"method": "fedavg", "dataset": "cora", "partition": "louvain", "clients": 2, "split": "10/10/80", "rounds": 2}
DATA = {key: RUN[key] for key in ("dataset", "partition", "clients", "split")}
TABLES = {"method": "fedavg", "dataset": "tables", "clients": 2, "rounds": 2}


@pytest.fixture
def federation(tmp_path: Path) -> FederationFolder:
    """Without kits: nothing is started."""
    pytest.importorskip("nvflare", reason="the engine nvflare is an extra")
    for name in ("runs", OFFERS):
        (tmp_path / "federation" / name).mkdir(parents=True)
    folder = FederationFolder(tmp_path / "federation", FederationConfig("x", ORGANISATIONS))
    until = "2999-01-01T00:00:00+00:00"
    Members(tuple(Issued(name, name, name, until, until) for name in ORGANISATIONS)).write(folder.register)
    return folder


def only(*methods: str) -> Policy:
    return replace(NOTHING_ASKED, methods=methods)


def give(federation: FederationFolder, **offers: Offer) -> None:
    for name, offer in offers.items():
        (federation.path / OFFERS / f"{name.replace('_', '-')}.toml").write_text(offer.to_toml())


def create(federation: FederationFolder, run: dict[str, object]) -> str:
    file = federation.path / "run.toml"
    file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in run.items()))
    return federation.create_run(file)


def test_a_run_that_all_offer_is_made(federation: FederationFolder) -> None:
    give(
        federation,
        bank_a=Offer("client-0", NOTHING_ASKED, DATA),
        bank_b=Offer("client-1", only("fedavg", "local"), DATA),
    )
    assert (federation.runs / create(federation, RUN) / "config.toml").exists()


def test_without_offers_the_sites_decide_later(federation: FederationFolder) -> None:
    assert create(federation, TABLES) and federation.offers() == {}


@pytest.mark.parametrize(
    ("offer", "run", "message"),
    [
        (Offer("client-1", only("local"), DATA), RUN, "bank-b: method 'fedavg' is not allowed by methods = ['local']"),
        (
            Offer("client-1", NOTHING_ASKED, {**DATA, "split": "40/30/30"}),
            RUN,
            "bank-b: split is '40/30/30' in its client.toml",
        ),
        (Offer("client-1", NOTHING_ASKED, DATA), RUN | {"seed": 3}, "bank-b: seed is 3 in the run"),
        (Offer("client-0", NOTHING_ASKED, DATA), RUN, "bank-a and bank-b both say they are client-0"),
        (Offer("client-1", NOTHING_ASKED, {}, {"[nodes]": "1"}), RUN, "bank-b: dataset is 'cora' in the run"),
        (Offer("client-1", NOTHING_ASKED, DATA), RUN | {"clients": 3}, "write clients = 2"),
    ],
)
def test_a_refusal_names_the_organisation(
    federation: FederationFolder, offer: Offer, run: dict[str, object], message: str
) -> None:
    give(federation, bank_a=Offer("client-0", NOTHING_ASKED, DATA), bank_b=offer)
    with pytest.raises(ConfigError) as error:
        create(federation, run)
    assert message in str(error.value)
    assert not list(federation.runs.iterdir())


def test_different_schemas_are_named_by_feature(federation: FederationFolder) -> None:
    same = {"[nodes]": "1", "feature balance": "2"}
    give(
        federation,
        bank_a=Offer("a", NOTHING_ASKED, {}, same),
        bank_b=Offer("b", NOTHING_ASKED, {}, same | {"feature balance": "3"}),
    )
    with pytest.raises(ConfigError, match=r"bank-b and bank-a have different schemas \(feature balance\)"):
        create(federation, TABLES)


def test_an_offer_of_somebody_else_is_an_error(federation: FederationFolder) -> None:
    give(federation, bank_x=Offer("client-0", NOTHING_ASKED, DATA))
    with pytest.raises(ConfigError, match=r"unknown organisation in .*offers 'bank-x'"):
        federation.offers()


def test_a_file_that_is_no_offer(federation: FederationFolder) -> None:
    (federation.path / OFFERS / "bank-a.toml").write_text('client = "client-0"\n')
    with pytest.raises(ConfigError, match="ask for the output of `isthmus client offer` again"):
        federation.offers()


def test_a_method_table_beside_the_method_is_explained(federation: FederationFolder) -> None:
    file = federation.path / "run.toml"
    file.write_text('method = "fedavg"\n[method]\nhidden = 8\n')
    with pytest.raises(ConfigError, match=r"write settings as plain keys, without \[method\]"):
        federation.create_run(file)


def test_the_command_prints_what_submit_reads(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "schema.toml").write_text(
        '[nodes]\nfile = "a.*"\nid = "i"\nlabel = "l"\nclasses = ["n", "y"]\nsplit = "stratified:40/20/40"\n'
        '[features]\nsecret_column = { type = "flag" }\n[edges]\nfile = "e.*"\nsource = "f"\ntarget = "t"\n'
    )
    config = tmp_path / "client.toml"
    config.write_text('client = "bank-a"\nmethods = ["fedavg"]\n[tables]\nfolder = "data"\n')
    done = CliRunner().invoke(app, ["client", "offer", "--config", str(config)])
    assert done.exit_code == 0, done.output
    (tmp_path / "offer.toml").write_text(done.stdout)
    offered = Offer.read(tmp_path / "offer.toml")
    assert offered == replace(SiteSettings.read(config).offer(), shape=DataShape(1, 2, "node"))
    assert offered.policy == only("fedavg")
    assert str(tmp_path) not in done.stdout


def test_a_policy_refuses_when_a_run_is_submitted(federation: FederationFolder) -> None:
    give(federation, bank_a=Offer("client-0", NOTHING_ASKED, DATA), bank_b=Offer("client-1", STRICT, DATA))
    with pytest.raises(ConfigError) as error:
        create(federation, RUN)
    text = str(error.value)
    assert "bank-b: " in text and "bank-a: " not in text and "\n" not in text
    for part in (
        "train: fedavg sums Update without masks, which secure_sum = true forbids: set secure_sum = true in the run",
        "train: fedavg shows the server Update (model) of single clients, which hidden_from_server forbids",
        "train: fedavg sums Update over 2 clients, least_in_sum = 3 asks for more",
        "evaluation: fedavg shows the server Evaluation (count, label statistic, metric) of single clients, which "
        'scores = "together" forbids',
    ):
        assert part in text
    assert not list(federation.runs.iterdir()), "nothing was deployed"


def test_submit_knows_the_contract_once_all_offers_say_enough(federation: FederationFolder) -> None:
    asks = replace(NOTHING_ASKED, approve=True)
    give(federation, bank_a=Offer("client-0", NOTHING_ASKED, DATA, None, DataShape(5, 3, "node")))
    assert federation.contract(create(federation, RUN)) == (None, [])
    give(federation, bank_b=Offer("client-1", asks, DATA, None, DataShape(5, 3, "node")))
    contract, approve = federation.contract(create(federation, RUN))
    assert contract is not None and len(contract) == 64 and approve == ["bank-b"]
