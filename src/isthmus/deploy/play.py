"""A run, played by the server's part of a job. Nothing of NVIDIA FLARE is known here: sites are reached through a
`talk.Carrier`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from isthmus.deploy.handshake import BEGIN, END, MEET, Begin, Carrier, Client, Joined, Keys, Meet, Site
from isthmus.errors import ConfigError, DataError, IsthmusError, ProtocolError, RunError
from isthmus.experiments.callbacks import Callback, Progress
from isthmus.experiments.config import Settings, settings_from_toml
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.result import Described, versions
from isthmus.experiments.round_loop import RECOVERABLE
from isthmus.experiments.run import RunDriver
from isthmus.federation import codec
from isthmus.federation.engines.remote import RemoteEngine
from isthmus.federation.host import Answer, FrameKind
from isthmus.federation.interface import Failure, QuorumError, View
from isthmus.federation.messages import ClientId, PartyId
from isthmus.federation.party import Store
from isthmus.federation.roles import RoleTable
from isthmus.federation.wire import Frame, pack, unpack

logger = logging.getLogger(__name__)

RUNS = "ISTHMUS_RUNS"
"""Environment variable of the server's processes: the folder that holds the run folders."""
BEAT, PROGRESS, FAILED = ".beat", "progress.json", "failed.json"
JOIN_SECONDS = 600.0
"""How long a site may take to load its data."""
ERRORS: dict[str, type[IsthmusError]] = {
    kind.__name__: kind for kind in (ConfigError, DataError, RunError, ProtocolError)
}


class SitesEngine(RemoteEngine):
    """An engine whose places are organisations. They keep their tags and models themselves."""

    def __init__(self, places: Mapping[Site, Sequence[ClientId]], table: RoleTable, carrier: Carrier, run: str) -> None:
        super().__init__(places, table)
        self._carrier, self._run = carrier, run

    def carry(
        self, kind: FrameKind, frames: Mapping[Site, Frame], timeout: float | None
    ) -> dict[Site, Frame | Failure]:
        found = self._carrier.ask(self._run, kind, {site: pack(frame) for site, frame in frames.items()}, timeout)
        return {site: self._read(found[site]) for site in frames}

    def _read(self, answer: bytes | Failure) -> Frame | Failure:
        if isinstance(answer, Failure):
            return answer
        try:
            return unpack(answer, self._limits)
        except ProtocolError as error:
            return Failure("protocol", type(error).__name__, error)

    def revive(self) -> None:
        """A lost site comes back with the next job, which the supervisor submits."""

    def keep_tags(self, store: Callable[[PartyId], Store]) -> None:
        """Sites have a place for them."""

    def close(self) -> None:
        """Nothing was started here."""

    @property
    def execution(self) -> Literal["each", "cohort"]:
        return "each"


@dataclass(frozen=True)
class Failed:
    """Why a run stopped, and whether another attempt may help."""

    kind: str
    text: str
    again: bool

    @staticmethod
    def path(folder: Path) -> Path:
        return folder / FAILED

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        kinds = {failure.kind for failure in error.failures.values()} if isinstance(error, QuorumError) else set()
        lost = bool(kinds & set(RECOVERABLE)) or not isinstance(error, IsthmusError)
        name = type(error).__name__ if type(error).__name__ in ERRORS else "RunError"
        text = str(error) if isinstance(error, IsthmusError) else f"{type(error).__name__}: {error}"
        return cls(name, text, lost)

    def error(self) -> IsthmusError:
        return ERRORS.get(self.kind, RunError)(self.text)

    def write(self, folder: Path) -> None:
        self.path(folder).write_text(json.dumps(asdict(self)))


