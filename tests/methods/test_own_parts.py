"""Methods and backbones from the user's own files: found, recorded by their hash, refused where they do not fit."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import isthmus
from isthmus.api.compare import split_method
from isthmus.cli.main import main
from isthmus.data.scenario import Scenario
from isthmus.errors import ConfigError, DataError
from isthmus.experiments.callbacks import Callback, Progress
from isthmus.experiments.config import resolve, settings_from_toml
from isthmus.experiments.scenarios import scenario_of
from isthmus.nn.own_module import layer_prefixes

METHOD = """
from dataclasses import replace
from isthmus.methods import fedavg
from isthmus.methods.registry import register
for name in NAMES:
    register(replace(fedavg.METHOD, name=name, summary="a test's own"))
"""
NET = """
import torch
from torch import nn

class MeanNet(nn.Module):
    def __init__(self, num_features, num_classes):
        super().__init__()
        self.first = nn.Linear(num_features, 8)
        self.last = nn.Linear(8, num_classes)

    def forward(self, x, edge_index):
        h = torch.dropout(self.first(x).relu(), 0.5, self.training)
        mean = torch.zeros_like(h).index_add_(0, edge_index[1], h[edge_index[0]])
        return self.last(h + mean)
"""
SMALL: dict[str, Any] = {"dataset": "csbm:nodes=90", "clients": 3, "rounds": 2}


class Graphless(nn.Module):
    """No dropout and first weights that are not drawn, so that a plain loop gives the same."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(num_features, 8), nn.Linear(8, num_classes)
        for parameter in self.parameters():
            parameter.data = torch.arange(parameter.numel()).float().sin().view(parameter.shape) / 3

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h: Tensor = self.last(self.first(x).relu())
        return h


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def method_file(folder: Path, *names: str) -> Path:
    path = folder / f"{names[0] if names else 'none'}_file.py"
    path.write_text(METHOD.replace("NAMES", repr(names)))
    return path


def test_a_method_of_a_file_runs_and_is_recorded_by_its_hash(folder: Path) -> None:
    path = method_file(folder, "own-one")
    result = isthmus.run("./own-one_file.py", **SMALL, out="run")
    same = isthmus.run("fedavg", **SMALL, out="fedavg")
    assert result["method"] == "own-one" and result["test"] == same["test"]
    (entry,) = tomllib.loads(Path("run/config.toml").read_text())["run"]["plugins"]
    assert entry.startswith(f"{path} sha256:") and len(entry) == len(f"{path} sha256:") + 64


def test_a_file_with_several_methods_needs_a_name(folder: Path) -> None:
    method_file(folder, "own-two", "own-three")
    with pytest.raises(ConfigError, match=r"own-three, own-two: choose one, as ./own-two_file.py:NAME"):
        resolve("./own-two_file.py", SMALL)
    assert resolve("./own-two_file.py:own-three", SMALL).run.method == "own-three"
    with pytest.raises(ConfigError, match="did you mean 'own-two'"):
        resolve("./own-two_file.py:own-twu", SMALL)
    method_file(folder)
    with pytest.raises(ConfigError, match="registers no method"):
        resolve("./none_file.py", SMALL)
    with pytest.raises(ConfigError, match=r"there is no file \./nothing\.py"):
        resolve("./nothing.py", SMALL)
    Path("broken.py").write_text("import no_such_module_of_anybody")
    with pytest.raises(ConfigError, match=r"cannot be loaded \(ModuleNotFoundError"):
        resolve("./broken.py", SMALL)


def test_plugins_of_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    method_file(folder, "own-four")
    scenario = ["--dataset", "csbm:nodes=90", "--clients", "3", "--rounds", "2", "--plugin", "./own-four_file.py"]
    assert main(["run", "own-four", *scenario, "--out", "a"]) == 0
    assert main(["compare", "own-four", "./own-four_file.py:lr=0.1", *scenario, "--runs", "1", "--out", "b"]) == 0
    assert main(["sweep", "own-four", "--grid", "lr=0.1,0.2", *scenario, "--jobs", "2", "--out", "c"]) == 0
    assert main(["disclose", "own-four", "--plugin", "./own-four_file.py"]) == 0
    assert main(["methods", "./own-four_file.py"]) == 0 and "own-four" in capsys.readouterr().out


def test_settings_of_compare_follow_a_method_of_a_file() -> None:
    assert split_method("./m.py:mine:lr=0.1") == ("./m.py:mine", {"lr": 0.1})
    assert split_method("./m.py:lr=0.1") == ("./m.py", {"lr": 0.1})
    assert split_method("./m.py:mine") == ("./m.py:mine", {})


class StopAfter(Callback):
    def on_round(self, progress: Progress) -> None:
        if progress.phase == "train" and progress.round == 1:
            raise KeyboardInterrupt


