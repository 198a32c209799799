"""Asks the workers of a model in turn for something that any of them can do, and waits while all are restarting."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tokenbus.protocol.bus.bus import NoRespondersError, PayloadTooLargeError
from tokenbus.protocol.wire import errors, limits, messages
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.placement.placement import Capacity
from tokenbus.router.requests.flights.worker_client import Operation, ReplyT, WorkerClient, workers_for
from tokenbus.router.workers.worker import Worker

_TIMEOUT_S = 4.0
_WORKERS_PER_ROUND = 3
"""Number of workers asked in turn before the list is renewed."""
_MAX_ROUNDS = 3
"""Rounds in which all workers fail although some say that they are ready."""

_UNREACHED = (errors.Code.NO_WORKER, errors.Code.WORKER_LOST)
"""A worker has no engine, or lost it before it could answer: every call made here may be repeated."""

ResultT = TypeVar("ResultT")


class WorkerRounds:
    """Finds workers of a model that answer."""

    def __init__(self, fleet: Fleet, workers: WorkerClient) -> None:
        self._fleet = fleet
        self._workers = workers

    def __repr__(self) -> str:
        return f"<WorkerRounds of {self._fleet!r}>"

    async def run(
        self,
        model: str,
        workers: list[Worker],
        attempt: Callable[[list[Worker]], Awaitable[ResultT]],
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> ResultT:
        """Returns the first result of `attempt`, which gets a few workers at a time, those of `workers` first.

        Passes over workers that can't be reached, which `attempt` reports by RequestError(no_worker or worker_lost),
        and waits for them while they may come back. Tries other workers after any other retryable error.
        Raises RequestError if nothing is left to try."""
        rounds, asked = 0, set[str]()
        while True:
            asked |= {worker.card.worker_id for worker in workers[:_WORKERS_PER_ROUND]}
            try:
                return await attempt(workers[:_WORKERS_PER_ROUND])
            except errors.RequestError as error:
                if not error.error.retryable or is_cancelled():
                    raise
                was_answered = error.error.code not in _UNREACHED
                able = self._fleet.eligible_workers(model, time.monotonic())
                others = [worker for worker in able if worker.card.worker_id not in asked]
                if others and (was_answered or any(worker.has_no_responders for worker in workers)):
                    workers = others
                    continue
                if was_answered:
                    raise
                all_workers = self._fleet.workers_of(model)
                rounds += any(worker.state is messages.WorkerState.READY for worker in all_workers)
                if rounds >= _MAX_ROUNDS or self._fleet.capacity(model, time.monotonic()) is Capacity.NO_WORKERS:
                    raise
            await asyncio.sleep(limits.TICK_S)
            asked.clear()
            workers = workers_for(self._fleet, model, time.monotonic())

    async def ask(
        self,
        workers: list[Worker],
        op: Operation[ReplyT],
        message: messages.Message,
        read: Callable[[messages.Card, ReplyT], ResultT],
    ) -> ResultT:
        """Asks one worker after the other, and returns what `read` makes of the first reply.

        `read` may raise RequestError. Raises RequestError with the last problem if no worker has an answer."""
        problem = errors.make_error(errors.Code.NO_WORKER)
        for worker in workers:
            try:
                return read(worker.card, await self._workers.call(worker.card, op, message, _TIMEOUT_S))
            except PayloadTooLargeError as error:
                raise errors.request_error(errors.Code.PAYLOAD_TOO_LARGE, str(error)) from error
            except (NoRespondersError, TimeoutError, ConnectionError) as error:
                if isinstance(error, NoRespondersError):
                    self._fleet.mark_no_responders(worker.card)
                problem = errors.make_error(errors.Code.NO_WORKER, f"no worker answered {op.name!r}: {error}")
            except errors.RequestError as refusal:
                problem = refusal.error
                if not problem.retryable:
                    raise
        raise errors.RequestError(problem)
