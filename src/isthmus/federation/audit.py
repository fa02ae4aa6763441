"""Which attacks of `isthmus.privacy.attacks` apply to what each party saw, judged from a run's ledger.

The ledger says who was sent which kinds of things under which protection, and by how many at once; it holds no content.
So this says what is *possible* for a party that looks at what it received, and what only an attack on the messages
themselves could tell (``not tried``). ``stopped`` is the outcome of an attack that was run and failed: of the attacks
here that is the one on rosters, which are on the ledger; all others are run by `isthmus.cli.recover`. Parties are
curious: they follow the protocol and look at all they receive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from isthmus.federation.ledger import Entry
from isthmus.federation.messages import SERVER, Kind, PartyId, role_of
from isthmus.privacy.attacks.sums import difference_of_sums

Verdict = Literal["possible", "limited", "not tried", "stopped"]
READING = "plain reading"
RANK_ONE = "inputs from a layer's gradient"
LABELS = "labels from output gradients"
MEMBERSHIP = "membership by loss"
DIFFERENCE = "difference of sums"
REUSE = "mask used twice"
IMPERSONATION = "impersonating the other parties of a sum"
NEIGHBOURS = "neighbour lists from products"
SUPPORT = "entries from announced positions"
SHARES = "opening shares"
SOLVING = "single rows from sums over neighbours"
MATCHING = "labels by matching structure features"
ATTACKS = (READING, RANK_ONE, LABELS, MEMBERSHIP, DIFFERENCE, REUSE, IMPERSONATION, NEIGHBOURS, SUPPORT, SHARES)
"""All that are judged."""

_OF_SECURE_SUMS = ("SumKey", "SumKeys", "MailPlan", "MailOrders")
_PLAIN = (Kind.COUNT, Kind.METRIC, Kind.LABEL_STATISTIC, Kind.IDENTIFIER, Kind.FEATURE)

_DUMMIES = (
    "positions of sparse mail are announced among dummies; whether they can be told apart depends on where entries can "
    "be"
)
_UNSIGNED = (
    "keys of a simulation are not signed: a malicious server could hand out its own; one that keeps to the "
    "protocol reads no part"
)
_OPENING = "shares open only for who gets all of them or knows common masks, which the ledger cannot tell"
_TWO = "in a sum over two parties each knows its own part, and so the other's once it receives the total"
_ONCE = "a mask belongs to one run, round, attempt, call and receiver; parties refuse to use it twice"


@dataclass(frozen=True)
class Finding:
    """One attack, who could run it, on what, and how it ends."""

    attack: str
    who: str
    on: str
    verdict: Verdict
    why: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Training:
    """What of a run's settings decides how much an update tells; not known = the worst is assumed."""

    optimizer: str = "sgd"
    local_epochs: int = 1
    noise: float = 0.0
    epsilon: float | None = None


@dataclass(frozen=True)
class Flow:
    """Messages of one type from one role to another under one protection."""

    sender: str
    receiver: str
    message: str
    protection: str
    kinds: frozenset[str]
    parties: int
    """Fewest senders a receiver had at once: of a masked sum, how many hide behind its total."""

    @property
    def on(self) -> str:
        return f"{self.message} ({', '.join(sorted(self.kinds))})"

    @property
    def readable(self) -> bool:
        return self.protection != "masked"

    @property
    def how(self) -> str:
        """Why one party's message can or cannot be read."""
        return {
            "clear": f"each {self.sender}'s message is sent in the clear",
            "summed": (
                f"sent unmasked: the {self.receiver}'s program adds up, but whoever runs it can read each "
                f"{self.sender}'s message"
            ),
            "sealed": f"sealed in transit, but the {self.receiver} it is for opens each message",
            "masked": f"masked: meant to show only totals of {self.parties} or more",
        }[self.protection]


def flows(entries: Iterable[Entry]) -> list[Flow]:
    """What the entries of a ledger have in common."""
    found: dict[tuple[str, str, str, str], tuple[frozenset[str], int]] = {}
    for entry in entries:
        sender, receiver = entry.roles
        key = sender, receiver, entry.message, entry.protection
        counts = [len(senders) for senders in _writers(entry).values()]
        kinds, fewest = found.get(key, (frozenset[str](), 2**62))
        found[key] = kinds | frozenset(entry.kinds.values()), min([fewest, *counts])
    return [Flow(*key, kinds, parties) for key, (kinds, parties) in found.items()]


