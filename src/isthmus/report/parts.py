"""Pieces of the page that need no figure: sentences about a scenario, the result table, who saw what, settings,
provenance.

Each function returns finished HTML or, where its name says sentence, headline or words, plain text for the caller to
escape.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence

from isthmus.report import figures, words
from isthmus.report.facts import fact_rows
from isthmus.report.runs import Disclosure, Partition, Run
from isthmus.report.tables import Column, Group, ResultRow, Scenario, columns


def esc(text: object) -> str:
    """Text from a file, safe in HTML (attributes too)."""
    return html.escape(str(text), quote=True)


# -- words about a scenario ------------------------------------------------------------------------


def headline(scenario: Scenario, groups: Sequence[Group]) -> str:
    methods = list(dict.fromkeys(group.method for group in groups))
    named = words.listing(methods) if len(methods) <= 5 else f"{len(methods)} methods"
    owners = f", {words.plural(scenario.clients, 'client')}" if scenario.clients is not None else ""
    return f"{named} on {words.dataset(scenario.dataset)}{owners}"


def in_words(scenario: Scenario, runs: Sequence[Run]) -> str:
    seeds = sorted({run.seed for run in runs})
    repeated = (
        f"Repeated with seeds {words.listing([str(seed) for seed in seeds])}."
        if len(seeds) > 1
        else f"One seed ({seeds[0]})."
    )
    return (
        f"{words.dataset(scenario.dataset)} {words.partition(scenario.partition, scenario.clients)}; "
        f"{words.split(scenario.split, runs[0].things)}. "
        f"Scores are {words.metric(scenario.metric)} in percent. {repeated}"
    )


def tiles(groups: Sequence[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    partition = next((run.partition for run in runs if run.partition is not None), None)
    many = "methods" if len({group.method for group in groups}) == len(groups) else "variants"
    tiles = [(many, str(len(groups))), ("runs", str(len(runs))), ("seeds", str(len({run.seed for run in runs})))]
    if groups[0].scenario.clients is not None:
        tiles.append(("clients", f"{groups[0].scenario.clients:,}"))
    if partition is not None:
        tiles.append((partition.things, f"{sum(partition.sizes):,}"))
        if partition.cross_share is not None:
            tiles.append(("edges that cross", f"{100 * partition.cross_share:.0f} %"))
    return (
        '<dl class="tiles">'
        + "".join(f"<div><dt>{esc(name)}</dt><dd>{esc(value)}</dd></div>" for name, value in tiles)
        + "</dl>"
    )


def redrawn(runs: Sequence[Run]) -> bool:
    """Whether different seeds have different partitions."""
    first: dict[int, Partition] = {}
    for run in runs:
        if run.partition is not None:
            first.setdefault(run.seed, run.partition)
    return len(set(first.values())) > 1


def doubts(runs: Sequence[Run]) -> str:
    """What makes a comparison unfair, said before the numbers: other data, or another partition under the same seed."""
    doubts = []
    sources = sorted({run.text("source") for run in runs} - {""})
    if len(sources) > 1:
        doubts.append(
            f"The runs read their data from different sources ({words.listing(sources)}): node order and splits may "
            "differ."
        )
    seen: dict[int, Partition] = {}
    doubts += differences(runs)
    unequal = {
        run.seed
        for run in runs
        if run.partition is not None and seen.setdefault(run.seed, run.partition) != run.partition
    }
    if unequal:
        names = words.listing([str(seed) for seed in sorted(unequal)])
        doubts.append(f"Under seed {names} not all methods had the same partition: their scores are not like for like.")
    return '<ul class="notes">' + "".join(f"<li>{esc(doubt)}</li>" for doubt in doubts) + "</ul>" if doubts else ""


def differences(runs: Sequence[Run]) -> list[str]:
    """What else than the method differs, and may explain a difference: settings' origin, the model, the score."""
    found = []
    told = {
        "preset": lambda run: run.text("preset"),
        "way to form the score": lambda run: run.text("score_rule"),
        "model": _model,
    }
    for what, value in told.items():
        by_value: dict[str, list[str]] = {}
        for run in runs:
            text = value(run)
            if text and run.method not in by_value.setdefault(text, []):
                by_value[text].append(run.method)
        if len(by_value) > 1:
            each = "; ".join(f"{words.listing(names)}: {text}" for text, names in by_value.items())
            found.append(f"Not the same {what} for all ({each}): scores may differ for that reason.")
    return found


