"""A server that asks real sites whatever it likes: four organisations with signed keys, driven call by call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from in_process_sites import InProcessTransport, organisation, settings_of

from isthmus.deploy.handshake import BEGIN, BeginRun, JoinReply, Site, Transport
from isthmus.deploy.server_run import SitesEngine, _distribute_keys
from isthmus.deploy.site_runtime import SiteRuntime
from isthmus.experiments.config import Settings
from isthmus.experiments.contract import contract_of
from isthmus.experiments.result import versions
from isthmus.experiments.scenarios import parts_for, scenario_of, view_of
from isthmus.federation import codec
from isthmus.federation.interface import Failure
from isthmus.federation.messages import Message, PartyId
from isthmus.federation.party import Invocation, Outcome, Party, Turn
from isthmus.federation.secure import Masked, MaskOrder, unmask
from isthmus.federation.session import Session
from isthmus.federation.wire import pack, unpack
from isthmus.privacy.masks import SumRoster, SumTag

CLIENTS = 4
RUN = "r"


class CallsByHand:
    """A server whose sites, wherever they are, joined a run with these settings; what it asks then is up to a test."""

    def __init__(self, settings: Settings, transport: Transport, run: str = RUN) -> None:
        self.settings, self.transport, self.run = settings, transport, run
        self.scenario = scenario_of(settings)
        self.parts = parts_for(settings, self.scenario)
        self.contract = contract_of(settings, view_of(self.parts))
        self.attempt = -1
        self.begin()

    def begin(self) -> None:
        """Begin the run, or begin it again."""
        self.attempt += 1
        joined = join(self.transport, self.run, self.settings, self.attempt)
        assert not any(one.error for one in joined.values()), joined
        _distribute_keys(self.run, joined, self.transport, self.contract.hash)
        self.keys = {party: keys.sums for one in joined.values() for party, keys in (one.keys or {}).items()}
        places = {site: tuple(one.clients or {}) for site, one in joined.items()}
        self.engine = self.open_engine(places)
        self.session = self.open_session(0)

    def open_engine(self, places: Mapping[Site, tuple[str, ...]]) -> SitesEngine:
        return SitesEngine(places, self.settings.method.table, self.transport, self.run)

    def open_session(self, incarnation: int) -> Session:
        """An honest server's verbs; it does not check its own calls."""
        table = self.settings.method.table
        return Session(self.engine, table, incarnation=incarnation, secure=self.settings.secure)

    # -- calls by hand -----------------------------------------------------------------------------

    def calls(
        self,
        handler: str,
        turn: Turn,
        requests: Mapping[PartyId, Message | None],
        *,
        roster: Iterable[PartyId] | None = None,
        sequence: int = 1,
        **tag: Any,
    ) -> list[Invocation]:
        """Masked calls, one per party asked, with an order that may say whatever the test wants."""
        parties = tuple(requests if roster is None else roster)
        first = next(iter(requests.values()))
        place = SumTag("server", turn.phase, turn.round, sequence, handler, turn.incarnation)
        digest = "" if first is None else codec.digest(first)
        order = MaskOrder(
            SumRoster({party: self.keys[party] for party in parties}), replace(place, **{"request": digest, **tag})
        )
        return [
            Invocation(party, "client", handler, turn, sequence, argument=request, mask=order)
            for party, request in requests.items()
        ]

    def ask(self, calls: Iterable[Invocation]) -> dict[PartyId, Outcome]:
        outcome = self.engine.dispatch(list(calls), None)
        return dict(outcome)

    def total(self, calls: list[Invocation]) -> Any:
        """What the server reads from masked answers; raises where a party refused or masks are left."""
        outcome = self.ask(calls)
        assert calls[0].mask is not None
        reply = self.settings.method.table.signature("client", calls[0].handler).reply
        assert reply is not None
        masked = {party: one for party, one in outcome.items() if isinstance(one, Masked)}
        refused = {party: one for party, one in outcome.items() if isinstance(one, Failure)}
        if refused:
            raise Refused(refused)
        return unmask(masked, calls[0].mask, reply)


def join(
    transport: Transport, run: str, settings: Settings, attempt: int = 0, mark: bytes = b"0" * 16
) -> dict[Site, JoinReply]:
    """What the sites say when a run is begun."""
    request = pack((codec.encode(BeginRun(run, mark, attempt, settings.to_toml(), versions())),))
    replies = transport.request(run, BEGIN, dict.fromkeys(transport.sites, request), None)
    return {site: codec.decode(unpack(_bytes(reply))[0], JoinReply) for site, reply in replies.items()}


class HostileServer(CallsByHand):
    """Such a server of sites in this process."""

    transport: InProcessTransport

    def __init__(self, folder: Path, settings: Settings, policy: str = "") -> None:
        roster, clients = folder / "roster.toml", settings.run.clients or CLIENTS
        sites = {
            f"bank-{number}": SiteRuntime(organisation(folder, number, roster, policy, clients=clients))
            for number in range(clients)
        }
        super().__init__(settings, InProcessTransport(sites))

    # -- inside the sites, for the tests' own eyes ---------------------------------------------------

    def party(self, client: PartyId) -> Party:
        for runtime in self.transport.runtimes.values():
            open_run: Any = runtime._open
            for group in open_run.host._parties.values():
                if client in group:
                    found: Party = group[client]
                    return found
        raise KeyError(client)

    def without_contracts(self) -> None:
        """Let the parties answer whatever they are asked."""
        for client in self.parts:
            self.party(client).watch = None
            sums: Any = self.party(client)._sums
            sums.guard = Anybody()


class Anybody:
    """A guard that lets everything through."""

    def admit(self, *_: object) -> None: ...


class Refused(Exception):
    def __init__(self, failures: Mapping[PartyId, Failure]) -> None:
        super().__init__(", ".join(sorted(failures)))
        self.failures = failures


def _bytes(reply: bytes | Failure) -> bytes:
    assert isinstance(reply, bytes)
    return reply


def hostile_settings(method: str = "fedavg", **more: object) -> Settings:
    return settings_of(method, **{"clients": CLIENTS, "secure_sum": True, "rounds": 3, **more})
