"""Every decision that anything names has a page, and every page is in the table."""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.test_paths import NAMED as PATH
from tests.laws.test_architecture import PACKAGES, ROOT

DECISIONS = ROOT / "docs/decisions"
PAGES = {path.name[:4]: path for path in DECISIONS.glob("[0-9]*.md")}
NUMBERS = r"\d{4}(?:(?:, and|,| and)\s+\d{4})*"
NAMED = re.compile(rf"\b[Dd]ecisions?\s+({NUMBERS})\b|\bdecisions/(\d{{4}})\b")
LINKED = re.compile(r"\bdecisions/(\d{4}[\w-]*\.md)")
BARE = re.compile(r"(?<![\d.,-])0\d{3}(?![\d.,]*\d)")
"""A number on the page of a decision that is no part of a larger one or of a fraction: another decision's."""


def texts() -> Iterator[tuple[Path, str]]:
    """All texts of the repository in which a decision could be named."""
    folders = [ROOT / name for name in (*PACKAGES, "bench", "demo", "deploy", "docs", "tests", "tools")]
    paths = {
        path for folder in folders for path in folder.rglob("*") if path.suffix in {".py", ".md", ".yaml", ".conf"}
    }
    for path in sorted(paths | set(ROOT.glob("*.md")) | {ROOT / "Makefile", ROOT / "pyproject.toml"}):
        yield path, path.read_text()


def numbers(text: str) -> set[str]:
    return {number for match in NAMED.findall(text) for number in re.findall(r"\d{4}", " ".join(match))}


def test_every_form_in_which_decisions_are_named_is_found() -> None:
    text = "decision 9001, [decision\n9002](decisions/9003-x.md), decisions 9004, 9005 and 9006, docs/decisions/9007"
    assert numbers(text) == {f"900{digit}" for digit in range(1, 8)}
    assert LINKED.findall(text) == ["9003-x.md"]
    assert BARE.findall("as in 0012, but not 0.0012, 2,0012 or 10012 (0013).") == ["0012", "0013"]


def test_every_named_decision_has_a_page() -> None:
    missing = {
        (str(path.relative_to(ROOT)), number)
        for path, text in texts()
        if path != Path(__file__)
        for number in numbers(text) - PAGES.keys()
    }
    assert not missing


def test_every_link_to_a_decision_leads_to_a_page() -> None:
    links = {link for path, text in texts() if path != Path(__file__) for link in LINKED.findall(text)}
    links |= {link for page in DECISIONS.glob("*.md") for link in re.findall(r"\]\((\d[^)]*)\)", page.read_text())}
    assert not {link for link in links if not (DECISIONS / link).exists()}


def test_decisions_name_decisions_that_have_a_page() -> None:
    assert not {(page.name, n) for page in PAGES.values() for n in BARE.findall(page.read_text()) if n not in PAGES}


def test_every_path_on_a_page_exists() -> None:
    paths = {(page.name, path) for page in PAGES.values() for path in PATH.findall(page.read_text())}
    assert paths
    assert not {(name, path) for name, path in paths if not (ROOT / path).exists()}


def test_a_page_begins_with_its_number_and_a_title() -> None:
    assert not [page.name for number, page in PAGES.items() if not page.read_text().startswith(f"# {number} ")]


def test_the_table_has_every_page_once() -> None:
    rows = re.findall(r"^\| \[(\d{4})\]\(([\w-]+\.md)\) \| \S", (DECISIONS / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted((number, page.name) for number, page in PAGES.items())


def test_there_are_few_enough_to_find_one() -> None:
    """A new decision about a subject that has a page belongs on that page."""
    assert len(PAGES) <= 40
