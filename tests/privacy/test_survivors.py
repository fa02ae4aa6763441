"""Sums over those who are left: right whoever is lost and whenever; one more loses the sum and nothing else; what the
server can gather, whatever it tells whom, is never one party's numbers.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from lossy_sums import STEPS, lossy_sum, named
from scipy.stats import hypergeom

from isthmus.errors import ProtocolError, RunError
from isthmus.privacy import shamir
from isthmus.privacy.field import P61
from isthmus.privacy.flatten import FRACTION_BITS, Leaf, decode_leaves, template_of_leaves
from isthmus.privacy.guard import RosterGuard, Row, _with_row
from isthmus.privacy.mask_graph import (
    COLLUDING,
    LEAST_READ,
    SECURITY_BITS,
    Sharing,
    choices_for,
    least_left,
    log2_closed,
    sharing_for,
)
from isthmus.privacy.masks import SumParty, SumRoster, SumTag
from isthmus.privacy.prg import add_streams
from isthmus.privacy.survivors import SurvivorServer, _code, confirm, meet, release, share_secrets

TAG = SumTag("run", "train", round=3, sequence=1, handler="local_update")
TEMPLATE = template_of_leaves([1, 0.5])


def _values(names: Sequence[str]) -> dict[str, list[Leaf]]:
    return {name: [10**k % 10**9 + k, 0.25 * k] for k, name in enumerate(names)}


def _check(server: SurvivorServer, words: np.ndarray, values: Mapping[str, list[Leaf]]) -> None:
    total = decode_leaves(words, TEMPLATE, parties=len(server.roster), fraction_bits=FRACTION_BITS)
    assert total[0] == sum(values[name][0] for name in server.survivors)
    assert abs(total[1] - sum(values[name][1] for name in server.survivors)) < 1e-9


# -- whoever is lost, whenever ---------------------------------------------------------------------


@pytest.mark.parametrize("count", (4, 5))
def test_as_many_as_allowed_lost_in_any_step(count: int) -> None:
    """Every choice of who is lost in which step, as long as enough are left to the end."""
    least = least_left(count)
    for group in itertools.combinations(range(count), count - least):
        for steps in itertools.product(STEPS, repeat=len(group)):
            parties, roster = named(count, least)
            names = sorted(parties)
            lost: dict[str, set[str]] = {}
            for member, step in zip(group, steps, strict=True):
                lost.setdefault(step, set()).add(names[member])
            values = _values(names)
            server, words = lossy_sum(parties, roster, TAG, values, lost)
            early = {names[m] for m, step in zip(group, steps, strict=True) if step in ("share", "mask")}
            assert set(server.survivors) == set(names) - early
            _check(server, words, values)


@pytest.mark.parametrize("step", STEPS)
def test_three_of_ten_lost_in_one_step(step: str) -> None:
    parties, roster = named(10, 7)
    values = _values(sorted(parties))
    server, words = lossy_sum(parties, roster, TAG, values, {step: sorted(parties)[2:5]})
    _check(server, words, values)


@pytest.mark.parametrize("step", STEPS)
def test_one_more_loses_the_sum(step: str) -> None:
    parties, roster = named(10, 7)
    with pytest.raises((RunError, ProtocolError), match=r"are left, 7 are needed|too few for this sum|7 must"):
        lossy_sum(parties, roster, TAG, _values(sorted(parties)), {step: sorted(parties)[:4]})


def test_losses_in_different_steps_with_few_holders() -> None:
    """A sparse graph, and fewer holders than parties."""
    count, least = 80, 76
    parties, roster = named(count, least, choices_for(count, least))
    assert len(roster.holders("client-0000")) == 29
    names, values = sorted(parties), _values(sorted(parties))
    lost = {"share": names[:1], "mask": names[10:11], "confirm": names[20:21], "release": names[30:31]}
    server, words = lossy_sum(parties, roster, TAG, values, lost)
    assert len(server.survivors) == 78
    _check(server, words, values)


def test_a_vector_that_comes_too_late_stays_hidden() -> None:
    """A party declared lost sends after all: the server has opened its pair masks, its own mask hides it."""
    parties, roster = named(5, 4)
    names, values = sorted(parties), _values(sorted(parties))
    server, _ = lossy_sum(parties, roster, TAG, values, {"mask": names[:1]})
    meet(parties[names[0]], TAG, server.present)
    late = parties[names[0]].mask(values[names[0]], roster, TAG)
    opened = server._opened(names[0], server._recovered(names[0]))
    left = late.copy()
    add_streams(
        left, [key for other, key in opened.items() if other < names[0]], [k for o, k in opened.items() if o > names[0]]
    )
    assert decode_leaves(left[:-2], TEMPLATE, parties=5)[0] != values[names[0]][0]
    add_streams(left, [], [parties[names[0]].open[TAG.encoded].self_mask])  # with it, it would be plain to see
    assert decode_leaves(left[:-2], TEMPLATE, parties=5)[0] == values[names[0]][0]


# -- what a server can gather ----------------------------------------------------------------------


def _computable(known: list[dict[str, int]]) -> list[dict[str, int]]:
    """Combinations of numbers alone (keys that begin with ``x``) that follow from equations over numbers and masks:
    masks are eliminated first, modulo a prime; what is left is reduced, so a number that can be computed is a row.
    """
    rows, found = [dict(row) for row in known], dict[str, Row]()
    while rows:
        row = {key: value % P61 for key, value in rows.pop().items() if value % P61}
        mask = next((key for key in sorted(row) if not key.startswith("x")), None)
        if mask is None:
            found = _with_row(found, row)
            continue
        inverse = pow(row[mask], -1, P61)
        for k, other in enumerate(rows):
            if other.get(mask):
                factor = other[mask] * inverse % P61
                keys = other.keys() | row.keys()
                rows[k] = {key: (other.get(key, 0) - factor * row.get(key, 0)) % P61 for key in keys}
    return list(found.values())


def _knowledge(
    names: Sequence[str], bad: set[str], masked_with: Mapping[str, Sequence[str]], opened: set[str], bared: set[str]
) -> list[dict[str, int]]:
    """Equations a server has: every vector it got, the masks it could take away, and all that the bad ones know."""
    rows: list[dict[str, int]] = []
    for name, present in masked_with.items():
        row = {f"x{name}": 1, f"own{name}": 1}
        for other in present:
            if other != name:
                low, high = sorted((name, other))
                row[f"pair{low}{high}"] = 1 if other == high else -1
        rows.append(row)
    rows += [{f"own{name}": 1} for name in {*bared, *bad}]
    rows += [{f"x{name}": 1} for name in bad]
    for low, high in itertools.combinations(sorted(names), 2):
        if {low, high} & (opened | bad):
            rows.append({f"pair{low}{high}": 1})
    return rows


@pytest.mark.parametrize("count", (4, 5))
def test_no_single_value_whatever_the_server_tells_whom(count: int) -> None:
    """Every way to tell each honest party its own group, with one party working for the server, which confirms
    everything and hands over all its shares. Of four parties each is told by itself who is present, who is left, or
    nothing any more. Which secrets come together is what the protocol's own code gives out; what follows from them is
    linear algebra over a prime field.
    """
    least = least_left(count)
    parties, roster = named(count, least)
    names = sorted(parties)
    traitor, honest = names[-1], names[:-1]
    groups = [set(g) for size in range(least, count + 1) for g in itertools.combinations(names, size)]
    told = [[group for group in groups if name in group] for name in honest]
    opened_somewhere = 0
    for number, story in enumerate(_stories(told)):
        presents, survivors = zip(*story, strict=True)
        tag = replace(TAG, sequence=number + 1)
        for party in parties.values():
            party.guard = RosterGuard()
        secrets = {name: share_secrets(parties[name], roster, tag) for name in names}
        boxes = {v: {u: secrets[u].boxes[v] for u in names if u != v} for v in names}
        codes: dict[str, dict[str, bytes]] = {}
        for k, name in enumerate(honest):
            meet(parties[name], tag, presents[k])
            parties[name].mask([1], roster, tag)
            codes[name] = confirm(parties[name], tag, survivors[k]) if survivors[k] else {}
        got: Counter[tuple[str, int]] = Counter()
        for k, name in enumerate(honest):
            if not codes[name]:
                continue
            its = {other: codes[other][name] for other in honest if other != name and name in codes[other]}
            its[traitor] = _traitors_code(parties[traitor], tag, name, presents[k], survivors[k])
            right = {
                other: code for other, code in its.items() if other == traitor or story[honest.index(other)] == story[k]
            }
            try:
                shares = release(parties[name], tag, right, boxes[name])
            except ProtocolError:
                continue
            got.update((owner, which) for owner, (which, _) in shares.items())
        for owner in names:  # the traitor holds a share of both secrets of everybody
            got[owner, 0] += 1
            got[owner, 1] += 1
        enough = {place for place, shares in got.items() if shares >= roster.sharing.threshold}
        bared, opened = {u for u, which in enough if which == 0}, {u for u, which in enough if which == 1}
        assert not bared & opened
        masked_with = {name: sorted(presents[k]) for k, name in enumerate(honest)}
        found = _computable(_knowledge(names, {traitor}, masked_with, opened, bared))
        sums = [{key for key in row if key != f"x{traitor}"} for row in found]
        assert all(len(row) != 1 for row in sums), (presents, survivors, sums)
        assert all(len(row) >= least - 1 for row in sums if row)
        opened_somewhere += any(sums)
    assert opened_somewhere  # the server does learn totals: the search is no search of nothing


Story = Sequence[tuple[set[str], set[str]]]
"""By honest party, who is said to be present and who to be left; the second empty where it is told no more."""


def _stories(told: Sequence[Sequence[set[str]]]) -> Iterator[Story]:
    """Of four parties, everything; of five, all groups for what is left, and who is present the same for all, or all
    that is left.
    """
    if len(told) < 4:
        options = [
            [(present, left) for present in its for left in [*(group for group in its if group <= present), set()]]
            for its in told
        ]
        yield from itertools.product(*options)
        return
    everybody = set().union(*itertools.chain(*told))
    for survivors in itertools.product(*told):
        yield [(everybody, left) for left in survivors]
        yield [(left, left) for left in survivors]


def _traitors_code(traitor: SumParty, tag: SumTag, name: str, present: set[str], survivors: set[str]) -> bytes:
    """A traitor confirms to each what it was told."""
    known = traitor.open[tag.encoded]
    known.present, known.survivors = tuple(sorted(present)), tuple(sorted(survivors))
    return _code(traitor, known, tag, traitor.name, name)


def test_fewer_shares_than_the_threshold_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All polynomials over a field of seven numbers: two shares of three needed have the same distribution whatever
    the secret; three determine it.
    """
    monkeypatch.setattr(shamir, "PRIME", 7)
    shamir._factors.cache_clear()
    seen = []
    for secret in range(7):
        pairs = Counter(
            (shamir.evaluate([secret, a, b], 1), shamir.evaluate([secret, a, b], 4)) for a in range(7) for b in range(7)
        )
        seen.append(pairs)
        for a, b in itertools.product(range(7), repeat=2):
            shares = {point: shamir.evaluate([secret, a, b], point) for point in (1, 4, 6)}
            assert shamir.recover(shares, 3) == secret
    assert all(pairs == seen[0] for pairs in seen) and len(seen[0]) == 49
    shamir._factors.cache_clear()


