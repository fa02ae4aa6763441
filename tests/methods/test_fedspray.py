"""FedSpray: the testable properties of its spec, absent classes, thin clients, what leaves a client, and the control
without proxies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.data.scenario import Scenario, build_scenario
from isthmus.errors import ConfigError, RunError
from isthmus.experiments.config import resolve
from isthmus.experiments.disclosure import sheet_of
from isthmus.experiments.run import SimulatedRun
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.interface import QuorumError
from isthmus.federation.party import Invocation
from isthmus.federation.schema import schema
from isthmus.federation.secure import Masked
from isthmus.methods.fedspray import FedSprayClient, FedSprayConfig
from isthmus.methods.fedspray.algorithm import (
    Census,
    Common,
    LocalTraining,
    ServerState,
    SprayState,
    aggregated,
    facts,
    first_proxies,
    proxy_weights,
)
from isthmus.methods.fedspray.algorithm import Update as FedSprayUpdate
from isthmus.nn.optim import OptimizerState
from isthmus.nn.structure_encoder import EncoderResult, soft_labels
from isthmus.seeds import Stream
from isthmus.tensors import Weights, equal_weights, max_difference
from isthmus.testing import check_method

CODE = {
    "proxy_reset": "unlabelled",
    "projector_init": "classifier",
    "kd_confidence": 0.7,
    "init": "uniform01",
    "proxy_start": "ramp",
}
SMALL: dict[str, Any] = {
    "hidden": (8,),
    "dropout": 0.0,
    "rounds": 3,
    "local_epochs": 2,
    "proxy_width": 6,
    "lr": 0.02,
    "secure_sum": False,
    "min_class_count": 1,
    "execution": "each",
}
PERSONAL = {"one_client_equals_local": "the encoder teaches a client that is alone, too"}


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return build_scenario(
        dataset="csbm:nodes=120,classes=3,features=12,degree=4", clients=4, split="client:40/30/30", seed=1
    )


class Recorder(LocalEngine):
    """Keeps what arrives at the server, message by message: what a curious server has."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.heard: list[tuple[str, str, Any]] = []
        self.received: list[tuple[str, Any]] = []

    def dispatch(self, calls: Sequence[Invocation], timeout: float | None) -> Any:
        outcome = super().dispatch(calls, timeout)
        self.received += [(call.handler, call.argument) for call in calls if call.argument is not None]
        if isinstance(outcome, Mapping):  # not where clients are trained together
            self.heard += [
                (call.handler, party, reply)
                for call in calls
                for party, reply in outcome.items()
                if party == call.party
            ]
        return outcome

    def replies(self, handler: str) -> dict[str, Any]:
        """The last replies to one handler by party."""
        return {party: reply for name, party, reply in self.heard if name == handler}


def experiment(method: str, scenario: Scenario, **settings: Any) -> SimulatedRun:
    flags = {"dataset": "csbm", "preset": "fedspray", "clients": len(scenario.parts), "seed": 1, **SMALL, **settings}
    known = {f for f in flags if f not in SMALL or f in settings} | set(_keys(method))
    return SimulatedRun(
        resolve(method, {key: value for key, value in flags.items() if key in known}), scenario, engine=Recorder
    )


def _keys(method: str) -> set[str]:
    from dataclasses import fields

    from isthmus.experiments.config import RunConfig
    from isthmus.methods.registry import get_method

    return {field.name for kind in (RunConfig, get_method(method).config) for field in fields(kind)}


def play(method: str, scenario: Scenario, **settings: Any) -> SimulatedRun:
    played = experiment(method, scenario, **settings)
    played.loop.play()
    return played


def client_of(played: SimulatedRun, name: str = "client-0") -> FedSprayClient[Any]:
    found = played.engine.party(name).client
    assert isinstance(found, FedSprayClient)
    return found


def models(played: SimulatedRun) -> dict[str, Weights]:
    return {name: played.engine.party(name).client.export() for name in played.engine.parties("client")}


def with_labels(scenario: Scenario, change: Mapping[str, Tensor]) -> Scenario:
    """The same scenario with other labels at some clients."""
    return replace(
        scenario, parts={name: replace(data, y=change.get(name, data.y)) for name, data in scenario.parts.items()}
    )


