"""What the repository says about itself is true: citations of specifications, links, commands, paths, the table of
packages, the keys of a result.
"""

from __future__ import annotations

import functools
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import isthmus
from isthmus.cli.main import app
from test_import_arrows import ANYTHING, BASE, MAY_IMPORT

ROOT = Path(__file__).resolve().parents[1]
SPECS = {path.stem: path for path in sorted((ROOT / "docs" / "specs").glob("*.md")) if path.stem != "README"}
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CITING = sorted(
    path
    for pattern in ("src/**/*.py", "src/**/*.toml", "tests/**/*.py", "benchmarks/*.py", "examples/*.py")
    for path in ROOT.glob(pattern)
    if path != Path(__file__).resolve()
)
ALSO_OF = {"secmp": "hifgl"}
"""Modules that belong to a paper whose name they do not carry."""


# -- citations of sections ------------------------------------------------------------------------------

PAPERS = "|".join(SPECS)
NUMBER = r"\d+(?:\.\d+)*"
COUNT = r"\d+(?: to \d+)?(?![\d.]*\d)"
COUNTS = rf"{COUNT}(?:(?:,|,? and) {COUNT})*"
LETTERS = r"[a-z](?:-[a-z])?(?![\w-])| [a-z](?: to [a-z])?(?=[),.;:])"
SECTION = re.compile(rf"(?P<number>{NUMBER})(?P<letters>{LETTERS})?(?:: (?:properties )?(?P<items>{COUNTS}))?")
ANOTHER = re.compile(r"(?:[,;]|,? and) (?=\d)")
CITATION = re.compile(
    rf"\b(?:(?:(?P<paper>{PAPERS}) )?spec|(?P<page>architecture))\b(?P<mark>,? \(?(?:sections? )?)(?=\d)", re.IGNORECASE
)
PROPERTIES = re.compile(rf"(?<!: )\bpropert(?:y|ies) (?P<items>{COUNTS})", re.IGNORECASE)
VAGUE = re.compile(rf"\b(?:{PAPERS}), (?:sections? \d|\d+\.\d)[\d.]*", re.IGNORECASE)
"""``FedStar, section 9.17`` could be the paper's own section: the form is ``FedStar spec, section 9.17``."""


def sections(text: str) -> dict[str, str]:
    """Number -> text of every numbered heading, and of every numbered item of a list (item 3 of section 9 is 9.3)."""
    found: dict[str, str] = {}
    headings = list(re.finditer(rf"^##+ ({NUMBER})\.? .*$", text, re.MULTILINE))
    for heading, after in zip(headings, [*headings[1:], None], strict=True):
        number, body = heading[1], text[heading.end() : after.start() if after else len(text)]
        above = number.rpartition(".")[0]
        found[number] = body
        if above:
            found[above] = found.get(above, "") + body
        for item in re.finditer(r"^ ?(\d+)\. (.*(?:\n(?! ?\d+\. |\n).*)*)", body, re.MULTILINE):
            found.setdefault(f"{number}.{item[1]}", item[2])
    return found


@functools.cache
def sections_of(page: str) -> dict[str, str]:
    return sections((ARCHITECTURE if page == "architecture" else SPECS[page]).read_text())


@functools.cache
def properties_of(paper: str) -> str:
    """Number of the section with a paper's testable properties."""
    heading = re.search(r"^## (\d+)\. Testable properties$", SPECS[paper].read_text(), re.MULTILINE)
    return heading[1] if heading else "0"


def paper_of(path: Path) -> str | None:
    """The paper that a file is about, by its name or its package's, e.g. ``methods/hifgl/layers.py``."""
    for part in reversed(path.with_suffix("").parts):
        name = part.removeprefix("test_")
        for stem, paper in [*((spec, spec) for spec in SPECS), *ALSO_OF.items()]:
            if re.match(rf"{stem}(?![a-z])", name):
                return paper
    return None


def _counted(items: str) -> Iterator[int]:
    """``1, 2, 15 to 17`` -> 1, 2, 15, 16, 17."""
    for first, last in re.findall(r"(\d+)(?: to (\d+))?", items):
        yield from range(int(first), int(last or first) + 1)


