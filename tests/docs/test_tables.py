"""Rows of tables have as many cells as the table's head: what follows these isn't shown."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for pattern in ("*.md", "docs/**/*.md", "bench/*.md") for path in ROOT.glob(pattern))


def crooked_rows(page: str) -> list[str]:
    """Returns the rows that have more or fewer cells than the head of their table."""
    found, num_cells, is_code = [], 0, False
    for line in page.splitlines():
        is_code ^= line.startswith("```")
        if is_code or not line.startswith("|"):
            num_cells = 0
            continue
        count = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line)))
        num_cells = num_cells or count
        found += [line] if count != num_cells else []
    return found


def test_a_row_with_another_number_of_cells_is_found() -> None:
    head = "| a | b |\n|---|---|\n"
    assert crooked_rows(f"{head}| `a|b` | a\\|b |\n\n| c |\n```\n{head}| c |\n```") == []
    assert crooked_rows(f"{head}| | c | d |\n| e |") == ["| | c | d |", "| e |"]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_row_of_a_page_has_the_cells_of_its_head(page: Path) -> None:
    assert crooked_rows(page.read_text()) == []
