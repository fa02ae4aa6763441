"""The server's side of one run: the handshake with the sites, then the rounds.

Runs in the server job. Independent of NVIDIA FLARE: sites are reached through a
:class:`~isthmus.deploy.handshake.Transport`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from isthmus.compiling import use_threads
from isthmus.data.own_dataset import SITE_TABLES
from isthmus.deploy.handshake import (
    BEGIN,
    END,
    KEYS,
    BeginRun,
    ClientFacts,
    EndReply,
    JoinReply,
    PeerKeys,
    SessionKeys,
    SignedHead,
    Site,
    Transport,
)
from isthmus.deploy.offer import check_schemas, owners_of
from isthmus.deploy.run_status import ProgressWriter, RunFailure, TakeBack
from isthmus.errors import ConfigError, ProtocolError, StorageError
from isthmus.experiments.config import Settings, settings_from_toml
from isthmus.experiments.contract import contract_of
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.model_package import MODELS, read_package
from isthmus.experiments.prediction import server_state
from isthmus.experiments.result import Described, versions
from isthmus.experiments.run import RunDriver
from isthmus.federation import codec
from isthmus.federation.engines.remote import RemoteEngine
from isthmus.federation.host import Answer, FrameKind
from isthmus.federation.interface import Failure, QuorumError, View
from isthmus.federation.ledger import PROTECTIONS, Sheet
from isthmus.federation.messages import SERVER, ClientId, PartyId
from isthmus.federation.party import Store
from isthmus.federation.roles import RoleTable
from isthmus.federation.script import PREDICTION
from isthmus.federation.session import Session
from isthmus.federation.wire import Frame, pack, unpack

HEADS = "heads.jsonl"
JOIN_TIMEOUT = 600.0
"""Seconds a site may take to load its data."""


class SitesEngine(RemoteEngine):
    """An engine whose clients are at sites. Sites keep their checkpoints and models themselves."""

    def __init__(
        self, places: Mapping[Site, Sequence[ClientId]], table: RoleTable, transport: Transport, run: str
    ) -> None:
        super().__init__(places, table)
        self._transport, self._run = transport, run

    def carry(
        self, kind: FrameKind, frames: Mapping[Site, Frame], timeout: float | None
    ) -> dict[Site, Frame | Failure]:
        requests = {site: pack(frame) for site, frame in frames.items()}
        replies = self._transport.request(self._run, kind, requests, timeout)
        return {site: self._read(replies[site]) for site in frames}

    def _read(self, reply: bytes | Failure) -> Frame | Failure:
        if isinstance(reply, Failure):
            return reply
        try:
            return unpack(reply, self._limits)
        except ProtocolError as error:
            return Failure("protocol", type(error).__name__, error)

    def revive(self) -> None:
        """A lost site returns with the next job, which the supervisor submits."""

    def keep_tags(self, store: Callable[[PartyId], Store]) -> None:
        """Sites store their own."""

    def close(self) -> None:
        """Nothing was started here."""

    @property
    def execution(self) -> Literal["each", "cohort"]:
        return "each"


def run_on_sites(path: Path, run: str, attempt: int, transport: Transport) -> None:
    """Start or continue a run and finish it. If it cannot be finished, the reason is written to the folder and
    raised.
    """
    folder = RunFolder.open(path)
    try:
        if folder.result() is not None:
            return
        settings = settings_from_toml(folder.config)
        use_threads(settings.run.threads)
        begin = BeginRun(run, folder.run_id, attempt, folder.config, versions(), known=newest_heads(path.parent))
        if settings.run.dataset == SITE_TABLES and not any(folder.ledger(0)):
            _prepare(replace(begin, stage="prepare"), settings, folder, transport)
        joined = _begin(begin, transport)
        clients = _clients(joined, settings)
        keep_heads(path, attempt, "join", {site: one.heads for site, one in joined.items()})
        view = _view(clients)
        _distribute_keys(run, joined, transport, contract_of(settings, view).hash)
        _write_sizes(path, clients)
        places = {site: tuple(sorted(one.clients or {})) for site, one in joined.items() if one.clients}
        engine = SitesEngine(places, settings.method.table, transport, run)
        if settings.run.predict is not None:
            _predict(begin, settings, folder, engine, view)
        else:
            described = Described(*next((one.dataset, one.source) for one in joined.values() if one.clients))
            samples = {client: facts.samples for client, facts in clients.items()}
            callbacks = [ProgressWriter(), TakeBack(lambda: driver.loop.checkpoint())]
            driver = RunDriver(settings, engine, view, samples, described, callbacks=callbacks)
            driver.play(folder, resumed=True)
        ended = transport.request(run, END, dict.fromkeys(places, pack((codec.encode(Answer()),))), None)
        keep_heads(path, attempt, "end", {site: _end_heads(reply) for site, reply in ended.items()})
    except BaseException as error:
        RunFailure.of(error).write(path)
        raise
    finally:
        folder.close()


def _predict(begin: BeginRun, settings: Settings, folder: RunFolder, engine: SitesEngine, view: View) -> None:
    """Models of an earlier run predict at the sites, with the messages their method needs; predictions stay there."""
    method, run = settings.method, settings.run
    own = folder.path.parent / str(run.predict) / MODELS / SERVER
    package = read_package(own) if own.is_dir() else None
    state = server_state(method, settings.method_config, run.seed, view, package)
    contract = contract_of(settings, view)
    session = Session(
        engine, method.table, seed=run.seed, incarnation=begin.attempt, secure=settings.secure, contract=contract
    )
    session.clock.begin(PREDICTION, 1, 1)
    if method.predict is not None:
        method.predict(state, session, settings.method_config)
    clients = [client for client, _ in engine.export(False)]
    entries, sheet = session.ledger.take(), Sheet()
    sheet.add([*folder.ledger(0), *entries])
    folder.append_round(1, entries, None)
    folder.write_json("disclosure.json", {"method": run.method, "rows": sheet.rows(), "protections": PROTECTIONS})
    sent = sum(entry.total for entry in entries)
    facts = {"kind": "predict", "method": run.method, "models": run.predict, "clients": clients, "bytes": sent}
    folder.write_json("result.json", facts | {"run_dir": str(folder.path), "versions": versions()})


def _prepare(begin: BeginRun, settings: Settings, folder: RunFolder, transport: Transport) -> None:
    """Owners of tables agree on scaling and on the edges between them, before the first round."""
    from isthmus.preparation import link_of
    from isthmus.preparation.rounds import TABLE, prepare_owners

    joined = _begin(begin, transport)
    check_schemas({site: one.schema or {} for site, one in joined.items()})
    contract = contract_of(settings, _view(_clients(joined, settings)))
    _distribute_keys(begin.run, joined, transport, contract.hash)
    places = {site: tuple(sorted(one.clients or {})) for site, one in joined.items() if one.clients}
    engine = SitesEngine(places, TABLE, transport, begin.run)
    run = settings.run
    session = Session(engine, TABLE, seed=run.seed, incarnation=begin.attempt, secure=run.secure_sum, contract=contract)
    prepare_owners(session, link_of(run.link, organisations=True), scale=run.predict is None)
    folder.append_round(0, session.ledger.take(), None)


def _begin(begin: BeginRun, transport: Transport) -> dict[Site, JoinReply]:
    """Every site loads its data, or replies why it does not take part."""
    request = pack((codec.encode(begin),))
    replies = transport.request(begin.run, BEGIN, dict.fromkeys(transport.sites, request), JOIN_TIMEOUT)
    lost = {site: reply for site, reply in replies.items() if isinstance(reply, Failure)}
    if lost:
        raise QuorumError("begin", lost, len(replies) - len(lost), len(replies))
    joined = {site: _join_reply(site, reply) for site, reply in replies.items() if isinstance(reply, bytes)}
    refusals = [f"{site}: {one.text}" for site, one in joined.items() if one.error]
    if refusals:
        full = all(one.error in ("", StorageError.__name__) for one in joined.values())
        raise (StorageError if full else ConfigError)("; ".join(refusals))
    return joined


def _join_reply(site: Site, reply: bytes) -> JoinReply:
    frame = unpack(reply)
    try:
        return codec.decode(frame[0], JoinReply)
    except ProtocolError:
        codec.decode(frame[0], Answer).check(site)  # the site could not read the request, and says why
        raise


def _clients(joined: Mapping[Site, JoinReply], settings: Settings) -> dict[ClientId, ClientFacts]:
    owners_of({site: tuple(one.clients or {}) for site, one in joined.items()})
    clients = {client: facts for one in joined.values() for client, facts in (one.clients or {}).items()}
    wanted = 1 if settings.method.pooled else settings.run.clients
    if len(clients) != wanted:
        raise ConfigError(
            f"the run is for {wanted} clients, but {len(clients)} joined ({', '.join(sorted(clients)) or 'none'}): "
            "start the missing organisations, or set clients"
        )
    return dict(sorted(clients.items()))


def _distribute_keys(run: str, joined: Mapping[Site, JoinReply], transport: Transport, contract: str) -> None:
    """Send every site the signed session keys of all parties, if all derived the contract of the server: they accept
    no keys that were signed under another.
    """
    for site, one in joined.items():
        if one.clients and one.contract != contract:
            raise ConfigError(
                f"{site} derives contract {one.contract[:16]} from these settings and the server {contract[:16]}: "
                "install the same version everywhere"
            )
    keys: dict[PartyId, SessionKeys] = {party: k for one in joined.values() for party, k in (one.keys or {}).items()}
    heads = {client: head for one in joined.values() for client, head in (one.heads or {}).items()}
    request = pack((codec.encode(PeerKeys(keys, heads)),))
    sites = [site for site, one in joined.items() if one.clients]
    replies = transport.request(run, KEYS, dict.fromkeys(sites, request), JOIN_TIMEOUT)
    for site, reply in replies.items():
        if isinstance(reply, Failure):
            raise QuorumError("keys", {site: reply}, len(replies) - 1, len(replies))
        codec.decode(unpack(reply)[0], Answer).check(site)


def _end_heads(reply: bytes | Failure) -> Mapping[str, SignedHead] | None:
    """The heads in a site's last reply; a site that is gone by then has none, and the run is finished anyway."""
    try:
        return None if isinstance(reply, Failure) else codec.decode(unpack(reply)[0], EndReply).heads
    except ProtocolError:
        return None


