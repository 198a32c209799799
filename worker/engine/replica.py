"""One replica of a model: a step loop on this thread, told what to do over a socket."""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog

from protocol import blocks, errors, internal
from worker.engine import embedding, frames
from worker.engine.loop import Inbox, StepLoop
from worker.engine.runner import ModelError, Runner
from worker.engine.settings import Pressure
from worker.engine.turnstile import Turnstile


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

    Raises DeviceError when the device fails; a model that can't be loaded is told to the front."""
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
        runner.close()


def _read(sock: socket.socket, runner: Runner, inbox: Inbox, send: Callable[[frames.Report], None]) -> None:
    """Passes commands on to the loop. Texts are tokenized on a thread of their own, so that nobody waits for them."""
    tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
    for body in frames.received(sock):
        command = frames.command_decoder.decode(body)
        match command:
            case frames.AskTokens():
                tokenizing.submit(_tokenize, runner, command, send)
            case frames.AskEmbeddings(ticket, request):
                try:
                    inbox.put(embedding.job_of(ticket, request, runner.embedder, time.monotonic()))
                except errors.RequestError as error:
                    send(frames.Embeddings(ticket, internal.Embedded(error=error.error)))
            case _:
                inbox.put(command)
    tokenizing.shutdown(wait=False, cancel_futures=True)
    inbox.put(None)


def _tokenize(runner: Runner, ask: frames.AskTokens, send: Callable[[frames.Report], None]) -> None:
    try:
        answer = frames.Tokens(ask.ticket, blocks.to_bytes(runner.tokenize(ask.request)), None)
    except errors.RequestError as error:
        answer = frames.Tokens(ask.ticket, b"", error.error)
    except Exception:  # outermost frame: who asked must be answered
        structlog.get_logger().exception("request_failed")
        answer = frames.Tokens(ask.ticket, b"", errors.make_error(errors.Code.INTERNAL))
    with contextlib.suppress(OSError):  # the front has gone
        send(answer)


def _locked_sender(sock: socket.socket) -> Callable[[frames.Report], None]:
    lock = threading.Lock()

    def send(report: frames.Report) -> None:
        with lock:
            sock.sendall(frames.encode(report))

    return send
