"""The composition root of a worker process: its replicas, the connections and the engine process that they share, and
their KV budget."""

import asyncio
import contextlib
import dataclasses
import os
import secrets
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec
from prometheus_client.registry import Collector

from tokenbus.protocol import tasks
from tokenbus.protocol.access import audit_log
from tokenbus.protocol.bus.connection import Connection
from tokenbus.protocol.process import signals
from tokenbus.protocol.telemetry import metrics, status, tracing
from tokenbus.protocol.wire import errors, internal, subjects
from tokenbus.worker.broker.lifeline import Lifeline
from tokenbus.worker.contract.engine_errors import ModelError, ModelTooLargeError
from tokenbus.worker.engine_client.engine_process import EngineProcess
from tokenbus.worker.engine_client.trial import Trials
from tokenbus.worker.files.regular import on_daemon_thread
from tokenbus.worker.models import registry
from tokenbus.worker.on_demand import model_sizes
from tokenbus.worker.on_demand.models import OnDemandModels, OnDemandReplica
from tokenbus.worker.replica.replica import Replica
from tokenbus.worker.settings.load_requests import (
    asked_name,
    default_name,
    engine_settings,
    fetch,
    name_on_hub,
    refusal,
)
from tokenbus.worker.settings.settings import ModelToServe, OnProgress, WorkerSettings
from tokenbus.worker.telemetry import vllm_metric_aliases
from tokenbus.worker.telemetry.metrics import WorkerMetrics

_MAX_REPLICAS = 64
_PROGRESS_INTERVAL_S = 0.5
_LEAST_PROGRESS = 0.001


async def serve(settings: WorkerSettings, read_settings: Callable[[], WorkerSettings]) -> None:
    """Runs a worker process until SIGTERM or SIGINT, or until all of its replicas are drained; `read_settings` rereads
    its settings on SIGHUP.

    Raises ModelError if a model can't be served, ReplacedError if another worker takes a name, and
    ConnectionError if there is no broker."""
    worker = WorkerProcess(settings)
    with signals.on_stop(worker.drain):
        signals.on_hangup(read_settings, worker.apply_settings)
        await worker.run()


