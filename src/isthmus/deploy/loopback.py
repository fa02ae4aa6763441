"""A whole federation on one machine: real startup kits, certificates and processes, in a temporary folder.

Runs in the process of ``isthmus run --engine nvflare`` (and ``resume``), which supervises all parent processes and the
run. Each site simulates an organisation and hosts its share of the clients. What sites keep (checkpoints, models, logs)
is under ``sites/`` of the run folder, so a run can be resumed; at the end the final models are copied to ``models/``,
as on other engines.
"""

from __future__ import annotations

import json
import logging
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from isthmus.data import given
from isthmus.data.own_dataset import kind_of
from isthmus.deploy import require_nvflare
from isthmus.deploy.job_template import RUNS, SITE_SETTINGS
from isthmus.deploy.policy import NOTHING_ASKED, TABLE
from isthmus.deploy.process_supervisor import ProcessSupervisor
from isthmus.deploy.provisioning import COORDINATOR_KIT, SERVER_KIT, FederationConfig, provision
from isthmus.deploy.roster import ANY_CLIENT, make_identity
from isthmus.deploy.run_status import ProgressFollower
from isthmus.deploy.run_supervisor import RunSupervisor
from isthmus.deploy.startup_kit import StartupKit
from isthmus.errors import ConfigError
from isthmus.experiments.callbacks import Callback
from isthmus.experiments.config import RunConfig, Settings
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.model_package import MODEL, MODELS
from isthmus.experiments.run import default_folder
from isthmus.experiments.scenarios import report_statistics, scenario_of
from isthmus.methods.own_parts import file_of

logger = logging.getLogger(__name__)

RUN = "run"
"""Name of the only run of such a federation."""
DEFAULT_SITES = 3
CONNECT_TIME = 15.0
"""Seconds the sites may take to connect before a warning says so."""


class LoopbackFederation:
    """A federation of simulated organisations on this machine; a context manager that leaves no process behind.

    Args:
        runs: Folder that holds run folders.
        state: Folder for what each site keeps.
        extra: Further participants that get a kit but are not started (for tests).
        plugins: Files of own code all sites run.
        host: Under which the sites reach the server.
    """

    def __init__(
        self,
        sites: int,
        runs: Path,
        state: Path,
        extra: Sequence[Mapping[str, Any]] = (),
        plugins: Sequence[Path] = (),
        host: str = "localhost",
    ) -> None:
        require_nvflare()
        self.plugins = [str(path) for path in plugins]
        self.names = tuple(f"site-{number}" for number in range(1, sites + 1))
        self.runs, self.state = runs.absolute(), state.absolute()
        self.folder = Path(tempfile.mkdtemp(prefix="isthmus-"))
        self.parents: dict[str, ProcessSupervisor] = {}
        try:
            self.kits = provision(
                FederationConfig("loopback", self.names, host, free_port()), self.folder / "federation", extra
            )
            self._configure()
        except BaseException:
            self.close()
            raise

    def _configure(self) -> None:
        """Write the sites' settings. All share one identity; mail is sealed as between organisations."""
        identity = make_identity(self.folder / "identity.key")
        # All of these sites are whoever runs the simulation, who may want to see one of them lost.
        policy = tomli_w.dumps({TABLE: replace(NOTHING_ASKED, survivors=2**31).to_table()})
        (self.folder / "roster.toml").write_text(
            f'[simulation]\nclients = ["{ANY_CLIENT}"]\nkey = "{identity.public.hex()}"\n'
        )
        for number, name in enumerate(self.names):
            (self.state / name).mkdir(parents=True, exist_ok=True)
            (self.folder / f"{name}.toml").write_text(
                f'state = {json.dumps(str(self.state / name))}\nroster = "roster.toml"\nidentity = "identity.key"\n'
                f"plugins = {json.dumps(self.plugins)}\n[data]\nsimulated = [{number}, {len(self.names)}]\n{policy}"
            )

    def __enter__(self) -> LoopbackFederation:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> LoopbackFederation:
        """Start server and sites."""
        self.start_one(SERVER_KIT)
        for name in self.names:
            self.start_one(name)
        return self

    def start_one(self, name: str, before_start: Callable[[], object] = lambda: None) -> ProcessSupervisor:
        """Start one parent process; ``before_start`` is called in the thread that starts it."""
        kit, log = self.kits[name], self.state / name / "log.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        if name == SERVER_KIT:
            parent = ProcessSupervisor(
                kit, {RUNS: str(self.runs)}, log, lambda: (before_start(), kit.abandon_stale_jobs())
            )
        else:
            settings = {SITE_SETTINGS: str(self.folder / f"{name}.toml")}
            parent = ProcessSupervisor(kit, settings, log, before_start)
        self.parents[name] = parent.start()
        return parent

    @property
    def coordinator(self) -> StartupKit:
        return self.kits[COORDINATOR_KIT]

    def supervisor(self, on_poll: Callable[[], None] = lambda: None) -> RunSupervisor:
        return RunSupervisor(self.coordinator, self.runs, self.names, on_poll, warn_after=CONNECT_TIME)

    def close(self) -> None:
        """End everything that was started and remove the temporary folder."""
        for parent in reversed(list(self.parents.values())):
            parent.stop()
        self.parents.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


