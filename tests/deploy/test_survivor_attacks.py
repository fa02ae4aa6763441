"""A malicious server against sites whose sums go on without lost clients: what it could read if a site forgot what it
shared, or confirmed a second group for numbers that it has given before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hostile_server import HostileServer, hostile_settings

from isthmus.errors import ProtocolError
from isthmus.federation.host import Order
from isthmus.federation.interface import Failure
from isthmus.federation.messages import Message, PartyId
from isthmus.federation.party import Invocation, Turn
from isthmus.federation.secure import (
    ConfirmedGroup,
    Masked,
    ReleasedShares,
    SharedSecrets,
    StepName,
    SumStep,
    SumStepRequest,
    add_masked,
    as_if_unmasked,
    read_shares,
    total_of_survivors,
)
from isthmus.methods.fedavg import Broadcast, FedAvgClient, Update
from isthmus.methods.training import Deployed
from isthmus.privacy.masks import SumRoster
from isthmus.privacy.prg import add_streams
from isthmus.privacy.survivors import SharedSecrets as Secrets
from isthmus.privacy.survivors import SurvivorServer, _mask_key
from isthmus.tensors import Weights

POLICY = "\n[policy]\nsurvivors = 100\n"
TRAIN = Turn(0, "train", 1, 2)
NAMES = tuple(f"client-{k}" for k in range(5))
VICTIM, ALLY, LEAST = "client-0", "client-4", 4


class Asked:
    """One sum at all sites, step by step, as a server may ask for it."""

    def __init__(
        self,
        server: HostileServer,
        turn: Turn = TRAIN,
        request: Message | None = None,
        handler: str = "local_update",
        sequence: int = 1,
    ) -> None:
        self.server, self.request = server, request
        if handler == "local_update" and request is None:
            self.request = Broadcast(server.party(VICTIM).client.state.weights, 96.0)
        asked = server.calls(handler, turn, dict.fromkeys(NAMES, self.request), sequence=sequence)
        self.calls = {call.party: call for call in asked}
        self.reply = server.settings.method.table.signature("client", handler).reply
        order = self.calls[VICTIM].mask
        assert order is not None
        self.roster = SumRoster(order.roster.keys, 0, (), LEAST)
        self.order = replace(order, roster=self.roster)
        self.sum = SurvivorServer(self.roster, order.tag)
        self.refused: dict[PartyId, Failure] = {}

    def ask(self, name: StepName, told: Mapping[PartyId, SumStepRequest]) -> dict[PartyId, Message]:
        asked: list[Invocation] = []
        for party, request in told.items():
            order = replace(self.order, step=SumStep(name, request))
            asked.append(replace(self.calls[party], mask=order, argument=self.request if name == "mask" else None))
        outcome = self.server.ask(asked)
        self.refused = {party: one for party, one in outcome.items() if isinstance(one, Failure)}
        return {party: one for party, one in outcome.items() if isinstance(one, Message)}

    def share(self, parties: Collection[PartyId] = NAMES) -> None:
        for party, one in self.ask("share", dict.fromkeys(parties, SumStepRequest((), {}, {}))).items():
            assert isinstance(one, SharedSecrets)
            self.sum.take_secrets(party, Secrets(one.boxes, one.sealed, one.digests))

    def mask(self, present: Collection[PartyId], asked: Collection[PartyId] = NAMES) -> dict[PartyId, Masked]:
        group = SumStepRequest(tuple(sorted(present)), {}, {})
        replies = self.ask("mask", dict.fromkeys(sorted({*present} & {*asked}), group))
        return {party: one for party, one in replies.items() if isinstance(one, Masked)}

    def total(self, survivors: Collection[PartyId]) -> Any:
        """Of a group; None where its parties do not open it."""
        masked = self.mask(self.sum.present)
        layout = add_masked(self.sum, {party: one for party, one in masked.items() if party in survivors})
        if not self.open(survivors):
            return None
        assert self.reply is not None
        return total_of_survivors(self.sum, layout, self.reply)

    def open(self, survivors: Collection[PartyId]) -> bool:
        """Confirm and release: whether enough shares came."""
        self.sum.survivors = tuple(sorted(survivors))
        group = SumStepRequest(self.sum.survivors, {}, {})
        for party, one in self.ask("confirm", dict.fromkeys(survivors, group)).items():
            assert isinstance(one, ConfirmedGroup)
            self.sum.take_codes(party, one.codes)
        told = {p: SumStepRequest((), self.sum.codes_for(p), self.sum.boxes_for(p)) for p in self.sum.survivors}
        for party, one in self.ask("release", told).items():
            assert isinstance(one, ReleasedShares)
            self.sum.take_shares(party, read_shares(party, one))
        return len(self.sum._shares) >= self.roster.sharing.threshold


def started(folder: Path, **more: object) -> HostileServer:
    given = {"clients": 5, "least_clients": LEAST, "reset_optimizer": True, **more}
    server = HostileServer(folder, hostile_settings(**given), POLICY)
    server.engine.commit(0)
    server.session.clock.begin("setup", 1, 1)
    server.session.sum(FedAvgClient.size)
    server.engine.commit(1)
    return server


def true_update(server: HostileServer, client: PartyId = VICTIM) -> Update:
    party = server.party(client)
    before = party.client.state
    party.client.enter(TRAIN.phase, TRAIN.round, 1)
    update = party.client.local_update(Broadcast(before.weights, 96.0))
    party.client.state = before
    return update


def same(found: Message | None, true: Update) -> bool:
    return isinstance(found, Update) and all(
        bool((found.weights[name] - tensor).abs().max() < 1e-5) for name, tensor in true.weights.items()
    )


def test_secrets_are_not_shared_again_after_a_rollback(tmp_path: Path) -> None:
    """A sum is opened, all go back to their checkpoint, and share secrets under the same tag: of the first the server
    has the victim's own mask, of the second, over a group without it, the keys of the very masks of the first.
    """
    server = started(tmp_path)
    true, first = true_update(server), Asked(server)
    first.share()
    masked = first.mask(NAMES)[VICTIM]
    assert first.open([name for name in NAMES if name != "client-1"])
    server.engine.rollback(1)
    second = Asked(server)
    second.share()
    refused = set(second.refused)
    second.mask(second.sum.present)
    if second.sum.present and second.open([name for name in NAMES if name != VICTIM]):
        words = masked.words.numpy().view("u8").copy()
        keys = second.sum._opened(VICTIM, second.sum._recovered(VICTIM))
        subtract = [key for other, key in keys.items() if other > VICTIM]
        add_streams(words, [key for other, key in keys.items() if other < VICTIM], subtract)
        add_streams(words, [], [_mask_key(first.sum._recovered(VICTIM), first.order.tag)])
        masked.words.numpy().view("u8")[:] = words
        assert not same(as_if_unmasked(masked, Update), true), "the victim's update, exactly"
    assert refused == set(NAMES)


def test_a_replay_over_a_group_that_differs_by_the_victim_and_an_ally_is_refused(tmp_path: Path) -> None:
    """The same numbers over all but the ally, and after a crash over all but the victim: what the ally tells of its own
    part makes the difference the victim's. Two groups of one sum may differ in nobody at all.
    """
    server = started(tmp_path)
    true, allys = true_update(server), true_update(server, ALLY)
    first = Asked(server)
    first.share()
    whole = first.total([name for name in NAMES if name != ALLY])
    assert whole is not None
    server.engine.rollback(1)
    second = Asked(server, replace(TRAIN, incarnation=1))
    second.share()
    rest = second.total([name for name in NAMES if name != VICTIM])
    if rest is not None:
        found = {name: tensor - rest.weights[name] + allys.weights[name] for name, tensor in whole.weights.items()}
        assert not same(Update(found, true.share), true), "the victim's update, exactly"
    assert rest is None and second.refused
    server.engine.rollback(1)
    third = Asked(server, replace(TRAIN, incarnation=2))
    third.share()
    again = third.total([name for name in NAMES if name != ALLY])
    assert again is not None and same(again, whole), "the same group once more is no new knowledge"


def test_what_remains_a_server_that_asks_the_same_in_two_rounds(tmp_path: Path) -> None:
    """The limit that docs/secure-sums.md states, and why `survivors` is 0 unless an organisation sets it."""
    server = started(tmp_path, dropout=0.0)
    true, first = true_update(server), Asked(server)
    first.share()
    whole = first.total(NAMES)
    server.engine.commit(2)
    second = Asked(server, Turn(0, "train", 2, 3), first.request)
    second.share()
    rest = second.total([name for name in NAMES if name != VICTIM])
    assert whole is not None and rest is not None
    found = {name: tensor - rest.weights[name] for name, tensor in whole.weights.items()}
    assert same(Update(found, true.share), true)


def test_a_group_that_was_confirmed_is_written_down_whatever_was_asked_before(tmp_path: Path) -> None:
    """A call to confirm a group that was never summed, under the number of the sum that follows: were the group of that
    one taken for written, the sites would not know of it when the run is begun again, and the same counts could be
    summed without the victim.
    """
    server, evaluation = started(tmp_path, metric="macro_f1", eval_every=1), Turn(0, "evaluation", 1, 2)
    model, found = Deployed(server.party(VICTIM).client.state.weights), []
    for attempt, group in enumerate([NAMES, NAMES[1:]]):
        turn = replace(evaluation, incarnation=attempt)
        scores = Asked(server, turn, model, "deploy")
        scores.share()
        assert scores.total(NAMES) is not None
        if not attempt:
            never = Asked(server, turn, model, "deploy", 2)
            never.ask("confirm", dict.fromkeys(NAMES, SumStepRequest(NAMES, {}, {})))
            assert set(never.refused) == set(NAMES)
        counts = Asked(server, turn, None, "detail", 2)
        counts.share()
        found.append(counts.total(group))
        if not attempt:
            true = server.party(VICTIM).client.detail()  # type: ignore[attr-defined]
            server.begin()
            server.engine.rollback(1)
    whole, rest = found
    assert whole is not None
    if rest is not None:
        read = whole.confusion["test"] - rest.confusion["test"]
        assert not bool((read == true.confusion["test"]).all()), "the victim's counts, exactly"
    assert rest is None


def test_nobody_is_back_without_a_checkpoint(tmp_path: Path) -> None:
    """Sites keep two checkpoints, both of later steps than the one they are said to be back in, and are started again:
    from a fresh state they would answer the same request under fresh noise, as often as the server likes.
    """
    server = started(tmp_path, weighting="uniform", dp_clip=1.0, dp_noise=1.0, dropout=0.0)
    first = Asked(server)
    first.share()
    answer = first.total(NAMES)
    assert answer is not None
    server.engine.commit(2)
    server.engine.commit(3)
    server.begin()
    for place, clients in server.engine.places.items():
        with pytest.raises(ProtocolError, match="holds no checkpoint of step 1 or before to go back to"):
            server.engine.each({place: Order("catch_up", step=1, clients=clients)})
    again = Asked(server, replace(TRAIN, incarnation=1), first.request)
    again.share()
    assert set(again.refused) == set(NAMES)


class Untied(list[Any]):
    """Remembers nothing."""

    def append(self, asked: Any) -> None: ...


def told_apart(
    server: HostileServer, turn: Turn, request: Callable[[Weights], Message], handler: str, number: int = 1
) -> None:
    """The victim is told another model than the others, in a sum that nobody needs; with no number without secrets for
    it, so that the handler runs and its answer cannot be masked.
    """
    weights = server.party(VICTIM).client.state.weights
    constant = {name: tensor * 0.0 for name, tensor in weights.items()}
    for told, parties in ((weights, [VICTIM]), (constant, NAMES[1:])):
        asked = Asked(server, turn, request(told), handler, number or 1)
        if number:
            asked.share(parties)
        assert asked.mask(NAMES, parties).keys() == (set(parties) if number else set())


@pytest.mark.parametrize(
    ("phase", "numbers"), [("evaluation", (1, 2)), ("evaluation", (2, 1)), ("evaluation", (0, 1)), ("train", (1, 2))]
)
@pytest.mark.parametrize("tied", [False, True])
def test_parties_that_were_told_different_things_in_a_round_have_no_total(
    tmp_path: Path, tied: bool, phase: str, numbers: tuple[int, int]
) -> None:
    """After that an honest sum of what all say of the model they have now. Where everybody is needed masks depend on
    all that was asked before; who may be absent was not asked all that, but all in a sum were asked the same in its
    round. The numbers of the calls are the server's, and say nothing of which came first.
    """
    server = started(tmp_path, metric="macro_f1", eval_every=1)
    for name in () if tied else NAMES:
        watch: Any = server.party(name).watch
        watch._told_here = Untied()
    evaluation = Turn(0, "evaluation", 1, 2)
    if phase == "train":
        told_apart(server, TRAIN, lambda weights: Broadcast(weights, 96.0), "local_update")
    else:
        told_apart(server, evaluation, Deployed, "deploy", numbers[0])
    counts = Asked(server, evaluation, None, "detail", numbers[1])
    counts.share()
    total = counts.total(NAMES)
    assert (total is None) == tied, "they confirm no group to each other"
    assert tied or {int(matrix.sum()) for matrix in total.confusion.values()} != {0}


def test_nothing_that_a_party_was_told_in_a_round_is_left_in_the_next(tmp_path: Path) -> None:
    """Or what one was told alone would be in its answers to what all are told."""
    server = started(tmp_path, metric="macro_f1", eval_every=1)
    first = {name: server.party(name).client.state for name in NAMES}
    told_apart(server, TRAIN, lambda weights: Broadcast(weights, 96.0), "local_update")
    assert all(server.party(name).client.state is not first[name] for name in NAMES)
    server.engine.commit(2)
    after = Asked(server, Turn(0, "train", 2, 3), Broadcast({}, 96.0))
    after.share()
    assert all(server.party(name).client.state is first[name] for name in NAMES)