def _cited(text: str, start: int, many: bool) -> Iterator[str]:
    """Every section that a citation names, from where its first number begins: ``5.1``, ``11.2a``, ``14.15``."""
    while match := SECTION.match(text, start):
        first, *last = re.findall(r"\b[a-z]\b", match["letters"] or "") or [""]
        letters = [chr(code) for code in range(ord(first), ord(last[0]) + 1)] if last else [first]
        yield from (match["number"] + letter for letter in letters)
        yield from (f"{match['number']}.{item}" for item in _counted(match["items"] or ""))
        joint = ANOTHER.match(text, match.end())
        following = SECTION.match(text, joint.end()) if joint else None
        if joint is None or following is None or not (many or "." in following["number"] or following["items"]):
            return  # what follows is a number of another kind, e.g. "section 4, 3 clients"
        start = joint.end()


def _flat(text: str) -> tuple[str, list[int]]:
    """The text in one line, without the marks of comments, and where each of its characters comes from."""
    characters, places = list[str](), list[int]()
    for match in re.finditer(r"\n[ \t]*(?:#+ ?)?|[ \t]+|\S", text):
        gap = match[0].isspace() or match[0].startswith("\n")
        if not (gap and characters and characters[-1] == " "):
            characters.append(" " if gap else match[0])
            places.append(match.start())
    return "".join(characters), places


def unresolved(text: str, path: Path) -> list[str]:
    """Citations of a file that lead nowhere, one line each."""
    flat, places = _flat(text)
    own = paper_of(path)
    found: list[tuple[int, str]] = []
    for match in VAGUE.finditer(flat):
        found.append((match.start(), f"{match[0]!r}: write e.g. 'FedStar spec, section 9.17'"))
    for match in CITATION.finditer(flat):
        page = "architecture" if match["page"] else (match["paper"] or own or "").lower()
        cited = list(_cited(flat, match.end(), many="sections" in match["mark"]))
        if not page:
            found.append((match.start(), f"{match[0]!r} {cited[0]}: say which paper's spec"))
        elif page != "architecture" or "section" in match["mark"]:  # else "an architecture, 3 layers deep"
            found += [(match.start(), f"{page} has no section {each}") for each in cited if not _there(page, each)]
    for match in PROPERTIES.finditer(flat) if path.suffix == ".py" else ():
        if own is None:
            found.append((match.start(), f"{match[0]!r}: write e.g. 'FedStruct spec, section 14: 11'"))
        else:
            cited = [f"{properties_of(own)}.{item}" for item in _counted(match["items"])]
            found += [(match.start(), f"{own} has no property {each}") for each in cited if not _there(own, each)]
    return [f"{path}:{text.count(chr(10), 0, places[at]) + 1}: {problem}" for at, problem in sorted(found)]


def _there(page: str, cited: str) -> bool:
    number = cited.rstrip("abcdefghijklmnopqrstuvwxyz")
    letter = cited.removeprefix(number)
    body = sections_of(page).get(number)
    return body is not None and (not letter or re.search(rf"\({letter}\)|\*\*{letter}\.\*\*", body) is not None)


def test_every_citation_leads_to_a_section() -> None:
    problems = [
        problem
        for path in [*CITING, *PAGES]
        if "docs/results" not in path.as_posix()  # written by `isthmus reproduce`
        for problem in unresolved(path.read_text(), path.relative_to(ROOT))
    ]
    assert not problems, "\n".join(problems)


def test_citations_are_found() -> None:
    """Otherwise the check above could pass by finding nothing."""
    assert sum(len(CITATION.findall(_flat(path.read_text())[0])) for path in CITING) > 40


def test_pages_that_code_names_exist() -> None:
    named = {page for path in CITING for page in re.findall(r"\bdocs/(?:\w+/)*\w+\.md\b", path.read_text())}
    named -= {"docs/mini.md"}  # made by a test
    assert "docs/results/README.md" in named
    assert not [page for page in named if not (ROOT / page).is_file()]