@pytest.mark.parametrize(("count", "least"), [(10, 9), (50, 45), (200, 180), (500, 450)])
def test_coalition_at_the_stated_rate_holds_too_few_shares(count: int, least: int) -> None:
    """A fifth of the parties work with the server: of nobody do they hold a secret, and even if every honest holder
    gave the share that helps them more, of nobody could both secrets be put together. Whoever is said to be present and
    left, a party whose own mask is opened has masked with an honest party that opened it.
    """
    names = [f"client-{i}" for i in range(count)]
    rng = np.random.default_rng(count)
    roster = SumRoster({name: rng.bytes(32) for name in names}, choices_for(count, least), (), least)
    bad = set(rng.choice(names, int(np.ceil(COLLUDING * count)), replace=False).tolist())
    threshold = roster.sharing.threshold
    for name in set(names) - bad:
        holders = roster.holders(name)
        assert len(holders & bad) < threshold
        assert len(holders) + len(holders & bad) < 2 * threshold
        assert holders - {name} <= set(roster.neighbours(name))
        if roster.chosen:  # with all as holders one group wins: the search above
            assert 2 * threshold - len(holders) - len(bad & holders) > 1


def test_the_neighbours_of_a_party_cannot_be_said_to_be_lost() -> None:
    """Masks with the lost are opened. Where masks were thin and shares with everybody, a server read one of 150 parties
    by saying that its 34 neighbours were lost; 45 were allowed to be.
    """
    names = [f"client-{i:04d}" for i in range(500)]
    with pytest.raises(ProtocolError, match="mask with those that hold their shares"):
        SumRoster({name: bytes([k]) * 32 for k, name in enumerate(names[:150])}, 25, (), 105)
    assert choices_for(150, 105) == 0
    party = SumParty(names[0])
    keys = {name: np.random.default_rng(k).bytes(32) for k, name in enumerate(names)} | {names[0]: party.public_key}
    roster = SumRoster(keys, choices_for(500, 450), (), 450).seen_by(names[0])
    share_secrets(party, roster, TAG)
    holders = sorted(roster.holders(names[0]) - {names[0]})
    without = set(names) - set(holders[:50])
    with pytest.raises(ProtocolError, match=r"71 of those that hold its shares are present, 90 must be"):
        meet(party, TAG, without)
    others = [name for name in names[1:] if name not in holders]
    meet(party, TAG, set(names) - {*holders[:30], *others[:20]})


