"""Wrong inputs of FedStruct's three methods, as somebody at a shell meets them: one line, its exit code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fedstruct_helpers import experiment, graph
from torch_geometric.data import Data

from isthmus.cli.main import main
from isthmus.errors import DataError
from isthmus.federation.interface import Failure, QuorumError

SETTINGS = {
    "fedstruct prune=-1": "prune must be at least 0 (0 keeps everything), got -1",
    "fedstruct structure_hops=0": "structure_hops must be at least 1, got 0",
    "fedstruct structure_hops=3 betas=0.5,0.5": "one weight per power: structure_hops=3, got 2",
    "fedstruct nsf=walk": "set protocol=hardened",
    "fedstruct nsf=gdv": "unknown value for nsf",
    "fedstruct protocol=published nsf=walk nsf_dim=2": "nsf_dim must be above that",
    "fedstruct-private queries=some": "unknown value for queries",
    "fedstruct protocol=hardened withhold_exposed=true": "withhold_exposed protects sums of hops: set protocol",
    "fedstruct-private protocol=streamed": "set protocol=hardened or published",
    "fedstruct-private nsf_at=clients": "every row of S at its owner: leave nsf_at out",
    "fedstruct-server structure_hops=2 betas=1": "one weight per power: structure_hops=2, got 1",
    "fedstruct-server nsf=node2vec p=0": "node2vec: p must be above 0, got 0.0",
    "fedstruct-server nsf=node2vec walk_length=1": "node2vec: walk_length must be at least 2, got 1",
    "fedstruct-server nsf=node2vec nsf_epochs=0": "nsf_epochs must be at least 1, got 0",
    "fedstruct-server structure_model=gnn gnn_hidden=": "gnn_hidden",
}


def shell(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and last line of ``isthmus run METHOD KEY=VALUE ... [FLAGS]``."""
    words = command.split()
    given = [word for pair in words[1:] if "=" in pair for word in ("--set", pair)]
    flags = [word for word in words[1:] if "=" not in word]
    dataset = [] if "--dataset" in flags else ["--dataset", "csbm:nodes=60", "--preset", "fedstruct"]
    code = main(["run", words[0], *dataset, *given, *flags, "--clients", "3", "--out", str(folder / "run")])
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return code, said.strip().splitlines()[-1] if said.strip() else ""


@pytest.mark.parametrize("command", SETTINGS)
def test_settings_out_of_range(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = shell(command, tmp_path, capsys)
    assert (code, SETTINGS[command] in said) == (2, True), said
    assert not (tmp_path / "run").exists()


def own_graph(folder: Path, *, twice: bool = False, alone: int = 0) -> Path:
    """A ring of 40 nodes, an arc of it listed twice, or nodes beside it that have no edge."""
    ends = torch.arange(40)
    ring = torch.stack([torch.cat([ends, ends.roll(1)]), torch.cat([ends.roll(1), ends])])
    arcs = torch.cat([ring, ring[:, :1]], dim=1) if twice else ring
    nodes = 40 + alone
    torch.manual_seed(0)
    data = Data(x=torch.rand(nodes, 5), edge_index=arcs, y=torch.arange(nodes) % 2, num_nodes=nodes)
    torch.save(data, folder / "graph.pt")
    return folder / "graph.pt"


def test_graphlets_of_a_multigraph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = own_graph(tmp_path, twice=True)
    code, said = shell(f"fedstruct-server nsf=gdv rounds=1 undirected=false --dataset {path}", tmp_path, capsys)
    assert code == 3 and "parallel edges" in said


def test_node2vec_of_isolated_nodes_is_a_row_of_zeros_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = own_graph(tmp_path, alone=4)
    code, _ = shell(f"fedstruct-server nsf=node2vec nsf_epochs=1 rounds=1 --dataset {path}", tmp_path, capsys)
    assert code == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["facts"]["nodes_without_feature"] == 4


@pytest.mark.parametrize("protocol", ["streamed", "hardened", "published"])
def test_owners_that_disagree(protocol: str) -> None:
    where = graph(45, clients=3)
    cross = where.parts["client-1"].cross
    assert cross is not None
    torn = replace(
        cross, **{name: getattr(cross, name)[1:] for name in ("own", "owner", "other", "outgoing", "weight")}
    )
    parts = {**where.parts, "client-1": replace(where.parts["client-1"], cross=torn)}
    with pytest.raises(DataError, match="both ends must list every cross edge") as caught:
        experiment(replace(where, parts=parts), structure_hops=2, protocol=protocol).loop.play()
    assert caught.value.exit_code == 3 and "\n" not in str(caught.value)


@pytest.mark.parametrize("handler", ["send_forward", "take_forward", "send_backward"])
def test_a_client_that_leaves_between_hops(handler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = experiment(graph(45, clients=3), structure_hops=3, rounds=2, protocol="streamed", execution="each")
    party, real = run.engine.party("client-1"), run.engine.party("client-1").invoke
    calls = 0

    def leaves(call):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += call.handler == handler
        return Failure("unavailable", "gone") if calls > 1 else real(call)

    monkeypatch.setattr(party, "invoke", leaves)
    with pytest.raises(QuorumError, match="client-1: unavailable") as caught:
        run.loop.play()
    assert caught.value.exit_code == 4 and "\n" not in str(caught.value)
