"""``client.toml``: mistakes are reported before the site connects."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.deploy.site_settings import SiteSettings
from isthmus.errors import ConfigError

DATA = '[data]\ndataset = "cora"\nclients = 3\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client = ", "is not valid TOML"),
        (f'clint = "client-0"\n{DATA}', "did you mean 'client'?"),
        ('client = "client-0"', "needs either [tables]"),
        (DATA, "does not say which client this organisation is"),
        ('client = "client-0"\n[data]\ndataset = "cora"', "must hold at least dataset and clients"),
        (f'client = "client-0"\n{DATA}sead = 1', "did you mean 'seed'?"),
        (f'client = "client-0"\n{DATA}seed = "one"', "seed in [data] of client.toml must be a whole number"),
        ("[data]\nsimulated = [3, 3]", "must be [number, sites]"),
        (f'client = "client-0"\nroster = 3\n{DATA}', "must be paths, got 3"),
    ],
)
def test_mistakes_in_client_toml(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "client.toml").write_text(text)
    with pytest.raises(ConfigError) as error:
        SiteSettings.read(tmp_path / "client.toml")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
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
