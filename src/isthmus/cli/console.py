"""Output for people: tables on stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from isthmus.api.progress import percent, size
from isthmus.api.several import percent_spread


def stdout() -> Console:
    """Console for results; wide enough for a table where the output is not a terminal."""
    console = Console(highlight=False, emoji=False)
    return console if console.is_terminal else Console(highlight=False, emoji=False, width=140)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Print a plain table; columns of numbers after the first are right-aligned."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, heading in enumerate(headings):
        numeric = i > 0 and all(row[i][0].isdigit() or row[i][0] == "-" for row in rows if row[i])
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    stdout().print(table)


def _privacy(privacy: Mapping[str, Any]) -> str:
    epsilon = privacy.get("epsilon")
    bound = (
        "no bound (no noise)"
        if epsilon is None
        else f"epsilon {epsilon:.3g} at delta {privacy.get('delta')} per {privacy.get('unit')}"
    )
    return f"{bound}; {privacy['warning']}" if privacy.get("warning") else bound


def _from_bins(result: Mapping[str, Any]) -> str:
    """How a mean over clients was formed where secure sums hide the clients' scores."""
    if result.get("per_client") is not None or "client_scores" not in result:
        return ""
    bins = result["client_scores"]
    return "  (secure sums: too few clients to show it)" if bins is None else f"  (within {bins['bin_width'] / 2:g})"


def print_result(result: Mapping[str, Any]) -> None:
    """Print a run's result as a table."""
    sent, seconds, picked = result["bytes"], result["seconds"], result["selected_round"]
    up, down = size(sent["setup_up"] + sent["up"]), size(sent["setup_down"] + sent["down"])
    mean, mean_last = percent(result["test_client_mean"]), percent(result["test_client_mean_last"])
    rows = [
        ("score", f"{percent(result['score'])}  ({result['score_rule']})"),
        (
            "test, pooled",
            f"{percent(result['test'])} at round {picked} (picked by validation), {percent(result['test_last'])} at "
            "the last",
        ),
        ("test, client mean", f"{mean} at round {picked}, {mean_last} at the last{_from_bins(result)}"),
        ("parameters", f"{result['parameters']['trainable']:,} trainable, {result['parameters']['shared']:,} shared"),
        ("sent", f"up {up}, down {down}, between clients {size(sent['peer'])}"),
        (
            "time",
            f"setup {seconds['setup']:.1f} s, training {seconds['train']:.1f} s, evaluation {seconds['eval']:.1f} s",
        ),
        ("data", result["source"]),
        ("folder", result["run_dir"]),
    ]
    if summary := result.get("facts", {}).get("summary"):
        rows.insert(-2, (result["method"], summary))
    if "privacy" in result:
        rows.insert(-2, ("privacy", _privacy(result["privacy"])))
    title = (
        f"{result['method']} on {result['dataset']}, {result['clients']} clients ({result['partition']}), seed "
        f"{result['seed']}"
    )
    print_table(("", ""), rows, title)


def print_results(results: Mapping[str, Any]) -> None:
    """Print several seeds' results, and mean and spread."""
    rows = [
        (str(each["seed"]), percent(each["score"]), percent(each["test"]), percent(each["val"]), each["run_dir"])
        for each in results["results"]
    ]
    mean = [percent_spread(results[key]) for key in ("score", "test", "val")]
    title = f"{results['method']} on {results['dataset']}, {results['clients']} clients ({results['partition']})"
    print_table(("seed", "score", "test, pooled", "val", "folder"), [*rows, ("mean", *mean, "")], title)
    print(f"score: {results['score_rule']}. ± over seeds, population.")
