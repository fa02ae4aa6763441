"""The policy of an organisation: every key, and who may join under the strict defaults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isthmus.data.own_dataset import SITE_TABLES
from isthmus.deploy.audit_chain import JOIN, AuditChain
from isthmus.deploy.kit_files import client_toml
from isthmus.deploy.policy import NOTHING_ASKED, STRICT, Policy
from isthmus.deploy.site_contract import DerivedContract, privacy_of, summary
from isthmus.deploy.site_settings import SiteSettings
from isthmus.errors import ConfigError
from isthmus.experiments.config import Settings, resolve
from isthmus.experiments.contract import contract_of
from isthmus.federation.contract import Line
from isthmus.federation.interface import View
from isthmus.federation.messages import Kind
from isthmus.methods.evaluation import Evaluation
from isthmus.methods.registry import all_methods, get_method

NODES, GRAPHS = "csbm:nodes=60,classes=3,features=5", "mutag"
VIEW = View(("client-0", "client-1", "client-2"), 5, 3)


def settings_of(method: str = "fedavg", **more: Any) -> Settings:
    dataset = NODES if "node" in get_method(method).tasks else GRAPHS
    return resolve(method, {"dataset": dataset, "clients": 3, "rounds": 2, **more})


def refusals(policy: Policy, method: str = "fedavg", view: View = VIEW, **more: Any) -> list[str]:
    settings = settings_of(method, **more)
    return list(dict.fromkeys(policy.refusals(settings, contract_of(settings, view))))


# -- golden table ----------------------------------------------------------------------------------

JOINS = (
    *("apfl", "fedavg", "fedper", "fedprox", "fedsage", "fedsgd", "fedspray", "fedstar", "fedstruct"),
    *("hifgl", "local", "mlpteacher", "adafgl", "ditto", "fedproto", "moon", "scaffold"),
)
REFUSED = {
    "fedgcn": {"FarSums (embedding)": "hidden_from_others"},
    "fedggr": {
        "Uploaded (embedding)": "hidden_from_server",
        "Returned (gradient)": "hidden_from_server",
        "Evaluation of clients that are asked different things": "secure_sum = true",
    },
    "fedgta": {
        "Report (label statistic, model)": "hidden_from_server",
        "Evaluation (count, label statistic, metric)": 'scores = "together"',
    },
    "fedpub": {
        "Report (embedding, model)": "hidden_from_server",
        "Evaluation (count, label statistic, metric)": 'scores = "together"',
    },
    "fedsageplus": {"Generated (embedding)": "hidden_from_others"},
    "fedstruct-private": {
        "Queries (label statistic)": "hidden_from_others",
        "Sums (embedding)": "hidden_from_others",
    },
    "fedstruct-server": {
        "Subgraph (label statistic)": "hidden_from_server",
        "Residuals (label statistic)": "hidden_from_server",
    },
    "fedtad": {
        "Reliability (label statistic)": "hidden_from_server",
        "LocalModel (model)": "hidden_from_server",
        "Evaluation (count, label statistic, metric)": 'scores = "together"',
    },
    "fedlit": {
        "Centroids (embedding)": "hidden_from_server",
        "Update of clients that are asked different things": "secure_sum = true",
    },
    "fedpergnn": {
        "Boundary (embedding)": "hidden_from_server",
        "Update of clients that are asked different things": "secure_sum = true",
        "Evaluation of clients that are asked different things": "secure_sum = true",
    },
    "fedspray-published": {
        "Census (label statistic)": "hidden_from_server",
        "Upload (embedding, model)": "hidden_from_server",
        "Evaluation (count, label statistic, metric)": 'scores = "together"',
    },
    "gcfl": {
        "LocalModel (model)": "hidden_from_server",
        "Evaluation (count, label statistic, metric)": 'scores = "together"',
    },
    "gcflplus": {
        "LocalSeries (model)": "hidden_from_server",
        "Evaluation (count, label statistic, metric)": 'scores = "together"',
    },
}


def test_the_table_has_every_method() -> None:
    ours = {method.name for method in all_methods() if not method.pooled and method.init.__module__[:7] == "isthmus"}
    assert ours <= {*JOINS, *REFUSED} and not set(JOINS) & set(REFUSED)


@pytest.mark.parametrize("method", [*JOINS, *REFUSED])
def test_who_joins_under_the_strict_defaults(method: str) -> None:
    secure = not get_method(method).needs_single_updates
    found = refusals(STRICT, method, secure_sum=secure)
    wanted = REFUSED.get(method, {})
    assert len({text.partition(": ")[2] for text in found}) == len(wanted)
    for what, key in wanted.items():
        assert any(what in text and f"which {key} forbids" in text for text in found if f": {method} s" in text)


@pytest.mark.parametrize(
    ("method", "more", "what"),
    [
        ("hifgl", {"secmp": "plain"}, "shows others PlainRows (embedding)"),
        ("hifgl", {"secmp": "published"}, "shows others Decoded (embedding)"),
        ("fedgcn", {"legacy": True}, "shows others Raw (feature)"),
        ("fedavg", {"fraction": 0.5}, "sums Update over groups of clients, which fixed_roster = true forbids"),
    ],
)
def test_downgraded_runs_are_refused(method: str, more: dict[str, Any], what: str) -> None:
    assert any(what in text for text in refusals(STRICT, method, secure_sum=True, **more))


@pytest.mark.parametrize("method", [*JOINS, *REFUSED])
def test_without_a_policy_nothing_is_refused(method: str) -> None:
    assert refusals(NOTHING_ASKED, method) == []


# -- keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "method", "more", "view", "message"),
    [
        ({"secure_sum": True}, "fedavg", {}, VIEW, "train: fedavg sums Update without masks, which secure_sum = true"),
        (
            {"least_in_sum": 4},
            "fedavg",
            {"secure_sum": True},
            VIEW,
            "train: fedavg sums Update over 3 clients, least_in_sum = 4 asks for more",
        ),
        (
            {"fixed_roster": True},
            "fedavg",
            {"groups": 3, "clients": 9, "aggregation": "median", "secure_sum": True},
            View(tuple(f"client-{number}" for number in range(9)), 5, 3),
            "sums Update over groups of clients, which fixed_roster = true forbids",
        ),
        (
            {"least_in_sum": 4},
            "fedavg",
            {"groups": 3, "clients": 10, "aggregation": "median", "secure_sum": True},
            View(tuple(f"client-{number}" for number in range(10)), 5, 3),
            "sums Update over groups of 3 clients, least_in_sum = 4 asks for more",
        ),
        (
            {"fixed_roster": True},
            "fedavg",
            {"fraction": 0.7},
            VIEW,
            "sums Update over groups of clients, which fixed_roster = true forbids",
        ),
        (
            {"hidden_from_server": ("structure",)},
            "fedstruct",
            {"secure_sum": False, "protocol": "hardened"},
            VIEW,
            "fedstruct shows the server Kept (structure) of single clients, which hidden_from_server forbids: set "
            "secure_sum = true",
        ),
        (
            {"hidden_from_others": ("structure",)},
            "fedstruct",
            {"secure_sum": True},
            VIEW,
            "setup: fedstruct shows others ArcList (structure) of single clients, which hidden_from_others forbids",
        ),
        ({"scores": "together"}, "local", {}, VIEW, "Evaluation (count, label statistic, metric) of single clients"),
        ({"methods": ("fedsgd",)}, "fedavg", {}, VIEW, "method 'fedavg' is not allowed by methods = ['fedsgd']"),
        ({"rounds": 9}, "fedavg", {"rounds": 10}, VIEW, "fedavg has 10 rounds, more than rounds = 9 allows"),
    ],
)
def test_every_key_of_the_sheet(
    asked: dict[str, Any], method: str, more: dict[str, Any], view: View, message: str
) -> None:
    found = refusals(replace(NOTHING_ASKED, **asked), method, view, **more)
    assert any(message in text for text in found), found
    assert all("\n" not in text for text in found)


def test_a_sum_needs_two_others_whatever_the_policy() -> None:
    two = replace(VIEW, clients=("client-0", "client-1"))
    assert refusals(NOTHING_ASKED, "fedavg", two, clients=2, secure_sum=True) == []
    found = refusals(NOTHING_ASKED, "fedstruct", two, clients=2, secure_sum=True)
    assert any("sums Forward over 2 clients" in text for text in found), "each would know the other's part"


def test_a_policy_that_refuses_everything() -> None:
    nothing = replace(STRICT, hidden_from_server=tuple(Kind), hidden_from_others=tuple(Kind), methods=("none",))
    for method in (*JOINS, *REFUSED):
        with pytest.raises(ConfigError, match=r"\(\[policy\] of client\.toml\)$") as error:
            settings = settings_of(method, secure_sum=not get_method(method).needs_single_updates)
            nothing.check(settings, contract_of(settings, VIEW))
        assert "\n" not in str(error.value)


# -- budgets ---------------------------------------------------------------------------------------

PRIVATE = {"dp_clip": 1.0, "dp_noise": 8.0, "weighting": "uniform", "secure_sum": True}


def spend(policy: Policy, chain: AuditChain, run: str, method: str = "fedavg", **more: Any) -> float:
    settings = settings_of(method, **more)
    with chain.locked():
        epsilon, delta = policy.spends(settings, privacy_of(settings, VIEW), chain, run, "m")
        chain.append(JOIN, run=run, mark="m", stage="run", attempt=0, contract="c", epsilon=epsilon, delta=delta)
    return epsilon


def test_epsilon_is_spent_over_all_runs_and_once_per_run(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="the accountant is an extra")
    chain = AuditChain(tmp_path).open()
    once = spend(STRICT, chain, "first", **PRIVATE)
    assert once > 0.0, "counted also without a budget"
    budget = replace(STRICT, epsilon=2.5 * once)
    assert spend(budget, chain, "second", **PRIVATE) == once
    assert spend(budget, chain, "second", **PRIVATE) == 0.0, "continued"
    forgetful = AuditChain(tmp_path).open()  # another process
    with pytest.raises(
        ConfigError, match=rf"would spend epsilon {once:.4g} of this site's budget, of which {once / 2:.4g}"
    ):
        spend(budget, forgetful, "third", **PRIVATE)
    assert len(AuditChain(tmp_path).open().runs) == 2


def test_noise_of_others_counts_only_where_the_policy_says_so(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="the accountant is an extra")
    chain, shared = AuditChain(tmp_path).open(), {**PRIVATE, "dp_noise_in": "total", "secure_sum": True}
    with pytest.raises(ConfigError, match=r"rests on secure sums and the noise .*shared_noise = false"):
        spend(replace(STRICT, epsilon=1e6), chain, "first", **shared)
    assert spend(replace(STRICT, epsilon=1e6, shared_noise=True), chain, "first", **shared) > 0.0
    assert spend(STRICT, chain, "second", **shared) > 0.0, "no budget, nothing to refuse; counted all the same"


def test_delta_is_a_budget_too(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="the accountant is an extra")
    chain = AuditChain(tmp_path).open()
    budget = replace(STRICT, epsilon=1e6, delta=1.5e-5)
    spend(budget, chain, "first", **PRIVATE, dp_delta=1e-5)
    with pytest.raises(ConfigError, match=r"would spend delta 1e-05, of which 5e-06 is left"):
        spend(budget, chain, "second", **PRIVATE, dp_delta=1e-5)


@pytest.mark.parametrize(
    ("method", "more", "message"),
    [
        ("fedavg", {}, "promises no differential privacy, which epsilon = 8 in"),
        ("fedavg", {"dp_clip": 1.0, "weighting": "uniform"}, "promises no differential privacy, which"),
        (
            "hifgl",
            {"one_neighbour": "dp", "message_noise": 4.0},
            r"no differential privacy for a client \(only for a device\)",
        ),
    ],
)
def test_a_budget_asks_for_a_promise(tmp_path: Path, method: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spend(replace(STRICT, epsilon=8.0), AuditChain(tmp_path).open(), "r", method, **more)


def test_runs_are_counted_over_all_time(tmp_path: Path) -> None:
    policy, chain = replace(STRICT, runs=2), AuditChain(tmp_path).open()
    for run in ("a", "b", "a"):
        spend(policy, chain, run)
    with pytest.raises(ConfigError, match=r"has taken part in 2 runs, runs = 2 in \[policy\]"):
        spend(policy, AuditChain(tmp_path).open(), "c")


# -- client.toml -----------------------------------------------------------------------------------

TOP = 'client = "client-0"\n'
DATA = '[data]\ndataset = "cora"\nclients = 3\n'


def read(folder: Path, text: str) -> SiteSettings:
    (folder / "client.toml").write_text(text)
    return SiteSettings.read(folder / "client.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[policy]\nsecure_sums = true",
            "unknown key in [policy] of client.toml 'secure_sums': did you mean 'secure_sum'?",
        ),
        ("[policy]\nlink.maxids = 3", "did you mean 'link.max_ids'?"),
        ('[policy]\nsecure_sum = "perhaps"', "secure_sum in [policy] of client.toml must be true or false"),
        ("[policy]\nleast_in_sum = 1", "least_in_sum in [policy] must be at least 2, got 1"),
        (
            '[policy]\nhidden_from_server = ["weights"]',
            "content in hidden_from_server of [policy] 'weights'",
        ),
        ('[policy]\nscores = "none"', "unknown value for scores in [policy] of client.toml 'none'"),
        ("[policy]\nepsilon = -1", "epsilon in [policy] must be above 0"),
        ("[policy]\ndelta = 1e-5", "delta in [policy] counts only beside epsilon"),
        ("[policy]\nepsilon = 1\ndelta = 2", "delta in [policy] must lie between 0 and 1"),
        ("[policy]\nrounds = 0", "rounds in [policy] must be at least 1"),
        ("[policy]\nlink.max_ids = -1", "link.max_ids in [policy] must be at least 0"),
    ],
)
def test_mistakes_in_the_policy(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, f"{TOP}{DATA}{text}\n")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_policy_that_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy in client\.toml must be a table"):
        read(tmp_path, f"{TOP}policy = true\n{DATA}")


def test_keys_that_are_left_out_are_strict_and_a_missing_policy_asks_for_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, f"{TOP}{DATA}[policy]\n").policy == STRICT
    assert read(tmp_path, f'{TOP}{DATA}[policy]\nrounds = "none"\nlink.max_ids = 7\n').policy == replace(
        STRICT, rounds=None, max_ids=7
    )
    site = read(tmp_path, TOP + DATA)
    assert site.policy == NOTHING_ASKED and not site.asks


def test_old_places_are_still_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    site = read(tmp_path, f'{TOP}methods = ["fedavg"]\n[tables]\nfolder = "data"\nmax_ids = 5\n')
    assert site.policy == replace(NOTHING_ASKED, methods=("fedavg",), max_ids=5)
    assert "max_ids in [tables] is old: write link.max_ids under [policy]" in caplog.text
    with pytest.raises(ConfigError, match="methods stands twice"):
        read(tmp_path, f'{TOP}methods = ["fedavg"]\n{DATA}[policy]\nmethods = ["fedsgd"]\n')


def test_a_policy_survives_an_offer() -> None:
    for policy in (STRICT, NOTHING_ASKED, replace(STRICT, epsilon=2.0, delta=1e-6, runs=3, max_ids=9, methods=("x",))):
        assert Policy.read(policy.to_table(), "offer") == policy


def test_a_new_kit_is_strict(tmp_path: Path) -> None:
    site = read(tmp_path, client_toml("bank-a", "identity.key"))
    assert site.policy == STRICT and site.asks and site.client == "bank-a"
    uncommented = client_toml("bank-a", "identity.key").replace("\n# ", "\n")
    full = read(tmp_path, uncommented).policy
    assert full == replace(
        STRICT, methods=("fedavg",), runs=10, epsilon=8.0, delta=1e-5, shared_noise=True, max_ids=100000
    )


@pytest.mark.parametrize(("dataset", "said"), [(SITE_TABLES, True), (NODES, False)])
def test_the_contract_in_words_says_what_a_promise_does_not_cover(tmp_path: Path, dataset: str, said: bool) -> None:
    pytest.importorskip("dp_accounting", reason="the accountant is an extra")
    derived = DerivedContract.of(settings_of(dataset=dataset, **PRIVATE), VIEW)
    words = " ".join(summary(derived, STRICT, AuditChain(tmp_path)))
    assert ("sums by which features are scaled" in words) == said and "counts and losses of evaluation" in words


def test_scores_that_clients_show_each_other_are_not_exempt() -> None:
    """Only the server, and a silo of its own devices, may be told scores."""
    settings = settings_of(secure_sum=True)
    contract = contract_of(settings, VIEW)
    told = Line("evaluation", "client", "tell", "send", reply=Evaluation, to=("client",))
    found = list(STRICT.refusals(settings, replace(contract, lines=(*contract.lines, told))))
    assert len(found) == 1 and "shows others Evaluation (label statistic)" in found[0]
