"""``client.toml``, the roster and identities: mistakes are named before anybody connects."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from isthmus.deploy.roster import Organisations, make_identity, read_identity
from isthmus.deploy.settings import SiteSettings
from isthmus.errors import ConfigError

DATA = '[data]\ndataset = "cora"\nclients = 3\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("client = ", "is not valid TOML"),
        (f'clint = "client-0"\n{DATA}', "did you mean 'client'?"),
        ('client = "client-0"', "has no table [data]"),
        (DATA, "does not say which client this organisation is"),
        ('client = "client-0"\n[data]\ndataset = "cora"', "must say at least dataset and clients"),
        (f'client = "client-0"\n{DATA}sead = 1', "did you mean 'seed'?"),
        (f'client = "client-0"\n{DATA}seed = "one"', "seed in [data] of client.toml must be a whole number"),
        ("[data]\nsimulated = [3, 3]", "must be [number, sites]"),
        (f'client = "client-0"\nroster = 3\n{DATA}', "are paths, got 3"),
    ],
)
def test_mistakes_in_client_toml(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "client.toml").write_text(text)
    with pytest.raises(ConfigError) as error:
        SiteSettings.read(tmp_path / "client.toml")
    assert said in str(error.value) and "\n" not in str(error.value)


def test_paths_are_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "client.toml").write_text(f'client = "client-1"\nroster = "../r.toml"\n{DATA}')
    settings = SiteSettings.read(tmp_path / "client.toml")
    assert settings.state == tmp_path / "state" and settings.roster == tmp_path / "../r.toml"
    assert settings.clients_of(["client-0", "client-1"]) == ("client-1",)
    with pytest.raises(ConfigError, match=r"unknown client in client\.toml 'client-1'"):
        settings.clients_of(["client-0"])


def test_simulated_sites_share_the_clients(tmp_path: Path) -> None:
    names = [f"client-{number}" for number in range(5)]
    found: list[str] = []
    for number in range(3):
        (tmp_path / "client.toml").write_text(f"[data]\nsimulated = [{number}, 3]")
        found += SiteSettings.read(tmp_path / "client.toml").clients_of(names)
    assert sorted(found) == names


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
    ("text", "said"),
    [
        ('[a]\nkey = "00"\nclient = "client-0"', "has 1 bytes instead of 32"),
        ('[a]\nkey = "zz"\nclient = "client-0"', "must hold client"),
        (f'[a]\nkey = "{"0" * 64}"', "must hold client"),
        (
            f'[a]\nkey = "{"0" * 64}"\nclient = "x"\n[b]\nkey = "{"1" * 64}"\nclient = "x"',
            "gives 'x' to two organisations (a and b)",
        ),
    ],
)
def test_mistakes_in_the_roster(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "roster.toml").write_text(text)
    with pytest.raises(ConfigError) as error:
        Organisations.read(tmp_path / "roster.toml")
    assert said in str(error.value)
