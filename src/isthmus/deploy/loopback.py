"""A whole federation on one machine: real kits, certificates and processes, on loopback, in a temporary folder.

Each site simulates an organisation and takes its share of the clients. What sites keep for themselves (checkpoints,
models, logs) lies under ``sites/`` of the run folder, so a run can be resumed; final models are brought together in
``models/`` at the end, as on other engines.
"""

from __future__ import annotations

import json
import logging
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from isthmus.deploy import require_nvflare
from isthmus.deploy.credentials import Kit
from isthmus.deploy.play import PROGRESS, RUNS, committed_steps
from isthmus.deploy.processes import Keeper
from isthmus.deploy.project import COORDINATOR_KIT, SERVER_KIT, Project, make_kits
from isthmus.deploy.roster import make_identity
from isthmus.deploy.runtime import SITE_SETTINGS
from isthmus.deploy.supervisor import Supervisor
from isthmus.errors import ConfigError
from isthmus.experiments.callbacks import Callback, Progress
from isthmus.experiments.config import Settings
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.run import default_folder
from isthmus.experiments.scenarios import report_statistics, scenario_of

logger = logging.getLogger(__name__)

RUN = "run"
"""Name of the only run of a federation that was made for it."""
DEFAULT_SITES = 3


class Loopback:
    """A federation of simulated organisations on this machine; a context manager that leaves no process behind.

    Args:
        runs: Folder that holds run folders.
        state: What sites keep, a folder each.
        extra: Further participants that get a kit but are not started (for tests).
    """

    def __init__(self, sites: int, runs: Path, state: Path, extra: Sequence[Mapping[str, Any]] = ()) -> None:
        require_nvflare()
        self.names = tuple(f"site-{number}" for number in range(1, sites + 1))
        self.runs, self.state = runs.absolute(), state.absolute()
        self.folder = Path(tempfile.mkdtemp(prefix="isthmus-"))
        self.keepers: dict[str, Keeper] = {}
        try:
            self.kits = make_kits(Project("loopback", self.names, port=free_port()), self.folder / "federation", extra)
            self._configure()
        except BaseException:
            self.close()
            raise

    def _configure(self) -> None:
        """One identity for all: on one machine there is nobody to hide from, but mail goes sealed all the same."""
        identity = make_identity(self.folder / "identity.key")
        (self.folder / "roster.toml").write_text(f'[simulation]\nclients = ["*"]\nkey = "{identity.public.hex()}"\n')
        for number, name in enumerate(self.names):
            (self.state / name).mkdir(parents=True, exist_ok=True)
            (self.folder / f"{name}.toml").write_text(
                f'state = {json.dumps(str(self.state / name))}\nroster = "roster.toml"\nidentity = "identity.key"\n'
                f"[data]\nsimulated = [{number}, {len(self.names)}]\n"
            )

    def __enter__(self) -> Loopback:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> Loopback:
        """Start server and sites."""
        self.start_one(SERVER_KIT)
        for name in self.names:
            self.start_one(name)
        return self

    def start_one(self, name: str) -> Keeper:
        kit = self.kits[name]
        environment = (
            {RUNS: str(self.runs)} if name == SERVER_KIT else {SITE_SETTINGS: str(self.folder / f"{name}.toml")}
        )
        log = self.state / name / "log.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        self.keepers[name] = Keeper(
            kit, environment, log, kit.sweep_jobs if name == SERVER_KIT else lambda: None
        ).start()
        return self.keepers[name]

    @property
    def coordinator(self) -> Kit:
        return self.kits[COORDINATOR_KIT]

    def supervisor(self, tick: Any = lambda: None) -> Supervisor:
        return Supervisor(self.coordinator, self.runs, self.names, tick)

    def close(self) -> None:
        """End everything that was started and remove the temporary folder."""
        for keeper in reversed(list(self.keepers.values())):
            keeper.stop()
        self.keepers.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


# -- a run -----------------------------------------------------------------------------------------


