"""Figures as plain dictionaries, in a small part of plotly's format, which `draw.js` draws.

Colours are tokens such as `@ink` or `@s0/0.15`: names of the page's CSS variables, which the script puts in when it
draws, so that one figure serves the light and the dark theme. Every text that came from a file passes `label()`, so
that what it holds is text and never markup.
"""

from __future__ import annotations

import html
import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.report import words
from isthmus.report.runs import Partition, Run, natural
from isthmus.report.tables import Group, mean_and_spread

Figure = dict[str, Any]

SERIES = 8  # colours in the page's palette; beyond it line styles tell methods apart
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "pentagon")
_MOST_BARS = 120  # above it bars become too thin to see, and clients are drawn as points
_MOST_TICKS = 20
_MOST_HOVERS = 3600  # above it the texts of a heat map's cells would be most of the page; the script tells the number
_TICKS_IN_PAIR = 12  # two heat maps share the width of the page
_NUMBERED = re.compile(r"client[-_ ]?(\d+)")

# Warm where content tells something about the data, green where it is protected by itself, blue and grey where it tells
# little.
KIND_COLOURS = {
    "model": "@s0",
    "gradient": "@s5",
    "embedding": "@s4",
    "feature": "@s4/0.75",
    "feature statistic": "@s3/0.65",
    "random start": "@s7/0.5",
    "structure": "@s1",
    "label statistic": "@s3",
    "identifier": "@s6",
    "share": "@s2",
    "ciphertext": "@s2/0.55",
    "count": "@s7",
    "metric": "@s7/0.65",
    "framing": "@s7/0.35",
}
EVALUATION = "evaluation"  # the phase under which the ledger files it
DIRECTIONS = ("up", "down", "peer", "device")
ROUNDS = {"title": {"text": "round"}, "rangemode": "tozero", "whole": True}
"""The axis of rounds: no half ones."""


def label(text: str, longest: int = 48) -> str:
    """Text from a file, safe inside a figure: shortened and escaped."""
    return html.escape(text if len(text) <= longest else text[: longest - 1] + "…", quote=False)


def series_colour(index: int, alpha: float | None = None) -> str:
    """The colour of the method at this place in the table."""
    return f"@s{index % SERIES}" + (f"/{alpha}" if alpha is not None else "")