def _model(run: Run) -> str:
    """Backbone and widths of the model that was built, in a few words."""
    model = run.result.get("model")
    if not isinstance(model, Mapping) or not isinstance(model.get("layers"), list):
        return ""
    parts = [str(model.get("backbone")), "-".join(map(str, model["layers"]))]
    parts += [name.replace("_", " ") for name in ("input_norm", "head") if model.get(name)]
    return " ".join(parts)


def size_sentence(partition: Partition) -> str:
    low, high = min(partition.sizes), max(partition.sizes)
    known = [value for value in partition.homophily if value is not None]
    same = (
        f", and {min(known):.2f} to {max(known):.2f} of a client's edges join nodes of the same class (homophily)"
        if known
        else ""
    )
    return f"Clients hold {low:,} to {high:,} {partition.things}{same}."


def cross_sentence(partition: Partition) -> str:
    share = (
        f"{100 * partition.cross_share:.1f} % of all edges cross between clients; "
        if partition.cross_share is not None
        else ""
    )
    return f"{share}the stronger the colour, the more edges join the two clients."


def skew_sentence(partition: Partition) -> str:
    distance = figures.label_distance(partition)
    mean = (
        f"On average a client's mix lies {distance:.2f} from the whole "
        if distance is not None
        else "Distance from the whole "
    )
    return mean + "(total variation: 0 is the same mix, 1 nothing in common)."


# -- the result table ------------------------------------------------------------------------------


def result_sentence(rows: Sequence[ResultRow]) -> str:
    best = [row for row in rows if row.best]
    several = any(row.score_spread is not None for row in rows)
    spread = "± is the standard deviation over seeds." if several else "One seed: the spread is unknown."
    if not best:
        return f"Mean over seeds. {spread}" if several else spread
    value = words.score(best[0].score, best[0].score_spread)
    references = ", ".join(f"{row.label} {words.percent(row.score)}\u00a0%" for row in rows if row.reference)
    measured = f" For reference: {references}." if references else ""
    names = words.listing([row.label for row in best])
    return f"Highest score of a federated method: {names} with {value}\u00a0%.{measured} {spread}"


def result_table(rows: Sequence[ResultRow]) -> str:
    shown = columns(rows)
    head = "".join(
        f'<th scope="col"{_numeric(column)}><button type="button">{esc(column.heading)}</button></th>'
        for column in shown
    )
    body = []
    for index, row in enumerate(rows):
        mark = ' <small class="ref">reference</small>' if row.reference else ""
        cells = [f'<th scope="row"><span class="name">{_key(index)}<span>{esc(row.label)}{mark}</span></span></th>']
        cells += [
            f'<td{_numeric(column)} data-value="{_sorted_by(column, row)}">{_cell(column.cell(row))}</td>'
            for column in shown[1:]
        ]
        best = ' class="best"' if row.best else ' class="reference"' if row.reference else ""
        body.append(f"<tr{best}>{''.join(cells)}</tr>")
    caption = "<caption>Press a heading to sort by its column.</caption>"
    return (
        f'<table class="results sortable">{caption}<thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'
    )


def _sorted_by(column: Column, row: ResultRow) -> str:
    value = column.value(row)
    return "" if value is None else repr(float(value))


