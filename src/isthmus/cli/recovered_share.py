"""What audited attacks recover from a method's messages, as a share of what there was to recover, by adversary.

An attack that reads n of m things beyond what guessing gives recovers (n - chance) / (m - chance) of them. Shares of
different attacks are of different things (classes, layer inputs, rows, records), so the largest of an adversary is
named with its attack.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from isthmus.cli.recover import Recovered, recover
from isthmus.errors import IsthmusError
from isthmus.experiments.batch import Job, run_job
from isthmus.experiments.config import Settings
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.variants import AUTO, NONE, with_variant
from isthmus.federation.audit import LABELS, MEMBERSHIP, NEIGHBOURS, RANK_ONE, READING, SHARES, SUPPORT, judge
from isthmus.federation.script import EVALUATION
from isthmus.federation.transcript import FOLDER

RECOVERED = "recovered.json"
ADVERSARIES = ("server", "client", "holder of a model")
"""Who looks at what it received: the server, another client (or organisation), whoever is given a final model."""
MEASURABLE = (RANK_ONE, LABELS, NEIGHBOURS, SUPPORT, SHARES)
"""Attacks of which the ledger says whether a party's messages allow them."""
TOLD = ("feature", "identifier", "label statistic")
"""Kinds of content that say something of the data as they are."""


@dataclass(frozen=True)
class Leak:
    """One attack by one adversary, and the share it recovered; None where the attack says no share."""

    adversary: str
    attack: str
    on: str
    outcome: str
    share: float | None


@dataclass(frozen=True)
class Audited:
    """What the attacks recovered from a method's runs.

    Args:
        unmeasured: By adversary the attacks that its messages allow, by the ledger, and that no program here measured.
        clear: By adversary the kinds of content it is sent in the clear, where reading is enough.
        failed: Why there is nothing to tell.
    """

    leaks: tuple[Leak, ...]
    unmeasured: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    clear: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    failed: str = ""

    def worst(self, adversary: str | None = None) -> Leak | None:
        """The largest share of an adversary, or of all."""
        known = [leak for leak in self.leaks if leak.share is not None and adversary in (None, leak.adversary)]
        return max(known, key=lambda leak: leak.share or 0.0, default=None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def share_of(numbers: Mapping[str, float]) -> float | None:
    """The share of what there was that an attack recovered beyond chance; None where its numbers say none."""
    chance = numbers.get("by_chance", 0.0)
    if "advantage" in numbers:
        return max(0.0, numbers["advantage"] - numbers.get("untrained_advantage", 0.0))
    if "precision_at_most" in numbers:
        return numbers["precision_at_most"]
    of = numbers.get("of", numbers.get("claimed", 0.0))
    for key in ("exact", "correct", "read", "plausible", "determined", "opened", "certain"):
        if key in numbers:
            return max(0.0, (numbers[key] - chance) / (of - chance)) if of > chance else 0.0
    return None


def adversary_of(who: str) -> str:
    """The adversary behind the name that an attack gives it."""
    return {"server": "server", "whoever holds the model": "holder of a model"}.get(who, "client")


def audit_method(settings: Settings, variant: str | None, trained: Path | None, folder: Path, rounds: int) -> Audited:
    """Repeat the first rounds of a run with a transcript, run the attacks on it, and membership on the trained models.

    Args:
        variant: The variant that the run itself chose.
        trained: Folder of the finished run with its models.
        folder: Of the short run; its transcript is deleted once the attacks are done.
        rounds: How many.
    """
    kept = folder / RECOVERED
    if not kept.exists():
        try:
            found = _on_messages(settings, variant, folder, rounds)
            found += [each for each in (recover(RunFolder(trained)) if trained else []) if each.attack == MEMBERSHIP]
        except IsthmusError as error:
            return Audited((), failed=str(error))
        kept.write_text(json.dumps([each.to_json() for each in found], indent=1) + "\n")
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
    leaks = tuple(_leaks(json.loads(kept.read_text())))
    return Audited(leaks, *_by_ledger(RunFolder(folder), leaks))


def _on_messages(settings: Settings, variant: str | None, folder: Path, rounds: int) -> list[Recovered]:
    if settings.run.variant == AUTO and variant not in (None, AUTO, NONE):
        settings = with_variant(settings, variant)
    short = replace(
        settings.run, transcript=True, execution="each", rounds=min(rounds, settings.run.rounds), eval_every=rounds
    )
    outcome = run_job(Job(replace(settings, run=short), folder))
    if outcome.result is None:
        raise IsthmusError(outcome.reason)
    return [each for each in recover(RunFolder(folder)) if each.attack not in (MEMBERSHIP, "none")]


def _by_ledger(
    folder: RunFolder, leaks: Sequence[Leak]
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """What the ledger says beyond the attacks that were run: attacks that apply, and content in the clear."""
    unmeasured: dict[str, tuple[str, ...]] = {}
    clear: dict[str, tuple[str, ...]] = {}
    entries = [entry for entry in folder.ledger() if entry.phase != EVALUATION]
    ran = {(leak.adversary, leak.attack) for leak in leaks}
    for finding in judge(entries):
        for who in finding.who.split(", "):
            adversary = adversary_of("client" if who == "device" else who)
            if finding.attack == READING and finding.verdict == "possible":
                kinds = tuple(kind for kind in sorted(TOLD) if kind in finding.on.partition("(")[2])
                clear[adversary] = tuple(dict.fromkeys((*clear.get(adversary, ()), *kinds)))
            elif (
                finding.verdict in ("possible", "limited")
                and finding.attack in MEASURABLE
                and (adversary, finding.attack) not in ran
            ):
                unmeasured[adversary] = tuple(dict.fromkeys((*unmeasured.get(adversary, ()), finding.attack)))
    if not any(leak.attack == MEMBERSHIP for leak in leaks):
        unmeasured["holder of a model"] = (MEMBERSHIP,)
    return unmeasured, {adversary: kinds for adversary, kinds in clear.items() if kinds}


def _leaks(found: Sequence[Mapping[str, Any]]) -> list[Leak]:
    return [
        Leak(adversary_of(each["who"]), each["attack"], each["on"], each["outcome"], share_of(each["numbers"]))
        for each in found
    ]
