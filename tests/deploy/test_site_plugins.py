"""Own methods and backbones between organisations: every site runs the files it lists itself, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process_sites import InProcessTransport, federation, run_in_process, settings_of

from isthmus.deploy.site_runtime import SiteRuntime
from isthmus.deploy.site_settings import SiteSettings
from isthmus.errors import IsthmusError
from isthmus.experiments.run import start

NET = """
from torch import nn

class SiteNet(nn.Module):
    def __init__(self, num_features, num_classes):
        super().__init__()
        self.only = nn.Linear(num_features, num_classes)

    def forward(self, x, edge_index):
        return self.only(x)
"""


def list_file(transport: InProcessTransport, site: str, text: str) -> None:
    """A site puts a file beside its client.toml, lists it, and starts again."""
    path = transport.runtimes[site].settings.path
    (path.parent / "received.py").write_text(text)
    path.write_text(f'plugins = ["received.py"]\n{path.read_text()}')
    transport.runtimes[site] = SiteRuntime(SiteSettings.read(path))


def test_sites_that_list_the_same_file_end_as_one_process_does(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    settings = settings_of("fedavg", backbone=f"{tmp_path}/net.py:SiteNet")
    transport = federation(tmp_path)
    with pytest.raises(IsthmusError, match=r"net\.py \(SHA-256 .*plugins = \[\.\.\.\] in client\.toml"):
        run_in_process(tmp_path, transport, settings)
    list_file(transport, "bank-0", NET)
    list_file(transport, "bank-1", NET + "\n# another\n")
    with pytest.raises(IsthmusError, match="this site does not list the same file"):
        run_in_process(tmp_path, transport, settings, run="second")
    (transport.runtimes["bank-1"].settings.path.parent / "received.py").write_text(NET)
    result = run_in_process(tmp_path, transport, settings, run="third").result()
    local = settings_of("fedavg", backbone=f"{tmp_path}/net.py:SiteNet")
    object.__setattr__(local.run, "engine", "local")
    assert result is not None and result["test"] == start(local, tmp_path / "one")["test"]