def test_a_specification_cites_its_own_sections() -> None:
    """Inside a specification, and on the architecture page, ``section 9`` is its own section 9."""
    problems = []
    for path in [*SPECS.values(), ARCHITECTURE]:
        text = path.read_text()
        known = sections(text)
        for match in re.finditer(rf"(?<!spec, )(?<!architecture, )\bsections? ({NUMBER})", text, re.IGNORECASE):
            if match[1] not in known:
                problems.append(f"{path.name}:{text.count(chr(10), 0, match.start()) + 1}: no {match[0]}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("file", "text", "bad"),
    [
        ("data/a.py", "(FedStruct spec, section 5.1)", 0),
        ("data/a.py", "(FedStruct spec, section 5.9)", 1),
        ("data/a.py", "(FedStruct spec, section 99)", 1),
        ("data/a.py", "(FedStruct\n    spec, 13.1, 13.6)", 0),
        ("data/a.py", "(FedStruct\n    spec, 13.1, 13.66)", 1),
        ("data/a.py", "# as HiFGL spec,\n# section 11.2a-d say", 0),
        ("data/a.py", "HiFGL spec, section 11.2x", 1),
        ("data/a.py", "HiFGL spec, sections 3.1, 11.4 and 12", 0),
        ("data/a.py", "HiFGL spec, sections 3.1, 11.4 and 19", 1),
        ("data/a.py", "FedStar spec, section 9.17", 0),
        ("data/a.py", "FedStar spec, section 9.77", 1),
        ("data/a.py", "FedStruct spec, section 14: 1, 2, 15 to 19", 0),
        ("data/a.py", "FedStruct spec, section 14: 1, 2, 15 to 29", 7),
        ("data/a.py", "FedStar, section 9.17", 1),
        ("data/a.py", "(FedStar, 9.8)", 1),
        ("data/a.py", "baselines spec, section 16", 0),
        ("data/a.py", "baselines spec, section 17", 1),
        ("data/a.py", "FedGGR spec, section 11: 13, within four", 0),
        ("data/a.py", "FedGGR spec, section 11: 33, within four", 1),
        ("data/a.py", "property 11 of its spec", 1),
        ("tests/methods/test_fedggr.py", "# -- rows (properties 3, 8, 9, 12) ---", 0),
        ("tests/methods/test_fedggr.py", "# -- rows (properties 3, 8, 9, 120) ---", 1),
        ("data/a.py", "architecture, section 4", 0),
        ("data/a.py", "architecture, section 11", 1),
        ("data/a.py", "spec 11.3", 1),
        ("methods/hifgl_parties.py", "Spec 11.3, step 2", 0),
        ("methods/hifgl/hardened.py", "(spec 11.3, 11.4)", 0),
        ("methods/hifgl/hardened.py", "of the spec (11.2 a to f, 11.5)", 0),
        ("methods/hifgl/hardened.py", "of the spec (11.2 a to j, 11.5)", 3),
        ("methods/hifgl/hardened.py", "spec 11.2 a device", 0),
        ("methods/hifgl/hardened.py", "(spec 11.3, 11.44)", 1),
        ("tests/methods/test_fedstruct_powers.py", "(spec 13.1, 13.6; 14: 11, 12)", 0),
        ("tests/methods/test_fedstruct_powers.py", "(spec 13.1, 13.6; 14: 11, 32)", 1),
        ("tests/methods/test_hifgl.py", "(spec, section 12: properties 10 to 13,\n15)", 0),
        ("methods/fedgcn.py", "spec 14", 1),
        ("methods/fedstar.py", "FedStar follows its architecture, 3 layers", 0),
    ],
)
def test_the_check_of_citations_can_fail(file: str, text: str, bad: int) -> None:
    assert len(unresolved(text, Path(file))) == bad


