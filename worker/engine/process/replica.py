"""One replica of a model: a step loop on this thread, told what to do over a socket."""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import structlog

from tokenbus.protocol.wire import block_hash, errors, internal
from tokenbus.worker.engine import embedding
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine.process.loop import Inbox, StepLoop
from tokenbus.worker.engine.process.settings import SchedulerSettings
from tokenbus.worker.engine.process.step_gate import StepGate
from tokenbus.worker.engine.runner import ModelError, Runner

_LAST_TEXT_S = 5.0
"""A replica that ends waits so long for the texts that are being tokenized."""


def serve(
    sock: socket.socket,
    load: Callable[[Callable[[float], None]], Runner],
    step_target_s: float,
    scheduler_settings: SchedulerSettings | None = None,
    step_gate: StepGate | None = None,
    *,
    debug: bool = False,
) -> None:
    """Loads a runner, says so, and steps until the socket's other end closes.

    Raises DeviceError when the device fails, and what nobody expected of any of its threads; a model that can't be
    loaded is told to the frontend."""
    send = _locked_sender(sock)
    try:
        runner = load(lambda fraction: send(ipc.Loading(fraction)))
    except ModelError as error:
        send(ipc.LoadFailed(str(error)))
        return
    inbox: Inbox = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(sock, runner, inbox, send), name="commands", daemon=True)
    reader.start()
    send(ipc.Ready(runner.config, runner.token_bytes, runner.bundle))
    try:
        StepLoop(runner, inbox, send, step_target_s, scheduler_settings, step_gate, debug=debug).run()
    finally:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        reader.join(_LAST_TEXT_S)
        if not reader.is_alive():  # else a text is being tokenized with what would be closed
            runner.close()


def _read(sock: socket.socket, runner: Runner, inbox: Inbox, send: Callable[[ipc.Report], None]) -> None:
    """Passes commands on to the loop, and texts to the threads that tokenize them, so that no command waits for these.

    Whatever goes wrong ends the loop: a replica that hears nothing any more must not seem to live."""
    texts, inputs = ThreadPoolExecutor(1, "tokenize"), ThreadPoolExecutor(1, "embed")
    end: Exception | None = None
    try:
        for body in ipc.receive(sock):
            command = ipc.command_decoder.decode(body)
            match command:
                case ipc.TokenizeCall():
                    _end_loop_on_error(texts.submit(_tokenize, runner, command, send), inbox)
                case ipc.EmbedCall():
                    _end_loop_on_error(inputs.submit(_prepare, runner, command, time.monotonic(), inbox, send), inbox)
                case _:
                    inbox.put(command)
    except Exception as error:  # outermost frame
        end = error
    inbox.put(end)
    for pool in (texts, inputs):
        pool.shutdown(cancel_futures=True)


def _end_loop_on_error(work: "Future[None]", inbox: Inbox) -> None:
    """Ends the loop if work raises that was to answer somebody, come what may."""

    def look(done: "Future[None]") -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            inbox.put(error)

    work.add_done_callback(look)


def _tokenize(runner: Runner, ask: ipc.TokenizeCall, send: Callable[[ipc.Report], None]) -> None:
    try:
        answer = ipc.TokenizeResult(ask.call_id, block_hash.pack_token_ids(runner.tokenize(ask.request)), None)
    except Exception as error:  # outermost frame: who asked must be answered
        answer = ipc.TokenizeResult(ask.call_id, b"", _error_for(error))
    with contextlib.suppress(OSError):  # the frontend has gone
        send(answer)


def _prepare(
    runner: Runner, ask: ipc.EmbedCall, arrived_at: float, inbox: Inbox, send: Callable[[ipc.Report], None]
) -> None:
    """Gives the loop the tokens of inputs to embed, or says why there are none."""
    try:
        inbox.put(embedding.make_job(ask.call_id, ask.request, runner.embedder, arrived_at))
    except Exception as error:  # outermost frame: who asked must be answered
        with contextlib.suppress(OSError):  # the frontend has gone
            send(ipc.EmbedResult(ask.call_id, internal.EmbedResult(error=_error_for(error))))


def _error_for(error: Exception) -> errors.Error:
    """What the asker is told of an exception; one that nobody expected is logged."""
    if isinstance(error, errors.RequestError):
        return error.error
    structlog.get_logger().error("request_failed", exc_info=error)
    return errors.make_error(errors.Code.INTERNAL)


def _locked_sender(sock: socket.socket) -> Callable[[ipc.Report], None]:
    lock = threading.Lock()

    def send(report: ipc.Report) -> None:
        with lock:
            sock.sendall(ipc.encode(report))

    return send
