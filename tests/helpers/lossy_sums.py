"""A whole secure sum that may lose parties, at one place, step by step."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from isthmus.privacy.flatten import Leaf
from isthmus.privacy.masks import SumParty, SumRoster, SumTag, Words
from isthmus.privacy.survivors import SurvivorServer, confirm, meet, release, share_secrets

STEPS = ("share", "mask", "confirm", "release")
Lost = Mapping[str, Collection[str]]
"""By step, who is lost before it."""


def named(count: int, at_least: int, chosen: int = 0) -> tuple[dict[str, SumParty], SumRoster]:
    """Parties and their roster."""
    parties = {name: SumParty(name) for name in (f"client-{i:04d}" for i in range(count))}
    return parties, SumRoster({name: party.public_key for name, party in parties.items()}, chosen, (), at_least)


def lossy_sum(
    parties: Mapping[str, SumParty], roster: SumRoster, tag: SumTag, values: Mapping[str, list[Leaf]], lost: Lost
) -> tuple[SurvivorServer, Words]:
    """The words of the total over the survivors; parties that are lost before a step do nothing from there on."""
    server, gone = SurvivorServer(roster, tag), set[str]()

    def left(step: str, group: Collection[str]) -> list[str]:
        gone.update(lost.get(step, ()))
        return [name for name in sorted(group) if name not in gone]

    for name in left("share", parties):
        server.take_secrets(name, share_secrets(parties[name], roster.seen_by(name), tag))
    present = server.present
    for name in left("mask", present):
        meet(parties[name], tag, present)
        server.add(name, parties[name].mask(values[name], roster.seen_by(name), tag))
    survivors = server.settle()
    for name in left("confirm", survivors):
        server.take_codes(name, confirm(parties[name], tag, survivors))
    for name in left("release", survivors):
        server.take_shares(name, release(parties[name], tag, server.codes_for(name), server.boxes_for(name)))
    return server, server.total_words()
