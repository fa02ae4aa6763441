"""FedStruct without powers (``protocol=streamed``, the default): the same model and gradients, hop by hop.

    Z^(0) = g(S),  Z^(l) = Ah Z^(l-1),  z = sum_l beta_l Z^(l)                     forward, equal to (E2): Abar g(S)
    G^(L) = beta_L R,  G^(l-1) = beta_{l-1} R + Ah^T G^(l),  dL/dg(S) = G^(0)      backward, equal to Props. 2 and 3
    R = dL/dz, rows r_v = yhat_v - y_v of training nodes, zero elsewhere           (E3)

    paper                  here
    S_i                    `StreamedState.own_nsf`: an owner's own rows, which nobody else ever receives
    At_i^[i], Dt^[i]       `EdgeClient.inner`, `EdgeClient.degree`
    At_k^[i] at client k   `StreamedState.forward`: own nodes onto nodes of others with arcs to them
    At_i^[k]^T at client k `StreamedState.backward`: own nodes onto nodes of others that they have arcs to
    Z^(l), G^(l)           `Hops.values`, `Hops.grad`: of own nodes

# Differs from the paper: no power of Ah is formed, and neither S nor its gradient leaves an owner. For each hop every
owner sends every other one the sums over its own nodes that belong to the other's boundary nodes; the receiver is given
the sum over senders, behind masks with ``secure_sum``. Nothing is pruned. Memory is linear in nodes times classes and
in edges. One dropout mask per owner and round (the reference code draws one per client that uses a row).

What a client and the server still see is in docs/methods/fedstruct.md. Numbers are sections of the specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from isthmus.errors import RunError
from isthmus.federation.interface import Federation, View
from isthmus.federation.messages import PartyId
from isthmus.federation.script import Script, ScriptLine, ask, mail, total
from isthmus.methods.evaluation import Evaluation, scores_of
from isthmus.methods.fedstruct.algorithm import ServerState, step_theta
from isthmus.methods.fedstruct.client import BETAS
from isthmus.methods.fedstruct.config import FedStructConfig
from isthmus.methods.fedstruct.directory import check_agreement, check_hidden
from isthmus.methods.fedstruct.streamed_client import StreamedClient
from isthmus.methods.fedstruct.streamed_hops import Hop, Members, Start
from isthmus.methods.registry import Log
from isthmus.methods.training import all_familiar, total_samples

CLOSINGS = 50
"""Turns in which owners leave out edges at most; each leaves fewer."""


def setup_round(state: ServerState, federation: Federation, config: FedStructConfig) -> tuple[ServerState, Log]:
    """n_t, and both ends of every cross edge compared."""
    samples = total_samples(federation)
    agree(federation, config)
    return replace(state, total=samples), {}


def agree(federation: Federation, config: FedStructConfig) -> None:
    """Owners compare their cross edges and learn each other's slots. Edges of training nodes that a client could single
    out are then left out between the node and that client.
    """
    check_hidden(federation)
    members = Members(federation.clients)
    check_agreement(federation.exchange(StreamedClient.list_arcs, StreamedClient.check_arcs, members))
    for _ in range(CLOSINGS if config.withhold_exposed else 0):
        federation.exchange(StreamedClient.tell_exposed, StreamedClient.note_exposed)
        if all(
            reply.settled for reply in federation.exchange(StreamedClient.tell_closed, StreamedClient.close).values()
        ):
            return
    if config.withhold_exposed:
        raise RunError(f"edges were still left out after {CLOSINGS} turns: set withhold_exposed=false to run without")


def forward(federation: Federation, config: FedStructConfig) -> None:
    """Z^(1) ... Z^(L) at every owner."""
    for hop in range(1, config.structure_hops + 1):
        federation.exchange(StreamedClient.send_forward, StreamedClient.take_forward, Hop(hop), combine="sum")


def differentiated(federation: Federation, config: FedStructConfig, start: Start) -> None:
    """One forward and one backward pass."""
    federation.call(StreamedClient.begin, start)
    forward(federation, config)
    federation.call(StreamedClient.differentiate)
    for hop in range(config.structure_hops, 0, -1):
        federation.exchange(StreamedClient.send_backward, StreamedClient.take_backward, Hop(hop), combine="sum")


def train_round(state: ServerState, federation: Federation, config: FedStructConfig) -> tuple[ServerState, Log]:
    """FedSGD: gradients of theta averaged, one step on them; owners step their own rows of S."""
    if config.algorithm == "fedavg":
        return fedavg_round(state, federation, config), {}
    for _ in range(config.local_epochs):
        differentiated(federation, config, Start(state.weights, state.total, True))
        average = federation.sum(StreamedClient.finish)  # 1/n_t sum_i dL_i/dtheta
        weights, optimizer = step_theta(config, state.weights, average.gradients, state.optimizer, federation.round)
        state = replace(state, weights=weights, optimizer=optimizer)
    return state, {}


def fedavg_round(state: ServerState, federation: Federation, config: FedStructConfig) -> ServerState:
    """Local steps on the whole loss, hops before each; averaged weights."""
    for epoch in range(config.local_epochs):
        differentiated(federation, config, Start({} if epoch else state.weights, state.total, True))
        federation.call(StreamedClient.step_locally)
    return replace(state, weights=federation.sum(StreamedClient.average).weights)


def evaluate(state: ServerState, federation: Federation, config: FedStructConfig) -> Mapping[PartyId, Evaluation]:
    """Every owner scores the common model on its own nodes, after one forward pass without dropout."""
    federation.call(StreamedClient.begin, Start(state.weights, state.total, False))
    forward(federation, config)
    return scores_of(federation, StreamedClient.score)


def predict(state: ServerState, federation: Federation, config: FedStructConfig) -> None:
    """z of the data of now. Where those are not the data of the training, owners compare their edges again, and a node
    that is new gets the mean of its known neighbours' values (`StreamedClient.take_known`).
    """
    familiar = all_familiar(federation)
    if not familiar:
        federation.call(StreamedClient.forget_data)
        agree(federation, config)
    federation.call(StreamedClient.begin_known)
    if not familiar and config.learns_nsf:
        federation.exchange(StreamedClient.send_known, StreamedClient.take_known, combine="sum")
    forward(federation, config)
    federation.call(StreamedClient.classify)


def facts(state: ServerState, config: FedStructConfig, scenario: Any) -> dict[str, Any]:
    """The filter where it was learned."""
    return {"betas": state.weights[BETAS].tolist()} if config.train_betas else {}


def script(config: FedStructConfig, view: View) -> Script:
    """What the sums still tell is said in docs/methods/fedstruct.md."""
    hops, steps = config.structure_hops, config.local_epochs
    forth = mail(StreamedClient.send_forward, StreamedClient.take_forward, summed=True, most=hops * steps)
    back = mail(StreamedClient.send_backward, StreamedClient.take_backward, summed=True, most=hops * steps)
    stepped = (
        (total(StreamedClient.finish, most=steps),)
        if config.algorithm == "fedsgd"
        else (ask(StreamedClient.step_locally, most=steps), total(StreamedClient.average))
    )
    return {
        "setup": (total(StreamedClient.size), *_agreed(config)),
        "train": (
            ask(StreamedClient.begin, most=steps),
            forth,
            ask(StreamedClient.differentiate, most=steps),
            back,
            *stepped,
        ),
        "evaluation": (ask(StreamedClient.begin), replace(forth, most=hops), ask(StreamedClient.score)),
    }


def _agreed(config: FedStructConfig) -> tuple[ScriptLine, ...]:
    """Calls of :func:`agree`."""
    listed = mail(StreamedClient.list_arcs, StreamedClient.check_arcs)
    if not config.withhold_exposed:
        return (listed,)
    exposed = mail(StreamedClient.tell_exposed, StreamedClient.note_exposed, most=CLOSINGS)
    return listed, exposed, mail(StreamedClient.tell_closed, StreamedClient.close, most=CLOSINGS)


def predict_script(config: FedStructConfig, view: View) -> tuple[ScriptLine, ...]:
    """Calls of :func:`predict`."""
    known = (mail(StreamedClient.send_known, StreamedClient.take_known, summed=True),) if config.learns_nsf else ()
    return (
        ask(StreamedClient.familiar),
        ask(StreamedClient.forget_data),
        *_agreed(config),
        ask(StreamedClient.begin_known),
        *known,
        mail(StreamedClient.send_forward, StreamedClient.take_forward, summed=True, most=config.structure_hops),
        ask(StreamedClient.classify),
    )