def series_dash(index: int) -> str:
    """Solid for as many methods as there are colours; when colours come round again, the line style changes."""
    return _DASHES[index // SERIES % len(_DASHES)]


def learning_curve(groups: Sequence[Group], which: str) -> Figure | None:
    """Validation (`val`) or test (`test`) score against rounds: mean over seeds, band of one spread, the selected round
    marked.
    """
    data: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        by_step: dict[int, list[float]] = {}
        for run in group.runs:
            for point in run.curve:
                value = point.val if which == "val" else point.test
                if value is not None:
                    by_step.setdefault(point.step, []).append(100 * value)
        if not by_step:
            continue
        steps = sorted(by_step)
        stats = [mean_and_spread(by_step[step]) for step in steps]
        means = [mean or 0.0 for mean, _ in stats]
        low = [
            (step, mean - spread, mean + spread)
            for step, mean, (_, spread) in zip(steps, means, stats, strict=True)
            if spread is not None
        ]
        if low:
            data.append(
                {
                    "type": "scatter",
                    "x": [step for step, _, _ in low] + [step for step, _, _ in reversed(low)],
                    "y": [bottom for _, bottom, _ in low] + [top for _, _, top in reversed(low)],
                    "fill": "toself",
                    "fillcolor": series_colour(index, 0.16),
                    "line": {"width": 0},
                    "mode": "lines",
                    "hoverinfo": "skip",
                    "showlegend": False,
                    "meta": {"series": index},
                }
            )
        data.append(
            _line(
                index,
                group,
                list(zip(steps, means, strict=True)),
                [_curve_hover(group, by_step[step]) for step in steps],
            )
        )
        marks = [mark for run in group.runs if (mark := _selected(run, which)) is not None]
        if marks:
            data.append(_marks(index, marks) | {"cliponaxis": False})
    if not data:
        return None
    layout = base_layout(320, x=ROUNDS, y={"ticksuffix": " %"}, zoom=True)
    layout["hovermode"] = "x unified"
    return {"data": data, "layout": layout}


def loss_curve(groups: Sequence[Group], which: str) -> Figure | None:
    """Training (`train_loss`) or validation loss (`val_loss`) against rounds: mean over seeds."""
    data = []
    for index, group in enumerate(groups):
        by_step: dict[int, list[float]] = {}
        for run in group.runs:
            for point in run.curve:
                value = point.train_loss if which == "train_loss" else point.val_loss
                if value is not None:
                    by_step.setdefault(point.step, []).append(value)
        points = [(float(step), sum(by_step[step]) / len(by_step[step])) for step in sorted(by_step)]
        if points:
            hover = [f"{label(group.label)}, round {step:.0f}: {loss:.4f}" for step, loss in points]
            data.append(_line(index, group, points, hover))
    if not data:
        return None
    return {
        "data": data,
        "layout": base_layout(280, x=ROUNDS, y={}, zoom=True),
    }


COSTS = {"sent": "bytes sent, setup included", "seconds": "seconds, setup and evaluation included"}


def loading(run: Run) -> float:
    """Seconds of the first evaluated round beyond setup and what rounds usually take: code that is compiled and loaded
    once in a process, whichever method happens to come first.
    """
    timed = [(point.step, point.seconds) for point in run.curve if point.seconds is not None]
    if len(timed) < 3:
        return 0.0
    usual = statistics.median((b - a) / (to - at) for (at, a), (to, b) in itertools.pairwise(timed))
    step, spent = timed[0]
    return max(0.0, spent - (run.number("seconds", "setup") or 0.0) - step * usual)


def score_against_cost(groups: Sequence[Group], cost: str) -> Figure | None:
    """Test score against what a run had sent (`sent`) or how long it had taken (`seconds`): means over seeds, round by
    round. A method that sends nothing is a level line at the height it reaches.
    """
    data: list[dict[str, Any]] = []
    most = max(
        (getattr(point, cost) or 0.0 for group in groups for run in group.runs for point in run.curve), default=0.0
    )
    if not most:
        return None
    for index, group in enumerate(groups):
        by_step: dict[int, list[tuple[float, float]]] = {}
        for run in group.runs:
            once = loading(run) if cost == "seconds" else 0.0
            for point in run.curve:
                spent = getattr(point, cost)
                if point.test is not None and spent is not None:
                    by_step.setdefault(point.step, []).append((spent - once, 100 * point.test))
        points = [
            tuple(sum(values) / len(values) for values in zip(*by_step[step], strict=True)) for step in sorted(by_step)
        ]
        if not points:
            continue
        if points[-1][0] == 0.0:
            mean = mean_and_spread(run.number("test") for run in group.runs)[0] or 0.0
            line = _line(index, group, [(0.0, 100 * mean), (most, 100 * mean)], [])
            line["line"] = {**line["line"], "dash": "dot"}
            line["hovertext"] = f"{label(group.label)}: {100 * mean:.2f} %, nothing sent"
            data.append(line)
            continue
        told = words.size if cost == "sent" else words.seconds
        hover = [f"{label(group.label)}: {score:.2f} % after {told(spent)}" for spent, score in points]
        data.append(_line(index, group, points, hover))
    axis = {"title": {"text": COSTS[cost]}, "rangemode": "tozero"}
    axis |= {"tickformat": "~s", "ticksuffix": "B"} if cost == "sent" else {"ticksuffix": " s"}
    return {"data": data, "layout": base_layout(300, x=axis, y={"ticksuffix": " %"}, zoom=True)} if data else None


def confusion_matrix(classes: Sequence[str], counts: Sequence[Sequence[int]]) -> Figure:
    """Test samples by true class (row) and class they were given (column); colours are shares of the row."""
    shares = [[100 * count / (sum(row) or 1) for count in row] for row in counts]
    names = [label(name, 16) for name in classes]
    hover = [
        [
            f"true {names[i]}, given {names[j]}<br><b>{count:,}</b> ({shares[i][j]:.1f} % of the row)"
            for j, count in enumerate(row)
        ]
        for i, row in enumerate(counts)
    ]
    text = [[f"{count:,}" for count in row] for row in counts]
    figure = _heat_map(shares, hover, classes, _axis_of(classes, _TICKS_IN_PAIR), text, " %")
    figure["layout"]["xaxis"]["title"] = {"text": "given class"}
    figure["layout"]["yaxis"] |= {"title": {"text": "true class"}}
    figure["layout"]["height"] = min(360, 90 + 44 * len(classes))
    return figure


def _line(index: int, group: Group, points: Sequence[tuple[float, ...]], hover: Sequence[str]) -> dict[str, Any]:
    """The line of a method, with a text for each of its points; a single point is a symbol."""
    return {
        "type": "scatter",
        "mode": "lines" if len(points) > 1 else "markers",
        "name": label(group.label),
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "line": {"color": series_colour(index), "width": 2, "dash": series_dash(index)},
        "marker": {"color": series_colour(index), "symbol": _SYMBOLS[index % SERIES], "size": 7},
        "hovertext": list(hover),
        "hoverinfo": "text",
        "meta": {"series": index},
    }


def _marks(index: int, points: Sequence[tuple[float, ...]]) -> dict[str, Any]:
    """Selected rounds on the line of a method."""
    marker = {
        "color": series_colour(index),
        "symbol": _SYMBOLS[index % SERIES],
        "size": 8,
        "line": {"color": "@page", "width": 1.5},
    }
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "marker": marker,
        "hoverinfo": "skip",
        "showlegend": False,
        "meta": {"series": index},
    }


