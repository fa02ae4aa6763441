"""Start a run or continue one, from Python and from the command line."""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from isthmus.compiling import limited_threads
from isthmus.data import given
from isthmus.data.feature_scaling import UNSCALED
from isthmus.data.own_graph import owners_of, remember
from isthmus.data.split import given_masks as masks_of
from isthmus.errors import ConfigError, StorageError
from isthmus.experiments.callbacks import Callback
from isthmus.experiments.config import RunConfig, Settings, settings_from_toml
from isthmus.experiments.contract import simulated_contract
from isthmus.experiments.folder import TRIALS, RunFolder
from isthmus.experiments.model_package import MODELS, Training, write_package, write_server_package
from isthmus.experiments.result import Described, form_result
from isthmus.experiments.round_loop import RoundLoop
from isthmus.experiments.scenarios import AnyScenario, parts_for, report_statistics, samples_of, scenario_of, view_of
from isthmus.experiments.suitability import shortcomings
from isthmus.experiments.tracking import TensorBoard
from isthmus.experiments.variants import chosen, first_variant, varied_keys
from isthmus.federation.engine import Engine
from isthmus.federation.engines import ELSEWHERE, engine_class
from isthmus.federation.interface import QuorumError, View
from isthmus.federation.kept import fields_bytes
from isthmus.federation.ledger import PROTECTIONS
from isthmus.federation.messages import SERVER
from isthmus.federation.roles import together_behind_masks
from isthmus.methods.built_model import describe_model
from isthmus.seeds import Stream

logger = logging.getLogger(__name__)


