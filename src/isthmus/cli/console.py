"""Output for people: tables on stdout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from isthmus.api.model_words import model_words
from isthmus.api.progress import percent, size
from isthmus.api.several import SPREAD, percent_spread
from isthmus.metrics.scores import at_score_round


def stdout() -> Console:
    """Console for results; wide enough for a table where the output is not a terminal."""
    console = Console(highlight=False, emoji=False)
    return console if console.is_terminal else Console(highlight=False, emoji=False, width=140)


def print_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None, spare: Sequence[str] = ()
) -> list[str]:
    """Print a plain table; columns of numbers after the first are right-aligned. On a narrow terminal columns in
    ``spare`` are left out, the first first, until no cell has to be broken; returns those left out.
    """
    console = stdout()
    dropped: list[str] = []
    waiting = [heading for heading in spare if heading in headings]
    while True:
        kept = [i for i, heading in enumerate(headings) if heading not in dropped]
        table = _table([headings[i] for i in kept], [[row[i] for i in kept] for row in rows], title)
        whole = console.measure(table, options=console.options.update(width=1000)).maximum
        if spare and not console.is_terminal:
            console.width = max(console.width, whole)
        if whole <= console.width or not waiting:
            console.print(table)
            return dropped
        dropped.append(waiting.pop(0))


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str | None) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, heading in enumerate(headings):
        numeric = i > 0 and all(row[i][0].isdigit() or row[i][0] == "-" for row in rows if row[i])
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def received(rows: Iterable[Mapping[str, Any]]) -> str:
    """Kinds of content by protection, from rows of a disclosure sheet; what was sent to be scored comes last."""
    found: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: bool(row["phase"] == "evaluation")):
        how = "scores" if row["phase"] == "evaluation" else row["protection"]
        found.setdefault(how, []).extend(kind.replace("_", " ") for kind in row["kinds"])
    return "; ".join(f"{how}: {', '.join(dict.fromkeys(kinds))}" for how, kinds in found.items()) or "nothing"


def _privacy(privacy: Mapping[str, Any]) -> str:
    epsilon = privacy.get("epsilon")
    bound = (
        "no bound (no noise)"
        if epsilon is None
        else f"epsilon {epsilon:.3g} at delta {privacy.get('delta')} per {privacy.get('unit')}"
    )
    relies = f"; rests on {privacy['relies_on']}" if "relies_on" in privacy else ""
    return f"{bound}{relies}; {privacy['warning']}" if privacy.get("warning") else bound + relies


def _from_bins(result: Mapping[str, Any]) -> str:
    """How a mean over clients was formed where secure sums hide the clients' scores."""
    if result.get("per_client") is not None or "client_scores" not in result:
        return ""
    bins = result["client_scores"]
    return "  (secure sums: too few clients to show it)" if bins is None else f"  (within {bins['bin_width'] / 2:g})"


def print_result(result: Mapping[str, Any]) -> None:
    """Print a run's result as a table."""
    sent, seconds = result["bytes"], result["seconds"]
    up, down = size(sent["setup_up"] + sent["up"]), size(sent["setup_down"] + sent["down"])
    rows = [
        ("data", f"{result['dataset']} ({result['source']}), {result['clients']} clients ({result['partition']})"),
        ("split", f"{result['split']}, seed {result['seed']}"),
        ("settings", _settings(result)),
        ("model", _model(result)),
        ("score", f"{percent(result['score'])}  ({result['score_rule']})"),
        *_rounds(result),
        ("parameters", f"{result['parameters']['trainable']:,} trainable, {result['parameters']['shared']:,} shared"),
        ("sent", f"up {up}, down {down}, between clients {size(sent['peer'])}"),
        (
            "time",
            f"setup {seconds['setup']:.1f} s, training {seconds['train']:.1f} s, evaluation {seconds['eval']:.1f} s",
        ),
        ("folder", result["run_dir"]),
    ]
    if summary := result.get("facts", {}).get("summary"):
        rows.insert(-1, (result["method"], summary))
    if "privacy" in result:
        rows.insert(-1, ("privacy", _privacy(result["privacy"])))
    print_table(("", ""), rows, f"{result['method']} on {result['dataset']}")


def _model(result: Mapping[str, Any]) -> str:
    """The model that was built, and whether the method trains more than it."""
    model = result.get("model")
    own = (model or {}).get("parameters")
    more = own is not None and result["parameters"]["trainable"] > own
    return model_words(model) + (f"; of the trainable numbers {own:,} are its" if more else "")


def _settings(result: Mapping[str, Any]) -> str:
    """Whose settings, and which round they keep."""
    variant = "" if result.get("variant") in (None, "none") else f", variant {result['variant']}"
    profile = "" if result.get("profile") in (None, "paper") else f", profile {result['profile']}"
    kept = {"last": "the last round's model is kept"}.get(
        result.get("selection", "last"), f"the round that validation picks is kept ({result.get('selection')})"
    )
    return f"preset {result['preset']}{variant}{profile}; {kept}"


def _rounds(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Test scores, one round in each row."""
    picked, last = result["selected_round"], result["rounds"]
    rows = [
        (f"round {last}, the last", result["test_last"], result["test_client_mean_last"]),
        (f"round {picked}, picked", result["test"], result["test_client_mean"]),
    ]
    if picked == last:
        rows = [(f"round {last}, the last", result["test"], result["test_client_mean"])]
    elif result.get("score_round", picked) == picked:
        rows.reverse()
    return [
        (name, f"test, pooled {percent(pooled)}; test, mean over clients {percent(mean)}{_from_bins(result)}")
        for name, pooled, mean in rows
    ]


def print_results(results: Mapping[str, Any]) -> None:
    """Print several seeds' results, and mean and spread."""
    column = at_score_round(results["results"][0])
    rows = [
        (str(each["seed"]), percent(each["score"]), percent(each[column]), percent(each["val"]), each["run_dir"])
        for each in results["results"]
    ]
    mean = [percent_spread(results[key]) for key in ("score", column, "val")]
    one = results["results"][0]
    title = (
        f"{results['method']} on {results['dataset']}, {results['clients']} clients ({results['partition']}), split "
        f"{results['split']}, {_settings(one)}"
    )
    print_table(("seed", "score", "test, pooled", "val, picked", "folder"), [*rows, ("mean", *mean, "")], title)
    print(f"model: {model_words(one.get('model'))}")
    print(f"score: {results['score_rule']}; test, pooled is of the same round. {SPREAD}.")