def judge(entries: Sequence[Entry], training: Training | None = None, beside: Sequence[Entry] = ()) -> list[Finding]:
    """All findings of a run, in the order of :data:`ATTACKS`; an attack without one found nothing of its kind.

    Args:
        beside: Entries of other runs of the same parties, whose totals an attacker has too.
    """
    training = training or Training()
    findings: list[Finding] = []
    for flow in flows(entries):
        if flow.message not in _OF_SECURE_SUMS:
            findings += _of_content(flow, training)
        elif flow.message == "MailPlan" and any(
            entry.message == "MailPlan" and entry.by_kind.get(Kind.STRUCTURE) for entry in entries
        ):
            findings.append(Finding(SUPPORT, flow.receiver, flow.on, "limited", _DUMMIES))
        elif flow.message == "SumKey":
            findings.append(Finding(IMPERSONATION, flow.receiver, flow.on, "limited", _UNSIGNED))
    findings += _membership(entries, training)
    findings += _sums(entries, beside)
    return sorted(findings, key=lambda finding: ATTACKS.index(finding.attack))


def _of_content(flow: Flow, training: Training) -> list[Finding]:
    if flow.sender == SERVER:
        return []  # what the server makes of everybody's messages: see membership
    found = []
    who, on, masked = flow.receiver, flow.on, not flow.readable
    plain = sorted(kind for kind in flow.kinds if kind in _PLAIN)
    if plain:
        why = flow.how if masked else f"{flow.how}; for {', '.join(plain)} reading is enough"
        found.append(Finding(READING, who, on, "not tried" if masked else "possible", why))
    if Kind.GRADIENT in flow.kinds:
        found.append(
            _gradient(RANK_ONE, flow, training, "exact for a layer with a bias and one training record, else a mixture")
        )
        found.append(
            _gradient(
                LABELS, flow, training, "signs of the output layer's gradient name the classes a client trains on"
            )
        )
    if Kind.MODEL in flow.kinds:
        found += _update(flow, training)
    if Kind.EMBEDDING in flow.kinds:
        why = flow.how if masked else f"{flow.how}; rows that are gradients of the output give each node's label away"
        found.append(Finding(LABELS, who, on, "not tried" if masked else "possible", why))
    if Kind.STRUCTURE in flow.kinds:
        why = flow.how if masked else f"{flow.how}; a node with a single foreign neighbour reads that neighbour's list"
        found.append(Finding(NEIGHBOURS, who, on, "not tried" if masked else "possible", why))
    if Kind.SHARE in flow.kinds and not masked:
        found.append(Finding(SHARES, who, on, "limited", f"{flow.how}; {_OPENING}"))
    return found


def _gradient(attack: str, flow: Flow, training: Training, reach: str) -> Finding:
    if not flow.readable:
        return Finding(attack, flow.receiver, flow.on, "not tried", flow.how)
    if training.noise:
        return Finding(
            attack, flow.receiver, flow.on, "limited", f"{flow.how}, but clipped and noisy ({_worth(training)})"
        )
    return Finding(attack, flow.receiver, flow.on, "possible", f"{flow.how}; {reach}")


def _update(flow: Flow, training: Training) -> list[Finding]:
    """A client's trained weights: with those it started from, the direction of its training."""
    if not flow.readable or training.noise:
        return [_gradient(attack, flow, training, "") for attack in (RANK_ONE, LABELS)]
    if training.optimizer == "sgd" and training.local_epochs == 1:
        inputs, verdict = "after one SGD step an update is a gradient times lr", "possible"
    else:
        steps = "Adam rescales it" if training.optimizer != "sgd" else f"{training.local_epochs} steps mix"
        inputs, verdict = f"an update is not quite a gradient here ({steps})", "limited"
    labels = "classes a client trains on move the output layer's bias up"
    return [
        Finding(attack, flow.receiver, flow.on, verdict, f"{flow.how}; {why}")  # type: ignore[arg-type]
        for attack, why in ((RANK_ONE, inputs), (LABELS, labels))
    ]