# -- general ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedspray", "mlpteacher", "fedspray-published"])
def test_general_properties(method: str) -> None:
    check_method(method, skip=PERSONAL)


@pytest.mark.parametrize("settings", [{**CODE, "backbone": "sage"}, {"backbone": "sgc"}], ids=str)
def test_general_properties_of_variants(settings: dict[str, Any]) -> None:
    check_method("fedspray", settings=settings, skip=PERSONAL)


# -- 11.1: without teaching it is Local ------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, CODE, {"backbone": "sage", "dropout": 0.4}, {"backbone": "sgc"}], ids=str)
def test_without_teaching_the_gnns_are_locals_bit_for_bit(scenario: Scenario, settings: dict[str, Any]) -> None:
    ours = experiment("fedspray", scenario, lambda1=0.0, **settings)
    alone = experiment(
        "local", scenario, preset="fedspray", **{k: v for k, v in settings.items() if k in _keys("local")}
    )
    for step in range(1, 4):
        ours.loop.play(until=1 + step)  # one round of setup before
        alone.loop.play(until=step)
        for name, weights in models(alone).items():
            assert equal_weights(models(ours)[name], weights)


def test_every_client_draws_its_own_first_weights_where_the_paper_says_so(scenario: Scenario) -> None:
    own, common = (models(experiment("fedspray", scenario, first_weights=kind)) for kind in ("own", "common"))
    assert not equal_weights(own["client-0"], own["client-1"])
    assert equal_weights(common["client-0"], common["client-1"])
    reference = models(experiment("fedspray", scenario, init="uniform01"))["client-0"]
    assert all(float(tensor.min()) > 0.0 and float(tensor.max()) <= 1.0 for tensor in reference.values())


def test_first_proxies() -> None:
    ramp, drawn, none = (
        first_proxies(3, FedSprayConfig(proxy_width=4, **kind), Stream(0))
        for kind in ({"proxy_start": "ramp"}, {}, {"proxies": False})
    )  # type: ignore[arg-type]
    torch.testing.assert_close(ramp, torch.tensor([0.0, 0.01, 0.02]).unsqueeze(1).repeat(1, 4))
    assert 0.0 < float(drawn.abs().max()) < 0.1 and not bool(none.any())


def test_profiles_pick_one_side_of_every_difference() -> None:
    paper, reference = (
        resolve("fedspray", {"dataset": "csbm", "profile": profile}) for profile in ("paper", "reference")
    )
    for key, value in CODE.items():
        assert getattr(reference.method_config, key) == value != getattr(paper.method_config, key)
    common = {
        "lambda1": 5.0,
        "lambda2": 1.0,
        "proxy_width": 64,
        "encoder_lr": 0.003,
        "proxy_lr": 0.02,
        "lr": 0.003,
        "hidden": (64,),
        "local_epochs": 5,
        "dropout": 0.0,
        "weight_decay": 0.0,
        "first_weights": "own",
        "weighting": "train",
    }
    for each in (paper, reference):
        assert {key: getattr(each.method_config, key) for key in common} == common
        assert (each.run.rounds, each.run.selection) == (300, "best_val_loss")


@pytest.mark.parametrize(
    "settings", [{}, CODE, {"lambda1": 0.0}, {"reset_optimizer": True}, {"proxies": False}], ids=str
)
def test_clients_trained_together_send_and_keep_what_they_do_alone(
    scenario: Scenario, settings: dict[str, Any]
) -> None:
    """The kit compares GNNs after one round, which phase 2 has not reached yet."""
    runs = [
        play("fedspray", scenario, precision="float64", **{**settings, "execution": kind})
        for kind in ("each", "cohort")
    ]
    a, b = (cast(Any, played.loop.state) for played in runs)
    assert max_difference({**a.encoder, "S": a.proxies}, {**b.encoder, "S": b.proxies}) < 1e-6
    for name in scenario.parts:
        own, other = (client_of(played, name).state for played in runs)
        assert isinstance(own, SprayState) and isinstance(other, SprayState)
        assert max_difference({**own.weights, "s": own.proxies}, {**other.weights, "s": other.proxies}) < 1e-6
        assert own.encoder.steps == other.encoder.steps
        assert max_difference(own.encoder.first, other.encoder.first) < 1e-6
        assert max_difference(own.encoder.second, other.encoder.second) < 1e-6


