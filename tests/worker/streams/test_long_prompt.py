"""A prompt that takes long to compute is logged ever more rarely, and once it is done."""

from tokenbus.worker.streams.stream import LongPrompt


def logged(*reports: tuple[float, bool]) -> list[float]:
    """Returns the times of those reports, each with whether the prompt is computed, that are logged."""
    prompt = LongPrompt(0, 0.0)
    return [now for now, is_computed in reports if prompt.is_due(now, is_computed=is_computed)]


def test_a_prompt_that_is_computed_soon_is_not_logged() -> None:
    assert logged((0.0, False), (0.9, False), (1.9, False), (1.99, True)) == []


def test_each_line_comes_when_the_time_has_doubled_and_the_last_one_at_the_end() -> None:
    every = [(tenth / 10, False) for tenth in range(301)]
    assert logged(*every, (30.1, True), (30.2, True)) == [2.0, 4.0, 8.0, 16.0, 30.1]


def test_reports_that_come_late_are_one_line() -> None:
    assert logged((0.0, False), (20.0, False), (25.0, False), (32.0, False)) == [20.0, 32.0]


def test_the_speed_counts_from_the_first_report() -> None:
    prompt = LongPrompt(1_000, 10.0)
    assert (prompt.tokens_per_s(3_000, 14.0), prompt.seconds(14.0)) == (500.0, 4.0)
