"""Settings of a run: defaults, then the paper's preset, then a file, then ``--set`` and flags. Checked as a whole
before anything runs.

Two flat groups: ``[run]`` (this module) and ``[method]`` (the method's own config). A key is unique over both, so
``--set key=value`` needs no prefix. An unknown key stops the run and names the nearest valid one.
"""

from __future__ import annotations

import dataclasses
import logging
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomli_w

from isthmus.data.datasets import with_defaults
from isthmus.data.edge_weights import EdgeWeights
from isthmus.data.feature_scaling import Scale
from isthmus.data.graphscenario import dataset_name, task_of
from isthmus.data.own_dataset import contents_of, kind_of, load_own
from isthmus.data.whole_graph import Loaded
from isthmus.errors import ConfigError, unknown
from isthmus.experiments.config_values import coerce, flat, keys_of, plain, read_toml
from isthmus.experiments.presets import Preset, default_preset, load_preset
from isthmus.experiments.score_rules import SCORE_RULES
from isthmus.experiments.scoring import rule_of_selection
from isthmus.experiments.suitability import idle_settings
from isthmus.experiments.variants import AUTO, NONE, settled_by_data
from isthmus.federation.engines import ELSEWHERE, ENGINES
from isthmus.methods.averaging import AveragingConfig, shares_counted
from isthmus.methods.own_parts import find_backbone, find_method, load_all, settle_backbone
from isthmus.methods.registry import Method, Phase, get_method
from isthmus.methods.training import TrainConfig
from isthmus.metrics.registry import parse_metric

logger = logging.getLogger(__name__)

MAX_THREADS = 1024


