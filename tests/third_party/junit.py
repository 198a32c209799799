"""Reads the report of a run of pytest."""

import xml.etree.ElementTree as xml
from collections.abc import Iterator

from tests.third_party.judging import Outcome


def from_junit(report: bytes, prefix: str) -> Iterator[Outcome]:
    """Yields the outcome of each test, whose name is without a prefix."""
    for case in xml.fromstring(report).iter("testcase"):
        where = case.get("classname", "").removeprefix(prefix)
        failed = next((one for kind in ("failure", "error") for one in case.iter(kind)), None)
        passed = None if case.find("skipped") is not None else failed is None
        detail = (failed.get("message") or "") if failed is not None else ""
        yield Outcome(f"{where}.{case.get('name')}", passed, detail[:500])
