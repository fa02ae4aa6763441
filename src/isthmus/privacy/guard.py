"""Which sums a party takes part in: two totals whose rosters differ by one client are that client's value.

The guard keeps, per content, the rosters it has admitted, and refuses one from which, together with those, some party's
own value could be computed. *Content* names what is summed, e.g. ``train/3/local_update``: the same values give the
same content, whatever the attempt.

Rounds differ in content, but not by much: updates of a client in thirty rounds have a mean, and least squares over
thirty totals of changing groups gives it, with the client's exact size beside it. So a *series*, what one handler gives
over all rounds, has one roster for a whole run (`fixed_groups` where it is not everybody).

The guard knows only the sums it is asked about (a party: those it takes part in; the session: all) and nothing of
parties that pool what they know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from isthmus.errors import ConfigError, ProtocolError
from isthmus.privacy.field import P61

LEAST_IN_SUM = 3
"""Parties of which a total should be: of two, either knows the other's part."""

Row = dict[str, int]


def fixed_groups(clients: Iterable[str], count: int) -> tuple[tuple[str, ...], ...]:
    """Clients in ``count`` groups that differ in size by one at most. They depend on nothing but the clients' names, so
    that they are the same in all runs.
    """
    everyone = sorted(clients)
    return tuple(tuple(everyone[first::count]) for first in range(count))


class RosterGuard:
    """Admits or refuses rosters.

    Args:
        minimum: Fewest parties in a sum, and fewest parties by which two rosters of one content may differ.
        changes: How often the group of a series may change where sums are over those who are left; None: no bound.
    """

    def __init__(self, minimum: int = 2, changes: int | None = None) -> None:
        if minimum < 2:
            raise ConfigError(f"a sum of fewer than 2 parties hides nobody, got minimum {minimum}")
        self.minimum, self.changes = minimum, changes
        self._admitted: dict[str, list[frozenset[str]]] = {}
        self._series: dict[str, list[frozenset[str]]] = {}

    def admit(self, content: str, roster: Iterable[str], series: str | None = None, *, changing: bool = False) -> None:
        """Remember a roster for a content, or refuse it. The same roster again is no new knowledge and always
        welcome.

        Args:
            series: What the content is one of, e.g. all rounds of a handler: then the roster must be that of the first.
            changing: Parties of the series may be lost and come back, ``changes`` times. One content has one group
                all the same: two that differ by a party and one that tells the server its own part give the party away.
        """
        parties = frozenset(roster)
        groups = [] if series is None else self._series.get(series, [])
        # The same object, mostly: otherwise every member is looked up.
        changed = bool(groups) and parties is not groups[-1] and parties != groups[-1]
        if changed and changing:
            if self.changes is not None and len(groups) > self.changes:
                raise ProtocolError(
                    f"the group of {series!r} has changed {self.changes} times in this run, and would again: wait for "
                    "the parties of the last sum"
                )
        elif changed:
            names = ", ".join(sorted(parties ^ groups[-1]))
            raise ProtocolError(
                f"sums of {series!r} have one roster for the whole run, and {names} would come or go: totals over "
                "changing groups give single clients away; ask the parties of the first sum"
            )
        earlier = self._admitted.setdefault(content, [])
        if parties in earlier:
            return
        if len(parties) < self.minimum:
            raise ProtocolError(
                f"a secure sum over {len(parties)} parties is refused: at least {self.minimum} must take part"
            )
        for other in earlier:
            if changing or len(parties ^ other) < self.minimum:
                raise ProtocolError(
                    f"two sums of {content!r} whose rosters differ by {', '.join(sorted(parties ^ other))} would "
                    "reveal their part: "
                    "repeat the sum with the roster of the first one"
                )
        if earlier:  # one roster alone reveals nobody, and is what almost every content has
            self._check_together(content, [*earlier, parties])
        earlier.append(parties)
        if series is not None and (changed or not groups):
            self._series.setdefault(series, []).append(parties)

    def _check_together(self, content: str, rosters: Sequence[frozenset[str]]) -> None:
        reduced: dict[str, Row] = {}
        for roster in rosters:
            reduced = _with_row(reduced, dict.fromkeys(roster, 1))
        exposed = sorted(party for row in reduced.values() if len(row) == 1 for party in row)
        if exposed:
            raise ProtocolError(
                f"the sums of {content!r} asked for so far would together reveal the value of {exposed[0]}: "
                "repeat one of the earlier rosters"
            )

    def forget(self, content: str) -> None:
        """Drop what is known of a content whose values can never be asked for again."""
        self._admitted.pop(content, None)


def _with_row(reduced: dict[str, Row], row: Row) -> dict[str, Row]:
    """Reduced row echelon form, by pivot, with one more row. A party's own value can be computed iff its unit vector is
    a row of it.

    Modulo a 61-bit prime instead of in fractions: 0/1 rosters do not come near its multiples.
    """
    for pivot, other in reduced.items():
        row = _minus(row, row.get(pivot, 0), other)
    if not row:
        return reduced
    pivot = min(row)
    scale = pow(row[pivot], -1, P61)
    row = {party: value * scale % P61 for party, value in row.items()}
    return {key: _minus(other, other.get(pivot, 0), row) for key, other in reduced.items()} | {pivot: row}


def _minus(row: Row, factor: int, other: Row) -> Row:
    if not factor:
        return row
    keys = row.keys() | other.keys()
    return {key: value for key in keys if (value := (row.get(key, 0) - factor * other.get(key, 0)) % P61)}
