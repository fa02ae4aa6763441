"""What a site does with a request of the server: check it, load the site's own data, answer.

Runs in the client job. The site takes part only in runs its ``client.toml`` allows, builds only its own client's part
of the data, and hands it to a :class:`~isthmus.deploy.site_host.SiteHost`. Checkpoints and final models stay under
``state/<run>/``. Every answer is a frame. Of our own errors it holds the message, of other exceptions only the type:
their text could carry data across the trust boundary.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from isthmus.compiling import use_threads
from isthmus.data.graph_set import GraphSetData
from isthmus.data.tables.model import TablesModel
from isthmus.deploy.approval import SHORT, check_approved
from isthmus.deploy.audit_chain import END as ENDED
from isthmus.deploy.audit_chain import (
    MEET,
    MOST_REFUSALS,
    MOST_TEXT,
    ORDER,
    REFUSED,
    WENT_BACK,
    AuditChain,
    RunLog,
    run_key,
)
from isthmus.deploy.handshake import (
    BEGIN,
    END,
    KEYS,
    PROTOCOL,
    BeginRun,
    ClientFacts,
    EndReply,
    JoinReply,
    PeerKeys,
    SignedHead,
)
from isthmus.deploy.job_template import check_run_name
from isthmus.deploy.roster import OrganisationKeys, read_identity
from isthmus.deploy.site_contract import DerivedContract, privacy_of, site_view
from isthmus.deploy.site_host import Agreement, SiteHost
from isthmus.deploy.site_settings import SiteSettings
from isthmus.deploy.state_folder import open_state
from isthmus.deploy.trained_models import trained_package
from isthmus.errors import ConfigError, IsthmusError, ProtocolError
from isthmus.experiments.config import Settings, settings_from_toml
from isthmus.experiments.contract import check_versions
from isthmus.experiments.folder import NO_RUN, FileStore
from isthmus.experiments.model_package import MODELS, ModelPackage, Training, write_package
from isthmus.experiments.models import Samples, own_ids, predictions_of, write_predictions
from isthmus.experiments.prediction import restore_client
from isthmus.experiments.scenarios import parts_for, scenario_of, view_of
from isthmus.federation import codec
from isthmus.federation.codec import Limits
from isthmus.federation.engine import Export
from isthmus.federation.host import Answer, Order
from isthmus.federation.interface import View
from isthmus.federation.roles import RoleTable
from isthmus.federation.watch import WatchRules
from isthmus.federation.wire import Whole, pack, unpack
from isthmus.privacy.keys import Identity
from isthmus.seeds import Stream

logger = logging.getLogger(__name__)

LIMITS = Limits(max_bytes=2**30)
CHECKPOINTS, PREPARATION = "checkpoints", "preparation"
"""Folders of a run at a site."""
NO_TABLES: Mapping[str, TablesModel] = MappingProxyType({})
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
    log: RunLog


class SiteRuntime:
    """One site, for the duration of a job."""

    def __init__(self, settings: SiteSettings, limits: Limits = LIMITS) -> None:
        self.settings, self.limits = settings, limits
        self._open: _OpenRun | None = None
        self._chain: AuditChain | None = None
        self._refused_runs = 0

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
                return self._meet(self._open, codec.decode(_only(frame), PeerKeys, self.limits))
            return pack(self._open.host.handle(kind, frame))
        except Exception as error:
            return refuse(error)

    def _end(self) -> bytes:
        """The run has its result: checkpoints are not needed any more."""
        assert self._open is not None
        self._open.log.append(ENDED)
        shutil.rmtree(self.settings.state / self._open.begin.run / CHECKPOINTS, ignore_errors=True)
        clients, self._open = self._open.reply.clients or {}, None
        return pack((codec.encode(EndReply(self._heads(clients))),))

    def _meet(self, open_run: _OpenRun, peers: PeerKeys) -> bytes:
        """Accept the keys of all parties; the heads of their audit chains are kept in the own one."""
        if open_run.host.accept_keys(peers):
            heads = {client: [head.number, head.hash] for client, head in sorted((peers.heads or {}).items())}
            open_run.log.append(MEET, parties=sorted(peers.keys), heads=heads)
        return pack((codec.encode(Answer()),))

    @property
    def chain(self) -> AuditChain:
        """The audit chain of this site, verified when it is first needed."""
        if self._chain is None:
            self._chain = AuditChain(self.settings.state).open()
        return self._chain

    def _heads(self, clients: Iterable[str]) -> dict[str, SignedHead]:
        """The newest line of the chain, signed for each of these clients."""
        head, identity = self.chain.head, self._identity
        unsigned = SignedHead(head.number, head.hash, b"")
        return {
            client: replace(unsigned, signature=identity.sign_bytes(unsigned.signed(client)) if identity else b"")
            for client in clients
        }

    @property
    def _identity(self) -> Identity | None:
        return read_identity(self.settings.identity) if self.settings.identity is not None else None

    # -- begin a run -------------------------------------------------------------------------------

    def _begin(self, run: str, frame: Whole) -> JoinReply:
        begin = codec.decode(_only(frame), BeginRun, BEGIN_LIMITS)
        if begin.run != run or len(begin.run_id) != len(NO_RUN):
            raise ProtocolError("a run was begun under two names, or with an invalid id")
        if self._open is not None and self._open.begin == begin:
            return self._open.reply
        self._open = None
        try:
            open_state(self.settings.state)
        except IsthmusError as error:  # and nothing is written to it
            return JoinReply(error=type(error).__name__, text=str(error))
        try:
            if begin.protocol != PROTOCOL:
                raise ConfigError(
                    f"the server speaks protocol {begin.protocol} and this site {PROTOCOL}: install the same version"
                )
            check_versions(begin.versions)
            settings = settings_from_toml(begin.settings, own_files=self.settings.plugins)
            self.settings.check(settings)
            self._check_restored(begin)
            self._open = self._join(begin, settings)
        except IsthmusError as error:
            logger.warning("does not take part in %s: %s", run, error)
            self._note_refusal(begin, error)
            return JoinReply(error=type(error).__name__, text=str(error))
        return self._open.reply

    def _check_restored(self, begin: BeginRun) -> None:
        """Refuse to go on with a state folder that is older than what this site has shown the server before: it would
        have forgotten what it answered and spent.
        """
        mine = {str(self.settings.client)} if self.settings.share is None else set()
        for client, head in sorted((begin.known or {}).items()):
            if client in mine and self.chain.has_head(head) is None and not self.chain.has_accepted(head):
                raise ConfigError(
                    f"the audit chain of {client} ({self.chain.head.number} lines) does not hold the line "
                    f"{head[:SHORT]} that the hub has kept of it: its state was restored from an old backup. "
                    "Restore a newer one; if there is none, write down that it is lost: isthmus client restored "
                    f"{head[:SHORT]}"
                )

    def _note_refusal(self, begin: BeginRun, error: IsthmusError) -> None:
        self._refused_runs += 1
        if self._refused_runs <= MOST_REFUSALS:
            with contextlib.suppress(IsthmusError):  # a chain that cannot be written is what was refused for
                self.chain.append(REFUSED, run=begin.run, mark=begin.run_id.hex(), text=str(error)[:MOST_TEXT])

    def _join(self, begin: BeginRun, settings: Settings) -> _OpenRun:
        use_threads(settings.run.threads)
        folder = self.settings.state / begin.run
        if self.settings.tables is not None:
            from isthmus.deploy.site_tables import SiteTablesRun

            agreement = self._agree(begin, settings, site_view(self.settings, settings))  # before a table is read
            own = SiteTablesRun(self.settings, settings, folder, begin.run_id)
            data: Mapping[str, Any]
            if begin.stage == "prepare":
                data, table, config, store = own.tables_by_client, own.table, own.preparation, PREPARATION
            else:
                data, table, config, store = own.data(), settings.method.table, settings.method_config, CHECKPOINTS
            ids = own.sample_ids if begin.stage != "prepare" else None
            return self._open_run(begin, data, table, config, store, own.reply(), agreement, own.models, ids)
        scenario = scenario_of(settings)
        parts: dict[str, Any] = parts_for(settings, scenario)
        mine = {client: parts[client] for client in self.settings.clients_of(sorted(parts))}
        reply = JoinReply(
            clients={client: _facts(data, settings.secure) for client, data in mine.items()},
            dataset=scenario.dataset,
            source=scenario.source,
        )
        agreement = self._agree(begin, settings, view_of(parts))
        return self._open_run(begin, mine, settings.method.table, settings.method_config, CHECKPOINTS, reply, agreement)

    def _agree(self, begin: BeginRun, settings: Settings, view: View) -> Agreement:
        """What this site agrees to by joining, if its policy lets it: the contract it derived, what that spends of its
        budget, and what it remembers of the run. On return the run is in the audit chain.
        """
        policy, state, mark = self.settings.policy, self.settings.state, begin.run_id.hex()
        derived = DerivedContract.of(settings, view)
        contract = derived.contract
        policy.check(settings, contract, self.settings.path.name)
        if policy.approve:
            derived.keep(state)
            check_approved(state, self._identity, contract.hash)
        with self.chain.locked():
            known = self.chain.runs.get(run_key(begin.run, mark))
            if known is not None and known.contract != contract.hash:
                raise ConfigError(
                    f"{begin.run} was joined under contract {known.contract[:SHORT]}, and now it would be "
                    f"{contract.hash[:SHORT]}: a run keeps its contract, submit a new one"
                )
            if known is None and (state / begin.run / MODELS).exists():
                raise ConfigError(
                    f"this site holds models of another run called {begin.run}, which would be replaced: submit under "
                    "another name"
                )
            epsilon, delta = policy.spends(settings, derived.privacy, self.chain, begin.run, mark)
            log = RunLog(self.chain, begin.run, mark)
            spent = {"epsilon": epsilon, "delta": delta}
            log.join(stage=begin.stage, attempt=begin.attempt, contract=contract.hash, **spent)
        # A replay that asks for something else is answered under fresh noise: one release more than epsilon counts.
        private = derived.privacy is not None and derived.privacy.get("epsilon") is not None
        rules = WatchRules(policy.least_in_sum, 0 if private else policy.changes, policy.survivors)
        return Agreement(contract, rules, log, log.calls())

    def _open_run(
        self,
        begin: BeginRun,
        data: Mapping[str, Any],
        table: RoleTable,
        config: Any,
        store: str,
        reply: JoinReply,
        agreement: Agreement,
        tables: Mapping[str, TablesModel] = NO_TABLES,
        ids: Sequence[Any] | None = None,
    ) -> _OpenRun:
        folder = self.settings.state / begin.run
        settings = settings_from_toml(begin.settings, own_files=self.settings.plugins)

        def write(client: str, export: Export) -> None:
            if settings.run.predict is not None:
                package = trained_package(self.settings, settings.run.predict, client)
                _keep_predictions(package, export, data[client], ids, folder)
                return
            training = _training(settings, host.everybody, data[client], reply.source, tables)
            if self.settings.tables is not None:
                training = replace(training, split_seed=self.settings.tables.seed)
            write_package(folder / MODELS, client, export, data[client], training)

        host = SiteHost(
            data,
            table,
            config,
            Stream(settings.run.seed, ("party",)),
            # Keys are signed for all of this, so parties that agreed to something else have none in common: with other
            # settings at the others, a total would be the victim's part and what the server knows.
            run=f"{run_key(begin.run, begin.run_id.hex())}/{begin.stage}/{agreement.contract.hash}",
            identity=self._identity,
            organisations=OrganisationKeys.read(self.settings.roster) if self.settings.roster is not None else None,
            write_model=write,
            limits=self.limits,
            agreement=agreement,
        )
        if settings.run.predict is not None and begin.stage != "prepare":
            for client, held in data.items():
                package = trained_package(self.settings, settings.run.predict, client)
                check_same_training(package, settings)
                package.check(held)
                restore_client(host.party(client).client, package, held)
        host.keep_tags(lambda party: FileStore(folder / store / party.replace("/", "."), begin.run_id))
        log = agreement.log
        for name in ("commit", "select", "export", *WENT_BACK):
            host.orders[name] = _noted(host.orders[name], log, written=name in ("export", *WENT_BACK))
        agreed = agreement.contract.hash
        reply = replace(reply, keys=host.session_keys(), heads=self._heads(reply.clients or {}), contract=agreed)
        return _OpenRun(begin, host, reply, log)


def _noted(operation: Callable[[Order], Answer], log: RunLog, *, written: bool) -> Callable[[Order], Answer]:
    """An operation of the job that answers for the run; some are written to the audit chain first."""

    def noted(order: Order) -> Answer:
        if written:
            log.append(ORDER, name=order.name, step=order.step)
        else:
            log.check()
        return operation(order)

    return noted


def _keep_predictions(
    package: ModelPackage, export: Export, data: Any, ids: Sequence[Any] | None, folder: Path
) -> None:
    """What the model says of this organisation's samples, for it alone."""
    assert export.logits is not None
    found = predictions_of(package, export.logits, Samples(data, own_ids(data) if ids is None else ids))
    write_predictions({package.client: found}, folder / "predictions.csv")


def check_same_training(package: ModelPackage, settings: Settings) -> None:
    """Refuse a prediction with other settings than those of the training."""
    wanted = replace(settings, run=replace(settings.run, predict=None))
    if package.settings.to_toml() != wanted.to_toml():
        raise ConfigError(f"the run {settings.run.predict} had other settings here than this prediction names")


def _training(
    settings: Settings, clients: tuple[str, ...], data: Any, source: str, tables: Mapping[str, TablesModel]
) -> Training:
    """What this organisation knows of the run by itself."""
    graphs = isinstance(data, GraphSetData)
    view = View(clients, data.num_features, data.num_classes, task="graph" if graphs else "node")
    return Training(settings, clients, source, privacy_of(settings, view), tables)


def _facts(data: Any, secure: bool) -> ClientFacts:
    graphs = isinstance(data, GraphSetData)
    samples = data.num_graphs if graphs else data.num_nodes
    return ClientFacts(data.num_features, data.num_classes, 0 if secure else samples, "graph" if graphs else "node")


def _only(frame: Whole) -> bytes:
    if len(frame) != 1:
        raise ProtocolError("malformed request: it must be one part")
    return bytes(frame[0])
