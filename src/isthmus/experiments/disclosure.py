"""The disclosure sheet of a run before it starts: it follows from the script of the method, the preparation of tables,
and what settings of the run add to them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from isthmus.errors import ConfigError
from isthmus.experiments.config import Settings
from isthmus.experiments.contract import full_script, link_of_settings
from isthmus.federation.interface import View
from isthmus.federation.ledger import Disclosure
from isthmus.federation.messages import SERVER
from isthmus.federation.roles import RoleTable
from isthmus.federation.script import disclosures, lines_of
from isthmus.federation.secure import (
    KEYS_PHASE,
    ConfirmedGroup,
    MailOrders,
    MailPlan,
    ReleasedShares,
    SharedSecrets,
    SumKey,
    SumKeys,
    SumStepRequest,
)
from isthmus.methods.registry import Method
from isthmus.preparation.rounds import TABLES
from isthmus.preparation.script import preparation_script

ANY_VIEW = View(("client-0", "client-1", "client-2"), num_features=1, num_classes=2)
"""For a sheet before any data are known."""


def sheet_of_settings(settings: Settings) -> tuple[Disclosure, ...]:
    """The sheet of a run with these settings, the preparation of tables included."""
    run = settings.run
    link = link_of_settings(settings)
    before = () if link is None else disclosures(preparation_script(link, len(ANY_VIEW.clients)), TABLES[link])
    return sheet_of(
        settings.method,
        metric=run.metric,
        secure_sum=run.secure_sum,
        config=settings.method_config,
        before=before,
        clients=run.clients,
        lossy=bool(run.least_clients and run.least_clients != run.clients),
    )


def sheet_of(
    method: Method,
    *,
    metric: str = "accuracy",
    secure_sum: bool = False,
    config: Any = None,
    view: View = ANY_VIEW,
    before: tuple[Disclosure, ...] = (),
    clients: int | None = None,
    lossy: bool = False,
) -> tuple[Disclosure, ...]:
    """All lines of a run's sheet. Scores beyond accuracy need counts by class; secure sums mask what is summed, scores
    included, and need keys, and mail that is summed needs to know who else writes.

    ``config``: the method's config; None = the default. ``before``: lines of what happens before the first round.
    ``clients``: how many; a histogram of their scores is formed of enough of them. ``lossy``: sums are over those who
    are left.
    """
    config = method.config() if config is None else config
    method, secure = method.configured(config), secure_sum and not method.pooled
    if clients is not None:
        view = replace(view, clients=tuple(f"client-{number}" for number in range(clients)))
    if secure and method.needs_single_updates:
        raise ConfigError(f"{method.name} needs to see single clients' messages, so secure_sum cannot protect it")
    script = full_script(method, config, view, metric=metric, secure=secure)
    lines = (*before, *disclosures(script, method.table))
    if not secure:
        return lines
    lossy_phases = {phase for phase, each in lines_of(script) if each.survivors}
    keys: list[Disclosure] = []
    masked: list[Disclosure] = []
    for line in lines:
        if line.protection != "summed":
            masked.append(line)
            continue
        role, phase = line.sender, line.phase
        keys += [Disclosure(KEYS_PHASE, role, SERVER, SumKey), Disclosure(KEYS_PHASE, SERVER, role, SumKeys)]
        if _is_mail(method.table, line):
            masked += [Disclosure(phase, role, SERVER, MailPlan), Disclosure(phase, SERVER, role, MailOrders)]
        if lossy and phase in lossy_phases and line.receiver == SERVER:
            masked += [Disclosure(phase, SERVER, role, SumStepRequest)]
            masked += [Disclosure(phase, role, SERVER, m) for m in (SharedSecrets, ConfirmedGroup, ReleasedShares)]
        masked.append(replace(line, protection="masked"))
    return tuple(dict.fromkeys([*keys, *masked]))


def _is_mail(table: RoleTable, line: Disclosure) -> bool:
    """Whether a message is sent by ``exchange``: only then do senders say in advance whom they write to."""
    handlers = table.handlers[line.sender].values()
    return any(signature.sends and signature.reply is line.message for signature in handlers)