def start(settings: Settings, out: Path | None = None, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """``isthmus run --engine nvflare``: everything on one machine, then nothing of it is left but the run folder."""
    require_nvflare()
    if out is not None:
        RunFolder(out).refuse_taken()
    path, resolved = prepare(settings, out)
    return _play(path, resolved, callbacks)


def prepare(settings: Settings, out: Path | None) -> tuple[Path, Settings]:
    """Check a run as a whole and make its folder, for others to play it in."""
    scenario = scenario_of(settings)
    resolved = _resolved(settings, {name: getattr(scenario, name) for name in ("clients", "partition", "split")})
    path = default_folder(resolved) if out is None else out
    RunFolder.create(path, resolved.to_toml(), report_statistics(scenario)).close()
    return path, resolved


def resume(path: Path, settings: Settings, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """Continue such a run with a new federation; sites find their checkpoints in the run folder."""
    require_nvflare()
    if settings.run.nvflare_sites is None:
        raise ConfigError(
            f"{path} belongs to a federation: go on with `isthmus submit --federation DIR --again {path.name}`"
        )
    return _play(path, settings, callbacks)


def _resolved(settings: Settings, scenario: dict[str, Any]) -> Settings:
    run = settings.run
    if run.execution == "cohort":
        raise ConfigError(
            "execution=cohort trains clients together, which organisations cannot: use it with --engine local or ray"
        )
    if run.transcript:
        raise ConfigError("transcript=true keeps what protections hide: use it with --engine local")
    clients = 1 if settings.method.pooled else scenario["clients"]
    sites = min(clients, run.nvflare_sites or DEFAULT_SITES)
    return replace(settings, run=replace(run, **scenario, execution="each", nvflare_sites=sites))


def _play(path: Path, settings: Settings, callbacks: Sequence[Callback]) -> dict[str, Any]:
    sites = settings.run.nvflare_sites or DEFAULT_SITES
    with tempfile.TemporaryDirectory(prefix="isthmus-runs-") as runs:
        (Path(runs) / RUN).symlink_to(path.absolute())
        follower = Follower(path, settings, callbacks)
        try:
            with Loopback(sites, Path(runs), path / "sites") as federation:
                follower.begin()
                federation.supervisor(follower.tick).play([RUN])
                follower.tick()
            result = _collect(path)
        finally:
            for callback in callbacks:
                callback.close()
    for callback in callbacks:
        callback.on_end(result)
    return result


def _collect(path: Path) -> dict[str, Any]:
    """Bring the sites' models together."""
    models = path / "models"
    models.mkdir(exist_ok=True)
    for model in sorted((path / "sites").glob(f"*/{RUN}/models/*.safetensors")):
        shutil.copyfile(model, models / model.name)
    for left in (path / "sites").glob(f"*/{RUN}/checkpoints"):
        shutil.rmtree(left, ignore_errors=True)
    folder = RunFolder(path)
    result = folder.result()
    assert result is not None
    result["run_dir"] = str(path)
    folder.write_json("result.json", result)
    return result


class Follower:
    """Tells callbacks what a run folder shows while others write it."""

    def __init__(self, path: Path, settings: Settings, callbacks: Sequence[Callback]) -> None:
        self.path, self.settings, self.callbacks = path, settings, callbacks
        self._step = committed_steps(path)

    def begin(self) -> None:
        method = self.settings.method
        config, rounds = self.settings.method_config, self.settings.run.rounds
        per_phase = [
            rounds if p.rounds is None else p.rounds(config) if callable(p.rounds) else p.rounds for p in method.phases
        ]
        for callback in self.callbacks:
            callback.on_start(self.settings, self.path, self._step, sum(per_phase))

    def tick(self) -> None:
        try:
            progress = Progress(**json.loads((self.path / PROGRESS).read_text()))
        except (OSError, ValueError, TypeError):
            return
        if progress.step != self._step:
            self._step = progress.step
            for callback in self.callbacks:
                callback.on_round(progress)
