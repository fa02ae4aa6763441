"""A malicious server that treats sites differently, so that of an honest masked total only the victim's part is
unknown: other settings, other requests before the sum, other positions of a sparse matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_server import RUN, HostileServer, hostile_settings
from torch import Tensor

from isthmus.deploy.handshake import BEGIN, KEYS, BeginRun, JoinReply, PeerKeys
from isthmus.deploy.site_host import SiteHost
from isthmus.errors import ProtocolError
from isthmus.experiments.config import Settings
from isthmus.experiments.result import versions
from isthmus.federation import codec, secure
from isthmus.federation.host import Answer
from isthmus.federation.messages import Message, Model
from isthmus.federation.party import Turn
from isthmus.federation.secure import Masked, MaskOrder, mask_reply, unmask
from isthmus.federation.watch import Watch
from isthmus.federation.wire import pack, unpack
from isthmus.methods.fedavg import Broadcast
from isthmus.methods.training import Deployed
from isthmus.privacy.masks import SumParty, SumRoster, SumTag
from isthmus.tensors import Weights

VICTIM, OTHERS = "client-0", ("client-1", "client-2", "client-3")
EVERYBODY = (VICTIM, *OTHERS)
SETUP, TRAIN = Turn(0, "setup", 1, 1), Turn(0, "train", 1, 2)


# -- other settings --------------------------------------------------------------------------------


class DividedServer(HostileServer):
    """Begins one run with settings of its own at every site."""

    idle: Settings
    refused: Mapping[str, Answer]

    def begin(self) -> None:
        self.attempt += 1
        joined = {}
        for site in self.transport.sites:
            own = self.settings if site == "bank-0" else self.idle
            begin = pack((codec.encode(BeginRun(RUN, b"0" * 16, 0, own.to_toml(), versions())),))
            joined[site] = codec.decode(unpack(self.transport.runtimes[site].handle(RUN, BEGIN, begin))[0], JoinReply)
            assert not joined[site].error
        keys = {party: pair for one in joined.values() for party, pair in (one.keys or {}).items()}
        self.keys = {party: pair.sums for party, pair in keys.items()}
        request = pack((codec.encode(PeerKeys(keys)),))
        answers = {site: self.transport.runtimes[site].handle(RUN, KEYS, request) for site in joined}
        self.refused = {site: codec.decode(unpack(answer)[0], Answer) for site, answer in answers.items()}
        places = {site: tuple(one.clients or {}) for site, one in joined.items()}
        self.engine = self.open_engine(places)


def divided(folder: Path) -> DividedServer:
    """With lr = 1e-30 at all others, their updates are the weights they were sent."""
    DividedServer.idle = hostile_settings(lr=1e-30, weighting="uniform")
    return DividedServer(folder, hostile_settings(weighting="uniform"), "[policy]\n")


def victims_step(server: HostileServer) -> float:
    """How far the weights that the server computes for the victim are from the true ones."""
    server.engine.commit(0)
    server.total(server.calls("size", SETUP, dict.fromkeys(EVERYBODY)))
    party: Any = server.party(VICTIM).client
    before, first = party.state, party.state.weights
    request = Broadcast(first, 4.0)
    party.enter(TRAIN.phase, TRAIN.round, 1)
    truth, party.state = party.local_update(request), before
    total = server.total(server.calls("local_update", TRAIN, dict.fromkeys(EVERYBODY, request)))
    found = {name: tensor - 0.75 * first[name] for name, tensor in total.weights.items()}
    return max(float((found[name] - tensor).abs().max()) for name, tensor in truth.weights.items())


def test_keys_for_any_contract_give_the_victim_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What keys are signed for decides: the name of the run alone is the same for all."""
    monkeypatch.setattr(SiteHost, "_purpose", lambda host, what: f"{host._run.partition('/')[0]}/{what}")
    server = divided(tmp_path)
    assert not any(answer.error for answer in server.refused.values())
    assert victims_step(server) < 1e-6


def test_sites_that_joined_under_other_settings_accept_no_keys_of_each_other(tmp_path: Path) -> None:
    answers = divided(tmp_path).refused
    assert {site: answer.error for site, answer in answers.items()} == dict.fromkeys(answers, "ProtocolError")
    assert "client-1 did not sign this key" in answers["bank-0"].text
    assert "joined another run or contract" in answers["bank-0"].text


