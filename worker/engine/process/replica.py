"""One replica of a model: a step loop on this thread, which takes its commands from a socket."""

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import structlog

from tokenbus.protocol.wire import block_hash, codec, errors
from tokenbus.worker.contract import contract
from tokenbus.worker.contract.contract import RecoveredCopies
from tokenbus.worker.contract.engine_errors import DeviceError, ModelError, ModelTooLargeError
from tokenbus.worker.contract.engine_settings import SchedulerSettings
from tokenbus.worker.engine.device import pooling
from tokenbus.worker.engine.device.runner import Runner
from tokenbus.worker.engine.host_cache.cache_folder import CacheFolder
from tokenbus.worker.engine.host_cache.slot_store import RegionError
from tokenbus.worker.engine.process import ipc, scheduler_setup
from tokenbus.worker.engine.process.device_sharing import StepGate
from tokenbus.worker.engine.process.loop import Inbox, LanesChanged, StepLoop
from tokenbus.worker.engine.scheduling.lanes import LaneShare

_TOKENIZE_GRACE_S = 5.0
"""An ending replica waits this long for text that is being tokenized."""

Send = Callable[[ipc.Report], None]


def serve(
    sock: socket.socket,
    load: Callable[[Callable[[float], None]], Runner],
    step_target_s: float,
    scheduler_settings: SchedulerSettings | None = None,
    step_gate: StepGate | None = None,
    *,
    debug: bool = False,
    memory_fd: int | None = None,
    join_pool: Callable[[Runner, Callable[[], None]], LaneShare | None] = lambda runner, wake: None,
    folder: CacheFolder | None = None,
) -> None:
    """Loads a runner, reports it, and steps until the socket's other end closes. `memory_fd` is a file for copies of
    blocks, which may hold an earlier engine's; those in a file of `folder` outlive the worker too. `join_pool` returns
    the runner's share of a KV pool, if it has one; the pool calls a function when the loop should ask again.

    Whatever happens while the model is loaded is reported to the frontend: others run in this process. Afterwards
    raises DeviceError when the device fails, and any unexpected exception of any of its threads."""
    lock = threading.Lock()

    def send(report: ipc.Report) -> None:
        with lock:
            sock.sendall(ipc.encode(report))

    inbox: Inbox = queue.SimpleQueue()
    runner: Runner | None = None
    try:
        runner = load(lambda fraction: send(ipc.Loading(fraction)))
        scheduler_setup.check(runner.config, scheduler_settings or SchedulerSettings())
        _open_copies(runner, memory_fd, folder)
        lane_share = join_pool(runner, lambda: inbox.put(LanesChanged()))
        loop = StepLoop(
            runner, inbox, send, step_target_s, scheduler_settings, step_gate, lane_share=lane_share, debug=debug
        )
        config = codec.replace(
            runner.config,
            end_token_ids=tuple(sorted(runner.end_token_ids)),
            features=(*runner.config.features, *_idle_features(runner.config, scheduler_settings)),
        )
        recovery = RecoveredCopies() if runner.copies is None else runner.copies.recovery
        ready = ipc.encode(ipc.Ready(config, runner.token_bytes, runner.bundle, recovery, loop.take_recovered()))
    except ConnectionError:  # the frontend has closed its end
        if runner is not None:
            _close(runner)
        raise
    except BaseException as error:  # outermost frame of a load; Rust's panics are no Exception
        if runner is not None:
            _close(runner)
        send(_failure(error))
        return
    calls = _Calls(runner, inbox, send)
    reader = threading.Thread(target=calls.read, args=(sock,), name="commands", daemon=True)
    reader.start()
    for ability, reason in config.missing.items():
        structlog.get_logger().warning("ability_missing", ability=ability, reason=reason)
    try:
        with lock:
            sock.sendall(ready)
        loop.run()
    finally:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        reader.join(_TOKENIZE_GRACE_S)
        if not reader.is_alive():  # else a text is still being tokenized, using what would be closed
            _close(runner)


def _close(runner: Runner) -> None:
    runner.close()
    if runner.copies is not None:
        runner.copies.close()


def _failure(error: BaseException) -> ipc.LoadFailed:
    """Returns what the frontend is told about a failed load; an unexpected exception is logged."""
    if isinstance(error, ModelError):
        return ipc.LoadFailed(errors.as_text(str(error)), isinstance(error, ModelTooLargeError))
    if isinstance(error, DeviceError):
        return ipc.LoadFailed(errors.as_text(f"the device failed: {error}"), may_pass=True)
    if isinstance(error, MemoryError):
        return ipc.LoadFailed("there is too little memory to load the model", is_too_large=True)
    structlog.get_logger().error("load_failed", exc_info=error)
    problem = f"the engine failed while it loaded the model: {type(error).__name__}: {error}"
    return ipc.LoadFailed(errors.as_text(problem))


def _open_copies(runner: Runner, memory_fd: int | None, folder: CacheFolder | None) -> None:
    """Opens the runner's copies, if it makes any: in a file of the folder if possible, else in memory. Raises
    ModelError if there is too little memory."""
    copies = runner.copies
    if copies is None:
        if folder is not None:
            structlog.get_logger().warning("cache_not_kept", reason="the engine makes no copies of this model's blocks")
    elif folder is not None and (fd := folder.take(copies.header, copies.layout.region_bytes)) is not None:
        try:
            copies.open(fd)
        except RegionError as error:
            os.close(fd)
            structlog.get_logger().warning("cache_not_kept", reason=str(error))
    if copies is not None and not copies.is_open:
        try:
            copies.open(memory_fd)
        except RegionError as error:
            raise ModelError(f"--host-cache-mib: {error}") from error
    elif memory_fd is not None:
        os.close(memory_fd)


