"""The disclosure sheet of a run before it starts: the method's own, and what settings of the run add to it or take from
it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from isthmus.data.own_dataset import kind_of
from isthmus.errors import ConfigError
from isthmus.experiments.config import Settings
from isthmus.federation.ledger import Disclosure
from isthmus.federation.messages import SERVER
from isthmus.federation.secure import KEYS_PHASE, MailOrders, MailPlan, SumKey, SumKeys
from isthmus.methods.evaluation import Detail
from isthmus.methods.registry import Method
from isthmus.metrics.registry import parse_metric
from isthmus.preparation.sheet import preparation_sheet


def sheet_of_settings(settings: Settings) -> tuple[Disclosure, ...]:
    """The sheet of a run with these settings, the preparation of tables included."""
    run = settings.run
    before = preparation_sheet(link=run.link != "none") if kind_of(run.dataset) in ("tables", "site tables") else ()
    return sheet_of(
        settings.method, metric=run.metric, secure_sum=run.secure_sum, config=settings.method_config, before=before
    )


def sheet_of(
    method: Method,
    *,
    metric: str = "accuracy",
    secure_sum: bool = False,
    config: Any = None,
    before: tuple[Disclosure, ...] = (),
) -> tuple[Disclosure, ...]:
    """All lines of a run's sheet. Scores beyond accuracy need counts by class; secure sums mask what is summed and need
    keys, and mail that is summed needs to know who else writes.

    ``config``: the method's config, where its messages depend on it; None = the default. ``before``: lines of what
    happens before the first round.
    """
    lines = [*before, *(method.discloses if config is None else method.discloses_with(config))]
    if parse_metric(metric) is not None:
        lines.append(Disclosure("evaluation", "client", "server", Detail, "summed" if secure_sum else "clear"))
    if not secure_sum:
        return tuple(lines)
    if method.needs_single_updates:
        raise ConfigError(f"{method.name} needs to see single clients' messages, so secure_sum cannot protect it")
    keys: list[Disclosure] = []
    masked: list[Disclosure] = []
    for line in lines:
        if line.protection != "summed":
            masked.append(line)
            continue
        role, phase = line.sender, line.phase
        keys += [Disclosure(KEYS_PHASE, role, SERVER, SumKey), Disclosure(KEYS_PHASE, SERVER, role, SumKeys)]
        if _is_mail(method, line):
            masked += [Disclosure(phase, role, SERVER, MailPlan), Disclosure(phase, SERVER, role, MailOrders)]
        masked.append(replace(line, protection="masked"))
    return tuple(dict.fromkeys([*keys, *masked]))


def _is_mail(method: Method, line: Disclosure) -> bool:
    """Whether a message is sent by ``exchange``: only then do senders say in advance whom they write to."""
    handlers = method.table.handlers[line.sender].values()
    return any(signature.sends and signature.reply is line.message for signature in handlers)
