"""Compares what a suite found with the list of skips.

Everything is run, what is skipped too: a skip that no longer applies is a mistake like a failure."""

import fnmatch
import tomllib
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Outcome(NamedTuple):
    """The result of one check of a suite."""

    name: str
    passed: bool | None
    """None if the suite itself does not run it."""
    detail: str = ""


class Skip(NamedTuple):
    """Checks of a suite that are known to fail, by a pattern of their names, and why they may."""

    pattern: str
    error: str
    """A part of what each of them says when it fails: one that fails for another reason is a mistake."""
    reason: str

    def covers(self, outcome: Outcome) -> bool:
        """Whether it is for a check, as that check fails now or if it passes."""
        is_named = fnmatch.fnmatchcase(outcome.name, self.pattern)
        return is_named and (outcome.passed is not False or self.error in outcome.detail)


class SuiteResult(NamedTuple):
    """The counts of a suite, and what is wrong."""

    passed: int
    skipped: int
    """Checks that fail with a reason, and those that the suite itself leaves out."""
    problems: list[str]


def read_skips(text: str) -> dict[str, list[Skip]]:
    """Reads the list of skips: for each suite, reasons and the patterns that they hold for. Raises ValueError."""
    found: dict[str, list[Skip]] = {}
    for suite, entries in tomllib.loads(text).items():
        for entry in entries:
            if entry.keys() != {"reason", "error", "checks"} or not all(entry.values()):
                raise ValueError(f"{suite}: a skip has a reason, an error and checks, got {entry}")
            skips = [Skip(pattern, entry["error"], entry["reason"]) for pattern in entry["checks"]]
            found.setdefault(suite, []).extend(skips)
    return found


def judge(outcomes: Iterable[Outcome], skips: Sequence[Skip]) -> SuiteResult:
    """Returns the result of a suite. Every skip has to hold for at least one check, and for none that passes."""
    passed = skipped = 0
    problems = []
    unused = list(skips)
    for one in outcomes:
        matching = [skip for skip in skips if skip.covers(one)]
        unused = [skip for skip in unused if skip not in matching]
        if one.passed is None:
            skipped += 1
        elif one.passed:
            passed += 1
            problems += [f"{one.name} passes: remove its skip ({skip.reason})" for skip in matching]
        elif matching:
            skipped += 1
        else:
            problems.append(f"{one.name} fails: {one.detail}")
    problems += [f"{skip.pattern} is no check any more: remove its skip ({skip.reason})" for skip in unused]
    if not passed + skipped + len(problems):
        problems.append("nothing was checked")
    return SuiteResult(passed, skipped, problems)
