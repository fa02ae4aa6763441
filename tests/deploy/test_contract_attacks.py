"""A malicious server against real sites: every attack succeeds where parties answer whatever they are asked, and is
refused under the contract of the run, with the line the site writes to its log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hostile_server import HostileServer, Refused, hostile_settings

from isthmus.errors import ProtocolError, RunError
from isthmus.federation import codec, secure
from isthmus.federation.interface import Failure
from isthmus.federation.party import Invocation, Turn
from isthmus.federation.secure import MaskOrder
from isthmus.methods.fedavg import Broadcast, FedAvgClient, Update
from isthmus.methods.training import Deployed
from isthmus.privacy.masks import SumRoster
from isthmus.tensors import Weights

VICTIM, OTHERS = "client-0", ("client-1", "client-2", "client-3")
SETUP, TRAIN = Turn(0, "setup", 1, 1), Turn(0, "train", 1, 2)


@pytest.fixture
def server(tmp_path: Path) -> HostileServer:
    return started(tmp_path)


def started(folder: Path, **more: object) -> HostileServer:
    """A run after its setup: everybody has trained nothing yet."""
    server = HostileServer(folder, hostile_settings(**more))
    server.engine.commit(0)
    server.session.clock.begin(SETUP.phase, SETUP.round, SETUP.step)
    server.session.sum(FedAvgClient.size)
    server.engine.commit(1)
    return server


def first_weights(server: HostileServer) -> Weights:
    state = server.party(VICTIM).client.state
    weights: Weights = state.weights
    return weights


def true_update(server: HostileServer) -> Weights:
    """What the victim would send, computed behind its back and undone."""
    party = server.party(VICTIM)
    before = party.client.state
    party.client.enter(TRAIN.phase, TRAIN.round, 1)
    update = party.client.local_update(Broadcast(first_weights(server), 96.0))
    party.client.state = before
    return {name: tensor / update.share for name, tensor in update.weights.items()}


def error(found: Weights, true: Weights) -> float:
    return max(float((found[name] - tensor).abs().max()) for name, tensor in true.items())


# -- the attacks: each returns the victim's model, or is refused -------------------------------------


def in_the_clear(server: HostileServer) -> Weights:
    """A summed handler called without an order to mask."""
    request = Broadcast(first_weights(server), 96.0)
    reply = server.ask([Invocation(VICTIM, "client", "local_update", TRAIN, 1, argument=request)])[VICTIM]
    if isinstance(reply, Failure):
        raise Refused({VICTIM: reply})
    assert isinstance(reply, Update)
    return {name: tensor / reply.share for name, tensor in reply.weights.items()}


def minus(whole: Any, rest: Any) -> Weights:
    share = whole.share - rest.share
    return {name: (tensor - rest.weights[name]) / share for name, tensor in whole.weights.items()}


def round_999(server: HostileServer) -> Weights:
    """Everybody's sum; then, after a roll-back, the same values as those of another round without the victim."""
    request = Broadcast(first_weights(server), 96.0)
    whole = server.total(server.calls("local_update", TRAIN, dict.fromkeys((VICTIM, *OTHERS), request)))
    server.engine.rollback(1)
    again = replace(TRAIN, incarnation=1)
    rest = server.total(server.calls("local_update", again, dict.fromkeys(OTHERS, request), round=999))
    return minus(whole, rest)


def second_begin(server: HostileServer) -> Weights:
    """The same run begun again, so that nobody remembers the first roster."""
    request = Broadcast(first_weights(server), 96.0)
    whole = server.total(server.calls("local_update", TRAIN, dict.fromkeys((VICTIM, *OTHERS), request)))
    armed = server.party(VICTIM).watch is not None
    server.begin()
    if not armed:
        server.without_contracts()
    server.engine.rollback(1)
    again = replace(TRAIN, incarnation=1)
    return minus(whole, server.total(server.calls("local_update", again, dict.fromkeys(OTHERS, request))))