def test_resume_takes_the_same_code_and_refuses_another(folder: Path) -> None:
    net = folder / "resumed_net.py"
    net.write_text(NET)
    keys = {**SMALL, "backbone": "./resumed_net.py:MeanNet", "set": {"checkpoint.every": 1}}
    whole = isthmus.run("fedavg", **keys, out="whole")
    with pytest.raises(KeyboardInterrupt):
        isthmus.run("fedavg", **keys, out="cut", callbacks=[StopAfter()])
    net.write_text(NET + "\n# changed\n")
    with pytest.raises(DataError, match="is not the code this run began with"):
        isthmus.resume("cut")
    net.write_text(NET)
    assert isthmus.resume("cut")["test"] == whole["test"]


def test_a_site_runs_only_files_it_lists_itself(folder: Path) -> None:
    path = method_file(folder, "own-five")
    text = resolve("./own-five_file.py", SMALL).to_toml()
    with pytest.raises(ConfigError, match=r"own-five_file.py \(SHA-256 .*client.toml"):
        settings_from_toml(text, own_files=())
    other = folder / "site"
    other.mkdir()
    (other / "copy.py").write_bytes(path.read_bytes() + b"# not the same\n")
    with pytest.raises(ConfigError, match="does not list the same file"):
        settings_from_toml(text, own_files=(other / "copy.py",))
    assert settings_from_toml(text, own_files=(path,)).run.method == "own-five"


# -- backbones ---------------------------------------------------------------------------------------


def test_an_own_module_trains_as_a_plain_loop_does(tmp_path: Path) -> None:
    isthmus.register_backbone("plain-loop", Graphless)
    keys: dict[str, Any] = {"dataset": "csbm:nodes=90", "clients": 2, "rounds": 5, "backbone": "plain-loop"}
    keys |= {"lr": 0.05, "weight_decay": 1e-3, "eval_every": 5, "preset": "fedstruct"}
    isthmus.run("central", **keys, out=tmp_path / "run")
    trained = load_file(tmp_path / "run" / "models" / "central" / "weights.safetensors")
    scenario = scenario_of(resolve("central", keys))
    assert isinstance(scenario, Scenario)
    data = scenario.whole
    model = Graphless(data.num_features, data.num_classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        logits = model(data.x.to_dense(), data.edge_index)
        nn.functional.cross_entropy(logits[data.train], data.y[data.train]).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedper", "fedsgd", "local", "central", "gcfl", "gcflplus"])
def test_methods_that_take_a_module_of_ones_own(method: str, folder: Path) -> None:
    Path("taken_net.py").write_text(NET)
    keys = {**SMALL, "backbone": "./taken_net.py:MeanNet"}
    first = isthmus.run(method, **keys, out="first")
    assert first["test"] == isthmus.run(method, **keys, out="again")["test"]
    if method != "central":
        assert first["test"] == isthmus.run(method, **keys, wire=True, out="wire")["test"]


def test_fedper_keeps_the_last_part_of_an_own_module_at_home(folder: Path) -> None:
    assert layer_prefixes(Graphless(3, 2)) == ("first.", "last.")
    isthmus.register_backbone("personal", Graphless)
    every, shared = (isthmus.run(m, **SMALL, backbone="personal", out=m)["parameters"] for m in ("fedavg", "fedper"))
    assert shared["trainable"] == every["shared"] and 0 < shared["shared"] < every["shared"]


@pytest.mark.parametrize("method", ["fedstruct", "fedgcn", "hifgl", "fedggr", "apfl", "fedspray", "fedsage"])
def test_a_method_that_cannot_take_one_says_which_can(method: str) -> None:
    isthmus.register_backbone("misplaced", Graphless)
    with pytest.raises(ConfigError, match=r"module of your own.*fedavg, fedper, fedprox"):
        resolve(method, {**SMALL, "backbone": "misplaced"})


def test_what_an_own_module_cannot_do_is_said_before_the_run() -> None:
    isthmus.register_backbone("misused", Graphless)
    with pytest.raises(ConfigError, match="use execution=each"):
        resolve("fedavg", {**SMALL, "backbone": "misused", "execution": "cohort"})
    with pytest.raises(ConfigError, match="not sets of graphs"):
        resolve("fedavg", {"dataset": "mutag", "backbone": "misused"})
    with pytest.raises(ConfigError, match="comes with Isthmus"):
        isthmus.register_backbone("graphsage", Graphless)
    isthmus.register_backbone("batchnorm", lambda f, c: nn.Sequential(nn.Linear(f, c), nn.BatchNorm1d(c)))
    with pytest.raises(ConfigError, match="LayerNorm instead of BatchNorm"):
        resolve("fedavg", {**SMALL, "backbone": "batchnorm"})
    isthmus.register_backbone("no-module", lambda f, c: f + c)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="gives a int: it must give a torch"):
        resolve("fedavg", {**SMALL, "backbone": "no-module"})
    with pytest.raises(ConfigError, match="did you mean"):
        resolve("fedavg", {**SMALL, "backbone": "misuse"})
