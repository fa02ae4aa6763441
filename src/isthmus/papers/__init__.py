"""The papers' result tables as data, and how each cell is run.

tables.py   the TOML files read, checked and searched
cells.py    one published number and what it takes to run it
plan.py     from a cell to settings, a command and a run folder
judge.py    ours beside theirs
records.py  what is kept of a run when its folder is gone
earlier.py  numbers of runs that were not recorded
counts.py   how many numbers have ours beside them, and how they compare
page.py     the results page of a paper
"""

from isthmus.papers.cells import Cell, Note, Published, parse_cell
from isthmus.papers.earlier import read_earlier
from isthmus.papers.judge import Comparison, compare_table
from isthmus.papers.plan import cell_command, cell_settings, folder_of, why_not
from isthmus.papers.records import read_records, record_of, write_records
from isthmus.papers.tables import Paper, Table, find_tables, load_paper, paper_names, select

__all__ = [
    "Cell",
    "Comparison",
    "Note",
    "Paper",
    "Published",
    "Table",
    "cell_command",
    "cell_settings",
    "compare_table",
    "find_tables",
    "folder_of",
    "load_paper",
    "paper_names",
    "parse_cell",
    "read_earlier",
    "read_records",
    "record_of",
    "select",
    "why_not",
    "write_records",
]
