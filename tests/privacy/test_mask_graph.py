"""Sparse mask graphs: the bound on what a coalition can split, who is whose neighbour, and the attack that a thinner
graph allows.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from isthmus.errors import ProtocolError
from isthmus.privacy.flatten import decode_leaves, template_of_leaves
from isthmus.privacy.mask_graph import (
    COLLUDING,
    LEAST_PARTIES,
    SECURITY_BITS,
    choices,
    choices_for,
    log2_disconnected,
    neighbours,
)
from isthmus.privacy.masks import CHECK_WORDS, SumParty, SumRoster, SumServer, SumTag
from isthmus.privacy.prg import Words, add_streams

TAG = SumTag("run", "train", 1, 1)


def keys_of(count: int) -> dict[str, bytes]:
    return {f"client-{i:03d}": secrets.token_bytes(32) for i in range(count)}


def components(graph: Mapping[str, Collection[str]], honest: Collection[str]) -> list[set[str]]:
    """Of the graph of the honest parties: the totals a coalition of all others and the server can read."""
    left, found = set(honest), []
    while left:
        reached, frontier = set(), {min(left)}
        while frontier:
            reached |= frontier
            frontier = {other for party in frontier for other in graph[party] if other in left} - reached
        left -= reached
        found.append(reached)
    return found


def test_the_bound_holds_where_all_graphs_can_be_listed() -> None:
    """Five parties, one of them bad, two choices each: the share of disconnected graphs among all 6^4 choices."""
    names = "abcde"
    options = {name: list(itertools.combinations([n for n in names if n != name], 2)) for name in names[1:]}
    split = total = 0
    for drawn in itertools.product(*options.values()):
        graph: dict[str, set[str]] = {name: set() for name in names}
        for name, chosen in zip(options, drawn, strict=True):
            for other in chosen:
                graph[name].add(other)
                graph[other].add(name)
        split += len(components(graph, names[1:])) > 1
        total += 1
    bound = log2_disconnected(5, 2, 1)
    assert 0 < split / total <= 2**bound < 3 * split / total


@pytest.mark.parametrize(("parties", "chosen", "bad"), [(20, 2, 6), (40, 2, 12), (30, 1, 6)])
def test_graphs_of_drawn_keys_are_split_no_more_often_than_the_bound_says(parties: int, chosen: int, bad: int) -> None:
    names = [f"client-{i:03d}" for i in range(parties)]
    split = sum(len(components(neighbours(keys_of(parties), chosen), names[bad:])) > 1 for _ in range(300)) / 300
    bound = 2 ** log2_disconnected(parties, chosen, bad)
    assert split <= min(1.0, bound) + 3 * math.sqrt(bound / 300)
    assert split > 0.0, "graphs as thin as these are split now and then, or the test says nothing"


def test_the_number_of_neighbours_keeps_the_stated_bound_and_grows_as_log_k() -> None:
    assert all(choices_for(parties) == 0 for parties in range(2, LEAST_PARTIES))
    for parties in (20, 37, 50, 100, 300, 1000, 3000):
        bad, chosen = math.ceil(COLLUDING * parties), choices_for(parties)
        assert log2_disconnected(parties, chosen, bad) <= -SECURITY_BITS < log2_disconnected(parties, chosen - 1, bad)
    assert 2 * choices_for(1000) <= 3.1 * math.log2(1000) and choices_for(3000) - choices_for(100) <= 4


def test_a_choice_is_that_of_a_key_and_of_nobody_else() -> None:
    keys = keys_of(30)
    names, graph = sorted(keys), neighbours(keys, 6)
    first = choices(keys[names[0]], names[0], names, 6)
    assert len(first) == 6 and names[0] not in first
    others = {name: secrets.token_bytes(32) for name in names[1:]}
    changed = neighbours({names[0]: keys[names[0]], **others}, 6)
    assert first <= set(graph[names[0]]) and first <= set(changed[names[0]]), "other keys do not move its choice"
    assert choices(secrets.token_bytes(32), names[0], names, 6) != first
    assert all(name in graph[other] for name in names for other in graph[name])
    assert choices(keys[names[0]], names[0], names, 99) == set(names[1:])


def sums(count: int, chosen: int) -> tuple[dict[str, SumParty], SumRoster, dict[str, torch.Tensor], dict[str, Words]]:
    parties = {f"client-{i:03d}": SumParty(f"client-{i:03d}") for i in range(count)}
    roster = SumRoster({name: party.public_key for name, party in parties.items()}, chosen)
    values = {name: torch.randn(5, dtype=torch.float64) for name in parties}
    sent = {name: party.mask([values[name]], roster.seen_by(name), TAG) for name, party in parties.items()}
    return parties, roster, values, sent


def read_by(colluders: Mapping[str, SumParty], roster: SumRoster, sent: Mapping[str, Words]) -> dict[str, torch.Tensor]:
    """What the server and these parties read of others: totals over the components that their keys leave."""
    honest = roster.members - colluders.keys()
    graph = {name: roster.neighbours(name) for name in roster.parties}
    found = {}
    for group in components(graph, honest):
        total = sum(sent[name].astype(object) for name in sorted(group))
        for name in group:
            for other in graph[name]:
                if other in colluders:  # it knows the mask it shares with `name`, and takes it off
                    alone = SumRoster(
                        {name: roster.keys[name], other: roster.keys[other]}, roster.chosen, roster.parties
                    )
                    total = total - _mask_between(colluders[other], alone, name, sent[name].size)
        words = np.array([int(word) % 2**64 for word in total], np.uint64)[:-CHECK_WORDS]
        [values] = decode_leaves(words, template_of_leaves([torch.zeros(5, dtype=torch.float64)]), parties=len(group))
        found["+".join(sorted(group))] = torch.as_tensor(values)
    return found


def _mask_between(party: SumParty, roster: SumRoster, other: str, size: int) -> NDArray[Any]:
    mask = np.zeros(size, np.uint64)
    key = party.stream_keys([other], roster, TAG, b"")[other]
    add_streams(mask, [key])
    return mask.astype(object) if other < party.name else -mask.astype(object)


def test_a_coalition_of_the_stated_size_reads_one_total_and_a_thinner_graph_gives_parties_away() -> None:
    count = 40
    parties, roster, values, sent = sums(count, choices_for(count))
    colluders = {name: parties[name] for name in sorted(parties)[: math.ceil(COLLUDING * count)]}
    read = read_by(colluders, roster, sent)
    [(group, total)] = read.items()
    assert len(group.split("+")) == count - len(colluders)
    torch.testing.assert_close(total, sum(values[name] for name in group.split("+")), atol=1e-9, rtol=0)

    for _ in range(50):
        parties, roster, values, sent = sums(count, 1)
        read = read_by({name: parties[name] for name in colluders}, roster, sent)
        alone = [group for group in read if "+" not in group]
        if alone:
            break
    torch.testing.assert_close(read[alone[0]], values[alone[0]], atol=1e-9, rtol=0)


def test_a_sparse_sum_is_the_plain_sum_and_a_missing_party_is_named() -> None:
    _, roster, values, sent = sums(25, choices_for(25))
    server = SumServer(roster, TAG)
    for name in roster.parties[:-1]:
        server.add(name, sent[name])
    with pytest.raises(ProtocolError, match="client-024"):
        server.total_words()
    server.add("client-024", sent["client-024"])
    [total] = server.total(template_of_leaves([values["client-000"]]))
    torch.testing.assert_close(torch.as_tensor(total), torch.stack(list(values.values())).sum(0), atol=1e-9, rtol=0)


def test_a_party_checks_its_neighbours() -> None:
    hidden = None
    while hidden is None:  # a neighbour that chose it, and that it did not choose: almost always there is one
        parties = {f"client-{i:03d}": SumParty(f"client-{i:03d}") for i in range(30)}
        roster = SumRoster({name: party.public_key for name, party in parties.items()}, choices_for(30))
        own = roster.seen_by("client-000")
        chosen = choices(own.keys["client-000"], "client-000", own.parties, own.chosen)
        hidden = min((name for name in own.keys if name not in chosen | {"client-000"}), default=None)
    assert set(own.keys) == {"client-000", *roster.neighbours("client-000")} and len(own) == 30

    def asked(keys: Mapping[str, bytes], chosen: int = own.chosen) -> Words:
        return parties["client-000"].mask([1.0], SumRoster(keys, chosen, own.parties), TAG)

    withheld = min(chosen)
    with pytest.raises(ProtocolError, match="no keys of the parties"):
        asked({name: key for name, key in own.keys.items() if name != withheld})
    stranger = min(roster.members - own.keys.keys())
    with pytest.raises(ProtocolError, match=f"{stranger} is no neighbour"):
        asked({**own.keys, stranger: roster.keys[stranger]})
    with pytest.raises(ProtocolError, match="no keys of the parties"):
        asked(own.keys, chosen=0)
    with pytest.raises(ProtocolError, match="others than its parties"):
        asked({**own.keys, "nobody": secrets.token_bytes(32)})
    server = SumServer(roster, TAG)
    for name, party in parties.items():
        if name != "client-000":
            server.add(name, party.mask([1.0], roster.seen_by(name), TAG))
        else:  # the neighbour that chose it is kept from it: nothing is revealed, and nothing can be read
            server.add(name, asked({other: key for other, key in own.keys.items() if other != hidden}))
    with pytest.raises(ProtocolError, match="do not cancel"):
        server.total_words()
