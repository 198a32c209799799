"""The page about licences has every package that an installation needs, and none whose licence would bind Tokenbus."""

import re

from tests.laws.test_architecture import ROOT
from tools import licenses_page

ROW = re.compile(r"^\| `([\w.-]+)` \| (\S+) \| (.+) \|$", re.MULTILINE)
ROWS = ROW.findall(licenses_page.TARGET.read_text())
ON_SOME_MACHINES = {"backports-zstd", "onnxruntime", "onnxruntime-gpu"}
"""Packages that depend on the Python or the GPU."""
KNOWN = re.compile(
    r"(?:MIT(?:-0)?(?: License)?|Apache-2\.0|BSD(?:-[23]-Clause)?|0BSD|PSF-2\.0|MPL-2\.0|Zlib|CC0-1\.0)"
    r"(?: (?:AND|OR) (?=\S)|$)"
)


def test_the_page_lists_the_packages_that_are_needed_with_their_licences() -> None:
    listed = {(name, licence) for name, _, licence in ROWS}
    needed = {(one.name, one.licence) for one in licenses_page.packages()}
    assert {one for one in listed ^ needed if one[0] not in ON_SOME_MACHINES} == set(), "run tools.licenses_page"


def test_the_versions_are_those_of_the_tests() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    tested = {licenses_page.canonicalize_name(name): version for name, version in pins.items()}
    assert {name: version for name, version, _ in ROWS if tested[name] != version} == {}, "run tools.licenses_page"


def test_every_licence_allows_apache_for_what_uses_the_package() -> None:
    assert ROWS
    assert {name: licence for name, _, licence in ROWS if KNOWN.sub("", licence)} == {}
