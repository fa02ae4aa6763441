"""The parties of one organisation: a :class:`~isthmus.federation.host.PartyHost` whose mail leaves sealed.

Runs in the client job. Mail to another party passes through the server, which must not read it. Each party here has a
session key signed by its organisation's long-term key; the keys of the others are checked against the roster before
anything is encrypted for them. The same holds for the keys of secure sums: an order to mask for parties whose keys
nobody signed is refused, or the server could impersonate all the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isthmus.deploy.audit_chain import RunLog
from isthmus.deploy.handshake import PeerKeys, SessionKeys
from isthmus.deploy.roster import OrganisationKeys
from isthmus.errors import ProtocolError, unknown
from isthmus.federation import codec
from isthmus.federation.codec import LIMITS, Limits
from isthmus.federation.contract import Contract
from isthmus.federation.engine import Export
from isthmus.federation.host import Answer, PartyHost
from isthmus.federation.interface import Failure
from isthmus.federation.messages import SERVER, ClientId, Message, PartyId, client_of
from isthmus.federation.party import Invocation, Outcome, Parcel, Turn
from isthmus.federation.roles import RoleTable
from isthmus.federation.secure import Masked, MaskOrder, Sealed
from isthmus.federation.watch import AdmittedCall, RolledBack, Told, Watch, WatchRules
from isthmus.federation.wire import Frame
from isthmus.privacy.keys import Identity, Roster, SignedKey, signed_by
from isthmus.privacy.masks import SumRoster
from isthmus.privacy.sealed_message import Envelope, Header, Mailbox
from isthmus.seeds import Stream

MAIL, SUMS = "mail", "sums"


@dataclass(frozen=True)
class Agreement:
    """What a site has agreed to when it joins a run, and what it remembers of the run.

    Args:
        contract: Derived by the site itself.
        rules: The site's own, for every run.
        log: Where every call is written before its handler runs.
        before: Calls of this run that were admitted before it was begun now, and where it went back.
    """

    contract: Contract
    rules: WatchRules
    log: RunLog
    before: Sequence[AdmittedCall | RolledBack] = ()


class SiteHost(PartyHost):
    """The parties of an organisation.

    Args:
        run: What session keys are signed for, so that they are not valid in another run, or under another contract.
        identity, organisations: Long-term key and roster; without them keys are not signed, which is for simulations on
            one machine.
        write_model: Stores what a client ends with; only the size of its model is sent.
        agreement: By which calls are refused; without one, every marked handler may be called (tests).
    """

    def __init__(
        self,
        parts: Mapping[ClientId, Any],
        table: RoleTable,
        config: Any,
        stream: Stream,
        *,
        run: str,
        identity: Identity | None,
        organisations: OrganisationKeys | None,
        write_model: Callable[[ClientId, Export], None],
        limits: Limits = LIMITS,
        agreement: Agreement | None = None,
    ) -> None:
        super().__init__(parts, table, config, stream, limits=limits)
        self.agreement = agreement
        self._accepted: PeerKeys | None = None
        self._run, self._identity, self._organisations = run, identity, organisations
        self._write_model = write_model
        self._sum_keys: dict[PartyId, bytes] = {}
        self._rosters: dict[tuple[tuple[PartyId, ...], int, int], SumRoster] = {}
        self._mailboxes: dict[PartyId, Mailbox] = {}
        self._turn: Turn | None = None
        self._opened_mail: dict[tuple[PartyId, int], tuple[tuple[Parcel, ...], tuple[Parcel, ...]]] = {}
        self._has_keys = False

    def handle(self, kind: str, frame: Frame) -> Frame:
        if self.agreement is not None and not self._has_keys:  # until then nobody watches over states either
            return (codec.encode(Answer(ProtocolError.__name__, "the parties have not exchanged keys yet")),)
        return super().handle(kind, frame)

    # -- keys --------------------------------------------------------------------------------------

    def session_keys(self) -> dict[PartyId, SessionKeys]:
        """Make signed session keys for all parties here."""
        found = {}
        for party in self._all():
            box = Mailbox(party.name, self._purpose(MAIL), self._identity)
            self._mailboxes[party.name] = box
            mail, sums = box.announce(), self._signed(party.name, party.sum_key())
            found[party.name] = SessionKeys(mail.key, mail.signature, sums.key, sums.signature)
        return found

    def accept_keys(self, peers: PeerKeys) -> bool:
        """Accept the other parties' session keys, once; one that its organisation did not sign for this run and
        contract is refused. Returns whether they are new.
        """
        if self._accepted is not None and self.agreement is not None:
            if peers != self._accepted:
                raise ProtocolError("the parties have exchanged keys already, and these are others")
            return False
        own = self._mailboxes or self.session_keys()
        for party, keys in sorted(peers.keys.items()):
            if party in own:
                continue
            mail = SignedKey(party, self._purpose(MAIL), keys.mail, keys.mail_signature)
            self._sum_keys[party] = self._verified(
                SignedKey(party, self._purpose(SUMS), keys.sums, keys.sums_signature)
            )
            self._verified(mail)
            self._check_head(party, peers)
            for box in self._mailboxes.values():
                box.meet(mail)
        for box in self._mailboxes.values():  # parties of one site write to each other through the server too
            for other in self._mailboxes.values():
                if other is not box:
                    box.meet(other.announce())
        self._sum_keys |= {party.name: party.sum_key() for party in self._all()}
        if self.agreement is not None:
            self._settle(self.agreement, sorted({client_of(party) for party in {*peers.keys, *own}}))
        self._accepted, self._has_keys = peers, True
        return True

    def _settle(self, agreement: Agreement, clients: Sequence[ClientId]) -> None:
        """From now on every party here watches over the contract, if these are the clients it is about."""
        contract = agreement.contract
        if set(clients) != set(contract.clients):
            raise ProtocolError(
                f"keys came of {len(clients)} clients ({', '.join(clients)}), but the run is one of "
                f"{', '.join(contract.clients)}"
            )
        told: dict[ClientId, Told] = {}
        given: Any = {"full": True, "rules": agreement.rules, "log": agreement.log}
        for party in self._all():
            shared = told.setdefault(client_of(party.name), {})
            watch = Watch(contract, party.name, party.role, told=shared, **given)
            watch.restore(agreement.before)
            party.guard_by(watch)

    def _check_head(self, party: PartyId, peers: PeerKeys) -> None:
        """A head is worth keeping only if the organisation signed it."""
        head = (peers.heads or {}).get(party)
        if head is None or self._organisations is None:
            return
        if not signed_by(self._organisations.key_of(party), head.signed(party), head.signature):
            raise ProtocolError(f"{party} did not sign the head of its audit chain: it was replaced on the way")

    def _purpose(self, what: str) -> str:
        return f"{self._run}/{what}"

    def _signed(self, party: PartyId, key: bytes) -> SignedKey:
        if self._identity is None:
            return SignedKey(party, self._purpose(SUMS), key, b"")
        return self._identity.sign(party, self._purpose(SUMS), key)

    def _verified(self, signed: SignedKey) -> bytes:
        if self._organisations is None:
            return signed.key
        return Roster(signed.run, {signed.party: self._organisations.key_of(signed.party)}).verify(signed)

    @property
    def everybody(self) -> tuple[ClientId, ...]:
        """All clients of the run, whose keys were accepted."""
        return tuple(sorted({client_of(party) for party in self._sum_keys}))

    # -- mail --------------------------------------------------------------------------------------

    def admit(self, calls: list[Invocation]) -> list[Invocation]:
        """Calls with their mail opened; an order to mask for unknown keys is refused."""
        opened = []
        for call in calls:
            try:
                opened.append(self._opened_call(call))
            except ProtocolError as error:
                if self.agreement is not None:
                    self.agreement.log.refused(call.party, call.handler, str(error))
                raise
        return opened

    def _opened_call(self, call: Invocation) -> Invocation:
        if call.mask is not None:
            call = replace(call, mask=self._own_order(call.mask))
        if call.mail is not None and call.mail.orders is not None:
            orders = {receiver: self._own_order(order) for receiver, order in call.mail.orders.items()}
            call = replace(call, mail=replace(call.mail, orders=orders))
        if call.parcels is None:
            return call
        watch = self._parties[call.role][call.party].watch
        if watch is not None:
            watch.check(call)  # mail can be opened only once: not by a call that is refused
        return replace(call, parcels=self._open_all(call, call.parcels))

    def _open_all(self, call: Invocation, parcels: tuple[Parcel, ...]) -> tuple[Parcel, ...]:
        """Mail can be opened only once. A call whose answer was lost brings the same mail again, so opened mail is kept
        for its round.
        """
        if self._turn != call.turn:
            self._turn = call.turn
            self._opened_mail.clear()
        key = call.party, call.sequence
        if key not in self._opened_mail or self._opened_mail[key][0] != parcels:
            self._opened_mail[key] = parcels, tuple(self._open(call, parcel) for parcel in parcels)
        return self._opened_mail[key][1]

    def release(self, outcomes: Mapping[PartyId, Outcome], calls: list[Invocation]) -> dict[PartyId, Outcome]:
        """Outcomes with their mail sealed; a message for the server is not mail."""
        by_party = {call.party: call for call in calls}
        return {party: self._seal_all(by_party[party], outcome) for party, outcome in outcomes.items()}

    def _own_order(self, order: MaskOrder) -> MaskOrder:
        """The order with all keys of its parties, as their organisations signed them. A server that gives keys of some
        could keep from a party those that chose it, and leave it with fewer masks than the graph has.
        """
        for party, key in order.roster.keys.items():
            if self._sum_keys.get(party) != key:
                raise ProtocolError(f"the key of {party} for this sum is not the one its organisation signed")
        roster = order.roster
        place = roster.parties, roster.chosen, roster.at_least
        if place not in self._rosters:
            for party in roster.parties:
                if party not in self._sum_keys:
                    raise unknown("party", party, self._sum_keys, error=ProtocolError)
            keys = {party: self._sum_keys[party] for party in roster.parties}
            self._rosters[place] = SumRoster(keys, roster.chosen, (), roster.at_least)
        return replace(order, roster=self._rosters[place])

    def _seal_all(self, call: Invocation, outcome: Outcome) -> Outcome:
        if not isinstance(outcome, tuple):
            return outcome
        try:
            return tuple(parcel if parcel.receiver == SERVER else self._seal(call, parcel) for parcel in outcome)
        except ProtocolError as error:
            return Failure("protocol", type(error).__name__, error)

    def _seal(self, call: Invocation, parcel: Parcel) -> Parcel:
        data = codec.encode(parcel.content)
        size, kinds = codec.measure(parcel.content)
        header = _header(
            self._purpose(MAIL), call, call.sequence, call.handler, parcel, type(parcel.content).__name__, size, kinds
        )
        body = self._box(parcel.sender, parcel.receiver).seal(header, data).body
        sealed = Sealed(type(parcel.content).__name__, size, kinds, call.sequence, call.handler, body)
        return Parcel(parcel.sender, parcel.receiver, sealed)

    def _open(self, call: Invocation, parcel: Parcel) -> Parcel:
        sealed = parcel.content
        if not isinstance(sealed, Sealed):
            raise ProtocolError(f"mail from {parcel.sender} to {parcel.receiver} is not sealed")
        if parcel.receiver != call.party:
            raise ProtocolError(f"mail for {parcel.receiver} reached {call.party}")
        wanted = self._table.signature(call.role, call.handler).request
        expected: type[Message] | None = Masked if call.mail is not None else wanted
        if expected is None or sealed.message_type != expected.__name__:
            raise ProtocolError(
                f"mail from {parcel.sender} is a {sealed.message_type}, which {call.handler} does not receive"
            )
        watch = self._parties[call.role][call.party].watch
        if watch is not None:
            watch.check_mail(call, parcel.sender, sealed.handler)
        header = _header(
            self._purpose(MAIL),
            call,
            sealed.sequence,
            sealed.handler,
            parcel,
            sealed.message_type,
            sealed.size,
            sealed.kinds,
        )
        data = self._box(parcel.receiver, parcel.sender).open(Envelope(header, sealed.body))
        return Parcel(parcel.sender, parcel.receiver, codec.decode(data, expected, self._limits))

    def _box(self, party: PartyId, other: PartyId) -> Mailbox:
        if not self._has_keys:
            raise ProtocolError("the parties have not exchanged keys yet")
        box = self._mailboxes[party]
        if other == party:  # mail to itself passes through the server too, and only the party can open it
            box.meet_self()
        return box

    # -- models ------------------------------------------------------------------------------------

    def keep_export(self, client: ClientId, export: Export) -> Export:
        watch = self._parties["client"][client].watch
        if watch is not None:
            watch.check_export()
        self._write_model(client, export)
        return Export(export.values)


def _header(
    run: str,
    call: Invocation,
    sequence: int,
    handler: str,
    parcel: Parcel,
    name: str,
    size: int,
    kinds: Mapping[str, int],
) -> Header:
    """The unencrypted, authenticated header of a piece of mail, bound to its round: both ends compute the same."""
    content = json.dumps([name, sorted(kinds.items())], separators=(",", ":"))
    turn = call.turn
    return Header(
        run, turn.phase, turn.round, turn.incarnation, sequence, parcel.sender, parcel.receiver, handler, content, size
    )
