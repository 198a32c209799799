"""The engine process: `python -m worker.engine.child FD SETTINGS`, started by a front and bound to its life."""

import os
import queue
import socket
import sys
import threading
from collections.abc import Callable

import msgspec
import structlog

from protocol import blocks, errors, logs
from worker.engine import frames
from worker.engine.loop import Inbox, StepLoop
from worker.engine.runner import DeviceError, ModelError, Runner
from worker.engine.settings import EngineSettings, Pressure

EXIT_DEVICE_FAILED = 3
"""The exit status that tells the front that the device, and not the model, is at fault."""


def serve(
    sock: socket.socket,
    load: Callable[[Callable[[float], None]], Runner],
    step_target_s: float,
    leave: Callable[[], None],
    pressure: Pressure | None = None,
) -> None:
    """Loads a runner, says so, and steps until the socket's other end closes; then calls `leave` at once.

    Raises DeviceError when the device fails; a model that can't be loaded is told to the front."""
    send = _locked_sender(sock)
    try:
        runner = load(lambda fraction: send(frames.Loading(fraction)))
    except ModelError as error:
        send(frames.LoadFailed(str(error)))
        return
    inbox: Inbox = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(sock, runner, inbox, send, leave), name="commands", daemon=True)
    reader.start()
    send(frames.Ready(runner.config, runner.pieces, runner.bundle))
    try:
        StepLoop(runner, inbox, send, step_target_s, pressure).run()
    finally:
        runner.close()


def _read(
    sock: socket.socket, runner: Runner, inbox: Inbox, send: Callable[[frames.Report], None], leave: Callable[[], None]
) -> None:
    """Passes commands on to the loop and tokenizes beside it, so that neither waits for the other."""
    for body in frames.received(sock):
        command = frames.command_decoder.decode(body)
        if isinstance(command, frames.AskTokens):
            send(_tokenize(runner, command))
        else:
            inbox.put(command)
    inbox.put(None)
    leave()


def _tokenize(runner: Runner, ask: frames.AskTokens) -> frames.Tokens:
    try:
        return frames.Tokens(ask.ticket, blocks.to_bytes(runner.tokenize(ask.request)), None)
    except errors.RequestError as error:
        return frames.Tokens(ask.ticket, b"", error.error)


def _locked_sender(sock: socket.socket) -> Callable[[frames.Report], None]:
    lock = threading.Lock()

    def send(report: frames.Report) -> None:
        with lock:
            sock.sendall(frames.encode(report))

    return send


def _loader(settings: EngineSettings) -> Callable[[Callable[[float], None]], Runner]:
    if settings.engine != "gguf":
        raise SystemExit(f"unknown engine {settings.engine!r}: this build has gguf")
    from worker.engine.gguf.runner import GgufRunner

    return lambda progress: GgufRunner(settings, progress)


def main() -> None:
    settings = msgspec.json.decode(sys.argv[2], type=EngineSettings)
    logs.configure("engine")
    sock = socket.socket(fileno=int(sys.argv[1]))
    try:
        target_s = settings.step_target_ms / 1e3
        serve(sock, _loader(settings), target_s, leave=lambda: os._exit(0), pressure=settings.pressure)
    except DeviceError as error:
        structlog.get_logger().error("device_failed", error=str(error))
        sys.exit(EXIT_DEVICE_FAILED)
    except BrokenPipeError:
        sys.exit(0)


if __name__ == "__main__":
    main()
