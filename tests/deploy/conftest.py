"""One torch thread, and the startup kits of a small federation, made once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def kits(tmp_path_factory: pytest.TempPathFactory) -> object:
    """By name: server, coordinator, bank-a, bank-b, and one of the role super."""
    pytest.importorskip("nvflare", reason="the engine nvflare is an extra")
    from isthmus.deploy.loopback import free_port
    from isthmus.deploy.provisioning import FederationConfig, provision

    extra = [{"name": "super@x.isthmus", "type": "admin", "org": "x", "role": "super"}]
    config = FederationConfig("x", ("bank-a", "bank-b"), port=free_port())
    return provision(config, tmp_path_factory.mktemp("federation"), extra)
