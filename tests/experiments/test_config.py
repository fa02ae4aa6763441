"""Settings: where they come from, their types, what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from run_helpers import small
from torch_geometric.data import Data

import isthmus
from isthmus.data.datasets import canonical_name
from isthmus.data.graphsets import SETTINGS
from isthmus.errors import ConfigError
from isthmus.experiments import run
from isthmus.experiments.config import RunConfig, Settings, read_file, resolve, settings_from_toml
from isthmus.experiments.config_values import coerce, parse_override
from isthmus.experiments.presets import CONDITIONS, load_preset, preset_names
from isthmus.experiments.scenarios import build, parts_for
from isthmus.experiments.score_rules import SCORE_RULES
from isthmus.experiments.variants import chosen, with_variant
from isthmus.methods.registry import all_methods, get_method

METHODS = [method.name for method in all_methods()]


def keys_of(config: type) -> set[str]:
    return {f.metadata.get("key", f.name) for f in dataclasses.fields(config)}


NODES_ONLY = [method.name for method in all_methods() if method.tasks == ("node",)]


@pytest.mark.parametrize("method", NODES_ONLY)
def test_a_method_for_nodes_says_so_before_anything_else(method: str) -> None:
    """Also where a scenario of the other kind is handed over."""
    with pytest.raises(ConfigError, match=f"^{method} learns from the nodes of one graph.*fedstar"):
        resolve(method, {"dataset": "motifs"})
    graphs = build(dataset="motifs", partition=None, clients=3, split=None, seed=0)
    with pytest.raises(ConfigError, match=f"^{method} learns from the nodes of one graph"):
        parts_for(resolve(method, {"dataset": "csbm"}), graphs)


def test_which_methods_are_for_nodes_only() -> None:
    assert {
        "adafgl",
        "apfl",
        "fedgcn",
        "fedggr",
        "fedgta",
        "fedlit",
        "fedpergnn",
        "fedproto",
        "fedpub",
        "fedsageplus",
        "fedspray",
        "fedspray-published",
        "fedstruct",
        "fedstruct-private",
        "fedstruct-server",
        "fedtad",
        "hifgl",
        "mlpteacher",
        "moon",
    } == set(NODES_ONLY)


# -- where settings come from ----------------------------------------------------------------------


def test_precedence(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("lr = 0.3\n[run]\nrounds = 33\nseed = 3\n[method]\ndropout = 0.33\n")
    default, preset = (
        get_method("fedavg").config(),
        resolve("fedavg", {"dataset": "cora", "preset": "fedstruct"}).method_config,
    )
    assert (default.lr, default.dropout, default.hidden) == (0.01, 0.5, (64,))
    assert (preset.lr, preset.dropout, preset.hidden) == (0.002, 0.7, (128, 64)), "the preset wins over defaults"
    from_file = resolve("fedavg", {"dataset": "cora"}, {}, file)
    found = from_file.method_config.lr, from_file.method_config.dropout, from_file.run.rounds
    assert found == (0.3, 0.33, 33), "the file over the preset"
    overridden = resolve("fedavg", {"dataset": "cora"}, {"lr": "0.4", "rounds": 44}, file)
    assert (overridden.method_config.lr, overridden.method_config.dropout, overridden.run.rounds) == (0.4, 0.33, 44), (
        "--set over the file"
    )
    flagged = resolve("fedavg", {"dataset": "cora", "rounds": 55, "seed": None}, {"lr": "0.4", "rounds": 44}, file)
    assert (flagged.run.rounds, flagged.method_config.lr, flagged.run.seed) == (55, 0.4, 3), (
        "a flag over --set; None is not given"
    )


def test_a_file_may_pick_preset_and_data_set(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('dataset = "pubmed"\nprofile = "reference"\n[checkpoint]\nevery = 7\n')
    settings = resolve("fedavg", {}, {}, file)
    assert (
        settings.run.rounds == 50
        and settings.method_config.loss == "double_softmax"
        and settings.run.checkpoint_every == 7
    )


@pytest.mark.parametrize("spelling", ["photo", "Amazon-Photo", "amazon_photo", "PHOTO"])
def test_presets_know_a_data_set_under_all_its_names(spelling: str) -> None:
    assert resolve("fedavg", {"dataset": spelling, "preset": "fedstruct"}).run.rounds == 150
    assert resolve("fedstruct", {"dataset": spelling}).run.preset == "fedstruct"


@pytest.mark.parametrize("method", METHODS)
def test_config_toml_round_trip(method: str, tmp_path: Path) -> None:
    settings = resolve(method, {"dataset": "cora", "seed": 5, "clients": 4}, {"hidden": "7", "checkpoint.every": 3})
    assert settings_from_toml(settings.to_toml()) == settings
    file = tmp_path / "config.toml"
    file.write_text(settings.to_toml())
    assert resolve(method, {}, {}, file) == settings, "a run's own config.toml, given back by --config"


def test_round_trip_keeps_none() -> None:
    settings = small()
    unresolved = dataclasses.replace(settings, run=dataclasses.replace(settings.run, clients=None))
    assert settings_from_toml(unresolved.to_toml()).run.clients is None


@pytest.mark.parametrize("where", ["overrides", "file", "flags"])
def test_settings_of_another_method_are_refused(where: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('method = "fedprox"\n')
    with pytest.raises(ConfigError, match="another method than 'fedavg'"):
        resolve(
            "fedavg",
            {"dataset": "cora"} | ({"method": "fedprox"} if where == "flags" else {}),
            {"method": "fedprox"} if where == "overrides" else {},
            file if where == "file" else None,
        )


# -- types -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("wire=false", False),
        ("wire=true", True),
        ("wire=False", False),
        ('wire="false"', False),
        ("rounds=7", 7),
        ("rounds=7.0", 7),
        ("rounds = 7", 7),
        ("lr=1e-3", 1e-3),
        ("lr=1", 1.0),
        ("hidden=128,64", (128, 64)),
        ("hidden=[128, 64]", (128, 64)),
        ("hidden=32", (32,)),
        ("weighting=nodes", "nodes"),
        ("split=20/20/60", "20/20/60"),
        ("dataset=csbm:nodes=60,classes=3", "csbm:nodes=60,classes=3"),
        ("clients=none", None),
        ("checkpoint.every=3", 3),
    ],
)
def test_values_from_the_command_line(text: str, value: object) -> None:
    key, given = parse_override(text)
    settings = resolve("fedavg", {}, {"dataset": "csbm", "head": False, key: given})
    name = key.replace(".", "_")
    found = getattr(settings.run, name) if hasattr(settings.run, name) else getattr(settings.method_config, name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text", ["lr", "=3", " =3", ""])
def test_set_needs_key_and_value(text: str) -> None:
    with pytest.raises(ConfigError, match="--set takes key=value"):
        parse_override(text)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (True, int),
        ("x", int),
        (2.5, int),
        (float("inf"), int),
        (float("nan"), int),
        ([1], int),
        ({}, int),
        (None, int),
        ("1e3", int),
        (True, float),
        ("x", float),
        (float("nan"), float),
        ("inf", float),
        (10**400, float),
        ({"a": 1}, float),
        (None, float),
        (1, bool),
        ("yes", bool),
        (None, bool),
        (True, str),
        ([], str),
        (None, str),
        ("a,b", tuple[int, ...]),
        ([1, 2.5], tuple[int, ...]),
        ("c", Literal["a", "b"]),
        (1, Literal["a", "b"]),
        ("x", int | None),
    ],
)
def test_wrong_types_are_config_errors(value: Any, hint: Any) -> None:
    with pytest.raises(ConfigError, match="setting"):
        coerce(value, hint, "setting")


def test_literals_name_what_is_allowed() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown value for optimizer 'adan': did you mean 'adam'\? allowed: adam, adamw, sgd"
    ):
        small(optimizer="adan")


# -- what is refused -------------------------------------------------------------------------------


NEAREST = [("lrr", "lr"), ("checkpoint_every", "checkpoint.every"), ("round", "rounds"), ("Seed", "seed")]


@pytest.mark.parametrize(("given", "nearest"), NEAREST)
@pytest.mark.parametrize("where", ["flags", "overrides", "file"])
def test_unknown_keys_name_the_nearest(given: str, nearest: str, where: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f'[method]\n"{given}" = 1\n')
    with pytest.raises(
        ConfigError, match=rf"^unknown key '{given}': did you mean '{nearest}'\? allowed: .*weight_decay"
    ) as caught:
        resolve(
            "fedavg",
            {"dataset": "cora"} | ({given: 1} if where == "flags" else {}),
            {given: "1"} if where == "overrides" else {},
            file if where == "file" else None,
        )
    assert " mu" not in str(caught.value), "keys of other methods are not offered"


def test_a_key_of_another_method_is_unknown() -> None:
    assert small("fedprox", mu=0.5).method_config.mu == 0.5
    with pytest.raises(ConfigError, match="unknown key 'mu'"):
        small("fedavg", mu=0.5)


OUT_OF_RANGE: dict[str, tuple[Any, ...]] = {
    "clients": (0, -1),
    "seed": (-1, 2**63),
    "rounds": (0, -5),
    "eval_every": (0, -1),
    "patience": (-1,),
    "schedule_rounds": (0, -1),
    "checkpoint.every": (-1,),
    "threads": (0, 10**10),
    "hidden": ("0", "-3", "8,0", 10**18),
    "dropout": (-0.1, 1.0, 1.5),
    "lr": (0.0, -1.0),
    "weight_decay": (-1e-9,),
    "local_epochs": (0, -2),
    "batch_size": (0, -1),
    "fanout": ("0", "5,-1"),
    "batches": ("walks",),
    "hops": (-1,),
    "heads": (0,),
    "alpha": (2.0,),
    "dprate": (1.5,),
    "attention_dropout": (-1.0,),
    "fraction": (0.0, 1.01, -0.5),
    "mu": (-0.1,),
    "personal_layers": (-1,),
    "dp_clip": (-1.0,),
    "dp_noise": (-0.5,),
    "dp_shares": (0, -1),
    "dp_delta": (0.0, 1.0, -1e-5),
    "ray.actors": (0, -2),
    "nvflare.sites": (0, -1),
    "lambda1": (-1.0,),
    "lambda2": (-0.1,),
    "proxy_width": (0, -4),
    "encoder_lr": (0.0,),
    "proxy_lr": (0.0, -1.0),
    "kd_confidence": (-0.1, 1.1),
    "min_class_count": (0,),
    "mixing": (-0.1, 1.1),
    "alpha_lr": (-1.0,),
    "types": (0,),
    "eps1": (-1.0,),
    "eps2": (-0.1,),
    "warmup": (-1,),
    "window": (0,),
    "degrees": (0, -1),
    "steps": (0, -1),
    "clip": (-1.0,),
    "epsilon": (-1.0,),
    "structure_hops": (0, -1),
    "betas": ("0.5",),
    "beta0": ("x",),
    "prune": (-1,),
    "nsf_dim": (0,),
    "structure_hidden": ("0",),
    "nsf_lr": (0.0,),
    "nsf_weight_decay": (-1.0,),
    "self_supervision": (-1.0,),
    "hidden_share": (0.0, 1.0),
    "local_width": (0,),
    "global_width": (0,),
    "joint_dropout": (-0.1, 1.0),
    "k": (0, -1),
    "refresh": (0,),
    "server_hidden": (0,),
    "input_dropout": (-0.1, 1.0),
    "server_lr": (0.0, -1.0),
    "encoder_hidden": (0,),
    "embedding_width": (0,),
    "encoder_epochs": (-1,),
    "encoder_every": (0,),
    "quorum": (0.0, 1.5),
    "gradient_clip": (-1.0,),
    "gradient_noise": (-1.0,),
    "embedding_bits": (-1,),
    "lr_decay": (0.0, -1.0),
    "lr_step": (0,),
    "threshold": (0, -1),
    "k_min": (0,),
    "message_clip": (0.0,),
    "message_noise": (-1.0,),
    "horizon": (0,),
    "prime": (0, 4),
    "bound": (0.0,),
    "max_degree": (0,),
    "columns": (0,),
    "min_cohort": (0,),
    "fraction_bits": (-1, 80),
    "trim": (0.0, 0.5),
    "groups": (-1, 1, 2),
    "max_step": (-1.0,),
    "pull": (-1.0,),
    "temperature": (0.0, -1.0),
    "order": (0,),
    "similarity": (-1.1, 1.1),
    "mix": (-0.1, 1.1),
    "sharpness": (-1.0,),
    "sparsity": (-1.0,),
    "nearness": (-1.0,),
    "proxy_graphs": (0,),
    "proxy_nodes": (0,),
    "proxy_degree": (0.0,),
    "distil_epochs": (-1,),
    "generator_steps": (-1,),
    "model_steps": (-1,),
    "distil_lr": (-1.0,),
    "distil_weight_decay": (-1.0,),
    "pseudo_nodes": (1,),
    "pseudo_neighbours": (0,),
    "noise_width": (0,),
    "accuracy": (-1.0,),
    "spread": (-1.0,),
    "walk_steps": (0,),
    "p": (0.0, -1.0),
    "q": (0.0, -1.0),
    "walks": (0,),
    "walk_length": (1,),
    "context": (1,),
    "negatives": (0,),
    "nsf_epochs": (0,),
    "gnn_hidden": ("0",),
    "extractor_rounds": (0,),
    "own_edges": (-0.1, 1.1),
    "agreement": (-0.1, 1.1),
    "similar": (-0.1, 1.1),
    "head_width": (0,),
    "head_lr": (0.0,),
    "switch": (-0.1, 1.1),
    "forward_noise": (-1.0,),
    "generator_epochs": (-1,),
    "cross_rounds": (-1,),
    "generator_rank": (-1,),
    "most_neighbours": (0,),
    "encoder_width": (0,),
    "code_width": (0,),
    "generator_widths": ("0",),
    "generator_lr": (0.0,),
    "generator_dropout": (-0.1, 1.0),
    "generator_weight_decay": (-1.0,),
    "least_clients": (-1,),
    "deadline": (-1.0,),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in OUT_OF_RANGE.items() for value in values])
def test_values_out_of_range(key: str, value: Any) -> None:
    takes = [method.name for method in all_methods() if key in keys_of(method.config) | keys_of(RunConfig)]
    assert takes
    for method in takes:
        with pytest.raises(ConfigError):
            resolve(method, {"dataset": "csbm"}, {key: value})


def test_every_numeric_key_has_a_range_test() -> None:
    numeric = set()
    for config in (RunConfig, *(method.config for method in all_methods())):
        for f in dataclasses.fields(config):
            if any(word in str(f.type) for word in ("int", "float")) and "Literal" not in str(f.type):
                numeric.add(f.metadata.get("key", f.name))
    assert numeric <= OUT_OF_RANGE.keys()


def test_wire_and_cohort_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="execution=each"):
        small(wire=True, execution="cohort")


def test_no_data_set() -> None:
    with pytest.raises(ConfigError, match="--dataset"):
        resolve("fedavg", {"rounds": 1})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rounds = ", "not valid TOML"),
        ("run = 3", "unknown key 'run'"),
        ('score = "x"', "unknown key 'score'"),
        ("[method]\nfoo.bar = 1", "foo.bar"),
    ],
)
def test_bad_config_files(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        resolve("fedavg", {"dataset": "cora"}, {}, file)


def test_unreadable_config_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_file(tmp_path / "missing.toml")
    (tmp_path / "c.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_file(tmp_path / "c.toml")


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: text.replace("[method]", "[methods]"),
        lambda text: "method = 3\n" + text.replace("[method]", "[m]"),
        lambda text: text.replace("rounds", "runds"),
        lambda text: text.replace("node_weighted_last", "best_of_all"),
        lambda text: text.replace('method = "fedavg"', 'method = "x"'),
    ],
)
def test_damaged_resolved_config(damage: Any) -> None:
    with pytest.raises(ConfigError):
        settings_from_toml(damage(small().to_toml()))


# -- presets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", preset_names())
def test_every_key_of_a_preset_is_known(name: str) -> None:
    preset = load_preset(name)
    known = keys_of(RunConfig).union(*(keys_of(method.config) for method in all_methods()))
    assert preset.score in SCORE_RULES and preset.title and preset.layers
    for layer in preset.layers:
        assert set(layer) <= {*CONDITIONS, "set"}, f"a misspelt condition would apply always: {layer}"
        assert set(layer["set"]) <= known, f"nobody reads {set(layer['set']) - known}"
        assert not set(layer["set"]) & {"method", "dataset", "preset", "profile"}


@pytest.mark.parametrize("name", preset_names())
def test_every_layer_of_a_preset_can_apply(name: str) -> None:
    """Conditions name methods, profiles and data sets that exist (aliases are folded into names before a preset is
    asked).
    """
    for layer in load_preset(name).layers:
        for condition, known in (("method", METHODS), ("profile", ["paper", "reference"])):
            wanted = layer.get(condition, known[0])
            assert set(wanted if isinstance(wanted, list) else [wanted]) <= set(known)
        wanted = layer.get("dataset", [])
        names = wanted if isinstance(wanted, list) else [wanted]
        assert not names or set(names) <= set(SETTINGS) or {canonical_name(dataset) for dataset in names} & set(names)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("profile", ["paper", "reference"])
@pytest.mark.parametrize("dataset", ["cora", "chameleon", "csbm"])
def test_a_method_runs_as_it_comes(method: str, profile: str, dataset: str) -> None:
    settings = resolve(method, {"dataset": dataset, "profile": profile})
    assert settings.run.preset == (get_method(method).preset or "fedstruct"), "who names a profile means a paper"


@pytest.mark.parametrize("method", METHODS)
def test_the_general_preset_is_the_default_where_no_paper_has_the_data(method: str) -> None:
    assert resolve(method, {"dataset": "csbm"}).run.preset == "general"
    paper = get_method(method).preset
    known = paper is not None and "cora" in load_preset(paper).datasets
    assert resolve(method, {"dataset": "cora"}).run.preset == (paper if known else "general")
    if get_method(method).tasks != ("node",):
        assert resolve(method, {"dataset": "motifs"}).run.preset == "general"


def test_variants_are_named_tried_or_fixed_by_a_setting_of_theirs() -> None:
    assert resolve("hifgl", {"dataset": "csbm"}).run.variant == "auto"
    fixed = resolve("hifgl", {"dataset": "csbm"}, {"backbone": "gcn"})
    assert (fixed.run.variant, fixed.method_config.backbone) == ("own", "gcn"), "what is given by hand stays"
    named = resolve("hifgl", {"dataset": "csbm"}, {"variant": "smooth"})
    assert (named.run.variant, named.method_config.backbone) == ("smooth", "gcn")
    assert resolve("fedavg", {"dataset": "csbm"}).run.variant == "none"
    with pytest.raises(ConfigError, match=r"variant of hifgl.*own, smooth"):
        resolve("hifgl", {"dataset": "csbm"}, {"variant": "rough"})
    for method in METHODS:
        assert len(load_preset("general").variants(method)) <= 4


@pytest.mark.parametrize("method", ["fedstruct", "hifgl", "fedspray"])
def test_a_variant_that_was_tried_is_the_variant_that_is_named(method: str) -> None:
    auto = resolve(method, {"dataset": "csbm"})
    for name in load_preset("general").variants(method):
        assert with_variant(auto, name) == resolve(method, {"dataset": "csbm", "variant": name})


def test_validation_chooses_the_variant() -> None:
    auto = resolve("fedstruct", {"dataset": "csbm"})
    scores = {"near": 0.4, "degrees": 0.5, "far": 0.9, "links": None}
    settings, found = chosen(auto, lambda trial: scores[trial.run.variant])
    assert settings == with_variant(auto, "far") and found == scores
    assert chosen(settings, lambda trial: pytest.fail("nothing is left to choose")) == (settings, {})


def test_a_variant_that_reads_arcs_otherwise_is_tried_and_run_on_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ring = torch.stack((torch.arange(60), (torch.arange(60) + 1) % 60))
    graph = Data(x=torch.randn(60, 4), edge_index=ring, y=torch.arange(60) % 2)
    arcs = {}

    class Told(run.SimulatedRun):
        def __init__(self, settings: Settings, scenario: Any, **kept: Any) -> None:
            parts = scenario.parts.values()
            arcs[settings.run.variant] = sum(part.edge_index.shape[1] + part.cross.num_edges for part in parts)
            super().__init__(settings, scenario, **kept)

    monkeypatch.setattr(run, "SimulatedRun", Told)
    monkeypatch.setattr(run, "_validated", lambda *given: _scored(*given))

    def _scored(scenario: Any, built_for: RunConfig, settings: Settings) -> float:
        with Told(settings, run._scenario_again(scenario, built_for, settings)):
            return float(settings.run.variant == "links")

    result = isthmus.run("fedstruct", dataset=graph, partition="random", clients=3, rounds=1, out=tmp_path / "run")
    assert (result["variant"], settings_from_toml((tmp_path / "run/config.toml").read_text()).run.undirected) == (
        "links",
        False,
    )
    assert arcs["near"] == arcs["far"] == 2 * arcs["links"]


@pytest.mark.parametrize(
    "method", ["local", "central", "fedavg", "fedsgd", "fedprox", "fedper", "apfl", "gcfl", "gcflplus"]
)
@pytest.mark.parametrize("profile", ["paper", "reference"])
@pytest.mark.parametrize("dataset", ["cora", "chameleon", "csbm"])
def test_every_preset_gives_baselines_valid_settings(method: str, profile: str, dataset: str) -> None:
    for preset in preset_names():
        for backbone in ("sage", "gcn", "mlp"):
            settings = resolve(method, {"dataset": dataset, "profile": profile, "preset": preset, "backbone": backbone})
            assert isinstance(settings, Settings) and settings.run.preset == preset


def test_unknown_preset() -> None:
    with pytest.raises(ConfigError, match="unknown preset 'fedstrukt': did you mean 'fedstruct'"):
        resolve("fedavg", {"dataset": "cora", "preset": "fedstrukt"})
