"""One page per method in docs/methods, made from the code and the records: idea, sheet, settings, figures.

    python tools/method_pages.py

Pages that people wrote (those without the mark below) are left as they are.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from isthmus.api.reproduce import Reproduction
from isthmus.experiments.config import resolve
from isthmus.experiments.describe import settings_of
from isthmus.experiments.disclosure import sheet_of_settings
from isthmus.federation.messages import kinds_of
from isthmus.methods.fedavg import FedAvgConfig
from isthmus.methods.registry import METHODS, Method
from isthmus.papers import load_paper, paper_names, read_earlier, read_records
from isthmus.papers.page import ours_text, published_text

DOCS = Path(__file__).parent.parent / "docs"
MARK = "<!-- written by tools/method_pages.py -->"
MOST = 12
"""Figures on a page; the others are on the results pages."""


def main() -> None:
    figures = all_figures()
    for name, method in sorted(METHODS.items()):
        path = DOCS / "methods" / f"{name}.md"
        if not path.exists() or MARK in path.read_text():
            path.write_text(page(method, figures.get(name, [])))


def page(method: Method, figures: list[Figure]) -> str:
    idea, differs = header(method)
    lines = [
        f"# {method.name}",
        "",
        MARK,
        "",
        f"{sentence(method.summary)} {sentence(method.reference)}",
        "",
    ]
    lines += [*idea, "", *([*differs, ""] if differs else []), "## Who sees what", ""]
    lines += [*sheet(method), "", "## Settings", "", *settings(method), "", "## Our figures", "", *shown(figures)]
    return "\n".join(lines) + "\n"


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def header(method: Method) -> tuple[list[str], list[str]]:
    """What the file's header says of the method, and where it differs."""
    module = next(each for each in list(sys.modules.values()) if getattr(each, "METHOD", None) is method)
    source = Path(inspect.getsourcefile(module) or "").relative_to(DOCS.parent)
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(module.__doc__ or ""))
    first = plain(paragraphs[0])
    differs = [plain(each) for each in paragraphs if each.lstrip().startswith("# Differs")]
    told = first.partition(". ")[2] if " -- " in first or first.startswith(("http",)) else first
    found = [told, ""] if told and told.lower() not in method.summary.lower() else []
    rest = [shown_paragraph(each) for each in paragraphs[1:] if not each.lstrip().startswith("# Differs")]
    if rest:
        found += ["## How it works", "", "\n\n".join(rest), ""]
    found.append(f"The code: `{source}`.")
    more = [f"- {each}" for text in differs for each in re.split(r"\s*# (?=Differs)", text) if each]
    return found, (["## Differences", "", *more] if more else [])


def shown_paragraph(text: str) -> str:
    """A paragraph of a docstring as Markdown: equations and tables as blocks, the rest in one line."""
    if text.startswith(".. math::"):
        return f"```math\n{inspect.cleandoc(text.removeprefix('.. math::'))}\n```"
    if text.startswith(" "):
        return f"```text\n{textwrap.dedent(text)}\n```"
    return plain(text)


def plain(text: str) -> str:
    """A paragraph of a docstring in one line of Markdown."""
    text = re.sub(r":math:`([^`]*)`", r"`\1`", " ".join(text.split()))
    return re.sub(r"``([^`]*)``", r"`\1`", text)


def sheet(method: Method) -> list[str]:
    if method.pooled:
        return ["All data are in one place: a reference, not a federation."]
    values: dict[str, Any] = {"dataset": "cora" if "node" in method.tasks else "chem"}
    lines = sheet_of_settings(resolve(method.name, values))
    found = ["| phase | from | to | message | kinds of content | protection |", "|---|---|---|---|---|---|"]
    for line in lines:
        kinds = ", ".join(sorted({kind.value for kind in kinds_of(line.message).values()}))
        cells = (line.phase, line.sender, line.receiver, line.message.__name__, kinds, line.protection)
        found.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    printed = f"This is what `isthmus disclose {method.name}` prints. Other settings may send other messages."
    return [*found, "", printed]


def settings(method: Method) -> list[str]:
    """Its own settings; those all methods have are explained elsewhere."""
    common = {each.key for each in settings_of("local" if method.name != "local" else "fedavg")}
    averages = issubclass(method.config, FedAvgConfig) and method.config is not FedAvgConfig
    common |= set(FedAvgConfig.__dataclass_fields__) if averages else set()
    own = [each for each in settings_of(method.name) if each.group == "method" and each.key not in common]
    rows = [f"| `{each.key}` | {value(each.default)} | {each.meaning} |" for each in own]
    table = ["| setting | default | meaning |", "|---|---|---|", *rows, ""] if rows else []
    more = "[training](../training.md)" + (" and of [FedAvg](fedavg.md)" if averages else "")
    return [*table, f"Settings of {more} apply as well. `isthmus methods {method.name}` prints all of them."]


def value(default: Any) -> str:
    return "" if default is None else f"`{str(default).lower() if isinstance(default, bool) else default}`"


Figure = tuple[bool, str, str, str, str, str]
"""Whether a number is printed for it; where, what, printed, ours, verdict."""


def all_figures() -> dict[str, list[Figure]]:
    """Cells of all results pages that have a number of ours, by method."""
    found: dict[str, list[Figure]] = {}
    for name in paper_names():
        paper, folder = load_paper(name), DOCS / "results"
        cells = [cell for table in paper.tables for cell in table.cells]
        records, earlier = read_records(folder / f"{name}.jsonl"), read_earlier(folder / f"{name}-earlier.jsonl")
        work = Reproduction(paper.tables, cells, 0, Path("none"), records, earlier)
        for row in work.compare(cells):
            if row.mean is None or row.cell.unit != "%" or "method" not in row.cell.run:
                continue
            printed = published_text(row)
            where = f"[{name} {row.cell.table}](../results/{name}.md)"
            told = (
                where,
                row.cell.name,
                printed,
                f"{ours_text(row)}, {row.seeds} seed{'s' * (row.seeds > 1)}",
                row.verdict,
            )
            found.setdefault(row.cell.run["method"], []).append((row.cell.published.mean is not None, *told))
    return found


def shown(figures: list[Figure]) -> list[str]:
    if not figures:
        return ["None of the results pages has this method yet."]
    ordered = sorted(figures, key=lambda each: not each[0])[:MOST]
    rows = ["| " + " | ".join(each[1:]) + " |" for each in ordered]
    more = len(figures) - len(rows)
    after = ["", f"{more} more on the [results pages](../results/README.md)."] if more > 0 else []
    return ["| where | cell | printed | ours | verdict |", "|---|---|---|---|---|", *rows, *after]


if __name__ == "__main__":
    main()
