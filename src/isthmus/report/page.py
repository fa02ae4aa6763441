"""One self-contained HTML page from run folders.

The file carries its own script (`draw.js`) and needs no network: its content security policy forbids every fetch and
lets only that script run, by its digest. Text from run folders is escaped where it enters the page (`esc`, and
`figures.label` inside figures).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from isthmus.errors import ConfigError
from isthmus.report import figures, parts, words
from isthmus.report.figures import Figure
from isthmus.report.parts import esc
from isthmus.report.runs import LeftOut, Run, read_runs
from isthmus.report.style import CSS, SCRIPT
from isthmus.report.tables import Group, by_scenario, group_runs, result_rows

logger = logging.getLogger(__name__)

MOST_CLASSES = 12
"""Above it a table of all classes is no longer read."""


def write_report(run_dirs: Sequence[Path], out: Path, *, now: datetime | None = None) -> Path:
    """Write one offline HTML page about these runs.

    Runs are gathered by scenario (one section each), method and settings; numbers are means with spread over seeds. A
    folder that cannot be used is named on the page with the reason.

    Args:
        run_dirs: Run folders, in the order in which methods should appear.
        out: The file to write; its folder is made if need be. Replaced only once the page is complete.
        now: The date shown on the page; the present by default.

    Returns:
        `out`.

    Raises:
        DataError: No folder is usable; the message names each and what it lacks.
        ConfigError: `out` is a folder, or cannot be written.
    """
    if out.is_dir():
        raise ConfigError(f"{out} is a folder: name a file, for example {out / 'report.html'}")
    runs, left_out = read_runs([Path(path) for path in run_dirs])
    groups, repeated = group_runs(runs)
    for entry in (*left_out, *repeated):
        logger.warning("left out of the report: %s: %s", entry.path, entry.reason)
    page = _Page(groups, [*left_out, *repeated], now or datetime.now(UTC)).html()
    write_page(out, page)
    return out


def write_page(out: Path, page: str) -> None:
    """Written beside and renamed, so that a reader never meets half a page."""
    part = out.with_name(f".{out.name}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(page, encoding="utf-8")
        part.replace(out)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise ConfigError(
            f"cannot write {out}: {error.strerror or error}; name a file in a folder you may write to"
        ) from error


def page_text(title: str, body: str, figures: Mapping[str, Figure]) -> str:
    """A complete page: the body, the figures it has places for, and the script that draws them."""
    # Inside a script element only "</" and "<!--" end or change the text; as JSON escapes they are the same data.
    data = (
        json.dumps(figures, allow_nan=False, separators=(",", ":"))
        .replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026")
    )
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'; "
        f"script-src {_digest(SCRIPT)}"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" '
        'content="light dark">\n'
        '<link rel="icon" '
        f'href="data:,">\n<title>{esc(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n{body}\n'
        f'<script type="application/json" id="figures">{data}</script>\n'
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


class _Page:
    """The page under construction: HTML parts, and the figures they refer to by id."""

    def __init__(self, groups: Sequence[Group], left_out: Sequence[LeftOut], now: datetime) -> None:
        self.sections = by_scenario(groups)
        self.left_out = left_out
        self.now = now
        self.figures: dict[str, Figure] = {}

    def html(self) -> str:
        body = (
            self._header()
            + "<main>"
            + "".join(self._section(i) for i in range(len(self.sections)))
            + "</main>"
            + self._footer()
        )
        return page_text(self._title(), body, self.figures)

    # -- frame -------------------------------------------------------------------------------------

    def _title(self) -> str:
        if len(self.sections) == 1:
            return parts.headline(*self.sections[0])
        methods = {group.method for _, groups in self.sections for group in groups}
        return f"{words.plural(len(methods), 'method')} in {len(self.sections)} scenarios"

    def _headline(self, index: int) -> str:
        """Of a section, with whatever tells it from the others: partition, split, score."""
        scenario, groups = self.sections[index]
        others = [other for other, _ in self.sections]
        told = [
            f"{name} {value}"
            for name in ("partition", "split", "metric")
            if (value := getattr(scenario, name)) and len({getattr(other, name) for other in others}) > 1
        ]
        return ", ".join([parts.headline(scenario, groups), *told])

    def _header(self) -> str:
        built = ['<header><p class="eyebrow">Isthmus · federated graph learning</p>', f"<h1>{esc(self._title())}</h1>"]
        if len(self.sections) > 1:
            entries = "".join(
                f'<li><a href="#s{i}">{esc(self._headline(i))}</a></li>' for i in range(len(self.sections))
            )
            built.append(
                '<p class="lede">Scores of different scenarios are not comparable, so each has its own section.</p>'
                f"<nav><ul>{entries}</ul></nav>"
            )
        notes = [f"Left out: <code>{esc(entry.path)}</code>: {esc(entry.reason)}." for entry in self.left_out]
        runs = [run for _, groups in self.sections for group in groups for run in group.runs]
        told: dict[str, list[Run]] = {}
        for run in runs:
            for note in run.notes:
                told.setdefault(note.partition("; ")[0], []).append(run)
        for note, about in told.items():  # what many runs have in common is said once
            names = _whose(about, runs)
            full = note if len(about) > 1 else next(one for one in about[0].notes if one.startswith(note))
            notes.append(f"Note: {names}: {esc(full)}.")
        if notes:
            built.append('<ul class="notes">' + "".join(f"<li>{note}</li>" for note in notes) + "</ul>")
        built.append(
            '<noscript><p class="notes">The figures need JavaScript; the tables do not.</p></noscript></header>'
        )
        return "".join(built)

    def _footer(self) -> str:
        runs = [run for _, groups in self.sections for group in groups for run in group.runs]
        return (
            f'<footer class="fine"><p>Written {self.now:%Y-%m-%d %H:%M %Z} from '
            f"{words.plural(len(runs), 'run folder')} by isthmus. "
            "This file is complete in itself: it loads nothing and sends nothing.</p></footer>"
        )

    def _section(self, index: int) -> str:
        scenario, groups = self.sections[index]
        runs = [run for group in groups for run in group.runs]
        built = [f'<section id="s{index}">']
        unseen = "" if len(self.sections) > 1 else ' class="unseen"'  # the title of the page says it already
        built.append(f"<h2{unseen}>{esc(self._headline(index))}</h2>")
        built += [
            f'<p class="lede">{esc(parts.in_words(scenario, runs))}</p>',
            parts.tiles(groups),
            parts.doubts(runs),
            self._results(groups),
            self._curves(index, groups),
            self._costs(index, groups),
            self._losses(index, groups),
            self._confusions(index, groups),
            self._minority(index, groups),
            self._clients(index, groups),
            self._bytes(index, groups),
            parts.who_saw_what(groups),
            parts.facts(groups),
            self._partition(index, runs),
            parts.settings(groups),
            parts.provenance(runs),
            "</section>",
        ]
        return "".join(built)

    # -- parts with figures ------------------------------------------------------------------------

    def _plot(self, section: int, name: str, figure: Figure, describe: str) -> str:
        """A place for the figure; its height is reserved so that the page does not jump while drawing."""
        key = f"f{section}-{name}"
        self.figures[key] = figure
        height = int(figure["layout"]["height"])
        where = f'class="plot" id="{key}" data-section="{section}"'
        return f'<div {where} role="img" aria-label="{esc(describe)}" style="min-height:{height}px"></div>'

    def _figure(
        self, section: int, name: str, figure: Figure, describe: str, *, title: str, caption: str, legend: str = ""
    ) -> str:
        """A part of one figure: heading, legend where there is one, figure, caption."""
        plot = self._plot(section, name, figure, describe)
        return f"<h3>{title}</h3>{legend}<figure>{plot}<figcaption>{esc(caption)}</figcaption></figure>"

    def _results(self, groups: Sequence[Group]) -> str:
        rows = result_rows(groups)
        return (
            f'<h3>Results</h3><p class="what">{esc(parts.result_sentence(rows))}</p>'
            f'<div class="scroll wide" tabindex="0" role="region" aria-label="results">{parts.result_table(rows)}</div>'
            f"{parts.score_rules(groups)}{parts.gain_rules(rows)}"
        )

    def _curves(self, section: int, groups: Sequence[Group]) -> str:
        val, test = figures.learning_curve(groups, "val"), figures.learning_curve(groups, "test")
        panels = [
            f"<div><h4>{title}</h4>{self._plot(section, name, figure, f'{title} score against rounds')}</div>"
            for name, title, figure in (("val", "Validation", val), ("test", "Test", test))
            if figure is not None
        ]
        if not panels:
            return ""
        metric = words.metric(groups[0].scenario.metric)
        several = any(len(group.runs) > 1 for group in groups)
        caption = f"Pooled {metric} after each evaluated round"
        caption += ": lines are means over seeds, bands one standard deviation" if several else ""
        caption += "; marks are the rounds that validation picks" + (", one for each seed." if several else ".")
        return (
            f'<h3>Learning curves</h3>{parts.legend(section, groups)}<figure><div class="pair">{"".join(panels)}</div>'
            f"<figcaption>{esc(caption)}</figcaption></figure>"
        )

    def _costs(self, section: int, groups: Sequence[Group]) -> str:
        panels = [
            f"<div><h4>{title}</h4>{self._plot(section, f'cost-{cost}', figure, f'score {title.lower()}')}</div>"
            for cost, title in (("sent", "Against bytes"), ("seconds", "Against time"))
            if (figure := figures.score_against_cost(groups, cost)) is not None
        ]
        if not panels:
            return ""
        caption = (
            "Pooled test score of every evaluated round against what it had cost by then, means over seeds: the higher "
            "and the further left, the better. A dotted line is a method that sends nothing. Times are those of this "
            "machine, all parties one after the other; what a process compiles and loads once, in its first round, is "
            "left out."
        )
        return (
            f"<h3>What a score costs</h3>{parts.legend(section, groups)}"
            f'<figure><div class="pair">{"".join(panels)}</div>'
            f"<figcaption>{esc(caption)}</figcaption></figure>"
        )

    def _losses(self, section: int, groups: Sequence[Group]) -> str:
        panels = [
            f"<div><h4>{title}</h4>{self._plot(section, which, figure, f'{title} against rounds')}</div>"
            for which, title in (("train_loss", "Training loss"), ("val_loss", "Validation loss"))
            if (figure := figures.loss_curve(groups, which)) is not None
        ]
        if not panels:
            return ""
        caption = (
            "Mean cross-entropy of the model that would be used after each evaluated round. A validation loss that "
            "rises while the training loss falls is overfitting."
        )
        return (
            f'<h3>Losses</h3>{parts.legend(section, groups)}<figure><div class="pair">{"".join(panels)}</div>'
            f"<figcaption>{esc(caption)}</figcaption></figure>"
        )

    def _confusions(self, section: int, groups: Sequence[Group]) -> str:
        known = [
            (index, group, counts) for index, group in enumerate(groups) if (counts := parts.summed_confusion(group))
        ]
        if not known:
            return ""
        folded = []
        for index, group, counts in known:
            classes = next(run.confusion.classes for run in group.runs if run.confusion)
            figure = figures.confusion_matrix(classes, counts)
            describe = f"true class against given class, {group.label}"
            folded.append(
                f"<div><h4>{esc(group.label)}</h4>{self._plot(section, f'confusion-{index}', figure, describe)}</div>"
            )
        caption = (
            "Test samples of all clients and seeds by true class (row) and class they were given (column), by the "
            "models that are kept; colours are shares of the row."
        )
        table = ""
        if len(known[0][2]) <= MOST_CLASSES:
            scores = parts.class_table(groups)
            table = (
                "<h4>Precision and recall of each class, in percent</h4>"
                f'<div class="scroll" tabindex="0" role="region" aria-label="scores by class">{scores}</div>'
            )
        return (
            f"<h3>Class by class</h3>{table}<details{' open' if len(known) <= 2 else ''}>"
            f'<summary>Confusion matrices</summary><figure><div class="pair">{"".join(folded)}</div>'
            f"<figcaption>{esc(caption)}</figcaption></figure></details>"
        )

    def _minority(self, section: int, groups: Sequence[Group]) -> str:
        figure = figures.minority_path(groups)
        if figure is None:
            return ""
        return self._figure(
            section,
            "minority",
            figure,
            "minority score against overall score over rounds",
            title="Minority against all",
            legend=parts.legend(section, groups),
            caption=(
                "Test accuracy on nodes of other classes than their client's majority class, against accuracy on all "
                "test nodes, round after round; marks are the selected rounds. Compare methods at the same place on "
                "the horizontal axis: later rounds often trade one for the other."
            ),
        )

    def _clients(self, section: int, groups: Sequence[Group]) -> str:
        figure = figures.client_scores(groups)
        if figure is None:
            return ""
        metric = words.metric(groups[0].scenario.metric)
        caption = f"Test {metric} of each client at the selected round"
        if any(len(group.runs) > 1 for group in groups):
            caption += ", mean over seeds"
        if any("error_y" in trace for trace in figure["data"]):
            caption += " with whiskers from the lowest to the highest"
        caption += f". The number of test {groups[0].runs[0].things} behind it is among the numbers of this figure."
        unknown = [group.label for group in groups if not any(run.pooled or run.per_client for run in group.runs)]
        if unknown:
            caption += f" Not known with secure sums: {words.listing(unknown)}."
        if any(run.pooled for group in groups for run in group.runs):
            caption += " A dashed line is the pooled score of a method that has all data in one place."
        if parts.redrawn([run for group in groups for run in group.runs]):
            caption += (
                " Every seed draws its own partition, so a client's number names a different part of the graph in each."
            )
        return self._figure(
            section,
            "clients",
            figure,
            "test score of each client under each method",
            title="Who gains, client by client",
            legend=parts.legend(section, groups),
            caption=caption,
        )

    def _bytes(self, section: int, groups: Sequence[Group]) -> str:
        figure = figures.bytes_by_kind(groups)
        if figure is None:
            return ""
        return self._figure(
            section,
            "bytes",
            figure,
            "bytes sent by kind of content, direction and method",
            title="What travels",
            caption=(
                "Bytes of a whole run by direction and kind of content, summed over clients, mean over seeds; up is "
                "towards the server. Setup is included, evaluation is not: it is listed below."
            ),
        )

    def _partition(self, section: int, runs: Sequence[Run]) -> str:
        shown = next((run for run in sorted(runs, key=lambda run: run.seed) if run.partition is not None), None)
        if shown is None or shown.partition is None:
            return ""
        partition = shown.partition
        which = f" (seed {shown.seed}; the other seeds draw their own)" if parts.redrawn(runs) else ""
        sizes = self._plot(section, "sizes", figures.client_sizes(partition, shown), f"{partition.things} per client")
        built = [
            f"<h3>How the {'graph is' if partition.things == 'nodes' else 'graphs are'} split</h3>"
            f"<figure><h4>{partition.things.capitalize()} per client{esc(which)}</h4>{sizes}"
            f"<figcaption>{esc(parts.size_sentence(partition))}</figcaption></figure>"
        ]
        cross, skew = figures.cross_edges(partition), figures.label_skew(partition)
        panels = []
        if cross is not None:
            plot = self._plot(section, "cross", cross, "number of edges between every two clients")
            panels.append(("Cross edges between clients", plot, parts.cross_sentence(partition)))
        if skew is not None:
            plot = self._plot(section, "labels", skew, f"share of each class among a client's {partition.things}")
            panels.append((f"Classes per client, % of its {partition.things}", plot, parts.skew_sentence(partition)))
        if panels:
            pair = "".join(
                f"<div><h4>{title}</h4>{plot}<figcaption>{esc(caption)}</figcaption></div>"
                for title, plot, caption in panels
            )
            built.append(f'<figure><div class="pair">{pair}</div></figure>')
        return "".join(built)


def _whose(about: Sequence[Run], every: Sequence[Run]) -> str:
    """Of which runs a note speaks, as HTML: by their methods where it is of all their runs, else by their folders."""
    methods = list(dict.fromkeys(run.method for run in about))
    if len(every) > len(about) > 1 and len(about) == sum(run.method in methods for run in every):
        return esc(words.listing(methods))
    return f"<code>{esc(words.listing([str(run.path) for run in about], limit=3))}</code>"


def _digest(script: str) -> str:
    """The name of a script in a content security policy."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"
