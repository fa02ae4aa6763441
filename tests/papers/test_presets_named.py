"""Tables do not depend on what is the default where no paper is named: every cell runs with a paper's preset."""

from __future__ import annotations

import pytest

from isthmus.papers.plan import cell_settings, why_not
from isthmus.papers.tables import load_paper, paper_names


@pytest.mark.parametrize("paper", paper_names())
def test_every_cell_runs_with_the_preset_of_a_paper(paper: str) -> None:
    cells = [cell for table in load_paper(paper).tables for cell in table.cells if why_not(cell) is None]
    assert cells
    assert {cell.name for cell in cells if cell_settings(cell, 0).run.preset == "general"} == set()
