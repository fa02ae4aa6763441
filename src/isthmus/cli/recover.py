"""Runs the attacks of `isthmus.privacy.attacks` on the transcript of a simulation and scores them against its data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.cli.recover_hifgl import shares_held, single_rows
from isthmus.cli.recover_nsf import matched_features, solved_queries
from isthmus.cli.recover_streamed import hop_sums
from isthmus.cli.recover_structure import announced_positions, neighbour_lists, reach, summed_products
from isthmus.errors import DataError
from isthmus.experiments.config import Settings, settings_from_toml
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.model_package import MODELS, read_package
from isthmus.experiments.scenarios import parts_for, scenario_of
from isthmus.federation.audit import LABELS, MEMBERSHIP, RANK_ONE, READING, REUSE
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.messages import SERVER, Kind, Message, PartyId, kinds_of
from isthmus.federation.secure import Masked, as_if_unmasked
from isthmus.federation.transcript import Line, received
from isthmus.methods.fedavg import Update
from isthmus.methods.fedstruct.config import FedStructConfig
from isthmus.methods.fedstruct.private import PrivateConfig
from isthmus.methods.hifgl.config import HiFGLConfig
from isthmus.methods.training import ModelClient, TrainConfig
from isthmus.privacy.attacks.gradients import inputs_from_linear_gradient
from isthmus.privacy.attacks.membership import Membership, membership_by_loss
from isthmus.privacy.attacks.result import Recovery
from isthmus.privacy.attacks.sums import difference_under_one_mask
from isthmus.privacy.flatten import FRACTION_BITS
from isthmus.seeds import Stream
from isthmus.tensors import Weights

Seen = list[tuple[Line, Message]]


@dataclass(frozen=True)
class Recovered:
    """What an attack recovered from the messages a party received, as text and numbers; ``stopped`` where it was run on
    protected messages and found nothing.
    """

    attack: str
    who: str
    on: str
    outcome: str
    numbers: Mapping[str, float]
    stopped: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def recover(folder: RunFolder) -> list[Recovered]:
    """Run the attacks that apply. The data of the run are made again from its settings, as ground truth."""
    settings = settings_from_toml(folder.config)
    table = settings.method.table
    parts = parts_for(settings, scenario_of(settings))
    engine = LocalEngine(parts, table, settings.method_config, Stream(settings.run.seed, ("party",)))
    clients: dict[PartyId, Any] = {name: engine.party(name).client for name in engine.parties("client")}
    server = list(received(folder.path, SERVER, table))
    learners = {name: client for name, client in clients.items() if isinstance(client, ModelClient)}
    found = [*_inputs(server, folder, settings), *_classes(server, folder, settings, learners), *_masks(server)]
    found += _behind_masks(server, folder, settings, learners)
    found += _members(folder, learners)
    found += [Recovered(*each) for each in reach(server, parts)]
    config = settings.method_config
    if isinstance(config, FedStructConfig) and config.protocol == "hardened" and config.structure_hops > 1:
        prune = config.prune if config.prunes and config.prune_mode == "row" else 0
        found += [Recovered(*each) for each in summed_products(parts, prune)]
        found += [Recovered(*each) for each in announced_positions(server, parts, sorted(parts))]
    if isinstance(config, PrivateConfig):
        found += [Recovered(*each) for each in solved_queries(folder.path, parts, table)]
    elif isinstance(config, FedStructConfig):
        attack = hop_sums if config.streamed else matched_features
        found += [Recovered(*each) for each in attack(folder, settings, parts)]
    if isinstance(config, HiFGLConfig):
        found += [
            Recovered(*each) for each in (*single_rows(parts, config), *shares_held(folder.path, parts, config, table))
        ]
    if settings.method.cross_edges:
        found += [Recovered(*each) for each in neighbour_lists(folder.path, parts, table)]
    return found or [Recovered("none", "-", "-", "no kept message is of a kind these attacks read", {})]


# -- gradients -------------------------------------------------------------------------------------


def _gradients(server: Seen) -> Iterator[tuple[Line, Weights]]:
    """Gradients of single clients that the server received, up to the client's share."""
    for line, message in server:
        for name, kind in kinds_of(type(message)).items():
            value = getattr(message, name, None)
            if kind is Kind.GRADIENT and isinstance(value, Mapping):
                yield line, value


def _updates(server: Seen, folder: RunFolder, settings: Settings) -> Iterator[tuple[Line, Weights, Weights]]:
    """For every update of a single client that the server received: w_t, and w_t - w. w_t is what the client was sent
    last before it; an update whose w_t the server never sent (models that stay at home) tells no change.
    """
    sent: dict[tuple[PartyId, str, int, int], Weights] = {}
    looked: set[PartyId] = set()
    for line, message in server:
        weights = _model_in(message)
        share = message.share if isinstance(message, Update) else 1.0  # of an Update the weights come times the share
        if weights is None or share <= 0.0 or not _is_client(line):
            continue
        if line.sender not in looked:
            looked.add(line.sender)
            for at, told in received(folder.path, line.sender, settings.method.table):
                if (given := _model_in(told)) is not None:
                    sent[line.sender, at.phase, at.round, at.attempt] = given
        before = sent.get((line.sender, line.phase, line.round, line.attempt))
        if before is not None and weights.keys() <= before.keys():
            yield line, before, {name: before[name] - tensor / share for name, tensor in weights.items()}


