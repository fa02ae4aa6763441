"""Sites without processes: their runtimes behind a transport that can fail."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from isthmus.deploy.roster import make_identity
from isthmus.deploy.server_run import run_on_sites
from isthmus.deploy.site_runtime import SiteRuntime
from isthmus.deploy.site_settings import SiteSettings
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
    """Settings of a submitted run."""
    given = {**DATA, "undirected": False, "scale": "none", "rounds": 2, "hidden": 4, **more}
    return resolve(method, {**given, "engine": "nvflare", "execution": "each"})


def organisation(folder: Path, number: int, roster: Path, policy: str = "", **data: object) -> SiteSettings:
    """One of several organisations, with its own identity on the common roster; ``policy``: end of its client.toml."""
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
    (home / "client.toml").write_text("\n".join([*lines, policy]))
    return SiteSettings.read(home / "client.toml")


class InProcessTransport:
    """Calls the runtimes directly. All requests fail after the first ``fail_after``."""

    def __init__(self, sites: Mapping[str, SiteRuntime]) -> None:
        self.runtimes = dict(sites)
        self.requests = 0
        self.fail_after = -1

    def restarted(self) -> InProcessTransport:
        """The same sites in new processes."""
        return InProcessTransport({site: SiteRuntime(runtime.settings) for site, runtime in self.runtimes.items()})

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(self.runtimes)

    def request(
        self, run: str, kind: str, requests: Mapping[str, bytes], timeout: float | None
    ) -> dict[str, bytes | Failure]:
        replies: dict[str, bytes | Failure] = {}
        for site, data in requests.items():
            if self.requests == self.fail_after:
                replies[site] = Failure("unavailable", "test")
                continue
            replies[site] = self.runtimes[site].handle(run, kind, data)
            self.requests += 1
        return replies


def federation(folder: Path, policy: str = "", sites: int = 2, **data: object) -> InProcessTransport:
    roster = folder / "roster.toml"
    return InProcessTransport(
        {
            f"bank-{number}": SiteRuntime(organisation(folder, number, roster, policy, clients=sites, **data))
            for number in range(sites)
        }
    )


def run_in_process(
    folder: Path, transport: InProcessTransport, settings: Settings, run: str = "r", attempt: int = 0
) -> RunFolder:
    path = folder / "runs" / run
    if not path.exists():
        RunFolder.create(path, settings.to_toml(), {"task": "node"}).close()
    run_on_sites(path, run, attempt, transport)
    return RunFolder(path)