def class_table(groups: Sequence[Group]) -> str:
    """Precision and recall of every class, of each method: counts of all seeds together."""
    lines, names = [], next(run.confusion.classes for group in groups for run in group.runs if run.confusion)
    for index, group in enumerate(groups):
        counts = summed_confusion(group)
        if counts is None or len(counts) != len(names):
            continue
        cells = []
        for k in range(len(names)):
            actual, given = sum(counts[k]), sum(row[k] for row in counts)
            cells.append(words.percent(counts[k][k] / given) if given else words.ABSENT)
            cells.append(words.percent(counts[k][k] / actual) if actual else words.ABSENT)
        lines.append(
            f'<tr><th scope="row"><span class="name">{_key(index)}<span>{esc(group.label)}</span></span></th>'
            + "".join(f'<td class="n">{esc(cell)}</td>' for cell in cells)
            + "</tr>"
        )
    head = "".join(f'<th scope="colgroup" colspan="2" class="n">class {esc(name)}</th>' for name in names)
    second = '<th scope="col" class="n">precision</th><th scope="col" class="n">recall</th>' * len(names)
    return (
        '<table class="classes" aria-label="precision and recall of each class">'
        f'<thead><tr><td rowspan="2"></td>{head}</tr><tr>{second}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def summed_confusion(group: Group) -> list[list[int]] | None:
    """The confusion counts of all runs of a group; None where one has none."""
    found = [run.confusion for run in group.runs]
    if any(one is None for one in found) or len({one.classes for one in found if one}) != 1:
        return None
    matrices = [one.counts for one in found if one is not None]
    return [[sum(cell) for cell in zip(*rows, strict=True)] for rows in zip(*matrices, strict=True)]


def _numeric(column: Column) -> str:
    return ' class="n"' if column.numeric else ""


def _cell(text: str) -> str:
    """The spread behind a number is set smaller than the number."""
    number, found, rest = text.partition(" ± ")
    return f"{esc(number)} <small>± {esc(rest)}</small>" if found else esc(text)


def _key(index: int) -> str:
    """The colour of a method; hollow where the colours have come round again and its line is dashed."""
    again = " again" if index >= figures.SERIES else ""
    return f'<span class="key{again}" style="color:var(--s{index % figures.SERIES})"></span>'


def legend(section: int, groups: Sequence[Group]) -> str:
    if len(groups) < 2:
        return ""
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-section="{section}" '
        f'data-series="{i}">{_key(i)}{esc(group.label)}</button>'
        for i, group in enumerate(groups)
    )
    return f'<div class="legend" role="group" aria-label="methods shown; press to hide one">{buttons}</div>'


def gain_rules(rows: Sequence[ResultRow]) -> str:
    text = words.gain_rules(row.gain for row in rows)
    return f'<p class="fine">{esc(text)}</p>' if text else ""


def score_rules(groups: Sequence[Group]) -> str:
    """How the score is formed: once where all agree, else per method."""
    rules: dict[str, list[str]] = {}
    for group in groups:
        for run in group.runs:
            rule = re.sub(r"\w+", lambda word: words.metric(word[0]), run.text("score_rule"))
            if rule and group.label not in rules.setdefault(rule, []):
                rules[rule].append(group.label)
    if not rules:
        return ""
    if len(rules) == 1:
        text = f"Score: {esc(next(iter(rules)).rstrip('.'))}."
    else:
        text = "Scores are formed differently: " + " ".join(
            f"<b>{esc(words.listing(names))}</b>: {esc(rule.rstrip('.'))}." for rule, names in rules.items()
        )
    things = groups[0].runs[0].things
    return (
        f'<p class="fine">{text}</p><p class="fine">Test pooled counts all test {things} alike; client mean counts '
        "all clients alike. "
        "Bytes up and down are those of one training round, summed over clients, without setup and evaluation; those "
        "between clients and of devices are of the whole run, setup included. The time is that of the median training "
        "round.</p>"
    )


# -- who saw what ----------------------------------------------------------------------------------