def read_failure(folder: Path) -> Failed | None:
    """Why the last attempt stopped, if it said so."""
    try:
        return Failed(**json.loads(Failed.path(folder).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def committed_steps(folder: Path) -> int:
    """How many rounds a run folder holds."""
    return sum(path.stem.isdecimal() for path in (folder / "ledger").glob("*.jsonl"))


class Told(Callback):
    """Leaves each round's progress in the run folder, for whoever follows from outside."""

    def on_start(self, settings: Settings, folder: Path, step: int, steps: int) -> None:
        self._folder = folder

    def on_round(self, progress: Progress) -> None:
        temporary = self._folder / f".{PROGRESS}.tmp"
        temporary.write_text(json.dumps(asdict(progress)))
        temporary.rename(self._folder / PROGRESS)


def play_run(path: Path, run: str, attempt: int, carrier: Carrier, callbacks: Sequence[Callback] = ()) -> None:
    """Play a run to its end from wherever it stands. Why it cannot is left in the folder, and raised."""
    folder = RunFolder.open(path)
    try:
        if folder.result() is not None:
            return
        settings = settings_from_toml(folder.config)
        torch.set_num_threads(settings.run.threads)
        joined = _begin(Begin(run, folder.run_id, attempt, folder.config, versions()), carrier)
        clients = _clients(joined, settings)
        _introduce(run, joined, carrier)
        _note_sizes(path, clients)
        places = {site: tuple(sorted(one.clients or {})) for site, one in joined.items() if one.clients}
        engine = SitesEngine(places, settings.method.table, carrier, run)
        described = Described(*next((one.dataset, one.source) for one in joined.values() if one.clients))
        nodes = {client: facts.samples for client, facts in clients.items()}
        play = RunDriver(settings, engine, _view(clients), nodes, described, callbacks=[Told(), *callbacks])
        play.play(folder, resumed=True)
        carrier.ask(run, END, dict.fromkeys(places, pack((codec.encode(Answer()),))), None)
    except BaseException as error:
        Failed.of(error).write(path)
        raise
    finally:
        folder.close()


def _begin(begin: Begin, carrier: Carrier) -> dict[Site, Joined]:
    """Every site loads its part, or says why it does not take part."""
    answers = carrier.ask(begin.run, BEGIN, dict.fromkeys(carrier.sites, pack((codec.encode(begin),))), JOIN_SECONDS)
    lost = {site: answer for site, answer in answers.items() if isinstance(answer, Failure)}
    if lost:
        raise QuorumError("begin", lost, len(answers) - len(lost), len(answers))
    joined = {site: _joined(site, answer) for site, answer in answers.items() if isinstance(answer, bytes)}
    refusals = [f"{site}: {one.text}" for site, one in joined.items() if one.error]
    if refusals:
        raise ConfigError("; ".join(refusals))
    return joined


def _joined(site: Site, answer: bytes) -> Joined:
    frame = unpack(answer)
    try:
        return codec.decode(frame[0], Joined)
    except ProtocolError:
        codec.decode(frame[0], Answer).check(site)  # it could not even read the request, and says why
        raise


def _clients(joined: Mapping[Site, Joined], settings: Settings) -> dict[ClientId, Client]:
    owners: dict[ClientId, Site] = {}
    clients: dict[ClientId, Client] = {}
    for site, one in joined.items():
        for client, facts in (one.clients or {}).items():
            if client in owners:
                raise ConfigError(
                    f"{owners[client]} and {site} both say they are {client}: one of them must change its client.toml"
                )
            owners[client], clients[client] = site, facts
    wanted = 1 if settings.method.pooled else settings.run.clients
    if len(clients) != wanted:
        raise ConfigError(
            f"the run is for {wanted} clients, but {len(clients)} joined ({', '.join(sorted(clients)) or 'none'}): "
            "start the missing organisations, or set clients"
        )
    return dict(sorted(clients.items()))


def _note_sizes(path: Path, clients: Mapping[ClientId, Client]) -> None:
    """Where nobody saw all data, the report is told at least how much each client has."""
    file = path / "scenario.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    if "sizes" not in known:
        file.write_text(json.dumps(known | {"sizes": {client: facts.samples for client, facts in clients.items()}}))


def _view(clients: Mapping[ClientId, Client]) -> View:
    first, *others = clients.values()
    alike = all((one.features, one.classes) == (first.features, first.classes) for one in others)
    task: Any = first.task
    return View(tuple(clients), first.features if alike else 1, first.classes if alike else 2, task=task, alike=alike)


def _introduce(run: str, joined: Mapping[Site, Joined], carrier: Carrier) -> None:
    """Bring everybody's signed keys round."""
    keys: dict[PartyId, Keys] = {party: pair for one in joined.values() for party, pair in (one.keys or {}).items()}
    sites = [site for site, one in joined.items() if one.clients]
    meet = pack((codec.encode(Meet(keys)),))
    answers = carrier.ask(run, MEET, dict.fromkeys(sites, meet), JOIN_SECONDS)
    for site, answer in answers.items():
        if isinstance(answer, Failure):
            raise QuorumError("meet", {site: answer}, len(answers) - 1, len(answers))
        codec.decode(unpack(answer)[0], Answer).check(site)
