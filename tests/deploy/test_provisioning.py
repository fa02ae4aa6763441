"""Making a federation: mistakes, and the rights of key files."""

from __future__ import annotations

import stat

import pytest

pytest.importorskip("nvflare", reason="the engine nvflare is an extra")

from isthmus.deploy.provisioning import FederationConfig, provision
from isthmus.deploy.startup_kit import StartupKit
from isthmus.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"organisations": ("Bank A",)}, "organisation 'Bank A'"),
        ({"organisations": ("a", "a")}, "every organisation once"),
        ({"organisations": ("server",)}, "cannot be called 'server'"),
        ({"host": "not a host"}, "host 'not a host'"),
        ({"port": 70000}, "port must lie between"),
        ({"days": 0}, "at least a day"),
        ({"name": "../x"}, "federation '../x'"),
    ],
)
def test_mistakes_in_a_federation_config(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        FederationConfig(**{"name": "x", "organisations": ("bank-a",), **given})  # type: ignore[arg-type]
    assert message in str(error.value)


def test_a_second_federation_in_a_folder_is_refused(kits: dict[str, StartupKit]) -> None:
    with pytest.raises(ConfigError, match="already holds a federation"):
        provision(FederationConfig("x", ("bank-a",)), kits["server"].path.parents[1])


def test_keys_are_for_their_owner_alone(kits: dict[str, StartupKit]) -> None:
    for kit in kits.values():
        for key in kit.startup.glob("*.key"):
            assert stat.S_IMODE(key.stat().st_mode) == 0o600