def minority_path(groups: Sequence[Group]) -> Figure | None:
    """Test accuracy on minority nodes against that on all nodes, round after round, whatever the score of the runs is:
    means over seeds, the selected rounds marked.

    A method may gain on minority nodes only because its selected round is a later one; at equal overall score that
    shows.
    """
    data: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        by_step: dict[int, list[tuple[float, float]]] = {}
        for run in group.runs:
            for point in run.curve:
                if point.accuracy is not None and point.minority is not None:
                    by_step.setdefault(point.step, []).append((100 * point.accuracy, 100 * point.minority))
        if not by_step:
            continue
        steps = sorted(by_step)
        means = [tuple(sum(values) / len(values) for values in zip(*by_step[step], strict=True)) for step in steps]
        hover = [
            f"{label(group.label)}, round {step}: all {overall:.2f} %, minority {minority:.2f} %"
            for step, (overall, minority) in zip(steps, means, strict=True)
        ]
        data.append(_line(index, group, means, hover))
        marks = [(_selected_accuracy(run), run.number("test_minority")) for run in group.runs]
        known = [
            (100 * overall, 100 * minority)
            for overall, minority in marks
            if overall is not None and minority is not None
        ]
        data.append(_marks(index, known))
    if not data:
        return None
    axes = [
        {"title": {"text": text}, "ticksuffix": " %"} for text in ("accuracy, all test nodes", "accuracy, minority")
    ]
    return {"data": data, "layout": base_layout(380, x=axes[0], y=axes[1], zoom=True)}


