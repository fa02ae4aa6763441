"""Output for people: progress on stderr, tables on stdout."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column, Table

from isthmus.experiments.callbacks import Callback, Progress
from isthmus.experiments.config import Settings


def stdout() -> Console:
    """Console for results; wide enough for a table where the output is not a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=140)


def size(count: float) -> str:
    """A number of bytes with its unit."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def clock(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Print a plain table; columns of numbers after the first are right-aligned."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, heading in enumerate(headings):
        numeric = i > 0 and all(row[i][0].isdigit() or row[i][0] == "-" for row in rows if row[i])
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    stdout().print(table)


class ProgressDisplay(Callback):
    """Progress of a run: a live bar on a terminal, plain lines elsewhere (about ``lines`` per run)."""

    def __init__(self, label: str = "", lines: int = 10) -> None:
        self.label, self.lines = label, lines
        self.console = Console(stderr=True, highlight=False)
        self.bar: Bar | None = None
        self.task: TaskID | None = None
        self.folder: Path | None = None
        self.scores: Mapping[str, Any] = {}

    def on_start(self, settings: Settings, folder: Path, step: int, steps: int) -> None:
        run = settings.run
        self.folder = folder
        self.label = self.label or f"{run.method} on {run.dataset}, {run.clients} clients, seed {run.seed}"
        if step:
            print(f"{self.label}: continued after {step} of {steps} rounds, setup included", file=sys.stderr)
        if self.console.is_terminal:
            # On a narrow terminal the label is shortened first: numbers matter more.
            label, fixed = Column(ratio=1, no_wrap=True, overflow="ellipsis"), Column(no_wrap=True)
            self.bar = Bar(
                TextColumn("{task.description}", table_column=label),
                BarColumn(bar_width=12, table_column=fixed),
                MofNCompleteColumn(table_column=fixed),
                TextColumn("{task.fields[note]}", table_column=fixed),
                console=self.console,
                expand=True,
            )
            self.bar.start()
            self.task = self.bar.add_task(self.label, total=steps, completed=step, note="")

    def on_round(self, progress: Progress) -> None:
        self.scores = progress.scores or self.scores
        note = (
            f"val {percent(self.scores.get('val'))}  sent {size(sum(progress.bytes.values()))}  left "
            f"{clock(progress.seconds_left)}"
        )
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=progress.step, note=note)
        elif progress.step == progress.steps or progress.step % max(1, progress.steps // self.lines) == 0:
            print(
                f"{self.label}: {progress.phase} {progress.round}/{progress.rounds}  {note}",
                file=sys.stderr,
                flush=True,
            )

    def on_recover(self, reason: str, step: int) -> None:
        print(f"{self.label}: {reason}; continues from round {step}", file=sys.stderr)

    def close(self) -> None:
        self.stop()

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def _privacy(privacy: Mapping[str, Any]) -> str:
    epsilon = privacy.get("epsilon")
    bound = (
        "no bound (no noise)"
        if epsilon is None
        else f"epsilon {epsilon:.3g} at delta {privacy.get('delta')} per {privacy.get('unit')}"
    )
    return f"{bound}; {privacy['warning']}" if privacy.get("warning") else bound


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
        ("test, client mean", f"{mean} at round {picked}, {mean_last} at the last"),
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
