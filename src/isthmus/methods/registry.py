"""What a method is, and where methods are found.

A method is one file that ends in ``register(Method(...))``: in this package, or in another one that names it in the
entry point group ``isthmus.methods`` (`isthmus.registry`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from isthmus.errors import ConfigError, unknown
from isthmus.federation.interface import Federation, View
from isthmus.federation.messages import PartyId
from isthmus.federation.roles import Client, Role, RoleTable
from isthmus.federation.script import EVALUATION, Script, ScriptLine, ask
from isthmus.methods.evaluation import Detail, Evaluation, ScoreBins, details_of
from isthmus.methods.global_model import evaluate_models, first_global_model, num_shared_values
from isthmus.nn.registry import OWN_BACKBONES
from isthmus.records import Record
from isthmus.registry import Registry

Log = Mapping[str, float]
"""What a round reports besides its state: names to numbers, e.g. ``{"train_loss": 0.7}``."""


@dataclass(frozen=True)
class Phase:
    """Rounds of one kind.

    Args:
        name: Shown in the ledger and in progress; also keys the random streams.
        run_round: ``(state, federation, config) -> (state, log)``.
        rounds: How many, or None for the run's ``rounds``; a function may derive it from the config.
        setup: True for work done once before training (its bytes and seconds are counted apart).
    """

    name: str
    run_round: Callable[[Any, Federation, Any], tuple[Any, Log]]
    rounds: int | Callable[[Any], int] | None = None
    setup: bool = False


@dataclass(frozen=True)
class Method:
    """A federated method, complete.

    Args:
        name: As its paper names it, in lower case.
        summary: One line for ``isthmus methods``.
        reference: Citation.
        config: Frozen dataclass of its settings.
        phases: In order.
        roles: A class per role; ``client`` always.
        init: ``(view, config, stream) -> server state``; the state is a frozen :class:`Record`, all that is remembered
            between rounds. By default the first weights of one common model.
        evaluate: ``(state, federation, config) -> scores_of(federation, handler, request)``: tallies by client, or with
            secure sums their total; may use messages. By default every client scores its model, after taking over the
            state's ``weights`` where it has that field.
        gives_details: ``(federation, config) -> details_of(federation, handler)`` of what `evaluate` scored last, for
            scores beyond accuracy. By default the clients' handler ``detail``.
        detail_script: ``(config) -> lines`` of the calls of `gives_details`, where it is given.
        script: ``(config, view) -> {phase: lines}``, which handlers are called in each phase and how
            (`isthmus.federation.script`): the disclosure sheet follows from it, and parties refuse every other call.
            Without one a method runs in simulations only, and nobody checks its calls.
        tasks: What it can learn: ``node`` (one graph, its nodes shared out), ``graph`` (sets of graphs), or both.
        preset: Paper whose settings apply by default; None for a baseline (by task: fedstruct for nodes, fedstar for
            graphs).
        cross_edges: Clients may know their cross edges. Otherwise the engine never hands them over.
        pooled: The method trains on the union of all data at one place (a reference, not a federation).
        bounded: Its rounds heed what `isthmus.methods.averaging.AveragingConfig` sets against a client that works
            against the others; such settings are refused elsewhere.
        needs_single_updates: The server must see each client's message, so secure sums are refused.
        edge_weights: Its models read edges by their propagation alone, so weights of edges (``edge_weights=use``) act.
            Inherited by `replace`.
        own_backbones: Takes a module of the user's own as backbone, for node tasks: it needs nothing of a model but its
            parameters, logits and gradients.
        shared_values: How many numbers of a model are shared: ``(state) -> count``. By default those in ``weights``.
        privacy: What differential privacy a run has: ``(first state, config, rounds, clients, masked sums) ->
            result["privacy"]``, or None where it has none. A ``warning`` in it goes to the log.
        facts: What a finished run should tell besides scores, by name: ``(kept server state, config, scenario) ->
            result["facts"]``, values as JSON has them; ``summary`` is a line for people, printed with the result.
            ``scenario`` is the whole scenario in a simulation, for what no party knows (which edges were
            lost), and None between organisations.
        predict: ``(state, federation, config)``: brings every client to where its ``logits()`` are those of the data it
            has now, by messages. None where a client predicts from its own model package alone.
        predict_script: ``(config, view) -> lines`` of the calls of ``predict``.
        server_keeps: Fields of the server's state that ``predict`` reads; they go into the server's own package.
        no_prediction: Why the method cannot be used after training, for the user; empty where it can.
        roles_with: ``(config) -> roles`` of a method whose handlers depend on its config, so that a party accepts only
            those its run needs; ``roles`` are then those of the default config.
        phases_with: ``(config) -> phases`` of a method whose phases do; ``phases`` are then the default config's.
    """

    name: str
    summary: str
    reference: str
    config: type
    phases: tuple[Phase, ...]
    roles: Mapping[str, Role]
    init: Callable[..., Record] = first_global_model
    evaluate: Callable[[Any, Federation, Any], Mapping[PartyId, Evaluation]] = evaluate_models
    gives_details: Callable[[Federation, Any], Mapping[PartyId, Detail]] | None = None
    detail_script: Callable[[Any], tuple[ScriptLine, ...]] | None = None
    script: Callable[[Any, View], Script] | None = None
    tasks: tuple[str, ...] = ("node", "graph")
    preset: str | None = None
    cross_edges: bool = False
    pooled: bool = False
    bounded: bool = False
    needs_single_updates: bool = False
    edge_weights: bool = False
    own_backbones: bool = False
    shared_values: Callable[[Any], int] = num_shared_values
    privacy: Callable[[Any, Any, int, int, bool], Mapping[str, Any] | None] | None = None
    facts: Callable[[Any, Any, Any], Mapping[str, Any]] | None = None
    predict: Callable[[Any, Federation, Any], None] | None = None
    predict_script: Callable[[Any, View], tuple[ScriptLine, ...]] | None = None
    server_keeps: tuple[str, ...] = ()
    no_prediction: str = ""
    roles_with: Callable[[Any], Mapping[str, Role]] | None = None
    phases_with: Callable[[Any], tuple[Phase, ...]] | None = None
    table: RoleTable = field(init=False)

    def __post_init__(self) -> None:
        if "client" not in self.roles:
            raise ConfigError(f"method {self.name!r} must define the role 'client'")
        object.__setattr__(self, "table", RoleTable(self.roles))

    def configured(self, config: Any) -> Method:
        """The method with the roles and phases of a run with this config."""
        if self.roles_with is None and self.phases_with is None:
            return self
        roles = self.roles if self.roles_with is None else self.roles_with(config)
        return replace(self, roles=roles, phases=self.phases if self.phases_with is None else self.phases_with(config))

    @property
    def predicts(self) -> str:
        """How a trained model of this method is used: ``alone``, ``messages``, or ``no``."""
        roles = [role.cls for role in self.roles.values()]
        if self.no_prediction or not any(cls.logits is not Client.logits for cls in roles):
            return "no"
        return "alone" if self.predict is None else "messages"

    @property
    def has_details(self) -> bool:
        """Whether clients can report what scores beyond accuracy need."""
        return self.gives_details is not None or "detail" in self.table.handlers["client"]

    def details(self, federation: Federation, config: Any) -> Mapping[PartyId, Detail]:
        """What scores beyond accuracy need: of each client, or with secure sums of all together."""
        if self.gives_details is not None:
            return self.gives_details(federation, config)
        if not self.has_details:
            raise ConfigError(
                f"clients of {self.name} report only accuracy: leave --metric out, or add a handler `detail`"
            )
        return details_of(federation, getattr(self.roles["client"].cls, "detail"))  # noqa: B009 -- of the role's class

    def detail_lines(self, config: Any) -> tuple[ScriptLine, ...]:
        """The calls of `details`; none where clients report only accuracy."""
        if self.detail_script is not None:
            return self.detail_script(config)
        return (ask(getattr(self.roles["client"].cls, "detail")),) if self.has_details else ()  # noqa: B009

    def check_task(self, task: str) -> None:
        """Refuse data of the other kind, before anything else about them is looked at."""
        if task not in self.tasks:
            wanted = "the nodes of one graph" if "node" in self.tasks else "sets of graphs"
            others = "fedavg, fedstar or gcfl, say, learn" if task == "graph" else "fedavg, say, learns"
            raise ConfigError(
                f"{self.name} learns from {wanted}: choose such a data set (isthmus datasets lists them), "
                f"or another method ({others} from this one)"
            )

    def check_edge_weights(self, config: Any) -> None:
        """Refuse ``edge_weights=use`` where the method or its model would read edges without them."""
        if not self.edge_weights:
            able = ", ".join(name for name in sorted(METHODS) if METHODS[name].edge_weights)
            raise ConfigError(
                f"{self.name} reads edges without weights: set edge_weights=ignore, or take one of {able}"
            )
        if why := config.why_not_weighted():
            raise ConfigError(why)

    def check_backbone(self, backbone: str, task: str, execution: str) -> None:
        """Refuse a module of the user's own where the method cannot use it."""
        if backbone not in OWN_BACKBONES:
            return
        if task != "node":
            raise ConfigError(f"backbone {backbone!r} is a module of your own, which learns nodes, not sets of graphs")
        if self.own_backbones:
            if execution == "cohort":
                raise ConfigError(
                    f"backbone {backbone!r} is a module of your own, trained by each client: use execution=each"
                )
            return
        others = ", ".join(name for name in sorted(METHODS) if METHODS[name].own_backbones)
        raise ConfigError(
            f"{self.name} computes with layers it knows and cannot use backbone {backbone!r}, a module of your own: "
            f"use one of Isthmus' backbones, or a method that takes yours ({others})"
        )

    def script_with(self, config: Any, view: View) -> Script:
        """The script of a run with this config. It may name the method's phases and ``evaluation``, nothing else."""
        if self.script is None:
            raise ConfigError(
                f"{self.name} declares no script, so nobody can tell what its clients would be asked: add script= to "
                f"its Method (isthmus methods --script {self.name} prints one)"
            )
        script = self.script(config, view)
        known = [*(phase.name for phase in self.phases), EVALUATION]
        for phase in script:
            if phase not in known:
                raise unknown(f"phase in the script of {self.name}", phase, known)
        return script


def score_bins_of(method: Method, role: str) -> Callable[..., ScoreBins] | None:
    """The handler by which parties of a role bin their scores; None where a method has none."""
    handler: Callable[..., ScoreBins] | None = getattr(method.roles[role].cls, "score_bins", None)
    return handler if "score_bins" in method.table.handlers[role] else None


METHODS: Registry[Method] = Registry("method", "isthmus.methods")


def register(method: Method) -> Method:
    """Make a method known. A name can be taken only once."""
    METHODS.add(method.name, method)
    return method


def get_method(name: str) -> Method:
    """The method of this name, ours or a plug-in."""
    return METHODS.find(name)


def all_methods() -> list[Method]:
    """Every registered method, sorted by name."""
    return [METHODS[name] for name in sorted(METHODS)]
