"""The HTML page of a benchmark is self-contained and shows every run."""

import re

from tokenbus.protocol.wire import messages
from tokenbus.replay.load.page import page
from tokenbus.replay.load.points import LoadKind, LoadPoint
from tokenbus.replay.load.results import LoadReport, as_json, summarize
from tokenbus.replay.load.stats import RunStats
from tokenbus.replay.load.table import number, sweep_table


def stats_of(*e2e_s: float) -> RunStats:
    stats = RunStats(0.0)
    for place, seconds in enumerate(e2e_s):
        timer = stats.start_request(0.0, 0.0)
        timer.receive(messages.Chunk(id="r", tokens=1), seconds / 2)
        reason = messages.FinishReason.STOP
        timer.receive(messages.Chunk(id="r", tokens=1, finish_reason=reason, worker_id=f"w{place % 2}"), seconds)
    return stats


def report_of(stats: dict[float, RunStats]) -> LoadReport:
    runs = [summarize(LoadPoint(LoadKind.RATE, rate), stats, interrupted=False) for rate, stats in stats.items()]
    said = {"workload": "<words>", "began_at": "2026-01-01T00:00:00+00:00", "seed": 0, "temperature": 0.0}
    return LoadReport(model="m&m", skipped=0, clipped=0, runs=runs, **said)  # type: ignore[arg-type]


def page_of(stats: dict[float, RunStats]) -> str:
    return page(report_of(stats), [stats.times for stats in stats.values()])


def test_only_a_sweep_has_plots_over_the_load() -> None:
    assert page_of({2.0: stats_of(1.0, 2.0)}).count("<svg") == 5
    assert page_of({2.0: stats_of(1.0, 2.0), 4.0: stats_of(2.0, 3.0)}).count("<svg") == 10


def test_a_page_is_self_contained_and_escapes_names() -> None:
    text = page_of({2.0: stats_of(1.0, 2.0)})
    assert "<script" not in text
    assert set(re.findall(r"https?://[^\"]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "<h1>m&amp;m: &lt;words&gt;</h1>" in text
    assert "Inter-token latency (ITL): cumulative share" in text


def test_a_page_says_if_nothing_was_measured() -> None:
    assert "nothing was measured" in page_of({2.0: RunStats(0.0)})


def test_a_table_of_a_sweep_fits_80_columns() -> None:
    made = sweep_table(report_of({99_999.0: stats_of(20.0, 99.0), 4.0: stats_of(2.0, 3.0)}).runs)
    cells = [[str(column.header), *map(str, column.cells)] for column in made.columns]
    assert sum(max(map(len, column)) for column in cells) + 2 * (len(cells) - 1) <= 80


def test_the_json_has_the_documented_fields() -> None:
    text = as_json(report_of({2.0: stats_of(1.0, 2.0)})).decode()
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "output_tokens_per_s", "requests_per_s", "errors", "p99"):
        assert f'"{name}": ' in text
    assert '"load": "rate"' in text


def test_numbers_are_formatted_to_about_three_digits() -> None:
    assert [number(value) for value in (None, 0.0123, 9.99, 12.34, 999.94, 1_234.5)] == [
        "-", "0.01", "9.99", "12.3", "999.9", "1,234"
    ]  # fmt: skip
