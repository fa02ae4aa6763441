"""Startup kits of a small federation, made once: the provisioner takes a second."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def kits(tmp_path_factory: pytest.TempPathFactory) -> object:
    """By name: server, coordinator, bank-a, bank-b, and one of the role super."""
    pytest.importorskip("nvflare", reason="the engine nvflare is an extra")
    from isthmus.deploy.loopback import free_port
    from isthmus.deploy.provisioning import FederationConfig, provision

    extra = [{"name": "super@x.isthmus", "type": "admin", "org": "x", "role": "super"}]
    config = FederationConfig("x", ("bank-a", "bank-b"), port=free_port())
    return provision(config, tmp_path_factory.mktemp("federation"), extra)