def client_scores(groups: Sequence[Group]) -> Figure | None:
    """Test score of every client under every method: mean over seeds, whiskers from the lowest to the highest seed."""
    clients = sorted(
        {row.client for group in groups for run in group.runs if not run.pooled for row in run.per_client}, key=natural
    )
    if not clients:
        return None
    position = {client: index for index, client in enumerate(clients)}
    bars = len(clients) * len(groups) <= _MOST_BARS
    data: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        if all(run.pooled for run in group.runs):
            data.append(_yardstick(group, index, len(clients)))
            continue
        scores: dict[str, list[float]] = {}
        sizes: dict[str, list[int]] = {}
        for run in group.runs:
            for row in run.per_client:
                if row.test_score is not None:
                    scores.setdefault(row.client, []).append(100 * row.test_score)
                if row.test is not None:
                    sizes.setdefault(row.client, []).append(row.test)
        shown = [client for client in clients if client in scores]
        if not shown:
            continue
        means = [sum(scores[client]) / len(scores[client]) for client in shown]
        trace: dict[str, Any] = {
            "name": label(group.label),
            "x": [position[client] for client in shown],
            "y": means,
            "hovertext": [_client_hover(group, client, scores[client], sizes.get(client, [])) for client in shown],
            "hoverinfo": "text",
            "meta": {"series": index},
        }
        if bars:
            trace |= {"type": "bar", "marker": {"color": series_colour(index)}}
        else:
            marker = {"color": series_colour(index, 0.8), "symbol": _SYMBOLS[index % SERIES], "size": 6}
            trace |= {"type": "scatter", "mode": "markers", "marker": marker}
        if bars and len(group.runs) > 1:
            trace["error_y"] = {
                "type": "data",
                "symmetric": False,
                "array": [max(scores[client]) - mean for client, mean in zip(shown, means, strict=True)],
                "arrayminus": [mean - min(scores[client]) for client, mean in zip(shown, means, strict=True)],
                "color": "@ink/0.55",
                "thickness": 1,
                "width": 0,
            }
        data.append(trace)
    if not data:
        return None
    y = {"ticksuffix": " %", "rangemode": "tozero"} if bars else {"ticksuffix": " %"}
    layout = base_layout(330, x=_client_axis(clients), y=y)
    layout |= {"barmode": "group", "bargap": 0.25, "bargroupgap": 0.04}
    return {"data": data, "layout": layout}


def _yardstick(group: Group, index: int, clients: int) -> dict[str, Any]:
    """A method that pools all data has no clients of its own: its pooled score is a line across theirs."""
    mean, spread = mean_and_spread(run.number("test") for run in group.runs)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": label(group.label),
        "x": [-0.5, clients - 0.5],
        "y": [100 * (mean or 0.0)] * 2,
        "line": {"color": series_colour(index), "width": 2, "dash": "dash"},
        "hovertext": f"{label(group.label)}, all data in one place<br>{words.score(mean, spread)} %",
        "hoverinfo": "text",
        "meta": {"series": index},
    }


