"""Predictions of trained models, from their packages alone: no run folder, no training.

A client of most methods predicts by itself. Clients of others (FedStruct, HiFGL, FedGGR, FedGCN, ...) need messages
between them, as in training: here in one process, from the packages of all of them; between organisations as a run of
kind predict (`isthmus.deploy`). Which it is, a method says itself (`isthmus.methods.registry.Method.predicts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isthmus.errors import ConfigError
from isthmus.experiments.contract import contract_of
from isthmus.experiments.model_package import ModelPackage
from isthmus.experiments.scenarios import view_of
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.interface import View
from isthmus.federation.kept import read_fields, restore_kept
from isthmus.federation.ledger import Entry
from isthmus.federation.messages import SERVER, ClientId, address
from isthmus.federation.roles import Client
from isthmus.federation.script import PREDICTION
from isthmus.federation.session import Session
from isthmus.methods.registry import Method
from isthmus.records import Record
from isthmus.seeds import Stream


def check_predicts(method: Method) -> None:
    """Refuse a method that cannot predict, with its reason."""
    if method.predicts == "no":
        why = method.no_prediction or "its clients do not define logits()"
        raise ConfigError(f"models of {method.name} cannot predict: {why}")


def predict_logits(
    packages: Mapping[ClientId, ModelPackage], parts: Mapping[ClientId, Any]
) -> tuple[dict[ClientId, Tensor], tuple[Entry, ...]]:
    """Logits of each client's samples, and the messages it took.

    Args:
        packages: By client; of a method that predicts with messages those of all clients, and the server's where it
            has one.
        parts: The clients' data of now. Their labels and split are not read.
    """
    clients = sorted(client for client in packages if client != SERVER)
    if not clients:
        raise ConfigError("the server's package holds no model: give the packages of the clients too")
    method = packages[clients[0]].method
    check_predicts(method)
    for client in clients:
        packages[client].check(parts[client])
    if method.predict is None:
        return {client: _alone(packages[client], parts[client]) for client in clients}, ()
    missing = sorted(set(packages[clients[0]].clients) - set(clients))
    if missing:
        raise ConfigError(
            f"{method.name} predicts with messages between all clients: give the packages of {', '.join(missing)} too "
            "(the folder models of the run), or predict between organisations (isthmus submit --predict)"
        )
    return _together(packages, {client: parts[client] for client in clients})


def unlabelled(data: Any) -> Any:
    """Data without a split: nothing is prepared for training."""
    nobody = torch.zeros_like(data.train)
    return replace(data, train=nobody, val=nobody, test=nobody)


def restore_client(client: Client[Any, Any], package: ModelPackage, data: Any) -> None:
    """Make a fresh client the one whose package this is."""
    restore_kept(client, package.weights, package.structure, as_trained=package.fits(data))


def server_state(method: Method, config: Any, seed: int, view: View, package: ModelPackage | None) -> Record:
    """The server's state before a prediction: its first one, with what it has kept."""
    state: Record = method.init(view, config, Stream(seed, ("common",)))
    if not method.server_keeps:
        return state
    if package is None:
        raise ConfigError(
            f"{method.name} predicts with what its server has learned: give the package of the server too "
            f"(models/{SERVER} of the run)"
        )
    kept: dict[str, Any] = read_fields(package.structure, type(state), method.server_keeps)
    return replace(state, **kept)


def predicting_role(method: Method) -> str:
    """The role whose parties hold the samples."""
    return next(role for role, entry in method.roles.items() if entry.cls.logits is not Client.logits)


def _alone(package: ModelPackage, data: Any) -> Tensor:
    if not data.y.numel():
        return torch.zeros(0, package.num_classes)
    settings, role = package.settings, package.method.roles["client"]
    stream = Stream(settings.run.seed, ("party",)).child(package.client)
    held = role.holds(unlabelled(data))
    client = role.cls(package.client, held, settings.method_config, stream)
    client.setup()
    client.enter(PREDICTION, 1, 0)
    restore_client(client, package, data)
    with torch.no_grad():
        return client.logits()


def _together(
    packages: Mapping[ClientId, ModelPackage], parts: Mapping[ClientId, Any]
) -> tuple[dict[ClientId, Tensor], tuple[Entry, ...]]:
    first = packages[min(parts)]
    settings = first.settings
    method, run, config = first.method, settings.run, settings.method_config
    held = {client: unlabelled(data) for client, data in parts.items()}
    engine = LocalEngine(held, method.table, config, Stream(run.seed, ("party",)), wire=run.wire)
    for client in parts:
        restore_client(engine.party(client).client, packages[client], parts[client])
    state = server_state(method, config, run.seed, view_of(held), packages.get(SERVER))
    contract = contract_of(replace(settings, run=replace(run, predict=first.path.name)), view_of(held))
    engine.watch(contract)
    session = Session(engine, method.table, seed=run.seed, secure=settings.secure, contract=contract)
    session.clock.begin(PREDICTION, 1, 1)
    assert method.predict is not None
    method.predict(state, session, config)
    role = predicting_role(method)
    with torch.no_grad():
        found = {client: engine.party(address(client, role)).client.logits() for client in parts}
    return found, tuple(session.ledger.take())