def by_name(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as text: own data, owners and masks given as objects are kept under a name made from their contents."""
    named = dict(settings)
    dataset, partition, split = (named.get(key) for key in ("dataset", "partition", "split"))
    if isinstance(dataset, os.PathLike):
        named["dataset"] = os.fspath(dataset)
    elif dataset is not None and not isinstance(dataset, str):
        named["dataset"] = dataset.dataset if isinstance(dataset, Tables) else remember(dataset)
    if partition is not None and not isinstance(partition, str):
        owner, names = owners_of(partition)
        named["partition"] = given.keep(given.OWNERS, given.digest(owner, names), (owner, names))
    if split is not None and not isinstance(split, str):
        masks = masks_of(split)
        named["split"] = given.keep(given.MASKS, given.digest(*masks.values()), masks)
    return named


@dataclass(frozen=True)
class Tables:
    """A folder of tables as a data set: ``isthmus.run("fedavg", dataset=isthmus.Tables("banks"))``."""

    folder: str | os.PathLike[str]

    @property
    def dataset(self) -> str:
        return str(Path(self.folder).absolute())


def start(
    settings: Settings, out: Path | None = None, callbacks: Sequence[Callback] = (), *, overwrite: bool = False
) -> dict[str, Any]:
    """Run resolved settings in a new folder. Everything is checked and loaded before the folder is made.

    Args:
        overwrite: A run that is in the folder already is removed, once the new one can begin.
    """
    if settings.run.predict is not None:
        raise ConfigError(
            "predict= names a run between organisations (isthmus submit --predict): in one process use isthmus predict "
            "with the models of the run"
        )
    if settings.run.engine in ELSEWHERE:
        settings = first_variant(settings)
        if overwrite and out is not None:
            RunFolder(out).clear()
        result: dict[str, Any] = importlib.import_module(ELSEWHERE[settings.run.engine]).start(settings, out, callbacks)
        return result
    if out is not None and not overwrite:
        RunFolder(out).refuse_used()  # before anything is loaded
    with limited_threads(settings.run.threads):
        scenario = scenario_of(settings)
        begun, (settings, trials) = settings.run, chosen(settings, partial(_validated, scenario, settings.run))
        scenario = _scenario_again(scenario, begun, settings)
        with SimulatedRun(settings, scenario, callbacks=callbacks) as simulated:
            path = default_folder(simulated.settings) if out is None else out
            if overwrite:
                RunFolder(path).clear()
            folder = RunFolder.create(path, simulated.settings.to_toml(), report_statistics(scenario))
            if trials:
                folder.write_json(TRIALS, dict(trials))
            return simulated.play(folder, resumed=False)


def _scenario_again(scenario: AnyScenario, built_for: RunConfig, settings: Settings) -> AnyScenario:
    """The scenario of settings: the one that is there, or another where a variant reads arcs or features otherwise."""
    same = all(getattr(built_for, key) == getattr(settings.run, key) for key in ("undirected", "scale", "edge_weights"))
    return scenario if same else scenario_of(settings)


def _validated(scenario: AnyScenario, built_for: RunConfig, settings: Settings) -> float | None:
    """The validation score of the round that settings keep; nothing is written."""
    with SimulatedRun(settings, _scenario_again(scenario, built_for, settings)) as simulated:
        simulated.loop.play()
        best = simulated.loop.best
        return None if best is None else best["val"]


def resume(
    path: str | os.PathLike[str],
    callbacks: Sequence[Callback] = (),
    *,
    more: int | str | None = None,
    **given_again: Any,
) -> dict[str, Any]:
    """Continue a run from its newest checkpoint; of a finished run the result is returned again.

    Args:
        path: The run folder.
        more: Rounds a finished run goes on for. It ends as a run with that many rounds from the start.
        given_again: ``dataset``, ``partition`` and ``split`` that were handed over as objects when the run began.
    """
    if given_again.keys() - {"dataset", "partition", "split"}:
        raise ConfigError(
            "resume takes rounds, and dataset, partition and split again, nothing else: settings of a run stay"
        )
    by_name(given_again)
    more = more_rounds(more)
    folder = RunFolder.open(Path(path))
    try:
        finished = folder.result()
        settings = settings_from_toml(folder.config)
        if finished is not None and more is None:
            # A process may have been killed right after writing the result.
            folder.keep_last_checkpoint(settings.ends_out_of_turn)
            return finished
        ended_out_of_turn = settings.ends_out_of_turn
        if more is not None:
            settings = _with_more_rounds(settings, folder, more)
        if settings.run.engine in ELSEWHERE:
            folder.close()
            result: dict[str, Any] = importlib.import_module(ELSEWHERE[settings.run.engine]).resume(
                Path(path), settings, callbacks
            )
            return result
        with (
            limited_threads(settings.run.threads),
            SimulatedRun(settings, scenario_of(settings), callbacks=callbacks) as simulated,
        ):
            if more is not None:
                folder.reopen(settings.to_toml(), repeat_last=ended_out_of_turn)
            return simulated.play(folder, resumed=True)
    finally:
        folder.close()


def more_rounds(text: int | str | None) -> int | None:
    """How many more rounds a run gets: 100, or ``+100`` as it is typed."""
    if not isinstance(text, str):
        return text
    if not (text.startswith("+") and text[1:].isdecimal()):
        raise ConfigError(f"rounds of a run that goes on are how many more it gets, as +100, got {text!r}")
    return int(text)


def _with_more_rounds(settings: Settings, folder: RunFolder, more: int) -> Settings:
    """The settings of a finished run that goes on."""
    path = folder.path
    if more < 1:
        raise ConfigError(f"rounds are how many more a run gets, at least 1, got {more}")
    if folder.result() is None:
        raise ConfigError(f"{path} is not finished: `isthmus resume {path}` first, then give it more rounds")
    if settings.run.engine in ELSEWHERE:
        raise ConfigError(
            f"{path} is a run between organisations, which keep nothing of a finished run to go on from: start a new "
            "one with more rounds"
        )
    if settings.method.phases[-1].rounds is not None:
        raise ConfigError(
            f"{settings.run.method} ends with a phase of its own after its rounds: start a new run with more rounds"
        )
    if getattr(settings.method_config, "schedule", None) == "cosine":
        raise ConfigError(
            "its rates fell to nearly 0 over the rounds it had (schedule=cosine), a longer run's would fall slower: "
            "start a new run with more rounds"
        )
    lines = folder.metrics()
    if lines and lines[-1]["round"] < settings.run.rounds:
        raise ConfigError(
            f"{path} ended early, at round {lines[-1]['round']} of {settings.run.rounds}: validation had not improved "
            f"for {settings.run.patience} rounds, and more rounds would end there too; start a new run with more "
            "patience"
        )
    if not folder.store(SERVER).steps():
        raise ConfigError(
            f"{path} keeps no checkpoint (a run of a table, or of an older version): start a new run with more rounds"
        )
    return replace(settings, run=replace(settings.run, rounds=settings.run.rounds + more))


class RunDriver:
    """A run with resolved settings on an engine, wherever its parties are.

    Args:
        view: What the server may know of the parties.
        nodes: Number of samples per client, for weighted scores.
        described: Name and source of the data.
        scenario: All data; only in a simulation.
    """

    parts: Mapping[str, Any] = MappingProxyType({})
    """Each client's data; only in a simulation."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        view: View,
        nodes: Mapping[str, int],
        described: Described,
        *,
        scenario: AnyScenario | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.settings, self.engine, self.view, self.nodes = settings, engine, view, nodes
        self.described, self.scenario = described, scenario
        self.notes: Sequence[str] = getattr(self, "notes", ())
        run = settings.run
        self.callbacks = [*callbacks, *([TensorBoard()] if run.tensorboard else [])]
        self.contract = simulated_contract(settings, view)
        if self.contract is not None:
            engine.watch(self.contract)
        self.loop = self.new_loop(None)
        privacy = settings.method.privacy  # computed before the run: an extra may be missing
        clients = len(engine.parties("client"))
        self.privacy = privacy and privacy(self.loop.state, settings.method_config, run.rounds, clients, run.secure_sum)

    def close(self) -> None:
        """End the processes of the engine."""
        self.engine.close()

    def new_loop(self, folder: RunFolder | None, incarnation: int = 0) -> RoundLoop:
        return RoundLoop(
            self.settings,
            self.engine,
            self.view,
            self.nodes,
            folder=folder,
            callbacks=self.callbacks,
            incarnation=incarnation,
            contract=self.contract,
        )

    def play(self, folder: RunFolder, *, resumed: bool) -> dict[str, Any]:
        """Run all rounds in a folder and write the result there. Afterwards, also after an error, the folder is
        unlocked.
        """
        try:
            self.engine.keep_tags(folder.store)
            self.loop = loop = self.new_loop(folder)
            with _log_file(folder.path / "log.txt"):
                for note in (self.engine.why_each, *self.notes):
                    if note:
                        logger.warning("%s", note)
                if self.privacy and self.privacy.get("warning"):
                    logger.warning("differential privacy: %s", self.privacy["warning"])
                if resumed:
                    loop.restore()
                loop.note_preparation(getattr(self.scenario, "entries", ()))
                for callback in self.callbacks:
                    callback.on_start(self.settings, folder.path, loop.at.step, loop.steps)
                loop.play()
                result = self._finish(folder)
            for callback in self.callbacks:
                callback.on_end(result)
            return result
        except OSError as error:
            message = (
                f"cannot write to {folder.path} ({error.strerror or error}): correct that, then `isthmus resume "
                f"{folder.path}`"
            )
            raise StorageError(message) from error
        finally:
            for callback in self.callbacks:
                callback.close()
            folder.close()

    def _write_models(self, folder: RunFolder) -> int:
        """Write the clients' model packages; returns the number of parameters of the largest."""
        largest, settings, models = 0, self.settings, folder.path / MODELS
        tables: Mapping[str, Any] = getattr(self.scenario, "tables", {})
        training = Training(
            settings,
            self.view.clients,
            self.described.source,
            self.privacy,
            tables,
            scaling=getattr(self.scenario, "scaling", UNSCALED),
        )
        for client, export in self.engine.export(settings.run.selection != "last"):
            largest = max(largest, export.values)
            if export.weights is not None:
                write_package(models, client, export, self.parts[client], training)
        if settings.method.server_keeps:
            kept = fields_bytes(self.loop.kept_state, settings.method.server_keeps)
            write_server_package(models, kept, training)
        return largest

    def _finish(self, folder: RunFolder) -> dict[str, Any]:
        loop, run = self.loop, self.settings.run
        try:
            trainable = self._write_models(folder)
        except QuorumError as error:  # a party that was lost now returns with its last checkpoint, the end of the run
            logger.info("%s; trying again from the last checkpoint", error)
            loop.restore()
            loop.play()
            trainable = self._write_models(folder)
        parameters = {"trainable": trainable, "shared": self.settings.method.shared_values(loop.state)}
        folder.write_json(
            "disclosure.json", {"method": run.method, "rows": loop.sheet.rows(), "protections": PROTECTIONS}
        )
        method_facts = self.settings.method.facts
        facts = method_facts and method_facts(loop.kept_state, self.settings.method_config, self.scenario)
        result = form_result(
            self.settings,
            self.described,
            self.nodes,
            loop.lines,
            loop.totals,
            loop.seconds,
            loop.round_seconds,
            parameters,
            str(folder.path),
            self.privacy,
            facts,
            describe_model(self.settings.method_config, self.view),
        )
        for row in result["per_client"] or ():
            if row["train"] is None and row["test"] is not None and row["client"] in self.parts:  # not scored
                row["train"] = int(self.parts[row["client"]].num_train)
        if loop.missed:
            result["absent"] = {client: _stretches(steps) for client, steps in sorted(loop.missed.items())}
        if (tried := folder.path / TRIALS).exists():
            result["variants"] = json.loads(tried.read_text())
            result["varied"] = sorted(varied_keys(self.settings))
        folder.write_json("result.json", result)
        self._tidy(folder)
        return result

    def _tidy(self, folder: RunFolder) -> None:
        """What becomes of the checkpoints of a finished run: between organisations nothing is kept for later."""
        folder.drop_checkpoints()


def _stretches(steps: Sequence[int]) -> list[list[int]]:
    """Steps as first and last of each unbroken stretch."""
    found: list[list[int]] = []
    for step in steps:
        if found and step == found[-1][1] + 1:
            found[-1][1] = step
        else:
            found.append([step, step])
    return found


class SimulatedRun(RunDriver):
    """A run of a scenario whose data are all here, on one machine or cluster. Use it in a ``with`` block, or
    :meth:`close` it: an engine may have processes.

    Args:
        engine: Creates the engine, instead of the one the settings name; ``engine_options`` are passed to it.
    """

    def __init__(
        self,
        settings: Settings,
        scenario: AnyScenario,
        *,
        callbacks: Sequence[Callback] = (),
        engine: Callable[..., Engine] | None = None,
        **engine_options: Any,
    ) -> None:
        self.parts = parts_for(settings, scenario)
        run = settings.run
        backbone = getattr(settings.method_config, "backbone", None)
        self.notes = shortcomings(settings.method, self.parts, backbone, run.metric)
        created = (engine or engine_class(run.engine))(
            self.parts,
            settings.method.table,
            settings.method_config,
            Stream(run.seed, ("party",)),
            wire=run.wire,
            cohort=run.execution != "each"
            and not (run.wire or run.transcript)
            and (not settings.secure or together_behind_masks(settings.method.table.roles.values())),
            **(engine_options if engine is not None else run.engine_options),
        )
        try:
            resolved: dict[str, Any] = {name: getattr(scenario, name) for name in ("clients", "partition", "split")}
            resolved |= {"execution": created.execution, **(created.resolved if engine is None else {})}
            super().__init__(
                replace(settings, run=replace(run, **resolved)),
                created,
                view_of(self.parts),
                samples_of(self.parts),
                Described(scenario.dataset, scenario.source),
                scenario=scenario,
                callbacks=callbacks,
            )
        except BaseException:
            created.close()
            raise

    def _tidy(self, folder: RunFolder) -> None:
        folder.keep_last_checkpoint(self.settings.ends_out_of_turn)

    def __enter__(self) -> SimulatedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def default_folder(settings: Settings) -> Path:
    """A new folder ``runs/<method>-<data set>-<partition>-k<clients>-s<seed>``, numbered where that exists. It is made
    at once, so that no other process uses it.
    """
    run = settings.run
    name = "-".join([run.method, run.dataset.lower(), str(run.partition), f"k{run.clients}", f"s{run.seed}"])
    stem = "".join(character if character.isalnum() or character in "-_." else "_" for character in name)[:80]
    for number in itertools.count(1):
        path = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if path.parent.is_dir():
                continue
            raise ConfigError(
                "cannot make the folder runs: a file has that name; choose another place with --out"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"cannot make the run folder {path}: {error.strerror}; choose another place with --out"
            ) from None
        return path
    raise AssertionError


@contextmanager
def _log_file(path: Path) -> Iterator[None]:
    """Write the library's log into the run folder too."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("isthmus")
    level = root.level
    root.addHandler(handler)
    root.setLevel(min(level or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()
