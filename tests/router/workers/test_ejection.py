"""A worker whose requests fail one after another gets no more for a while, and comes back by itself."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.router.builders import card, events
from tokenbus.protocol.wire import codec
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.placement.placement import Capacity, Placement, PlacementOptions, PlacementRequest
from tokenbus.router.placement.policies import KvAware
from tokenbus.router.workers.worker import FIRST_PAUSE_S, LONGEST_PAUSE_S, MAX_FAILURES, Ejection


def failures(ejection: Ejection, count: int, now: float) -> list[bool]:
    return [ejection.failed(now, may_eject=True) for _ in range(count)]


def test_a_worker_is_ejected_by_the_fifth_failure_in_a_row() -> None:
    ejection = Ejection()
    assert failures(ejection, MAX_FAILURES - 1, 0.0) == [False] * 4
    ejection.succeeded()
    assert failures(ejection, MAX_FAILURES, 0.0) == [False] * 4 + [True]
    assert ejection.is_ejected(FIRST_PAUSE_S - 0.1)
    assert not ejection.is_ejected(FIRST_PAUSE_S)


def test_the_first_failure_of_a_trial_ejects_for_twice_as_long_up_to_a_limit() -> None:
    ejection, now = Ejection(), 0.0
    failures(ejection, MAX_FAILURES, now)
    pauses = []
    for _ in range(8):
        now = ejection.until
        assert failures(ejection, 1, now) == [True]
        pauses.append(ejection.until - now)
    assert pauses == pytest.approx([10, 20, 40, 80, 160, 300, 300, 300])
    assert pauses[-1] == LONGEST_PAUSE_S
    ejection.succeeded()
    assert failures(ejection, MAX_FAILURES - 1, now) == [False] * 4


def test_a_success_ends_a_pause_at_once() -> None:
    ejection = Ejection()
    failures(ejection, MAX_FAILURES, 0.0)
    ejection.succeeded()
    assert not ejection.is_ejected(0.0)


class Workers:
    """A fleet of one model, whose workers' requests end as a test says."""

    def __init__(self, count: int) -> None:
        self.fleet = Fleet(0.0)
        self.names = [f"w{number}" for number in range(count)]
        self.now = 1.0
        self._seq = dict.fromkeys(self.names, 0)
        self._rng = random.Random(1)
        self._numbers = iter(range(1_000_000))
        for name in self.names:
            self.fleet.apply_card(card(name), self.now)
            self.beat(name)

    def beat(self, name: str, finished: Sequence[str] = (), failed: Sequence[str] = ()) -> None:
        entry = events(name, self._seq[name], finished=tuple(finished))
        self.fleet.apply_events("demo", codec.replace(entry, failed=list(failed)), self.now)
        self._seq[name] += 1

    def end(self, name: str, *, fails: bool) -> None:
        key = f"default:r{next(self._numbers)}"
        self.beat(name, [key], [key] if fails else [])

    def place(self, only: str | None = None) -> Placement:
        for name in self.names:
            self.beat(name)
        key = f"default:p{next(self._numbers)}"
        options = PlacementOptions(only=only, explain=True)
        placed = self.fleet.place("demo", PlacementRequest(key, 10), KvAware(), self._rng, self.now, options)
        assert isinstance(placed, Placement)
        self.fleet.unbook(placed.worker.card.address, key)
        return placed

    def chosen(self, count: int = 20) -> set[str]:
        return {self.place().worker.card.worker_id for _ in range(count)}


def test_an_ejected_worker_gets_requests_only_where_no_other_can_take_them() -> None:
    workers = Workers(3)
    for _ in range(MAX_FAILURES):
        workers.end("w0", fails=True)
    assert workers.chosen() == {"w1", "w2"}
    report = workers.place().report
    assert report is not None
    assert report.ejected == ["w0"]
    assert workers.place(only="w0").worker.card.worker_id == "w0"
    assert workers.fleet.model("demo").capacity(workers.now) is Capacity.AVAILABLE
    workers.now += FIRST_PAUSE_S
    assert workers.chosen() == {"w0", "w1", "w2"}
    workers.end("w0", fails=True)
    assert workers.chosen() == {"w1", "w2"}
    workers.end("w0", fails=False)
    assert workers.chosen() == {"w0", "w1", "w2"}


def test_a_lone_worker_is_never_ejected() -> None:
    workers = Workers(1)
    for _ in range(50):
        workers.end("w0", fails=True)
    assert workers.chosen() == {"w0"}


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.floats(0, 3)), max_size=80),
)
def test_never_more_than_half_of_the_workers_are_ejected(count: int, steps: list[tuple[int, bool, float]]) -> None:
    workers = Workers(count)
    for number, fails, pause_s in steps:
        workers.now += pause_s
        workers.end(workers.names[number % count], fails=fails)
        ejected = [one for one in workers.fleet.workers_of("demo") if one.ejection.is_ejected(workers.now)]
        assert len(ejected) <= count // 2
    assert workers.chosen(3)
    workers.fleet.check_integrity()