def bytes_by_kind(groups: Sequence[Group]) -> Figure | None:
    """Bytes of a whole run by direction (rows) and kind of content (colours): mean over seeds.

    Evaluation is not in it: how often scores are asked for is the experimenter's choice, not the method's cost.
    """
    ticks: list[tuple[float, str]] = []
    totals: dict[str, dict[float, float]] = {}
    names: dict[float, str] = {}
    silent: dict[float, str] = {}
    place = 0.0
    for group in groups:
        known = [run for run in group.runs if run.disclosure is not None]
        if not known:
            continue
        sums = _direction_sums(known)
        first = True
        for direction in DIRECTIONS:
            if direction not in sums:
                continue
            word = {"peer": "between clients", "device": "devices"}.get(direction, direction)
            ticks.append((place, f"<b>{label(group.label, 28)}</b>  {word}" if first else word))
            names[place] = f"{label(group.label)}, {word}"
            for kind, size in sums[direction].items():
                totals.setdefault(kind, {})[place] = size
            first = False
            place += 1.0
        if not sums:
            ticks.append((place, f"<b>{label(group.label, 28)}</b>"))
            silent[place] = "evaluation only" if any(run.disclosure for run in known) else "no messages"
            place += 1.0
        place += 0.45  # a gap between methods
    if not totals:
        return None
    order = [kind for kind in KIND_COLOURS if kind in totals] + sorted(
        kind for kind in totals if kind not in KIND_COLOURS
    )
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": label(words.kind(kind)),
            "y": list(totals[kind]),
            "x": list(totals[kind].values()),
            "marker": {"color": KIND_COLOURS.get(kind, "@muted"), "line": {"color": "@page", "width": 1}},
            "hovertext": [
                f"<b>{label(words.kind(kind))}</b>: {words.size(size)}<br>{names[at]}"
                for at, size in totals[kind].items()
            ],
            "hoverinfo": "text",
        }
        for kind in order
    ]
    layout = base_layout(
        int(90 + 34 * place),
        x={"tickformat": "~s", "ticksuffix": "B", "rangemode": "tozero", "nticks": 6, "showgrid": True},
        y={
            "tickvals": [at for at, _ in ticks],
            "ticktext": [text for _, text in ticks],
            "range": [place - 0.75, -0.7],  # first method on top
            "showgrid": False,
            "zeroline": False,
        },
    )
    layout |= {"barmode": "stack", "bargap": 0.3, "showlegend": True}
    layout["legend"] = {
        "orientation": "h",
        "x": 0,
        "y": 1.0,
        "yanchor": "bottom",
        "traceorder": "normal",
        "font": {"size": 12},
    }
    layout["margin"]["t"] = 36
    layout["annotations"] = [
        {
            "x": 0,
            "y": at,
            "xanchor": "left",
            "xshift": 6,
            "showarrow": False,
            "text": text,
            "font": {"color": "@muted", "size": 12},
        }
        for at, text in silent.items()
    ]
    return {"data": data, "layout": layout}


def client_sizes(partition: Partition, run: Run) -> Figure:
    """Nodes or graphs per client; the rest of what is known about a client in the hover."""
    counts = {row.client: row for row in run.per_client}
    hover = []
    for index, client in enumerate(partition.clients):
        lines = [f"<b>{label(client)}</b>", f"{partition.sizes[index]:,} {partition.things}"]
        row = counts.get(client)
        if row is not None and None not in (row.train, row.val, row.test):
            lines.append(f"{row.train:,} train, {row.val:,} validation, {row.test:,} test")
        inside, same = partition.edges_inside[index], partition.homophily[index]
        if inside is not None:
            lines.append(f"{inside:,} arcs inside (an edge counts in both directions)")
        if same is not None:
            lines.append(f"homophily {same:.2f}")
        hover.append("<br>".join(lines))
    data = {
        "type": "bar",
        "x": list(range(len(partition.clients))),
        "y": list(partition.sizes),
        "marker": {"color": "@s0"},
        "hovertext": hover,
        "hoverinfo": "text",
    }
    layout = base_layout(
        230,
        x=_client_axis(partition.clients),
        y={"title": {"text": partition.things}, "rangemode": "tozero", "nticks": 5},
    )
    layout["bargap"] = 0.3
    return {"data": [data], "layout": layout}


def cross_edges(partition: Partition) -> Figure | None:
    """Edges between every two clients as a heat map; the diagonal is left empty, it is not about crossing."""
    matrix = partition.cross_edges
    if matrix is None or len(matrix) < 2:
        return None
    size = len(matrix)
    values = [[None if i == j else matrix[i][j] for j in range(size)] for i in range(size)]
    names = [label(client) for client in partition.clients]
    hover = [
        [f"{names[i]} and {names[j]}<br><b>{matrix[i][j]:,}</b> cross edges" if i != j else "" for j in range(size)]
        for i in range(size)
    ]
    text = [[f"{matrix[i][j]:,}" if i != j else "" for j in range(size)] for i in range(size)]
    return _heat_map(values, hover, partition.clients, _client_axis(partition.clients, _TICKS_IN_PAIR), text, "")


