"""Changes of the roster: signed by those who stay, and by nobody else."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w

from isthmus.cli.main import main
from isthmus.deploy.roster_change import Line, Roster, RosterChange, propose
from isthmus.errors import ConfigError
from isthmus.privacy.keys import Identity

OWN = {name: Identity() for name in ("bank-a", "bank-b", "bank-c")}
NEW = Identity()
LINES = {name: Line(f"client-of-{name}", identity.public.hex()) for name, identity in OWN.items()}
ROSTER = Roster(LINES)
JOINS = Line("client-of-bank-d", NEW.public.hex())


def signed(change: RosterChange, *names: str) -> RosterChange:
    for name in names:
        change = change.sign(ROSTER, name, OWN[name])
    return change


def test_a_new_organisation_needs_the_signatures_of_all(tmp_path: Path) -> None:
    change = signed(propose(ROSTER, "bank-d", JOINS), "bank-a", "bank-b")
    with pytest.raises(ConfigError, match="bank-c has not signed yet"):
        change.apply(ROSTER)
    change = signed(change, "bank-c")
    change.write(tmp_path / "change.toml")
    assert RosterChange.read(tmp_path / "change.toml") == change
    assert change.apply(ROSTER).lines == {**LINES, "bank-d": JOINS}


def test_who_leaves_does_not_sign(tmp_path: Path) -> None:
    change = signed(propose(ROSTER, "bank-b", None), "bank-a", "bank-c")
    assert set(change.apply(ROSTER).lines) == {"bank-a", "bank-c"}
    with pytest.raises(ConfigError, match="bank-b does not sign this change"):
        signed(change, "bank-b")


def test_a_lost_key_is_replaced_by_the_others() -> None:
    change = signed(propose(ROSTER, "bank-b", Line("client-of-bank-b", NEW.public.hex())), "bank-a", "bank-c")
    assert change.apply(ROSTER).lines["bank-b"].key == NEW.public.hex()


def test_a_signature_is_of_one_change_of_one_roster_by_one_key() -> None:
    change = signed(propose(ROSTER, "bank-d", JOINS), "bank-a", "bank-b", "bank-c")
    with pytest.raises(ConfigError, match="is not by its key, or of another change"):
        replace(change, line=Line(JOINS.client, Identity().public.hex())).apply(ROSTER)
    swapped = {**change.signatures, "bank-a": change.signatures["bank-b"]}
    with pytest.raises(ConfigError, match="signature of bank-a is not by its key"):
        replace(change, signatures=swapped).apply(ROSTER)
    with pytest.raises(ConfigError, match="of another roster than yours"):
        change.apply(change.apply(ROSTER))  # a replay
    with pytest.raises(ConfigError, match="holds another key of bank-a"):
        propose(ROSTER, "bank-d", JOINS).sign(ROSTER, "bank-a", Identity())
    with pytest.raises(ConfigError, match="organisation among the signatures"):
        replace(change, signatures={**change.signatures, "bank-x": "00"}).apply(ROSTER)


def test_mistakes_in_a_proposal() -> None:
    with pytest.raises(ConfigError, match="organisation on the roster"):
        propose(ROSTER, "bank-x", None)
    with pytest.raises(ConfigError, match="says so already"):
        propose(ROSTER, "bank-a", LINES["bank-a"])
    with pytest.raises(ConfigError, match="belongs to bank-a"):
        propose(ROSTER, "bank-d", Line(LINES["bank-a"].client, NEW.public.hex()))


def test_the_hash_depends_on_every_line() -> None:
    others = [LINES | {"bank-d": JOINS}, {**LINES, "bank-a": JOINS}, {k: v for k, v in LINES.items() if k != "bank-a"}]
    assert len({Roster(each).hash for each in [LINES, *others]} | {Roster(LINES, 1).hash}) == 5
    assert Roster(dict(reversed(LINES.items()))).hash == ROSTER.hash


def test_a_roster_that_is_again_what_it_was_takes_no_old_change() -> None:
    """bank-d has left: whoever kept the change by which it came, with everybody's signatures, cannot bring it back."""
    came = signed(propose(ROSTER, "bank-d", JOINS), *OWN)
    grown = came.apply(ROSTER)
    left = propose(grown, "bank-d", None)
    for name, identity in OWN.items():
        left = left.sign(grown, name, identity)
    again = left.apply(grown)
    assert again.lines == LINES
    with pytest.raises(ConfigError, match="of another roster than yours"):
        came.apply(again)


@pytest.mark.parametrize(
    "field, value",
    [("organisation", "bank-d\x1b[2K\rbank-b leaves"), ("client", "a\nb"), ("client", 7), ("key", "00"), ("key", 1)],
)
def test_a_change_that_would_show_something_else_than_is_signed(tmp_path: Path, field: str, value: object) -> None:
    propose(ROSTER, "bank-d", JOINS).write(tmp_path / "change.toml")
    content = tomllib.loads((tmp_path / "change.toml").read_text())
    (tmp_path / "change.toml").write_text(tomli_w.dumps({**content, field: value}))
    with pytest.raises(ConfigError, match=r"cannot be called|is no change of a roster"):
        RosterChange.read(tmp_path / "change.toml")


def test_by_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    banks = ("bank-a", "bank-b")
    lines = ""
    for bank in banks:
        (tmp_path / bank).mkdir()
        assert main(["client", "identity", bank, "--client", bank, "--out", str(tmp_path / bank / "identity.key")]) == 0
        lines += capsys.readouterr().out
    for bank in banks:
        (tmp_path / bank / "roster.toml").write_text(lines)
    (tmp_path / "new.toml").write_text(f'[bank-c]\nclient = "bank-c"\nkey = "{NEW.public.hex()}"\n')
    change = str(tmp_path / "change.toml")

    def client(bank: str, *arguments: str) -> int:
        return main(["client", "roster", *arguments, "--config", str(tmp_path / bank / "client.toml")])

    assert client("bank-a", "add", str(tmp_path / "new.toml"), "--out", change) == 0
    assert "ask bank-c by another way, e.g. by phone, for its key" in capsys.readouterr().err
    assert client("bank-a", "sign", change) == 0 and "still missing: bank-b" in capsys.readouterr().out
    assert client("bank-a", "apply", change) == 2 and "bank-b has not signed" in capsys.readouterr().err
    assert client("bank-b", "sign", change) == 0 and "all who stay have signed" in capsys.readouterr().out
    for bank in banks:
        assert client(bank, "apply", change) == 0
        assert set(Roster.read(tmp_path / bank / "roster.toml").lines) == {*banks, "bank-c"}
        assert len(list((tmp_path / bank).glob("roster.toml.*"))) == 1
        assert "bank-c is bank-c with the key" in (tmp_path / bank / "state" / "audit.jsonl").read_text()


def test_a_written_roster_reads_back(tmp_path: Path) -> None:
    (tmp_path / "roster.toml").write_text(f'[bank-a]\nclient = "a"\nkey = "{OWN["bank-a"].public.hex()}"\n')
    Roster(LINES, 3).write(tmp_path / "roster.toml")
    assert Roster.read(tmp_path / "roster.toml") == Roster(LINES, 3)