@dataclass(frozen=True)
class RunConfig:
    """Settings of every run, whatever the method. Those that are not given are resolved before the run begins.

    Args:
        dataset: Name of a data set, setting or generator (``isthmus datasets``).
        partition: How data are divided between clients (``isthmus partitions``); default ``random``, for sets of graphs
            by data set.
        split: Train/validation/test; default ``10/10/80``, for sets of graphs ``fedstar``.
        seed: Random seed of data, partition, split and training.
        preset: Set of default settings: those of a paper, or ``general``, which belongs to no paper and is the default
            for own data, for baselines, and for data sets that are not in the method's paper.
        variant: Which of the method's variants in the preset is used: a name, or ``auto`` (all are tried, validation
            chooses).
        profile: ``paper``: as published, with corrections; ``reference``: as the paper's code does it.
        clients: Number of clients; default: that of the partition where it has one, else 10.
        undirected: Use every directed edge in both directions; otherwise as in the data set.
        scale: Features of one graph: as they are (``none``), each ``row`` of mean square 1, columns of mean 0 and
            deviation 1 (``standard``), or what suits them (``auto``); tables have a scale by column in their schema.
        edge_weights: Weights of edges in one graph: ``ignore``, or ``use`` them in propagation, by methods and
            backbones that can. They are ``edge_weight`` of a graph, ``weight`` of ``[edges]`` in a schema, or the
            amounts transferred.
        data_hash: SHA-256 of own data, filled in by the run, which can be continued with the same data only.
        link: How owners of tables find the edges between them: ``psi`` (private set intersection), ``plain`` (items
            compared in the clear, for one process), ``none``; ``auto`` is plain in one process, else psi.
        plugins: Own code, files or modules (``--plugin``), with the SHA-256 of each, filled in by the run, which can be
            continued with the same code only.
        predict: Name of a run between organisations whose models predict for the data each of them has now; nothing is
            trained.
        rounds: Rounds of the main phase (training).
        metric: Score that is reported, and by which validation selects a round.
        selection: Round whose model is kept and scored: the ``last``, the best on validation by ``metric``
            (``best_val_acc``), or the one with the lowest validation loss (``best_val_loss``).
        patience: Rounds without an improvement on validation after which training ends; 0 = never.
        execution: ``each`` client by itself, ``cohort`` (all clients in one batched computation), or ``auto`` (cohort
            where the method has one).
        eval_every: Rounds between evaluations (the last round is always evaluated).
        checkpoint_every: Rounds between checkpoints; 0 = so often that they take about 5 % of the time.
        secure_sum: Mask what is summed, so that the server can read only totals; refused by a method that needs the
            updates of single clients.
        least_clients: Fewest clients with which a round continues when others are lost; 0 = all are needed. A lost
            client can rejoin at the beginning of a round; refused by a method that needs everyone.
        deadline: Seconds a client may take to answer before it counts as lost; 0 = no limit.
        transcript: Keep every message that each party receives, for `isthmus audit`; only for simulations, because it
            contains what protections hide.
        wire: Encode every message as if it were sent over a network, on the local engine too.
        threads: Number of torch threads. With one, results are bit-equal on machines of the same type.
        tensorboard: Also write TensorBoard event files into the run folder.
        engine: Where parties run: in this process (``local``), on many cores (``ray``), between organisations
            (``nvflare``). Keys that begin with an engine's name are its options.
        ray_address: Address of an existing ray cluster; default: one is started on this machine for the run.
        nvflare_sites: Simulated organisations on this machine that share the clients; default three, at most one per
            client.
        ray_actors: Processes that share the clients; default one per core, at most one per client.
    """

    method: str
    dataset: str
    partition: str | None = None
    clients: int | None = None
    split: str | None = None
    seed: int = 0
    undirected: bool = False
    scale: Scale = "none"
    edge_weights: EdgeWeights = "ignore"
    data_hash: str | None = None
    link: Literal["auto", "psi", "plain", "none"] = "auto"
    plugins: tuple[str, ...] = ()
    predict: str | None = None
    rounds: int = 100
    preset: str = "fedstruct"
    variant: str = NONE
    profile: Literal["paper", "reference"] = "paper"
    metric: str = "accuracy"
    engine: Literal["local", "ray", "nvflare"] = "local"
    execution: Literal["auto", "each", "cohort"] = "auto"
    selection: Literal["last", "best_val_acc", "best_val_loss"] = "last"
    patience: int = 0
    eval_every: int = 1
    checkpoint_every: int = field(default=0, metadata={"key": "checkpoint.every"})
    threads: int = 1
    wire: bool = False
    secure_sum: bool = False
    least_clients: int = 0
    deadline: float = 0.0
    transcript: bool = False
    tensorboard: bool = False
    ray_address: str | None = field(default=None, metadata={"key": "ray.address"})
    ray_actors: int | None = field(default=None, metadata={"key": "ray.actors"})
    nvflare_sites: int | None = field(default=None, metadata={"key": "nvflare.sites"})

    def __post_init__(self) -> None:
        for key, low, value in (
            ("clients", 1, 1 if self.clients is None else self.clients),
            ("rounds", 1, self.rounds),
            ("eval_every", 1, self.eval_every),
            ("patience", 0, self.patience),
            ("checkpoint.every", 0, self.checkpoint_every),
            ("threads", 1, self.threads),
            ("seed", 0, self.seed),
            ("least_clients", 0, self.least_clients),
            ("deadline", 0, self.deadline),
        ):
            if value < low:
                raise ConfigError(f"{key} must be at least {low}, got {value}")
        parse_metric(self.metric)
        for key, number in (("ray.actors", self.ray_actors), ("nvflare.sites", self.nvflare_sites)):
            if number is not None and number < 1:
                raise ConfigError(f"{key} must be at least 1, got {number}")
        for option in dataclasses.fields(self):
            owner, dot, _ = option.metadata.get("key", "").partition(".")
            if (
                dot
                and owner in (*ENGINES, *ELSEWHERE)
                and owner != self.engine
                and getattr(self, option.name) != option.default
            ):
                raise ConfigError(
                    f"{option.metadata['key']} is an option of engine {owner}: add --engine {owner}, or leave it out"
                )
        if self.seed >= 2**63:
            raise ConfigError(f"seed must be below 2^63, got {self.seed}")
        if self.threads > MAX_THREADS:
            raise ConfigError(f"threads must be at most {MAX_THREADS}, got {self.threads}")
        if self.plugins and self.engine == "ray":
            raise ConfigError("own files and modules are not sent to ray's processes: use --engine local, or nvflare")
        if self.execution == "cohort" and self.transcript:
            raise ConfigError("transcript=true keeps messages one by one: use it with execution=each")
        if self.execution == "cohort" and self.wire:
            raise ConfigError("wire=true sends messages one by one: use it with execution=each")

    @property
    def engine_options(self) -> dict[str, Any]:
        """Options of the engine: ``ray.address`` is ``address`` of engine ``ray``."""
        keys = {field.metadata.get("key", ""): field.name for field in dataclasses.fields(self)}
        prefix = f"{self.engine}."
        return {key.removeprefix(prefix): getattr(self, name) for key, name in keys.items() if key.startswith(prefix)}


