"""What a watch remembers, and that it can be rebuilt; the hash of a contract."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from isthmus.data.own_dataset import SITE_TABLES
from isthmus.errors import ConfigError, ProtocolError
from isthmus.experiments.config import resolve
from isthmus.experiments.contract import contract_of
from isthmus.federation.contract import Contract, Line, compiled, in_order
from isthmus.federation.interface import View
from isthmus.federation.party import Invocation, Turn
from isthmus.federation.script import ask, mail, total
from isthmus.federation.secure import MaskOrder
from isthmus.federation.watch import AdmittedCall, MemoryLog, RolledBack, Watch, WatchRules
from isthmus.methods.fedavg import METHOD, FedAvgClient
from isthmus.privacy.mask_graph import choices_for
from isthmus.privacy.masks import SumRoster, SumTag

CLIENTS = tuple(f"client-{number}" for number in range(4))
KEYS = {client: bytes([number]) * 32 for number, client in enumerate(CLIENTS)}
VIEW = View(CLIENTS, num_features=5, num_classes=3)


def contract(**changes: Any) -> Contract:
    """A sum of a part of the clients in each of three rounds."""
    line = Line("train", "client", "size", "total", summed=True, some=True)
    return Contract((replace(line, **changes),), in_order([("train", 3, 1)]), CLIENTS, ("client",), True, "test")


def call(round: int, roster: tuple[str, ...] = CLIENTS, attempt: int = 0) -> Invocation:
    turn = Turn(attempt, "train", round, round)
    order = MaskOrder(
        SumRoster({client: KEYS[client] for client in roster}), SumTag("", "train", round, 1, "size", attempt)
    )
    return Invocation("client-0", "client", "size", turn, 1, mask=order)


def admit(watch: Watch, invocation: Invocation) -> None:
    watch.enter(invocation, watch.check(invocation))


def watch_of(log: MemoryLog, rules: WatchRules | None = None, **changes: Any) -> Watch:
    watch = Watch(contract(**changes), "client-0", "client", full=True, rules=rules, log=log)
    watch.restore(list(log.calls))
    return watch


def test_what_was_admitted_is_remembered_by_another_watch_through_json() -> None:
    log = MemoryLog()
    first = watch_of(log)
    admit(first, call(1, CLIENTS[:3]))
    written = [json.loads(json.dumps(line.to_json())) for line in log.calls]
    again = MemoryLog()
    again.calls = [AdmittedCall.from_json(line) for line in written]
    assert again.calls == log.calls
    second = watch_of(again)
    with pytest.raises(ProtocolError, match="step 1 does not follow from the state of step 0"):
        second.check(call(1, CLIENTS[:3], attempt=1))
    second.rolled_back(0)
    with pytest.raises(ProtocolError, match=r"client-3 would come or go"):
        admit(second, call(1, CLIENTS, attempt=1))
    admit(second, call(1, CLIENTS[:3], attempt=1))
    with pytest.raises(ProtocolError, match="have one roster for the whole run"):
        admit(second, call(2, CLIENTS, attempt=1))


def test_steps_are_not_skipped_after_a_roll_back() -> None:
    """Otherwise a step could be asked for from another state than before, under the same noise."""
    log = MemoryLog()
    watch = watch_of(log)
    for round in (1, 2, 3):
        admit(watch, call(round))
    watch.rolled_back(0)
    with pytest.raises(ProtocolError, match="step 3 does not follow from the state of step 0"):
        watch.check(call(3, attempt=1))
    for round in (1, 2, 3):
        admit(watch, call(round, attempt=1))
    assert len(log.calls) == 6 and not any(line.changed for line in log.calls)


def test_a_call_that_cannot_be_logged_is_not_admitted() -> None:
    class FullDisk(MemoryLog):
        def admitted(self, call: AdmittedCall) -> None:
            raise ProtocolError("the disk is full")

    watch = watch_of(FullDisk())
    with pytest.raises(ProtocolError, match="the disk is full"):
        admit(watch, call(1))
    watch.log = MemoryLog()
    admit(watch, call(1))
    assert [line.count for line in watch.log.calls] == [1], "nothing was remembered of the first"


def test_the_minimum_of_a_sum_is_the_sites_own() -> None:
    watch = watch_of(MemoryLog(), WatchRules(least=4))
    with pytest.raises(ProtocolError, match="over 3 parties; at least 4 must"):
        watch.check(call(1, CLIENTS[:3]))
    admit(watch, call(1))


def test_a_sparse_mask_graph_is_the_right_one() -> None:
    """As many neighbours as the number of parties asks for, and only where the server does not choose the roster."""
    clients = tuple(f"client-{number:02d}" for number in range(24))
    keys = {client: bytes([number]) * 32 for number, client in enumerate(clients)}
    line = Line("train", "client", "size", "total", summed=True)

    def check(chosen: int, roster: tuple[str, ...] = clients, **changes: Any) -> None:
        agreed = Contract((replace(line, **changes),), in_order([("train", 3, 1)]), clients, ("client",), True, "test")
        order = MaskOrder(SumRoster({name: keys[name] for name in roster}, chosen), SumTag("", "train", 1, 1, "size"))
        asked = Invocation(clients[0], "client", "size", Turn(0, "train", 1, 1), 1, mask=order)
        Watch(agreed, clients[0], "client", full=True).check(asked)

    right = choices_for(24)
    check(right)
    check(0)  # more masks than needed
    for wrong in (1, right - 1, right + 1):
        with pytest.raises(ProtocolError, match="wrong number of neighbours"):
            check(wrong)
    check(right, some=True)
    check(0, clients[:22], some=True)
    with pytest.raises(ProtocolError, match="wrong number of neighbours"):
        check(choices_for(22), clients[:22], some=True)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({"train": (ask(FedAvgClient.deploy), total(FedAvgClient.deploy))}, "called in two ways in phase 'train'"),
        ({"train": (mail(FedAvgClient.deploy),)}, "client.deploy sends no mail"),
    ],
)
def test_mistakes_in_a_script(script: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compiled(script, METHOD.table)


def test_a_bound_of_zero_and_an_unknown_phase_are_told() -> None:
    with pytest.raises(ConfigError, match="leave the line out instead"):
        ask(FedAvgClient.deploy, most=0)
    method = replace(METHOD, script=lambda config, view: {"tain": (ask(FedAvgClient.deploy),)})
    with pytest.raises(ConfigError, match="unknown phase in the script of fedavg 'tain': did you mean 'train'"):
        method.script_with(METHOD.config(), VIEW)


# -- the hash --------------------------------------------------------------------------------------

HASH = """
from isthmus.experiments.config import settings_from_toml
from isthmus.experiments.contract import contract_of
from isthmus.federation.interface import View
import sys
print(contract_of(settings_from_toml(sys.stdin.read()), View({clients!r}, num_features=5, num_classes=3)).hash)
"""


def test_the_hash_is_the_same_in_another_process() -> None:
    settings = resolve("hifgl", {"dataset": "csbm", "clients": 4})
    found = subprocess.run(
        [sys.executable, "-c", HASH.format(clients=CLIENTS[::-1])],
        input=settings.to_toml(),
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "7", "PATH": "/usr/bin"},
    )
    assert found.stdout.strip() == contract_of(settings, VIEW).hash


def test_the_hash_differs_with_every_setting_and_with_the_clients() -> None:
    given: list[dict[str, Any]] = [{}, {"rounds": 7}, {"lr": 0.02}, {"secure_sum": True}, {"fraction": 0.5}]
    given += [{"metric": "macro_f1"}, {"eval_every": 2}, {"seed": 1}, {"hidden": 8}, {"precision": "float64"}]
    settings = [resolve("fedavg", {"dataset": "csbm", "clients": 4, **more}) for more in given]
    hashes = [contract_of(each, VIEW).hash for each in settings]
    hashes += [contract_of(settings[0], replace(VIEW, clients=CLIENTS[:3])).hash]
    hashes += [contract_of(resolve("fedprox", {"dataset": "csbm", "clients": 4}), VIEW).hash]
    assert len(set(hashes)) == len(hashes)
    assert contract_of(settings[0], VIEW).hash == hashes[0]


# -- what everybody was asked --------------------------------------------------------------------------


def prepared_watch(*calls: AdmittedCall | RolledBack) -> bytes:
    """What a site's watch over a run of tables knows of the time before."""
    settings = resolve("fedavg", {"dataset": SITE_TABLES, "clients": 4, "secure_sum": True, "engine": "nvflare"})
    watch = Watch(contract_of(settings, VIEW), "client-0", "client", full=True)
    watch.restore(calls)
    return watch.asked_so_far(1, "local_update")


