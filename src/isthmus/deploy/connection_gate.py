"""Who may connect to the server, decided at every connection and again every two seconds while it lasts.

Runs in the server's parent process, where all connections of the sites end. NVIDIA FLARE checks that a certificate was
issued by the root; it knows no revocation, and an open connection is never checked again. Here a certificate must be in
the register (`isthmus.deploy.members`), and a connection whose certificate was revoked or has expired is cut, so that
its job loses the site too. No organisation holds more connections than its share.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cryptography import x509

from isthmus.deploy.certificates import common_name
from isthmus.deploy.members import Members
from isthmus.errors import ConfigError

logger = logging.getLogger(__name__)

CHECK_EVERY = 2.0
MAX_CONNECTIONS = 12
"""Of one certificate's owner at a time. A site needs one, and one more for every job."""
SAID_EVERY = 60.0
"""Seconds between two lines of the log on one refusal: who tries a hundred times a second does not fill the disk."""
MEMBERS_FILE = "ISTHMUS_MEMBERS"
"""Environment variable of the server's parent process: the register. Without it (one machine) nobody is refused."""
REFUSALS_FILE, SEEN_FILE = "refused-connections", "last-seen.json"
"""Beside the register, for ``isthmus status`` and the metrics: a count, and when each party was last heard of."""


class ConnectionGate:
    """Admits connections and cuts those that are not admitted any more."""

    def __init__(self, register: Path, most: int = MAX_CONNECTIONS) -> None:
        self.register, self.most = register, most
        self.refused = 0
        self._said: dict[str, tuple[float, int]] = {}  # when a reason was last written, and how often it came since
        self._open: dict[Any, x509.Certificate] = {}
        self._seen: dict[str, float] = {}
        self._lock = threading.Lock()

    def refusal(self, certificate: x509.Certificate) -> str:
        try:
            return Members.read(self.register).refusal(certificate)
        except ConfigError as error:
            return str(error)  # without a register nobody is let in

    def enter(self, context: Any) -> str:
        """Admit a connection, or say why not. One without a certificate came over the loopback listener of the jobs."""
        text = (context.auth_context().get("x509_pem_cert") or (b"",))[0]
        if not text:
            return ""
        certificate = x509.load_pem_x509_certificate(text)
        reason, name = self.refusal(certificate), common_name(certificate.subject)
        with self._lock:
            held = Counter(common_name(one.subject) for one in self._open.values())[name]
            if not reason and held >= self.most:
                reason = f"{name} holds {held} connections already"
            if not reason:
                self._open[context] = certificate
        if reason:
            self._note(reason)
        return reason

    def leave(self, context: Any) -> None:
        with self._lock:
            self._open.pop(context, None)

    def heard(self, context: Any) -> None:
        """Something arrived over a connection; a site that is there sends a sign of life every few seconds."""
        certificate = self._open.get(context)
        if certificate is not None:
            self._seen[common_name(certificate.subject)] = time.time()

    def check(self) -> int:
        """Cut every connection that would not be admitted any more; returns how many were cut."""
        with self._lock:
            held = list(self._open.items())
        cut = 0
        for context, certificate in held:
            reason = self.refusal(certificate)
            if reason:
                self._note(f"{reason}: connection cut")
                context.cancel()
                self.leave(context)
                cut += 1
        self._write(SEEN_FILE, json.dumps(self._seen))
        self._write(REFUSALS_FILE, f"{self.refused}\n")
        return cut

    def _write(self, name: str, text: str) -> None:
        temporary = self.register.with_name(f".{name}.tmp")
        temporary.write_text(text)
        temporary.rename(self.register.with_name(name))

    def _note(self, reason: str) -> None:
        with self._lock:
            self.refused += 1
            now = time.monotonic()
            last, unsaid = self._said.get(reason, (-SAID_EVERY, 0))
            if now - last < SAID_EVERY:
                self._said[reason] = (last, unsaid + 1)
                return
            self._said = {one: said for one, said in self._said.items() if now - said[0] < SAID_EVERY}
            self._said[reason] = (now, 0)
        logger.warning("refused: %s%s", reason, f" ({unsaid} times more since it was last said)" if unsaid else "")

    def watch(self) -> None:
        """Check for ever, in a thread."""

        def loop() -> None:
            while True:
                time.sleep(CHECK_EVERY)
                try:
                    self.check()
                except Exception:
                    logger.exception("the gate could not check the connections")

        threading.Thread(target=loop, name="connection-gate", daemon=True).start()


def _heard(gate: ConnectionGate, requests: Any, context: Any) -> Iterator[Any]:
    for request in requests:
        gate.heard(context)
        yield request


def install(gate: ConnectionGate) -> None:
    """Put a gate before NVIDIA FLARE's listener, which serves each connection with one call of ``Stream``."""
    import grpc  # type: ignore[import-untyped]
    from nvflare.fuel.f3.drivers.grpc_driver import Servicer

    serve = Servicer.Stream

    def stream(self: Any, requests: Any, context: Any) -> Iterator[Any]:
        reason = gate.enter(context)
        if reason:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "not a member of this federation")
        try:
            yield from serve(self, _heard(gate, requests, context), context)
        finally:
            gate.leave(context)

    Servicer.Stream = stream
    gate.watch()
