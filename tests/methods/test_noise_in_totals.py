"""Noise that clients add in shares: as large in the total as stated, with clients lost and without, and refused where
it would promise too much.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
from faults import Fault, FaultyEngine
from torch import Tensor

from isthmus.data.scenario import Scenario, build_scenario
from isthmus.errors import ConfigError
from isthmus.experiments.config import Settings, resolve, settings_from_toml
from isthmus.experiments.contract import contract_of
from isthmus.experiments.disclosure import sheet_of_settings
from isthmus.experiments.folder import RunFolder
from isthmus.experiments.run import SimulatedRun
from isthmus.federation.ledger import differences
from isthmus.methods.averaging import shares_counted
from isthmus.privacy.masks import SumParty

CLIENTS = 5
FLAGS: dict[str, Any] = {
    "dataset": "csbm",
    "clients": CLIENTS,
    "seed": 5,
    "rounds": 2,
    "hidden": (64,),
    "weighting": "uniform",
    "secure_sum": True,
    "precision": "float64",
    "dp_clip": 0.5,
    "dp_noise": 40.0,
    "dp_noise_in": "total",
}


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return build_scenario(
        dataset="csbm:nodes=90,classes=3,features=64,degree=4", clients=CLIENTS, split="30/20/50", seed=5
    )


def settings(method: str = "fedavg", **changes: Any) -> Settings:
    given = {**FLAGS, **changes}
    return resolve(method, {key: value for key, value in given.items() if value is not None})


def moved(scenario: Scenario, method: str = "fedavg", plan: Any = (), **changes: Any) -> tuple[Tensor, SimulatedRun]:
    """The step of the last of the rounds, and the run."""
    engine: Any = {"engine": FaultyEngine, "plan": plan} if plan else {}
    run = SimulatedRun(settings(method, **changes), scenario, **engine)
    weights: list[Tensor] = []
    for last in range(1, run.settings.total_rounds + 1):
        run.loop.play(last)
        weights.append(torch.cat([part.flatten() for part in run.loop.state.weights.values()]))  # type: ignore[attr-defined]
    return weights[-1] - weights[-2], run


def deviation(step: Tensor) -> float:
    return float(step.square().mean().sqrt())


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_the_total_has_the_stated_noise(scenario: Scenario, method: str) -> None:
    """Clipped signal adds at most clip / sqrt(d) per number, 0.02 % of the noise."""
    step, run = moved(scenario, method)
    config = run.settings.method_config
    assert config.dp_shares == 4, "of five, one may work with the server"
    expected = 40.0 * 0.5 * (5 / 4) ** 0.5 / 5  # five shares, each a fourth of the variance; the mean of five
    assert abs(deviation(step) / expected - 1) < 5 / (2 * step.numel()) ** 0.5
    assert not differences(run.loop.sheet, sheet_of_settings(run.settings))
    assert {row["protection"] for row in run.loop.sheet.rows() if row["message"] == "Update"} == {"masked"}


def test_a_lost_client_is_covered_by_the_others(scenario: Scenario) -> None:
    """Four of five are needed, of which one may work with the server: three shares make up the noise."""
    fault = Fault("client-3", "train", 2, "local_update", "crashed", step="mask")
    step, run = moved(scenario, plan=[fault], least_clients=4, reset_optimizer=True)
    assert run.loop.absent == {"client-3": 3} and run.settings.method_config.dp_shares == 3
    with_four = 40.0 * 0.5 * (4 / 3) ** 0.5 / 4
    assert abs(deviation(step) / with_four - 1) < 5 / (2 * step.numel()) ** 0.5
    assert deviation(step) * 4 > 40.0 * 0.5, "the total has more than the stated noise, without the lost share"


@pytest.mark.parametrize("method", ["fedsgd", "fedavg"])
def test_a_mean_of_gradients_is_a_mean(scenario: Scenario, method: str) -> None:
    """Next to no noise: the run is the one without, up to the clip.

    Plain descent, in which noise of 1e-6 in the total stays as small: Adam divides by the size of a gradient, so a
    gradient that is as small as the noise would step anywhere.
    """
    near, _ = moved(scenario, method, dp_clip=1e3, dp_noise=1e-9, optimizer="sgd", lr=0.5)
    plain, _ = moved(scenario, method, dp_clip=None, dp_noise=None, dp_noise_in=None, optimizer="sgd", lr=0.5)
    assert float(plain.abs().max()) > 1e-2
    torch.testing.assert_close(near, plain, atol=2e-5, rtol=0)


def test_what_is_masked_is_whole_steps_with_a_share_each(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    genuine = SumParty.mask

    def watching(self: SumParty, values: Any, roster: Any, tag: Any, **named: Any) -> Any:
        if "local_update" in tag.handler:
            seen.append(torch.cat([value.flatten() for value in values if isinstance(value, Tensor)]))
        return genuine(self, values, roster, tag, **named)

    monkeypatch.setattr(SumParty, "mask", watching)
    moved(scenario)
    assert len(seen) == 2 * CLIENTS and all(part.dtype == torch.int64 for part in seen)
    shares = torch.stack(seen).double() / 2**20
    assert bool(((shares.square().mean(1).sqrt() - 1).abs() < 5 / (2 * shares.shape[1]) ** 0.5).all())
    correlation = torch.corrcoef(shares) - torch.eye(len(shares), dtype=torch.float64)
    assert float(correlation.abs().max()) < 6 / shares.shape[1] ** 0.5, "independent over clients and rounds"


@pytest.mark.parametrize(("method", "epochs", "releases"), [("fedavg", 2, 3), ("fedsgd", 2, 6)])
def test_epsilon_is_that_of_the_threshold(scenario: Scenario, method: str, epochs: int, releases: int) -> None:
    given = settings(method, rounds=3, local_epochs=epochs, dp_noise=6.0, dp_delta=1e-6)
    stated = SimulatedRun(given, scenario).privacy
    assert stated is not None and (stated["releases"], stated["shares"], stated["unit"]) == (releases, 4, "client")
    step = 6.0 * 0.5 / 4**0.5 / 2**20
    distance = 2 * (0.5 / step * (1 + 2**-20) + stated["values"] ** 0.5 / 2)
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(4**0.5 * 2**20 / distance), releases)
    assert stated["epsilon"] == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-9)
    assert "4 of 5 clients: the other 1 may be lost or work with the server" in stated["relies_on"]
    own = SimulatedRun(settings(method, rounds=3, local_epochs=epochs, dp_noise=6.0, dp_noise_in=None), scenario)
    assert own.privacy is not None
    assert stated["epsilon"] == pytest.approx(own.privacy["epsilon"], rel=0.3), "dp_noise means the same in both"


def test_shares_that_are_counted() -> None:
    found = [shares_counted(clients, least) for clients, least in ((10, 0), (10, 7), (3, 0), (1000, 700), (5, 1))]
    assert found == [8, 5, 2, 500, 1]


def test_fewer_shares_are_a_choice_and_more_are_not(scenario: Scenario) -> None:
    step, run = moved(scenario, dp_shares=1)
    assert abs(deviation(step) / (40.0 * 0.5 * 5**0.5 / 5) - 1) < 5 / (2 * step.numel()) ** 0.5
    assert run.privacy is not None and "the noise of 1 of 5 clients" in run.privacy["relies_on"]
    with pytest.raises(ConfigError, match="dp_shares=5 is more than the 4 clients"):
        SimulatedRun(settings(dp_shares=5, least_clients=4, reset_optimizer=True), scenario)


@pytest.mark.parametrize(
    ("method", "changes", "complaint"),
    [
        ("fedavg", {"secure_sum": False}, "set secure_sum=true"),
        ("fedper", {}, "fedavg, fedprox and fedsgd"),
        ("fedstar", {}, "fedavg, fedprox and fedsgd"),
        ("fedavg", {"dp_noise": None}, "set dp_noise and dp_clip"),
        ("fedavg", {"weighting": "train"}, "weighting=uniform"),
        ("fedavg", {"max_step": 1.0}, "plain mean: leave max_step out"),
        ("fedavg", {"clients": 9, "groups": 3, "aggregation": "median"}, "plain mean: leave aggregation and groups"),
        ("fedavg", {"fraction": 0.5}, "leave fraction at 1"),
        ("fedavg", {"dp_shares": 0}, "at least 1"),
        ("fedavg", {"dp_noise_in": None, "dp_shares": 2}, "set dp_noise_in=total"),
        ("fedavg", {"dp_noise": 1e-12}, "too small to be shared"),
    ],
)
def test_settings_that_promise_too_much_are_refused(
    scenario: Scenario, method: str, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        SimulatedRun(settings(method, **changes), scenario)


def test_a_site_finds_the_same_by_itself(scenario: Scenario) -> None:
    """What a site reads from the settings it is sent: shares that the sums do not have are refused there too."""
    run = SimulatedRun(settings(), scenario)
    text = run.settings.to_toml()
    assert contract_of(settings_from_toml(text), run.view).hash == contract_of(run.settings, run.view).hash
    for before, after, complaint in (
        ("dp_shares = 4", "dp_shares = 50", "more than the 5 clients"),
        ("secure_sum = true", "secure_sum = false", "set secure_sum=true"),
    ):
        assert before in text
        with pytest.raises(ConfigError, match=complaint):
            contract_of(settings_from_toml(text.replace(before, after)), run.view)


def test_the_result_and_the_model_card_say_it(scenario: Scenario, tmp_path: Path) -> None:
    run = SimulatedRun(settings(dp_noise=1.0), scenario)
    folder = RunFolder.create(tmp_path / "run", run.settings.to_toml(), {})
    stated = run.play(folder, resumed=False)["privacy"]
    assert stated["mechanism"] == "discrete gaussian, in shares" and stated["shares"] == 4
    [card] = (tmp_path / "run/models/client-0").glob("*.md")
    assert "It rests on secure sums and the noise of 4 of 5 clients" in card.read_text()
