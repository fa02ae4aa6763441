"""What the operator of a server does who read our code: attacks on sites that joined its runs, in place of the rounds.

``install`` is called in the server's job process, by the ``sitecustomize.py`` that the test puts on that process's
path; the job, the sites and all that is between them are the product's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hostile_server import CallsByHand, hostile_settings, join  # of tests/deploy

from isthmus.deploy import server_job
from isthmus.deploy.handshake import Transport
from isthmus.experiments.config import Settings
from isthmus.federation.host import PartyHost
from isthmus.federation.interface import Failure
from isthmus.federation.messages import Message, PartyId
from isthmus.federation.party import Invocation, Turn
from isthmus.methods.fedavg import Broadcast
from isthmus.methods.training import Deployed
from isthmus.seeds import Stream

ANSWERS = "answers.json"
VICTIM, COLLUDER = "client-0", "client-1"
OTHERS = ("client-1", "client-2", "client-3")
SETUP, TRAIN = Turn(0, "setup", 1, 1), Turn(0, "train", 1, 2)
Said = dict[PartyId, str]


def install() -> None:
    server_job.run_on_sites = _attack_all


class Attacker(CallsByHand):
    """Knows the public data, so also the shape of the model."""

    def __init__(self, settings: Settings, transport: Transport, run: str) -> None:
        super().__init__(settings, transport, run)
        if settings.run.method != "fedavg":
            return
        own = PartyHost(self.parts, settings.method.table, settings.method_config, Stream(0, ("party",)))
        weights = own.party(VICTIM).client.state.weights
        self.request, self.vanishing = Broadcast(weights, 96.0), Broadcast(weights, 1e15)
        self.engine.commit(0)
        self.total(self.calls("size", SETUP, dict.fromkeys(self.parts)))
        self.engine.commit(1)

    def whole(self) -> None:
        """The first round as an honest server asks for it; raises unless masks cancel in the total."""
        self.total(self.calls("local_update", TRAIN, self.to(self.parts)))

    def to(self, parties: Iterable[PartyId]) -> Mapping[PartyId, Message]:
        return dict.fromkeys(parties, self.request)

    def said(self, calls: Iterable[Invocation]) -> Said:
        return {
            party: f"refused ({outcome.kind})" if isinstance(outcome, Failure) else "answered"
            for party, outcome in self.ask(calls).items()
        }

    def update(self, parties: Iterable[PartyId], turn: Turn = TRAIN, **more: Any) -> Said:
        return self.said(self.calls("local_update", turn, self.to(parties), **more))


def in_the_clear(server: Attacker) -> Said:
    return server.said([Invocation(VICTIM, "client", "local_update", TRAIN, 1, argument=server.request)])


def round_999(server: Attacker) -> Said:
    server.whole()
    server.engine.rollback(1)
    return server.update(OTHERS, replace(TRAIN, incarnation=1), round=999)


def without_victim(server: Attacker) -> Said:
    server.whole()
    server.engine.rollback(1)
    return server.update(OTHERS, replace(TRAIN, incarnation=1))


def second_begin(server: Attacker) -> Said:
    server.whole()
    server.begin()
    server.engine.rollback(1)
    return server.update(OTHERS, replace(TRAIN, incarnation=1))


def with_a_colluder(server: Attacker) -> Said:
    return server.update((VICTIM, COLLUDER))


def others_vanish(server: Attacker) -> Said:
    requests = server.to([VICTIM]) | dict.fromkeys(OTHERS, server.vanishing)
    return server.said(server.calls("local_update", TRAIN, requests))


def asked_again(server: Attacker) -> Said:
    server.whole()
    return server.said(server.calls("local_update", TRAIN, dict.fromkeys(server.parts, server.vanishing)))


def one_more_call(server: Attacker) -> Said:
    server.whole()
    return server.update(server.parts, sequence=2)


def detail(server: Attacker) -> Said:
    turn = Turn(0, "evaluation", 1, 2)
    return server.said([Invocation(party, "client", "detail", turn, 1) for party in server.parts])


def score_of_round_7(server: Attacker) -> Said:
    turn = Turn(0, "evaluation", 7, 8)
    requests = dict.fromkeys(server.parts, Deployed(server.request.weights))
    return server.said(server.calls("deploy", turn, requests))


def _handler(role: str, handler: str, phase: str) -> Callable[[Attacker], Said]:
    def attack(server: Attacker) -> Said:
        first = next(each.first for each in server.contract.schedule if each.phase == phase)
        parties = server.parts if role == "client" else [f"{client}/devices" for client in server.parts]
        return server.said([Invocation(party, role, handler, Turn(0, phase, 1, first), 1) for party in parties])

    return attack


ATTACKS: dict[str, tuple[Callable[[Attacker], Said], Settings]] = {
    **{
        attack.__name__: (attack, hostile_settings(metric="accuracy"))
        for attack in (
            in_the_clear,
            round_999,
            without_victim,
            second_begin,
            with_a_colluder,
            others_vanish,
            asked_again,
            one_more_call,
            detail,
            score_of_round_7,
        )
    },
    "first_power": (_handler("client", "first_power", "train"), hostile_settings("fedstruct", protocol="hardened")),
    "send_plain": (_handler("device", "send_plain", "train"), hostile_settings("hifgl", secmp="hardened")),
    "gradient_sum": (_handler("device", "gradient_sum", "train"), hostile_settings("hifgl", secmp="hardened")),
}
UNPROTECTED = {
    "no_masks": hostile_settings(secure_sum=False),
    "plain_hifgl": hostile_settings("hifgl", secmp="plain"),
    "many_rounds": hostile_settings(rounds=1_000_000),
}
"""Runs that a strict policy does not enter."""


def _attack_all(path: Path, run: str, attempt: int, transport: Transport) -> None:
    found: dict[str, Said] = {}
    for name, (attack, settings) in ATTACKS.items():
        found[name] = attack(Attacker(settings, transport, name))
    for name, settings in UNPROTECTED.items():
        found[name] = {site: reply.error or "joined" for site, reply in join(transport, name, settings).items()}
    (path / f".{ANSWERS}").write_text(json.dumps(found))
    (path / f".{ANSWERS}").rename(path / ANSWERS)
