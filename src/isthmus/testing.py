"""A kit for method authors: the general properties every federated method should have, on small scenarios.

    from isthmus.testing import check_method

    def test_my_method():
        check_method("my-method")

Our own methods are tested with it, each as called plainly. A property that fails is named, with what to do next. Give
``skip={"property": "reason"}`` where one does not apply by design; :data:`METHODS` says so for our own methods.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from isthmus.errors import unknown
from isthmus.experiments.config import Settings, resolve
from isthmus.experiments.disclosure import sheet_of
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.run import SimulatedRun
from isthmus.experiments.scenarios import AnyScenario, build
from isthmus.federation.engines.local import LocalEngine
from isthmus.federation.ledger import differences
from isthmus.federation.roles import cohort_of
from isthmus.federation.script_recorder import ScriptRecorder
from isthmus.federation.watch import SessionWatch
from isthmus.methods.registry import get_method
from isthmus.methods.training import TrainConfig
from isthmus.tensors import Weights, equal_weights, max_difference

SCENARIO: dict[str, Any] = {
    "dataset": "csbm:nodes=90,classes=3,features=16,degree=4",
    "partition": "random",
    "split": "30/20/50",
    "seed": 5,
}
GRAPHS: dict[str, Any] = {"dataset": "motifs", "partition": None, "split": "stratified:60/20/20", "seed": 2}
CALM: dict[str, Any] = {"hidden": (8,), "head": False, "dropout": 0.0, "rounds": 4, "preset": "fedstruct"}
CALM_GRAPHS: dict[str, Any] = {
    "hidden": (8, 8),
    "dropout": 0.0,
    "rounds": 3,
    "batch_size": 16,
    "lr": 0.01,
    "preset": "fedstar",
}
SECRETIVE: dict[str, dict[str, Any]] = {
    "fedstruct": {"protocol": "published"},
    "fedstruct-private": {"protocol": "published"},
}
"""Methods whose parties order things by secrets of their own, so that two runs of one seed differ in rounding; and how
they do not.
"""

PROPERTIES = {
    "calls_follow_the_script": "correct the method's `script`, or what its rounds call (isthmus methods --script NAME)",
    "one_client_equals_local": "start from config.first_model(...), and let the weights of an average add up to 1",
    "identical_clients_stay_identical": "let clients start from common weights and draw from self.stream(...) only",
    "order_does_not_matter": "let nothing at the server depend on which reply comes first",
    "same_seed_same_result": "draw random numbers from self.stream(...), self.common and federation.stream(...) only",
    "wire_equals_declaration": "correct the method's `script`, or what its handlers send",
    "wire_coded_equals_local": "send tensors of the precision that is meant, and change nothing that was received",
    "state_is_declared": "keep what outlives a round in the client's state record or in the server's",
    "resume_is_bit_equal": "keep what outlives a round in the client's state record or in the server's",
    "cohort_equals_each": "let the cohort compute what the client's handlers compute, or set `cohort = None`",
}
"""Name of each property -> what to do where it fails."""


@dataclass(frozen=True)
class Plainly:
    """How a method is checked where the caller says nothing.

    Args:
        settings: What its properties are stated for, beside small models; not used where the caller gives settings.
        skip: Property -> why it cannot hold.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    skip: Mapping[str, str] = field(default_factory=dict)


