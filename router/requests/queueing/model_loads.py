"""Requests for models that no worker has loaded: asks a worker to load it, and holds the requests until then.

A router asks for a load twice a second for as long as it has requests for the model; the worker answers with its
progress, or why it can't load it. All routers ask the same worker first, so that a model is loaded once."""

import asyncio
import time
from collections.abc import Callable

import structlog

from tokenbus.protocol import tasks
from tokenbus.protocol.wire import codec, errors, internal, limits
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.requests.flights.worker_client import AnyWorker, NoAnswerError, Operation
from tokenbus.router.requests.queueing.placement_queue import PlacementQueue
from tokenbus.router.workers.worker import Worker

_LOAD = Operation("control", codec.Decoder(internal.ControlReply))
_ASK_INTERVAL_S = 0.5
_REPLY_TIMEOUT_S = 2.0
_MAX_SILENT = 4
"""After this many unanswered requests in a row, another worker is asked."""


class _Wanted:
    """A model that has requests and that no worker serves."""

    def __init__(self) -> None:
        self.asking: asyncio.Task[None] | None = None
        self.refused: dict[str, errors.Error] = {}
        """The errors of the workers that can't load it."""
        self.num_silent = 0
        self.progress: float | None = None


class ModelLoads:
    """The models that one router asks workers to load for its requests."""

    def __init__(self, fleet: Fleet, any_worker: AnyWorker, queue: PlacementQueue, hold_s: float) -> None:
        """Requests wait up to `hold_s` for a model that has no worker at all."""
        self._fleet = fleet
        self._any_worker = any_worker
        self._queue = queue
        self.hold_s = hold_s
        self._held: dict[asyncio.Future[None], str] = {}
        """Requests that wait for a worker before they are tokenized or placed, with their models."""
        self._wanted: dict[str, _Wanted] = {}
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<ModelLoads {', '.join(self._wanted)}, {len(self._held)} requests>"

    def num_held(self) -> dict[str, int]:
        """Returns the requests that are held here, by model."""
        held: dict[str, int] = {}
        for model in self._held.values():
            held[model] = held.get(model, 0) + 1
        return held

    def progress_of(self, model: str) -> float | None:
        """Returns the share of a model that is loaded, from 0 to 1; None if it is not being loaded."""
        wanted = self._wanted.get(model)
        return None if wanted is None else wanted.progress

    def must_wait(self, model: str) -> bool:
        """Whether `wait_served` would wait."""
        now = time.monotonic()
        return not self._fleet.model(model).is_served and self._may_wait(model, now, now)

    async def wait_served(
        self, model: str, timeout_s: float | None, is_over: Callable[[], bool] = lambda: False
    ) -> bool:
        """Returns once a worker serves the model, or at once if there is nothing to wait for.

        Returns whether it had to wait for a worker that is there now. It returns early when `is_over` is true. Raises
        RequestError if the model can't be loaded, or not within `timeout_s`."""
        if not self.must_wait(model):
            return False
        began = time.monotonic()
        served: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held[served] = model
        self.check()
        try:
            while not served.done() and not is_over() and self._may_wait(model, time.monotonic(), began):
                if timeout_s is not None and time.monotonic() - began >= timeout_s:
                    raise errors.request_error(errors.Code.DEADLINE_EXCEEDED)
                await asyncio.wait([served], timeout=limits.TICK_S)
            if served.done():
                served.result()
            return self._fleet.model(model).is_served
        finally:
            del self._held[served]
            served.cancel()

    def check(self) -> None:
        """Asks for loads and releases requests. Call it a few times a second, and when a worker has changed."""
        if not self._held and not self._wanted and not self._queue:
            return
        models = {*self._held.values(), *self._queue.depths()}
        for model in self._wanted.keys() - models:
            self._forget(model)
        for model in models:
            if self._fleet.model(model).is_served:
                self._forget(model)
                self._end(model, None)
            else:
                self._pursue(model, self._wanted.setdefault(model, _Wanted()))

    def close(self) -> None:
        """Stops asking for loads, and gives up the requests that are held here."""
        for model in list(self._wanted):
            self._forget(model)
        for served in self._held:
            if not served.done():
                served.set_exception(errors.request_error(errors.Code.SHUTTING_DOWN))

    def _pursue(self, model: str, wanted: _Wanted) -> None:
        """Asks a worker to load a model, or gives up the requests for it."""
        if wanted.asking is not None and not wanted.asking.done():
            return
        workers = self._fleet.model(model).loaders()
        able = [worker for worker in workers if worker.card.worker_id not in wanted.refused]
        if able:
            wanted.asking = self._start_asking(wanted, able[0])
        elif workers:
            error = wanted.refused[workers[-1].card.worker_id]
            self._log.warning("load_refused", model=model, error=error.message)
            self._forget(model)
            self._end(model, error)
        else:
            wanted.progress = None  # a worker may come, for which requests wait as long as `hold_s` allows

    def _start_asking(self, wanted: _Wanted, worker: Worker) -> asyncio.Task[None]:
        worker_id = worker.card.worker_id

        def failed(error: Exception) -> None:
            text = f"worker {worker_id} can't be asked for a load: {type(error).__name__}"
            wanted.refused[worker_id] = errors.make_error(errors.Code.NO_WORKER, text)

        return tasks.background("ask for a load", self._ask(wanted, worker), failed)

    async def _ask(self, wanted: _Wanted, worker: Worker) -> None:
        worker_id = worker.card.worker_id
        try:
            reply = await self._any_worker.ask(worker, _LOAD, internal.Control(op="load"), _REPLY_TIMEOUT_S)
        except NoAnswerError as problem:
            if not worker.has_no_responders:  # otherwise it is gone, or comes back: this router learns of either
                wanted.num_silent += 1
            if wanted.num_silent >= _MAX_SILENT:
                text = f"worker {worker_id} does not answer a load: {problem.error.message}"
                wanted.refused[worker_id] = errors.make_error(errors.Code.NO_WORKER, text)
        except errors.RequestError as refusal:
            wanted.refused[worker_id] = refusal.error
            return
        else:
            wanted.num_silent = 0
            wanted.progress = reply.progress
        await asyncio.sleep(_ASK_INTERVAL_S)

    def _may_wait(self, model: str, now: float, began: float) -> bool:
        """Whether a request that has waited since `began` may continue to wait for a worker that serves the model."""
        if self._fleet.model(model).loaders():
            return True
        return now - began < self.hold_s and not self._fleet.is_unknown(model, now)

    def _end(self, model: str, error: errors.Error | None) -> None:
        """Releases the requests for a model, or ends them with an error."""
        for served, wanted in self._held.items():
            if wanted == model and not served.done():
                if error is None:
                    served.set_result(None)
                else:
                    served.set_exception(errors.RequestError(error))
        if error is not None:
            self._queue.end_all(model, error)

    def _forget(self, model: str) -> None:
        wanted = self._wanted.pop(model, None)
        if wanted is not None and wanted.asking is not None:
            wanted.asking.cancel()
