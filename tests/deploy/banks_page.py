"""Runs the shell blocks of ``docs/banks.md`` as they stand, every host a folder of this machine.

``sh hub`` is for the hub, ``sh bank`` for each bank under its own name, ``background`` keeps running. ``scp`` copies
between the folders; the hub's name and port are replaced.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "banks.md"
BANKS = ("bank-a", "bank-b", "bank-c")
HUB = "hub"
BLOCK = re.compile(r"^```sh (?P<host>hub|bank)(?P<background> background)?\n(?P<script>.*?)^```$", re.M | re.S)
SCP = """#!/bin/sh
[ "$1" = -r ] && shift
place() { case "$1" in *:*) echo "$HOSTS/${1%%:*}/${1#*:}";; *) echo "$1";; esac; }
exec cp -r "$(place "$1")" "$(place "$2")"
"""
ISOLATE = ("unshare", "--map-root-user", "--mount")
"""Starts a command with a view of the file system of its own."""


def can_isolate() -> bool:
    try:
        script = ["sh", "-c", "mount -t tmpfs none /mnt"]
        return subprocess.run([*ISOLATE, *script], check=False, capture_output=True).returncode == 0
    except OSError:
        return False


@dataclass(frozen=True)
class Block:
    host: str
    background: bool
    script: str


def blocks() -> list[Block]:
    found = [Block(m["host"], bool(m["background"]), m["script"]) for m in BLOCK.finditer(PAGE.read_text())]
    assert len(found) == len(re.findall(r"^```sh", PAGE.read_text(), re.M)), "a block does not name its host"
    return found


@dataclass
class Hosts:
    """Folders that stand for hosts, and what runs on them; ``isolated``: what keeps running sees its own host only."""

    folder: Path
    port: int = 8002
    environment: Mapping[str, str] = field(default_factory=dict)
    isolated: bool = False
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (HUB, *BANKS):
            (self.folder / name).mkdir(parents=True)
            (self.folder / name / "examples").symlink_to(ROOT / "examples")
        tools = self.folder / "tools"
        tools.mkdir()
        for name, script in {
            "scp": SCP,
            "isthmus": f'#!/bin/sh\nexec "{sys.executable}" -m isthmus.cli.main "$@"\n',
            "python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
        }.items():
            (tools / name).write_text(script)
            (tools / name).chmod(0o755)
        (self.folder / "localhost").symlink_to(self.folder / HUB)

    def run(self, block: Block) -> str:
        """Standard output of a block on all its hosts; it must succeed everywhere."""
        hosts = (HUB,) if block.host == HUB else BANKS
        if block.background:
            self.running |= {host: self.start(host, f"exec {block.script}", alone=self.isolated) for host in hosts}
            return ""
        output = ""
        for host, process in [(host, self.start(host, block.script, subprocess.PIPE)) for host in hosts]:
            out, error = (text.decode() for text in process.communicate(timeout=300.0))
            assert process.returncode == 0, f"{host}: {block.script}\n{out}\n{error}"
            output += out
        return output

    def start(
        self, host: str, script: str, pipe: int = subprocess.DEVNULL, *, alone: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start a script on a host; ``alone``: with the folders of all other hosts hidden from its processes."""
        script = script.replace("hub.example.org", "localhost").replace("8002", str(self.port))
        if host in BANKS and "bank-b" not in script:  # a block that names all banks is the same at all of them
            script = script.replace("bank-a", host)
        environment = {
            **os.environ,
            "HOSTS": str(self.folder),
            "HOST": host,
            "PATH": f"{self.folder / 'tools'}:{os.environ['PATH']}",
            **self.environment,
        }
        others = [str(self.folder / other) for other in (HUB, *BANKS) if other != host]
        hide = "".join(f"mount -t tmpfs none '{other}'\n" for other in others) if alone else ""
        command = [*(ISOLATE if alone else ()), "sh", "-ec", hide + script]
        return subprocess.Popen(command, cwd=self.folder / host, env=environment, stdout=pipe, stderr=pipe)

    def stop(self) -> None:
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        for process in self.running.values():
            process.wait(timeout=30.0)
