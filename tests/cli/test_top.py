"""What `top` makes of two looks at the fleet."""

import pytest

from cli.top import Rates


def test_a_rate_is_what_was_generated_between_two_looks() -> None:
    rates = Rates()
    assert [rates.of("w", tokens, at) for tokens, at in ((100, 0.0), (150, 1.0), (150, 2.0), (400, 4.5))] == [
        0,
        50,
        0,
        100,
    ]


@pytest.mark.parametrize(("tokens", "at"), [(3, 1.0), (100, 0.0)])
def test_a_counter_that_began_anew_or_no_time_at_all_gives_no_rate(tokens: int, at: float) -> None:
    rates = Rates()
    rates.of("w", 100, 0.0)
    assert rates.of("w", tokens, at) == 0


def test_workers_are_counted_apart() -> None:
    rates = Rates()
    rates.of("a", 0, 0.0)
    rates.of("b", 1_000, 0.0)
    assert (rates.of("a", 10, 1.0), rates.of("b", 1_030, 1.0)) == (10, 30)
