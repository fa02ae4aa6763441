"""What a method is, and where methods are found.

A method is one file that ends in ``register(Method(...))``: in this package, or in another one that names it in the
entry point group ``isthmus.methods`` (`isthmus.registry`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from isthmus.errors import ConfigError
from isthmus.federation.interface import Federation
from isthmus.federation.ledger import Disclosure
from isthmus.federation.messages import PartyId
from isthmus.federation.roles import Role, RoleTable
from isthmus.methods.evaluation import Evaluation
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
        evaluate: ``(state, federation, config) -> {client: Evaluation}``; may use messages. By default every client
            scores its model, after taking over the state's ``weights`` where it has that field.
        discloses: The disclosure sheet, stated in advance; of the default config where it depends on that.
        sheet: ``(config) -> disclosure sheet`` of a method whose messages depend on its config.
        tasks: What it can learn: ``node`` (one graph, its nodes shared out), ``graph`` (sets of graphs), or both.
        preset: Paper whose settings apply by default; None for a baseline (by task: fedstruct for nodes, fedstar for
            graphs).
        cross_edges: Clients may know their cross edges. Otherwise the engine never hands them over.
        pooled: The method trains on the union of all data at one place (a reference, not a federation).
        needs_single_updates: The server must see each client's message, so secure sums are refused.
        own_backbones: Takes a module of the user's own as backbone, for node tasks: it needs nothing of a model but its
            parameters, logits and gradients.
        shared_values: How many numbers of a model are shared: ``(state) -> count``. By default those in ``weights``.
        privacy: What differential privacy a run has: ``(first state, config, rounds, clients, masked sums) ->
            result["privacy"]``, or None where it has none. A ``warning`` in it goes to the log.
        facts: What a finished run should tell besides scores, by name: ``(kept server state, config, scenario) ->
            result["facts"]``, values as JSON has them; ``summary`` is a line for people, printed with the result.
            ``scenario`` is the whole scenario in a simulation, for what no party knows (which edges were
            lost), and None between organisations.
        roles_with: ``(config) -> roles`` of a method whose handlers depend on its config, so that a party accepts only
            those its run needs; ``roles`` are then those of the default config.
    """

    name: str
    summary: str
    reference: str
    config: type
    phases: tuple[Phase, ...]
    roles: Mapping[str, Role]
    init: Callable[..., Record] = first_global_model
    evaluate: Callable[[Any, Federation, Any], Mapping[PartyId, Evaluation]] = evaluate_models
    discloses: tuple[Disclosure, ...] = ()
    sheet: Callable[[Any], tuple[Disclosure, ...]] | None = None
    tasks: tuple[str, ...] = ("node", "graph")
    preset: str | None = None
    cross_edges: bool = False
    pooled: bool = False
    needs_single_updates: bool = False
    own_backbones: bool = False
    shared_values: Callable[[Any], int] = num_shared_values
    privacy: Callable[[Any, Any, int, int, bool], Mapping[str, Any] | None] | None = None
    facts: Callable[[Any, Any, Any], Mapping[str, Any]] | None = None
    roles_with: Callable[[Any], Mapping[str, Role]] | None = None
    table: RoleTable = field(init=False)

    def __post_init__(self) -> None:
        if "client" not in self.roles:
            raise ConfigError(f"method {self.name!r} must define the role 'client'")
        object.__setattr__(self, "table", RoleTable(self.roles))

    def configured(self, config: Any) -> Method:
        """The method with the roles of a run with this config."""
        return self if self.roles_with is None else replace(self, roles=self.roles_with(config))

    def check_task(self, task: str) -> None:
        """Refuse data of the other kind, before anything else about them is looked at."""
        if task not in self.tasks:
            wanted = "the nodes of one graph" if "node" in self.tasks else "sets of graphs"
            others = "fedavg, fedstar or gcfl, say, learn" if task == "graph" else "fedavg, say, learns"
            raise ConfigError(
                f"{self.name} learns from {wanted}: choose such a data set (isthmus datasets lists them), "
                f"or another method ({others} from this one)"
            )

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

    def discloses_with(self, config: Any) -> tuple[Disclosure, ...]:
        """The disclosure sheet of a run with this config."""
        return self.discloses if self.sheet is None else self.sheet(config)


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
