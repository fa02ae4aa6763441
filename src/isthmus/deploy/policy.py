"""The policy of an organisation, ``[policy]`` of its ``client.toml``: which contracts it enters at all.

Checked by the site itself when a run begins, before any of its data is handed to anything, from the contract it derived
(`isthmus.federation.contract`); and by ``isthmus submit`` from the offers, so that a refusal costs no job. It speaks of
kinds of content, not of names of methods: one line refuses every method that shows such content, also one that is
installed later. ``docs/policy.md`` explains every key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from isthmus.deploy.audit_chain import AuditChain, run_key
from isthmus.errors import ConfigError, unknown
from isthmus.experiments.config import Settings
from isthmus.experiments.config_values import coerce, flat, keys_of, plain
from isthmus.federation.contract import Contract, Line
from isthmus.federation.ledger import Protection
from isthmus.federation.messages import SERVER, Kind, Message, kinds_of
from isthmus.federation.script import EVALUATION
from isthmus.privacy.guard import fixed_groups

TABLE = "policy"
_SCORES = frozenset({Kind.METRIC, Kind.LABEL_STATISTIC, Kind.COUNT})
"""Kinds of a message that tells how well a client's model does, and nothing else."""


@dataclass(frozen=True)
class Policy:
    """What an organisation asks of a run. The defaults are those of new kits; a key that is left out has its default.

    Args:
        secure_sum: Sums only behind masks.
        least_in_sum: Fewest parties of a sum; a run with fewer clients is refused.
        fixed_roster: No sums over a draw or over groups of the clients, also fixed ones: two totals of two runs that
            differ by a client give its part.
        hidden_from_server: Kinds of content that never reach the server in the clear from one client.
        hidden_from_others: The same towards other clients and devices.
        scores: ``together``: the server sees scores of all clients added up; ``each``: those of this client.
        methods: The only methods; none = any.
        rounds: Most rounds of a phase of one run.
        runs: Most runs, ever.
        epsilon, delta: Budget of all runs together: what the method's statement of privacy promises a client, as the
            site computes it from its own settings, is spent when a run is joined. A run without such a promise is
            refused.
        shared_noise: A promise counts too that rests on the noise of other clients (``dp_noise_in=total``).
        changes: How often in a run a call that is repeated may ask for something else than the first time.
        approve: A person must have approved the contract (``isthmus client approve``).
        survivors: How often in a run the group of a sum may change because clients are lost or come back; 0: sums are
            over everybody, and a run that goes on with fewer is refused.
        max_ids: Largest set of edges that is compared with a partner's.
    """

    secure_sum: bool = True
    least_in_sum: int = 3
    fixed_roster: bool = True
    hidden_from_server: tuple[str, ...] = ("model", "gradient", "embedding", "feature", "label statistic")
    hidden_from_others: tuple[str, ...] = ("embedding", "feature", "label statistic")
    scores: Literal["together", "each"] = "together"
    methods: tuple[str, ...] = ()
    rounds: int | None = 1000
    runs: int | None = None
    epsilon: float | None = None
    delta: float | None = None
    shared_noise: bool = False
    changes: int = 3
    approve: bool = False
    survivors: int = 0
    max_ids: int | None = field(default=None, metadata={"key": "link.max_ids"})

    def __post_init__(self) -> None:
        for name, low in (
            ("least_in_sum", 2),
            ("rounds", 1),
            ("runs", 0),
            ("changes", 0),
            ("survivors", 0),
            ("max_ids", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{_key(name)} in [policy] must be at least {low}, got {value}")
        for name in ("hidden_from_server", "hidden_from_others"):
            for kind in getattr(self, name):
                if kind not in set(Kind):
                    raise unknown(f"kind of content in {name} of [policy]", kind, Kind)
        if self.epsilon is not None and self.epsilon <= 0.0:
            raise ConfigError(f"epsilon in [policy] must be above 0, got {self.epsilon}: leave it out for no budget")
        if self.delta is not None and not 0.0 < self.delta < 1.0:
            raise ConfigError(f"delta in [policy] must lie between 0 and 1, got {self.delta}")
        if self.delta is not None and self.epsilon is None:
            raise ConfigError("delta in [policy] counts only beside epsilon: add epsilon, or leave delta out")

    @classmethod
    def read(cls, raw: object, file: str) -> Policy:
        """From the table ``[policy]`` of a file; an error names an unknown key or a wrong type."""
        if not isinstance(raw, dict):
            raise ConfigError(f"policy in {file} must be a table: [policy] and below it e.g. secure_sum = true")
        known: dict[str, tuple[str, Any]] = keys_of(Policy)
        given: dict[str, Any] = {}
        for key, value in flat(raw).items():
            if key not in known:
                raise unknown(f"key in [policy] of {file}", key, known)
            name, hint = known[key]
            given[name] = coerce(value, hint, f"{key} in [policy] of {file}")
        return cls(**given)

    def to_table(self) -> dict[str, Any]:
        """Every key as TOML holds it; :meth:`read` gives the same policy."""
        return plain(self)

    # -- what a run shows --------------------------------------------------------------------------

    def check(self, settings: Settings, contract: Contract, file: str = "client.toml") -> None:
        """Raise unless the organisation enters such a contract; the error names everything it refuses, by key."""
        found = list(dict.fromkeys(self.refusals(settings, contract)))
        if found:
            raise ConfigError(f"{'; '.join(found)} ([policy] of {file})")

    def refusals(self, settings: Settings, contract: Contract) -> Iterator[str]:
        """Why a contract is refused: phase, method, message, kind and key; nothing if it is not."""
        method = settings.run.method
        if self.methods and method not in self.methods:
            yield f"method {method!r} is not allowed by methods = {_quoted(self.methods)}"
        longest = max(settings.rounds_of(phase) for phase in settings.method.phases)
        if self.rounds is not None and longest > self.rounds:
            yield f"{method} has {longest} rounds, more than rounds = {self.rounds} allows"
        if contract.at_least:
            yield from self._refused_absence(contract)
        for line in contract.lines:
            for shown in _shown(line, secure=contract.secure):
                yield from self._refused(f"{line.phase}: {method}", line, shown, len(contract.clients))

    def _refused_absence(self, contract: Contract) -> Iterator[str]:
        goes_on = f"goes on with {contract.at_least} of {len(contract.clients)} clients"
        if not self.survivors:
            yield f"the run {goes_on}, which survivors = 0 forbids"
        if contract.at_least < self.least_in_sum:
            yield f"the run {goes_on}, least_in_sum = {self.least_in_sum} asks for more"
        if self.epsilon is not None:
            yield f"the run {goes_on}, and a client that comes back may release more than epsilon counts"

    def _refused(self, who: str, line: Line, shown: Shown, clients: int) -> Iterator[str]:
        name = shown.message.__name__
        if shown.protection != "clear":
            yield from self._refused_sum(who, line, shown, clients)
        # Devices tell their own silo their scores; a client that tells others is not exempt.
        scored = line.phase == EVALUATION and set(shown.kinds) <= _SCORES
        if scored and (shown.to == SERVER or line.role != "client"):
            if self.scores == "together" and shown.to == SERVER and shown.protection == "clear":
                yield (
                    f"{who} shows the server {name} ({', '.join(shown.kinds)}) of single clients, which "
                    f'scores = "together" forbids{_with_secure_sums(line)}'
                )
            return
        key = "hidden_from_server" if shown.to == SERVER else "hidden_from_others"
        hidden = [kind for kind in shown.kinds if kind in getattr(self, key)]
        if hidden and shown.protection != "masked":
            whom = "the server" if shown.to == SERVER else "others"
            hint = _with_secure_sums(line) if shown.protection == "summed" else ""
            yield f"{who} shows {whom} {name} ({', '.join(hidden)}) of single clients, which {key} forbids{hint}"

    def _refused_sum(self, who: str, line: Line, shown: Shown, clients: int) -> Iterator[str]:
        name = shown.message.__name__
        if self.secure_sum and shown.protection != "masked":
            yield f"{who} sums {name} without masks, which secure_sum = true forbids: set secure_sum = true in the run"
        elif self.secure_sum and line.each:
            yield (
                f"{who} sums {name} of clients that are asked different things, which secure_sum = true forbids: who "
                "changes what one of them is asked reads the difference"
            )
        # Nobody writes to itself behind masks, so a sum of mail has one party less.
        parties, least = (clients, self.least_in_sum) if shown.to == SERVER else (clients - 1, self.least_in_sum - 1)
        if line.groups:
            parties = min(map(len, fixed_groups([str(number) for number in range(parties)], line.groups)))
        if parties < max(2, least):
            over = f"groups of {parties}" if line.groups else f"{clients}"
            yield f"{who} sums {name} over {over} clients, least_in_sum = {self.least_in_sum} asks for more"
        if self.fixed_roster and line.groups:
            yield (
                f"{who} sums {name} over groups of clients, which fixed_roster = true forbids: with the groups of "
                "another run they could give single clients away"
            )
        elif self.fixed_roster and line.some:
            yield f"{who} draws clients whose {name} is summed, which fixed_roster = true forbids: let all take part"

    # -- what a run spends -------------------------------------------------------------------------

    def spends(
        self, settings: Settings, stated: Mapping[str, Any] | None, chain: AuditChain, run: str, mark: str
    ) -> tuple[float, float]:
        """Epsilon and delta that joining this run costs now: nothing if it was joined before. Raises where the budget
        or the number of runs does not allow it.

        Args:
            stated: The method's statement of privacy for these settings; None where it makes none.
        """
        if run_key(run, mark) in chain.runs:
            return 0.0, 0.0
        if self.runs is not None and len(chain.runs) >= self.runs:
            raise ConfigError(f"this site has taken part in {len(chain.runs)} runs, runs = {self.runs} in [policy]")
        epsilon, delta = _promised(stated)
        if self.epsilon is None:
            return (epsilon if math.isfinite(epsilon) else 0.0), delta
        method, budget = settings.run.method, f"epsilon = {self.epsilon:g} in [policy]"
        if not math.isfinite(epsilon):
            unit = f" for a client (only for a {stated['unit']})" if stated and stated.get("epsilon") else ""
            raise ConfigError(
                f"{method} with these settings promises no differential privacy{unit}, which {budget} asks for: set "
                "e.g. dp_clip and dp_noise in the run"
            )
        if stated is not None and "relies_on" in stated and not self.shared_noise:
            raise ConfigError(
                f"the epsilon of {method} rests on {stated['relies_on']}, which shared_noise = false in [policy] does "
                "not count: set dp_noise_in=update in the run, or shared_noise = true"
            )
        spent, spent_delta = chain.spent
        if spent + epsilon > self.epsilon:
            raise ConfigError(
                f"{method} would spend epsilon {epsilon:.4g} of this site's budget, of which "
                f"{max(0.0, self.epsilon - spent):.4g} is left ({budget}): fewer rounds or more noise spend less"
            )
        if self.delta is not None and spent_delta + delta > self.delta:
            raise ConfigError(
                f"{method} would spend delta {delta:.4g}, of which {max(0.0, self.delta - spent_delta):.4g} is left "
                f"(delta = {self.delta:g} in [policy]): set a smaller dp_delta in the run"
            )
        return epsilon, delta


STRICT = Policy()
NOTHING_ASKED = Policy(
    secure_sum=False,
    least_in_sum=2,
    fixed_roster=False,
    hidden_from_server=(),
    hidden_from_others=(),
    scores="each",
    rounds=None,
)
"""Of a file without ``[policy]``."""


class Shown(NamedTuple):
    """One message that leaves a party of this organisation, and who reads it how."""

    message: type[Message]
    to: str
    protection: Protection

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted({str(kind) for kind in kinds_of(self.message).values()}))


def _shown(line: Line, *, secure: bool) -> Iterator[Shown]:
    """What the reply of a handler shows to whom. Only what is given in a total, or sent as summed mail, is hidden in a
    sum; the reply of a receiver of such mail is not.
    """
    if line.reply is None:
        return
    summed = line.summed and line.way in ("total", "send")
    protection: Protection = ("masked" if secure else "summed") if summed else "clear"
    for role in line.to:
        # What senders of masked mail write to the server are announcements, not this message.
        yield Shown(line.reply, role, protection)


def what_is_shown(contract: Contract) -> list[tuple[Line, Shown]]:
    """Every message that leaves a party under a contract."""
    return [(line, shown) for line in contract.lines for shown in _shown(line, secure=contract.secure)]


def _promised(stated: Mapping[str, Any] | None) -> tuple[float, float]:
    """Epsilon and delta a method promises a client; infinite where it promises nothing of the kind."""
    if stated is None or stated.get("epsilon") is None or stated.get("unit") != "client":
        return math.inf, 0.0
    return float(stated["epsilon"]), float(stated.get("delta") or 0.0)


def _with_secure_sums(line: Line) -> str:
    return ": set secure_sum = true in the run" if line.summed else ""


def _key(name: str) -> str:
    return str(Policy.__dataclass_fields__[name].metadata.get("key", name))


def _quoted(names: Sequence[str]) -> str:
    return f"[{', '.join(repr(name) for name in names)}]"


def limited(policy: Policy, methods: tuple[str, ...], max_ids: int | None) -> Policy:
    """A policy with what older files say elsewhere in ``client.toml``."""
    return replace(
        policy,
        methods=policy.methods or methods,
        max_ids=policy.max_ids if policy.max_ids is not None else max_ids,
    )
