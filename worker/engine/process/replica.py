"""One replica of a model: a step loop on this thread, told what to do over a socket."""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import structlog

from tokenbus.protocol.wire import blocks, errors, internal
from tokenbus.worker.engine import embedding
from tokenbus.worker.engine.process import frames
from tokenbus.worker.engine.process.loop import Inbox, StepLoop
from tokenbus.worker.engine.process.settings import Pressure
from tokenbus.worker.engine.process.turnstile import Turnstile
from tokenbus.worker.engine.runner import ModelError, Runner

_LAST_TEXT_S = 5.0
"""A replica that ends waits so long for the texts that are being tokenized."""


def serve(
    sock: socket.socket,
    load: Callable[[Callable[[float], None]], Runner],
    step_target_s: float,
    pressure: Pressure | None = None,
    turnstile: Turnstile | None = None,
    *,
    debug: bool = False,
) -> None:
    """Loads a runner, says so, and steps until the socket's other end closes.

    Raises DeviceError when the device fails, and what nobody expected of any of its threads; a model that can't be
    loaded is told to the front."""
    send = _locked_sender(sock)
    try:
        runner = load(lambda fraction: send(frames.Loading(fraction)))
    except ModelError as error:
        send(frames.LoadFailed(str(error)))
        return
    inbox: Inbox = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(sock, runner, inbox, send), name="commands", daemon=True)
    reader.start()
    send(frames.Ready(runner.config, runner.pieces, runner.bundle))
    try:
        StepLoop(runner, inbox, send, step_target_s, pressure, turnstile, debug=debug).run()
    finally:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        reader.join(_LAST_TEXT_S)
        if not reader.is_alive():  # else a text is being tokenized with what would be closed
            runner.close()


def _read(sock: socket.socket, runner: Runner, inbox: Inbox, send: Callable[[frames.Report], None]) -> None:
    """Passes commands on to the loop, and texts to the threads that tokenize them, so that no command waits for these.

    Whatever goes wrong ends the loop: a replica that hears nothing any more must not seem to live."""
    texts, inputs = ThreadPoolExecutor(1, "tokenize"), ThreadPoolExecutor(1, "embed")
    end: Exception | None = None
    try:
        for body in frames.received(sock):
            command = frames.command_decoder.decode(body)
            match command:
                case frames.AskTokens():
                    _watch(texts.submit(_tokenize, runner, command, send), inbox)
                case frames.AskEmbeddings():
                    _watch(inputs.submit(_prepare, runner, command, time.monotonic(), inbox, send), inbox)
                case _:
                    inbox.put(command)
    except Exception as error:  # outermost frame
        end = error
    inbox.put(end)
    for pool in (texts, inputs):
        pool.shutdown(cancel_futures=True)


def _watch(work: "Future[None]", inbox: Inbox) -> None:
    """Ends the loop if work raises that was to answer somebody, come what may."""

    def look(done: "Future[None]") -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            inbox.put(error)

    work.add_done_callback(look)


def _tokenize(runner: Runner, ask: frames.AskTokens, send: Callable[[frames.Report], None]) -> None:
    try:
        answer = frames.Tokens(ask.ticket, blocks.to_bytes(runner.tokenize(ask.request)), None)
    except Exception as error:  # outermost frame: who asked must be answered
        answer = frames.Tokens(ask.ticket, b"", _told(error))
    with contextlib.suppress(OSError):  # the front has gone
        send(answer)


def _prepare(
    runner: Runner, ask: frames.AskEmbeddings, came_at: float, inbox: Inbox, send: Callable[[frames.Report], None]
) -> None:
    """Gives the loop the tokens of inputs to embed, or says why there are none."""
    try:
        inbox.put(embedding.job_of(ask.ticket, ask.request, runner.embedder, came_at))
    except Exception as error:  # outermost frame: who asked must be answered
        with contextlib.suppress(OSError):  # the front has gone
            send(frames.Embeddings(ask.ticket, internal.Embedded(error=_told(error))))


def _told(error: Exception) -> errors.Error:
    """What the asker is told of an exception; one that nobody expected is logged."""
    if isinstance(error, errors.RequestError):
        return error.error
    structlog.get_logger().error("request_failed", exc_info=error)
    return errors.make_error(errors.Code.INTERNAL)


def _locked_sender(sock: socket.socket) -> Callable[[frames.Report], None]:
    lock = threading.Lock()

    def send(report: frames.Report) -> None:
        with lock:
            sock.sendall(frames.encode(report))

    return send
