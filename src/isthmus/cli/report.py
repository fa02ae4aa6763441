"""``isthmus report``: run folders to one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

NAME = "report"


def command(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold them (of compare, sweep).")],
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page about finished runs."""
    from isthmus.report import find_runs, write_report

    print(f"report: {write_report(find_runs(run_dirs), out)}")
