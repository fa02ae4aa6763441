"""``docs/banks.md`` up to the point where server and clients start; ``tests/engines`` runs the whole page."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from banks_page import BANKS, HUB, Hosts, blocks

pytest.importorskip("nvflare", reason="the engine nvflare is an extra")
pytest.importorskip("polars", reason="needs the extra tables")
pytest.importorskip("private_set_intersection", reason="needs the extra tables")

from isthmus.deploy.client_setup import ClientSetup
from isthmus.deploy.federation_folder import FederationFolder


def test_everything_before_the_start(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    for block in itertools.takewhile(lambda block: not block.background, blocks()):
        hosts.run(block)
    for bank in BANKS:
        setup = ClientSetup.check(tmp_path / bank / "kit", tmp_path / bank / "client.toml")
        assert f"{bank} is {bank}; the roster has 3 organisations" in setup.summary
    federation = FederationFolder.read(tmp_path / HUB / "federation")
    assert federation.offers().keys() == set(BANKS)
    (run,) = (block for block in blocks() if "isthmus submit run.toml" in block.script)
    (tmp_path / "run.toml").write_text(run.script.partition("<<'END'\n")[2].partition("END\n")[0])
    assert federation.create_run(tmp_path / "run.toml").startswith("fedavg-")
