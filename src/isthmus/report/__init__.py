"""Reports: tables and one offline page, formed from run folders alone."""

from __future__ import annotations

from isthmus.report.page import write_report
from isthmus.report.runs import find_runs
from isthmus.report.tables import ResultRow, result_table, table_cells

__all__ = ["ResultRow", "find_runs", "result_table", "table_cells", "write_report"]
