"""The script of a method: which handlers are called in each phase, by which verb, and how often.

A method declares it with the handlers themselves, as its rounds call them::

    def script(config: FedAvgConfig, view: View) -> Script:
        return {
            "setup": (total(FedAvgClient.size),),
            "train": (total(FedAvgClient.local_update, some=config.fraction < 1.0),),
            "evaluation": (ask(FedAvgClient.deploy),),
        }

Everything else follows from it: the disclosure sheet (:func:`disclosures`), and the contract by which every party
refuses whatever is not in the script (`isthmus.federation.contract`). ``view`` is what a site knows by itself before
anything is sent: clients, features, classes, task.

A bound on calls is an expression of the settings. Where the number of calls depends on data, give a bound that holds
for any data; where a branch does, list both branches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from isthmus.errors import ConfigError
from isthmus.federation.ledger import Disclosure, Protection
from isthmus.federation.messages import SERVER
from isthmus.federation.roles import RoleTable

Verb = Literal["ask", "total", "mail"]
Handler = Callable[..., Any]
EVALUATION = "evaluation"
"""Phase of the calls by which models are scored."""
PREDICTION = "prediction"
"""Phase of the calls by which trained models predict (`Method.predict`)."""


@dataclass(frozen=True)
class ScriptLine:
    """One verb of a script. Made by :func:`ask`, :func:`total` and :func:`mail`.

    Args:
        most: Calls of one party in one round.
        some: A part of the parties may be asked; otherwise it is everybody.
        survivors: The method can do with a sum over those who answer, at least ``least_clients`` of the run: what a
            party answers follows from the request and its own data, not from what it was told in rounds it missed.
        groups: Number of fixed groups (`isthmus.privacy.guard.fixed_groups`): behind masks a sum is over one of them,
            and over no other parties; 0 = none. Every group may be asked ``most`` times.
        each: Everybody gets a request of its own; otherwise all are asked the same, and behind masks this sum and all
            later ones are tied to that request.
        fresh: The request holds fresh keys, so a round that is run again asks for something else.
        receive: Of mail, the handlers that take it, one per receiving role.
        summed: Of mail, receivers get the sum only.
        server: Of mail, some of it may be for the server.
    """

    verb: Verb
    handler: Handler
    most: int = 1
    some: bool = False
    each: bool = False
    fresh: bool = False
    groups: int = 0
    survivors: bool = False
    receive: tuple[Handler, ...] = ()
    summed: bool = False
    server: bool = False

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ConfigError(f"script: {self.handler.__qualname__} with most={self.most}; leave the line out instead")


Script = Mapping[str, Sequence[ScriptLine]]
"""Lines by phase; ``evaluation`` for the calls of `Method.evaluate`."""


def ask(handler: Handler, *, most: int = 1, some: bool = False, each: bool = False, fresh: bool = False) -> ScriptLine:
    """``federation.call(handler, ...)``: the server reads every reply. Scores (``scores_of``) are asked for, too; with
    secure sums they are totalled, with ``each`` over parties that got requests of their own.
    """
    return ScriptLine("ask", handler, most=most, some=some, each=each, fresh=fresh)


def total(
    handler: Handler,
    *,
    most: int = 1,
    some: bool = False,
    each: bool = False,
    groups: int = 0,
    survivors: bool = False,
) -> ScriptLine:
    """``federation.sum(handler, ...)``: the server is given the total, and with secure sums can read nothing else."""
    return ScriptLine("total", handler, most=most, some=some, each=each, groups=groups, survivors=survivors)


def mail(
    send: Handler,
    *receive: Handler,
    most: int = 1,
    summed: bool = False,
    some: bool = False,
    fresh: bool = False,
    server: bool = False,
) -> ScriptLine:
    """``federation.exchange(send, receive, ...)``: messages between parties; ``summed`` for ``combine="sum"``."""
    return ScriptLine("mail", send, most=most, some=some, fresh=fresh, receive=receive, summed=summed, server=server)


def lines_of(script: Script) -> Iterator[tuple[str, ScriptLine]]:
    """Phase and line, in the order of the script."""
    for phase, lines in script.items():
        for line in lines:
            yield phase, line


def disclosures(script: Script, table: RoleTable) -> tuple[Disclosure, ...]:
    """The disclosure sheet that follows from a script: requests go from the server to a role, replies from the role to
    the server, mail from role to role; what is totalled is protected as a sum.
    """
    found: list[Disclosure] = []
    for phase, line in lines_of(script):
        role, name = table.locate(line.handler, prefer="client")
        signature = table.signature(role, name)
        if signature.request is not None:
            found.append(Disclosure(phase, SERVER, role, signature.request))
        summed: Protection = "summed" if line.verb == "total" or line.summed else "clear"
        if line.verb != "mail":
            if signature.reply is not None:
                found.append(Disclosure(phase, role, SERVER, signature.reply, summed))
            continue
        assert signature.reply is not None
        receivers = [table.locate(receive, prefer=role) for receive in line.receive]
        to = [*(receiver for receiver, _ in receivers), *([SERVER] if line.server else [])]
        found += [Disclosure(phase, role, receiver, signature.reply, summed) for receiver in to]
        for receiver, handler in receivers:
            reply = table.signature(receiver, handler).reply
            if reply is not None:
                found.append(Disclosure(phase, receiver, SERVER, reply))
    return tuple(dict.fromkeys(found))
