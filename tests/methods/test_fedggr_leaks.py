"""What FedGGR's server can read from what it is sent, and what the protections leave of that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from isthmus.data.node_data import NodeData
from isthmus.data.scenario import Scenario, build_scenario
from isthmus.experiments.config import resolve
from isthmus.experiments.run import SimulatedRun
from isthmus.methods.fedggr import FedGGRClient
from isthmus.methods.fedggr.messages import Encoder, Returned, Turn, Uploaded
from isthmus.nn.autoencoder import decode
from isthmus.privacy.attacks.features import decode_linear, learn_decoder, words_from_scores
from isthmus.privacy.attacks.labels import labels_from_embedding_gradient
from isthmus.privacy.attacks.result import Recovery

SETTINGS: dict[str, Any] = {
    "hidden": (16,),
    "local_width": 8,
    "global_width": 8,
    "server_hidden": 16,
    "embedding_width": 16,
    "encoder_hidden": 32,
    "encoder_epochs": 60,
    "k": 5,
    "dropout": 0.0,
    "rounds": 2,
}


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    """Words by topic: nodes of a class share most of theirs."""
    plain = build_scenario(dataset="csbm:nodes=150,classes=3,features=30,degree=4", clients=3, split="40/20/40", seed=1)
    generator = torch.Generator().manual_seed(0)
    topics = 0.05 + 0.5 * (torch.rand(9, 30, generator=generator) < 0.3)
    topic = plain.whole.y * 3 + torch.randint(3, (150,), generator=generator)
    x = (torch.rand(150, 30, generator=generator) < topics[topic]).float()
    return replace(plain, parts={name: replace(data, x=x[data.node_id]) for name, data in plain.parts.items()})


class Watched:
    """A run, and what its server was sent and sent itself."""

    def __init__(self, scenario: Scenario, **settings: Any) -> None:
        flags = {"dataset": "csbm", "preset": "fedggr", "clients": 3, "seed": 1, **SETTINGS, **settings}
        self.run = SimulatedRun(resolve("fedggr", flags), scenario)
        self.clients: dict[str, FedGGRClient] = {}
        self.embeddings: dict[str, Tensor] = {}
        self.decoder: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.head = torch.empty(0)
        for name in self.run.engine.parties("client"):
            client: Any = self.run.engine.party(name).client
            self.clients[name] = client
            client.state = replace(client.state, secret=name.encode() * 4)  # secrets are new in every run; tests repeat
            for handler in ("upload", "upload_common", "turn"):
                setattr(client, handler, self._watch(name, getattr(client, handler)))
        self.run.loop.play()

    def _watch(self, name: str, handler: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*messages: Any) -> Any:
            reply = handler(*messages)
            if isinstance(reply, Uploaded):
                self.embeddings[name] = reply.rows.clone()
            if isinstance(reply, Returned):
                self.gradients[name] = reply.rows.clone()
            for message in messages:
                if isinstance(message, Encoder):
                    self.decoder = {key: tensor.clone() for key, tensor in message.weights.items()}
                if isinstance(message, Turn):
                    self.head = message.weights["head.weight"][8:].clone()
            return reply

        return watched

    def features(self, name: str) -> Any:
        data: NodeData = self.clients[name].data
        return data.x.numpy()


# -- embeddings decode to features -----------------------------------------------------------------


def guess(watched: Watched, name: str) -> Recovery:
    """The same words for everybody: those most frequent elsewhere."""
    others = np.concatenate([watched.features(other) for other in watched.clients if other != name])
    truth = watched.features(name)
    return words_from_scores(np.repeat(others.mean(0, keepdims=True), len(truth), axis=0), truth, "server")


def by_the_decoder(watched: Watched, name: str) -> Recovery:
    """The server holds the decoder of a federated auto-encoder; edges it does not know, so it decodes node by node."""
    with torch.no_grad():
        scores = decode(watched.decoder, watched.embeddings[name]).numpy()
    return words_from_scores(scores, watched.features(name), "server")


def by_an_ally(watched: Watched, name: str, ally: str) -> Recovery:
    """The server and one client that tells its features."""
    decoder = learn_decoder(watched.embeddings[ally].numpy(), watched.features(ally))
    return words_from_scores(
        decode_linear(watched.embeddings[name].numpy(), decoder), watched.features(name), "server with a client"
    )


def test_a_federated_encoder_lets_the_server_decode(scenario: Scenario) -> None:
    watched = Watched(scenario, encoder_hops=False)
    assert by_the_decoder(watched, "client-0").recall > guess(watched, "client-0").recall + 0.2
    assert by_an_ally(watched, "client-0", "client-1").recall > guess(watched, "client-0").recall + 0.1


def test_encoders_of_their_own_hide_features_from_others_decoders(scenario: Scenario) -> None:
    watched = Watched(scenario, encoder_hops=False, encoder="independent")
    assert not watched.decoder
    assert by_an_ally(watched, "client-0", "client-1").recall < guess(watched, "client-0").recall + 0.05


def test_fewer_bits_leave_less_to_decode(scenario: Scenario) -> None:
    plain, coarse = (Watched(scenario, encoder_hops=False, embedding_bits=bits) for bits in (0, 1))
    assert by_the_decoder(coarse, "client-0").recall < by_the_decoder(plain, "client-0").recall - 0.1


# -- returned gradients reveal training labels
# -------------------------------------------------------------------------------------------


def labels(watched: Watched, name: str) -> tuple[Recovery, Any]:
    found = labels_from_embedding_gradient(watched.gradients[name].numpy(), watched.head.mT.numpy())
    data = watched.clients[name].data
    truth = torch.where(data.train, data.y, -1).numpy()
    return found.score(truth, "server"), found


def test_rows_of_unlabelled_nodes_are_exactly_zero(scenario: Scenario) -> None:
    watched = Watched(scenario)
    for name, client in watched.clients.items():
        assert torch.equal(watched.gradients[name].abs().sum(1) > 0, client.data.train)


def test_the_server_reads_every_training_label(scenario: Scenario) -> None:
    watched = Watched(scenario)
    for name in watched.clients:
        recovery, found = labels(watched, name)
        assert recovery.exact and bool(found.certain[found.labels >= 0].all())


def test_dummy_gradients_hide_which_nodes_are_labelled(scenario: Scenario) -> None:
    watched = Watched(scenario, dummy_gradients=True)
    for name, client in watched.clients.items():
        recovery, found = labels(watched, name)
        assert bool(found.certain.all())  # dummies look exactly like the others
        assert recovery.claimed == client.data.num_nodes
        size = watched.gradients[name].norm(dim=1)
        labelled, others = size[client.data.train], size[~client.data.train]
        larger = (labelled[:, None] > others[None, :]).double().mean()
        assert 0.2 < float(larger) < 0.8  # nor does their size tell


@pytest.mark.parametrize(
    "settings", [{"joint_dropout": 0.5}, {"local_epochs": 3}, {"local_epochs": 3, "returned": "mean"}], ids=str
)
def test_no_single_row_tells_whether_it_is_a_dummy(scenario: Scenario, settings: dict[str, Any]) -> None:
    """Neither entries dropped to zero nor the distance from what the sent head can produce."""
    watched = Watched(scenario, dummy_gradients=True, **settings)
    basis = torch.linalg.qr(watched.head)[0]
    for name, client in watched.clients.items():
        rows, train = watched.gradients[name], client.data.train
        gap = ((rows - rows @ basis @ basis.mT).norm(dim=1) / rows.norm(dim=1).clamp(min=1e-12)).clamp(min=1e-4)
        for mark in ((rows == 0).double().mean(1), gap):
            a, b = mark[train][:, None], mark[~train][None, :]
            assert 0.2 < float(((a > b).double() + 0.5 * (a == b).double()).mean()) < 0.8


class Recorded(Watched):
    """Also the labels the server reads in every round."""

    def _watch(self, name: str, handler: Callable[..., Any]) -> Callable[..., Any]:
        plain = super()._watch(name, handler)

        def recorded(*messages: Any) -> Any:
            reply = plain(*messages)
            if isinstance(reply, Returned):
                self.__dict__.setdefault("read", {}).setdefault(name, []).append(labels(self, name)[1].labels)
            return reply

        return recorded


def test_over_many_rounds_a_label_that_changes_gives_a_dummy_away(scenario: Scenario) -> None:
    """What dummies do not hide: real labels stay. Those of dummies follow the prediction, so a part of them stays
    hidden as well.
    """
    watched: Any = Recorded(scenario, dummy_gradients=True, rounds=8)
    for name, client in watched.clients.items():
        read, train = np.stack(watched.read[name]), client.data.train.numpy()
        constant = (read == read[0]).all(0)
        assert constant[train].all() and 0.3 < constant[~train].mean() < 0.9


def test_dummies_have_mean_zero(scenario: Scenario) -> None:
    """Over many secrets they cancel, so the server's expected step is what it would be without."""
    watched = Watched(scenario)
    client = watched.clients["client-0"]
    rows = torch.randn(client.data.num_nodes, 8, generator=torch.Generator().manual_seed(0))
    drawn = []
    for i in range(200):
        client.state = replace(client.state, secret=bytes([i]) * 32)
        drawn.append(client.dummies(client.state.weights, rows))
    mean, size = torch.stack(drawn).mean(0).norm(), torch.stack(drawn).norm(dim=(1, 2)).mean()
    assert float(mean) < 0.15 * float(size)