@dataclass(frozen=True)
class Settings:
    """All settings of a run, resolved."""

    run: RunConfig
    method_config: Any
    score: str
    """Key of the rule that forms ``score`` (see ``score_rules.SCORE_RULES``)."""

    def __post_init__(self) -> None:
        if self.score not in SCORE_RULES:
            raise unknown("score rule", self.score, SCORE_RULES)

    @property
    def method(self) -> Method:
        return get_method(self.run.method).configured(self.method_config)

    @property
    def secure(self) -> bool:
        """Whether sums are masked; a method that pools all data has one party, and nothing to hide from itself."""
        return self.run.secure_sum and not self.method.pooled

    def rounds_of(self, phase: Phase) -> int:
        """Number of rounds of a phase."""
        if phase.rounds is None:
            return self.run.rounds
        return phase.rounds(self.method_config) if callable(phase.rounds) else phase.rounds

    @property
    def total_rounds(self) -> int:
        """Rounds of all phases, setup included."""
        return sum(self.rounds_of(phase) for phase in self.method.phases)

    @property
    def ends_out_of_turn(self) -> bool:
        """Whether the last round is evaluated only because it is the last: with more rounds it would not be."""
        return self.run.rounds % self.run.eval_every != 0

    def to_toml(self) -> str:
        """The content of ``config.toml``; reading it back gives the same settings."""
        return tomli_w.dumps(
            {"run": plain(self.run), "method": plain(self.method_config), "score": {"rule": self.score}}
        )


def allowed_keys(method: str) -> frozenset[str]:
    """Every key that ``--set`` takes for a method, its own and those of every run."""
    entry = get_method(find_method(method)[0])
    return frozenset(keys_of(RunConfig) | keys_of(entry.config)) - {"method"}