_TAUGHT = Plainly(skip={"one_client_equals_local": "the encoder teaches a client that is alone, too"})
_CENTRAL = Plainly(skip={"one_client_equals_local": "its party has another name, and so other random numbers"})
_CHANNELS = Plainly(
    {"first_weights": "common", "degrees": 4, "steps": 4, "hidden": (8, 8)},
    {"one_client_equals_local": "its model has a second channel, for structure"},
)
METHODS: dict[tuple[str, str], Plainly] = {
    ("adafgl", "node"): Plainly(
        {"extractor_rounds": 2, "head_width": 6},
        {"one_client_equals_local": "after FedAvg a client trains heads of its own"},
    ),
    ("apfl", "node"): Plainly(skip={"one_client_equals_local": "two models that start alike but step apart"}),
    ("central", "node"): _CENTRAL,
    ("central", "graph"): _CENTRAL,
    ("ditto", "graph"): Plainly(skip={"one_client_equals_local": "its pull acts from the second batch of a round on"}),
    ("fedgcn", "node"): Plainly(
        {"backbone": "gcn"},
        {"one_client_equals_local": "rounding: sums are formed before the first product, not in it"},
    ),
    ("fedggr", "node"): Plainly(
        # Wide encoders: nodes that are alike tie, and whom others then choose does depend on the order.
        {"embedding_width": 24, "encoder_hidden": 32, "encoder_epochs": 4, "k": 4, "rounds": 3, "preset": "fedggr"}
        | {"local_width": 6, "global_width": 5, "server_hidden": 7, "lr": 0.05, "selection": "last"},
        {
            "one_client_equals_local": "one client alone still has the server's channel",
            "identical_clients_stay_identical": "copies of a node tie at the k-th place, and ties go to the lower row",
        },
    ),
    ("fedlit", "node"): Plainly(skip={"one_client_equals_local": "it trains another network"}),
    ("fedpergnn", "node"): Plainly(
        {"preset": "hifgl", "selection": "last"},
        {"one_client_equals_local": "it is another program: equal to fedavg up to rounding, and only without noise"},
    ),
    ("fedproto", "node"): Plainly(skip={"one_client_equals_local": "its embeddings are pulled to its own prototypes"}),
    ("fedpub", "node"): Plainly(
        {"proxy_nodes": 10, "proxy_graphs": 2, "proxy_degree": 3.0},
        {"one_client_equals_local": "it trains a mask of its weights, too"},
    ),
    ("fedtad", "node"): Plainly(
        {"distil_epochs": 1, "model_steps": 2, "pseudo_nodes": 12},
        {"one_client_equals_local": "the server's steps have a weight decay"},
    ),
    ("fedprox", "graph"): Plainly(
        skip={"one_client_equals_local": "its term pulls from the second batch of a round on"}
    ),
    ("fedsage", "graph"): Plainly({"backbone": "sage"}),
    ("fedsageplus", "node"): Plainly(
        {"generator_epochs": 3, "cross_rounds": 2, "encoder_width": 6, "code_width": 8, "generator_widths": (12,)}
        | {"generator_rank": 4, "hide": "nodes", "hidden_share": 0.3, "generator_lr": 0.05},
        {
            "one_client_equals_local": "it trains on a mended graph",
            "order_does_not_matter": "which nodes a client hides, and what noise it adds, depend on its name",
        },
    ),
    ("fedsgd", "graph"): Plainly(
        skip={"one_client_equals_local": "it steps once a round on all graphs, not once a batch"}
    ),
    ("fedspray", "node"): _TAUGHT,
    ("fedspray-published", "node"): _TAUGHT,
    ("fedstar", "node"): _CHANNELS,
    ("fedstar", "graph"): _CHANNELS,
    ("fedstruct", "node"): Plainly(
        {"nsf_dim": 8, "structure_hidden": (6,), "structure_hops": 3, "prune": 4, **SECRETIVE["fedstruct"]},
        {
            "one_client_equals_local": "one client still has its structure branch",
            "identical_clients_stay_identical": "a node has one owner: clients with the same nodes are refused",
            "order_does_not_matter": "which first structure features a node gets depends on its place in the directory",
        },
    ),
    ("fedstruct-private", "node"): Plainly(
        {"structure_hops": 2, "prune": 0, "protocol": "published"},
        {
            "one_client_equals_local": "one client still has its structure branch",
            "identical_clients_stay_identical": "a node has one owner: clients with the same nodes are refused",
            "order_does_not_matter": "data and the names that cross edges give must be exchanged together",
        },
    ),
    ("fedstruct-server", "node"): Plainly(
        {"nsf_dim": 8, "structure_hidden": (6,), "structure_hops": 3},
        {
            "one_client_equals_local": "one client still has its structure branch",
            "identical_clients_stay_identical": "a node has one owner: clients with the same nodes are refused",
            "order_does_not_matter": "data and the names that cross edges give must be exchanged together",
        },
    ),
    ("hifgl", "node"): Plainly(
        {"preset": "hifgl", "selection": "last"},
        {"one_client_equals_local": "sums are rounded to fixed point: equal within 2^-24, not bit for bit"},
    ),
    ("mlpteacher", "node"): _TAUGHT,
    ("scaffold", "node"): Plainly(skip={"one_client_equals_local": "rounding: the model moves by a difference"}),
    ("scaffold", "graph"): Plainly(skip={"one_client_equals_local": "rounding: the model moves by a difference"}),
}
"""What is particular to our own methods."""

