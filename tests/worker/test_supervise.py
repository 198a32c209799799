"""The pause before an engine is started again grows while engines die young, up to a limit."""

import pytest

from worker.front.supervise import FIRST_PAUSE_S, HEALTHY_AFTER_S, LONGEST_PAUSE_S, next_pause


def test_an_engine_that_dies_young_doubles_the_pause() -> None:
    assert next_pause(0.1, lived_s=0.0) == pytest.approx(0.2)
    assert next_pause(3.0, lived_s=HEALTHY_AFTER_S - 0.001) == pytest.approx(6.0)


def test_an_engine_that_has_lived_long_enough_earns_the_first_pause_again() -> None:
    assert next_pause(LONGEST_PAUSE_S, lived_s=HEALTHY_AFTER_S) == FIRST_PAUSE_S
    assert next_pause(FIRST_PAUSE_S, lived_s=10 * HEALTHY_AFTER_S) == FIRST_PAUSE_S


@pytest.mark.parametrize("pause_s", [LONGEST_PAUSE_S / 2, LONGEST_PAUSE_S / 2 + 0.001, LONGEST_PAUSE_S])
def test_the_pause_never_exceeds_the_longest(pause_s: float) -> None:
    assert next_pause(pause_s, lived_s=0.0) == LONGEST_PAUSE_S


def test_pauses_grow_from_the_first_to_the_longest_and_stay_there() -> None:
    pauses = [FIRST_PAUSE_S]
    while len(pauses) < 12:
        pauses.append(next_pause(pauses[-1], lived_s=1.0))
    assert pauses == sorted(pauses)
    assert pauses[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert pauses[-3:] == [LONGEST_PAUSE_S] * 3