def _model_in(message: Message) -> Weights | None:
    """The weights of a model that a message carries, whatever its type."""
    value = getattr(message, "weights", None) if kinds_of(type(message)).get("weights") is Kind.MODEL else None
    return value if isinstance(value, Mapping) and value else None


def _one_step(server: Seen, folder: RunFolder, settings: Settings) -> Iterator[tuple[Line, Weights]]:
    """Gradients computed from updates of one SGD step: (w_t - w) / lr, less the weight decay in it."""
    config = settings.method_config
    if isinstance(config, TrainConfig) and config.optimizer == "sgd" and config.local_epochs == 1:
        for line, before, change in _updates(server, folder, settings):
            yield (
                line,
                {name: tensor / config.lr - config.weight_decay * before[name] for name, tensor in change.items()},
            )


def _layers(gradient: Weights) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Weight and bias of the linear layers of a model: our weights are (in, out)."""
    for name, weight in gradient.items():
        bias = gradient.get(f"{name.rpartition('.')[0]}.bias")
        if weight.dim() == 2 and bias is not None and bias.shape == weight.shape[1:] and weight.shape[0] > 1:
            yield name, weight, bias


def _inputs(server: Seen, folder: RunFolder, settings: Settings) -> Iterator[Recovered]:
    for source, items in (
        ("gradients", _gradients(server)),
        ("updates of one SGD step", _one_step(server, folder, settings)),
    ):
        tried, exact, layers = 0, 0, set[str]()
        victims: set[PartyId] = set()
        for line, gradient in items:
            for name, weight, bias in _layers(gradient):
                read = inputs_from_linear_gradient(weight.double().numpy().T, bias.double().numpy())
                tried += 1
                if read.exact:
                    exact += 1
                    layers.add(name)
                    victims.add(line.sender)
        if tried:
            where = (
                f" ({', '.join(sorted(layers))} of {', '.join(sorted(victims))})"
                if exact
                else ", each is a mixture of records"
            )
            outcome = f"read exactly: {exact} of {tried} layer inputs{where}"
            yield Recovered(RANK_ONE, SERVER, source, outcome, {"exact": exact, "of": tried})


def _classes(
    server: Seen, folder: RunFolder, settings: Settings, clients: Mapping[PartyId, ModelClient[Any]]
) -> Iterator[Recovered]:
    """A negative entry in the gradient of the output's bias is a class the client trains on: softmax minus one-hot is
    negative only there.
    """
    updates = ((line, change) for line, _, change in _updates(server, folder, settings))
    for source, items in (("gradients", _gradients(server)), ("updates", updates)):
        scores, by_chance = [], 0.0
        for line, gradient in items:
            if line.sender not in clients:
                continue
            learner: Any = clients[line.sender].learner
            if learner.model is None:
                continue
            output = [name for name, _ in learner.model.named_parameters() if name.endswith(".bias")][-1:]
            if output and output[0] in gradient:  # it may be personal and never be sent
                truth = set(learner.y[learner.masks["train"]].tolist())
                claimed = {int(c) for c in (gradient[output[0]] < 0).nonzero().flatten()}
                scores.append(Recovery(LABELS, SERVER, len(claimed), len(claimed & truth), len(truth)))
                by_chance += len(claimed) * len(truth) / gradient[output[0]].numel()
        if scores:
            yield _scored(source, scores, by_chance)


def _scored(source: str, scores: Sequence[Recovery], by_chance: float) -> Recovered:
    claimed, correct, of = (sum(getattr(score, key) for score in scores) for key in ("claimed", "correct", "of"))
    outcome = (
        f"named: {correct} of {of} classes that clients train on, and {claimed - correct} wrongly, over {len(scores)} "
        "messages "
        f"(as many guesses at random: {by_chance:.1f} right)"
    )
    return Recovered(
        LABELS, SERVER, source, outcome, {"claimed": claimed, "correct": correct, "of": of, "by_chance": by_chance}
    )


# -- behind masks ----------------------------------------------------------------------------------


def _behind_masks(
    server: Seen, folder: RunFolder, settings: Settings, clients: Mapping[PartyId, ModelClient[Any]]
) -> Iterator[Recovered]:
    """The same attacks on masked messages, read as if they were not: what comes out unless masks are missing."""
    read: Seen = []
    words = plausible = 0
    for line, message in server:
        if isinstance(message, Masked):
            numbers = message.words.numpy().view(np.int64).astype(np.float64)
            words, plausible = (
                words + numbers.size,
                plausible + int((np.abs(numbers) < 2.0 ** (FRACTION_BITS + 4)).sum()),
            )
            reply = settings.method.table.signature("client", line.handler).reply if _is_client(line) else None
            if reply is not None and (plain := as_if_unmasked(message, reply)) is not None:
                read.append((line, plain))
    if not words:
        return
    chance = words * 2.0 ** (FRACTION_BITS + 4 - 63)
    outcome = f"read: {plausible} of {words} masked numbers are below 16 (of random ones {chance:.1f} would be)"
    nothing = plausible <= chance + 4 * (chance + 1) ** 0.5
    yield Recovered(READING, SERVER, "masked messages", outcome, {"read": plausible, "of": words}, nothing)
    for found in (*_inputs(read, folder, settings), *_classes(read, folder, settings, clients)):
        numbers_of = found.numbers
        chance = numbers_of.get("by_chance", 0.0)
        nothing = numbers_of.get("exact", 0) == 0 and numbers_of.get("correct", 0) <= chance + 3 * (chance + 1) ** 0.5
        yield replace(found, on=f"masked {found.on}, read as they are", stopped=nothing)


def _is_client(line: Line) -> bool:
    return "/" not in line.sender


# -- masks and models ------------------------------------------------------------------------------


def _masks(server: Seen) -> Iterator[Recovered]:
    """Every two uploads of a party that follow each other: does the mask cancel?"""
    last: dict[tuple[PartyId, int], Any] = {}
    pairs, plausible = 0, 0
    for line, message in server:
        if isinstance(message, Masked):
            words = message.words.numpy().view(np.uint64)
            key = line.sender, words.size
            if key in last:
                pairs += 1
                plausible += difference_under_one_mask(words, last[key], FRACTION_BITS).plausible
            last[key] = words
    if pairs:
        outcome = f"in {plausible} of {pairs} pairs of uploads the masks cancel"
        yield Recovered(
            REUSE, SERVER, "masked messages", outcome, {"plausible": plausible, "of": pairs}, plausible == 0
        )


def _members(folder: RunFolder, clients: Mapping[PartyId, ModelClient[Any]]) -> Iterator[Recovered]:
    """Losses of the final models on training records and on test records of the same client, all clients together.

    The same with the untrained models shows how much of that is due to the split (other classes, other degrees) and to
    the small number of records: only the rest was learnt by training.
    """
    final = {name: weights for name in clients if (weights := _final_model(folder, name)) is not None}
    if not final or not all(_alone(clients[name], weights) for name, weights in final.items()):
        return
    try:
        trained = _membership({name: (clients[name].learner, weights) for name, weights in final.items()})
        untrained = _membership({name: (clients[name].learner, clients[name].state.weights) for name in final})
    except (RuntimeError, KeyError) as error:
        raise DataError(
            f"{folder.path / 'models'} does not hold this run's models ({str(error).splitlines()[0]}); run again"
        ) from None
    if trained is None or untrained is None:
        return
    (after, members, others), (before, _, _) = trained, untrained
    outcome = (
        f"AUC {after.auc:.3f}, advantage {after.advantage:.3f} for {members} training against {others} test records "
        "(before "
        f"training {before.auc:.3f} and {before.advantage:.3f}: only what goes beyond was learnt)"
    )
    numbers = {
        "auc": after.auc,
        "advantage": after.advantage,
        "untrained_auc": before.auc,
        "untrained_advantage": before.advantage,
        "members": members,
        "others": others,
    }
    yield Recovered(MEMBERSHIP, "whoever holds the model", "final models", outcome, numbers)


def _alone(client: ModelClient[Any], weights: Weights) -> bool:
    """Whether a model can be evaluated on records here: one that needs more than its learner (FedStruct: Abar and S,
    AdaFGL: heads, FedLit: types of edges) cannot.
    """
    model: Any = client.learner.model
    return model is not None and weights.keys() == client.state.weights.keys() == dict(model.named_parameters()).keys()


def _final_model(folder: RunFolder, name: PartyId) -> Weights | None:
    path = folder.path / MODELS / name.replace("/", ".")
    return read_package(path).weights if path.is_dir() else None


def _membership(models: Mapping[PartyId, tuple[Any, Weights]]) -> tuple[Membership, int, int] | None:
    members, others = [], []
    for learner, weights in models.values():
        losses = (
            torch.nn.functional.cross_entropy(learner.logits(weights), learner.y.clamp(min=0), reduction="none")
            .double()
            .numpy()
        )
        members.append(losses[learner.masks["train"].numpy()])
        others.append(losses[learner.masks["test"].numpy()])
    inside, outside = np.concatenate(members), np.concatenate(others)
    return (membership_by_loss(inside, outside), inside.size, outside.size) if inside.size and outside.size else None
