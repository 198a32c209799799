"""The pages that explain the code name files that exist."""

import re

import pytest

from tests.laws.test_architecture import PACKAGES, ROOT

NAMED = re.compile(rf"`((?:{'|'.join(PACKAGES)}|bench|deploy|tests|docs)/[\w./-]*)`")
FOLDER = re.compile(r"^(\s*)([\w-]+)/ ", re.MULTILINE)


@pytest.mark.parametrize("page", ["architecture", "glossary", "routing", "operations", "logs", "bench", "guarantees"])
def test_every_path_on_a_page_exists(page: str) -> None:
    paths = set(NAMED.findall((ROOT / f"docs/{page}.md").read_text()))
    assert not {path for path in paths if not (ROOT / path).exists()}


def test_every_test_that_the_page_on_security_names_exists() -> None:
    paths = set(re.findall(r"`([\w/]+/test_\w+\.py)`", (ROOT / "docs/security.md").read_text()))
    assert paths
    assert not {path for path in paths if not (ROOT / "tests" / path).exists()}


def test_the_drawing_of_the_folders_shows_every_folder_of_the_product() -> None:
    drawing = (ROOT / "docs/architecture.md").read_text().partition("## Folders")[2].split("```")[1]
    shown = {name for _, name in FOLDER.findall(drawing)} | set(re.findall(r"(\w+)/", drawing))
    folders = {path.parent.name for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")}
    assert folders <= shown
