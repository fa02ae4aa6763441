"""The sheet of a run before it starts: the framework's own messages are on it, and every count by its kind."""

from __future__ import annotations

import pytest

from isthmus.cli.main import main
from isthmus.errors import ConfigError
from isthmus.experiments.disclosure import sheet_of
from isthmus.federation.messages import Kind, kinds_of
from isthmus.methods.evaluation import Evaluation
from isthmus.methods.registry import get_method


def lines(method: str) -> set[tuple[str, str, str, str]]:
    """The framework's own lines of a run with secure sums."""
    own = ("SumKey", "SumKeys", "MailPlan", "MailOrders")
    sheet = sheet_of(get_method(method), secure_sum=True)
    return {
        (line.phase, line.sender, line.receiver, line.message.__name__)
        for line in sheet
        if line.message.__name__ in own and line.protection == "clear"
    }


KEYS = {("keys", "client", "server", "SumKey"), ("keys", "server", "client", "SumKeys")}


def test_keys_and_plans_of_mail_are_on_the_sheet() -> None:
    """Only mail needs plans; scores are summed by every method, and one that pools all data has nobody to hide from."""
    assert lines("central") == set()
    assert lines("local") == lines("fedavg") == KEYS
    mail = {("exchange", "client", "server", "MailPlan"), ("exchange", "server", "client", "MailOrders")}
    assert lines("fedgcn") == KEYS | mail


@pytest.mark.parametrize(("flags", "shown"), [([], False), (["--secure-sum"], True)])
def test_disclose_shows_them(flags: list[str], shown: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["disclose", "fedgcn", *flags]) == 0
    out = capsys.readouterr().out
    assert all((name in out) == shown for name in ("SumKey", "SumKeys", "MailPlan", "MailOrders"))


def test_who_needs_single_updates_has_no_secure_sheet() -> None:
    with pytest.raises(ConfigError, match="gcfl needs to see single clients' messages"):
        sheet_of(get_method("gcfl"), secure_sum=True)


def test_an_evaluation_says_that_it_counts_samples_and_classes() -> None:
    assert kinds_of(Evaluation) == {
        "parts": Kind.LABEL_STATISTIC,
        "parts.correct": Kind.METRIC,
        "parts.total": Kind.COUNT,
        "parts.loss": Kind.METRIC,
    }
    (line,) = [line for line in sheet_of(get_method("fedavg")) if line.message is Evaluation]
    assert line.kinds == (Kind.COUNT, Kind.LABEL_STATISTIC, Kind.METRIC)