def with_a_colluder(server: HostileServer) -> Weights:
    """A sum over the victim and a client that tells the server its own part."""
    request, colluder = Broadcast(first_weights(server), 96.0), OTHERS[0]
    own = server.party(colluder)
    before = own.client.state
    own.client.enter(TRAIN.phase, TRAIN.round, 1)
    known = own.client.local_update(request)
    own.client.state = before
    whole = server.total(server.calls("local_update", TRAIN, dict.fromkeys((VICTIM, colluder), request)))
    return minus(whole, known)


def others_vanish(server: HostileServer) -> Weights:
    """An honest masked total over everybody, but all others were asked with a total that makes their part vanish."""
    weights = first_weights(server)
    requests = {VICTIM: Broadcast(weights, 96.0)} | dict.fromkeys(OTHERS, Broadcast(weights, 1e15))
    found = server.total(server.calls("local_update", TRAIN, requests))
    return {name: tensor / found.share for name, tensor in found.weights.items()}


EVERYBODY = "a sum of client.local_update is over everybody in this run (4 parties), not over"
ATTACKS: dict[str, tuple[Callable[[HostileServer], Weights], str]] = {
    "in the clear": (
        in_the_clear,
        "client-0: client.local_update is summed behind masks in this run, and the call has no order to mask",
    ),
    "round 999": (
        round_999,
        "client-1: the order to mask for client.local_update is of another round than the call",
    ),
    "second begin": (second_begin, f"client-1: {EVERYBODY} 3"),
    "colluder": (with_a_colluder, f"client-0: {EVERYBODY} 2"),
    "others vanish": (
        others_vanish,
        "client-1: the order to mask for client.local_update is of another request than the call",
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_without_a_contract_the_server_reads_the_victims_update(name: str, server: HostileServer) -> None:
    attack, _ = ATTACKS[name]
    truth = true_update(server)
    server.without_contracts()
    assert error(attack(server), truth) < 2e-5


@pytest.mark.parametrize("name", ATTACKS)
def test_under_the_contract_it_is_refused(name: str, server: HostileServer, caplog: pytest.LogCaptureFixture) -> None:
    attack, line = ATTACKS[name]
    with pytest.raises(Refused):
        attack(server)
    assert line in [record.message.removeprefix("refused: ") for record in caplog.records]


def test_masks_cancel_only_between_parties_that_were_asked_the_same(server: HostileServer) -> None:
    """Truthful digests do not help: the tags differ, and so do the masks."""
    weights = first_weights(server)
    whole = server.calls("local_update", TRAIN, dict.fromkeys((VICTIM, *OTHERS), Broadcast(weights, 96.0)))
    calls = [whole[0]]
    for call in whole[1:]:
        assert call.mask is not None
        request = Broadcast(weights, 1e15)
        order = replace(call.mask, tag=replace(call.mask.tag, request=codec.digest(request)))
        calls.append(replace(call, argument=request, mask=order))
    with pytest.raises(ProtocolError, match="masks do not cancel"):
        server.total(calls)


def test_a_run_that_was_begun_before_goes_on_from_a_checkpoint(
    server: HostileServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A fresh process would answer under fresh noise: as often as it is begun, so often could noise be averaged."""
    request = dict.fromkeys((VICTIM, *OTHERS), Broadcast(first_weights(server), 96.0))
    server.total(server.calls("local_update", TRAIN, request))
    server.begin()
    again = replace(TRAIN, incarnation=1)
    with pytest.raises(Refused):
        server.total(server.calls("local_update", again, request))
    assert "client-0: step 2 does not follow from the state of step 0" in caplog.text
    server.engine.rollback(1)
    server.total(server.calls("local_update", again, request))


def test_replays_ask_the_same_up_to_three_times(server: HostileServer, caplog: pytest.LogCaptureFixture) -> None:
    weights, parties = first_weights(server), (VICTIM, *OTHERS)
    server.total(server.calls("local_update", TRAIN, dict.fromkeys(parties, Broadcast(weights, 96.0))))
    for attempt in (1, 2, 3, 4):
        server.engine.rollback(1)
        request = Broadcast(weights, 96.0 + attempt)
        calls = server.calls("local_update", replace(TRAIN, incarnation=attempt), dict.fromkeys(parties, request))
        if attempt < 4:
            server.total(calls)
            continue
        with pytest.raises(Refused):
            server.total(calls)
    assert (
        "client-0: step 2 was run before, and client.local_update now asks for something else; 3 such changes are "
        "allowed in a run" in caplog.text
    )


def test_nothing_is_asked_twice_in_a_round(server: HostileServer, caplog: pytest.LogCaptureFixture) -> None:
    requests = dict.fromkeys((VICTIM, *OTHERS), Broadcast(first_weights(server), 96.0))
    server.total(server.calls("local_update", TRAIN, requests))
    other = dict.fromkeys((VICTIM, *OTHERS), Broadcast(first_weights(server), 97.0))
    with pytest.raises(Refused):
        server.total(server.calls("local_update", TRAIN, other))
    assert "client-0: sequence 1 of client.local_update asks for something else now" in caplog.text


@pytest.mark.parametrize(
    ("handler", "turn", "line"),
    [
        ("detail", Turn(0, "evaluation", 1, 2), "client.detail is not in the contract of this run for phase"),
        ("size", TRAIN, "client.size is not in the contract of this run for phase 'train'"),
        ("size", Turn(0, "setup", 2, 2), "setup round 2 at step 2 is not in the schedule of this run"),
        ("size", Turn(0, "setup", 1, 4), "setup round 1 at step 4 is not in the schedule of this run"),
    ],
)
def test_what_was_not_agreed_does_not_exist(
    server: HostileServer, caplog: pytest.LogCaptureFixture, handler: str, turn: Turn, line: str
) -> None:
    with pytest.raises(Refused):
        server.total(server.calls(handler, turn, dict.fromkeys((VICTIM, *OTHERS))))
    assert line in caplog.text


def test_evaluation_only_where_it_is_due_and_training_not_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = started(tmp_path, eval_every=2)
    weights, parties = first_weights(server), (VICTIM, *OTHERS)
    scored = dict.fromkeys(parties, Deployed(weights))
    with pytest.raises(Refused):
        server.total(server.calls("deploy", Turn(0, "evaluation", 1, 2), scored))
    assert "evaluation round 1 at step 2 is not in the schedule of this run" in caplog.text
    server.total(server.calls("deploy", Turn(0, "evaluation", 2, 3), scored))
    late = server.calls("local_update", Turn(0, "train", 2, 3), dict.fromkeys(parties, Broadcast(weights, 96.0)))
    with pytest.raises(Refused):
        server.total(late)
    assert "client-0: train of step 3 is over" in caplog.text


@pytest.mark.parametrize(
    ("method", "more", "role", "handler", "phase"),
    [
        ("fedstruct", {"protocol": "hardened"}, "client", "first_power", "powers"),
        ("fedstruct", {"protocol": "hardened"}, "client", "enrol_by_id", "setup"),
        ("fedstruct", {"protocol": "hardened"}, "client", "local_update", "train"),
        ("hifgl", {"secmp": "hardened"}, "device", "gradient_sum", "train"),
        ("hifgl", {"secmp": "hardened"}, "device", "labelled", "setup"),
        ("hifgl", {"secmp": "hardened"}, "device", "score", "evaluation"),
        ("fedgcn", {}, "client", "answer", "exchange"),
    ],
)
def test_handlers_of_protocols_the_run_does_not_use_do_not_exist_in_it(
    method: str, more: dict[str, object], role: str, handler: str, phase: str, tmp_path: Path
) -> None:
    server = HostileServer(tmp_path, hostile_settings(method, **more))
    assert handler in server.settings.method.table.handlers[role], "otherwise the table of roles refuses it already"
    party = VICTIM if role == "client" else f"{VICTIM}/devices"
    first = next((each for each in server.contract.schedule if each.phase == phase), server.contract.schedule[-1])
    call = Invocation(party, role, handler, Turn(0, phase, 1, first.first), 1)
    outcome = server.party(party).invoke(call)
    assert isinstance(outcome, Failure) and outcome.kind == "protocol"
    assert str(outcome.cause) == f"{role}.{handler} is not in the contract of this run for phase {phase!r}"


# -- states and noise --------------------------------------------------------------------------------


def test_a_fresh_state_is_not_kept_as_a_checkpoint(server: HostileServer, caplog: pytest.LogCaptureFixture) -> None:
    """Begun again, kept as step 0 and gone back to, a party would draw the secret of its noise anew: as often as the
    server likes.
    """
    server.total(
        server.calls("local_update", TRAIN, dict.fromkeys(server.parts, Broadcast(first_weights(server), 96.0)))
    )
    server.begin()
    for step in (0, 1, 2):
        with pytest.raises(ProtocolError, match=f"the state of step 0 is not that of step {step}"):
            server.engine.commit(step)
    server.engine.rollback(1)
    with pytest.raises(ProtocolError, match="the state of step 1 is not that of step 2"):
        server.engine.commit(2)
    server.engine.commit(1)
    assert "not that of step" in caplog.text


def test_a_run_with_a_promise_of_privacy_allows_no_other_replay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other numbers get other noise: a release that epsilon does not count."""
    pytest.importorskip("dp_accounting", reason="the accountant is an extra")
    server = started(tmp_path, dp_clip=1.0, dp_noise=1.0, weighting="uniform")
    weights = first_weights(server)
    server.total(server.calls("local_update", TRAIN, dict.fromkeys(server.parts, Broadcast(weights, 4.0))))
    server.engine.rollback(1)
    again = dict.fromkeys(server.parts, Broadcast(weights, 5.0))
    with pytest.raises(Refused):
        server.total(server.calls("local_update", replace(TRAIN, incarnation=1), again))
    assert "asks for something else; 0 such changes are allowed in a run" in caplog.text


# -- numbers that cannot be summed -------------------------------------------------------------------


def told_apart(server: HostileServer) -> dict[str, bool]:
    """Whether each client fails under a request whose total makes the parts of clients of 15 nodes or more too large
    for a masked sum.
    """
    weights = {name: tensor * 0.0 + 2.0**21 for name, tensor in first_weights(server).items()}
    calls = server.calls("local_update", TRAIN, dict.fromkeys(server.parts, Broadcast(weights, 14.5)))
    return {party: isinstance(one, Failure) for party, one in server.ask(calls).items()}


@pytest.mark.parametrize("hidden", [False, True], ids=["each party tells", "the total tells"])
def test_nobody_fails_for_the_size_of_its_numbers(
    hidden: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise every round would tell a bit of every client, e.g. by halving its exact number of nodes."""
    if not hidden:
        monkeypatch.setattr(
            secure,
            "_masked_words",
            lambda party, leaves, order, context, rows: party.mask(
                [*leaves, 0], order.roster, order.tag, context=context
            ),
        )
    server = started(tmp_path, weighting="nodes")
    large = {client: data.num_nodes >= 15 for client, data in server.parts.items()}
    assert len(set(large.values())) == 2
    assert told_apart(server) == (dict.fromkeys(large, False) if hidden else large)


def test_the_total_tells_that_somebody_could_not_take_part(tmp_path: Path) -> None:
    server = started(tmp_path, weighting="nodes")
    weights = {name: tensor * 0.0 + 2.0**21 for name, tensor in first_weights(server).items()}
    calls = server.calls("local_update", TRAIN, dict.fromkeys(server.parts, Broadcast(weights, 14.5)))
    with pytest.raises(RunError, match="1 of the 4 parties of a secure sum hold numbers that are too large"):
        server.total(calls)


# -- mask graphs -------------------------------------------------------------------------------------


def test_a_mask_graph_thinner_than_the_number_of_parties_asks_for_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that may say how many neighbours there are leaves a victim with colluding ones only."""
    server = HostileServer(tmp_path, hostile_settings())
    server.engine.commit(0)
    calls = server.calls("size", SETUP, dict.fromkeys(server.keys))
    assert calls[0].mask is not None
    thin = MaskOrder(SumRoster(server.keys, 1), calls[0].mask.tag)
    with pytest.raises(Refused):
        server.total([replace(call, mask=thin.seen_by(call.party)) for call in calls])
    assert any("wrong number of neighbours" in line for line in caplog.messages)
    server.without_contracts()
    total = server.total([replace(call, mask=thin.seen_by(call.party)) for call in calls])
    assert total.samples > 0, "without contracts they would mask with whomever they are told to"
