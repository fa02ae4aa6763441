"""Sites without processes: the runtime of each behind a carrier that packs, counts and can lose them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from isthmus.deploy.play import play_run
from isthmus.deploy.roster import make_identity
from isthmus.deploy.runtime import SiteRuntime
from isthmus.deploy.settings import SiteSettings
from isthmus.experiments.config import Settings, resolve
from isthmus.experiments.folder import RunFolder
from isthmus.federation.interface import Failure

DATA = {
    "dataset": "csbm:nodes=60,classes=3,features=5",
    "partition": "random",
    "clients": 2,
    "split": "40/20/40",
    "seed": 3,
}


def settings_of(method: str = "fedavg", **more: object) -> Settings:
    """Settings as a submitted run has them."""
    return resolve(method, {**DATA, "rounds": 2, "hidden": 4, **more, "engine": "nvflare", "execution": "each"})


def organisation(folder: Path, number: int, roster: Path, **data: object) -> SiteSettings:
    """One of two organisations, with an identity of its own on a common roster."""
    home = folder / f"bank-{number}"
    home.mkdir()
    identity = make_identity(home / "identity.key")
    with roster.open("a") as file:
        file.write(f'[bank-{number}]\nclient = "client-{number}"\nkey = "{identity.public.hex()}"\n')
    lines = [
        f'client = "client-{number}"',
        f"roster = {json.dumps(str(roster))}",
        'identity = "identity.key"',
        "[data]",
    ]
    lines += [f"{key} = {json.dumps(value)}" for key, value in {**DATA, **data}.items()]
    (home / "client.toml").write_text("\n".join(lines))
    return SiteSettings.read(home / "client.toml")


class Wires:
    """A carrier in this process. ``lost`` sites do not answer; ``seen`` is what went over the wires."""

    def __init__(self, sites: Mapping[str, SiteRuntime]) -> None:
        self.runtimes = dict(sites)
        self.lost: set[str] = set()
        self.seen: list[tuple[str, str, bytes, bytes]] = []
        self.after = -1

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(self.runtimes)

    def ask(
        self, run: str, kind: str, requests: Mapping[str, bytes], timeout: float | None
    ) -> dict[str, bytes | Failure]:
        answers: dict[str, bytes | Failure] = {}
        for site, data in requests.items():
            if site in self.lost or len(self.seen) == self.after:
                answers[site] = Failure("unavailable", "test")
                continue
            answer = self.runtimes[site].handle(run, kind, data)
            self.seen.append((site, kind, data, answer))
            answers[site] = answer
        return answers


def federation(folder: Path, **data: object) -> Wires:
    roster = folder / "roster.toml"
    return Wires({f"bank-{number}": SiteRuntime(organisation(folder, number, roster, **data)) for number in (0, 1)})


def play(folder: Path, wires: Wires, settings: Settings, run: str = "r", attempt: int = 0) -> RunFolder:
    path = folder / "runs" / run
    if not path.exists():
        RunFolder.create(path, settings.to_toml(), {"task": "node"}).close()
    play_run(path, run, attempt, wires)
    return RunFolder(path)
