"""Settings in words come from the docstrings, and every setting has some."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass

import pytest

from isthmus.cli.main import main
from isthmus.errors import ConfigError
from isthmus.experiments.config import resolve
from isthmus.experiments.describe import documented, settings_of
from isthmus.methods.registry import Method, all_methods


@dataclass
class Example:
    """Something.

    Args:
        first, second: Both ``of`` them,
            with more.
        third: Alone.

    Not: an argument.
    """


def test_docstrings_are_read() -> None:
    assert documented(Example) == {
        "first": "Both of them, with more.",
        "second": "Both of them, with more.",
        "third": "Alone.",
    }
    assert documented(dict) == {}


@pytest.mark.parametrize("method", ["local", "fedavg", "fedsgd", "fedprox", "fedper", "central"])
def test_every_setting_has_a_meaning_and_can_be_set(method: str) -> None:
    settings = settings_of(method)
    assert [each.key for each in settings if not each.meaning] == []
    overrides = {each.key: each.default for each in settings if each.default is not None}
    resolve(method, {"dataset": "csbm"}, overrides)
    assert {"lr", "rounds", "checkpoint.every"} <= {each.key for each in settings}


@pytest.mark.parametrize("method", all_methods(), ids=lambda method: method.name)
def test_a_meaning_can_be_read_by_itself(method: Method) -> None:
    """Nobody reads a list of settings from the top: no entry leans on the one before it, and no two share a text."""
    meanings = {each.key: each.meaning for each in settings_of(method.name)}
    assert [key for key, meaning in meanings.items() if not meaning] == []
    leaning = re.compile(r"(Of|Its|Their|For|See|Over|Between|Beside|Ditto)\b")
    assert {key: meaning for key, meaning in meanings.items() if leaning.match(meaning)} == {}
    shared = [meaning for meaning, times in Counter(meanings.values()).items() if times > 1]
    assert shared == []


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "fedprox"]) == 0
    assert "Weight of the proximal term" in capsys.readouterr().out
    assert main(["methods", "fedprox", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)["settings"]
    assert {
        "group": "method",
        "key": "mu",
        "default": 0.01,
        "meaning": "Weight of the proximal term; 0 is FedAvg.",
    } in output
    assert main(["methods", "--json"]) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)["methods"]} == {
        method.name for method in all_methods()
    }
    assert main(["methods", "fedprx"]) == 2 and "did you mean 'fedprox'" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        settings_of("nothing")