def test_clipped_and_noisy_gradients_hide_labels(scenario: Scenario) -> None:
    watched = Watched(scenario, gradient_clip=0.05, gradient_noise=5.0)
    correct = sum(labels(watched, name)[0].correct for name in watched.clients)
    of = sum(labels(watched, name)[0].of for name in watched.clients)
    assert correct / of < 0.55  # three classes: guessing gives 0.33
    assert all(bool((watched.gradients[name].abs().sum(1) > 0).all()) for name in watched.clients)
    privacy = watched.run.privacy
    assert privacy is not None and privacy["epsilon"] > 0 and privacy["releases"] == 2 and "label" in privacy["unit"]


@pytest.mark.parametrize(
    ("settings", "covered"),
    [
        ({}, True),
        ({"local_epochs": 3, "returned": "first"}, True),
        ({"local_epochs": 3}, False),
        ({"class_weight": "balanced"}, False),
    ],
    ids=str,
)
def test_epsilon_is_stated_only_where_a_label_changes_its_own_row(
    scenario: Scenario, settings: dict[str, Any], covered: bool
) -> None:
    part = scenario.parts["client-0"]
    node = int(part.train.nonzero()[0])
    y = part.y.clone()
    y[node] = (y[node] + 1) % 3
    other = replace(scenario, parts={**scenario.parts, "client-0": replace(part, y=y)})
    one, two = (Watched(each, rounds=1, **settings).gradients["client-0"] for each in (scenario, other))
    assert ((one != two).any(1).nonzero().flatten().tolist() == [node]) is covered
    privacy = Watched(scenario, rounds=1, gradient_clip=0.05, gradient_noise=5.0, **settings).run.privacy
    assert privacy is not None and (privacy["epsilon"] is not None) is covered
    assert (privacy["warning"] is None or "no epsilon" not in privacy["warning"]) is covered


def test_privacy_says_that_the_encoder_is_not_covered(scenario: Scenario) -> None:
    privacy = Watched(scenario, rounds=1, dp_clip=1.0, dp_noise=1.0, weighting="uniform").run.privacy
    assert privacy is not None and "auto-encoder" in privacy["not_covered"]


def test_clipping_bounds_every_row(scenario: Scenario) -> None:
    watched = Watched(scenario, gradient_clip=0.01)
    for name, client in watched.clients.items():
        assert float((watched.gradients[name] * client.data.num_train).norm(dim=1).max()) <= 0.01 + 1e-6


def test_a_replayed_round_adds_the_same_noise(scenario: Scenario) -> None:
    watched = Watched(scenario, gradient_clip=0.05, gradient_noise=1.0, dummy_gradients=True)
    client = watched.clients["client-0"]
    turn = Turn(client.state.weights, client.state.rows)
    before = client.state
    first = client.turn(turn).rows
    client.state = before
    assert torch.equal(client.turn(turn).rows, first)
    client.state = replace(before, secret=b"x" * 32)
    assert not torch.equal(client.turn(turn).rows, first)
