"""A network of its own for every party of a federation on one machine: Linux network namespaces on a bridge.

Needs root and iproute2. A process started by a thread that has entered a namespace has only that namespace's
interfaces: cutting its cable is what a real partition is, for TCP as for everything above it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

HUB = "10.78.0.1"
"""Address of the first party; the next ones follow. This process has the last one of the network."""
_NEW_NETWORK = 0x40000000
_BRIDGE = "isthmus-br"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def possible() -> bool:
    """Whether this process may make namespaces."""
    try:
        ip("netns", "add", "isthmus-probe")
        ip("netns", "delete", "isthmus-probe")
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


class Namespaces:
    """One namespace per party, joined by a bridge; removed at the end."""

    def __init__(self, parties: Sequence[str]) -> None:
        self.parties = list(parties)

    def __enter__(self) -> Namespaces:
        ip("link", "add", _BRIDGE, "type", "bridge")
        ip("addr", "add", "10.78.0.254/24", "dev", _BRIDGE)
        ip("link", "set", _BRIDGE, "up")
        for number, party in enumerate(self.parties, 1):
            ip("netns", "add", self._name(party))
            cable = self._cable(party)
            ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", self._name(party))
            ip("link", "set", cable, "master", _BRIDGE, "up")
            inside = ("-n", self._name(party))
            ip(*inside, "addr", "add", f"10.78.0.{number}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip(*inside, "link", "set", device, "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for party in self.parties:
            subprocess.run(["ip", "netns", "delete", self._name(party)], check=False, capture_output=True)
        subprocess.run(["ip", "link", "delete", _BRIDGE], check=False, capture_output=True)

    def enter(self, party: str) -> Callable[[], None]:
        """Moves the thread that calls it, and what it starts, into the namespace of a party."""

        def move() -> None:
            with Path("/run/netns", self._name(party)).open("rb") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NEW_NETWORK):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

        return move

    def cut(self, party: str) -> None:
        ip("link", "set", self._cable(party), "down")

    def mend(self, party: str) -> None:
        ip("link", "set", self._cable(party), "up")

    def impair(self, party: str, *netem: str) -> bool:
        """Delay or lose what a party sends and receives, where the kernel can; returns whether it can."""
        for place, device in (((), self._cable(party)), (("-n", self._name(party)), "eth0")):
            command = ["tc", *place, "qdisc", "replace", "dev", device, "root", "netem", *netem]
            if subprocess.run(command, check=False, capture_output=True).returncode:
                return False
        return True

    def _name(self, party: str) -> str:
        return f"isthmus-{party}"

    def _cable(self, party: str) -> str:
        return f"ist-{self.parties.index(party)}"
