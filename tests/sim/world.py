"""Virtual time: every process has an event loop of its own, and can be paused while the others go on.

Decision 0018 says what is simulated and what the histories have found.
"""

import asyncio
import functools
import heapq
import itertools
import random
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import pytest
import structlog
from structlog.testing import LogCapture

_LONGEST_TURNS = 20_000
"""A test fails after this many turns in which no time passes, since something must be looping for ever."""


class _NoSelector:
    """A selector without events, since nothing comes from outside a simulated process."""

    def select(self, timeout: float | None) -> list[Any]:
        return []


class ProcessLoop(asyncio.BaseEventLoop):
    """An event loop that runs one turn at a time, on the world's clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__()
        self._now = now
        self._selector = _NoSelector()

    def time(self) -> float:
        return self._now()

    def turn(self) -> None:
        # what run_forever does for each turn; its own overhead would cost several times as much
        asyncio._set_running_loop(self)
        try:
            self._run_once()  # type: ignore[attr-defined]
        finally:
            asyncio._set_running_loop(None)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()
        future.set_result(func(*args))
        return future

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


class Process:
    """A simulated process, which can be paused and killed."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.loop = ProcessLoop(lambda: world.now)
        self.loop.set_exception_handler(self._note)
        self.is_paused = False
        self.is_alive = True
        self.faults: list[str] = []

    def __repr__(self) -> str:
        return f"<Process {self.name}{' paused' if self.is_paused else ''}{'' if self.is_alive else ' dead'}>"

    def spawn(self, life: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        return self.loop.create_task(life)

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function in one of the process's turns."""
        if self.is_alive:
            self.loop.call_soon(function, *arguments)

    def do(self, life: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine in the process to its end, and returns its result."""
        task = self.spawn(life)
        self.world.run_until(task.done)
        return task.result()

    def kill(self) -> None:
        self.is_alive = False

    def close(self) -> None:
        for _ in range(20):
            for task in asyncio.all_tasks(self.loop):  # also tasks that a message in the first turns has started
                task.cancel()
            self.loop.turn()
        self.loop.close()

    def next_at(self) -> float | None:
        """Returns the time at which it next has something to do; None for never. A timer that was cancelled may cause
        an idle turn."""
        if self.is_paused or not self.is_alive:
            return None
        if self.loop._ready:  # type: ignore[attr-defined]
            return self.world.now
        scheduled = self.loop._scheduled  # type: ignore[attr-defined]
        return scheduled[0]._when if scheduled else None

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if self.is_alive:
            self.faults.append(f"{context.get('message')}: {context.get('exception')!r}")


class World:
    """All processes, and the clock that they share."""

    def __init__(self, seed: int) -> None:
        self.now = 1_000.0
        self.rng = random.Random(seed)
        self.processes: list[Process] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def process(self, name: str) -> Process:
        process = Process(self, name)
        self.processes.append(process)
        return process

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Calls a function at that time, outside all processes."""
        heapq.heappush(self._due, (max(when, self.now), next(self._numbers), what))

    def run(self, seconds: float) -> None:
        """Lets time pass."""
        end = self.now + seconds
        self._run(lambda: False, end)
        self.now = end

    def run_until(self, enough: Callable[[], bool], timeout_s: float = 120.0) -> None:
        self._run(enough, self.now + timeout_s)
        assert enough(), f"not within {timeout_s} s"

    def bury_dead(self) -> None:
        """Forgets processes that were killed."""
        dead = [process for process in self.processes if not process.is_alive]
        self.processes = [process for process in self.processes if process.is_alive]
        for process in dead:
            process.close()

    def close(self) -> None:
        for process in self.processes:
            process.close()

    def _run(self, enough: Callable[[], bool], end: float) -> None:
        turns = 0
        while not enough():
            soonest = self._soonest()
            if soonest is None or soonest > end:
                return
            if soonest > self.now:
                self.now, turns = soonest, 0
            turns += 1
            assert turns < _LONGEST_TURNS, "time stands still"
            self._step()

    def _step(self) -> None:
        while self._due and self._due[0][0] <= self.now:
            heapq.heappop(self._due)[2]()
        for process in self.processes:
            at = process.next_at()
            if at is not None and at <= self.now:
                process.loop.turn()

    def _soonest(self) -> float | None:
        times = [at for process in self.processes if (at := process.next_at()) is not None]
        if self._due:
            times.append(self._due[0][0])
        return min(times, default=None)


_entry_points = functools.cache(metadata.entry_points)


def _drop(_logger: object, _method: str, _event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    raise structlog.DropEvent


@contextmanager
def _without_logs() -> Iterator[None]:
    """Logs nothing, unless in a terminal: to print what all processes log takes a part of the time of a history."""
    before = structlog.get_config()["processors"]
    if sys.stdout.isatty() or any(isinstance(one, LogCapture) for one in before):
        yield
        return
    structlog.configure(processors=[_drop])
    try:
        yield
    finally:
        structlog.configure(processors=before)


@contextmanager
def world(seed: int) -> Iterator[World]:
    """Yields a world whose clock replaces the functions of `time` for all code that runs in it."""
    made = World(seed)
    with pytest.MonkeyPatch.context() as patch, _without_logs():
        patch.setattr(time, "monotonic", lambda: made.now)
        patch.setattr(time, "clock_gettime", lambda clock: made.now)
        # each router looks up installed policies, which takes longer than the rest of its start
        patch.setattr(metadata, "entry_points", _entry_points)
        patch.setattr(time, "time_ns", lambda: int(made.now * 1e9))
        try:
            yield made
        finally:
            made.close()
