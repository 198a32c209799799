"""`make conformance`: runs suites and clients that others wrote against a running system, and shows what they found.

This is not `tokenbus wire-check`, which is ours (conformance/): here nothing is ours but the system and short scripts."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.third_party import packages
from tests.third_party.serving import Served, serving
from tests.third_party.suites import SUITES
from tests.third_party.verdict import Verdict, judge, read_skips

SKIPS = Path(__file__).with_name("skips.toml")
PAGE = Path(__file__).parents[2] / "docs/gateway.md"
BEGIN, END = "<!-- suites -->", "<!-- end of suites -->"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make conformance", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"one of {', '.join(SUITES)} (all)")
    names = parser.parse_args().suites or [*SUITES]
    if unknown := set(names) - set(SUITES):
        parser.error(f"there is no suite {', '.join(sorted(unknown))}")
    verdicts: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory(prefix="tokenbus-suites-") as folder, serving(Path(folder)) as served:
        for name in names:
            verdicts[name] = run(name, served)
    print(f"\n{table(verdicts)}")
    if set(verdicts) == set(SUITES):
        write_page(verdicts)
    return 1 if any(one.problems for one in verdicts.values()) else 0


def run(name: str, served: Served) -> Verdict:
    """Runs a suite and prints its problems."""
    suite, started = SUITES[name], time.monotonic()
    if suite.needs_node and not packages.has_node():
        return Verdict(0, 0, [f"{name} needs Node and npm"])
    verdict = judge(suite.run(served), read_skips(SKIPS.read_text()).get(name, []))
    duration_s = time.monotonic() - started
    print(
        f"{name}: {verdict.passed} passed, {verdict.skipped} skipped, {len(verdict.problems)} wrong, {duration_s:.0f} s"
    )
    for problem in verdict.problems:
        print(f"  {problem}")
    sys.stdout.flush()
    return verdict


def table(verdicts: dict[str, Verdict]) -> str:
    """Returns the counts as a table of Markdown."""
    rows = [f"| {SUITES[name].title} | {one.passed} | {one.skipped} |" for name, one in verdicts.items()]
    return "\n".join(["| suite | passed | skipped |", "|---|---|---|", *rows])


def write_page(verdicts: dict[str, Verdict]) -> None:
    """Writes the counts into docs/gateway.md."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(verdicts)}\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
