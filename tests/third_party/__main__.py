"""`make conformance`: runs suites and clients that others wrote against a running system, and shows what they found.

`tokenbus wire-check` (conformance/) is something else: our own rules, for those who write clients, routers, workers."""

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.third_party import packages
from tests.third_party.judging import SuiteResult, judge, read_skips
from tests.third_party.serving import Served, serving
from tests.third_party.suites import SUITES

SKIPS = Path(__file__).with_name("skips.toml")
PAGE = Path(__file__).parents[2] / "docs/gateway.md"
BEGIN, END = "<!-- suites -->", "<!-- end of suites -->"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make conformance", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"one of {', '.join(SUITES)} (all)")
    names = parser.parse_args().suites or [*SUITES]
    if unknown := set(names) - set(SUITES):
        parser.error(f"there is no suite {', '.join(sorted(unknown))}")
    results: dict[str, SuiteResult] = {}
    with tempfile.TemporaryDirectory(prefix="tokenbus-suites-") as folder, serving(Path(folder)) as served:
        for name in names:
            results[name] = run(name, served)
    print(f"\n{table(results)}")
    if any(one.problems for one in results.values()):
        return 1
    if set(results) == set(SUITES):
        write_page(results)
    return 0


def run(name: str, served: Served) -> SuiteResult:
    """Runs a suite and prints its problems."""
    suite, started = SUITES[name], time.monotonic()
    if suite.needs_node and not packages.has_node():
        return SuiteResult(0, 0, [f"{name} needs Node and npm"])
    try:
        result = judge(suite.run(served), read_skips(SKIPS.read_text()).get(name, []))
    except Exception:  # a suite that breaks must not keep the others from being run
        result = SuiteResult(0, 0, [traceback.format_exc()])
    counts = f"{result.passed} passed, {result.skipped} skipped, {len(result.problems)} wrong"
    print(f"{name}: {counts}, {time.monotonic() - started:.0f} s")
    for problem in result.problems:
        print(f"  {problem}")
    sys.stdout.flush()
    return result


def table(results: dict[str, SuiteResult]) -> str:
    """Returns the counts as a table of Markdown."""
    rows = [f"| {SUITES[name].title} | {one.passed} | {one.skipped} |" for name, one in results.items()]
    return "\n".join(["| suite | passed | skipped |", "|---|---|---|", *rows])


def write_page(results: dict[str, SuiteResult]) -> None:
    """Writes the counts into docs/gateway.md."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
