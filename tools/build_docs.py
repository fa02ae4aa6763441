"""The documentation as a site: ``make docs`` writes ``build/site``, without a network, and checks every link in it.

Sources are the pages in ``docs/`` as they are, README as the first page, CONTRIBUTING and CHANGELOG, notebooks as
pages, and two pages made from the code: commands and their options (from the command line's own help), and the Python
interface (from signatures and docstrings). Links to source files become plain text: the site holds pages only.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import typer

import isthmus
from isthmus.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
NAV: list[tuple[str, str | list[tuple[str, str]]]] = [
    ("Isthmus", "index.md"),
    (
        "Start",
        [
            ("Run a method", "running.md"),
            ("Tutorial", "tutorial.md"),
            ("Quick start", "notebooks/quick_start.md"),
            ("First questions", "faq.md"),
            ("Glossary", "glossary.md"),
        ],
    ),
    (
        "Your data",
        [
            ("Own data", "own-data.md"),
            ("Own graph, a notebook", "notebooks/own_graph.md"),
            ("Data sets, owners, splits", "data.md"),
            ("Training", "training.md"),
            ("Predict", "predict.md"),
            ("Reading a report", "notebooks/reading_a_report.md"),
        ],
    ),
    (
        "Methods",
        [
            ("Choosing", "choosing.md"),
            ("Advice", "advise.md"),
            ("All methods", "methods.md"),
            ("FedStruct", "methods/fedstruct.md"),
            ("FedGGR", "methods/fedggr.md"),
            ("HiFGL", "methods/hifgl.md"),
            ("FedSpray", "methods/fedspray.md"),
            ("FedStar", "methods/fedstar.md"),
            ("FedSage+", "methods/fedsageplus.md"),
            ("Methods of the field", "methods/rivals.md"),
        ],
    ),
    (
        "Between organisations",
        [
            ("In short", "organisations.md"),
            ("Three banks, step by step", "banks.md"),
            ("Processes and files", "deployment.md"),
            ("Operations", "operations.md"),
            ("Policy and contract", "policy.md"),
            ("Secure sums and noise", "secure-sums.md"),
            ("Security and threat model", "security.md"),
            ("A privacy audit, a notebook", "notebooks/privacy_audit.md"),
        ],
    ),
    (
        "Extend",
        [
            ("Add a method", "add-a-method.md"),
            ("A new method, a notebook", "notebooks/new_method.md"),
            ("Contributing", "contributing.md"),
            ("Architecture", "architecture.md"),
            ("Speed", "speed.md"),
        ],
    ),
    (
        "Reference",
        [
            ("Commands", "commands.md"),
            ("Python, a guide", "python.md"),
            ("Python, all names", "api.md"),
            ("Results", "results/index.md"),
            ("Specifications", "specs/index.md"),
            ("Changes", "changelog.md"),
        ],
    ),
]


TABLES = """/* On a narrow page a table scrolls; commands in it stay in one piece as far as they can. */
.md-typeset table:not([class]) td { min-width: 4.5em; }
.md-typeset table:not([class]) td:has(code) { min-width: 14em; }
.md-typeset table:not([class]) td code { word-break: normal; overflow-wrap: anywhere; }
"""


def main() -> int:
    pages = BUILD / "docs"
    shutil.rmtree(pages, ignore_errors=True)
    shutil.rmtree(BUILD / "site", ignore_errors=True)
    write_pages(pages)
    (BUILD / "zensical.toml").write_text(settings(pages))
    made = subprocess.run(
        [Path(sys.executable).parent / "zensical", "build", "--clean", "--config-file", BUILD / "zensical.toml"],
        cwd=BUILD,
        capture_output=True,
        text=True,
    )
    if made.returncode:
        sys.stderr.write(made.stdout + made.stderr)
        return made.returncode
    problems = broken(BUILD / "site")
    sys.stderr.write("".join(f"{problem}\n" for problem in problems))
    count = len(list((BUILD / "site").rglob("*.html")))
    sys.stdout.write(f"{count} pages in {BUILD / 'site'}, {len(problems)} broken links\n")
    return 1 if problems else 0


# -- sources -----------------------------------------------------------------------------------------


def write_pages(target: Path) -> None:
    """Everything the site is made of, as Markdown under ``target``."""
    for path in sorted((ROOT / "docs").rglob("*")):
        place = target / path.relative_to(ROOT / "docs")
        if path.is_dir():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            name = "index.md" if path.name == "README.md" else path.name
            place.with_name(name).write_text(relinked(path.read_text(), path))
        elif path.suffix == ".ipynb":
            place.with_suffix(".md").write_text(relinked(notebook_page(path), path))
        else:
            shutil.copy(path, place)
    for name, page in (("README", "index"), ("CONTRIBUTING", "contributing"), ("CHANGELOG", "changelog")):
        path = ROOT / f"{name}.md"
        (target / f"{page}.md").write_text(relinked(path.read_text(), path))
    (target / "commands.md").write_text(commands_page())
    (target / "api.md").write_text(api_page())
    (target / "tables.css").write_text(TABLES)


def place_of(path: Path) -> str | None:
    """Where a file of the repository is on the site, from its root; None where it is not."""
    top = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
    if path.parent == ROOT:
        return top.get(path.name)
    if not path.is_relative_to(ROOT / "docs"):
        return None
    inside = path.relative_to(ROOT / "docs")
    if path.is_dir():
        return (inside / "index.md").as_posix() if (path / "README.md").is_file() else None
    if inside.name == "README.md":
        inside = inside.with_name("index.md")
    return (inside.with_suffix(".md") if inside.suffix == ".ipynb" else inside).as_posix()


def relinked(text: str, page: Path) -> str:
    """Links of a page as they are on the site; a link to what is not there keeps its words."""
    own = place_of(page)
    assert own is not None
    up = "../" * own.count("/")

    def turned(match: re.Match[str]) -> str:
        words, link = match[1], match[2]
        if re.match(r"[a-z]+:|#", link):
            return match[0]
        name, mark, anchor = link.partition("#")
        place = place_of((page.parent / name).resolve())
        return f"[{words}]({up}{place}{mark}{anchor})" if place else words

    return re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", turned, text)


def notebook_page(path: Path) -> str:
    """A notebook as a page: its texts and its code. The tests run it; outputs are not kept."""
    cells = json.loads(path.read_text())["cells"]
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    file = path.relative_to(ROOT)
    first, *rest = parts
    return "\n\n".join([first, f"This page is the notebook `{file}`; the tests run it.", *rest]) + "\n"


def commands_page() -> str:
    """Every command with its arguments and options, from the command line itself."""
    root: Any = typer.main.get_command(app)
    lines = ["# Commands", "", "Made from the code: what `isthmus COMMAND --help` prints.", ""]
    for name, command in _commands(root, "isthmus"):
        lines += [f"## `{name}`", "", " ".join((command.help or "").split()), ""]
        rows = [_option(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
        if rows:
            lines += ["| argument or option | meaning | default |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield name, command
        return
    for inner, found in sorted(command.commands.items()):
        yield from _commands(found, f"{name} {inner}")


def _option(parameter: Any) -> str:
    is_option = parameter.param_type_name == "option"
    name = ", ".join(parameter.opts) if is_option else str(parameter.name).upper()
    default = "" if parameter.default in (None, False, ()) or callable(parameter.default) else str(parameter.default)
    meaning = " ".join((parameter.help or "").split()).replace("|", "\\|")
    return f"| `{name}` | {meaning} | {f'`{default}`' if default and 'PydanticUndefined' not in default else ''} |"


def api_page() -> str:
    """Every public name of ``isthmus`` and ``isthmus.methods``: signature and docstring."""
    import isthmus.methods as methods
    import isthmus.testing as testing

    lines = ["# Python, all names", "", "Made from signatures and docstrings; a guide is [here](python.md).", ""]
    for title, module, names in (
        ("isthmus", isthmus, isthmus.__all__),
        ("isthmus.methods", methods, methods.__all__),
        ("isthmus.testing", testing, ("check_method",)),
    ):
        lines += [f"## {title}", ""]
        for name in names:
            lines += _described(f"{title}.{name}", getattr(module, name))
    return "\n".join(lines)


def _described(name: str, thing: Any) -> list[str]:
    lines = [f"### `{name}`", ""]
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return [*lines, f"```python\n{repr(thing)[:200]}\n```", ""]
    lines += [f"```python\n{name.rpartition('.')[2]}{_signature(thing)}\n```", ""]
    lines += [_prose(inspect.getdoc(thing) or ""), ""]
    if inspect.isclass(thing):
        for key, member in vars(thing).items():
            if key.startswith("_") or not isinstance(getattr(member, "__doc__", None), str):
                continue
            if inspect.isfunction(member):
                lines += [f"**`{key}{_signature(member)}`**", "", _prose(inspect.getdoc(member) or ""), ""]
            elif isinstance(member, property) or type(member).__name__ == "cached_property":
                lines += [f"**`{key}`**", "", _prose(inspect.getdoc(member) or ""), ""]
    return lines


def _signature(thing: Any) -> str:
    try:
        return str(inspect.signature(thing)).replace("'", "")
    except (TypeError, ValueError):
        return "(...)"


def _prose(text: str) -> str:
    """A docstring as Markdown: arguments become a list, examples a block."""
    lines, inside = [], ""
    for line in text.splitlines():
        heading = re.fullmatch(r"(Args|Returns|Raises|Example|Examples):", line)
        if heading:
            lines += ["", f"*{heading[1]}*", ""]
            inside = heading[1]
            if inside.startswith("Example"):
                lines.append("```python")
            continue
        if inside.startswith("Example"):
            lines.append(line.removeprefix("    "))
        elif inside and re.match(r" {4}\w[\w, ]*: ", line):
            lines.append(f"- {line.strip()}")
        else:
            lines.append(line.strip() if inside else line)
    return "\n".join([*lines, *(["```"] if inside.startswith("Example") else [])]).replace("<", "&lt;")


def settings(pages: Path) -> str:
    """Configuration of the site: its navigation, and nothing that would be fetched."""

    def entry(title: str, target: str | list[tuple[str, str]]) -> str:
        if isinstance(target, str):
            return f"{{ {json.dumps(title)} = {json.dumps(target)} }}"
        return f"{{ {json.dumps(title)} = [{', '.join(entry(*one) for one in target)}] }}"

    listed = ",\n  ".join(entry(*one) for one in [*NAV, *more(pages)])
    return f"""[project]
