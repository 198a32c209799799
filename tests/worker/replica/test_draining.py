"""A replica that drains lets its streams finish for a while, then leaves them to routers, and waits for these no longer
than it has to."""

import asyncio
from collections.abc import Callable, Iterator

import pytest
import structlog

from tests.sim.world import Process, World, world
from tokenbus.worker.broker.replica_state import ReplicaEvent
from tokenbus.worker.replica.drain import Drain
from tokenbus.worker.replica.replica import leave


class Part:
    """The engine and the frontend of a replica with one stream, and what is asked of them."""

    def __init__(self, process: Process, finishes_after_s: float | None, taken_after_s: float | None) -> None:
        self._process = process
        self._finishes_after_s = finishes_after_s
        self._taken_after_s = taken_after_s
        self._began_at = process.world.now
        self.serving: ServingPart | None = ServingPart(self)
        self.drain = Drain()
        self.streams = self.announcer = self
        self._num_streams = int(finishes_after_s is not None)
        self.asked: list[tuple[str, float]] = []
        """The calls that were made, each with the time after which it was."""

    def _note(self, what: str) -> None:
        self.asked.append((what, round(self._process.world.now - self._began_at, 3)))

    def change(self, event: ReplicaEvent) -> None:
        self._note({ReplicaEvent.DRAIN: "draining", ReplicaEvent.LEAVE: "leaving"}[event])

    async def finish(self) -> None:
        if self._finishes_after_s is not None:
            await asyncio.sleep(self._finishes_after_s)
            self._num_streams = 0

    def __len__(self) -> int:
        return self._num_streams

    async def wait_left(self) -> None:
        if self._taken_after_s is None:
            await asyncio.Event().wait()
        else:
            await asyncio.sleep(self._taken_after_s)

    def stop_begun(self, *, unguarded_only: bool) -> None:
        self._note("unguarded stopped" if unguarded_only else "all stopped")

    async def cleanup(self) -> None:
        self._note("ended")


class ServingPart:
    """The engine of such a replica."""

    def __init__(self, part: Part) -> None:
        self.engine = self
        self.drain = part.finish


@pytest.fixture
def made() -> Iterator[World]:
    with world(seed=1) as made:
        yield made


def drain(
    made: World,
    *,
    grace_s: float = 30.0,
    finishes_after_s: float | None = None,
    taken_after_s: float | None = None,
    has_engine: bool = True,
    named: Callable[[Drain], None] = lambda drain: None,
) -> list[tuple[str, float]]:
    """Drains a replica, and returns what it does and when. `named` is called with the drain after a second."""
    process = made.process("w0")
    part = Part(process, finishes_after_s, taken_after_s)
    if not has_engine:
        part.serving = None

    async def run() -> None:
        asyncio.get_running_loop().call_later(1.0, named, part.drain)
        await leave(part, part.cleanup, grace_s, 15.0)  # type: ignore[arg-type]

    with structlog.testing.capture_logs():
        process.do(run())
    return part.asked


def test_streams_that_finish_in_time_are_left_to_nobody(made: World) -> None:
    assert drain(made, finishes_after_s=29.0) == [("draining", 0.0), ("unguarded stopped", 29.0), ("ended", 29.0)]


def test_without_a_stream_a_replica_ends_at_once(made: World) -> None:
    assert drain(made) == [("draining", 0.0), ("unguarded stopped", 0.0), ("ended", 0.0)]


def test_streams_that_take_longer_are_left_to_routers(made: World) -> None:
    done = drain(made, finishes_after_s=99.0, taken_after_s=0.5)
    assert done == [("draining", 0.0), ("leaving", 30.0), ("unguarded stopped", 30.5), ("ended", 30.5)]


def test_without_grace_streams_are_left_to_routers_at_once(made: World) -> None:
    done = drain(made, grace_s=0.0, finishes_after_s=99.0, taken_after_s=0.5)
    assert done == [("draining", 0.0), ("leaving", 0.0), ("unguarded stopped", 0.5), ("ended", 0.5)]


def test_streams_that_nobody_takes_end_after_the_time_for_it(made: World) -> None:
    done = drain(made, grace_s=0.0, finishes_after_s=99.0)
    assert done == [("draining", 0.0), ("leaving", 0.0), ("unguarded stopped", 15.0), ("ended", 15.0)]


def test_streams_whose_engine_is_gone_are_left_to_routers_at_once(made: World) -> None:
    done = drain(made, has_engine=False, finishes_after_s=99.0, taken_after_s=0.5)
    assert done == [("draining", 0.0), ("leaving", 0.0), ("unguarded stopped", 0.5), ("ended", 0.5)]


def test_an_operator_who_hurries_shortens_the_grace_that_runs(made: World) -> None:
    done = drain(made, finishes_after_s=99.0, taken_after_s=0.5, named=lambda drain: drain.request(grace_s=5.0))
    assert done == [("draining", 0.0), ("leaving", 5.0), ("unguarded stopped", 5.5), ("ended", 5.5)]


def test_a_grace_that_is_over_already_ends_at_once(made: World) -> None:
    done = drain(made, finishes_after_s=99.0, taken_after_s=0.5, named=lambda drain: drain.request(grace_s=0.5))
    assert done == [("draining", 0.0), ("leaving", 1.0), ("unguarded stopped", 1.5), ("ended", 1.5)]


def test_an_operator_can_have_streams_stopped_that_routers_were_to_take(made: World) -> None:
    done = drain(made, grace_s=0.0, finishes_after_s=99.0, named=lambda drain: drain.request(handover_s=0.0))
    assert done == [("draining", 0.0), ("leaving", 0.0), ("all stopped", 1.0), ("ended", 1.0)]


def test_without_time_to_hand_over_streams_are_stopped_after_their_grace(made: World) -> None:
    done = drain(made, finishes_after_s=99.0, named=lambda drain: drain.request(3.0, 0.0))
    assert done == [("draining", 0.0), ("all stopped", 3.0), ("ended", 3.0)]


async def test_an_operator_may_hurry_at_the_moment_at_which_the_grace_ends() -> None:
    drain = Drain()

    async def streams() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            drain.request(1.0)

    await drain.finish(streams(), 0.0)
    assert drain.requested.is_set()