# -- other requests before the sum ------------------------------------------------------------------


def constant(server: HostileServer, favoured: int) -> Weights:
    """A model that always says one class."""
    known: Weights = server.party(VICTIM).client.state.weights
    made = {name: tensor * 0.0 for name, tensor in known.items()}
    made[list(made)[-1]][favoured] = 100.0
    return made


def send(server: HostileServer, handler: str, turn: Turn, sequence: int, requests: Mapping[str, Any]) -> None:
    """Ask every party truthfully for what it is asked; the masks of such a sum do not cancel, and nobody minds."""
    for party, request in requests.items():
        (call,) = server.calls(handler, turn, {party: request}, roster=EVERYBODY, sequence=sequence)
        assert isinstance(server.ask([call])[party], Masked)


def victims_classes(server: HostileServer) -> list[int]:
    """Counts by class: all models always say class 0, then the victim's says class 1."""
    found = []
    for round, mine in ((1, 0), (2, 1)):
        turn = Turn(0, "evaluation", round, round + 1)
        models = {party: Deployed(constant(server, mine if party == VICTIM else 0)) for party in EVERYBODY}
        send(server, "deploy", turn, 1, models)
        total = server.total(server.calls("detail", turn, dict.fromkeys(EVERYBODY), sequence=2))
        found.append(total.confusion["test"] + total.confusion["val"])
    moved: list[int] = (found[1] - found[0])[:, 1].tolist()
    return moved


def evaluated(folder: Path) -> HostileServer:
    server = HostileServer(folder, hostile_settings(metric="macro_f1"), "[policy]\n")
    server.engine.commit(0)
    server.total(server.calls("size", SETUP, dict.fromkeys(EVERYBODY)))
    server.engine.commit(1)
    return server


def test_masks_of_one_request_alone_give_the_victims_classes_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watch, "asked_so_far", lambda *_: b"")
    server = evaluated(tmp_path)
    data = server.parts[VICTIM]
    truth = data.y[data.test | data.val].bincount(minlength=3).tolist()
    assert victims_classes(server) == truth and sum(truth) > 0


def test_parties_that_were_told_different_things_have_no_total_in_common(tmp_path: Path) -> None:
    server = evaluated(tmp_path)
    with pytest.raises(ProtocolError, match="masks do not cancel"):
        victims_classes(server)


def test_a_party_that_was_left_out_of_a_call_has_no_total_in_common_with_the_others(tmp_path: Path) -> None:
    """Nothing follows from an evaluation in FedAvg, but a watch does not know that."""
    server = evaluated(tmp_path)
    turn = Turn(0, "evaluation", 1, 2)
    send(server, "deploy", turn, 1, dict.fromkeys(OTHERS, Deployed(constant(server, 0))))
    with pytest.raises(ProtocolError, match="masks do not cancel"):
        server.total(server.calls("detail", turn, dict.fromkeys(EVERYBODY), sequence=2))


# -- other positions -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows(Message):
    values: Model[Tensor]


def alone(supports: Mapping[str, Tensor]) -> Tensor:
    """The total of everybody's row over the positions each was given; read over those of the victim."""
    parties = {name: SumParty(name) for name in EVERYBODY}
    roster = SumRoster({name: party.public_key for name, party in parties.items()})
    orders = {name: MaskOrder(roster, SumTag("s", "powers", 1, 1, "give"), (supports[name],)) for name in parties}
    row = torch.tensor([[0.0, 0.0, 1.5, 0.0]]).to_sparse_csr()
    masked = {name: mask_reply(parties[name], Rows(row), orders[name]) for name in parties}
    found: Any = unmask(masked, orders[VICTIM], Rows)
    total: Tensor = found.values.to_dense()
    return total


def test_positions_that_differ_give_no_total(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over other positions the entries of the others stand elsewhere in the vector, and the victim's alone."""
    same = dict.fromkeys(EVERYBODY, torch.tensor([0, 2]))
    other = same | {VICTIM: torch.tensor([2, 3])}
    assert alone(same)[0, 2] == 6.0
    with pytest.raises(ProtocolError, match="masks do not cancel"):
        alone(other)
    monkeypatch.setattr(secure, "_bytes_of", lambda supports: [])
    assert alone(other)[0, 2] == 1.5
