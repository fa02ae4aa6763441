"""A malicious server against four organisations' real processes, over mutual TLS, with signed keys and strict policies:
every attack is refused by the sites themselves, and each refusal is in their audit chains.

The attacks are in `hostile_calls`; the federation is started once, and one job makes all of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="the engine nvflare is an extra")

from in_process_sites import organisation
from nvflare_helpers import wait_until

from isthmus.deploy.admin_session import AdminSession
from isthmus.deploy.audit_chain import AUDIT, CALL, JOIN, REFUSED, verify
from isthmus.deploy.job_template import RUNS, SITE_SETTINGS, write_job
from isthmus.deploy.loopback import LoopbackFederation
from isthmus.deploy.process_supervisor import ProcessSupervisor
from isthmus.deploy.provisioning import SERVER_KIT

HERE = Path(__file__).parent
SITES = 4
RUN = "hostile"
TAMPERED = """import sys
if any("runner_process" in argument for argument in sys.orig_argv):
    import hostile_calls
    hostile_calls.install()
"""
"""The only change: in the server's job process the rounds of a run are replaced by attacks."""


@dataclass(frozen=True)
class Attacked:
    """What the server was told, and what each organisation wrote down."""

    said: dict[str, dict[str, str]]
    chains: dict[str, list[dict[str, Any]]]

    def lines(self, client: str, run: str, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.chains[client] if line["kind"] == kind and line["run"] == run]

    def admitted(self, client: str, run: str) -> list[str]:
        return [line["handler"] for line in self.lines(client, run, CALL)]


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    folder = tmp_path_factory.mktemp("malicious")
    (folder / "runs" / RUN).mkdir(parents=True)
    (folder / "path").mkdir()
    (folder / "path" / "sitecustomize.py").write_text(TAMPERED)
    own = [organisation(folder, n, folder / "roster.toml", "[policy]\n", clients=SITES) for n in range(SITES)]
    answers = folder / "runs" / RUN / "answers.json"
    made = LoopbackFederation(SITES, folder / "runs", folder / "state")
    try:
        paths = (folder / "path", HERE.parent / "deploy", HERE, os.environ.get("PYTHONPATH", ""))
        tampered = {RUNS: str(made.runs), "PYTHONPATH": os.pathsep.join(map(str, paths))}
        environments = {SERVER_KIT: tampered} | {
            name: {SITE_SETTINGS: str(settings.path)} for name, settings in zip(made.names, own, strict=True)
        }
        for name, environment in environments.items():
            log = folder / f"{name}.txt"
            made.parents[name] = ProcessSupervisor(made.kits[name], environment, log).start()
        with AdminSession(made.coordinator) as admin:
            wait_until(lambda: _connected(admin) == list(made.names))
            job = admin.call("submit_job", str(write_job(folder / "job", [RUN], 0, made.names)))
            wait_until(lambda: answers.exists() or str(admin.call("get_job_status", job)).startswith("FINISHED"))
        assert answers.exists(), (folder / f"{SERVER_KIT}.txt").read_text(errors="replace")[-4000:]
    finally:
        made.close()
    for settings in own:
        verify(settings.state)
    chains = {
        str(settings.client): [json.loads(line) for line in (settings.state / AUDIT).read_text().splitlines()]
        for settings in own
    }
    yield Attacked(json.loads(answers.read_text()), chains)


def _connected(admin: AdminSession) -> list[str]:
    try:
        return admin.sites()
    except Exception:  # the server is not up yet
        return []


VICTIM, OTHERS = ("client-0",), ("client-1", "client-2", "client-3")
ALL = VICTIM + OTHERS
ORDER = "{}: the order to mask for client.local_update is of another"
EVERYBODY = "{}: a sum of client.local_update is over everybody in this run (4 parties), not over"
FOREIGN = "is not in the contract of this run for phase"


@pytest.mark.parametrize(
    ("attack", "refusing", "handler", "line", "updates"),
    [
        (
            "in_the_clear",
            VICTIM,
            "local_update",
            "{}: client.local_update is summed behind masks in this run, and the call has no order to mask",
            0,
        ),
        ("round_999", OTHERS, "local_update", f"{ORDER} round than the call", 1),
        ("without_victim", OTHERS, "local_update", f"{EVERYBODY} 3", 1),
        ("second_begin", OTHERS, "local_update", f"{EVERYBODY} 3", 1),
        ("with_a_colluder", ("client-0", "client-1"), "local_update", f"{EVERYBODY} 2", 0),
        ("others_vanish", OTHERS, "local_update", f"{ORDER} request than the call", 0),
        ("asked_again", ALL, "local_update", "{}: sequence 1 of client.local_update asks for something else now", 1),
        (
            "one_more_call",
            ALL,
            "local_update",
            "{}: sequence 2 of client.local_update is none that a round of 'train' has",
            1,
        ),
        ("detail", ALL, "detail", f"client.detail {FOREIGN} 'evaluation'", 0),
        ("score_of_round_7", ALL, "deploy", "evaluation round 7 at step 8 is not in the schedule of this run", 0),
        ("first_power", ALL, "first_power", f"client.first_power {FOREIGN} 'train'", 0),
        ("gradient_sum", ALL, "gradient_sum", f"device.gradient_sum {FOREIGN} 'train'", 0),
    ],
)
def test_a_call_outside_the_contract(
    attacked: Attacked, attack: str, refusing: tuple[str, ...], handler: str, line: str, updates: int
) -> None:
    """``updates``: honest totals of updates before it; after it there are no more at those who refuse."""
    said = {party.partition("/")[0]: answer for party, answer in attacked.said[attack].items()}
    # In "others vanish" the victim cannot know what others were asked; its mask is not cancelled by anything.
    assert {party for party, answer in said.items() if answer == "answered"} == set(said) - set(refusing)
    assert all(said[party] == "refused (protocol)" for party in refusing)
    for client in refusing:
        (refused,) = attacked.lines(client, attack, REFUSED)
        assert refused["handler"] == handler and refused["text"] == line.format(client)
        assert attacked.admitted(client, attack).count("local_update") == updates
        assert handler == "local_update" or handler not in attacked.admitted(client, attack)


def test_an_honest_call_of_the_same_server_is_answered(attacked: Attacked) -> None:
    """Otherwise sites that answer nothing at all would pass."""
    for client in ALL:
        assert attacked.admitted(client, "without_victim") == ["size", "local_update"]
        assert attacked.lines(client, "without_victim", JOIN)


def test_a_handler_of_the_plain_protocol_does_not_exist_in_a_hardened_run(attacked: Attacked) -> None:
    said = attacked.said["send_plain"]
    assert said == {f"{client}/devices": "refused (protocol)" for client in ALL}
    assert not any(attacked.admitted(client, "send_plain") for client in ALL)


@pytest.mark.parametrize(
    ("run", "why"),
    [
        ("no_masks", "fedavg sums Size without masks, which secure_sum = true forbids"),
        ("plain_hifgl", "hifgl shows others PlainRows (embedding) of single clients, which hidden_from_others forbids"),
        ("many_rounds", "fedavg has 1000000 rounds, more than rounds = 1000 allows"),
    ],
)
def test_a_run_that_a_strict_policy_does_not_enter(attacked: Attacked, run: str, why: str) -> None:
    assert attacked.said[run] == {f"site-{number}": "ConfigError" for number in range(1, SITES + 1)}
    for client in ALL:
        (refused,) = attacked.lines(client, run, REFUSED)
        assert why in refused["text"]
        assert not attacked.lines(client, run, JOIN) and not attacked.lines(client, run, CALL)
