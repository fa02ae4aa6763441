"""``sum`` and summed ``exchange`` behind pairwise masks: what arrives from one party is uniform, only the sum of all
can be read. The arithmetic is in `isthmus.federation.secure`; here is who is asked what, and in which order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from isthmus.errors import ProtocolError, RunError
from isthmus.federation import codec
from isthmus.federation.calls import Caller
from isthmus.federation.interface import Replies, Stacked
from isthmus.federation.messages import SERVER, Message, PartyId, client_of, role_of
from isthmus.federation.party import Invocation, Parcel
from isthmus.federation.secure import (
    STEP_REPLIES,
    MailOrder,
    MailOrders,
    MailPlan,
    Masked,
    MaskOrder,
    Sealed,
    StepName,
    SumStep,
    SumStepRequest,
    add_masked,
    join_supports,
    read_shares,
    total_of_survivors,
    unmask,
)
from isthmus.federation.watch import SessionWatch
from isthmus.privacy.mask_graph import choices_for
from isthmus.privacy.masks import SumRoster, SumTag
from isthmus.privacy.survivors import SharedSecrets as SecretsOfSum
from isthmus.privacy.survivors import SurvivorServer

NOTHING_TOLD = SumStepRequest((), {}, {})


def masked_sum(caller: Caller, calls: Sequence[Invocation], name: str, *, each: bool = False) -> Message:
    """The sum of what everybody answers to these calls; ``each``: everybody was asked something of its own."""
    if len(calls) < 2:
        raise RunError(
            f"{name}: a sum over one party shows that party's values; run with two clients or more, or without "
            "secure_sum"
        )
    request = "" if each else _digest(calls)
    order = _order(caller, name, [call.party for call in calls], caller.clock.sequence, request)
    answers = caller.replies([replace(call, mask=order.seen_by(call.party)) for call in calls])
    masked = {party: reply for party, reply in answers.items() if isinstance(reply, Masked)}
    reply = caller.reply_type(name)
    caller.books.masked(name, reply, list(masked), [SERVER], list(masked.values()))
    return unmask(masked, order, reply)


def sum_of_survivors(caller: Caller, calls: Sequence[Invocation], name: str, at_least: int) -> Message:
    """The sum of what at least so many parties answer; whoever is lost on the way is absent from then on. Below that
    the round is lost, and nothing was revealed. In a round that is run again it is over the same parties, or lost.
    """
    everybody = caller.everybody
    order = _order(caller, name, everybody, caller.clock.sequence, _digest(calls), at_least=at_least)
    server, by_party = SurvivorServer(order.roster, order.tag), {call.party: call for call in calls}
    content = order.tag.content
    if content in caller.clock.left_out:
        left_out = caller.clock.left_out[content]
        caller.clock.lose(by_party.keys() & set(left_out))
        by_party = {party: call for party, call in by_party.items() if party not in left_out}
        needed = len(everybody) - len(left_out)
    else:
        needed = at_least

    sharing = order.roster.sharing
    to_open = at_least if sharing.holders else sharing.threshold

    def ask(step: StepName, requests: Mapping[PartyId, SumStepRequest]) -> dict[PartyId, Any]:
        made = {id(request): SumStep(step, request) for request in requests.values()}
        asked = []
        for party, request in requests.items():
            call, its = by_party[party], replace(order, step=made[id(request)]).seen_by(party)
            asked.append(replace(call, mask=its, argument=call.argument if its.runs_handler else None))
        outcome, _ = caller.dispatch(asked, at_least=needed if step in ("share", "mask") else to_open)
        assert not isinstance(outcome, Stacked)
        replies = {party: reply for party, reply in outcome.items() if isinstance(reply, STEP_REPLIES[step])}
        caller.books.batch(name, "clear", [(SERVER, party, requests[party]) for party in requests])
        if step != "mask":
            caller.books.batch(name, "clear", [(party, SERVER, reply) for party, reply in replies.items()])
        return replies

    for party, secrets in ask("share", dict.fromkeys(by_party, NOTHING_TOLD)).items():
        server.take_secrets(party, SecretsOfSum(secrets.boxes, secrets.sealed, secrets.digests))
    group = SumStepRequest(server.present, {}, {})
    masked: dict[PartyId, Masked] = ask("mask", dict.fromkeys(server.present, group))
    reply = caller.reply_type(name)
    caller.books.masked(name, reply, list(masked), [SERVER], list(masked.values()))
    layout = add_masked(server, masked)
    survivors = server.settle()
    caller.clock.confirmed(content, sorted(set(everybody) - set(survivors)))
    group = SumStepRequest(survivors, {}, {})
    for party, confirmed in ask("confirm", dict.fromkeys(survivors, group)).items():
        server.take_codes(party, confirmed.codes)
    told = {
        party: SumStepRequest((), server.codes_for(party), server.boxes_for(party))
        for party in survivors
        if client_of(party) not in caller.clock.absent
    }
    for party, released in ask("release", told).items():
        server.take_shares(party, read_shares(party, released))
    return total_of_survivors(server, layout, reply)


def masked_exchange(
    caller: Caller, calls: Sequence[Invocation], name: str, handlers: Mapping[str, str]
) -> Replies[Any]:
    """Summed mail: senders say whom they write to, learn who else does, and only then send, masked."""
    session_keys(caller)
    held = calls[0].sequence
    plans = _plans(caller, [replace(call, mail=MailOrder(held)) for call in calls], name)
    orders = _mail_orders(caller, name, plans, handlers, held, _digest(calls))
    parcels = _masked_parcels(caller, calls, name, plans, orders)
    replies = caller.deliver(handlers, parcels, set(plans), "sum", MailOrder(held, orders))
    to_server = {
        parcel.sender: parcel.content
        for parcel in parcels
        if parcel.receiver == SERVER and isinstance(parcel.content, Masked)
    }
    mail = {"sum": unmask(to_server, orders[SERVER], caller.reply_type(name))} if to_server else {}
    return Replies(replies, {}, mail)


def _digest(calls: Sequence[Invocation]) -> str:
    """Of the request all parties got."""
    argument = calls[0].argument
    return "" if argument is None else codec.digest(argument)


def session_keys(caller: Caller) -> Mapping[PartyId, bytes]:
    """Everybody's public session key, exchanged before the first secure sum of a role."""
    known = caller.clock.sum_keys
    if caller.role not in known:
        keys = known[caller.role] = dict(caller.engine.sum_keys(caller.role))
        caller.books.keys(_roster(caller, tuple(keys), choices_for(len(keys))))
    return known[caller.role]