site_name = "Isthmus"
site_description = "Federated graph learning between owners of one graph"
docs_dir = {json.dumps(pages.name)}
site_dir = "site"
use_directory_urls = false
extra_css = ["tables.css"]
nav = [
  {listed},
]

[project.markdown_extensions]
# Without emojis: `group:ring:40` is a split, and pictures would be fetched.
toc = {{ permalink = true }}
tables = {{}}
attr_list = {{}}
admonition = {{}}
"pymdownx.highlight" = {{ anchor_linenums = false }}
"pymdownx.superfences" = {{}}

[project.theme]
language = "en"
font = false
features = ["content.code.copy", "navigation.sections", "navigation.top", "search.highlight"]

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"
toggle = {{ icon = "lucide/sun", name = "Switch to dark mode" }}

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"
toggle = {{ icon = "lucide/moon", name = "Switch to light mode" }}
"""


def more(pages: Path) -> list[tuple[str, list[tuple[str, str]]]]:
    """Pages that the navigation above does not name: nothing is left out of the site."""
    named = {page for _, part in NAV for page in ([part] if isinstance(part, str) else [p for _, p in part])}
    found = sorted(path.relative_to(pages).as_posix() for path in pages.rglob("*.md"))
    lone = [page for page in found if page not in named and not page.startswith(("results/", "specs/"))]
    titled = [((pages / page).read_text().splitlines() or [page])[0].lstrip("# ") for page in lone]
    listed = list(zip(titled, lone, strict=True))
    groups = {
        "Every method": [each for each in listed if each[1].startswith("methods/")],
        "More": [each for each in listed if not each[1].startswith("methods/")],
    }
    return [(title, each) for title, each in groups.items() if each]


# -- links --------------------------------------------------------------------------------------------


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {value for key in ("id", "name") if (value := found.get(key))}
        for key in ("href", "src"):
            if value := found.get(key):
                self.links.append(value)


def broken(site: Path) -> list[str]:
    """Links of the built pages to a page, file or heading that is not there."""
    pages = {path.resolve(): _Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    problems = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z][a-z+.-]*:|//", link):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / unquote(name.partition("?")[0])).resolve() if name else path
            target = target / "index.html" if target.is_dir() else target
            where = path.relative_to(site.resolve())
            if not target.exists():
                problems.append(f"{where}: {link} is not there")
            elif anchor and target in pages and unquote(anchor) not in pages[target].ids and anchor != "__":
                problems.append(f"{where}: {link} has no such heading")
    return sorted(dict.fromkeys(problems))


if __name__ == "__main__":
    sys.exit(main())