def label_skew(partition: Partition) -> Figure | None:
    """Share of each class among what a client holds as a heat map."""
    counts = partition.labels
    if counts is None:
        return None
    shares = [[100 * count / (sum(row) or 1) for count in row] for row in counts]
    hover = [
        [
            f"{label(client)}, class {k}<br><b>{share:.1f} %</b> ({counts[i][k]:,} {partition.things})"
            for k, share in enumerate(shares[i])
        ]
        for i, client in enumerate(partition.clients)
    ]
    classes = [str(k) for k in range(len(counts[0]))]
    axis = _axis_of(classes, _TICKS_IN_PAIR) | {"title": {"text": "class"}}
    return _heat_map(
        shares, hover, partition.clients, axis, [[f"{share:.0f}" for share in row] for row in shares], " %"
    )


def label_distance(partition: Partition) -> float | None:
    """Mean over clients of the total variation distance between a client's label mix and that of all clients
    together.
    """
    counts = partition.labels
    if counts is None:
        return None
    whole = [sum(column) for column in zip(*counts, strict=True)]
    total = sum(whole)
    distances = [
        sum(abs(count / sum(row) - everyone / total) for count, everyone in zip(row, whole, strict=True)) / 2
        for row in counts
        if sum(row)
    ]
    return sum(distances) / len(distances) if distances else None


def direction(sender: str, receiver: str) -> str:
    """Which way a message went, in the words of `result.json`."""
    if "device" in (sender, receiver):
        return "device"
    if receiver == "server":
        return "up"
    return "down" if sender == "server" else "peer"


