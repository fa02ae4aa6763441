"""Settings of a run: defaults, then the paper's preset, then a file, then ``--set`` and flags. Checked as a whole
before anything runs.

Two flat groups: ``[run]`` (this module) and ``[method]`` (the method's own config). A key is unique over both, so
``--set key=value`` needs no prefix. An unknown key stops the run and names the nearest valid one.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w

from isthmus.data.graphscenario import dataset_name, task_of
from isthmus.errors import ConfigError, unknown
from isthmus.experiments.presets import Preset, load_preset
from isthmus.experiments.scoring import SCORE_RULES
from isthmus.federation.engines import ELSEWHERE, ENGINES
from isthmus.methods.registry import Method, get_method
from isthmus.methods.training import TrainConfig
from isthmus.metrics.registry import parse_metric

MAX_THREADS = 1024


BASELINE_PRESETS = {"node": "fedstruct", "graph": "fedstar"}
"""Paper whose settings a baseline takes, by task."""


@dataclass(frozen=True)
class RunConfig:
    """What every run has, whatever the method.

    Args:
        dataset: Name of a data set, setting or generator (``isthmus datasets``).
        partition: How data are shared out (``isthmus partitions``); not given = ``random``, for sets of graphs by data
            set, resolved.
        split: Train/validation/test; not given = ``10/10/80``, for sets of graphs ``fedstar``, resolved.
        seed: Of data, partition, split and training.
        preset: Paper whose settings are taken where none are given; else a baseline has ``fedstruct`` for nodes,
            ``fedstar`` for graphs.
        profile: ``paper``: as printed; ``reference``: as the paper's code does it.
        clients: Number of clients; not given = what the partition brings itself, else 10, which is resolved.
        undirected: Read every arc in both directions; otherwise arcs are used as the data set has them.
        rounds: Rounds of the main phase.
        metric: Score that validation picks rounds by.
        selection: Round whose model is kept and scored: the last, or the best on validation.
        execution: ``each`` client by itself, ``cohort`` (all in one set of kernels), or ``auto`` (cohort where
            offered), which is resolved.
        eval_every: Evaluate every so many rounds (the last always).
        checkpoint_every: Checkpoint every so many rounds; 0 = whenever it costs less than about 5 % of the time.
        secure_sum: Mask what is summed, so that the server can read only totals; refused by a method that needs single
            updates.
        transcript: Keep every message each party was sent, for `isthmus audit`; only for simulations, it holds what
            protections hide.
        wire: Send every message through the wire codec, on the local engine too.
        threads: torch threads. One gives the same bits on every machine of a type.
        tensorboard: Also write TensorBoard event files into the run folder.
        engine: Where parties run: in this process, on many cores (``ray``), between organisations (``nvflare``). Keys
            that begin with an engine's name are its options.
        ray_address: An existing ray cluster; not given = one of the run's own on this machine, ended with it.
        nvflare_sites: Simulated organisations on this machine that share the clients; not given = three, resolved.
            Never more than clients.
        ray_actors: Processes that share the clients; not given = one per core, resolved. Never more than clients.
    """

    method: str
    dataset: str
    partition: str | None = None
    clients: int | None = None
    split: str | None = None
    seed: int = 0
    undirected: bool = False
    rounds: int = 100
    preset: str = "fedstruct"
    profile: Literal["paper", "reference"] = "paper"
    metric: str = "accuracy"
    engine: Literal["local", "ray", "nvflare"] = "local"
    execution: Literal["auto", "each", "cohort"] = "auto"
    selection: Literal["last", "best_val_acc", "best_val_loss"] = "last"
    eval_every: int = 1
    checkpoint_every: int = field(default=0, metadata={"key": "checkpoint.every"})
    threads: int = 1
    wire: bool = False
    secure_sum: bool = False
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
            ("checkpoint.every", 0, self.checkpoint_every),
            ("threads", 1, self.threads),
            ("seed", 0, self.seed),
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
        if self.execution == "cohort" and self.secure_sum:
            raise ConfigError("secure_sum=true masks each client's message by itself: use it with execution=each")
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
    """A run, fully resolved."""

    run: RunConfig
    method_config: Any
    score: str
    """Key of the rule that forms ``score`` (see ``scoring.SCORE_RULES``)."""

    def __post_init__(self) -> None:
        if self.score not in SCORE_RULES:
            raise unknown("score rule", self.score, SCORE_RULES)

    @property
    def method(self) -> Method:
        return get_method(self.run.method).configured(self.method_config)

    def to_toml(self) -> str:
        """The resolved config as it stands in ``config.toml``; reading it back gives the same settings."""
        return tomli_w.dumps(
            {"run": _plain(self.run), "method": _plain(self.method_config), "score": {"rule": self.score}}
        )


def resolve(
    method: str, flags: Mapping[str, Any], overrides: Mapping[str, Any] | None = None, file: Path | None = None
) -> Settings:
    """Put settings together.

    Args:
        flags: Values given by name in Python or by flags on the command line; None means not given.
        overrides: ``--set key=value`` pairs; values may be strings.
        file: TOML file with keys at the top or under ``[run]`` and ``[method]``.
    """
    entry = get_method(method)
    from_file = read_file(file) if file is not None else {}
    allowed = _keys(RunConfig) | _keys(entry.config)
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
    task = task_of(typed["dataset"])
    entry.check_task(task)
    preset = load_preset(typed.get("preset", entry.preset or BASELINE_PRESETS[task]))
    values = _preset_values(preset, method, entry.config, typed, allowed) | typed
    values |= {"method": method, "preset": preset.name}
    run = RunConfig(**{allowed[key][0]: value for key, value in values.items() if key in _keys(RunConfig)})
    config = _method_config(
        entry, {allowed[key][0]: value for key, value in values.items() if key in _keys(entry.config)}
    )
    if run.execution == "cohort" and isinstance(config, TrainConfig) and config.one_by_one:
        raise ConfigError("dp_clip has each client clip and add noise by itself: use it with execution=each")
    if run.secure_sum and entry.needs_single_updates:
        raise ConfigError(
            f"{method} needs to see single clients' messages, so secure_sum cannot protect it: leave it out"
        )
    return Settings(run, config, preset.score)


def _method_config(entry: Method, values: Mapping[str, Any]) -> Any:
    """A method's config. It may build a model to check itself, and torch has errors of its own, e.g. for widths beyond
    all memory.
    """
    try:
        return entry.config(**values)
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise ConfigError(f"{entry.name} cannot be built with these settings: {str(error).splitlines()[0]}") from error


def _preset_values(
    preset: Preset, method: str, config: type, typed: Mapping[str, Any], allowed: Mapping[str, tuple[str, Any]]
) -> dict[str, Any]:
    """A preset speaks for all methods of its paper, so keys this method does not have are passed over."""
    dataset = dataset_name(typed["dataset"]).partition(":")[0]
    facts = {"method": method, "dataset": dataset, "profile": typed.get("profile", "paper")}
    for key in ("backbone",):
        default = next((f.default for f in dataclasses.fields(config) if f.name == key), None)
        facts[key] = typed.get(key, preset.values(facts).get(key, default))
    return {key: coerce(value, allowed[key][1], key) for key, value in preset.values(facts).items() if key in allowed}


def settings_from_toml(text: str) -> Settings:
    """Read a resolved ``config.toml`` back, without any preset: what was resolved once stays."""
    try:
        raw = tomllib.loads(text)
        entry = get_method(raw["run"]["method"])
        run_keys, method_keys = _keys(RunConfig), _keys(entry.config)
        run = RunConfig(**{run_keys[k][0]: coerce(v, run_keys[k][1], k) for k, v in _flat(raw["run"]).items()})
        config = _method_config(
            entry, {method_keys[k][0]: coerce(v, method_keys[k][1], k) for k, v in _flat(raw["method"]).items()}
        )
        return Settings(run, config, raw["score"]["rule"])
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"config.toml is damaged ({type(error).__name__}: {error}); start the run again") from None


def read_toml(path: Path, what: str = "") -> dict[str, Any]:
    """A TOML file somebody wrote by hand; ``what`` names it in errors."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {what}{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what}{path} is not valid TOML: {error}") from None