_TASKS = {"node": (CALM, SCENARIO), "graph": (CALM_GRAPHS, GRAPHS)}
_ONE_BATCH = 10_000
Models = dict[str, Weights]


def check_method(
    name: str,
    *,
    settings: Mapping[str, Any] | None = None,
    skip: Mapping[str, str] | None = None,
    clients: int = 3,
    task: Literal["node", "graph"] | None = None,
) -> list[str]:
    """Run all general properties; raises an AssertionError that names the first that fails and says what to do.
    Returns the names of those that ran.

    Args:
        name: A registered method.
        settings: Further settings for every run; unknown keys are refused as on the command line.
        skip: Property -> why it does not apply.
        clients: Size of the small federation.
        task: Of the small scenario: one graph split into parts, or sets of graphs. None: the first the method takes.
    """
    for given in skip or {}:
        if given not in PROPERTIES:
            raise unknown("property", given, PROPERTIES)
    kit = _Kit(name, settings, clients, task or get_method(name).tasks[0])
    skipped = {**kit.not_applicable(), **(skip or {})}
    ran = [check for check in PROPERTIES if check not in skipped]
    for check in ran:
        try:
            getattr(kit, check)()
        except Exception as error:
            reason = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            raise AssertionError(
                f"{name} fails {check}: {reason}\nWhat to do: {PROPERTIES[check]}. Where the property cannot hold by "
                f'design, call check_method("{name}", skip={{"{check}": "why"}})'
            ) from error
    return ran


def small_runs(
    name: str, *, settings: Mapping[str, Any] | None = None, set: Mapping[str, Any] | None = None, clients: int = 3
) -> dict[str, tuple[Settings, AnyScenario]]:
    """A small run of a method for each task it takes (``node``, ``graph``), with its own paper's preset, one client by
    one: what engines are compared on."""
    runs: dict[str, tuple[Settings, AnyScenario]] = {}
    for task, (calm, place) in _TASKS.items():
        if task in get_method(name).tasks:
            flags = {"dataset": place["dataset"], "clients": clients, "seed": place["seed"], "execution": "each"}
            own = {key: value for key, value in _known(name, calm).items() if key != "preset"} | SECRETIVE.get(name, {})
            runs[task] = resolve(name, {**flags, **own, **(settings or {})}, set), build(clients=clients, **place)
    return runs


def recorded_script(name: str) -> str:
    """The script of a method as its small run calls it, whether it declares one or not, as Python to paste."""
    (settings, scenario), *_ = small_runs(name, settings={"secure_sum": False, "rounds": 2}).values()
    with SimulatedRun(settings, scenario, engine=LocalEngine) as experiment:
        roles = experiment.settings.method.roles
        engine: Any = experiment.engine
        for party in (party for role in roles for party in engine.parties(role)):
            engine.party(party).watch = None
        recorder = ScriptRecorder()
        experiment.loop.session.clock.watch = recorder
        experiment.loop.play()
    return recorder.text({role: entry.cls.__name__ for role, entry in roles.items()})


def final_hashes(experiment: SimulatedRun) -> dict[str, str]:
    """SHA-256 of what each client ends with."""
    hashes = {}
    for client, weights in _exports(experiment).items():
        digest = hashlib.sha256()
        for key in sorted(weights):
            digest.update(
                f"{key}{weights[key].dtype}{tuple(weights[key].shape)}".encode()
                + weights[key].contiguous().numpy().tobytes()
            )
        hashes[client] = digest.hexdigest()
    return hashes


def _known(name: str, calm: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name for field in fields(get_method(name).config)} | {"rounds", "preset"}
    return {key: value for key, value in calm.items() if key in known}