def _direction_sums(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Mean bytes over runs, by direction and kind. A row that does not split its bytes counts under its only kind, else
    `mixed`.
    """
    sums: dict[str, dict[str, float]] = {}
    for run in runs:
        for row in run.disclosure or ():
            if row.phase == EVALUATION:
                continue
            split = row.bytes_by_kind or ((row.kinds[0] if len(row.kinds) == 1 else "mixed", row.bytes),)
            framing = row.bytes - sum(size for _, size in split)
            of_direction = sums.setdefault(direction(row.sender, row.receiver), {})
            for kind, size in (*split, *((("framing", framing),) if framing > 0 else ())):
                name = words.kind(kind)
                of_direction[name] = of_direction.get(name, 0.0) + size / len(runs)
    return sums


def _curve_hover(group: Group, values: Sequence[float]) -> str:
    mean, spread = mean_and_spread(values)
    few = f", {len(values)} of {len(group.runs)} seeds" if len(values) < len(group.runs) else ""
    return f"{label(group.label)}: {mean:.2f}" + (f" ± {spread:.2f}" if spread is not None else "") + few


def _client_hover(group: Group, client: str, scores: Sequence[float], sizes: Sequence[int]) -> str:
    lines = [f"<b>{label(client)}</b>, {label(group.label)}", f"{sum(scores) / len(scores):.2f} %"]
    if len(scores) > 1:
        lines[-1] += f" (seeds {min(scores):.2f} to {max(scores):.2f})"
    if sizes:
        low, high = min(sizes), max(sizes)
        things = group.runs[0].things
        lines.append(f"{low:,} test {things}" if low == high else f"{low:,} to {high:,} test {things}")
    return "<br>".join(lines)


def _selected(run: Run, which: str) -> tuple[int, float] | None:
    """Where the selected round lies on this run's curve. Only a curve of one phase says so: its steps are its
    rounds.
    """
    chosen = run.number("selected_round")
    for point in run.curve:
        value = point.val if which == "val" else point.test
        if point.step == chosen and value is not None:
            return point.step, 100 * value
    return None


def _selected_accuracy(run: Run) -> float | None:
    """Accuracy on all test nodes at the selected round; a result holds it only where it is the score."""
    if run.metric == "accuracy":
        return run.number("test")
    chosen = run.number("selected_round")
    return next((point.accuracy for point in run.curve if point.step == chosen), None)


def _axis_of(names: Sequence[str], most: int = _MOST_TICKS) -> dict[str, Any]:
    """Positions 0, 1, ... named; where there are many, every second, fifth, ... one only."""
    steps = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    step = next((step for step in steps if len(names) <= step * most), len(names))
    at = list(range(0, len(names), step))
    return {
        "tickvals": at,
        "ticktext": [label(names[i], 16) for i in at],
        "range": [-0.5, len(names) - 0.5],
        "showgrid": False,
        "zeroline": False,
    }


def _client_axis(clients: Sequence[str], most: int = _MOST_TICKS) -> dict[str, Any]:
    """`client-0`, `client-1`, ... are labelled by their numbers, with client as the axis title."""
    numbers = [match.group(1) for client in clients if (match := _NUMBERED.fullmatch(client))]
    if len(numbers) == len(clients) and len(set(numbers)) == len(clients):
        return _axis_of(numbers, most) | {"title": {"text": "client"}}
    return _axis_of(clients, most)


def _heat_map(
    values: Sequence[Sequence[float | None]],
    hover: Sequence[Sequence[str]],
    clients: Sequence[str],
    x: Mapping[str, Any],
    text: Sequence[Sequence[str]],
    suffix: str,
) -> Figure:
    small = len(values) <= 10 and len(values[0]) <= 10
    trace = {
        "type": "heatmap",
        "z": values,
        "hovertext": hover,
        "hoverinfo": "text",
        "hoverongaps": False,
        "xgap": 1,
        "ygap": 1,
        "zmin": 0,
        "zmax": max((value for row in values for value in row if value is not None), default=0) or 1,
        "colorscale": [[0, "@heat0"], [0.5, "@heat1"], [1, "@heat2"]],
        "colorbar": {
            "thickness": 8,
            "outlinewidth": 0,
            "len": 0.9,
            "ticksuffix": suffix,
            "nticks": 5,
            "tickfont": {"color": "@muted", "size": 11},
        },
    }
    if len(values) * len(values[0]) > _MOST_HOVERS:
        del trace["hovertext"]
    if small:
        trace |= {"text": text, "texttemplate": "%{text}", "textfont": {"size": 10}}
    rows = dict(_client_axis(clients))
    rows["range"] = [len(clients) - 0.5, -0.5]  # first client on top
    layout = base_layout(360, x=dict(x), y=rows)
    return {"data": [trace], "layout": layout}


def base_layout(height: int, *, x: Mapping[str, Any], y: Mapping[str, Any], zoom: bool = False) -> dict[str, Any]:
    """What all figures share: transparent ground, thin grid, room for labels."""
    axis = {
        "gridcolor": "@grid",
        "zerolinecolor": "@grid",
        "linecolor": "@line",
        "tickfont": {"color": "@muted", "size": 12},
        "automargin": True,
        "ticks": "",
        "fixedrange": not zoom,
    }
    titled = {"font": {"color": "@muted", "size": 12}, "standoff": 8}
    axes = []
    for own in (x, y):
        merged: dict[str, Any] = {**axis, **own}
        if "title" in merged:
            merged["title"] = {**titled, **merged["title"]}
        axes.append(merged)
    return {
        "height": height,
        "xaxis": {"showgrid": False, **axes[0]},
        "yaxis": axes[1],
        "font": {"family": "@font", "color": "@ink", "size": 13},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hoverlabel": {
            "bgcolor": "@panel",
            "bordercolor": "@line",
            "font": {"color": "@ink", "family": "@font", "size": 12},
            "align": "left",
        },
        "margin": {"l": 8, "r": 8, "t": 10, "b": 8},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "@line", "activecolor": "@muted"},
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": "zoom" if zoom else False,
    }