# -- 11.2, 11.3: the two means ---------------------------------------------------------------------


def test_the_means_are_weighted_by_class_shares_and_training_size(scenario: Scenario) -> None:
    """fedspray (pre-weighted sums) against fedspray-published (single uploads), and both against the formula."""
    plain, published = play("fedspray", scenario), play("fedspray-published", scenario)
    heard = published.engine
    assert isinstance(heard, Recorder)
    census, uploads = heard.replies("census"), heard.replies("upload")
    shares = torch.stack([census[name].class_shares for name in uploads])  # (K, C)
    weights = shares / shares.sum(0)
    assert bool((weights >= 0).all())
    torch.testing.assert_close(weights.sum(0), torch.ones(3, dtype=torch.float64))
    expected = torch.einsum("kc,kcd->cd", weights.float(), torch.stack([upload.proxies for upload in uploads.values()]))
    sizes = {name: data.num_train for name, data in scenario.parts.items()}
    encoder = sum(
        sizes[name] / sum(sizes.values()) * upload.encoder["embed.weight"] for name, upload in uploads.items()
    )
    for played in (plain, published):
        torch.testing.assert_close(played.loop.state.proxies, expected, rtol=1e-4, atol=1e-5)  # type: ignore[attr-defined]
        torch.testing.assert_close(played.loop.state.encoder["embed.weight"], encoder, rtol=1e-4, atol=1e-5)  # type: ignore[attr-defined]


def test_identical_proxies_come_back_and_who_lacks_a_class_has_no_say() -> None:
    shares = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.8, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    same, total = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)), shares.sum(0)
    weights = torch.stack([proxy_weights(own, Common({}, same, 1.0, total)) for own in shares])
    assert bool((weights >= 0).all()) and weights[2, 1] == 0.0
    torch.testing.assert_close(weights.sum(0), torch.tensor([1.0, 1.0, 0.0]))
    state = ServerState({}, torch.full((3, 6), 7.0), 1.0, total)
    after = aggregated(state, {}, (weights.unsqueeze(2) * same).sum(0), FedSprayConfig())[0].proxies
    torch.testing.assert_close(after[:2], same[:2])
    assert torch.equal(after[2], state.proxies[2])


def test_a_class_at_one_client_only_is_copied_from_it(scenario: Scenario) -> None:
    change = {name: torch.where(data.y == 2, 1, data.y) for name, data in scenario.parts.items() if name != "client-1"}
    played = play("fedspray-published", with_labels(scenario, change))
    assert isinstance(played.engine, Recorder)
    uploads = played.engine.replies("upload")
    torch.testing.assert_close(played.loop.state.proxies[2], uploads["client-1"].proxies[2])  # type: ignore[attr-defined]
    assert all(torch.equal(upload.proxies[2], torch.zeros(6)) for name, upload in uploads.items() if name != "client-1")


def test_one_client_gets_back_what_it_sent() -> None:
    one = build_scenario(
        dataset="csbm:nodes=40,classes=3,features=12,degree=4", clients=1, split="client:40/30/30", seed=1
    )
    played = play("fedspray-published", one)
    assert isinstance(played.engine, Recorder)
    (upload,) = played.engine.replies("upload").values()
    assert equal_weights(played.loop.state.encoder, upload.encoder)  # type: ignore[attr-defined]
    torch.testing.assert_close(played.loop.state.proxies, upload.proxies)  # type: ignore[attr-defined]


# -- 11.5: what labelled rows start from -----------------------------------------------------------


