"""The roster and identities of organisations."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from isthmus.deploy.roster import OrganisationKeys, make_identity, read_identity
from isthmus.errors import ConfigError


def test_identities(tmp_path: Path) -> None:
    made = make_identity(tmp_path / "identity.key")
    assert read_identity(tmp_path / "identity.key").public == made.public
    assert stat.S_IMODE((tmp_path / "identity.key").stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="exists already"):
        make_identity(tmp_path / "identity.key")
    (tmp_path / "bad.key").write_text("xyz")
    with pytest.raises(ConfigError, match="is not an identity"):
        read_identity(tmp_path / "bad.key")
    with pytest.raises(ConfigError, match="cannot read the identity"):
        read_identity(tmp_path / "none.key")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[a]\nkey = "00"\nclient = "client-0"', "has 1 bytes instead of 32"),
        ('[a]\nkey = "zz"\nclient = "client-0"', "must hold client"),
        (f'[a]\nkey = "{"0" * 64}"', "must hold client"),
        (
            f'[a]\nkey = "{"0" * 64}"\nclient = "x"\n[b]\nkey = "{"1" * 64}"\nclient = "x"',
            "gives 'x' to two organisations (a and b)",
        ),
        (
            f'[a]\nkey = "{"0" * 64}"\nclient = "x"\n[b]\nkey = "{"0" * 64}"\nclient = "y"',
            "[a] and [b] in",
        ),
    ],
)
def test_mistakes_in_the_roster(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "roster.toml").write_text(text)
    with pytest.raises(ConfigError) as error:
        OrganisationKeys.read(tmp_path / "roster.toml")
    assert message in str(error.value)
