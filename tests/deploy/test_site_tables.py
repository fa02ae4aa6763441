"""Organisations with tables of their own: the same bits as their folders in one process, and nobody opens another's."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from in_process_sites import InProcessTransport, run_in_process
from packages import weight_hashes

pytest.importorskip("polars", reason="needs the extra tables")
pytest.importorskip("private_set_intersection", reason="needs the extra tables")

from isthmus.data.tables.owner import read_owner
from isthmus.deploy.roster import make_identity
from isthmus.deploy.site_runtime import SiteRuntime
from isthmus.deploy.site_settings import SiteSettings
from isthmus.errors import ConfigError, IsthmusError
from isthmus.experiments.config import Settings, resolve
from isthmus.experiments.models import load_models
from isthmus.experiments.run import start
from isthmus.federation.interface import QuorumError

ROOT = Path(__file__).resolve().parents[2]
BANKS = ("bank-a", "bank-b", "bank-c")


def write_banks(folder: Path, banks: Sequence[str] = BANKS) -> Path:
    spec = importlib.util.spec_from_file_location("bank_tables", ROOT / "examples" / "banks" / "make_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write_banks(folder, accounts=120, transfers=700)
    for name in banks:
        (folder / name / "link.key").write_text("07" * 32)  # ids of both ways to run are then the same
    return folder


def sites(folder: Path, tables: Path, extra: str = "", banks: Sequence[str] = BANKS) -> InProcessTransport:
    roster, found = folder / "roster.toml", {}
    for name in banks:
        home = folder / name
        home.mkdir()
        identity = make_identity(home / "identity.key")
        with roster.open("a") as file:
            file.write(f'[{name}]\nclient = "{name}"\nkey = "{identity.public.hex()}"\n')
        (home / "client.toml").write_text(
            f'client = "{name}"\nroster = {json.dumps(str(roster))}\nidentity = "identity.key"\n'
            f"[tables]\nfolder = {json.dumps(str(tables / name))}\n{extra}"
        )
        found[name] = SiteRuntime(SiteSettings.read(home / "client.toml"))
    return InProcessTransport(found)


def settings_of(method: str, dataset: str, **more: object) -> Settings:
    flags = {"dataset": dataset, "clients": 3, "rounds": 3, "seed": 5, "execution": "each", **more}
    return resolve(method, flags)


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedavg", {}),
        ("fedavg", {"secure_sum": True}),
        ("fedspray", {}),
        ("fedstruct", {"protocol": "published"}),
        ("fedgcn", {}),
        ("fedgcn", {"edge_weights": "use"}),
        ("hifgl", {"secmp": "plain"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())) or "plain",
)
def test_sites_end_with_the_bits_of_one_process(method: str, more: dict[str, object], tmp_path: Path) -> None:
    tables = write_banks(tmp_path / "tables")
    one = start(settings_of(method, str(tables), seed=0, **more), tmp_path / "one")
    transport = sites(tmp_path, tables)
    settings = settings_of(method, "tables", seed=0, **more)
    folder = run_in_process(tmp_path, transport, replace(settings, run=replace(settings.run, engine="nvflare")))
    result = folder.result()
    assert result is not None
    assert {
        name: value for bank in BANKS for name, value in weight_hashes(tmp_path / bank / "state").items()
    } == weight_hashes(tmp_path / "one")
    assert result["test"] == one["test"] and result["val"] == one["val"]
    assert not (folder.path / "models").exists()
    sheet = json.loads((folder.path / "disclosure.json").read_text())["rows"]
    assert {row["message"] for row in sheet if row["phase"] == "scaling"} >= {"CellCounts", "FeatureSums", "Totals"}
    assert not [row for row in sheet if row["phase"] == "linking" and row["receiver"] == "server"]
    links = json.loads((tmp_path / "bank-a" / "state" / "r" / "links.json").read_text())
    assert links.keys() == {"bank-b", "bank-c"} and all(count["agreed"] > 0 for count in links.values())


def test_a_roster_that_still_lists_who_left(tmp_path: Path) -> None:
    transport = sites(tmp_path, write_banks(tmp_path / "tables"))
    with pytest.raises(ConfigError, match="bank-a: the run is for 2 clients and the roster here has another number"):
        run_in_process(tmp_path, transport, settings_of("fedavg", "tables", clients=2))


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedavg", {}),
        ("fedavg", {"secure_sum": True}),
        ("fedavg", {"edge_weights": "use"}),
        ("fedstruct", {"structure_hops": 2, "nsf_dim": 8, "secure_sum": True}),
    ],
)
def test_each_bank_gets_predictions_of_its_accounts(method: str, more: dict[str, object], tmp_path: Path) -> None:
    """By the bank's own names, right as often as the training scored, and at the bank only."""
    tables = write_banks(tmp_path / "tables")
    transport = sites(tmp_path, tables)
    settings = settings_of(method, "tables", metric="accuracy", selection="best_val_acc", engine="nvflare", **more)
    trained = run_in_process(tmp_path, transport, settings).result()
    predicting = replace(settings, run=replace(settings.run, predict="r"))
    folder = run_in_process(tmp_path, transport.restarted(), predicting, run="p")
    right = total = 0
    for bank in BANKS:
        found = list(csv.DictReader((tmp_path / bank / "state" / "p" / "predictions.csv").open()))
        accounts = [row["account"] for row in csv.DictReader((tables / bank / "accounts.csv").open())]
        assert sorted(row["id"] for row in found) == sorted(accounts)
        own = read_owner(tables / bank, bank, seed=0)  # a site's own, not the run's
        test = {name for name, part in zip(own.ids.to_list(), own.part.tolist(), strict=True) if part == 2}
        right += sum(row["predicted"] == row["label"] for row in found if row["id"] in test)
        total += len(test)
        if method == "fedavg":  # it needs nobody else: the package says the same, of the part the site kept for testing
            alone = load_models(tmp_path / bank / "state" / "r" / "models" / bank)
            kept = alone.predict(tables=tables / bank, part="test")[bank]
            assert set(kept.id) == test
            assert kept.columns()["predicted"] == [row["predicted"] for row in found if row["id"] in test]
    assert trained is not None and trained["test"] == right / total
    assert not list(folder.path.rglob("predictions*")), "predictions stay with their owners"
    assert "scaling" not in {entry.phase for entry in folder.ledger(0)}, (
        "the scaling is the training's: nothing is sent"
    )