@pytest.mark.parametrize("reset", ["all", "unlabelled"])
def test_what_training_nodes_start_a_round_from(
    scenario: Scenario, reset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Tensor] = []
    align = LocalTraining.align

    def spy(
        self: LocalTraining, weights: Weights, common: Weights, proxies: Tensor, moments: OptimizerState, factor: float
    ) -> EncoderResult:
        if self is client_of(played).training:
            started.append(proxies)
        return align(self, weights, common, proxies, moments, factor)

    monkeypatch.setattr(LocalTraining, "align", spy)
    played = experiment("fedspray", scenario, proxy_reset=reset)
    for step in (2, 3, 4):
        client = client_of(played)
        before, classes = client.state.proxies, played.loop.state.proxies  # type: ignore[attr-defined]
        played.loop.play(until=step)
        expected = classes[client.training.encoder.y] if reset == "all" else before
        assert torch.equal(started[-1], expected)
        assert not torch.equal(client_of(played).state.proxies, expected)  # type: ignore[attr-defined]


# -- 11.6: who learns in which phase ---------------------------------------------------------------


def test_each_phase_changes_only_its_own(scenario: Scenario) -> None:
    played = play("fedspray", scenario, rounds=1)
    client, state = client_of(played), played.loop.state
    encoder, classes = state.encoder, state.proxies  # type: ignore[attr-defined]
    before = client.state
    assert isinstance(before, SprayState)
    copies = [
        {name: tensor.clone() for name, tensor in part.items()}
        for part in (before.weights, encoder, {"s": before.proxies})
    ]
    taught = client.training.teach(before.weights, before.optimizer, encoder, classes, before.proxies, None)
    assert not equal_weights(taught.weights, before.weights)
    aligned = client.training.align(taught.weights, encoder, before.proxies, before.encoder)
    assert not equal_weights(aligned.weights, encoder) and not torch.equal(aligned.proxies, before.proxies)
    for copy, part in zip(copies, (before.weights, encoder, {"s": before.proxies}), strict=True):
        assert equal_weights(copy, part)
    assert aligned.proxies.shape[0] == client.data.num_train  # rows of other nodes are stored nowhere


@pytest.mark.parametrize(
    "settings",
    [{**CODE, "init": "standard", "kd_confidence": 0.45}, {}, {"reset_optimizer": True}],
    ids=["reference", "paper", "fresh moments"],
)
def test_storing_only_labelled_proxies_gives_the_trajectory_of_the_full_tensor(
    scenario: Scenario, settings: dict[str, Any]
) -> None:
    """11.14: a plain dense implementation with a proxy per node, both phases, both aggregations."""
    played = experiment("fedspray", scenario, rounds=3, precision="float64", **settings)
    dense = Dense(played)
    played.loop.play()
    for _ in range(3):
        dense.round()
    for name, weights in models(played).items():
        assert max_difference(weights, {key: tensor.detach() for key, tensor in dense.gnns[name].items()}) < 1e-6
    torch.testing.assert_close(played.loop.state.proxies, dense.classes, rtol=0, atol=1e-6)  # type: ignore[attr-defined]
    assert max_difference(played.loop.state.encoder, dense.encoder) < 1e-6  # type: ignore[attr-defined]
    if "kd_confidence" in settings:
        assert dense.silent and dense.heard, "choose another threshold: the filter did nothing"