def _idle_features(config: contract.EngineConfig, settings: SchedulerSettings | None) -> tuple[str, ...]:
    """Returns the feature of an engine that computes next turns while it is idle: that pays where the model reasons."""
    is_wanted = settings is None or not settings.no_speculative_prefill
    reasons = config.chat_format is not None and config.chat_format.reasons
    return ("next_turns",) if is_wanted and reasons and config.prefix_cache else ()


class _Calls:
    """Carries out the commands that are not for the loop, on threads, so that no command waits for a text."""

    def __init__(self, runner: Runner, inbox: Inbox, send: Send) -> None:
        self._runner = runner
        self._inbox = inbox
        self._send = send
        self._texts, self._inputs = ThreadPoolExecutor(1, "tokenize"), ThreadPoolExecutor(1, "embed")
        self._adapters = ThreadPoolExecutor(1, "adapters")
        self._aborted: set[int] = set()
        """Pooling calls that may still be queued for tokenization."""

    def read(self, sock: socket.socket) -> None:
        """Takes commands until the socket's other end closes, and passes on those for the loop.

        Any error ends the loop: a replica that takes no more commands must not seem alive."""
        end: Exception | None = None
        try:
            for body in ipc.receive(sock):
                command = ipc.command_decoder.decode(body)
                match command:
                    case ipc.TokenizeCall():
                        self._submit(self._texts, partial(self._tokenize, command))
                    case ipc.EmbedCall() | ipc.RerankCall():
                        self._submit(self._inputs, partial(self._prepare, command, time.monotonic()))
                    case ipc.ReadMemory():
                        self._send(ipc.MemoryRead(self._runner.device_memory()))
                    case ipc.LoadAdapter():
                        self._submit(self._adapters, partial(self._load_adapter, command))
                    case ipc.AbortPooling(call_id):
                        self._aborted.add(call_id)
                        # after the call, which may still be queued
                        self._submit(self._inputs, partial(self._abort, command))
                    case _:
                        self._inbox.put(command)
        except Exception as error:  # outermost frame
            end = error
        self._inbox.put(end)
        for pool in (self._texts, self._inputs, self._adapters):
            pool.shutdown(cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[[], None]) -> None:
        """An exception that the work raises ends the loop: otherwise the caller would never get an answer."""

        def check(done: "Future[None]") -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                self._inbox.put(error)

        pool.submit(work).add_done_callback(check)

    def _answer(self, result: ipc.Report) -> None:
        with contextlib.suppress(OSError):  # the frontend has gone
            self._send(result)

    def _tokenize(self, call: ipc.TokenizeCall) -> None:
        try:
            token_ids = block_hash.pack_token_ids(self._runner.tokenize(call.request))
            result = ipc.TokenizeCallResult(call.call_id, token_ids, None)
        except Exception as error:  # outermost frame: every call gets a result
            result = ipc.TokenizeCallResult(call.call_id, b"", _error_for(error))
        self._answer(result)

    def _load_adapter(self, call: ipc.LoadAdapter) -> None:
        try:
            if self._runner.adapters is None:
                raise ModelError(
                    f"{call.path}: LoRA adapters need a gguf engine, or an onnx engine whose graph names its "
                    f"projections; this one is {self._runner.config.engine}"
                )
            result = ipc.AdapterResult(call.call_id, self._runner.adapters.load(Path(call.path)), None)
        except ModelError as error:
            problem = errors.make_error(errors.Code.INVALID_REQUEST, str(error), param="path")
            result = ipc.AdapterResult(call.call_id, "", problem)
        except Exception as error:  # outermost frame: every call gets a result
            result = ipc.AdapterResult(call.call_id, "", _error_for(error))
        self._answer(result)

    def _prepare(self, call: ipc.EmbedCall | ipc.RerankCall, arrived_at: float) -> None:
        """Gives the loop the token ids of inputs to pool, or answers with the error."""
        if call.call_id in self._aborted:
            return
        try:
            if isinstance(call, ipc.EmbedCall):
                job = pooling.embed_job(call.call_id, call.request, self._runner.embedder, arrived_at)
            else:
                job = pooling.rerank_job(call.call_id, call.request, self._runner.reranker, arrived_at)
            if call.call_id not in self._aborted:
                self._inbox.put(job)
        except Exception as error:  # outermost frame: every call gets a result
            self._answer(ipc.PoolResult(call.call_id, b"", 0, _error_for(error)))

    def _abort(self, command: ipc.AbortPooling) -> None:
        """Drops a call that the loop has; inputs still to be tokenized never reach it."""
        self._inbox.put(command)
        self._aborted.discard(command.call_id)


def _error_for(error: Exception) -> errors.Error:
    """Returns the error to answer a call with; an unexpected exception is logged."""
    if isinstance(error, errors.RequestError):
        return error.error
    structlog.get_logger().error("request_failed", exc_info=error)
    return errors.make_error(errors.Code.INTERNAL)