def who_saw_what(groups: Sequence[Group]) -> str:
    """In short, who reads what of each method; then every message, folded where there are many methods."""
    known = [(group, _sheet(group)) for group in groups if any(run.disclosure is not None for run in group.runs)]
    if not known:
        return ""
    short, folded = [], []
    used: set[str] = set()
    ways: dict[str, str] = {}
    for group, rows in known:
        used |= {words.kind(kind) for row in rows for kind in row.kinds}
        stated = {word: meaning for run in group.runs for word, meaning in run.protections.items()}
        ways |= {row.protection: stated[row.protection] for row in rows if row.protection in stated}
        to_server = [row for row in rows if row.receiver == "server"]
        to_others = [row for row in rows if "server" not in (row.sender, row.receiver)]
        cells = (
            f'<td colspan="2" class="what">{esc(_remark(group, rows))}</td>'
            if _remark(group, rows)
            else f"<td>{_read(to_server)}</td><td>{_read(to_others)}</td>"
        )
        short.append(f'<tr><th scope="row">{esc(group.label)}</th>{cells}</tr>')
        if rows:
            shown = " open" if len(known) <= 2 else ""
            folded.append(
                f"<details{shown}><summary>{esc(group.label)}</summary>{_sheet_table(group.label, rows)}</details>"
            )
    meant = "".join(f"<dt>{esc(way)}</dt><dd>{esc(text)}</dd>" for way, text in ways.items())
    protections = f'<dl class="words">{meant}</dl>' if meant else ""
    entries = "".join(f"<dt>{esc(kind)}</dt><dd>{esc(text)}</dd>" for kind, text in words.KINDS.items() if kind in used)
    glossary = (
        f'<details><summary>What the kinds of content mean</summary><dl class="words">{entries}</dl></details>'
        if entries
        else ""
    )
    head = "".join(
        f'<th scope="col">{name}</th>' for name in ("method", "the server", "clients and devices, of each other")
    )
    return (
        '<h3>Who saw what</h3><p class="what">What each receiver was sent, and how it was protected on the way, from '
        "the ledger of the runs. What was sent for evaluation only is listed separately.</p>"
        '<div class="scroll" tabindex="0" role="region" aria-label="who saw what, in short">'
        '<table class="short" aria-label="who saw what, in short">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(short)}</tbody></table></div>{protections}"
        f"<h4>Every kind of message, mean per run</h4>{''.join(folded)}{glossary}"
    )


def _read(rows: Sequence[Disclosure]) -> str:
    """Kinds of content by protection, a line each; what was sent for evaluation comes last."""
    found: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: row.phase == "evaluation"):
        how = row.protection or words.ABSENT
        how = f"for evaluation, {how}" if row.phase == "evaluation" else how
        found.setdefault(how, []).extend(words.kind(kind) for kind in row.kinds)
    lines = (f"<div><b>{esc(how)}</b>: {esc(', '.join(dict.fromkeys(kinds)))}</div>" for how, kinds in found.items())
    return "".join(lines) or "nothing"


def _sheet_table(label: str, rows: Sequence[Disclosure]) -> str:
    headings = ("from → to", "message", "content", "protection", "messages", "bytes")
    head = "".join(f'<th scope="col"{" class=n" if name in headings[4:] else ""}>{name}</th>' for name in headings)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="messages of {esc(label)}">'
        f'<table class="sheet" aria-label="messages of {esc(label)}"><thead><tr>{head}'
        f"</tr></thead><tbody>{''.join(_sheet_line(row) for row in rows)}</tbody></table></div>"
    )


def _sheet(group: Group) -> list[Disclosure]:
    """The disclosure rows of a group: equal rows of several seeds become one, with means."""
    runs = [run for run in group.runs if run.disclosure is not None]
    sums: dict[tuple[str, str, str, str, tuple[str, ...], str], tuple[float, float]] = {}
    for run in runs:
        for row in run.disclosure or ():
            key = (row.phase, row.sender, row.receiver, row.message, row.kinds, row.protection)
            times, size = sums.get(key, (0.0, 0.0))
            sums[key] = (times + row.times / len(runs), size + row.bytes / len(runs))
    return [Disclosure(*key, times, size, ()) for key, (times, size) in sums.items()]


def _sheet_line(row: Disclosure) -> str:
    chips = "".join(f'<span class="chip">{esc(words.kind(kind))}</span>' for kind in row.kinds)
    phase = f" <small>{esc(row.phase)}</small>" if row.phase else ""
    return (
        f'<tr><td class="route">{esc(row.sender)} → '
        f"{esc(row.receiver)}</td><td>{esc(row.message)}{phase}</td><td>{chips}</td>"
        f'<td>{esc(row.protection or words.ABSENT)}</td><td class="n">{words.count(row.times)}</td>'
        f'<td class="n">{words.size(row.bytes)}</td></tr>'
    )


