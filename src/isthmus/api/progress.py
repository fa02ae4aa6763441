"""Progress of a run for the person who waits for it: a bar in a terminal, a bar in a notebook, or plain lines."""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from isthmus.experiments.callbacks import Callback, Progress
from isthmus.experiments.score_rules import rule_words

if TYPE_CHECKING:
    from isthmus.experiments.config import Settings


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


class ProgressDisplay(Callback):
    """Shows where a run stands, on stderr or in the output of a notebook's cell.

    Args:
        label: What is run; by default method, data set, clients and seed.
        lines: About how many lines a run prints where there is neither a terminal nor a notebook.
    """

    def __init__(self, label: str = "", lines: int = 10) -> None:
        self.label, self.lines = label, lines
        self._given = bool(label)
        self.console = Console(stderr=True, highlight=False, force_jupyter=False)
        self.bar: Bar | None = None
        self.task: TaskID | None = None
        self.cell = _notebook_cell()
        self.folder: Path | None = None
        self.scores: Mapping[str, Any] = {}

    def on_start(self, settings: Settings, folder: Path, step: int, steps: int) -> None:
        run = settings.run
        self.folder, self.scores = folder, {}
        if not self._given:
            self.label = f"{run.method} on {run.dataset}, {run.clients} clients, seed {run.seed}"
            if self.cell is None:
                say(f"{self.label}: {what_is_run(settings)}")
        if step:
            say(f"{self.label}: continued after {step} of {steps} rounds, setup included")
        if self.cell is None and self.console.is_terminal:
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
        due = progress.step == progress.steps or progress.step % max(1, progress.steps // self.lines) == 0
        if self.cell is not None:
            if due or progress.step % max(1, progress.steps // 100) == 0:
                self.cell.show(self.label, progress.step, progress.steps, note)
        elif self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=progress.step, note=note)
        elif due:
            say(f"{self.label}: {progress.phase} {progress.round}/{progress.rounds}  {note}")

    def on_recover(self, reason: str, step: int) -> None:
        say(f"{self.label}: {reason}; continues from round {step}")

    def close(self) -> None:
        self.stop()

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def what_is_run(settings: Settings) -> str:
    """Split, preset, model, score and selection of a run that begins, in a line."""
    run, config = settings.run, settings.method_config
    model = [str(getattr(config, "backbone", "")) or "no backbone"]
    if hidden := getattr(config, "hidden", ()):
        model.append("hidden " + "-".join(map(str, hidden)))
    model += [name.replace("_", " ") for name in ("input_norm", "head") if getattr(config, name, False)]
    if getattr(config, "dropout", None) is not None:
        model.append(f"dropout {config.dropout:g}")
    return (
        f"partition {run.partition}, split {run.split}, preset {run.preset}, model {' '.join(model)}; score: "
        f"{rule_words(settings.score, run.metric)}; selection {run.selection}"
    )


def display_for_python(quiet: bool) -> list[Callback]:
    """What ``isthmus.run`` shows by itself: a bar where a person looks on, nothing in scripts whose output is kept."""
    return [ProgressDisplay()] if watched(quiet) else []


def watched(quiet: bool) -> bool:
    """Whether a person looks on, in a terminal or a notebook, and wants to see progress."""
    display = ProgressDisplay()
    return not quiet and (display.cell is not None or display.console.is_terminal)


def say(text: str) -> None:
    """A line on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class _Cell:
    """The output of a notebook's cell: one line that is replaced, without widgets to install."""

    def __init__(self, show: Any) -> None:
        self._show = show
        self._handle: Any = None

    def show(self, label: str, step: int, steps: int, note: str) -> None:
        from IPython import display as ipython

        html_of: Any = ipython.HTML

        text = f"{html.escape(label)} <progress value='{step}' max='{steps}'></progress> {step}/{steps}  {note}"
        if self._handle is None:
            self._handle = self._show(html_of(text), display_id=True)
        else:
            self._handle.update(html_of(text))


def _notebook_cell() -> _Cell | None:
    """The cell that is being run, if this is a notebook."""
    module = sys.modules.get("IPython")  # where nobody imported it, this is no notebook
    shell = None if module is None else module.get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    return _Cell(display)