def read_file(path: Path) -> dict[str, Any]:
    """Keys of a config file; a run's own ``config.toml`` can be given back as it is."""
    raw = read_toml(path, "config file ")
    tables: dict[str, Any] = {}
    for name in ("run", "method"):
        if isinstance(raw.get(name), dict):
            tables |= raw.pop(name)
    if isinstance(raw.get("score"), dict):  # of a resolved config; the preset says it again
        del raw["score"]
    return _flat({**raw, **tables})


def parse_override(text: str) -> tuple[str, Any]:
    """``key=value`` from the command line; the value is read as TOML where it is TOML, else as a plain string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set takes key=value, got {text!r}")
    try:
        return key.strip(), tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def coerce(value: Any, hint: Any, key: str) -> Any:
    """A value of the declared type, or a ConfigError that says what is allowed. Strings from the command line are
    understood.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value not in arguments:
            raise unknown(f"value for {key}", str(value), map(str, arguments))
        return value
    if origin in (Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        return coerce(value, next(a for a in arguments if a is not type(None)), key)
    if origin is tuple:
        items = value.split(",") if isinstance(value, str) else value if isinstance(value, (list, tuple)) else [value]
        return tuple(coerce(item, arguments[0], key) for item in items if item != "")
    if hint is bool:
        return _boolean(value, key)
    try:
        if hint is int and not isinstance(value, bool) and (isinstance(value, str) or value == int(value)):
            return int(value)
        if hint is float and not isinstance(value, bool):
            number = float(value)
            if number == number and abs(number) != float("inf"):
                return number
        if hint is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return str(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ConfigError(f"{key} must be {_NAMES.get(hint, hint)}, got {value!r}")


_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


def _boolean(value: Any, key: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ConfigError(f"{key} must be true or false, got {value!r}")


@functools.cache  # reading annotations is most of what a resolve costs
def _keys(config: type) -> dict[str, tuple[str, Any]]:
    """Key -> (field name, type)."""
    hints = get_type_hints(config)
    return {f.metadata.get("key", f.name): (f.name, hints[f.name]) for f in dataclasses.fields(config)}


def _plain(config: Any) -> dict[str, Any]:
    values = {f.metadata.get("key", f.name): getattr(config, f.name) for f in dataclasses.fields(config)}
    return {
        key: list(value) if isinstance(value, tuple) else "none" if value is None else value
        for key, value in values.items()
    }


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
