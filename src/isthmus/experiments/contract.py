"""The contract of a run, from its resolved settings: compiled by every site for itself, and by the server."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Mapping
from dataclasses import replace

from isthmus.data.own_dataset import kind_of
from isthmus.errors import ConfigError
from isthmus.experiments.config import Settings
from isthmus.experiments.result import versions
from isthmus.federation.contract import Contract, compiled, in_order
from isthmus.federation.interface import View
from isthmus.federation.script import EVALUATION, PREDICTION, Script, ScriptLine, lines_of, total
from isthmus.methods.averaging import AveragingConfig
from isthmus.methods.evaluation import Detail, Evaluation
from isthmus.methods.registry import Method, score_bins_of
from isthmus.metrics.registry import parse_metric
from isthmus.metrics.score_bins import LEAST_CLIENTS
from isthmus.preparation import Link, link_of
from isthmus.preparation.script import preparation_contract

logger = logging.getLogger(__name__)


def contract_of(settings: Settings, view: View) -> Contract:
    """What the parties of a run with these settings may be asked. ``view``: what a site knows by itself: names of the
    clients, features, classes, task.
    """
    run, method = settings.run, settings.method
    if run.predict is not None:
        script: Script = {PREDICTION: prediction_lines(method, settings.method_config, view)}
        phases = [(PREDICTION, 1, 0)]
    else:
        script = full_script(method, settings.method_config, view, metric=run.metric, secure=settings.secure)
        phases = [
            (phase.name, settings.rounds_of(phase), run.eval_every if phase.rounds is None else 0)
            for phase in method.phases
        ]
    at_least = at_least_of(settings, view, script)
    if isinstance(settings.method_config, AveragingConfig) and run.predict is None:
        settings.method_config.check_sums(secure=settings.secure, parties=at_least or len(view.clients))
    link = link_of_settings(settings)
    scale = run.predict is None  # a prediction scales as its training did
    before = None if link is None else preparation_contract(link, view.clients, secure=settings.secure, scale=scale)
    return Contract(
        lines=(*(before.lines if before else ()), *compiled(script, method.table)),
        schedule=(*(before.schedule if before else ()), *in_order(phases)),
        clients=tuple(sorted(view.clients)),
        roles=tuple(sorted(method.roles)),
        secure=settings.secure,
        method=run.method,
        settings=tomllib.loads(settings.to_toml()),
        versions={package: release(package, number) for package, number in versions().items()},
        at_least=at_least,
    )


def at_least_of(settings: Settings, view: View, script: Script) -> int:
    """Clients with which a round goes on; 0: all are needed. Refused where the method or the sums cannot do with so
    few.
    """
    least, clients, method = settings.run.least_clients, len(view.clients), settings.run.method
    if not least or least == clients or settings.run.predict is not None:
        return 0
    if least > clients:
        raise ConfigError(f"least_clients={least} is more than the {clients} clients: set it lower, or leave it out")
    setup = {phase.name for phase in settings.method.phases if phase.setup}
    for phase, line in lines_of(script):
        if phase not in setup and phase != EVALUATION and not line.survivors:
            why = getattr(settings.method_config, "why_all_clients", str)()
            why = why or f"{line.handler.__name__} is asked of all of them"
            raise ConfigError(
                f"{method} needs every client in every round ({why}): "
                "leave least_clients out, or use fedavg with reset_optimizer=true, fedprox or fedsgd"
            )
        if line.survivors and (line.each or line.some or line.groups):
            raise ConfigError(
                f"script of {method}: {line.handler.__name__} is summed over those who are left, so all must be asked "
                "the same: leave each, some and groups out, or survivors"
            )
        if line.survivors and line.most > 1 and settings.secure:
            raise ConfigError(
                f"{method} sums {line.most} times in a round, behind masks all over one group, so nobody may be lost "
                "in between: set local_epochs=1, or leave least_clients out"
            )
    return least


def prediction_lines(method: Method, config: object, view: View) -> tuple[ScriptLine, ...]:
    """The calls of `Method.predict`; none where clients predict alone."""
    if method.predict is None:
        return ()
    if method.predict_script is None:
        raise ConfigError(
            f"{method.name} does not declare the calls of its prediction: add predict_script= to its Method"
        )
    return method.predict_script(config, view)


def simulated_contract(settings: Settings, view: View) -> Contract | None:
    """The same for a simulation, where a method may come without a script: then nobody checks its calls."""
    if settings.method.script is None:
        logger.warning(
            "%s declares no script, so its calls are not checked, and organisations will refuse it: add script= to its "
            "Method (isthmus methods --script %s prints one)",
            settings.method.name,
            settings.method.name,
        )
        return None
    return contract_of(settings, view)


def full_script(
    method: Method, config: object, view: View, *, metric: str = "accuracy", secure: bool = False
) -> Script:
    """A method's script, and what scores add to it. With secure sums they are totalled, and of enough clients a
    histogram of them; a metric other than accuracy needs counts by class, which are asked for only then.
    """
    script = method.script_with(config, view)
    asked = [*script.get(EVALUATION, ()), *(method.detail_lines(config) if parse_metric(metric) is not None else ())]
    scored: list[ScriptLine] = []
    for line in asked:
        role, name = method.table.locate(line.handler, prefer="client")
        reply = method.table.signature(role, name).reply
        summed = secure and line.verb == "ask" and reply in (Evaluation, Detail)
        scored.append(replace(line, verb="total", survivors=True) if summed else line)
        bins = score_bins_of(method, role)
        if summed and reply is Evaluation and bins is not None and len(view.clients) >= LEAST_CLIENTS:
            scored.append(total(bins, survivors=True))
    return {**script, EVALUATION: scored}


def link_of_settings(settings: Settings) -> Link | None:
    """How owners of tables find the edges between them; None where data are no tables."""
    kind = kind_of(settings.run.dataset)
    if kind not in ("tables", "site tables"):
        return None
    return link_of(settings.run.link, organisations=kind == "site tables")


def release(package: str, version: str) -> str:
    """The part of a version that must be equal everywhere: of Isthmus all of it, since a method's code is part of what
    is agreed; of Python and the libraries major and minor, so that one organisation can install a fix before others.
    """
    return version.partition("+")[0] if package == "isthmus" else ".".join(version.partition("+")[0].split(".")[:2])


def check_versions(server: Mapping[str, str]) -> None:
    """Raise unless the server has the packages of this place: a method's code is part of what is agreed."""
    own = versions()
    for package in sorted(server.keys() | own.keys()):
        here, there = own.get(package), server.get(package)
        if here is None or there is None or release(package, here) != release(package, there):
            raise ConfigError(
                f"{package} is {here or 'none'} here and {there or 'none'} at the server: install the same version"
                + ("" if package == "isthmus" else " (the third number may differ)")
            )