class WorkerProcess:
    """The replicas of one process. They start one after another, so that each knows how much KV memory is left."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._kv_budget_bytes = settings.kv_budget_bytes
        """The engine process's budget, which later settings do not change."""
        self._process = EngineProcess(settings.log.variables())
        self._trials = Trials(settings.log.variables())
        self._metrics = WorkerMetrics()
        self._name = settings.worker_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        outgoing, incoming = (Connection(settings.broker, f"worker {self._name}{of}") for of in ("", " incoming"))
        self._connections = (outgoing, incoming)
        self._line = Lifeline(outgoing, incoming, subjects.Subjects(settings.prefix), self._name)
        self._tracer: tracing.Tracer = tracing.NoopTracer()
        self._is_single = sum(model.replicas for model in settings.models) == 1
        self._on_demand = OnDemandModels(settings, self._metrics, self._name)
        self._replicas: dict[Replica, asyncio.Task[None]] = {}
        self._ended: asyncio.Queue[Replica | None] = asyncio.Queue()
        """Replicas that have ended; None stands for a task of the process."""
        self._loads: dict[asyncio.Task[None], int] = {}
        """Each with the number of replicas that it adds."""
        self._pulls: set[asyncio.Task[None]] = set()
        self._taken_bytes: dict[Replica, int] = {}
        """The bytes of the memory budget taken by each replica loaded after the start."""
        self._starting = asyncio.Lock()
        self._last_number = 0
        self._drain_requested = asyncio.Event()

    def __repr__(self) -> str:
        return f"<WorkerProcess {list(self._replicas)}>"

    async def run(self) -> None:
        """Runs until every replica is drained. Raises what `serve` raises."""

        def describe() -> dict[str, Any]:
            return {"workers": [replica.describe() for replica in self._replicas]}

        async with (
            tracing.exporting(self._settings.otlp_traces_endpoint, "worker", self._name) as self._tracer,
            status.serving(self._settings.status_page, self._page().registry, self._unready_reason, describe),
        ):
            await self._serve()

    async def _serve(self) -> None:
        async with contextlib.AsyncExitStack() as opened:
            for connection in self._connections:
                try:
                    await signals.unless_stopped(self._drain_requested, connection.open())
                except signals.StoppedError:
                    return
                opened.push_async_callback(connection.close)
            if self._settings.audit_settings.audit:
                # over this connection no record is queued before a chunk
                log = audit_log.writing(self._connections[1], self._settings.prefix, self._settings.audit_settings)
                self._line.audit = await opened.enter_async_context(log)
                audit_log.count_records(self._line.audit, self._metrics.audit_records)
            await self._serve_replicas()

    async def _serve_replicas(self) -> None:
        lives = [tasks.awaited(life) for life in (self._line.run(), self._on_demand.run())]
        for life in lives:
            life.add_done_callback(lambda _: self._ended.put_nowait(None))
        starting = tasks.awaited(self._start_first())
        try:
            # models may take hours to fetch, and none can be served without a connection
            await asyncio.wait([starting, *lives], return_when=asyncio.FIRST_COMPLETED)
            for life in lives:
                if life.done():
                    life.result()  # raises what ended it
            await starting
            while self._replicas:
                replica = await self._ended.get()
                if replica is None:
                    for life in lives:
                        if life.done():
                            life.result()  # raises what ended it
                    continue
                life = self._replicas.pop(replica)
                self._on_demand.give_back(self._taken_bytes.pop(replica, 0))
                if isinstance(replica, OnDemandReplica):
                    self._on_demand.remove(replica)
                if replica.started.done():
                    life.result()  # raises what ended it, since that concerns all replicas
        finally:
            replicas = [starting, *self._loads, *self._pulls, *self._replicas.values()]
            for running in (replicas, lives):  # replicas still announce that they have stopped
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    def _page(self) -> metrics.MetricsCollector:
        def refresh() -> None:
            for replica in self._replicas:
                replica.update_gauges()
            self._on_demand.update_gauges()

        families: list[Collector] = [*self._metrics.families()]
        if self._settings.vllm_metrics:
            families += vllm_metric_aliases.aliases(self._metrics)
        return metrics.MetricsCollector(families, refresh)

    def _unready_reason(self) -> str:
        if not self._replicas or self._drain_requested.is_set():
            return "no replica accepts requests"
        return next(filter(None, (replica.unready_reason for replica in self._replicas)), "")

    def drain(self) -> None:
        """Drains every replica."""
        self._drain_requested.set()
        for replica in self._replicas:
            replica.frontend.drain.request()

    def apply_settings(self, settings: WorkerSettings) -> None:
        """Applies the settings that may change while serving, to every replica and to those loaded later."""
        self._settings = settings
        for replica in self._replicas:
            replica.apply_settings(settings)

    def load(self, control: internal.Control, on_progress: OnProgress) -> None:
        """Loads a model alongside the others and reports progress until it serves; or only fetches it."""
        try:
            work, num_replicas = self._requested(control, on_progress)
        except errors.RequestError as error:
            on_progress(internal.ControlReply(ok=False, error=error.error))
            return
        on_progress(internal.ControlReply(ok=True, progress=0.0))

        def failed(_: Exception) -> None:
            on_progress(internal.ControlReply(ok=False, error=errors.make_error(errors.Code.INTERNAL)))

        task = tasks.background("load", work, failed)
        if control.op == "pull":
            self._pulls.add(task)
            task.add_done_callback(self._pulls.discard)
        else:
            self._loads[task] = num_replicas
            task.add_done_callback(self._loads.pop)

    def _requested(self, control: internal.Control, on_progress: OnProgress) -> tuple[Coroutine[Any, Any, None], int]:
        """Returns what a message asks for, and how many replicas that adds. Raises RequestError if it is not
        allowed."""
        assert control.model is not None
        if control.op == "pull":
            return self._pull(name_on_hub(control.model, len(self._pulls)), on_progress), 0
        if len(self._loads) >= _MAX_REPLICAS:
            raise errors.request_error(errors.Code.OVERLOADED, f"{_MAX_REPLICAS} models are being loaded")
        if control.served_name is None and (worker_id := self._on_demand.worker_of(control.model)):
            return self._load_on_demand(control.model, worker_id, on_progress), 0
        return self._load(self._requested_model(control), on_progress), control.replicas

    def _requested_model(self, control: internal.Control) -> ModelToServe:
        """Returns the model that a `load` message requests. Raises RequestError if it is invalid."""
        assert control.model is not None
        taken = len(self._replicas) + sum(self._loads.values())
        if not 1 <= control.replicas <= _MAX_REPLICAS - taken:
            allowed = f"replicas must be 1 to {_MAX_REPLICAS - taken} in addition to the existing {taken}"
            raise errors.request_error(errors.Code.INVALID_REQUEST, allowed, param="replicas")
        return ModelToServe(
            served_name=asked_name(control.model, control.served_name),
            engine=engine_settings(self._settings.models[0].engine, control),
            replicas=control.replicas,
        )

    async def _start_first(self) -> None:
        await self._on_demand.prepare()
        # pinned models are loaded before anything can be requested
        models = sorted(self._settings.models, key=lambda model: model.on_demand)
        coming = sum(model.replicas for model in models)
        weights = await self._weights_of(models)
        # one at a time: each gets a share of the KV memory that the earlier ones left
        async with self._starting:
            for model in models:
                weights.pop(model.engine.model, None)
                for _ in range(model.replicas):
                    await self._wait_started(self._add_replica(model, coming, sum(weights.values())))
                    coming -= 1

    async def _weights_of(self, models: list[ModelToServe]) -> dict[str, int]:
        """Returns the size of each model that is loaded from the start, so that the first ones leave room for the
        others."""
        engines = {model.engine.model: model.engine for model in models if not model.on_demand}
        if len(engines) < 2:
            return {}
        return {name: await on_daemon_thread(partial(model_sizes.weight_bytes, one)) for name, one in engines.items()}

    async def _load_on_demand(self, name: str, worker_id: str, on_progress: OnProgress) -> None:
        """Requests a model as routers do, until it is loaded."""
        while self._on_demand.worker_of(name) == worker_id:
            reply = self._on_demand.want(name)
            if not reply.ok or reply.progress == 1.0:
                on_progress(msgspec.structs.replace(reply, worker_ids=[worker_id] if reply.ok else []))
                return
            # the first report has been made, and each one of 0 is logged
            on_progress(msgspec.structs.replace(reply, progress=max(reply.progress or 0.0, _LEAST_PROGRESS)))
            await asyncio.sleep(_PROGRESS_INTERVAL_S)
        gone = errors.make_error(errors.Code.NO_WORKER, f"{worker_id} was drained while it was loading")
        on_progress(internal.ControlReply(ok=False, error=gone))

    async def _pull(self, name: str, on_progress: OnProgress) -> None:
        """Fetches a model on a thread, which ends with the next bytes if this task is cancelled."""
        share, is_wanted = 0.0, True

        def note(fraction: float) -> None:
            nonlocal share
            share = fraction
            if not is_wanted:
                raise ModelError("the worker stops")

        layouts = registry.layouts(registry.engine_of(name, self._settings.models[0].engine.engine))
        fetching = on_daemon_thread(partial(fetch, name, layouts, note))
        try:
            while not (await asyncio.wait([fetching], timeout=_PROGRESS_INTERVAL_S))[0]:
                on_progress(internal.ControlReply(ok=True, progress=round(min(max(share, _LEAST_PROGRESS), 0.99), 3)))
            await fetching
        except ModelError as error:
            on_progress(internal.ControlReply(ok=False, error=refusal(error)))
            return
        finally:
            is_wanted = False
            fetching.cancel()
        on_progress(internal.ControlReply(ok=True, progress=1.0))

    async def _load(self, model: ModelToServe, on_progress: OnProgress) -> None:
        added: list[Replica] = []
        loading = asyncio.current_task()
        assert loading is not None
        try:
            if not model.served_name:
                model = dataclasses.replace(model, served_name=await default_name(model.engine.model))
            note = partial(on_progress, internal.ControlReply(ok=True, progress=_LEAST_PROGRESS))
            settings, is_tried = self._on_demand.sized(model), True
            try:
                await self._trials.run(settings, note)
            except ModelTooLargeError:
                is_tried = False  # others may make room
        except (ModelError, errors.RequestError) as error:
            on_progress(internal.ControlReply(ok=False, error=refusal(error)))
            return
        async with self._starting:
            try:
                for number in range(model.replicas):
                    num_bytes = await self._on_demand.take(model)
                    try:
                        if not is_tried:
                            await self._trials.run(settings, note)
                            is_tried = True
                        replica = self._add_replica(model, model.replicas - number)
                    except Exception:  # as without a file descriptor: nobody would ever give them back
                        self._on_demand.give_back(num_bytes)
                        raise
                    self._taken_bytes[replica] = num_bytes
                    added.append(replica)
                    self._loads[loading] -= 1
                    await self._wait_started(replica, partial(_report, on_progress, number, model.replicas))
            except Exception as error:  # whatever failed, it is reported: those that serve already would be unknown
                for replica in added:
                    replica.frontend.drain.request()
                if not isinstance(error, ModelError | ConnectionError):
                    raise
                on_progress(internal.ControlReply(ok=False, error=refusal(error)))
                return
        if any(replica.frontend.drain.requested.is_set() for replica in added):
            gone = errors.make_error(errors.Code.NO_WORKER, f"{model.served_name} was drained while it was loading")
            on_progress(internal.ControlReply(ok=False, error=gone))
            return
        on_progress(internal.ControlReply(ok=True, progress=1.0, worker_ids=[replica.worker_id for replica in added]))

    def _add_replica(self, model: ModelToServe, coming: int, coming_weights: int = 0) -> Replica:
        """Starts a replica with an equal share of the memory that it and the other `coming` - 1 may still take, minus
        the weights of later models."""
        self._last_number += 1
        # only a single replica keeps the plain name; loaded ones get numbers from 2 on
        alone = self._is_single and self._last_number == 1
        worker_id = self._name if alone else f"{self._name}-{self._last_number}"
        if model.on_demand:
            own = OnDemandReplica(
                self._settings, self._line, model, worker_id, self._metrics, self._tracer, self.load, self._on_demand
            )
            self._on_demand.add(own)
            return self._start(own)
        engine = self._on_demand.sized(model)
        # a budget for KV memory alone may be less than what was counted for the model
        limits = [size for size in (engine.kv_limit_bytes, self._kv_share_bytes(coming)) if size]
        engine = msgspec.structs.replace(
            engine,
            kv_limit_bytes=min(limits, default=0),
            kv_pool_bytes=self._kv_budget_bytes,
            memory_parts=coming,
            memory_kept_bytes=coming_weights,
        )
        return self._start(
            Replica(
                self._settings,
                self._line,
                model,
                worker_id,
                engine,
                self._process,
                self._metrics,
                self._tracer,
                self.load,
            )
        )

    def _start(self, replica: Replica) -> Replica:
        life = self._replicas[replica] = tasks.awaited(replica.run())
        life.add_done_callback(lambda _: self._ended.put_nowait(replica))
        if self._drain_requested.is_set():
            replica.frontend.drain.request()
        return replica

    def _kv_share_bytes(self, coming: int) -> int:
        """Returns the bytes of KV memory for the next replica if it can't lend any; 0 means no limit.

        Replicas that lend theirs have an equal share too, and always keep a lane."""
        if not self._kv_budget_bytes:
            return 0
        configs = [replica.started.result() for replica in self._replicas if replica.started.done()]
        lenders = [one for one in configs if one.kv_lane_bytes]
        left = self._kv_budget_bytes - sum(one.kv_bytes for one in configs if not one.kv_lane_bytes)
        beside = left - sum(one.kv_lane_bytes for one in lenders)
        return max(1, min(left // (coming + len(lenders)), beside // coming))

    async def _wait_started(self, replica: Replica, note: Callable[[float], None] = lambda share: None) -> None:
        """Waits until a replica serves or has ended. Raises what ended it."""
        life = self._replicas[replica]
        while not life.done() and not replica.started.done():
            either: list[asyncio.Future[Any]] = [life, replica.started]
            await asyncio.wait(either, timeout=_PROGRESS_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
            note(replica.load_progress)
        if life.done():
            life.result()


def _report(on_progress: OnProgress, done: int, replicas: int, fraction: float) -> None:
    """Reports the progress of loading `replicas`, of which `done` serve and the next is loaded to `fraction`."""
    progress = min((done + fraction) / replicas, 0.99)
    on_progress(internal.ControlReply(ok=True, progress=round(progress, 3)))