class Dense:
    """FedSpray written straight from the spec: dense tensors, autograd, torch's Adam, a proxy for every node."""

    def __init__(self, played: SimulatedRun) -> None:
        state: Any = played.loop.state
        self.config: Any = played.settings.method_config
        self.encoder, self.classes = dict(state.encoder), state.proxies
        self.silent = self.heard = 0
        self.parts = {name: data for name, data in played.parts.items() if isinstance(data, NodeData)}
        self.gnns = {
            name: {n: t.clone().requires_grad_() for n, t in weights.items()}
            for name, weights in models(played).items()
        }
        self.nodes = {
            n: torch.full((d.num_nodes, 6), 0.1, dtype=torch.float64, requires_grad=True) for n, d in self.parts.items()
        }
        self.local = {n: {key: t.clone().requires_grad_() for key, t in self.encoder.items()} for n in self.parts}
        self.gnn_adam = {n: torch.optim.Adam(list(w.values()), lr=self.config.lr) for n, w in self.gnns.items()}
        self.encoder_adam = {
            n: torch.optim.Adam(
                [{"params": list(self.local[n].values()), "lr": 0.003}, {"params": [self.nodes[n]], "lr": 0.02}]
            )
            for n in self.parts
        }

    def logits(self, name: str) -> Tensor:
        data, weights = self.parts[name], self.gnns[name]
        a = torch.zeros(data.num_nodes, data.num_nodes, dtype=torch.float64)
        a[data.edge_index[1], data.edge_index[0]] = 1.0
        a = a + torch.eye(data.num_nodes, dtype=torch.float64)
        scale = a.sum(1).rsqrt()
        a = (scale.unsqueeze(1) * a * scale).float().double()  # the propagation is rounded once
        h = torch.relu(a @ (data.x.double() @ weights["layers.0.weight"]) + weights["layers.0.bias"])
        return a @ (h @ weights["layers.1.weight"]) + weights["layers.1.bias"]

    def heads(self, encoder: Mapping[str, Tensor], x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        e = torch.relu(x @ encoder["embed.weight"] + encoder["embed.bias"])
        p = (e + s) @ encoder["classify.weight"] + encoder["classify.bias"]
        return p, e @ encoder["project.weight"] + encoder["project.bias"]

    def round(self) -> None:
        uploads = {name: self.client(name) for name in self.parts}
        sizes = {name: data.num_train for name, data in self.parts.items()}
        self.encoder = {
            key: sum((sizes[n] / sum(sizes.values()) * uploads[n][0][key] for n in uploads), torch.zeros(()))
            for key in self.encoder
        }
        shares = torch.stack(
            [torch.bincount(d.y[d.train], minlength=3).double() / d.num_train for d in self.parts.values()]
        )
        self.classes = torch.einsum(
            "kc,kcd->cd", shares / shares.sum(0), torch.stack([upload[1] for upload in uploads.values()])
        )

    def client(self, name: str) -> tuple[dict[str, Tensor], Tensor]:
        data, x, s = self.parts[name], self.parts[name].x.double(), self.nodes[name]
        if self.config.reset_optimizer:
            self.gnn_adam[name].state.clear()
            self.encoder_adam[name].state.clear()
        with torch.no_grad():
            q = torch.softmax(self.heads(self.encoder, x, s)[1], -1)
            s[~data.train] = (q @ self.classes)[~data.train]
            if self.config.proxy_reset == "all":
                s[data.train] = self.classes[data.y[data.train]]
            p = torch.softmax(self.heads(self.encoder, x, s)[0], -1)
        rows = data.train | (q.max(1).values > self.config.kd_confidence)
        self.silent, self.heard = self.silent + int((~rows).sum()), self.heard + int((rows & ~data.train).sum())
        for _ in range(self.config.local_epochs):
            log_y = torch.log_softmax(self.logits(name), -1)
            kl = torch.nn.functional.kl_div(log_y[rows], p[rows], reduction="batchmean")
            self.step(
                self.gnn_adam[name],
                torch.nn.functional.nll_loss(log_y[data.train], data.y[data.train]) + self.config.lambda1 * kl,
            )
        with torch.no_grad():
            predicted = torch.softmax(self.logits(name), -1)
            for key, tensor in self.local[name].items():
                source = key.replace("project", "classify") if self.config.projector_init == "classifier" else key
                tensor.copy_(self.encoder[source])
        for _ in range(self.config.local_epochs):
            p_logits, q_logits = self.heads(self.local[name], x, s)
            kl = torch.nn.functional.kl_div(
                torch.log_softmax(p_logits, -1)[data.train], predicted[data.train], reduction="batchmean"
            )
            self.step(
                self.encoder_adam[name],
                torch.nn.functional.cross_entropy(q_logits[data.train], data.y[data.train]) + kl,
            )
            assert s.grad is not None and not bool(s.grad[~data.train].any()) and bool(s.grad[data.train].any())  # 11.6
        means = torch.zeros(3, 6, dtype=torch.float64)
        for j in range(3):
            if bool((data.train & (data.y == j)).any()):
                means[j] = s.detach()[data.train & (data.y == j)].mean(0)
        return {key: tensor.detach().clone() for key, tensor in self.local[name].items()}, means

    @staticmethod
    def step(adam: torch.optim.Adam, loss: Tensor) -> None:
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()


# -- 11.10: S = 0, and the control -----------------------------------------------------------------


def test_without_proxies_they_stay_zero_and_p_sees_features_only(scenario: Scenario) -> None:
    played = play("fedspray", scenario, proxies=False, **CODE)
    state: Any = played.loop.state
    client = client_of(played)
    assert not bool(state.proxies.any()) and not bool(client.state.proxies.any())  # type: ignore[attr-defined]
    inputs = client.training.encoder
    p, _ = soft_labels(state.encoder, state.proxies, client.state.proxies, inputs)  # type: ignore[attr-defined]
    e = torch.relu(client.data.x @ state.encoder["embed.weight"] + state.encoder["embed.bias"])
    torch.testing.assert_close(
        p, torch.softmax(e @ state.encoder["classify.weight"] + state.encoder["classify.bias"], -1)
    )


def test_the_control_is_a_federated_mlp_that_teaches(scenario: Scenario) -> None:
    """Its encoder is FedAvg of an MLP: the GNNs send nothing to it."""
    taught, untaught = play("mlpteacher", scenario), play("mlpteacher", scenario, lambda1=0.0)
    assert equal_weights(taught.loop.state.encoder, untaught.loop.state.encoder)  # type: ignore[attr-defined]
    assert set(taught.loop.state.encoder) == {"embed.weight", "embed.bias", "project.weight", "project.bias"}  # type: ignore[attr-defined]
    assert not equal_weights(models(taught)["client-0"], models(untaught)["client-0"])


# -- 11.11: the wire -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedspray", "fedspray-published", "mlpteacher"])
def test_nothing_on_the_wire_has_a_row_per_node(scenario: Scenario, method: str) -> None:
    played = play(method, scenario)
    assert isinstance(played.engine, Recorder)
    allowed = {(12, 6), (6,), (6, 3), (3,), (3, 6)}  # omega, the (C, d_s) matrix, the histogram
    seen: dict[str, set[tuple[int, ...]]] = {}
    for handler, _, reply in played.engine.heard:
        if reply is not None and handler != "evaluate":
            tensors = list(_tensors(reply))
            seen.setdefault(handler, set()).update(tuple(tensor.shape) for tensor in tensors)
    assert set().union(*seen.values()) <= allowed
    for _, message in played.engine.received:
        assert {tuple(tensor.shape) for tensor in _tensors(message)} <= allowed
    if method != "mlpteacher":  # d_x d_s + d_s + 2 (d_s C + C) + C d_s
        count = played.settings.method.shared_values
        assert count is not None and count(played.loop.state) == 12 * 6 + 6 + 2 * (6 * 3 + 3) + 3 * 6
    else:
        assert not any(bool(reply.class_shares.any()) for name, _, reply in played.engine.heard if name == "census"), (
            "nobody needs them"
        )
    assert seen["census"] == {(3,)}  # the histogram leaves once, and nothing else does then
    assert sum(handler == "census" for handler, _, _ in played.engine.heard) == len(scenario.parts)


def _tensors(message: Any) -> list[Tensor]:
    from isthmus.federation.schema import Sink

    sink = Sink()
    schema(type(message)).write(message, sink)
    return list(sink.tensors)


# -- 11.15 -----------------------------------------------------------------------------------------


def test_test_labels_do_not_choose_the_round(scenario: Scenario) -> None:
    change = {}
    for name, data in scenario.parts.items():
        change[name] = data.y.clone()
        change[name][data.test] = (data.y[data.test] + 1) % 3
    plain, permuted = (
        play("fedspray", s, rounds=12, lr=0.1, selection="best_val_loss")
        for s in (scenario, with_labels(scenario, change))
    )
    assert plain.loop.best is not None and permuted.loop.best is not None
    assert plain.loop.best["round"] == permuted.loop.best["round"]
    assert plain.loop.best["val_loss"] == permuted.loop.best["val_loss"]
    assert plain.loop.best["test"] != permuted.loop.best["test"]
    by_test = min(permuted.loop.lines, key=lambda line: line["test_loss"])["round"]
    assert by_test != permuted.loop.best["round"], "choose another seed: test labels would pick the same round"


def test_facts_name_majorities_and_count_minorities(scenario: Scenario) -> None:
    played = play("fedspray", scenario)
    given = facts(cast(Any, played.loop.state), cast(Any, played.settings.method_config), scenario)
    for name, data in scenario.parts.items():
        majority = int(torch.bincount(data.y[data.train], minlength=3).argmax())
        assert given["clients"][name] == {
            "majority_class": majority,
            "minority_test_nodes": int((data.test & (data.y != majority)).sum()),
        }
    assert (
        sum(each["minority_test_nodes"] for each in given["clients"].values())
        == played.loop.lines[-1]["test_groups"]["minority"][1]
    )
    assert given["classes_without_proxy"] == []


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedspray", "fedspray-published"])
@pytest.mark.parametrize("settings", [{}, CODE], ids=["paper", "reference"])
def test_a_class_nobody_has_keeps_its_proxy(scenario: Scenario, method: str, settings: dict[str, Any]) -> None:
    absent = with_labels(scenario, {name: torch.where(data.y == 2, 1, data.y) for name, data in scenario.parts.items()})
    played = experiment(method, absent, **settings)
    before = played.loop.state.proxies  # type: ignore[attr-defined]
    played.loop.play()
    after = played.loop.state.proxies  # type: ignore[attr-defined]
    assert torch.equal(after[2], before[2]) and not torch.equal(after[0], before[0])
    assert all(bool(tensor.isfinite().all()) for weights in models(played).values() for tensor in weights.values())


def test_a_client_with_a_single_class(scenario: Scenario) -> None:
    change = {"client-0": torch.zeros_like(scenario.parts["client-0"].y)}
    played = play("fedspray", with_labels(scenario, change))
    groups = played.loop.lines[-1]["test_groups"]
    assert groups["minority"][1] < groups["majority"][1]
    assert float(client_of(played).class_shares[0]) == 1.0
    assert all(bool(tensor.isfinite().all()) for tensor in models(played)["client-0"].values())


def test_clients_without_training_or_validation_nodes(scenario: Scenario) -> None:
    none = {name: torch.zeros_like(data.train) for name, data in scenario.parts.items()}
    idle = replace(
        scenario,
        parts={
            name: replace(data, train=none[name])
            if name == "client-0"
            else replace(data, val=none[name])
            if name == "client-1"
            else data
            for name, data in scenario.parts.items()
        },
    )
    played = play("fedspray", idle, selection="best_val_loss")
    assert all(bool(tensor.isfinite().all()) for weights in models(played).values() for tensor in weights.values())
    assert not bool(client_of(played).class_shares.any())  # no label, no say in any proxy
    untaught = play("fedspray", idle, lambda1=0.0)
    assert not equal_weights(models(played)["client-0"], models(untaught)["client-0"])  # but it is taught
    nobody = replace(scenario, parts={name: replace(data, val=none[name]) for name, data in scenario.parts.items()})
    assert (
        play("fedspray", nobody, selection="best_val_loss").loop.best is not None
    )  # nothing to choose by: the last round
    unlabelled = replace(
        scenario, parts={name: replace(data, train=none[name]) for name, data in scenario.parts.items()}
    )
    with pytest.raises((RunError, QuorumError), match="training node"):
        play("fedspray", unlabelled)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kd_confidence", -0.1),
        ("kd_confidence", 1.1),
        ("lambda1", -1),
        ("lambda2", -1),
        ("proxy_width", 0),
        ("proxy_lr", 0),
        ("encoder_lr", -1),
        ("min_class_count", 0),
    ],
)
def test_what_cannot_be_set(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        resolve("fedspray", {"dataset": "csbm", key: value})


def graphs() -> Any:
    from isthmus.experiments.scenarios import scenario_of

    return scenario_of(resolve("fedavg", {"dataset": "motifs", "clients": 2}))


# -- the hardened default --------------------------------------------------------------------------


def lonely(scenario: Scenario) -> Scenario:
    """Client 0 has exactly one training node of class 2, and nobody else has any."""
    change = {name: torch.where(data.y == 2, 1, data.y) for name, data in scenario.parts.items()}
    first = scenario.parts["client-0"].train.nonzero()[0]
    change["client-0"][first] = 2
    return with_labels(scenario, change)


def singleton_proxy(played: SimulatedRun) -> Tensor:
    """The truth: the proxy of the only training node of class 2 after the round."""
    client = client_of(played)
    rows = client.state.proxies[client.training.encoder.y == 2]  # type: ignore[attr-defined]
    assert len(rows) == 1
    proxy: Tensor = rows[0]
    return proxy


def histograms(played: SimulatedRun) -> dict[str, list[int]]:
    """What a curious server makes of the census replies it got, read as if they were in the clear."""
    assert isinstance(played.engine, Recorder)
    found = {}
    for name, reply in played.engine.replies("census").items():
        if isinstance(reply, Masked):
            words = reply.words.numpy().view(np.uint64)[: 1 + 3].astype(np.float64) / 2.0**40
            found[name] = [round(float(words[0] * share)) for share in words[1:]]
        else:
            found[name] = [round(reply.samples * share) for share in reply.class_shares.tolist()]
    return found


def test_published_messages_show_label_histogram_and_singleton_proxy(scenario: Scenario) -> None:
    played = play("fedspray-published", lonely(scenario), rounds=1)
    truth = {name: torch.bincount(data.y[data.train], minlength=3).tolist() for name, data in played.parts.items()}
    assert histograms(played) == truth
    assert isinstance(played.engine, Recorder)
    torch.testing.assert_close(played.engine.replies("upload")["client-0"].proxies[2], singleton_proxy(played))


def test_masked_sums_hide_both(scenario: Scenario) -> None:
    played = play("fedspray", lonely(scenario), rounds=1, secure_sum=True, min_class_count=3)
    truth = {name: torch.bincount(data.y[data.train], minlength=3).tolist() for name, data in played.parts.items()}
    assert isinstance(played.engine, Recorder)
    heard = {
        **played.engine.replies("census"),
        **{f"{k} update": v for k, v in played.engine.replies("local_update").items()},
    }
    assert len(heard) == 8 and all(isinstance(reply, Masked) for reply in heard.values())
    assert all(found != truth[name] for name, found in histograms(played).items())
    # Nor does the total tell: nobody else has the class, so with a minimum of one node it would be that node's proxy.
    proxy = singleton_proxy(played)
    assert float((played.loop.state.proxies[2] - proxy).abs().max()) > 1e-3  # type: ignore[attr-defined]
    bare = play("fedspray", lonely(scenario), rounds=1, secure_sum=True, min_class_count=1)
    torch.testing.assert_close(bare.loop.state.proxies[2], singleton_proxy(bare), rtol=0, atol=1e-5)  # type: ignore[attr-defined]


def test_hardened_and_published_results_are_equal() -> None:
    larger = build_scenario(
        dataset="csbm:nodes=160,classes=3,features=12,degree=4", clients=3, split="client:60/20/20", seed=1
    )
    counts = torch.stack([torch.bincount(data.y[data.train], minlength=3) for data in larger.parts.values()])
    assert int(counts.min()) >= 3  # nothing is kept back
    masked, published = play("fedspray", larger, secure_sum=True, min_class_count=3), play("fedspray-published", larger)
    for name, weights in models(published).items():
        assert max_difference(models(masked)[name], weights) < 1e-5


def test_the_default_is_hardened_and_the_published_protocol_refuses_masks() -> None:
    hardened = resolve("fedspray", {"dataset": "csbm"})
    assert hardened.run.secure_sum and hardened.method_config.min_class_count == 3
    with pytest.raises(ConfigError, match="single clients"):
        resolve("fedspray-published", {"dataset": "csbm", "secure_sum": True})
    assert {type_ for type_ in (Census, FedSprayUpdate)} == {
        line.message for line in sheet_of(hardened.method) if line.protection == "summed"
    }