def _membership(entries: Sequence[Entry], training: Training) -> list[Finding]:
    """Whoever is given a common model can try records on it; so can the server that forms it."""
    models = {
        entry.message: entry for entry in entries if Kind.MODEL in entry.kinds.values() and entry.roles[0] == SERVER
    }
    if not models:
        return []
    who = ", ".join(sorted({SERVER, *(entry.roles[1] for entry in models.values())}))
    on = ", ".join(sorted(models))
    if training.noise:
        return [Finding(MEMBERSHIP, who, on, "limited", f"the model was trained with noise ({_worth(training)})")]
    why = (
        "the common model has small losses on records it was trained on; masks do not change that, noise does "
        "(dp_clip, dp_noise)"
    )
    return [Finding(MEMBERSHIP, who, on, "possible", why)]


def _sums(entries: Sequence[Entry], beside: Sequence[Entry]) -> list[Finding]:
    """Rosters of secure sums of the same values, and whether linear algebra gets a single party out of their totals."""
    rosters: dict[tuple[str, int, str, PartyId], set[frozenset[PartyId]]] = {}
    for entry in entries:
        if entry.protection == "masked":
            for receiver, senders in _writers(entry).items():
                rosters.setdefault((entry.phase, entry.round, entry.handler, receiver), set()).add(frozenset(senders))
    if not rosters:
        return []
    over_rounds: dict[tuple[str, str, PartyId], set[frozenset[PartyId]]] = {}
    for (phase, _, handler, receiver), group in rosters.items():
        over_rounds.setdefault((phase, handler, receiver), set()).update(group)
    for entry in beside:
        if entry.protection == "masked":
            for receiver, senders in _writers(entry).items():
                over_rounds.setdefault((entry.phase, entry.handler, receiver), set()).add(frozenset(senders))
    exposed, averaged = _single_parties(rosters.values()), _single_parties(over_rounds.values())
    parties = frozenset[PartyId]().union(*(roster for group in rosters.values() for roster in group))
    receivers = ", ".join(sorted({role_of(receiver) for *_, receiver in rosters}))
    fewest = min(len(roster) for group in rosters.values() for roster in group)
    seen = f"{len(rosters)} secure sums over {fewest} or more parties"
    if exposed:
        difference = Finding(
            DIFFERENCE,
            receivers,
            seen,
            "possible",
            f"totals of one round give the part of {', '.join(sorted(exposed))}",
        )
    elif averaged:
        difference = Finding(
            DIFFERENCE,
            receivers,
            seen,
            "possible",
            "rosters change from round to round, or from run to run, so least squares gives the mean part of "
            f"{len(averaged)} parties",
        )
    elif fewest == 2:
        difference = Finding(DIFFERENCE, "either party", seen, "possible", _TWO)
    else:
        difference = Finding(
            DIFFERENCE,
            receivers,
            seen,
            "stopped",
            f"linear algebra on totals over {len(set().union(*over_rounds.values()))} different rosters, of one round "
            f"and of all rounds and runs given, gives 0 of {len(parties)} parties' parts",
        )
    return [difference, Finding(REUSE, receivers, seen, "not tried", _ONCE)]


def _single_parties(rosters: Iterable[set[frozenset[PartyId]]]) -> set[PartyId]:
    """Parties whose part linear algebra gets out of totals over these rosters."""
    return {
        party for group in rosters for party in difference_of_sums([(sorted(roster), np.zeros(1)) for roster in group])
    }


def _writers(entry: Entry) -> Mapping[PartyId, set[PartyId]]:
    """Senders by receiver; one address on a side stands for all messages."""
    count = len(entry.bytes)
    senders = entry.sender * count if len(entry.sender) == 1 else entry.sender
    receivers = entry.receiver * count if len(entry.receiver) == 1 else entry.receiver
    writers: dict[PartyId, set[PartyId]] = {}
    for sender, receiver in zip(senders, receivers, strict=True):
        writers.setdefault(receiver, set()).add(sender)
    return writers


def _worth(training: Training) -> str:
    return "no finite epsilon" if training.epsilon is None else f"epsilon {training.epsilon:.3g} per client"