def test_a_lost_run_goes_on_without_preparing_again(tmp_path: Path) -> None:
    tables = write_banks(tmp_path / "tables")
    start(settings_of("fedavg", str(tables), seed=0), tmp_path / "one")
    transport = sites(tmp_path, tables)
    transport.fail_after = 70
    settings = settings_of("fedavg", "tables", seed=0)
    settings = replace(settings, run=replace(settings.run, engine="nvflare", checkpoint_every=1))
    with pytest.raises(QuorumError):
        run_in_process(tmp_path, transport, settings)
    ledger = (tmp_path / "runs" / "r" / "ledger" / "000000.jsonl").read_bytes()
    run_in_process(tmp_path, transport.restarted(), settings, attempt=1)
    assert (tmp_path / "runs" / "r" / "ledger" / "000000.jsonl").read_bytes() == ledger
    found = {name: value for bank in BANKS for name, value in weight_hashes(tmp_path / bank / "state").items()}
    assert found == weight_hashes(tmp_path / "one")


def refusal(tmp_path: Path, transport: InProcessTransport, **more: object) -> str:
    settings = settings_of("fedavg", "tables", **more)
    with pytest.raises(IsthmusError) as error:
        run_in_process(tmp_path, transport, replace(settings, run=replace(settings.run, engine="nvflare")))
    assert not list(tmp_path.rglob("*.safetensors"))
    return str(error.value)


def test_another_schema_is_named_by_column_before_anything_is_sent(tmp_path: Path) -> None:
    tables = write_banks(tmp_path / "tables")
    schema = tables / "bank-b" / "schema.toml"
    schema.write_text(schema.read_text().replace('"DE", "FR", "NL"', '"DE", "NL", "FR"'))
    assert "feature country" in refusal(tmp_path, sites(tmp_path, tables))


def test_a_broken_table_is_told_by_line_and_column(tmp_path: Path) -> None:
    tables = write_banks(tmp_path / "tables")
    accounts = tables / "bank-c" / "accounts.csv"
    accounts.write_text(accounts.read_text().replace(",DE,", ",XX,", 1))
    assert "bank-c: accounts.csv, line" in refusal(tmp_path, sites(tmp_path, tables))


def test_a_cap_on_compared_edges_stops_before_the_first_round(tmp_path: Path) -> None:
    refusal(tmp_path, sites(tmp_path, write_banks(tmp_path / "tables"), "max_ids = 5\n"))


def test_a_run_on_a_named_data_set_is_refused(tmp_path: Path) -> None:
    transport = sites(tmp_path, write_banks(tmp_path / "tables"))
    settings = settings_of("fedavg", "csbm")
    with pytest.raises(ConfigError, match=r"client\.toml has \[tables\]"):
        run_in_process(tmp_path, transport, replace(settings, run=replace(settings.run, engine="nvflare")))


def test_the_server_cannot_ask_for_links_in_the_clear(tmp_path: Path) -> None:
    text = refusal(tmp_path, sites(tmp_path, write_banks(tmp_path / "tables")), link="plain")
    assert "link=plain" in text


WATCH = """
import json, os, sys
sys.path.insert(0, {here!r})
opened = set()
def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        opened.add(os.fspath(arguments[0]))
sys.addaudithook(hook)
from pathlib import Path
from isthmus.deploy.site_runtime import SiteRuntime
from isthmus.deploy.site_settings import SiteSettings
from isthmus.deploy.site_tables import SiteTablesRun
from isthmus.experiments.config import resolve
site = SiteSettings.read(Path({config!r}))
settings = resolve("fedavg", {{"dataset": "tables", "clients": 3}})
own = SiteTablesRun(site, settings, Path({config!r}).parent, b"0" * 16)
own.reply(); own.tables_by_client
print(json.dumps(sorted(str(path) for path in opened)))
"""


def test_a_site_opens_no_file_of_another_owner(tmp_path: Path) -> None:
    tables = write_banks(tmp_path / "tables")
    sites(tmp_path, tables)
    code = WATCH.format(here=str(ROOT / "src"), config=str(tmp_path / "bank-a" / "client.toml"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    opened = [path for path in json.loads(done.stdout) if str(tables) in path]
    assert any(path.startswith(str(tables / "bank-a")) for path in opened)
    assert not any(path.startswith(str(tables / name)) for path in opened for name in ("bank-b", "bank-c"))


def test_banks_refuse_hops_without_masks(tmp_path: Path) -> None:
    """Sender by sender, the sums of a hop tell most values: organisations stream behind masks only."""
    transport = sites(tmp_path, write_banks(tmp_path / "tables"))
    settings = settings_of("fedstruct", "tables", engine="nvflare", structure_hops=2, nsf_dim=8)
    with pytest.raises(ConfigError, match="set secure_sum=true"):
        run_in_process(tmp_path, transport, settings)
