"""The page: its numbers, its figures, its independence of any network, and what hostile names can do to it
(nothing).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fake_runs import write_run

from isthmus.errors import ConfigError, DataError
from isthmus.report import figures, words, write_report
from isthmus.report.style import CSS, SCRIPT

METHODS = ("local", "fedavg", "fedsgd", "central")
HOSTILE = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"


class Document(HTMLParser):
    """What a browser would see: elements with attributes, text by table cell, script contents."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "script" in self._open:
            self.scripts[-1] += data
        elif "style" not in self._open:
            self.text += data
            if "td" in self._open or "th" in self._open:
                self.rows[-1][-1] += data

    @property
    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = json.loads(self.scripts[0])
        return figures


def page_of(folders: list[Path], out: Path) -> tuple[str, Document]:
    text = write_report(folders, out, now=datetime(2026, 1, 2, 3, 4, tzinfo=UTC)).read_text(encoding="utf-8")
    return text, Document(text)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Document]:
    base = tmp_path_factory.mktemp("comparison")
    folders = [write_run(base / f"{method}-{seed}", method, seed=seed) for method in METHODS for seed in range(3)]
    return page_of(folders, base / "deep" / "report.html")


def test_minority_against_all_round_by_round(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", "fedavg", result={"test": 0.8, "test_minority": 0.5})
    lines = [
        {"phase": "train", "round": r, "val": 0.5, "test": 0.6 + r / 10, "test_groups": {"minority": [r, 4]}}
        for r in (1, 2)
    ]
    lines.append({"phase": "train", "round": 3, "val": 0.5, "test": 0.7, "test_groups": {"minority": ["x", 4]}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path, marks = page_of([folder], tmp_path / "r.html")[1].figures["f0-minority"]["data"]
    assert path["x"] == pytest.approx([70.0, 80.0]) and path["y"] == pytest.approx(
        [25.0, 50.0]
    )  # the damaged line costs its point
    assert (marks["x"], marks["y"]) == (pytest.approx([80.0]), pytest.approx([50.0]))
    # Where the score is another, accuracy on minority nodes still stands beside accuracy, at the selected round too.
    other = {"metric": "auprc", "test": 0.3, "test_minority": 0.5, "selected_round": 2}
    rare = write_run(tmp_path / "c", "fedavg", result=other)
    lines = [line | {"test": 0.1, "test_accuracy": line["test"]} for line in lines]
    (rare / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    html, page = page_of([rare], tmp_path / "t.html")
    path, marks = page.figures["f0-minority"]["data"]
    assert path["x"] == pytest.approx([70.0, 80.0]) and marks["x"] == pytest.approx([80.0])
    assert "minority accuracy (%)" in html and "Scores are AUPRC in percent" in html
    plain = write_run(tmp_path / "b", "fedavg")
    assert "f0-minority" not in page_of([plain], tmp_path / "s.html")[1].figures


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from strings(entry)


def test_the_table_holds_the_numbers(comparison: tuple[str, Document]) -> None:
    _, document = comparison
    lines = {row[0].removesuffix(" reference"): row[1:] for row in document.rows if len(row) == 10}
    assert list(lines) == ["method", *METHODS]
    assert lines["fedavg"][:4] == ["78.00 ± 0.65", "+16.00", "78.00 ± 0.65", "76.00 ± 0.65"]
    assert lines["local"][4:8] == ["0.00", "92,231", "0 B", "0 B"]
    best = [
        i for i, (tag, attributes) in enumerate(document.elements) if tag == "tr" and attributes.get("class") == "best"
    ]
    assert len(best) == 1
    assert "Highest score of a federated method: fedsgd with 80.00 ± 0.65\u00a0%" in document.text
    assert "For reference: local 62.00\u00a0%, central 84.00\u00a0%." in document.text


def test_scenario_seeds_versions_date_and_settings_are_on_the_page(comparison: tuple[str, Document]) -> None:
    _, document = comparison
    for said in (
        "Cora split between 5 clients by louvain",
        "seeds 0, 1 and 2",
        "torch 2.13.0",
        "Written 2026-01-02 03:04 UTC",
        "hidden = 64",
    ):
        assert said in document.text


def test_who_saw_what(comparison: tuple[str, Document]) -> None:
    _, document = comparison
    assert ["client → server", "Update train", "countmodel", "summed", "250", "92.3 MB"] in document.rows
    assert ["server → client", "Shared train", "model", "clear", "250", "92.3 MB"] in document.rows
    assert "the messages travel unmasked" in document.text and "can read only the total" not in document.text
    assert "No message passed between parties." in document.text and "not a federation" in document.text
    # In short, before every message: who reads what.
    server = next(row for row in document.rows if row[0] == "fedavg" and row[1].startswith("summed"))
    assert server == ["fedavg", "summed: count, model", "nothing"]


def test_runs_that_were_asked_the_same_are_one_method_whatever_validation_chose(tmp_path: Path) -> None:
    def run(seed: int, variant: str, lambda1: float, method: str = "fedspray") -> Path:
        tried = {"variant": variant, "variants": {"taught": 0.5, "nudged": 0.6}, "varied": ["lambda1"]}
        folder = tmp_path / f"{method}-{variant}-{seed}"
        return write_run(folder, method, seed=seed, result=tried, settings={"lambda1": lambda1})

    folders = [run(0, "nudged", 0.1), run(1, "taught", 1.0), run(2, "taught", 1.0)]
    document = page_of(folders, tmp_path / "r.html")[1]
    assert "fedspray ·" not in document.text and "Repeated with seeds 0, 1 and 2" in document.text
    assert "variant chosen by validation: nudged for seed 0; taught for seed 1 and seed 2" in document.text
    # A setting that was asked for still tells them apart.
    named = write_run(tmp_path / "named", "fedspray", result={"variant": "nudged"}, settings={"lambda1": 0.1})
    assert "fedspray · " in page_of([*folders, named], tmp_path / "s.html")[1].text


def test_whiskers_are_named_where_they_are_drawn(tmp_path: Path) -> None:
    for clients, drawn in ((3, True), (100, False)):
        base = tmp_path / str(clients)
        folders = [write_run(base / f"{m}{seed}", m, clients=clients, seed=seed) for m in METHODS for seed in (0, 1)]
        assert ("with whiskers from the lowest" in page_of(folders, base / "r.html")[1].text) == drawn


def test_a_note_names_methods_where_it_is_of_all_their_runs(tmp_path: Path) -> None:
    hidden = {"per_client": None, "client_scores": None}
    folders = [write_run(tmp_path / f"a{seed}", "fedavg", seed=seed, result=hidden) for seed in (0, 1)]
    folders.append(write_run(tmp_path / "b", "local"))
    assert "Note: fedavg: secure sums" in page_of(folders, tmp_path / "r.html")[1].text


def test_a_ninth_method_does_not_look_like_the_first(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / str(number), f"method{number}") for number in range(9)]
    document = page_of(folders, tmp_path / "r.html")[1]
    keys = [one for _, one in document.elements if (one.get("class") or "").startswith("key")]
    assert {one["class"] for one in keys} == {"key", "key again"} and len({(k["class"], k["style"]) for k in keys}) == 9


def test_every_figure_has_its_place_and_only_what_the_script_draws(comparison: tuple[str, Document]) -> None:
    _, document = comparison
    places = [attributes["id"] for _, attributes in document.elements if attributes.get("class") == "plot"]
    assert places == list(document.figures) and len(places) == 9
    tokens = {text for figure in document.figures.values() for text in strings(figure) if text.startswith("@")}
    assert {token[1:].partition("/")[0] for token in tokens} <= set(re.findall(r"--([\w-]+):", CSS))
    for figure in document.figures.values():
        assert {trace["type"] for trace in figure["data"]} <= {"scatter", "bar", "heatmap"}


def test_curves_are_means_with_a_band_of_one_spread(comparison: tuple[str, Document], tmp_path: Path) -> None:
    _, document = comparison
    traces = [trace for trace in document.figures["f0-test"]["data"] if trace["meta"]["series"] == 1]
    band, line, marks = traces
    assert line["x"] == list(range(5, 51, 5))
    assert band["x"] == line["x"] + line["x"][::-1] and band["fill"] == "toself"
    half = len(line["x"])
    for mean, low, high in zip(line["y"], band["y"][:half], reversed(band["y"][half:]), strict=True):
        assert (low + high) / 2 == pytest.approx(mean) and high > low
    # The last points are final scores less a vanishing term: 77.2, 78.0, 78.8 over seeds.
    assert line["y"][-1] == pytest.approx(78.0, abs=0.15)
    assert marks["x"] == [45, 45, 45]


def test_client_bars_carry_test_sizes_and_range_over_seeds(tmp_path: Path) -> None:
    def run(seed: int, score: float, size: int) -> Path:
        rows = [
            {"client": "a", "nodes": 9, "test": size, "test_score": score},
            {"client": "b", "nodes": 9, "test": 0, "test_score": None},
        ]
        return write_run(tmp_path / str(seed), seed=seed, clients=["a", "b"], result={"per_client": rows})

    _, document = page_of([run(0, 0.5, 40), run(1, 0.7, 60)], tmp_path / "r.html")
    (bar,) = document.figures["f0-clients"]["data"]
    assert bar["x"] == [0] and bar["y"] == pytest.approx([60.0])
    assert bar["error_y"]["array"] == pytest.approx([10.0]) and bar["error_y"]["arrayminus"] == pytest.approx([10.0])
    assert bar["hovertext"] == ["<b>a</b>, fedavg<br>60.00 % (seeds 50.00 to 70.00)<br>40 to 60 test nodes"]


def test_pooled_data_is_a_line_across_the_clients_and_has_no_client_mean(comparison: tuple[str, Document]) -> None:
    _, document = comparison
    figure = document.figures["f0-clients"]
    line = figure["data"][3]
    assert line["type"] == "scatter" and line["y"] == pytest.approx([84.0, 84.0]) and line["meta"] == {"series": 3}
    assert [len(trace["x"]) for trace in figure["data"][:3]] == [5, 5, 5] and figure["layout"]["xaxis"]["ticktext"] == [
        "0",
        "1",
        "2",
        "3",
        "4",
    ]
    assert next(row for row in document.rows if len(row) == 10 and row[0].startswith("central"))[4] == words.ABSENT


def test_bytes_by_kind_add_up_to_the_ledger_with_framing_apart(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    row = {
        "sender": "client",
        "receiver": "server",
        "kinds": ["model", "count"],
        "bytes": 100,
        "bytes_by_kind": {"model": 80, "count": 8},
    }
    peer = {"sender": "client", "receiver": "client", "kinds": ["structure"], "bytes": 30}
    asked = {
        **row,
        "phase": "evaluation",
        "bytes": 10**6,
        "bytes_by_kind": {"model": 10**6},
    }  # not a cost of the method
    (folder / "disclosure.json").write_text(json.dumps({"rows": [row, row, peer, asked]}))
    _, document = page_of([folder], tmp_path / "r.html")
    data = {trace["name"]: (trace["y"], trace["x"]) for trace in document.figures["f0-bytes"]["data"]}
    assert data == {"model": ([0], [160]), "count": ([0], [16]), "framing": ([0], [24]), "structure": ([1], [30])}


def test_directions_are_those_of_the_ledger() -> None:
    pairs = [
        ("client", "server"),
        ("server", "client"),
        ("client", "client"),
        ("device", "client"),
        ("server", "device"),
        ("device", "server"),
    ]
    assert [figures.direction(*pair) for pair in pairs] == ["up", "down", "peer", "device", "device", "device"]


def test_label_distance_is_total_variation(tmp_path: Path) -> None:
    from isthmus.report.runs import Partition

    def partition(labels: tuple[tuple[int, ...], ...]) -> Partition:
        return Partition(("a", "b"), (4, 4), None, None, labels, (None, None), (None, None))

    assert figures.label_distance(partition(((4, 0), (0, 4)))) == pytest.approx(0.5)
    assert figures.label_distance(partition(((1, 3), (1, 3)))) == pytest.approx(0.0)


def test_nothing_is_fetched(comparison: tuple[str, Document]) -> None:
    text, document = comparison
    for tag, attributes in document.elements:
        for name in ("src", "srcset", "href", "action", "data", "poster", "xlink:href"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
    own = text.replace("http://www.w3.org/2000/svg", "")  # the name of SVG's elements, which nobody fetches
    assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch\(|XMLHttpRequest|WebSocket|import\(", own)


def test_the_policy_admits_exactly_our_scripts(comparison: tuple[str, Document]) -> None:
    _, document = comparison
    policy = next(
        a["content"]
        for tag, a in document.elements
        if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None and policy.startswith("default-src 'none';")
    admitted = set(re.findall(r"'sha256-([^']+)'", policy))
    run = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in document.scripts[1:]}
    assert admitted == run and len(document.scripts) == 2 and document.scripts[1] == SCRIPT
    assert "script-src 'unsafe" not in policy and "connect-src" not in policy


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    clean = Document(
        write_report([write_run(tmp_path / "clean", clients=["a", "b"])], tmp_path / "clean.html").read_text()
    )
    folder = write_run(
        tmp_path / "<b>bad",
        method=HOSTILE,
        dataset=HOSTILE,
        partition=HOSTILE,
        clients=[HOSTILE, "%{x}@ink$\\</script><!--"],
        split=HOSTILE,
        result={
            "score_rule": HOSTILE,
            "source": HOSTILE,
            "engine": HOSTILE,
            "metric": HOSTILE,
            "versions": {HOSTILE: HOSTILE},
        },
        settings={"name": HOSTILE},
    )
    texts = ("phase", "sender", "receiver", "message", "protection")
    row = {**dict.fromkeys(texts, HOSTILE), "kinds": [HOSTILE], "times": 1, "bytes": 5, "bytes_by_kind": {HOSTILE: 5}}
    (folder / "disclosure.json").write_text(json.dumps({"rows": [row]}))
    half = tmp_path / "<script>half"
    half.mkdir()
    page, document = page_of([folder, half], tmp_path / "r.html")
    assert "<script>alert" not in page and "<img" not in page and "<script>half" not in page
    tags = [tag for tag, _ in document.elements]
    assert (
        tags.count("script") == 2
        and tags.count("img") == 0
        and set(tags) <= {tag for tag, _ in clean.elements} | {"code", "li", "ul"}
    )
    assert HOSTILE in document.text and "<script>half" in document.text
    ours = {"b", "br"}  # the only tags that texts of figures may hold
    for text in strings(document.figures):
        assert {tag.strip("/") for tag in re.findall(r"<(/?\w+)", text)} <= ours


def test_a_half_finished_folder_is_named_and_the_rest_renders(tmp_path: Path) -> None:
    good, half = write_run(tmp_path / "good"), write_run(tmp_path / "half", seed=1)
    (half / "result.json").unlink()
    (good / "metrics.jsonl").unlink()
    _, document = page_of([good, half], tmp_path / "r.html")
    assert f"Left out: {half}: result.json is missing" in document.text
    assert f"Note: {good}: metrics.jsonl is missing" in document.text
    assert "f0-val" not in document.figures and "f0-clients" in document.figures
    with pytest.raises(DataError, match=r"half: result\.json is missing"):
        write_report([half], tmp_path / "none.html")
    assert not (tmp_path / "none.html").exists()


def test_a_result_alone_still_makes_a_page(tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "result.json").write_text(
        '{"method": "m", "dataset": "d", "seed": 0, "test": 0.5, "per_client": 3, "versions": []}'
    )
    _, document = page_of([folder], tmp_path / "r.html")
    assert document.figures == {} and "50.00" in document.text


def test_scenarios_have_sections_of_their_own(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / f"{d}-{m}", m, dataset=d, clients=k)
        for d, k in (("cora", 3), ("pubmed", 4))
        for m in ("local", "fedavg")
    ]
    _, document = page_of(folders, tmp_path / "r.html")
    assert [attributes["id"] for tag, attributes in document.elements if tag == "section"] == ["s0", "s1"]
    assert len([row for row in document.rows if row and row[0] == "fedavg" and len(row) == 9]) == 2
    assert "2 methods in 2 scenarios" in document.text and {key[:2] for key in document.figures} == {"f0", "f1"}


def test_an_unlike_partition_under_the_same_seed_is_said(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a", "local", clients=2), write_run(tmp_path / "b", "fedavg", clients=2)]
    assert "not like for like" not in page_of(folders, tmp_path / "r.html")[1].text
    (folders[1] / "scenario.json").write_text('{"sizes": {"client-0": 1, "client-1": 2}}')
    text = page_of(folders, tmp_path / "r.html")[1].text
    assert "not like for like" in text and "draws its own partition" not in text  # one seed: nothing was redrawn


def test_partitions_that_change_with_the_seed_are_said(tmp_path: Path, comparison: tuple[str, Document]) -> None:
    assert (
        "Every seed draws its own partition" in comparison[1].text
        and "the other seeds draw their own" in comparison[1].text
    )


def test_hundreds_of_clients_become_points_with_few_ticks(tmp_path: Path) -> None:
    _, document = page_of([write_run(tmp_path / "a", clients=300)], tmp_path / "r.html")
    figure = document.figures["f0-clients"]
    assert figure["data"][0]["type"] == "scatter" and len(figure["layout"]["xaxis"]["tickvals"]) <= 20
    heat = document.figures["f0-cross"]["data"][0]
    assert (
        "text" not in heat
        and heat["zmin"] == 0
        and heat["zmax"] == max(value for row in heat["z"] for value in row if value is not None)
    )


def test_a_folder_or_an_unwritable_place_as_output_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    with pytest.raises(ConfigError, match="is a folder"):
        write_report([folder], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        write_report([folder], tmp_path / "file" / "report.html")


def test_a_graph_task_speaks_of_graphs(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", split="stratified:80/10/10")
    scenario = json.loads((folder / "scenario.json").read_text())
    (folder / "scenario.json").write_text(
        json.dumps({"task": "graph", "sizes": scenario["sizes"], "labels": scenario["labels"]})
    )
    _, document = page_of([folder], tmp_path / "r.html")
    for said in (
        "Graphs per client",
        "% of the graphs train",
        "How the graphs are split",
        "all test graphs alike",
        "% of its graphs",
    ):
        assert said in document.text
    assert "nodes" not in document.text.replace("training nodes", "").replace("client's nodes", "").replace(
        "names of nodes", ""
    )
    assert "nodes" not in json.dumps(document.figures)


def test_no_winner_among_scores_formed_differently(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a", "fedavg"), write_run(tmp_path / "b", "fedsgd", result={"score_rule": "other"})]
    _, document = page_of(folders, tmp_path / "r.html")
    assert "Highest score" not in document.text and not any(a.get("class") == "best" for _, a in document.elements)
    assert "Not the same way to form the score for all" in document.text


def test_a_row_shows_one_round(tmp_path: Path) -> None:
    last = {"score": 0.5, "score_rule": "pooled test accuracy, last round", "test": 0.9, "test_last": 0.5}
    folder = write_run(tmp_path / "a", "fedavg", result={**last, "test_client_mean_last": 0.4})
    row = next(row for row in page_of([folder], tmp_path / "r.html")[1].rows if row and row[0] == "fedavg")
    assert row[1:4] == ["50.00", "50.00", "40.00"]


def test_confusion_and_scores_by_class(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", "fedavg")
    for client, counts in (("client-0", [[3, 1], [0, 2]]), ("client-1", [[1, 0], [1, 0]])):
        target = folder / "models" / client
        target.mkdir(parents=True)
        classes = [{"class": "ordinary"}, {"class": "fraud"}]
        (target / "scores.json").write_text(json.dumps({"test": {"confusion": counts, "classes": classes}}))
    _, document = page_of([folder], tmp_path / "r.html")
    heat = document.figures["f0-confusion-0"]["data"][0]
    assert heat["text"] == [["4", "1"], ["1", "2"]] and heat["z"][0] == pytest.approx([80.0, 20.0])
    row = next(row for row in document.rows if row[0] == "fedavg" and len(row) == 5)
    assert row[1:] == ["80.00", "80.00", "66.67", "66.67"]


def test_costs_and_losses(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", "fedavg")
    lines = [
        {
            "round": r,
            "val": 0.5,
            "test": 0.4 + r / 10,
            "train_loss": 1 / r,
            "bytes": {"setup": 5, "up": 10 * r},
            "seconds": r,
        }
        for r in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = page_of([folder], tmp_path / "r.html")[1].figures
    (line,) = found["f0-cost-sent"]["data"]
    assert line["x"] == [15, 25] and line["y"] == pytest.approx([50.0, 60.0])
    assert found["f0-cost-seconds"]["data"][0]["x"] == [1, 2]
    assert found["f0-train_loss"]["data"][0]["y"] == [1.0, 0.5] and "f0-val_loss" not in found


def test_what_the_first_round_of_a_process_loads_is_no_time_of_its_method(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", "fedavg")  # setup takes half a second
    seconds = {1: 14.5, 2: 15.0, 3: 16.0, 4: 17.0}
    lines = [{"round": r, "val": 0.5, "test": 0.5, "seconds": s} for r, s in seconds.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text, document = page_of([folder], tmp_path / "r.html")
    assert document.figures["f0-cost-seconds"]["data"][0]["x"] == pytest.approx([1.5, 2.0, 3.0, 4.0])
    assert "compiles and loads once" in text


def test_scores_of_clients_that_nobody_knows_are_named(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a", "fedavg"), write_run(tmp_path / "b", "fedspray", result={"per_client": None})]
    assert "Not known with secure sums: fedspray." in page_of(folders, tmp_path / "r.html")[1].text


def test_sections_of_one_data_set_are_told_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / s, "fedavg", split=s.replace("-", "/")) for s in ("10-10-80", "40-30-30")]
    text = page_of(folders, tmp_path / "r.html")[1].text
    assert "fedavg on Cora, 5 clients, split 10/10/80" in text and "split 40/30/30" in text


def test_a_page_of_many_clients_is_small(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"{m}{s}", m, clients=300, seed=s) for m in METHODS for s in range(2)]
    assert len(page_of(folders, tmp_path / "r.html")[0]) < 2_000_000