def test_the_bound_on_small_totals_holds_where_graphs_can_be_drawn() -> None:
    """Ten parties, two of them bad, five holders each, of which three must be bad or in the same total."""
    sharing, bad, rng = Sharing(holders=5, threshold=5), {8, 9}, np.random.default_rng(0)
    sets = [set(group) for size in (1, 2) for group in itertools.combinations(range(8), size)]
    found = 0
    for _ in range(1000):
        chosen = [{*rng.choice([k for k in range(10) if k != u], 5, replace=False).tolist()} for u in range(8)]
        found += any(all(len(chosen[u] & (group | bad)) >= 3 for u in group) for group in sets)
    assert 0.5 * 2 ** log2_closed(10, sharing, 2) < found / 1000 < 2 ** log2_closed(10, sharing, 2)


@pytest.mark.parametrize(("count", "least"), [(60, 57), (100, 95), (200, 190), (1000, 900)])
def test_no_more_holders_than_the_bounds_ask_for(count: int, least: int) -> None:
    sharing, honest = sharing_for(count, least), count - math.ceil(COLLUDING * count)
    assert choices_for(count, least) == sharing.holders > 0
    assert log2_closed(count, sharing, int(LEAST_READ * honest)) <= -SECURITY_BITS
    fewer = Sharing(sharing.holders - 10, sharing.threshold - 10)
    gone = [hypergeom(count - 1, count - least, its.holders) for its in (sharing, fewer)]
    left = [float(each.sf(its.holders - its.threshold)) for each, its in zip(gone, (sharing, fewer), strict=True)]
    assert left[0] * count <= 2.0**-20
    assert log2_closed(count, fewer, honest // 4) > -SECURITY_BITS or left[1] * count > 2.0**-20


def test_without_the_rule_of_one_group_a_value_comes_out() -> None:
    """The attack that the rule stops: parties that confirmed two groups of one sum give both secrets away."""
    parties, roster = named(4, 3)
    names, values = sorted(parties), _values(sorted(parties))
    server, _ = lossy_sum(parties, roster, TAG, values, {})
    for party in parties.values():
        with pytest.raises(ProtocolError, match="it confirms one only"):
            confirm(party, TAG, names[:3] if party.name in names[:3] else names[1:])
    for name in names[1:]:  # what a party without the rule would do
        known = parties[name].open[TAG.encoded]
        known.survivors = ()
        parties[name].guard = RosterGuard()
        confirm(parties[name], TAG, names[1:])
    second = {
        name: release(
            parties[name],
            TAG,
            {o: _own_code(parties[o], name) for o in names[1:] if o != name},
            server.boxes_for(name),
        )
        for name in names[1:]
    }
    secret = shamir.recover({roster.points[name]: shares[names[0]][1] for name, shares in second.items()}, 3)
    assert server._opened(names[0], secret)  # the masks of the first party, whose own mask the first sum opened


def _own_code(party: SumParty, to: str) -> bytes:
    return _code(party, party.open[TAG.encoded], TAG, party.name, to)


# -- again -----------------------------------------------------------------------------------------


def test_secrets_and_masks_are_never_used_twice() -> None:
    parties, roster = named(4, 3)
    values = _values(sorted(parties))
    lossy_sum(parties, roster, TAG, values, {})
    party = parties["client-0000"]
    with pytest.raises(ProtocolError, match="already shared secrets"):
        share_secrets(party, roster, TAG)
    with pytest.raises(ProtocolError, match="already masked"):
        party.mask(values["client-0000"], roster, TAG)
    again = replace(TAG, attempt=1)
    before = party.open[TAG.encoded].self_mask
    share_secrets(party, roster, again)
    assert party.open[again.encoded].self_mask != before


def test_replay_over_a_group_that_differs_by_one_is_refused() -> None:
    """The same numbers over all and over all but one are that one's: parties do not confirm the second group."""
    parties, roster = named(5, 4)
    values = _values(sorted(parties))
    lossy_sum(parties, roster, TAG, values, {})
    with pytest.raises(ProtocolError, match="would reveal their part"):
        lossy_sum(parties, roster, replace(TAG, attempt=1), values, {"mask": ["client-0004"]})
    server, words = lossy_sum(parties, roster, replace(TAG, attempt=2), values, {"release": ["client-0004"]})
    _check(server, words, values)


def test_groups_of_a_series_change_as_often_as_the_guard_allows() -> None:
    guard = RosterGuard(changes=1)
    everybody = ["a", "b", "c", "d", "e"]
    guard.admit("train/1/h/server", everybody, "train/h", changing=True)
    guard.admit("train/2/h/server", everybody[:4], "train/h", changing=True)
    guard.admit("train/3/h/server", everybody[:4], "train/h", changing=True)
    with pytest.raises(ProtocolError, match="has changed 1 times"):
        guard.admit("train/4/h/server", everybody, "train/h", changing=True)


# -- bad input -------------------------------------------------------------------------------------


def test_rosters_too_small_for_the_threshold() -> None:
    with pytest.raises(ProtocolError, match="cannot do with 2: it needs at least 3"):
        named(3, 2)
    with pytest.raises(ProtocolError, match="cannot do with 6: it needs at least 7"):
        named(10, 6)
    with pytest.raises(ProtocolError, match="cannot do with 6"):
        named(5, 6)


def test_two_parties_with_one_key() -> None:
    key = SumParty("a").public_key
    others = {name: SumParty(name).public_key for name in "cd"}
    with pytest.raises(ProtocolError, match="the same session key"):
        SumRoster({"a": key, "b": key, **others}, 0, (), 3)


def test_shares_of_another_run_or_sum() -> None:
    parties, roster = named(4, 3)
    names = sorted(parties)
    values = _values(names)
    elsewhere, keys = named(4, 3)
    server, foreign = SurvivorServer(roster, TAG), SurvivorServer(keys, TAG)
    earlier = SurvivorServer(roster, replace(TAG, attempt=-1))
    for name in names:
        earlier.take_secrets(name, share_secrets(parties[name], roster, earlier.tag))
        server.take_secrets(name, share_secrets(parties[name], roster, TAG))
        foreign.take_secrets(name, share_secrets(elsewhere[name], keys, TAG))
    for name in names:
        meet(parties[name], TAG, names)
        server.add(name, parties[name].mask(values[name], roster, TAG))
    survivors = server.settle()
    for name in names:
        server.take_codes(name, confirm(parties[name], TAG, survivors))
    for wrong in (foreign, earlier):
        with pytest.raises(ProtocolError, match="not of this run and sum"):
            release(parties[names[0]], TAG, server.codes_for(names[0]), wrong.boxes_for(names[0]))


def test_a_share_sent_twice_with_different_values_and_a_false_one() -> None:
    parties, roster = named(5, 4)
    names = sorted(parties)
    values = _values(names)
    server, _ = lossy_sum(parties, roster, TAG, values, {})
    shares = release(parties[names[0]], TAG, server.codes_for(names[0]), server.boxes_for(names[0]))
    server.take_shares(names[0], shares)  # the same again: a lost answer, asked for a second time
    which, number = shares[names[1]]
    false = {**shares, names[1]: (which, (number + 1) % shamir.PRIME)}
    with pytest.raises(ProtocolError, match="sent its shares twice, with different values"):
        server.take_shares(names[0], false)
    server._shares[names[0]] = false  # one false share of five, four needed: found out and passed over
    _check(server, server.total_words(), values)
    server._shares[names[2]] = {**server._shares[names[2]], names[1]: (0, 5)}  # two of five: no four are right
    with pytest.raises(ProtocolError, match="holders sent false ones"):
        server.total_words()


@pytest.mark.parametrize("liars", itertools.combinations(range(10), 3))
def test_false_shares_of_as_many_as_can_be_spared(liars: Sequence[int]) -> None:
    """Seven of ten are needed: three may lie, whoever they are."""
    parties, roster = named(10, 7)
    names, values = sorted(parties), _values(sorted(parties))
    lying, server = {names[k] for k in liars}, SurvivorServer(roster, TAG)
    for name, party in parties.items():
        server.take_secrets(name, share_secrets(party, roster, TAG))
    for name, party in parties.items():
        meet(party, TAG, names)
        server.add(name, party.mask(values[name], roster, TAG))
    for name, party in parties.items():
        server.take_codes(name, confirm(party, TAG, server.settle()))
    for name, party in parties.items():
        if name in lying:
            server.take_shares(name, {owner: (0, 1 + k) for k, owner in enumerate(names)})
        else:
            server.take_shares(name, release(party, TAG, server.codes_for(name), server.boxes_for(name)))
    _check(server, server.total_words(), values)


def test_what_parties_refuse() -> None:
    parties, roster = named(5, 4)
    names = sorted(parties)
    party = parties[names[0]]
    with pytest.raises(ProtocolError, match="shared no secrets"):
        party.mask([1], roster, TAG)
    with pytest.raises(ProtocolError, match="shared no secrets"):
        confirm(party, TAG, names)
    for name in names:
        share_secrets(parties[name], roster, TAG)
    with pytest.raises(ProtocolError, match="too few for this sum"):
        meet(party, TAG, names[:3])
    with pytest.raises(ProtocolError, match="too few for this sum"):
        meet(party, TAG, [*names, "somebody"])
    meet(party, TAG, names[:4])
    with pytest.raises(ProtocolError, match="with others already"):
        meet(party, TAG, names)
    party.mask([1], roster, TAG)
    with pytest.raises(ProtocolError, match="has confirmed no group"):
        release(party, TAG, {}, {})
    for group in (names[:3], names, names[1:]):
        with pytest.raises(ProtocolError, match="is refused"):
            confirm(party, TAG, group)
    confirm(party, TAG, names[:4])
    with pytest.raises(ProtocolError, match="1 parties confirmed the group"):
        release(party, TAG, {}, {})
    with pytest.raises(ProtocolError, match="confirmed another group"):
        release(party, TAG, {names[1]: b"0" * 16}, {})
