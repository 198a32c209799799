"""Shares an engine process's device among its replicas: their steps run side by side or one alone, and one budget of
memory holds the keys and values of all."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from tokenbus.worker.contract import contract
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.device.runner import LaneLender
from tokenbus.worker.engine.kv.ledger import KvLedger, KvUsage, OvercommitError
from tokenbus.worker.files.model_files import source_name

_RECLAIM_S = 60.0
"""Fixed memory waits this long for other replicas to give theirs back: many of their steps."""


class StepGate:
    """Lets the step loops of a process step side by side, or one of them alone.

    Counts the steps in progress of loops that share a process and its device. Safe to use from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_stepping = 0
        self._is_closed = False
        self._working: set[object] = set()
        """The loops that have work to do."""

    def __repr__(self) -> str:
        return f"<StepGate{' closed' if self._is_closed else ''}, {self._num_stepping} stepping>"

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Encloses one step; waits while another loop has the device to itself."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_closed)
            self._num_stepping += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_stepping -= 1
                self._changed.notify_all()

    def note_work(self, loop: object, *, has_work: bool) -> None:
        """Records whether a loop has work that somebody waits for."""
        (self._working.add if has_work else self._working.discard)(loop)

    def is_wanted_beside(self, loop: object) -> bool:
        """Whether another loop has such work."""
        return bool(self._working - {loop})

    def close(self) -> None:
        """Reserves the device for the caller: returns once no step is in progress; others wait at their next one."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_closed)
            self._is_closed = True  # first: else new steps could begin forever
            self._changed.wait_for(lambda: not self._num_stepping)

    def open(self) -> None:
        """Lets the other loops step again."""
        with self._changed:
            self._is_closed = False
            self._changed.notify_all()


class KvPool:
    """The KV memory of all replicas. Safe to use from any thread. Its budget is the first replica's: a worker has one
    budget for all.

    A replica's step loop asks before each step how many lanes it may hold, and reports after the step's KV ops how many
    it holds. A replica that has nothing to compute is woken when it may hold more lanes, or has to give some back."""

    def __init__(self, reclaim_s: float = _RECLAIM_S) -> None:
        self._reclaim_s = reclaim_s
        self._changed = threading.Condition()
        self._ledger: KvLedger | None = None
        self._wakes: dict[int, Callable[[], None]] = {}

    def __repr__(self) -> str:
        return f"<KvPool {self._ledger!r}>"

    def reserve(self, settings: EngineSettings) -> "KvShare":
        """Takes a replica's fixed memory out of the pool, and returns once no other replica holds it.

        Raises ModelError if the pool is too small, or if the others don't give the memory back."""
        name, num_bytes = source_name(settings.model), settings.kv_reserved_bytes or settings.kv_limit_bytes
        with self._changed:
            ledger = self._opened(settings.kv_pool_bytes)
            try:
                number = ledger.reserve(name, num_bytes)
            except OvercommitError as error:
                raise ModelError(str(error)) from error
            self._wake_others(ledger, number)
            if not self._changed.wait_for(lambda: not ledger.is_overdrawn, self._reclaim_s):
                ledger.leave(number)
                self._wake_others(ledger, number)
                raise ModelError(
                    f"--kv-budget: other models have not given {num_bytes} bytes back within {self._reclaim_s:g} s; "
                    f"load {name} again when they are less busy"
                )
        return KvShare(self, number)

    def join(
        self, settings: EngineSettings, config: contract.EngineConfig, lender: LaneLender, wake: Callable[[], None]
    ) -> "KvShare":
        """Adds a replica whose lanes can be lent. `wake` is called, on any thread, when it should ask again.

        Raises ModelError if the pool is too small for one more lane."""
        num_lanes = config.kv_bytes // config.kv_lane_bytes
        with self._changed:
            try:
                ledger = self._opened(settings.kv_pool_bytes)
                number = ledger.join(source_name(settings.model), config.kv_lane_bytes, num_lanes)
            except OvercommitError as error:
                raise ModelError(str(error)) from error
            self._wakes[number] = wake
        return KvShare(self, number, lender)

    def leave(self, number: int) -> None:
        """Removes a replica that has freed its memory."""
        with self.turn(number) as ledger:
            self._wakes.pop(number, None)
            ledger.leave(number)

    def usage(self, number: int) -> KvUsage:
        with self._changed:
            assert self._ledger is not None
            return self._ledger.usage(number)

    @contextlib.contextmanager
    def turn(self, number: int) -> Iterator[KvLedger]:
        """Lets a replica change the ledger, and then wakes the others that are affected."""
        with self._changed:
            assert self._ledger is not None
            yield self._ledger
            self._wake_others(self._ledger, number)

    def _opened(self, budget_bytes: int) -> KvLedger:
        if self._ledger is None:
            self._ledger = KvLedger(budget_bytes)
        return self._ledger

    def _wake_others(self, ledger: KvLedger, caller: int) -> None:
        self._changed.notify_all()
        for number in ledger.take_woken(caller):
            self._wakes[number]()


class KvShare:
    """A replica's part of a pool: fixed memory, or the lanes of a `lender`."""

    def __init__(self, pool: KvPool, number: int, lender: LaneLender | None = None) -> None:
        self._pool = pool
        self._number = number
        self._lender = lender

    def __repr__(self) -> str:
        return f"<KvShare {self._number} of {self._pool!r}>"

    def resize(self, num_bytes: int) -> None:
        """Corrects the reservation of fixed memory to what the loaded model has taken."""
        with self._pool.turn(self._number) as ledger:
            ledger.resize(self._number, num_bytes)

    def request(self, used: int, idle: int, wanted: int) -> int:
        """Reports how many lanes the replica holds and how many more it wants; returns how many it may hold."""
        with self._pool.turn(self._number) as ledger:
            return ledger.request(self._number, used, idle, wanted)

    def give_back(self, lanes: int) -> None:
        """Frees the memory of all lanes but these, which the replica holds, and reports that."""
        assert self._lender is not None, self
        self._lender.release_lanes()
        with self._pool.turn(self._number) as ledger:
            ledger.give_back(self._number, lanes)

    def usage(self) -> KvUsage:
        return self._pool.usage(self._number)

    def leave(self) -> None:
        """Notes that the replica has freed its memory."""
        self._pool.leave(self._number)