# -- a run -----------------------------------------------------------------------------------------


def start(settings: Settings, out: Path | None = None, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """``isthmus run --engine nvflare``: afterwards only the run folder is left."""
    require_nvflare()
    if out is not None:
        RunFolder(out).refuse_used()
    path, resolved = prepare_run(settings, out)
    return _run(path, resolved, callbacks)


def prepare_run(settings: Settings, out: Path | None) -> tuple[Path, Settings]:
    """Check a run as a whole and make its folder."""
    scenario = scenario_of(settings)
    resolved = _resolved(settings, {name: getattr(scenario, name) for name in ("clients", "partition", "split")})
    path = default_folder(resolved) if out is None else out
    RunFolder.create(path, resolved.to_toml(), report_statistics(scenario)).close()
    return path, resolved


def resume(path: Path, settings: Settings, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """Continue such a run with a new federation; the sites' checkpoints are in the run folder."""
    require_nvflare()
    if settings.run.nvflare_sites is None:
        raise ConfigError(
            f"{path} belongs to a federation: continue it with `isthmus submit --federation DIR --again {path.name}`"
        )
    return _run(path, settings, callbacks)


def _resolved(settings: Settings, scenario: dict[str, Any]) -> Settings:
    run = settings.run
    if run.execution == "cohort":
        raise ConfigError(
            "execution=cohort trains clients together, which organisations cannot do: use it with --engine local or ray"
        )
    if run.transcript:
        raise ConfigError("transcript=true keeps what protections hide: use it with --engine local")
    clients = 1 if settings.method.pooled else scenario["clients"]
    sites = min(clients, run.nvflare_sites or DEFAULT_SITES)
    run = replace(run, **scenario)
    return replace(settings, run=replace(run, **_absolute(run), execution="each", nvflare_sites=sites))


def _absolute(run: RunConfig) -> dict[str, Any]:
    """Own data of a run as absolute paths: the sites' processes work in other folders."""
    found: dict[str, Any] = {}
    if kind_of(run.dataset) in ("file", "tables"):
        found["dataset"] = str(Path(run.dataset).expanduser().absolute())
    kind, _, file = (run.split or "").partition(":")
    if kind == given.MASKS and not given.is_given(given.MASKS, run.split or ""):
        found["split"] = f"{kind}:{Path(file).absolute()}"
    return found


def _run(path: Path, settings: Settings, callbacks: Sequence[Callback]) -> dict[str, Any]:
    sites = settings.run.nvflare_sites or DEFAULT_SITES
    with tempfile.TemporaryDirectory(prefix="isthmus-runs-") as runs:
        (Path(runs) / RUN).symlink_to(path.absolute())
        follower = ProgressFollower(path, settings, callbacks)
        try:
            plugins = [file_of(text) for text in settings.run.plugins]
            with LoopbackFederation(sites, Path(runs), path / "sites", plugins=plugins) as federation:
                follower.start()
                federation.supervisor(follower.poll).finish([RUN])
                follower.poll()
            result = _collect_models(path)
        finally:
            for callback in callbacks:
                callback.close()
    for callback in callbacks:
        callback.on_end(result)
    return result


def _collect_models(path: Path) -> dict[str, Any]:
    """Copy the sites' models to the run folder; returns the result."""
    models = path / MODELS
    models.mkdir(exist_ok=True)
    for model in sorted((path / "sites").glob(f"*/{RUN}/{MODELS}/*/{MODEL}")):
        shutil.copytree(model.parent, models / model.parent.name, dirs_exist_ok=True)
    for left in (path / "sites").glob(f"*/{RUN}/checkpoints"):
        shutil.rmtree(left, ignore_errors=True)
    folder = RunFolder(path)
    result = folder.result()
    assert result is not None
    result["run_dir"] = str(path)
    folder.write_json("result.json", result)
    return result
