"""From a cell to settings, a command and a folder."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from isthmus.cli.main import app
from isthmus.experiments.config import resolve
from isthmus.experiments.config_values import parse_override
from isthmus.papers.cells import Cell, Published
from isthmus.papers.plan import cell_command, cell_settings, changed, folder_of, why_not
from isthmus.papers.tables import find_tables, load_paper, paper_names, select

RUN = {"method": "fedavg", "dataset": "csbm:nodes=60", "backbone": "gcn", "clients": 3, "split": "10/10/80"}


def cell(**changes: object) -> Cell:
    return Cell("p", "1", "row", "column", (), Published("1", 1.0), {**RUN, **changes})


def test_settings_are_the_presets_with_the_cells_on_top() -> None:
    (found,) = select(find_tables("fedstruct/10.1")[1], "fedsgd cora 20")
    settings = cell_settings(found, 7)
    assert (settings.run.seed, settings.run.clients, settings.run.rounds) == (
        7,
        20,
        50,
    )  # 50: what the reference code ran
    assert (settings.method_config.backbone, settings.method_config.loss) == ("sage", "double_softmax")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"method": "fedfuture"}, "method fedfuture is not here yet"),
        ({"backbone": "transformer"}, "backbone transformer is not here yet"),
        ({"preset": "nopaper"}, "preset nopaper is not here yet"),
        ({"loss": "hinge"}, "loss hinge is not here yet"),
        ({"no_such_key": 3}, "setting no_such_key is not here yet"),
    ],
)
def test_what_is_missing_is_named(changes: dict[str, object], reason: str | None) -> None:
    assert why_not(cell(**changes)) == reason


def test_no_cell_names_what_nobody_planned() -> None:
    """A slip in a table's settings would pass for something still to come."""
    lacking = {
        why_not(found)
        for paper in paper_names()
        for table in load_paper(paper).tables
        for found in table.cells
        if not found.skip
    }
    assert lacking - {None} <= {
        f"{what} is not here yet"
        for what in ("method fedsageplus", "method fedpub", "nsf gdv", "nsf n2v", "setting feature_model")
    }


def test_settings_that_do_not_fit_raise_the_error_of_resolve() -> None:
    assert "lr must be above 0" in str(why_not(cell(lr=-1)))


def test_a_cell_that_is_never_run() -> None:
    found = Cell("p", "1", "row", "column", (), Published("1", 1.0), {}, skip="a property of the partition")
    assert why_not(found) == "a property of the partition"
    assert cell_command(found) == ""


@pytest.mark.parametrize("paper", paper_names())
def test_the_command_of_a_cell_means_the_cell(paper: str) -> None:
    """What a person types gives the very settings the cell runs with; every flag is one of ``isthmus run``."""
    import typer

    flags = {option for parameter in typer.main.get_command(app).commands["run"].params for option in parameter.opts}  # type: ignore[attr-defined]
    checked = 0
    for found in (c for table in load_paper(paper).tables for c in table.cells[:: max(1, len(table.cells) // 8)]):
        if why_not(found) is not None:
            continue
        words = shlex.split(cell_command(found, 3))
        assert words[:2] == ["isthmus", "run"]
        pairs = list(zip(words[3::2], words[4::2], strict=True))
        assert {flag for flag, _ in pairs} <= flags
        given = {flag[2:]: value for flag, value in pairs if flag != "--set"}
        overrides = dict(parse_override(value) for flag, value in pairs if flag == "--set")
        assert resolve(words[2], given, overrides) == cell_settings(found, 3)
        checked += 1
    assert checked > 0


def test_same_settings_same_folder_and_no_other() -> None:
    out = Path("out")
    first = cell_settings(cell(), 0)
    assert folder_of(first, out) == folder_of(cell_settings(cell(clients=3), 0), out)
    others = [
        cell_settings(cell(), 1),
        cell_settings(cell(lr=0.5), 0),
        cell_settings(cell(dataset="csbm:nodes=61"), 0),
        cell_settings(cell(split="20/10/70"), 0),
        cell_settings(cell(method="fedprox"), 0),
    ]
    assert len({folder_of(settings, out) for settings in [first, *others]}) == 6
    assert folder_of(first, out).name.endswith("-s0")
    assert folder_of(first, out).parent == out


def test_defaults_do_not_enter_the_name_of_a_folder() -> None:
    settings = changed(cell_settings(cell(), 5))
    assert settings["clients"] == 3
    assert not {"seed", "wire", "threads", "tensorboard", "precision"} & settings.keys()