def _order(
    caller: Caller,
    name: str,
    parties: Sequence[PartyId],
    sequence: int,
    request: str,
    *,
    receiver: PartyId = SERVER,
    supports: tuple[Tensor, ...] | None = None,
    at_least: int = 0,
) -> MaskOrder:
    session_keys(caller)
    clock = caller.clock
    tag = SumTag(
        clock.run,
        clock.turn.phase,
        clock.turn.round,
        sequence,
        handler=name,
        attempt=clock.turn.incarnation,
        receiver=receiver,
        request=request,
    )
    chosen = _chosen(caller, name, parties, receiver, at_least)
    return MaskOrder(_roster(caller, tuple(parties), chosen, at_least), tag, supports)


def _chosen(caller: Caller, name: str, parties: Sequence[PartyId], receiver: PartyId, at_least: int) -> int:
    """How many neighbours each party chooses: few only where the contract fixes the roster, because a server that may
    choose it could choose one with a bad graph.
    """
    fixed = set(parties) == set(caller.everybody) - {receiver}
    if not fixed and isinstance(caller.clock.watch, SessionWatch):
        line = caller.clock.watch.contract.by_place.get((caller.clock.turn.phase, caller.role, name))
        fixed = line is not None and line.groups > 0
    return choices_for(len(parties), at_least) if fixed else 0


