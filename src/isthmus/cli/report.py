"""``isthmus report``: run folders to one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isthmus.errors import DataError

NAME = "report"


def command(
    run_dirs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold them (of compare, sweep).")],
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page about finished runs."""
    if run_dirs and not any(path.exists() for path in run_dirs):
        raise DataError("no usable run folder: " + "; ".join(f"{path}: no such folder" for path in run_dirs))
    from isthmus.report import find_runs, write_report

    print(f"report: {write_report(find_runs(run_dirs), out)}")
