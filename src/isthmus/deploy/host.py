"""The parties of one organisation: a :class:`~isthmus.federation.host.PartyHost` whose mail leaves sealed.

Mail to another party goes through the server, which must not read it. Each party here has a session key signed by its
organisation's long-term key; the keys of the others are checked against the roster before anything is sealed for them.
The same holds for keys of secure
sums: an order to mask for a roster of parties whose keys nobody signed is refused, or the server could play all the
others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from isthmus.deploy.handshake import Keys, Meet
from isthmus.deploy.roster import Organisations
from isthmus.errors import ProtocolError
from isthmus.federation import codec
from isthmus.federation.codec import LIMITS, Limits
from isthmus.federation.engine import Export
from isthmus.federation.host import PartyHost
from isthmus.federation.interface import Failure
from isthmus.federation.messages import SERVER, ClientId, Message, PartyId
from isthmus.federation.party import Invocation, Outcome, Parcel, Turn
from isthmus.federation.roles import RoleTable
from isthmus.federation.secure import Masked, MaskOrder, Sealed
from isthmus.privacy.keys import Identity, Roster, SignedKey
from isthmus.privacy.sealed_message import Envelope, Header, Mailbox
from isthmus.seeds import Stream
from isthmus.tensors import Weights

MAIL, SUMS = "mail", "sums"


class SiteHost(PartyHost):
    """Parties of an organisation.

    Args:
        run: What session keys are signed for, so that those of one run are worth nothing in another.
        identity, organisations: Long-term key and roster; without them keys are not signed, which is for simulations on
            one machine.
        keep: Where final models go; only their sizes leave.
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
        organisations: Organisations | None,
        keep: Callable[[ClientId, Weights], None],
        limits: Limits = LIMITS,
    ) -> None:
        super().__init__(parts, table, config, stream, limits=limits)
        self._run, self._identity, self._organisations, self._keep = run, identity, organisations, keep
        self._sum_keys: dict[PartyId, bytes] = {}
        self._mailboxes: dict[PartyId, Mailbox] = {}
        self._turn: Turn | None = None
        self._read: dict[tuple[PartyId, int], tuple[tuple[Parcel, ...], tuple[Parcel, ...]]] = {}
        self._met = False

    # -- keys --------------------------------------------------------------------------------------

    def announce(self) -> dict[PartyId, Keys]:
        """Signed session keys of all parties here."""
        found = {}
        for party in self._all():
            box = Mailbox(party.name, self._purpose(MAIL), self._identity)
            self._mailboxes[party.name] = box
            mail, sums = box.announce(), self._signed(party.name, party.sum_key())
            found[party.name] = Keys(mail.key, mail.signature, sums.key, sums.signature)
        return found

    def meet(self, everybody: Meet) -> None:
        """Accept the others' session keys; one that its organisation did not sign is refused."""
        own = self.announce() if not self._mailboxes else {name: None for name in self._mailboxes}
        for party, keys in sorted(everybody.keys.items()):
            if party in own:
                continue
            mail = SignedKey(party, self._purpose(MAIL), keys.mail, keys.mail_signature)
            self._sum_keys[party] = self._verified(
                SignedKey(party, self._purpose(SUMS), keys.sums, keys.sums_signature)
            )
            self._verified(mail)
            for box in self._mailboxes.values():
                box.meet(mail)
        for box in self._mailboxes.values():  # parties of one place write to each other through the server too
            for other in self._mailboxes.values():
                if other is not box:
                    box.meet(other.announce())
        self._sum_keys |= {party.name: party.sum_key() for party in self._all()}
        self._met = True

    def _purpose(self, what: str) -> str:
        return f"{self._run}/{what}"

    def _signed(self, party: PartyId, key: bytes) -> SignedKey:
        if self._identity is None:
            return SignedKey(party, self._purpose(SUMS), key, b"")
        return self._identity.sign(party, self._purpose(SUMS), key)

    def _verified(self, signed: SignedKey) -> bytes:
        if self._organisations is None:
            return signed.key
        return Roster(signed.run, {signed.party: self._organisations.of(signed.party)}).verify(signed)

    # -- mail --------------------------------------------------------------------------------------

    def admit(self, calls: list[Invocation]) -> list[Invocation]:
        """Calls with their mail opened, and no order to mask for strangers among them."""
        opened = []
        for call in calls:
            orders = [call.mask, *(call.mail.orders or {}).values()] if call.mail is not None else [call.mask]
            for order in orders:
                if order is not None:
                    self._check_order(order)
            if call.parcels is not None:
                call = replace(call, parcels=self._inbox(call, call.parcels))
            opened.append(call)
        return opened

    def _inbox(self, call: Invocation, parcels: tuple[Parcel, ...]) -> tuple[Parcel, ...]:
        """Mail can be opened once. A call whose answer was lost brings the same mail again: that is remembered for its
        round.
        """
        if self._turn != call.turn:
            self._turn = call.turn
            self._read.clear()
        key = call.party, call.sequence
        if key not in self._read or self._read[key][0] != parcels:
            self._read[key] = parcels, tuple(self._opened(call, parcel) for parcel in parcels)
        return self._read[key][1]

    def release(self, outcomes: Mapping[PartyId, Outcome], calls: list[Invocation]) -> dict[PartyId, Outcome]:
        """Outcomes with their mail sealed; what is for the server is not mail."""
        by_party = {call.party: call for call in calls}
        return {party: self._sealed(by_party[party], outcome) for party, outcome in outcomes.items()}

    def _check_order(self, order: MaskOrder) -> None:
        for party, key in order.roster.keys.items():
            if self._sum_keys.get(party) != key:
                raise ProtocolError(f"the key of {party} for this sum is not the one its organisation signed")

    def _sealed(self, call: Invocation, outcome: Outcome) -> Outcome:
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

    def _opened(self, call: Invocation, parcel: Parcel) -> Parcel:
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
        if not self._met:
            raise ProtocolError("the parties have not exchanged keys yet")
        box = self._mailboxes[party]
        if other == party:  # what a party writes to itself travels too, and only it can open it
            box.meet_self()
        return box

    # -- models ------------------------------------------------------------------------------------

    def keep_export(self, client: ClientId, export: Export) -> Export:
        self._keep(client, export.weights or {})
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
    """What is said in clear of a piece of mail, bound to its round: that of the sender's call and of the receiver's are
    the same.
    """
    told = json.dumps([name, sorted(kinds.items())], separators=(",", ":"))
    turn = call.turn
    return Header(
        run, turn.phase, turn.round, turn.incarnation, sequence, parcel.sender, parcel.receiver, handler, told, size
    )