def _roster(caller: Caller, parties: tuple[PartyId, ...], chosen: int, at_least: int = 0) -> SumRoster:
    """Made once per run: who masks with whom is computed once."""
    known, keys = caller.clock.rosters, caller.clock.sum_keys[caller.role]
    place = caller.role, parties, chosen, at_least
    if place not in known:
        known[place] = SumRoster({party: keys[party] for party in parties}, chosen, (), at_least)
    return known[place]


def _plans(caller: Caller, calls: Sequence[Invocation], name: str) -> dict[PartyId, MailPlan]:
    plans = {party: plan for party, plan in caller.replies(calls).items() if isinstance(plan, MailPlan)}
    caller.books.batch(name, "clear", [(party, SERVER, plan) for party, plan in plans.items()])
    return plans


def _mail_orders(
    caller: Caller, name: str, plans: Mapping[PartyId, MailPlan], roles: Mapping[str, str], held: int, request: str
) -> dict[PartyId, MaskOrder]:
    """By receiver: who writes to it, and the positions over which their sparse matrices are summed."""
    writers: dict[PartyId, list[PartyId]] = {}
    for party, plan in plans.items():
        for receiver in plan.receivers:
            writers.setdefault(receiver, []).append(party)
    caller.check_receivers(writers, roles)
    for receiver, senders in writers.items():
        if len(senders) < 2:
            raise RunError(
                f"{name}: only {senders[0]} writes to {receiver}, and a sum over one party shows that party's "
                "values; let two others or more write to every receiver (zeros are fine), or run without secure_sum"
            )
    orders = {}
    for receiver, senders in sorted(writers.items()):
        supports = join_supports([plans[sender].announced.get(receiver, ()) for sender in senders])
        orders[receiver] = _order(caller, name, senders, held, request, receiver=receiver, supports=supports)
    return orders


def _masked_parcels(
    caller: Caller,
    calls: Sequence[Invocation],
    name: str,
    plans: Mapping[PartyId, MailPlan],
    orders: Mapping[PartyId, MaskOrder],
) -> list[Parcel]:
    """The held mail of everybody, masked."""
    own = {
        party: {receiver: orders[receiver].seen_by(party) for receiver in plan.receivers}
        for party, plan in plans.items()
        if plan.receivers
    }
    if not own:
        return []
    caller.books.batch(name, "clear", [(SERVER, party, _as_message(its)) for party, its in own.items()])
    held = calls[0].sequence
    # A number of its own, but none of the clock's: handlers draw the same random numbers as in a run without masks.
    second = [
        replace(call, argument=None, sequence=-held, mail=MailOrder(held, its))
        for call in calls
        if (its := own.get(call.party))
    ]
    parcels, _ = caller.collect(second)
    by_role: dict[str, list[Parcel]] = {}
    for parcel in parcels:
        content = parcel.content
        masked = isinstance(content, Masked) or (
            isinstance(content, Sealed) and content.message_type == Masked.__name__
        )
        if not masked or parcel.receiver not in own[parcel.sender]:
            raise ProtocolError(
                f"mail of {parcel.sender} to {parcel.receiver} is not masked, or not what it said it would send"
            )
        by_role.setdefault(role_of(parcel.receiver), []).append(parcel)
    for batch in by_role.values():
        senders, receivers = [parcel.sender for parcel in batch], [parcel.receiver for parcel in batch]
        caller.books.masked(name, caller.reply_type(name), senders, receivers, [parcel.content for parcel in batch])
    return parcels


def _as_message(orders: Mapping[PartyId, MaskOrder]) -> MailOrders:
    return MailOrders(
        {receiver: order.roster.parties for receiver, order in orders.items()},
        {receiver: order.supports or () for receiver, order in orders.items()},
    )
