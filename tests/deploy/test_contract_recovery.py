"""Runs lost at several points and begun again at sites that remember: they end with the bits of an undisturbed run, and
nothing is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hostile_server import CLIENTS
from in_process_sites import InProcessTransport, organisation, run_in_process, settings_of

from isthmus.deploy.site_runtime import SiteRuntime
from isthmus.federation.interface import QuorumError


def sites(folder: Path) -> InProcessTransport:
    folder.mkdir()
    roster = folder / "roster.toml"
    return InProcessTransport(
        {
            f"bank-{number}": SiteRuntime(organisation(folder, number, roster, clients=CLIENTS))
            for number in range(CLIENTS)
        }
    )


@pytest.mark.parametrize("lost_after", [(14,), (33, 61), (27, 30, 47)], ids=str)
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedavg", {"dp_clip": 1.0, "dp_noise": 0.5, "weighting": "uniform"}),
        ("fedavg", {"fraction": 0.75}),
        ("fedspray", {}),
        ("fedstruct", {"protocol": "hardened"}),
        ("hifgl", {}),
        ("fedpergnn", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_lost_run_goes_on_with_nothing_refused(
    method: str,
    more: dict[str, Any],
    lost_after: tuple[int, ...],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = settings_of(method, clients=CLIENTS, secure_sum=True, **{"checkpoint.every": 1, "rounds": 3, **more})
    whole = run_in_process(tmp_path / "whole", sites(tmp_path / "whole"), settings)
    transport = sites(tmp_path / "lost")
    for attempt, requests in enumerate(lost_after):
        transport.fail_after = transport.requests + requests
        with pytest.raises(QuorumError):
            run_in_process(tmp_path / "lost", transport, settings, attempt=attempt)
        transport.fail_after = -1
        if attempt % 2:  # other processes at the sites, every second time
            transport = transport.restarted()
    again = run_in_process(tmp_path / "lost", transport, settings, attempt=len(lost_after))
    assert "refused" not in caplog.text
    ours, theirs = again.result(), whole.result()
    assert ours is not None and theirs is not None and ours["rounds"] == theirs["rounds"] == 3
    if method in ("fedspray", "hifgl", "fedpergnn") or "fraction" in more:  # the others draw on secrets of their own
        assert ours["test"] == theirs["test"] and ours["val"] == theirs["val"]
