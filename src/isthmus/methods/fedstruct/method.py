"""FedStruct as a method: the protocol that ``protocol`` names."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from isthmus.federation.roles import Role
from isthmus.methods.fedstruct import algorithm, streamed
from isthmus.methods.fedstruct.algorithm import FedStructClient
from isthmus.methods.fedstruct.config import FedStructConfig
from isthmus.methods.fedstruct.streamed_client import StreamedClient
from isthmus.methods.registry import Method, Phase, register
from isthmus.tensors import num_values


def protocol(config: FedStructConfig) -> ModuleType:
    """Where the rounds of a run are: hop by hop, or on powers of the adjacency."""
    return streamed if config.streamed else algorithm


def roles(config: FedStructConfig) -> Mapping[str, Role]:
    """A client accepts only the handlers of the protocol its run uses."""
    return {"client": Role(StreamedClient if config.streamed else FedStructClient)}


def phases(config: FedStructConfig) -> tuple[Phase, ...]:
    """Powers and S are obtained before training where there are any."""
    if config.streamed:
        return (Phase("setup", streamed.setup_round, rounds=1, setup=True), Phase("train", streamed.train_round))
    return (
        Phase("setup", algorithm.setup_round, rounds=1, setup=True),
        Phase("powers", algorithm.power_round, rounds=lambda config: int(config.powers), setup=True),
        Phase("features", algorithm.nsf_round, rounds=1, setup=True),
        Phase("train", algorithm.train_round),
    )


def shared_values(state: Any) -> int:
    return num_values(state.weights) + (0 if state.nsf is None else state.nsf.numel())


METHOD = register(
    Method(
        name="fedstruct",
        summary="feature branch on own edges, structure branch over all hops and owners, gradients summed",
        reference="Aliakbari, Östman & Graell i Amat, Decoupled Subgraph Federated Learning, ICLR 2025",
        config=FedStructConfig,
        tasks=("node",),
        init=algorithm.init,
        phases=phases(FedStructConfig()),
        phases_with=phases,
        evaluate=lambda state, federation, config: protocol(config).evaluate(state, federation, config),
        predict=lambda state, federation, config: protocol(config).predict(state, federation, config),
        predict_script=lambda config, view: protocol(config).predict_script(config, view),
        roles=roles(FedStructConfig()),
        roles_with=roles,
        script=lambda config, view: protocol(config).script(config, view),
        preset="fedstruct",
        cross_edges=True,
        shared_values=shared_values,
        facts=lambda state, config, scenario: protocol(config).facts(state, config, scenario),
    )
)
