"""What a site does with a request of the server: check it, load the site's own data, answer.

Runs in the client job. The site takes part only in runs its ``client.toml`` allows, builds only its own client's part
of the data, and hands it to a :class:`~isthmus.deploy.site_host.SiteHost`. Checkpoints and final models stay under
``state/<run>/``. Every answer is a frame. Of our own errors it holds the message, of other exceptions only the type:
their text could carry data across the trust boundary.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from isthmus.data.graph_set import GraphSetData
from isthmus.deploy.handshake import BEGIN, END, KEYS, BeginRun, ClientFacts, JoinReply, PeerKeys
from isthmus.deploy.job_template import check_run_name
from isthmus.deploy.roster import OrganisationKeys, read_identity
from isthmus.deploy.site_host import SiteHost
from isthmus.deploy.site_settings import SiteSettings
from isthmus.errors import ConfigError, IsthmusError, ProtocolError
from isthmus.experiments.config import Settings, settings_from_toml
from isthmus.experiments.folder import NO_RUN, FileStore, write_model
from isthmus.experiments.result import versions
from isthmus.experiments.scenarios import parts_for, scenario_of
from isthmus.federation import codec
from isthmus.federation.codec import Limits
from isthmus.federation.host import Answer
from isthmus.federation.roles import RoleTable
from isthmus.federation.wire import Frame, pack, unpack
from isthmus.seeds import Stream

logger = logging.getLogger(__name__)

LIMITS = Limits(max_bytes=2**30)
CHECKPOINTS, PREPARATION = "checkpoints", "preparation"
"""Folders of a run at a site."""
BEGIN_LIMITS = Limits(max_bytes=2**22, max_tensors=100)


def refuse(error: Exception) -> bytes:
    """The answer to a request that cannot be read or is not allowed."""
    logger.warning("refused: %s", error)
    kind = type(error).__name__
    answer = (
        Answer(kind, str(error))
        if isinstance(error, IsthmusError)
        else Answer("RunError", f"a site failed ({kind}): see its log")
    )
    return pack((codec.encode(answer),))


@dataclass
class _OpenRun:
    """The run a site takes part in."""

    begin: BeginRun
    host: SiteHost
    reply: JoinReply


class SiteRuntime:
    """One site, for the duration of a job."""

    def __init__(self, settings: SiteSettings, limits: Limits = LIMITS) -> None:
        self.settings, self.limits = settings, limits
        self._open: _OpenRun | None = None

    def handle(self, run: object, kind: object, data: object) -> bytes:
        """Answer a request. Never raises."""
        try:
            if type(run) is not str or type(kind) is not str or type(data) is not bytes:
                raise ProtocolError("a request is a run, a kind and bytes")
            check_run_name(run)
            if kind == BEGIN:
                return pack((codec.encode(self._begin(run, unpack(data, BEGIN_LIMITS))),))
            if self._open is None or run != self._open.begin.run:
                raise ProtocolError(f"run {run!r} is not open here: begin it first")
            frame = unpack(data, self.limits)
            if kind == END:
                return self._end()
            if kind == KEYS:
                self._open.host.accept_keys(codec.decode(_only(frame), PeerKeys, self.limits))
                return pack((codec.encode(Answer()),))
            return pack(self._open.host.handle(kind, frame))
        except Exception as error:
            return refuse(error)

    def _end(self) -> bytes:
        """The run has its result: checkpoints are not needed any more."""
        assert self._open is not None
        shutil.rmtree(self.settings.state / self._open.begin.run / CHECKPOINTS, ignore_errors=True)
        self._open = None
        return pack((codec.encode(Answer()),))

    # -- begin a run -------------------------------------------------------------------------------

    def _begin(self, run: str, frame: Frame) -> JoinReply:
        begin = codec.decode(_only(frame), BeginRun, BEGIN_LIMITS)
        if begin.run != run or len(begin.run_id) != len(NO_RUN):
            raise ProtocolError("a run was begun under two names, or with an invalid id")
        if self._open is not None and self._open.begin == begin:
            return self._open.reply
        self._open = None
        try:
            self._check_versions(begin.versions)
            settings = settings_from_toml(begin.settings, own_files=self.settings.plugins)
            self.settings.check(settings)
            self._open = self._join(begin, settings)
        except IsthmusError as error:
            logger.warning("does not take part in %s: %s", run, error)
            return JoinReply(error=type(error).__name__, text=str(error))
        return self._open.reply

    def _check_versions(self, server: Mapping[str, str]) -> None:
        own = versions()
        for package in sorted(server.keys() | own.keys()):
            if _release(package, server.get(package)) != _release(package, own.get(package)):
                here, there = own.get(package, "none"), server.get(package, "none")
                raise ConfigError(f"{package} is {here} here and {there} at the server: install the same version")

    def _join(self, begin: BeginRun, settings: Settings) -> _OpenRun:
        torch.set_num_threads(settings.run.threads)
        folder = self.settings.state / begin.run
        if self.settings.tables is not None:
            from isthmus.deploy.site_tables import SiteTablesRun

            own = SiteTablesRun(self.settings, settings, folder, begin.run_id)
            data: Mapping[str, Any]
            if begin.stage == "prepare":
                data, table, config, store = own.tables_by_client, own.table, own.preparation, PREPARATION
            else:
                data, table, config, store = own.data(), settings.method.table, settings.method_config, CHECKPOINTS
            return self._open_run(begin, data, table, config, store, own.reply())
        scenario = scenario_of(settings)
        parts: dict[str, Any] = parts_for(settings, scenario)
        mine = {client: parts[client] for client in self.settings.clients_of(sorted(parts))}
        reply = JoinReply(
            clients={client: _facts(data) for client, data in mine.items()},
            dataset=scenario.dataset,
            source=scenario.source,
        )
        return self._open_run(begin, mine, settings.method.table, settings.method_config, CHECKPOINTS, reply)

    def _open_run(
        self, begin: BeginRun, data: Mapping[str, Any], table: RoleTable, config: Any, store: str, reply: JoinReply
    ) -> _OpenRun:
        folder = self.settings.state / begin.run
        settings = settings_from_toml(begin.settings, own_files=self.settings.plugins)
        host = SiteHost(
            data,
            table,
            config,
            Stream(settings.run.seed, ("party",)),
            run=begin.run,
            identity=read_identity(self.settings.identity) if self.settings.identity is not None else None,
            organisations=OrganisationKeys.read(self.settings.roster) if self.settings.roster is not None else None,
            write_model=lambda client, weights: write_model(folder, client, weights),
            limits=self.limits,
        )
        host.keep_tags(lambda party: FileStore(folder / store / party.replace("/", "."), begin.run_id))
        return _OpenRun(begin, host, replace(reply, keys=host.session_keys()))


def _release(package: str, version: str | None) -> str | None:
    """The part of a version that must be equal: of Python major and minor, of packages all but the build
    (``2.13.0+cpu`` is ``2.13.0``).
    """
    if version is None:
        return None
    return ".".join(version.split(".")[:2]) if package == "python" else version.partition("+")[0]


def _facts(data: Any) -> ClientFacts:
    graphs = isinstance(data, GraphSetData)
    return ClientFacts(
        data.num_features,
        data.num_classes,
        data.num_graphs if graphs else data.num_nodes,
        "graph" if graphs else "node",
    )


def _only(frame: Frame) -> bytes:
    if len(frame) != 1:
        raise ProtocolError("malformed request: it must be one part")
    return bytes(frame[0])