class _Kit:
    def __init__(self, name: str, settings: Mapping[str, Any] | None, clients: int, task: str) -> None:
        self.method = get_method(name)
        calm, self.place = _TASKS[task]
        self.plainly = METHODS.get((name, task), Plainly())
        self.settings = _known(name, calm) | dict(self.plainly.settings if settings is None else settings)
        self.clients = clients
        self._played: list[SimulatedRun] = []
        # Each client shuffles its graphs for itself: where clients are to do the same, all of them are one batch, in an
        # order of its own.
        self.shuffled = task == "graph"
        self.together = _known(name, {"batch_size": _ONE_BATCH, "precision": "float64"}) if self.shuffled else {}

    def not_applicable(self) -> dict[str, str]:
        """Properties that cannot hold, and why."""
        reasons = dict(self.plainly.skip)
        if self.method.pooled:
            reasons |= dict.fromkeys(
                ("identical_clients_stay_identical", "order_does_not_matter"), "there is one party"
            )
        choice = cohort_of(self.method.roles["client"].cls)
        if choice.cohort is None:
            reasons["cohort_equals_each"] = choice.refused or "its clients have no cohort"
        elif self.method.pooled:
            reasons["cohort_equals_each"] = "there is one party"
        elif self.shuffled:
            reasons["cohort_equals_each"] = "graphs are trained client by client"
        return reasons

    # -- properties --------------------------------------------------------------------------------

    def one_client_equals_local(self) -> None:
        """(P2) A federation of one is that one alone, bit for bit, dropout included."""
        scenario = build(clients=1, **self.place)
        ours = self.models(scenario, dropout=0.3)
        shared = {f.name for f in fields(get_method("local").config)} | {"rounds", "preset"}
        alone = self.models(
            scenario, method="local", **{k: v for k, v in {**self.settings, "dropout": 0.3}.items() if k in shared}
        )
        _same(
            next(iter(ours.values())),
            next(iter(alone.values())),
            f"{self.method.name} with one client differs from local training",
        )

    def identical_clients_stay_identical(self) -> None:
        """(P3) Clients with the same data end with the same model."""
        one = build(clients=1, **self.place)
        names = tuple(f"client-{i}" for i in range(self.clients))
        data = _with_owners(next(iter(one.parts.values())), names)
        models = self.models(_with_parts(one, dict.fromkeys(names, data)), execution="each", **self.together)
        first = next(iter(models.values()))
        for client, model in models.items():
            complaint = f"{client} drifted away from a client with the same data"
            _close(model, first, 1e-9, complaint) if self.shuffled else _same(model, first, complaint)

    def order_does_not_matter(self) -> None:
        """(P4) Which client comes first changes nothing but rounding."""
        scenario = self.scenario()
        names, data = list(scenario.parts), list(scenario.parts.values())
        plain = self.models(scenario, **self.together)
        other = dict(zip(names, names[::-1], strict=True))
        parts = {name: _renamed(part, other) for name, part in zip(names, data[::-1], strict=True)}
        turned = self.models(_with_parts(scenario, parts), **self.together)
        for a, b in other.items():
            _close(plain[a], turned[b], 1e-5, "the result depends on the order of the clients")

    def same_seed_same_result(self) -> None:
        """(P6) Twice the same run, with dropout."""
        first, second = (self.models(self.scenario(), dropout=0.3) for _ in range(2))
        _all_same(first, second, "two runs with the same seed differ")

    def calls_follow_the_script(self) -> None:
        """Every call of a run is in the method's script, every line of the script is used, with secure sums too."""
        for experiment in self.played():
            assert experiment.contract is not None, "the method declares no script"
            watch = experiment.loop.session.clock.watch
            assert isinstance(watch, SessionWatch)
            unused = [f"{line.phase}: {line.name}" for line in watch.unused()]
            assert not unused, f"the script has lines that no call was made by: {', '.join(unused)}"

    def wire_equals_declaration(self) -> None:
        """(P5) What a run shows is exactly the method's disclosure sheet, with secure sums too where it has them."""
        for experiment in self.played():
            run, config = experiment.settings.run, experiment.settings.method_config
            sheet = sheet_of(
                self.method, metric=run.metric, secure_sum=run.secure_sum, config=config, view=experiment.view
            )
            wrong = differences(experiment.loop.sheet, sheet)
            assert not wrong, f"disclosure sheet{' with secure sums' * run.secure_sum}: {'; '.join(wrong)}"

    def _maskable(self) -> bool:
        config = self.experiment(self.scenario()).settings.method_config
        refused = isinstance(config, TrainConfig) and config.why_not_masked()
        return not self.method.needs_single_updates and not refused

    def wire_coded_equals_local(self) -> None:
        """Messages through the wire codec give the same bits as copies."""
        plain = self.models(self.scenario(), dropout=0.3, execution="each")
        coded = self.models(self.scenario(), dropout=0.3, execution="each", wire=True)
        _all_same(plain, coded, "wire-coded and copied messages give different bits")

    def state_is_declared(self) -> None:
        """Nothing survives a round but declared state: parties rebuilt from it after every round end the same."""
        plain = self.models(self.scenario(), execution="each", dropout=0.3)
        forgetful = self.experiment(self.scenario(), execution="each", dropout=0.3)
        for step in range(1, forgetful.loop.steps + 1):
            forgetful.loop.play(until=step)
            forgetful.loop.checkpoint()
            forgetful.loop.restore()
        _all_same(plain, _exports(forgetful), "a party remembers something outside its declared state")

    def resume_is_bit_equal(self) -> None:
        """Stopped half-way and continued by a new process' worth of objects, the run ends with the same bits."""
        plain = self.models(self.scenario(), dropout=0.3)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run"
            first = self.experiment(self.scenario(), dropout=0.3, set={"checkpoint.every": 1})
            stopped = RunFolder.create(path, first.settings.to_toml(), {})
            first.engine.keep_tags(stopped.store)
            loop = first.new_loop(stopped)
            loop.play(until=max(1, loop.steps // 2))
            stopped.close()
            second = self.experiment(self.scenario(), dropout=0.3, set={"checkpoint.every": 1})
            second.play(RunFolder.open(path), resumed=True)
            _all_same(plain, _exports(second), "a resumed run ends differently")

    def cohort_equals_each(self) -> None:
        """Clients trained together end where they end one by one (1e-5 after one round), dropout included."""
        each = self.models(self.scenario(), execution="each", dropout=0.3, rounds=1)
        cohort = self.experiment(self.scenario(), execution="cohort", dropout=0.3, rounds=1)
        assert cohort.settings.run.execution == "cohort", "with these settings clients do not train together"
        cohort.loop.play()
        together = _exports(cohort)
        for client in each:
            _close(each[client], together[client], 1e-5, "training together and one by one differ")

    # -- tools -------------------------------------------------------------------------------------

    def scenario(self) -> AnyScenario:
        return build(clients=self.clients, **self.place)

    def experiment(
        self, scenario: AnyScenario, *, method: str | None = None, set: Mapping[str, Any] | None = None, **changes: Any
    ) -> SimulatedRun:
        given = changes if method is not None else {**self.settings, **changes}
        if method is None and "dropout" not in {field.name for field in fields(self.method.config)}:
            given.pop("dropout", None)
        flags = {"dataset": self.place["dataset"], "clients": len(scenario.parts), "seed": self.place["seed"], **given}
        return SimulatedRun(resolve(method or self.method.name, flags, set), scenario)

    def played(self) -> list[SimulatedRun]:
        """A run to its end under its contract, and one with secure sums where the method has them; made once."""
        if not self._played:
            for secure in (False, True) if self._maskable() else (False,):
                masked: dict[str, Any] = {"secure_sum": True} if secure else {}
                experiment = self.experiment(self.scenario(), **masked)
                experiment.loop.play()
                self._played.append(experiment)
        return self._played

    def models(self, scenario: AnyScenario, **changes: Any) -> Models:
        experiment = self.experiment(scenario, **changes)
        experiment.loop.play()
        return _exports(experiment)


def _exports(experiment: SimulatedRun) -> Models:
    return {client: export.weights or {} for client, export in experiment.engine.export(selected=False)}


def _with_owners(data: Any, owners: tuple[str, ...]) -> Any:
    """Data without cross edges, in a federation of these clients."""
    cross = getattr(data, "cross", None)
    return data if cross is None else replace(data, cross=replace(cross, owners=owners))


def _renamed(data: Any, names: Mapping[str, str]) -> Any:
    """The same data where its cross edges lead to clients of other names."""
    cross = getattr(data, "cross", None)
    if cross is None:
        return data
    places = torch.tensor([cross.owners.index(names[owner]) for owner in cross.owners])
    return replace(data, cross=replace(cross, owner=places[cross.owner]))


def _with_parts(scenario: AnyScenario, parts: Mapping[str, Any]) -> AnyScenario:
    changed: Any = {"parts": parts, "clients": len(parts)}
    return replace(scenario, **changed)


def _same(a: Weights, b: Weights, complaint: str) -> None:
    assert equal_weights(a, b), f"{complaint} (largest difference {max_difference(a, b):.3g})"


def _all_same(a: Models, b: Models, complaint: str) -> None:
    assert a.keys() == b.keys()
    for client in a:
        _same(a[client], b[client], f"{client}: {complaint}")


def _close(a: Weights, b: Weights, tolerance: float, complaint: str) -> None:
    difference = max_difference(a, b)
    assert difference <= tolerance, f"{complaint} (largest difference {difference:.3g})"
