"""The coordinator's folder: the server's kit, the coordinator's kit and the run folders.

Made by ``isthmus server init``; ``isthmus server start``, ``submit``, ``status`` and ``stop`` are its methods. All of
them run on the machine of the server.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import os
import secrets
import signal
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from isthmus.data.graphscenario import task_of
from isthmus.deploy import require_nvflare
from isthmus.deploy.admin_session import SEEN_WITHIN, AdminSession
from isthmus.deploy.connection_gate import MEMBERS_FILE
from isthmus.deploy.heartbeat import read_heartbeat
from isthmus.deploy.job_template import RUNS, check_run_name
from isthmus.deploy.keeper import Order
from isthmus.deploy.kit_policy import write_policy
from isthmus.deploy.members import MEMBERS, Members
from isthmus.deploy.offer import Offer, check_offers, contract_hash
from isthmus.deploy.processes import hold, holder, is_alive, terminate
from isthmus.deploy.provisioning import COORDINATOR_KIT, SERVER_KIT, FederationConfig, provision
from isthmus.deploy.run_file import resolve_run_file
from isthmus.deploy.run_files import FAILED, run_state
from isthmus.deploy.run_queue import RunQueue
from isthmus.deploy.run_status import (
    HEARTBEAT,
    STOPPED,
    ProgressFollower,
    RunFailure,
    check_stopped,
    committed_rounds,
    read_progress,
    read_waiting,
)
from isthmus.deploy.run_supervisor import RunSupervisor
from isthmus.deploy.startup_kit import StartupKit
from isthmus.errors import ConfigError, RunError, no_federation, unknown
from isthmus.experiments.callbacks import Callback
from isthmus.experiments.config import Settings, settings_from_toml
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.prediction import check_predicts

logger = logging.getLogger(__name__)

CONFIG, SERVER_PID, OFFERS, ORGANISATIONS = "federation.toml", "server.pid", "offers", "organisations.json"
FORMAT = 2
"""Of the folder. In 1, without a number, the founder held the keys of all organisations."""
STOP_TIMEOUT = 15.0


@dataclass(frozen=True)
class FederationFolder:
    """The folder ``isthmus server init`` makes, without the kits that were given to the organisations."""

    path: Path
    config: FederationConfig

    @classmethod
    def create(cls, path: Path, config: FederationConfig) -> FederationFolder:
        """Make the folder, the root certificate, and the kits of server and coordinator."""
        from isthmus.deploy.membership import found

        provision(config, path, clients=False)
        for name in ("runs", OFFERS):
            (path / name).mkdir(exist_ok=True)
        made = cls(path, config).with_config(config)
        found(made)
        return made

    def with_config(self, config: FederationConfig) -> FederationFolder:
        """This folder, with other content in ``federation.toml``."""
        temporary = self.path / f".{CONFIG}.tmp"
        values = {"format": FORMAT, **asdict(config), "organisations": list(config.organisations)}
        temporary.write_text(tomli_w.dumps(values))
        temporary.rename(self.path / CONFIG)
        return replace(self, config=config)

    @classmethod
    def read(cls, path: Path) -> FederationFolder:
        require_nvflare()
        try:
            raw = tomllib.loads((path / CONFIG).read_text())
            _check_format(path, raw.pop("format", 1))
            return cls(path, FederationConfig(**{**raw, "organisations": tuple(raw["organisations"])}))
        except OSError:
            raise no_federation(path) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path / CONFIG} is damaged ({type(error).__name__}): make the federation again"
            ) from None

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def register(self) -> Path:
        """Which certificates were issued and revoked."""
        return self.path / MEMBERS

    def members(self) -> tuple[str, ...]:
        """Organisations that have joined; others are only expected."""
        register = Members.read(self.register)
        return tuple(name for name in self.config.organisations if register.joined(name))

    def kit(self, name: str) -> StartupKit:
        return StartupKit.read(self.path / "kits" / name)

    # -- server ------------------------------------------------------------------------------------

    def server_pid(self) -> int | None:
        """The process of ``isthmus server start``, if it runs."""
        return holder(self.path / SERVER_PID)

    def server_order(self, metrics: int | None = None) -> Order:
        """What the keeper of the server runs, if it can run here and does not run yet; from now on this process is the
        server's.
        """
        kit = self.kit(SERVER_KIT)
        kit.warn_about_certificates()
        if (pid := hold(self.path / SERVER_PID)) is not None:
            raise ConfigError(
                f"this federation's server runs already (process {pid}): `isthmus stop {self.path}` ends it"
            )
        kit.check_port()
        write_policy(kit)
        environment = {RUNS: str(self.runs.absolute()), MEMBERS_FILE: str(self.register.absolute())}
        log = kit.path / "isthmus.log"
        return Order(str(kit.path), environment, str(log), str(self.path.absolute()), metrics)

    def stop_server(self) -> bool:
        """End ``isthmus server start``, which ends the server; False if it does not run."""
        pid = self.server_pid()
        if pid is None:
            return False
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT
        while is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        if is_alive(pid):
            terminate([pid])
        return True

    # -- runs --------------------------------------------------------------------------------------

    def create_run(self, file: Path) -> str:
        """Check a run file and make the run's folder; returns the run's name."""
        settings = self.settings_of(file)
        check_offers(self.offers(), settings)
        name = f"{settings.run.method}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        self._make_run(name, settings, self.members())
        return name

    def _make_run(self, name: str, settings: Settings, organisations: Sequence[str]) -> None:
        """Make the folder of a run of these organisations: one that joins later does not disturb it."""
        RunFolder.create(self.runs / name, settings.to_toml(), {"task": task_of(settings.run.dataset)}).close()
        (self.runs / name / ORGANISATIONS).write_text(json.dumps(list(organisations)))

    def _organisations(self, path: Path) -> tuple[str, ...]:
        """Organisations of a run."""
        file = path / ORGANISATIONS
        return tuple(json.loads(file.read_text())) if file.exists() else self.config.organisations

    def create_prediction(self, trained: str) -> str:
        """Make the folder of a prediction with the models of a finished run; returns its name."""
        path = self._run_folder(trained)
        if not (path / "result.json").exists():
            raise ConfigError(f"{trained} is not finished, so it has left no models: finish it first")
        settings = settings_from_toml(RunFolder(path).config)
        if settings.run.predict is not None:
            raise ConfigError(f"{trained} is a prediction itself: name the run that trained the models")
        check_predicts(settings.method)
        settings = replace(settings, run=replace(settings.run, predict=trained))
        name = f"predict-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        self._make_run(name, settings, self._organisations(path))
        return name

    def contract(self, name: str) -> tuple[str | None, list[str]]:
        """Hash of a run's contract, if the offers say enough to derive it, and the organisations where somebody must
        approve it.
        """
        offers = self.offers()
        wanted = [organisation for organisation, offer in offers.items() if offer.policy.approve]
        return contract_hash(offers, settings_from_toml(RunFolder(self._run_folder(name)).config)), wanted

    def settings_of(self, file: Path) -> Settings:
        """A run file, resolved, if it is for this federation."""
        settings = resolve_run_file(file)
        run = settings.run
        organisations = len(self.members())
        if not organisations:
            raise ConfigError("no organisation has joined yet: approve their requests (`isthmus server approve`)")
        if run.clients is None:
            raise ConfigError(f"{file} does not say how many clients: add clients = {organisations}")
        if run.clients != organisations:
            raise ConfigError(
                f"{file} is for {run.clients} clients, but the federation has {organisations} organisations with one "
                f"client each: write clients = {organisations}"
            )
        return settings

    def offers(self) -> dict[str, Offer]:
        """The offers that organisations sent, by organisation; some may have sent none."""
        files = sorted((self.path / OFFERS).glob("*.toml"))
        for file in files:
            if file.stem not in self.config.organisations:
                raise unknown(f"organisation in {self.path / OFFERS}", file.stem, self.config.organisations)
        return {file.stem: Offer.read(file) for file in files}

    def _run_folder(self, name: str) -> Path:
        path = self.runs / check_run_name(name)
        if not path.is_dir():
            raise unknown("run", name, [path.name for path in self.runs.iterdir()])
        return path

    def submit(self, name: str, callbacks: Sequence[Callback] = (), by: str = "") -> dict[str, Any]:
        """Wait until it is a run's turn, submit it and supervise it until its result is there.

        Args:
            by: For whom it is: those who submit take turns.
        """
        path = self._run_folder(name)
        folder = RunFolder(path)
        coordinator = self.kit(COORDINATOR_KIT)
        coordinator.warn_about_certificates()
        (path / STOPPED).unlink(missing_ok=True)
        follower = ProgressFollower(path, settings_from_toml(folder.config), callbacks)
        wanted = self._organisations(path)
        check = functools.partial(self._check_members, name, wanted)
        waiting = _Waiting(path, check)
        with _submission_lock(path), _noting_the_end(path), self.queue.turn(name, by, waiting):
            follower.start()
            RunSupervisor(coordinator, self.runs, wanted, follower.poll, check=check).finish([name])
        follower.poll()
        result = folder.result()
        assert result is not None
        for callback in callbacks:
            callback.on_end(result)
        return result

    def _check_members(self, run: str, wanted: Sequence[str]) -> None:
        """Raise if one of the organisations of a run does not belong to the federation any more."""
        gone = sorted(set(wanted) - set(FederationFolder.read(self.path).members()))
        if gone:
            raise RunError(
                f"{', '.join(gone)} was revoked, and {run} was agreed with it: submit a new run of those who stay"
            )

    @property
    def queue(self) -> RunQueue:
        return RunQueue(self.path, self.config.runs_at_once)

    def stop_run(self, name: str) -> None:
        """Stop a run: it is not submitted again by itself, and its server job ends. ``submit`` continues it."""
        path = self._run_folder(name)
        if (path / "result.json").exists():
            raise RunError(f"{name} is finished already: there is nothing to stop")
        (path / STOPPED).touch()
        beat = read_heartbeat(path / HEARTBEAT)
        if beat is not None and is_alive(beat[0]):
            terminate([beat[0]])

    def status(self) -> dict[str, Any]:
        """Which organisations are connected and how far the runs are."""
        found: dict[str, Any] = {
            "server": False,
            "organisations": {name: "not connected" for name in self.config.organisations},
            "last_seen": {name: None for name in self.config.organisations},
            "certificate_days": self.certificate_days(),
        }
        try:
            with AdminSession(self.kit(COORDINATOR_KIT)) as admin:
                for name, seconds in admin.last_seen().items():
                    lost = seconds > SEEN_WITHIN
                    found["organisations"][name] = f"not seen for {seconds:.0f} s" if lost else "connected"
                    found["last_seen"][name] = round(seconds, 1)
                found["server"] = True
        except Exception as error:
            found["reason"] = type(error).__name__
        found["runs"] = self.run_states()
        return found

    def certificate_days(self) -> dict[str, float | None]:
        """Days until the certificate of each organisation expires; None if it has none that is valid."""
        register = Members.read(self.register)
        found = {name: register.valid(name) for name in self.config.organisations}
        return {name: None if one is None else round(one.days_left, 1) for name, one in found.items()}

    def run_states(self) -> list[dict[str, Any]]:
        """How far each run is."""
        queued = {ticket.run: number for number, ticket in enumerate(self.queue.waiting(), 1)}
        return [_run_status(path, queued.get(path.name)) for path in sorted(self.runs.iterdir()) if path.is_dir()]


def _check_format(path: Path, found: object) -> None:
    if found == 1:
        raise ConfigError(
            f"{path} is of an older version, where the founder held everybody's keys: make a new folder with `isthmus "
            "server init`; the folders in runs/ may be moved there"
        )
    if found != FORMAT:
        raise ConfigError(f"{path} has format {found}, this version reads {FORMAT}: use the version that wrote it")


class _Waiting:
    """What a run does while it waits for its turn: it says its number whenever that changes, and may be stopped."""

    def __init__(self, path: Path, check: Callable[[], None]) -> None:
        self._path, self._check, self._said = path, check, 0

    def __call__(self, number: int) -> None:
        check_stopped(self._path)
        self._check()
        if number != self._said:
            logger.warning("%s is number %d in the queue; Ctrl-C ends the waiting", self._path.name, number)
            self._said = number


def _run_status(path: Path, queued: int | None) -> dict[str, Any]:
    progress = read_progress(path)
    return {
        "run": path.name,
        "state": run_state(path) if queued is None else "queued",
        "queue": queued,
        "rounds": committed_rounds(path),
        "of": None if progress is None else progress.steps,
        "waiting_for": read_waiting(path),
        "missing": {} if progress is None else progress.absent,
    }


@contextlib.contextmanager
def _noting_the_end(path: Path) -> Iterator[None]:
    """A run that is given up is shown as failed, not as waiting, until somebody submits it again."""
    (path / FAILED).unlink(missing_ok=True)
    try:
        yield
    except RunError as error:
        replace(RunFailure.of(error), again=False).write(path)
        raise


@contextlib.contextmanager
def _submission_lock(path: Path) -> Iterator[None]:
    """Two processes that submit one run would abort each other's jobs."""
    with (path / ".submit").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"run {path.name} is submitted by another process already: wait for it, or stop it"
            ) from None
        yield
