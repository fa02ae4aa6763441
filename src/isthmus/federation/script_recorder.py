"""The script of a run that was played, as Python for its author to paste.

A start, not a proof: bounds seen on small data are not bounds for all data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from isthmus.federation.contract import Way

Place = tuple[str, str, str]
"""Phase, role, handler."""


@dataclass
class _Verb:
    way: Way
    most: int = 0
    some: bool = False
    each: bool = False
    receivers: list[tuple[str, str]] = field(default_factory=list)
    summed: bool = False


class ScriptRecorder:
    """Takes the place of a :class:`~isthmus.federation.watch.SessionWatch`: admits everything and writes it down."""

    def __init__(self) -> None:
        self._verbs: dict[Place, _Verb] = {}
        self._round: Counter[Place] = Counter()

    def begin(self) -> None:
        self._round.clear()

    def check(
        self, phase: str, role: str, handler: str, way: Way, *, everybody: bool = True, each: bool = False
    ) -> None:
        if way == "receive":
            return
        place = phase, role, handler
        verb = self._verbs.setdefault(place, _Verb(way))
        self._round[place] += 1
        verb.most = max(verb.most, self._round[place])
        verb.some |= not everybody
        verb.each |= each

    def check_pair(self, phase: str, send: tuple[str, str], receivers: Sequence[tuple[str, str]], summed: bool) -> None:
        verb = self._verbs[phase, *send]
        verb.receivers += [each for each in receivers if each not in verb.receivers]
        verb.summed = summed

    def text(self, classes: Mapping[str, str]) -> str:
        """The function to paste; ``classes``: name of the class of each role."""
        phases: dict[str, list[str]] = {}
        for (phase, role, handler), verb in self._verbs.items():
            phases.setdefault(phase, []).append(_line(verb, role, handler, classes))
        body = "".join(
            f'        "{phase}": (\n' + "".join(f"            {line},\n" for line in lines) + "        ),\n"
            for phase, lines in phases.items()
        )
        bounds = "    # Bounds as seen in a small run: write expressions of config and view that hold for all data.\n"
        seen = bounds if any(verb.most > 1 for verb in self._verbs.values()) else ""
        return f"def script(config, view):\n{seen}    return {{\n{body}    }}\n"


def _line(verb: _Verb, role: str, handler: str, classes: Mapping[str, str]) -> str:
    given = [f"{classes[role]}.{handler}", *(f"{classes[other]}.{takes}" for other, takes in verb.receivers)]
    given += [f"most={verb.most}"] if verb.most > 1 else []
    given += [f"{name}=True" for name in ("some", "each", "summed") if getattr(verb, name)]
    given += ["server=True"] if verb.way == "send" and not verb.receivers else []
    return f"{'mail' if verb.way == 'send' else verb.way}({', '.join(given)})"