def _remark(group: Group, rows: Sequence[Disclosure]) -> str:
    """What the rows alone would not say: few messages can mean that nothing was shared, or that everything was,
    beforehand.
    """
    if any(run.pooled for run in group.runs):
        return "All data are in one place from the start: a reference for the others, not a federation."
    if not rows:
        return "No message passed between parties."
    return "" if any(row.phase != "evaluation" for row in rows) else "Nothing except what is sent for evaluation."


# -- settings and provenance -----------------------------------------------------------------------


def facts(groups: Sequence[Group]) -> str:
    """What a method reports of itself (``facts`` in ``result.json``): names and values, whatever they are."""
    folded = []
    for group in groups:
        given = [found for run in group.runs if isinstance(found := run.result.get("facts"), Mapping) and found]
        if given:
            lines = "".join(
                f'<tr><th scope="row">{esc(words.kind(name))}</th><td>{_cell(value)}</td></tr>'
                for name, value in fact_rows(given)
            )
            name = f'aria-label="reported by {esc(group.label)}"'
            table = f"<table {name}><tbody>{lines}</tbody></table>"
            table = f'<div class="scroll" tabindex="0" role="region" {name}>{table}</div>'
            shown = " open" if len(groups) <= 2 else ""
            folded.append(f"<details{shown}><summary>{esc(group.label)}</summary>{table}</details>")
    what = "Numbers the methods keep about their own work; means over seeds where there are several."
    return f'<h3>Reported by the methods</h3><p class="what">{what}</p>{"".join(folded)}' if folded else ""


def settings(groups: Sequence[Group]) -> str:
    folded = []
    for group in groups:
        run = group.runs[0]
        if run.config_text:
            others = words.listing([f"seed {seed}" for seed in group.seeds[1:]])
            told = [f"seed {run.seed} shown; {others} the same otherwise"] if others else []
            if any(one.chosen for one in group.runs):
                told.append(f"variant chosen by validation: {chosen_variants(group)}")
            which = f' <span class="fine">({esc("; ".join(told))})</span>' if told else ""
            folded.append(
                f"<details><summary>{esc(group.label)}{which}</summary><pre>{esc(run.config_text)}</pre></details>"
            )
    what = "The complete configuration of each method, as resolved at the start of its runs."
    return f'<h3>Settings</h3><p class="what">{what}</p>{"".join(folded)}' if folded else ""


def chosen_variants(group: Group) -> str:
    """Which variant validation chose for which seed, e.g. ``nudged for seed 0; taught for seed 1 and seed 2``."""
    by_variant: dict[str, list[str]] = {}
    for run in group.runs:
        by_variant.setdefault(run.chosen, []).append(f"seed {run.seed}")
    if len(by_variant) == 1:
        return next(iter(by_variant))
    return "; ".join(f"{variant} for {words.listing(seeds)}" for variant, seeds in by_variant.items())


def provenance(runs: Iterable[Run]) -> str:
    lines = []
    for run in runs:
        versions = run.result.get("versions")
        stated = (
            ", ".join(f"{name} {version}" for name, version in versions.items())
            if isinstance(versions, Mapping)
            else words.ABSENT
        )
        cells = (
            run.method,
            run.seed,
            words.count(run.number("rounds")),
            run.text("engine") or words.ABSENT,
            run.path.name,
            run.text("source") or words.ABSENT,
        )
        lines.append("<tr>" + "".join(f"<td>{esc(cell)}</td>" for cell in cells) + f"<td>{esc(stated)}</td></tr>")
    head = "".join(
        f'<th scope="col">{name}</th>'
        for name in ("method", "seed", "rounds", "engine", "folder", "data from", "versions")
    )
    return (
        "<h3>Runs behind this page</h3><details><summary>Seeds, folders and versions</summary>"
        '<div class="scroll" tabindex="0" role="region" aria-label="runs behind this page">'
        f'<table aria-label="runs behind this page"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div></details>"
    )
