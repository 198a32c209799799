"""The report has the sums of the records' numbers, and no other numbers."""

import msgspec

from tests.chaos.report import render, summary
from tests.chaos.results import Ends, Record

FIRST = Record(
    kind="kill_worker",
    seed=0,
    engine="sim",
    faults=20,
    ends={"plain": Ends(streams=1_000, well=998, wrong=1, errors={"worker_lost": 1}), "whole": Ends(streams=2, well=2)},
    gaps_ms=[1_000, 2_000],
    longest_silence_ms=2_500,
    longest_stall_ms=40,
    longest_fault_s=0.5,
    median_stream_s=7.6,
    duration_s=90.0,
    machine="2 cores, X",
    commit="abc",
    date="2024-05-01",
)
SECOND = Record(
    kind="kill_worker",
    seed=4,
    engine="demo",
    faults=1_100,
    ends={"plain": Ends(streams=500, well=500, parted=3)},
    gaps_ms=[3_000],
    longest_silence_ms=3_100,
    longest_fault_s=1.5,
    median_stream_s=7.5,
    duration_s=150.0,
    machine="2 cores, X",
    commit="def",
    date="2024-05-03",
)


def test_a_kind_has_a_row_for_each_client_and_says_where_and_for_how_long_it_was_tried() -> None:
    lines = render([FIRST, SECOND]).splitlines()
    assert "| plain | 1,500 | 1,498 | 1 | 3 | 0 | 0 | 0 | 1 worker_lost |" in lines
    assert "| whole | 2 | 2 | 0 | 0 | 0 | 0 | 0 | none |" in lines
    assert "| library | 0 | 0 | 0 | 0 | 0 | 0 | 0 | none |" in lines
    assert (
        "1,120 faults, 1,100 of them on the demo model; gap p50 2.00 s (aim 1.50 s), p99 3.00 s, "
        "longest 3.00 s, of 3 gaps; longest silence 3.10 s; "
        "the clients' own process stood still for up to 0.04 s; a fault took up to 1.5 s, "
        "the median stream at least 7.5 s; 2 rounds with the seeds 0, 4, 4 minutes, "
        "2024-05-01 to 2024-05-03; commit abc, def; on 2 cores, X."
    ) in lines


def test_the_overview_names_every_broken_promise() -> None:
    overview = "| 1,120 kill_worker | 1,000 | 2 | 1,502 | 1,500 | {} |"
    broken = "plain: 1 wrong bytes; plain: 1 worker_lost"
    assert overview.format(broken) in render([FIRST, SECOND]).splitlines()
    failed = msgspec.structs.replace(SECOND, failure="TimeoutError: ")
    assert overview.format(f"{broken}; TimeoutError: ") in render([FIRST, failed]).splitlines()
    assert "| 1,100 kill_worker | 1,000 | 1 | 500 | 500 | none |" in render([SECOND]).splitlines()


def test_rounds_of_another_size_have_a_row_and_a_section_of_their_own() -> None:
    small = msgspec.structs.replace(SECOND, sizes="--workers 2")
    lines = render([FIRST, small]).splitlines()
    assert "| 20 kill_worker | 1,000 | 1 | 1,002 | 1,000 | plain: 1 wrong bytes; plain: 1 worker_lost |" in lines
    assert "| 1,100 kill_worker --workers 2 | 1,000 | 1 | 500 | 500 | none |" in lines
    assert "## kill_worker --workers 2" in lines
    (line,) = summary([small])
    assert line.startswith("kill_worker --workers 2: 500 streams, 500 completed, broken promises: none; 1,100 faults")


def test_kinds_without_a_result_are_not_on_the_page() -> None:
    assert "## roll" not in render([FIRST])
    assert "## roll" in render([FIRST, msgspec.structs.replace(SECOND, kind="roll", gaps_ms=[])])


def test_a_kind_without_a_gap_says_so() -> None:
    assert "gap p50 none, p99 none, longest none, of 0 gaps" in render(
        [msgspec.structs.replace(SECOND, kind="roll", gaps_ms=[])]
    )
