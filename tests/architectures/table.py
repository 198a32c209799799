"""The table of architectures in docs/models.md."""

import re
from collections.abc import Mapping
from pathlib import Path

from tests.architectures.finding import Finding, Outcome
from tests.architectures.names import NAMES

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- architectures: begin -->\n", "<!-- architectures: end -->\n"
_MAX_REASON_CHARS = 160
_SERVED = {Outcome.CELLS: "at any block", Outcome.CHECKPOINTS: "at checkpoints", Outcome.NO_REUSE: "no"}


def row(name: str, finding: Finding) -> str:
    """Returns the line of an architecture."""
    reason = (
        finding.reason.rpartition("loading model hyperparameters: ")[2]
        .replace("|", "/")
        .replace("\n", " ")[:_MAX_REASON_CHARS]
    )
    match finding.outcome:
        case Outcome.REFUSED:
            return f"| `{name}` | refused | | {reason} |"
        case Outcome.DIED:
            return f"| `{name}` | not known: the engine ends with the tiny model | | {reason} |"
        case Outcome.NOT_WRITTEN:
            return f"| `{name}` | not known: no tiny model could be written | | {reason} |"
    served = "yes, each sequence apart" if finding.apart else "yes"
    return f"| `{name}` | {served} | {_SERVED[finding.outcome]} | {reason} |"


def write(findings: Mapping[str, Finding]) -> None:
    """Puts the lines of these architectures into the table between its marks, and keeps those of others."""
    text = DOCUMENT.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    known = rows() | {name: row(name, finding) for name, finding in findings.items()}
    lines = ["| architecture | served | prefixes are reused | |", "|---|---|---|---|"]
    lines += [known[name] for name in NAMES if name in known]
    DOCUMENT.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after)


def rows() -> dict[str, str]:
    """Returns the line of each architecture in the document."""
    written = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]
    return {match.group(1): match.group() for match in re.finditer(r"^\| `([^`]+)` .*$", written, re.MULTILINE)}
