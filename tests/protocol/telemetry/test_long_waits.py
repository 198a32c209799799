"""However many requests wait, there is one line a second about each kind of wait, and it counts them all."""

from hypothesis import given
from hypothesis import strategies as st

from tokenbus.protocol.telemetry.long_waits import LOG_INTERVAL_S, LongWaits, WaitLog


def wait(kind: str, waited_s: float, name: str = "acme:r") -> LongWaits:
    return LongWaits(kind, 1, waited_s, name, 1, None, "demo")


def test_a_single_wait_is_logged_at_once_and_the_longest_stands_for_those_of_the_next_second() -> None:
    log = WaitLog()
    log.add(wait("place", 5.0, "acme:first"))
    assert [(one.request_id, one.num_waits) for one in log.take_due(100.0)] == [("acme:first", 1)]
    for waited_s, name in ((5.0, "b"), (10.0, "c"), (5.0, "d")):
        log.add(wait("place", waited_s, name))
    assert not list(log.take_due(100.9))
    assert [(one.request_id, one.waited_s, one.num_waits) for one in log.take_due(101.0)] == [("c", 10.0, 3)]
    assert not list(log.take_due(102.0))


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0.0, 0.3)), max_size=200))
def test_lines_are_as_rare_as_promised_and_count_every_wait(steps: list[tuple[str, float]]) -> None:
    log, now = WaitLog(), 50.0
    lines: list[tuple[float, LongWaits]] = []
    for kind, pause_s in steps:
        now += pause_s
        log.add(wait(kind, 5.0))
        lines += [(now, one) for one in log.take_due(now)]
    lines += [(now, one) for one in log.take_due(now + LOG_INTERVAL_S)]
    assert sum(one.num_waits for _, one in lines) == len(steps)
    for kind in "ab":
        times = [at for at, one in lines[:-2] if one.waits_for == kind]
        assert all(later - at >= LOG_INTERVAL_S - 1e-9 for at, later in zip(times, times[1:], strict=False))
