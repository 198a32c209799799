"""One replica of a model: a step loop on this thread, which takes its commands from a socket."""

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import structlog

from tokenbus.protocol.wire import block_hash, codec, errors
from tokenbus.worker.contract.engine_errors import ModelError, ModelTooLargeError
from tokenbus.worker.contract.engine_settings import SchedulerSettings
from tokenbus.worker.engine.device import pooling
from tokenbus.worker.engine.device.runner import Runner
from tokenbus.worker.engine.host_cache.cache_folder import CacheFolder
from tokenbus.worker.engine.host_cache.recovery import RecoveredCopies
from tokenbus.worker.engine.host_cache.slot_store import RegionError
from tokenbus.worker.engine.process import ipc, scheduler_setup
from tokenbus.worker.engine.process.loop import Inbox, LanesChanged, StepLoop
from tokenbus.worker.engine.process.step_gate import StepGate
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

    A model that can't be loaded is reported to the frontend. Raises DeviceError when the device fails, and any
    unexpected exception of any of its threads."""
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
    except ModelError as error:
        if runner is not None:
            runner.close()
        send(ipc.LoadFailed(str(error), isinstance(error, ModelTooLargeError)))
        return
    reader = threading.Thread(target=_read, args=(sock, runner, inbox, send), name="commands", daemon=True)
    reader.start()
    config = codec.replace(runner.config, end_token_ids=tuple(sorted(runner.end_token_ids)))
    for ability, reason in config.missing.items():
        structlog.get_logger().warning("ability_missing", ability=ability, reason=reason)
    try:
        loop = StepLoop(
            runner, inbox, send, step_target_s, scheduler_settings, step_gate, lane_share=lane_share, debug=debug
        )
        recovery = RecoveredCopies() if runner.copies is None else runner.copies.recovery
        send(ipc.Ready(config, runner.token_bytes, runner.bundle, recovery, loop.take_recovered()))
        loop.run()
    finally:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        reader.join(_TOKENIZE_GRACE_S)
        if not reader.is_alive():  # else a text is still being tokenized, using what would be closed
            runner.close()
            if runner.copies is not None:
                runner.copies.close()


def _open_copies(runner: Runner, memory_fd: int | None, folder: CacheFolder | None) -> None:
    """Opens the runner's copies, if it makes any: in a file of the folder if possible, else in memory. Raises
    ModelError if there is too little memory."""
    copies = runner.copies
    if copies is None:
        if folder is not None:
            structlog.get_logger().warning("cache_not_kept", reason="the engine makes no copies of this model's blocks")
    elif folder is not None and (fd := folder.take(copies.header, copies.num_bytes)) is not None:
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


def _read(sock: socket.socket, runner: Runner, inbox: Inbox, send: Send) -> None:
    """Passes commands on to the loop, and texts to threads that tokenize them, so that no command waits for a text.

    Any error ends the loop: a replica that takes no more commands must not seem alive."""
    texts, inputs = ThreadPoolExecutor(1, "tokenize"), ThreadPoolExecutor(1, "embed")
    aborted: set[int] = set()
    end: Exception | None = None
    try:
        for body in ipc.receive(sock):
            command = ipc.command_decoder.decode(body)
            match command:
                case ipc.TokenizeCall():
                    _end_loop_on_error(texts.submit(_tokenize, runner, command, send), inbox)
                case ipc.EmbedCall() | ipc.RerankCall():
                    _end_loop_on_error(
                        inputs.submit(_prepare, runner, command, time.monotonic(), aborted, inbox, send), inbox
                    )
                case ipc.ReadMemory():
                    send(ipc.MemoryRead(runner.device_memory()))
                case ipc.LoadAdapter():
                    _end_loop_on_error(inputs.submit(_load_adapter, runner, command, send), inbox)
                case ipc.AbortPooling(call_id):
                    aborted.add(call_id)
                    # after the call, which may still be queued
                    _end_loop_on_error(inputs.submit(_abort, command, aborted, inbox), inbox)
                case _:
                    inbox.put(command)
    except Exception as error:  # outermost frame
        end = error
    inbox.put(end)
    for pool in (texts, inputs):
        pool.shutdown(cancel_futures=True)


def _end_loop_on_error(work: "Future[None]", inbox: Inbox) -> None:
    """Ends the loop with an exception that the work raises: otherwise the caller would never get an answer."""

    def check(done: "Future[None]") -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            inbox.put(error)

    work.add_done_callback(check)


def _tokenize(runner: Runner, call: ipc.TokenizeCall, send: Send) -> None:
    try:
        result = ipc.TokenizeCallResult(call.call_id, block_hash.pack_token_ids(runner.tokenize(call.request)), None)
    except Exception as error:  # outermost frame: every call gets a result
        result = ipc.TokenizeCallResult(call.call_id, b"", _error_for(error))
    with contextlib.suppress(OSError):  # the frontend has gone
        send(result)


def _load_adapter(runner: Runner, call: ipc.LoadAdapter, send: Send) -> None:
    try:
        if runner.adapters is None:
            engine = runner.config.engine
            raise ModelError(
                f"{call.path}: LoRA adapters need a gguf engine, or an onnx engine whose graph names its projections; "
                f"this one is {engine}"
            )
        result = ipc.AdapterResult(call.call_id, runner.adapters.load(Path(call.path)), None)
    except ModelError as error:
        problem = errors.make_error(errors.Code.INVALID_REQUEST, str(error), param="path")
        result = ipc.AdapterResult(call.call_id, "", problem)
    except Exception as error:  # outermost frame: every call gets a result
        result = ipc.AdapterResult(call.call_id, "", _error_for(error))
    with contextlib.suppress(OSError):  # the frontend has gone
        send(result)


def _prepare(
    runner: Runner,
    call: ipc.EmbedCall | ipc.RerankCall,
    arrived_at: float,
    aborted: set[int],
    inbox: Inbox,
    send: Send,
) -> None:
    """Gives the loop the token ids of inputs to pool, or answers with the error."""
    if call.call_id in aborted:
        return
    try:
        job = _make_job(runner, call, arrived_at)
        if call.call_id not in aborted:
            inbox.put(job)
    except Exception as error:  # outermost frame: every call gets a result
        with contextlib.suppress(OSError):  # the frontend has gone
            send(ipc.PoolResult(call.call_id, b"", 0, _error_for(error)))


def _abort(command: ipc.AbortPooling, aborted: set[int], inbox: Inbox) -> None:
    """Drops a call that the loop has; inputs still to be tokenized never reach it."""
    inbox.put(command)
    aborted.discard(command.call_id)


def _make_job(runner: Runner, call: ipc.EmbedCall | ipc.RerankCall, arrived_at: float) -> pooling.PoolingJob:
    if isinstance(call, ipc.EmbedCall):
        return pooling.embed_job(call.call_id, call.request, runner.embedder, arrived_at)
    return pooling.rerank_job(call.call_id, call.request, runner.reranker, arrived_at)


def _error_for(error: Exception) -> errors.Error:
    """Returns the error to answer a call with; an unexpected exception is logged."""
    if isinstance(error, errors.RequestError):
        return error.error
    structlog.get_logger().error("request_failed", exc_info=error)
    return errors.make_error(errors.Code.INTERNAL)
