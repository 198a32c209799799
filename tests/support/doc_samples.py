"""What docs/ shows that commands print."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def sample(page: str, command: str) -> list[str]:
    """Returns the lines that a page shows after a command."""
    _, found, text = (DOCS / page).read_text().partition(f"```console\n$ {command}\n")
    assert found, f"{page} does not show {command}"
    return text.partition("```")[0].splitlines()


def skeleton(line: str) -> str:
    """Returns a line with all numbers, sizes and times the same."""
    return re.sub(r"(?:\d+[dhm] )?\d[\d.,]*[KMGTdhms]?\b", "N", line).strip()