# -- links ----------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as code hosts form them."""
    headings = re.findall(r"^#+ +(.*)$", _without_blocks(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_links(text: str, page: Path) -> list[str]:
    """Relative links of a page to a file or heading that is not there."""
    problems = []
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", _without_blocks(text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists():
            problems.append(f"{page.relative_to(ROOT)} links to {target}, which is not there")
        elif anchor and anchor not in anchors(text if file == page else file.read_text()):
            problems.append(f"{page.relative_to(ROOT)} links to {target}, which has no such heading")
    return problems


def _without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def test_every_relative_link_leads_somewhere() -> None:
    problems = [problem for page in PAGES for problem in broken_links(page.read_text(), page)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("[a](docs/architecture.md)", 0),
        ("[a](docs/nowhere.md)", 1),
        ("[a](docs/architecture.md#4-federation)", 0),
        ("[a](docs/architecture.md#nowhere)", 1),
        ("[a](https://example.org/x)", 0),
        ("# One\n[a](#one)", 0),
        ("# One\n[a](#two)", 1),
    ],
)
def test_the_check_of_links_can_fail(text: str, bad: int) -> None:
    assert len(broken_links(text, ROOT / "README.md")) == bad


# -- commands -------------------------------------------------------------------------------------------

COMMAND = re.compile(r"^(?:\$ )?(?:\.venv/bin/)?isthmus (?P<words>.+)$", re.DOTALL)


def commands(text: str) -> list[str]:
    """Every ``isthmus ...`` in a page's code: blocks line by line (a line that is indented further goes on), spans."""
    found: list[str] = []
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    outside = _without_blocks(text)
    blocks += re.findall(r"(?:^ {4}.*\n)+", outside, re.MULTILINE)
    for block in blocks:
        lines: list[str] = []
        for line in block.splitlines():
            stripped = re.sub(r"\s+#.*", "", line.strip())
            if lines and line.startswith("       ") and stripped.startswith(("[--", "--")):
                lines[-1] += f" {stripped}"
            else:
                lines.append(stripped)
        found += lines
    found += [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", outside)]
    return [match["words"].replace("\\|", "|") for line in found if (match := COMMAND.match(line))]


def wrong_commands(text: str) -> list[str]:
    """Commands of a page that do not exist, or that do not have the options shown."""
    root: Any = typer.main.get_command(app)
    problems = []
    for words in commands(text):
        first, *rest = words.split()
        if first.startswith("--"):
            continue
        for name in first.split("|"):
            command = root.commands.get(name)
            if command is None:
                problems.append(f"isthmus {words}: there is no command {name}")
                continue
            chosen = [command]
            if hasattr(command, "commands"):
                names = rest[0].split("|") if rest else []
                problems += [f"isthmus {words}: no command {one}" for one in names if one not in command.commands]
                chosen = [command.commands[one] for one in names if one in command.commands]
            for one in chosen:
                options = {option for parameter in one.params for option in parameter.opts} | {"--help", "--debug"}
                for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", words):
                    if option not in options:
                        problems.append(f"isthmus {words}: {one.name} has no option {option}")
    return problems


def test_every_command_exists() -> None:
    problems = [f"{page.relative_to(ROOT)}: {line}" for page in PAGES for line in wrong_commands(page.read_text())]
    assert not problems, "\n".join(problems)


def test_commands_are_found() -> None:
    """Otherwise the check above could pass by finding nothing."""
    assert len(commands((ROOT / "docs" / "running.md").read_text())) > 20
    assert len(commands((ROOT / "README.md").read_text())) > 10
    assert len(commands(ARCHITECTURE.read_text())) > 15


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("`isthmus run METHOD --dataset NAME [--clients K]`", 0),
        ("`isthmus walk`", 1),
        ("`isthmus run METHOD --nowhere`", 1),
        ("`isthmus data get NAME`", 0),
        ("`isthmus data put NAME`", 1),
        ("| `isthmus server init\\|start` |", 0),
        ("| `isthmus server init\\|stand` |", 1),
        ("```\n$ isthmus client start --kit K --config C  # --nowhere\n```", 0),
        ("```\nisthmus run METHOD\n           [--nowhere]\n```", 1),
        ("    isthmus sweep fedavg --grids lr=1\n", 1),
    ],
)
def test_the_check_of_commands_can_fail(text: str, bad: int) -> None:
    assert len(wrong_commands(text)) == bad


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 250


