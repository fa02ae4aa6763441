"""Start a run or continue one, from Python and from the command line."""

from __future__ import annotations

import importlib
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from isthmus.data import given
from isthmus.data.own_graph import owners_of, remember
from isthmus.data.split import given_masks as masks_of
from isthmus.errors import ConfigError, RunError
from isthmus.experiments.callbacks import Callback, TensorBoard
from isthmus.experiments.config import Settings, resolve, settings_from_toml
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.result import Described, form_result
from isthmus.experiments.round_loop import RoundLoop
from isthmus.experiments.scenarios import AnyScenario, parts_for, report_statistics, samples_of, scenario_of, view_of
from isthmus.federation.engine import Engine
from isthmus.federation.engines import ELSEWHERE, engine_class
from isthmus.federation.interface import QuorumError, View
from isthmus.federation.ledger import PROTECTIONS
from isthmus.seeds import Stream

logger = logging.getLogger(__name__)


def run(
    method: str,
    *,
    out: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callback] = (),
    set: Mapping[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Run a method and return its result (the keys of ``result.json``).

    Args:
        method: Name of a method (``isthmus methods`` lists them).
        out: Run folder; default a new one under ``runs/``.
        config: TOML file with further settings.
        callbacks: Called during the run.
        set: Settings whose keys are not Python names, e.g. ``{"checkpoint.every": 5}``.
        settings: Any key of the run or the method, e.g. ``dataset="cora", clients=10, lr=0.01``.

    Example:
        >>> result = run("fedavg", dataset="csbm:nodes=60", clients=2, rounds=2, out=getfixture("tmp_path") / "r")
        >>> result["rounds"]
        2
    """
    resolved = resolve(method, by_name(settings), set, Path(config) if config is not None else None)
    return start(resolved, Path(out) if out is not None else None, callbacks)


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


def start(settings: Settings, out: Path | None = None, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """Run resolved settings in a new folder. Everything is checked and loaded before the folder is made."""
    if settings.run.engine in ELSEWHERE:
        result: dict[str, Any] = importlib.import_module(ELSEWHERE[settings.run.engine]).start(settings, out, callbacks)
        return result
    if out is not None:
        RunFolder(out).refuse_used()  # before anything is loaded
    with _threads(settings.run.threads):
        scenario = scenario_of(settings)
        with SimulatedRun(settings, scenario, callbacks=callbacks) as simulated:
            path = default_folder(simulated.settings) if out is None else out
            folder = RunFolder.create(path, simulated.settings.to_toml(), report_statistics(scenario))
            return simulated.play(folder, resumed=False)


def resume(path: str | os.PathLike[str], callbacks: Sequence[Callback] = (), **given_again: Any) -> dict[str, Any]:
    """Continue a run from its newest checkpoint; of a finished run the result is returned again.

    Args:
        path: The run folder.
        given_again: ``dataset``, ``partition`` and ``split`` that were handed over as objects when the run began.
    """
    if given_again.keys() - {"dataset", "partition", "split"}:
        raise ConfigError("resume takes dataset, partition and split again, nothing else: settings of a run stay")
    by_name(given_again)
    folder = RunFolder.open(Path(path))
    try:
        finished = folder.result()
        if finished is not None:
            folder.drop_checkpoints()  # left by a process that was killed right after writing the result
            return finished
        settings = settings_from_toml(folder.config)
        if settings.run.engine in ELSEWHERE:
            folder.close()
            result: dict[str, Any] = importlib.import_module(ELSEWHERE[settings.run.engine]).resume(
                Path(path), settings, callbacks
            )
            return result
        with (
            _threads(settings.run.threads),
            SimulatedRun(settings, scenario_of(settings), callbacks=callbacks) as simulated,
        ):
            return simulated.play(folder, resumed=True)
    finally:
        folder.close()


class RunDriver:
    """A run with resolved settings on an engine, wherever its parties are.

    Args:
        view: What the server may know of the parties.
        nodes: Number of samples per client, for weighted scores.
        described: Name and source of the data.
        scenario: All data; only in a simulation.
    """

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
        run = settings.run
        self.callbacks = [*callbacks, *([TensorBoard()] if run.tensorboard else [])]
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
        )

    def play(self, folder: RunFolder, *, resumed: bool) -> dict[str, Any]:
        """Run all rounds in a folder and write the result there. Afterwards, also after an error, the folder is
        unlocked.
        """
        try:
            self.engine.keep_tags(folder.store)
            self.loop = loop = self.new_loop(folder)
            with _log_file(folder.path / "log.txt"):
                if self.engine.why_each:
                    logger.warning("%s", self.engine.why_each)
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
            raise RunError(message) from error
        finally:
            for callback in self.callbacks:
                callback.close()
            folder.close()

    def _write_models(self, folder: RunFolder) -> int:
        """Write the clients' final models; returns the number of parameters of the largest."""
        largest = 0
        for client, export in self.engine.export(self.settings.run.selection != "last"):
            largest = max(largest, export.values)
            if export.weights is not None:
                folder.write_model(client, export.weights)
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
        )
        folder.write_json("result.json", result)
        folder.drop_checkpoints()
        return result


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
        created = (engine or engine_class(run.engine))(
            self.parts,
            settings.method.table,
            settings.method_config,
            Stream(run.seed, ("party",)),
            wire=run.wire,
            cohort=run.execution != "each" and not (run.wire or run.secure_sum or run.transcript),
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
def _threads(count: int) -> Iterator[None]:
    """Set the number of torch threads for the duration of a run."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