def asked(phase: str, step: int, handler: str, request: str, attempt: int = 0) -> AdmittedCall:
    return AdmittedCall("client-0", phase, 1, step, attempt, 1, handler, 1, request)


def test_sums_are_tied_to_all_that_everybody_was_asked() -> None:
    """A server that told the others another scale has made their features vanish: no total with them."""
    scaled, trained = asked("scaling", 1, "settle", "a"), asked("train", 2, "local_update", "w")
    known = prepared_watch(scaled, trained)
    assert known == prepared_watch(scaled, trained) and len(known) == 32
    different = [
        prepared_watch(replace(scaled, request="b"), trained),
        prepared_watch(trained),
        prepared_watch(scaled, replace(trained, request="v")),
        prepared_watch(scaled, replace(trained, step=3)),
    ]
    assert len({known, *different}) == 5


def test_what_only_some_get_does_not_tie_sums() -> None:
    """The first owner draws the key of links; mail is everybody's own."""
    scaled = asked("scaling", 1, "settle", "a")
    drawn, taken = asked("linking", 2, "share_key", "p"), asked("linking", 2, "take_key", "")
    assert prepared_watch(scaled, drawn, taken) == prepared_watch(scaled)


def test_what_was_undone_does_not_tie_sums() -> None:
    scaled, first = asked("scaling", 1, "settle", "a"), asked("train", 2, "local_update", "w")
    lost, again = asked("train", 3, "local_update", "x"), asked("train", 3, "local_update", "y")
    known = prepared_watch(scaled, first, again)
    assert prepared_watch(scaled, first, lost, RolledBack(2), again) == known, "also under the same attempt"
    assert prepared_watch(scaled, first, lost, replace(again, attempt=1)) == known
    assert prepared_watch(replace(scaled, request="b"), replace(scaled, attempt=1), first, again) == known
    assert prepared_watch(scaled, first, lost, again) != known
