"""A suite's list of skips can neither hide a failure nor outlive its reason."""

import pytest

from tests.third_party import suites
from tests.third_party.__main__ import SKIPS
from tests.third_party.judging import Outcome, Skip, judge, read_skips

STORED = Skip("chat.*.test_*_delete*", "404", "nothing is stored")
PASSED, DELETE = Outcome("chat.Test.test_create[loose]", True), "chat.Test.test_raw_delete[strict]"


def test_passed_and_skipped_checks_are_counted() -> None:
    outcomes = [PASSED, Outcome(DELETE, False, "got 404"), Outcome("chat.Test.test_left_out", None)]
    assert judge(outcomes, [STORED]) == (1, 2, [])


def test_a_failure_without_a_skip_is_a_problem() -> None:
    result = judge([PASSED, Outcome("chat.Test.test_list", False, "got 404")], [])
    assert result == (1, 0, ["chat.Test.test_list fails: got 404"])


def test_a_skip_hides_no_failure_of_another_kind() -> None:
    result = judge([Outcome(DELETE, False, "got 500")], [STORED])
    assert result.skipped == 0
    assert result.problems[0] == f"{DELETE} fails: got 500"


def test_a_skip_of_a_check_that_passes_is_a_problem() -> None:
    assert judge([Outcome(DELETE, True)], [STORED]).problems == [
        f"{DELETE} passes: remove its skip (nothing is stored)"
    ]


def test_a_skip_of_no_check_is_a_problem() -> None:
    (problem,) = judge([PASSED], [STORED]).problems
    assert problem.startswith("chat.*.test_*_delete* is no check any more")


def test_a_suite_that_checks_nothing_is_a_problem() -> None:
    assert judge([], []).problems == ["nothing was checked"]


def test_skips_are_read_with_their_reasons() -> None:
    text = '[[one]]\nreason = "so"\nerror = "404"\nchecks = ["a", "b*"]\n'
    assert read_skips(text) == {"one": [Skip("a", "404", "so"), Skip("b*", "404", "so")]}


@pytest.mark.parametrize(
    "entry",
    ['checks = ["a"]\nerror = "404"', 'reason = "so"\nerror = "404"\nchecks = []', 'reason = "so"\nchecks = ["a"]'],
)
def test_a_skip_without_a_reason_an_error_or_a_check_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="one: a skip has a reason, an error and checks"):
        read_skips(f"[[one]]\n{entry}\n")


def test_skips_are_of_suites_that_exist() -> None:
    assert read_skips(SKIPS.read_text()).keys() <= suites.SUITES.keys()