def keep_heads(path: Path, attempt: int, when: str, heads: Mapping[Site, Mapping[str, SignedHead] | None]) -> None:
    """Add the heads of the sites' audit chains to ``heads.jsonl`` of the run folder: with them an organisation, or
    anybody who holds its public key, can tell later whether its chain was cut or rewritten.
    """
    with (path / HEADS).open("a") as file:
        for site, signed in sorted(heads.items()):
            for client, head in sorted((signed or {}).items()):
                line = {"site": site, "client": client, "when": when, "attempt": attempt, "number": head.number}
                file.write(json.dumps(line | {"head": head.hash, "signature": head.signature.hex()}) + "\n")


def newest_heads(runs: Path) -> dict[str, str]:
    """The newest head of each client's audit chain in any run of this server."""
    found: dict[str, tuple[int, str]] = {}
    for file in runs.glob(f"*/{HEADS}"):
        for text in file.read_text().splitlines():
            line = json.loads(text)
            found[line["client"]] = max(found.get(line["client"], (0, "")), (line["number"], line["head"]))
    return {client: head for client, (_, head) in sorted(found.items())}


def _write_sizes(path: Path, clients: Mapping[ClientId, ClientFacts]) -> None:
    """Add the clients' sizes to ``scenario.json`` for the report: between organisations nobody else knows them."""
    file = path / "scenario.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    if "sizes" not in known and any(facts.samples for facts in clients.values()):
        file.write_text(json.dumps(known | {"sizes": {client: facts.samples for client, facts in clients.items()}}))


def _view(clients: Mapping[ClientId, ClientFacts]) -> View:
    first, *others = clients.values()
    alike = all((one.features, one.classes) == (first.features, first.classes) for one in others)
    task: Any = first.task
    return View(tuple(clients), first.features if alike else 1, first.classes if alike else 2, task=task, alike=alike)
