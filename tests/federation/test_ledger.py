"""The ledger's lines, and the disclosure sheet that follows from them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
from torch import Tensor

from isthmus.federation.ledger import CHANNELS, Disclosure, Entry, Ledger, Sheet, channel_totals, differences
from isthmus.federation.messages import Count, Kind, Message, Model


@dataclass(frozen=True)
class Update(Message):
    weights: Model[Tensor]
    share: Count[float]
    bias: Model[Tensor]


def _entry(sender: str = "a", receiver: str = "server", phase: str = "train") -> Entry:
    return Entry.of(
        Update,
        attempt=0,
        phase=phase,
        round=3,
        sequence=1,
        handler="local_update",
        protection="clear",
        sender=(sender, sender + "2"),
        receiver=(receiver,),
        bytes=(100, 20),
        by_kind={Kind.MODEL: 80, Kind.COUNT: 16},
    )


def test_an_entry_survives_json() -> None:
    entry = _entry()
    again = Entry.from_json(entry.to_json())
    assert again == entry
    assert json.loads(entry.to_json())["kinds"] == {"weights": "model", "share": "count", "bias": "model"}
    assert json.loads(entry.to_json())["by_kind"] == {"model": 80, "count": 16}
    assert "\n" not in entry.to_json()


@pytest.mark.parametrize(
    ("sender", "receiver", "channel"),
    [
        ("a", "server", "up"),
        ("server", "a", "down"),
        ("a", "b", "peer"),
        ("a", "a/devices", "device"),
        ("a/devices", "a", "device"),
        ("a/devices", "b/devices", "device"),
        ("a/devices", "server", "device"),
        ("server", "a/devices", "device"),
    ],
)
def test_channels(sender: str, receiver: str, channel: str) -> None:
    assert replace(_entry(), sender=(sender,), receiver=(receiver,)).channel == channel


def test_totals_by_channel() -> None:
    entries = [_entry(), _entry("server", "a"), _entry()]
    assert channel_totals(entries) == {"up": 240, "down": 120, "peer": 0, "device": 0}
    assert channel_totals([]) == dict.fromkeys(CHANNELS, 0)


def test_take_hands_over_once() -> None:
    ledger = Ledger()
    ledger.add(_entry())
    ledger.add(_entry("b"))
    assert [entry.sender[0] for entry in ledger.take()] == ["a", "b"]
    assert ledger.take() == []


def test_the_sheet_adds_up_what_the_ledger_says() -> None:
    sheet = Sheet()
    sheet.add([_entry(), _entry("b")])
    sheet.add([_entry(phase="setup")])
    first, second = sheet.rows()
    assert first == {
        "phase": "train",
        "sender": "client",
        "receiver": "server",
        "message": "Update",
        "protection": "clear",
        "kinds": ["count", "model"],
        "times": 4,
        "bytes": 240,
        "bytes_by_kind": {"model": 160, "count": 32},
    }
    assert second["phase"] == "setup" and second["times"] == 2


def test_differences_go_both_ways() -> None:
    sheet = Sheet()
    sheet.add([_entry()])
    honest = Disclosure("train", "client", "server", Update)
    assert honest.kinds == (Kind.COUNT, Kind.MODEL)
    assert differences(sheet, [honest]) == []
    for other in (
        replace(honest, protection="summed"),
        replace(honest, phase="setup"),
        replace(honest, receiver="client"),
    ):
        shown, declared = differences(sheet, [other])
        assert shown.startswith("shown but not declared") and declared.startswith("declared but never shown")
    assert differences(sheet, []) == [
        "shown but not declared: train / client / server / Update / clear (bias: model, share: count, weights: model)"
    ]


def test_another_message_of_the_same_name_is_a_difference() -> None:
    """A method that sends gradients does not pass with the sheet of one that sends models."""
    declared = Disclosure("train", "client", "server", Update)
    sheet = Sheet()
    entry = _entry()
    sheet.add([entry, replace(entry, kinds={**entry.kinds, "weights": "gradient"})])
    (found,) = differences(sheet, [declared])
    assert found.startswith("shown but not declared: train / client / server / Update / clear (")
    assert found.endswith("weights: gradient)")
    assert [row["kinds"] for row in sheet.rows()] == [["count", "model"], ["count", "gradient", "model"]]