def resolve(
    method: str, flags: Mapping[str, Any], overrides: Mapping[str, Any] | None = None, file: Path | None = None
) -> Settings:
    """Resolve the settings of a run from all sources.

    Args:
        flags: Values given by name in Python or by flags on the command line; None means not given.
        overrides: ``--set key=value`` pairs; values may be strings.
        file: TOML file with keys at the top or under ``[run]`` and ``[method]``.
    """
    from_file = read_file(file) if file is not None else {}
    named = {**from_file, **(overrides or {}), **{key: value for key, value in flags.items() if value is not None}}
    plugins = load_all(coerce(named.get("plugins", ()), tuple[str, ...], "plugins"))
    method, own_method = find_method(method)
    backbone, own_backbone = find_backbone(str(named.get("backbone", "")))
    plugins += [plugin for plugin in (own_method, own_backbone) if plugin is not None]
    entry = get_method(method)
    allowed = keys_of(RunConfig) | keys_of(entry.config)
    typed: dict[str, Any] = {}
    for source in (from_file, overrides or {}, {key: value for key, value in flags.items() if value is not None}):
        for key, value in source.items():  # each source is checked, also where a later one wins
            if key == "method":
                if value != method:
                    raise ConfigError(
                        f"the settings are for another method than {method!r}: leave the key 'method' out"
                    )
                continue
            if key not in allowed:
                raise unknown("key", key, set(allowed) - {"method"})
            typed[key] = coerce(value, allowed[key][1], key)
    if "dataset" not in typed:
        raise ConfigError("no data set given: use --dataset NAME (isthmus datasets lists them)")
    typed = with_defaults(typed["dataset"], _own_data(typed))
    typed |= {"plugins": tuple(dict.fromkeys(plugin.text for plugin in plugins))} if plugins else {}
    typed |= {"backbone": backbone} if "backbone" in typed else {}
    task = task_of(typed["dataset"])
    entry.check_task(task)
    entry.check_backbone(backbone, task, typed.get("execution", "auto"))
    named_set = dataset_name(typed["dataset"]).partition(":")[0]
    preset = load_preset(typed.get("preset", default_preset(entry.preset, named_set, task, typed.get("profile"))))
    variant = _variant(preset, method, typed)
    of_preset = _preset_values(preset, method, entry.config, typed, allowed, variant)
    values = of_preset | typed
    if "eval_every" in of_preset and "eval_every" not in typed and "rounds" in typed:
        # A preset's pace is for its own number of rounds: of a shorter run about ten are evaluated at least.
        values["eval_every"] = max(1, min(values["eval_every"], typed["rounds"] // 10))
    values |= {"method": method, "preset": preset.name, "variant": variant}
    run = RunConfig(**{allowed[key][0]: value for key, value in values.items() if key in keys_of(RunConfig)})
    if values.get("schedule") == "cosine":
        values.setdefault("schedule_rounds", run.rounds)
    if values.get("dp_noise_in") == "total" and run.clients is not None and values.get("dp_shares") is None:
        values["dp_shares"] = shares_counted(run.clients, run.least_clients)
    config = _method_config(
        entry, {allowed[key][0]: value for key, value in values.items() if key in keys_of(entry.config)}
    )
    if run.edge_weights == "use":
        entry.check_edge_weights(config)
    if run.execution == "cohort" and isinstance(config, TrainConfig) and config.one_by_one:
        raise ConfigError("with dp_clip or forward_noise each client adds noise by itself: use it with execution=each")
    if parse_metric(run.metric) is not None and not entry.configured(config).has_details:
        raise ConfigError(
            f"clients of {method} report only accuracy: leave --metric out, or add a `detail` handler to the method"
        )
    if run.secure_sum and entry.needs_single_updates:
        raise ConfigError(
            f"{method} needs to see single clients' messages, so secure_sum cannot protect it: leave it out"
        )
    if isinstance(config, AveragingConfig) and config.bounds and not entry.bounded:
        raise ConfigError(
            f"{method} does not average its clients as fedavg does: leave {' and '.join(config.bounds)} out, or use "
            "fedavg"
        )
    if run.secure_sum and isinstance(config, TrainConfig) and (why := config.why_not_masked()):
        raise ConfigError(why)
    for text in idle_settings(config, typed.keys(), task):
        logger.warning("%s", text)
    chosen = of_preset.get("selection", RunConfig.selection)
    score = preset.score if run.selection == chosen else rule_of_selection(preset.score, run.selection)
    return Settings(run, config, score)


def _own_data(typed: dict[str, Any]) -> dict[str, Any]:
    """What own data settle: their contents, and owners and masks where they have some."""
    dataset = typed["dataset"]
    found = {"data_hash": contents_of(dataset)}
    if kind_of(dataset) in ("memory", "file") and isinstance(own := load_own(dataset), Loaded):
        found |= {"partition": "owner"} if own.owner is not None else {}
        found |= {"split": "public"} if own.public is not None else {}
    return found | {key: value for key, value in typed.items() if key != "data_hash"}


def _method_config(entry: Method, values: Mapping[str, Any]) -> Any:
    """A method's config. It may build a model to check itself, and torch raises errors of its own, e.g. where memory
    does not suffice.
    """
    try:
        return entry.config(**values)
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise ConfigError(f"{entry.name} cannot be built with these settings: {str(error).splitlines()[0]}") from error


def _variant(preset: Preset, method: str, typed: Mapping[str, Any]) -> str:
    """Which variant of the method a run takes; ``auto`` where validation is to choose."""
    variants = preset.variants(method)
    given = typed.get("variant", AUTO)
    if "variant" in typed and given == AUTO and variants:
        return AUTO
    if given not in (AUTO, NONE) and given not in variants:
        raise unknown(f"variant of {method} in preset {preset.name}", given, [*variants, AUTO])
    if not variants:
        return NONE
    if given != AUTO:
        return next(iter(variants)) if given == NONE else given
    fixed = typed.keys() & {key for values in variants.values() for key in values}
    return next(iter(variants)) if fixed or len(variants) == 1 else AUTO


def _preset_values(
    preset: Preset,
    method: str,
    config: type,
    typed: Mapping[str, Any],
    allowed: Mapping[str, tuple[str, Any]],
    variant: str,
) -> dict[str, Any]:
    """Values of a preset. It is for all methods of its paper, so keys this method does not have are left out."""
    dataset = dataset_name(typed["dataset"]).partition(":")[0]
    facts = {"method": method, "dataset": dataset, "profile": typed.get("profile", "paper")}
    facts |= {"task": task_of(typed["dataset"]), "variant": next(iter(preset.variants(method)), NONE)}
    facts |= {} if variant == AUTO else {"variant": variant}
    for key in ("backbone", "nsf"):
        default = next((f.default for f in dataclasses.fields(config) if f.name == key), None)
        facts[key] = typed.get(key, preset.values(facts).get(key, default))
    settled = settled_by_data(typed["dataset"])
    return {
        key: coerce(value, allowed[key][1], key)
        for key, value in preset.values(facts).items()
        if key in allowed and key not in settled
    }


def settings_from_toml(text: str, *, own_files: Sequence[Path] | None = None) -> Settings:
    """Read a resolved ``config.toml``; presets are not applied again.

    ``own_files``: at a site, the files of own code it lists itself; others that a run names are refused.
    """
    try:
        raw = tomllib.loads(text)
        plugins = load_all(raw["run"].get("plugins", ()), own_files)
        settle_backbone(raw["method"].get("backbone"), plugins)
        entry = get_method(raw["run"]["method"])
        run_keys, method_keys = keys_of(RunConfig), keys_of(entry.config)
        run = RunConfig(**{run_keys[k][0]: coerce(v, run_keys[k][1], k) for k, v in flat(raw["run"]).items()})
        config = _method_config(
            entry, {method_keys[k][0]: coerce(v, method_keys[k][1], k) for k, v in flat(raw["method"]).items()}
        )
        return Settings(run, config, raw["score"]["rule"])
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"config.toml is damaged ({type(error).__name__}: {error}); start the run again") from None


def read_file(path: Path) -> dict[str, Any]:
    """Keys of a config file, which may be the ``config.toml`` of a run."""
    raw = read_toml(path, "config file ")
    tables: dict[str, Any] = {}
    for name in ("run", "method"):
        if isinstance(raw.get(name), dict):
            tables |= raw.pop(name)
    if isinstance(raw.get("score"), dict):  # of a resolved config; the preset gives it again
        del raw["score"]
    return flat({**raw, **tables})