# -- paths, modules, packages, keys ------------------------------------------------------------------------

PATH = re.compile(
    r"(?:src|tests|docs|benchmarks|examples|federation|methods|privacy|experiments)/[\w./<>*-]*|[\w-]+\.py"
)
"""What looks like a path of the repository: from its root, or from ``src/isthmus``."""


def missing_paths(text: str) -> list[str]:
    """Paths and modules that a page names and that are not there; ``<name>`` stands for anything."""
    problems = []
    for span in re.findall(r"[`\[]([^`\[\]\n]+)[`\]]", text):
        if PATH.fullmatch(span):
            pattern = re.sub(r"<\w+>", "*", span).rstrip("/")
            places = (ROOT, ROOT / "src" / "isthmus")
            if "/" in span and not any(next(place.glob(pattern), None) for place in places):
                problems.append(f"there is no {span}")
        elif re.fullmatch(r"isthmus(?:\.\w+)+", span) and not _importable(span):
            problems.append(f"there is no {span}")
    return problems


def _importable(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        try:
            return hasattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError:
            return False
    return True


def test_every_path_exists() -> None:
    pages = (ARCHITECTURE, ROOT / "CONTRIBUTING.md")
    problems = [f"{page.name}: {line}" for page in pages for line in missing_paths(page.read_text())]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("`src/isthmus/errors.py`", 0),
        ("`src/isthmus/nowhere.py`", 1),
        ("`src/isthmus/methods/<name>.py`", 0),
        ("`src/isthmus/methods/<name>.jl`", 1),
        ("[federation/codec.py]", 0),
        ("[federation/nowhere.py]", 1),
        ("`isthmus.testing.check_method`", 0),
        ("`isthmus.testing.nowhere`", 1),
        ("`isthmus.nowhere.at_all`", 1),
    ],
)
def test_the_check_of_paths_can_fail(text: str, bad: int) -> None:
    assert len(missing_paths(text)) == bad


def test_the_table_of_packages_says_what_imports_are_allowed() -> None:
    section = sections(ARCHITECTURE.read_text())["2"]
    rows = {}
    for line in re.findall(r"^\| (`.*) \|$", section, re.MULTILINE):
        package, _, allowed = line.split(" | ")
        rows |= dict.fromkeys(re.findall(r"`(\w+)`", package), allowed)
    named = {package: frozenset(re.findall(r"`(\w+)`", allowed)) for package, allowed in rows.items()}
    assert {package: named[package] for package in MAY_IMPORT} == MAY_IMPORT
    assert named.keys() == MAY_IMPORT.keys() | BASE | (ANYTHING - {""})
    assert {package for package, allowed in rows.items() if allowed == "everything"} == ANYTHING - {""}


def test_every_file_names_the_same_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == isthmus.__version__
    assert f"\nversion: {isthmus.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{isthmus.__version__}] - " in (ROOT / "CHANGELOG.md").read_text()


def test_the_keys_of_a_result_are_documented(tmp_path: Path) -> None:
    result = isthmus.run("fedavg", dataset="csbm:nodes=60", clients=2, rounds=1, out=tmp_path / "run")
    section = ARCHITECTURE.read_text().partition("### Keys of a result")[2].partition("###")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE)
    documented = {key for keys, _ in rows for key in re.findall(r"`(\w+)`", keys)}
    sometimes = {"privacy", "facts", "client_scores", "absent", "variants", "varied"}
    assert documented - sometimes == result.keys() - {"privacy", "facts"}
    hidden = {"secure_sum": True, "clients": 2, "rounds": 1, "out": tmp_path / "masked"}
    assert documented >= isthmus.run("fedavg", dataset="csbm:nodes=60", **hidden).keys()
    for key in ("bytes", "seconds", "parameters"):
        output = next(meaning for keys, meaning in rows if f"`{key}`" in keys)
        assert set(re.findall(r"`(\w+)`", output)) == set(result[key])
