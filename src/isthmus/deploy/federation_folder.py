"""The coordinator's side: a folder with the server's kit, the coordinator's kit and the run folders (``isthmus
server``, ``submit``, ``status``, ``stop``)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import signal
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from isthmus.data.graphscenario import task_of
from isthmus.deploy import require_nvflare
from isthmus.deploy.credentials import Kit, warn_dates
from isthmus.deploy.heartbeat import is_alive, last_beat
from isthmus.deploy.job import check_run_id
from isthmus.deploy.play import BEAT, PROGRESS, RUNS, committed_steps, read_failure
from isthmus.deploy.processes import Keeper, end
from isthmus.deploy.project import COORDINATOR_KIT, SERVER_KIT, Project, make_kits
from isthmus.deploy.supervisor import STOPPED, Admin, Supervisor
from isthmus.errors import ConfigError, RunError, unknown
from isthmus.experiments.callbacks import Callback
from isthmus.experiments.config import Settings, read_file, resolve, settings_from_toml
from isthmus.experiments.folder import RunFolder

PROJECT, SERVER_PID = "federation.toml", "server.pid"


@dataclass(frozen=True)
class Headquarters:
    """The folder ``isthmus server init`` makes, without what was handed to the organisations."""

    path: Path
    project: Project

    @classmethod
    def create(cls, path: Path, project: Project) -> Headquarters:
        """Make kits for everybody."""
        make_kits(project, path)
        (path / "runs").mkdir(exist_ok=True)
        values = asdict(project) | {"organisations": list(project.organisations)}
        (path / PROJECT).write_text(tomli_w.dumps(values))
        return cls(path, project)

    @classmethod
    def read(cls, path: Path) -> Headquarters:
        require_nvflare()
        try:
            raw = tomllib.loads((path / PROJECT).read_text())
            return cls(path, Project(**{**raw, "organisations": tuple(raw["organisations"])}))
        except OSError:
            raise ConfigError(
                f"{path} holds no federation (no {PROJECT}): make one with `isthmus server init`"
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path / PROJECT} is damaged ({type(error).__name__}): make the federation again"
            ) from None

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    def kit(self, name: str) -> Kit:
        return Kit.read(self.path / "kits" / name)

    # -- server ------------------------------------------------------------------------------------

    def server_pid(self) -> int | None:
        """The process that keeps the server running, if there is one."""
        beat = last_beat(self.path / SERVER_PID)
        return beat[0] if beat is not None and is_alive(beat[0]) else None

    def keep_server(self) -> Keeper:
        """Start the server and keep it running."""
        kit = self.kit(SERVER_KIT)
        warn_dates([kit])
        if (pid := self.server_pid()) is not None:
            raise ConfigError(
                f"this federation's server runs already (process {pid}): `isthmus stop {self.path}` ends it"
            )
        kit.check_port()
        kit.close_down()
        (self.path / SERVER_PID).write_text(f"{os.getpid()}\n")
        return Keeper(kit, {RUNS: str(self.runs.absolute())}, kit.path / "isthmus.log", kit.sweep_jobs).start()

    def stop_server(self) -> bool:
        """End the process that keeps the server running, which ends the server."""
        pid = self.server_pid()
        if pid is None:
            return False
        os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + 15.0
        while is_alive(pid) and time.monotonic() < until:
            time.sleep(0.1)
        if is_alive(pid):
            end([pid])
        return True

    # -- runs --------------------------------------------------------------------------------------

    def prepare(self, file: Path) -> str:
        """Check a run file and make the run's folder; returns the run's name."""
        keys = read_file(file)
        if not isinstance(keys.get("method"), str):
            raise ConfigError(f'{file} does not say which method: add e.g. method = "fedavg"')
        settings = resolve(keys["method"], {"engine": "nvflare"}, None, file)
        name = f"{settings.run.method}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        RunFolder.create(
            self.runs / name, self._resolved(settings, file).to_toml(), {"task": task_of(settings.run.dataset)}
        ).close()
        return name

    def _resolved(self, settings: Settings, file: Path) -> Settings:
        run = settings.run
        if settings.method.pooled:
            raise ConfigError(f"{run.method} needs all data at one place: run it with `isthmus run {run.method}`")
        if run.execution == "cohort" or run.transcript or run.nvflare_sites is not None:
            raise ConfigError("execution=cohort, transcript and nvflare.sites are for simulations: leave them out")
        if run.clients is None:
            raise ConfigError(f"{file} does not say how many clients: add clients = {len(self.project.organisations)}")
        defaults = {"node": ("random", "10/10/80"), "graph": (run.partition, "fedstar")}[task_of(run.dataset)]
        return replace(
            settings,
            run=replace(run, execution="each", partition=run.partition or defaults[0], split=run.split or defaults[1]),
        )

    def play(self, name: str, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
        """Submit a run and stay with it until its result is there."""
        from isthmus.deploy.loopback import Follower

        folder = RunFolder(self.runs / check_run_id(name))
        if not folder.path.is_dir():
            raise unknown("run", name, [path.name for path in self.runs.iterdir()])
        coordinator = self.kit(COORDINATOR_KIT)
        warn_dates([coordinator])
        (folder.path / STOPPED).unlink(missing_ok=True)
        follower = Follower(folder.path, settings_from_toml(folder.config), callbacks)
        with _alone(folder.path / ".submit"):
            follower.begin()
            Supervisor(coordinator, self.runs, self.project.organisations, follower.tick).play([name])
        follower.tick()
        result = folder.result()
        assert result is not None
        for callback in callbacks:
            callback.on_end(result)
        return result

    def stop_run(self, name: str) -> None:
        """Stop a run: whoever follows it submits it no more, and its server process ends. It can be submitted again."""
        folder = self.runs / check_run_id(name)
        if not folder.is_dir():
            raise unknown("run", name, [path.name for path in self.runs.iterdir()])
        if (folder / "result.json").exists():
            raise RunError(f"{name} is finished already")
        (folder / STOPPED).touch()
        beat = last_beat(folder / BEAT)
        if beat is not None and is_alive(beat[0]):
            end([beat[0]])

    def status(self) -> dict[str, Any]:
        """Who is connected and where the runs stand."""
        found: dict[str, Any] = {
            "server": False,
            "organisations": {name: "not connected" for name in self.project.organisations},
        }
        try:
            with Admin(self.kit(COORDINATOR_KIT)) as admin:
                found["organisations"] |= dict.fromkeys(admin.sites(), "connected")
                found["server"] = True
        except Exception as error:
            found["reason"] = type(error).__name__
        found["runs"] = [self._run_status(path) for path in sorted(self.runs.iterdir()) if path.is_dir()]
        return found

    def _run_status(self, path: Path) -> dict[str, Any]:
        beat, failure = last_beat(path / BEAT), read_failure(path)
        working = beat is not None and is_alive(beat[0])
        state = (
            "finished"
            if (path / "result.json").exists()
            else "running"
            if working
            else "stopped"
            if (path / STOPPED).exists()
            else f"failed: {failure.text}"
            if failure is not None and not failure.again
            else "waiting"
        )
        return {"run": path.name, "state": state, "rounds": committed_steps(path), "of": _steps(path)}


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Two that submit one run would take its jobs from each other."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"somebody else is with run {path.parent.name} already: wait for it, or stop it") from None
        yield


def _steps(path: Path) -> int | None:
    try:
        return int(json.loads((path / PROGRESS).read_text())["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def interrupt_on_terminate() -> None:
    """Let a service manager's stop end us as Ctrl-C does, with everything we started; also where a shell has us ignore
    Ctrl-C.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)
