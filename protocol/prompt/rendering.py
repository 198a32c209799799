"""Renders chat templates in a separate process, because a template is a program that came with a model (decision 0005).

jinja2's sandbox keeps a template away from the machine, but not from computing forever, or from filling the memory with
a single expression. So the renderer process gets little CPU time for each conversation and little memory, and the
kernel ends it if it exceeds them.

Parent and child exchange msgpack messages over a socket pair (`Frames`). The parent never waits, on sending or
receiving, for a child that gets no CPU time: it ends it and starts another."""

import functools
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog

from tokenbus.protocol.process.child_environment import child_environment
from tokenbus.protocol.wire import errors, limits, messages

_LENGTH = struct.Struct("!I")
_READ_BYTES = 1 << 20

READABLE, WRITABLE = select.POLLIN, select.POLLOUT


class Frames:
    """Sends and receives messages over one end of a socket pair: a four-byte length, then that many bytes.

    `multiprocessing.connection` has such messages too, but it pickles unless one takes care, and it can wait forever in
    the middle of a message if the peer was stopped there.

    If `wait` is given, it does all waiting: nothing else blocks.

    `wait` is passed READABLE or WRITABLE, returns when the socket is in that state (or broken), and may raise to give
    up. That leaves the stream in the middle of a message, so it can't be used any more."""

    def __init__(self, end: socket.socket, wait: Callable[[int], None] | None = None) -> None:
        self._socket = end
        self._wait = wait
        end.setblocking(wait is None)

    def __repr__(self) -> str:
        return f"<Frames {self._socket.fileno()}>"

    def send(self, body: bytes) -> None:
        """Sends a message. Raises OSError if the peer is gone."""
        left = memoryview(_LENGTH.pack(len(body)) + body)
        while left:
            if self._wait is not None:
                self._wait(WRITABLE)
            left = left[self._socket.send(left) :]

    def receive(self) -> bytes:
        """Returns the next message. Raises EOFError if the peer is gone, or OSError."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._read(length)

    def _read(self, num_bytes: int) -> bytes:
        body = bytearray()
        while len(body) < num_bytes:
            if self._wait is not None:
                self._wait(READABLE)
            part = self._socket.recv(min(_READ_BYTES, num_bytes - len(body)))
            if not part:
                raise EOFError
            body += part
        return bytes(body)


PromptPieces = list[str | int]
"""A rendered prompt: special token ids, and the plain texts between them."""


class RendererSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a renderer process: the template, and the special tokens that it may write."""

    source: str
    special_tokens: dict[str, int]
    bos_token: str = ""
    eos_token: str = ""
    cpu_s: float = limits.RENDER_CPU_S
    """CPU seconds for compiling the template, and again for each conversation."""
    all_cpu_s: float = math.inf
    """Total CPU seconds, including the start of the process."""


class RenderRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation to render, with the request's tools and `chat_template_kwargs`."""

    conversation: list[messages.ChatMessage]
    arguments: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    continues: bool = False
    """Whether the prompt ends with the text of the last message."""


class RenderResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a setup or a request: a prompt, an error in this conversation, or an error in the template."""

    pieces: PromptPieces = []
    error: errors.Error | None = None
    template_error: str = ""
    """Why the template is unusable; empty if it is usable."""
    kept_bytes: int = 0
    """The memory that the process retains, if that is too much for the process to be kept."""


encode = msgspec.msgpack.Encoder().encode
_result_decoder = msgspec.msgpack.Decoder(RenderResult)


class RenderTimeoutError(Exception):
    """A template took more CPU time than it may."""


class Renderer:
    """Renders one template, starting a process when needed. Blocks; threads that share one take turns."""

    def __init__(self, setup: RendererSetup) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._frames: Frames | None = None
        self._pid = 0
        self._ended_cpu_s = 0.0
        self._end: Callable[[], int | None] = lambda: None
        self._template_error = ""
        """Permanent once set: compiling the template again would fail again."""

    def __repr__(self) -> str:
        return f"<Renderer {'not started' if self._frames is None else 'started'}>"

    def start(self) -> None:
        """Starts the process ahead of the first conversation.

        Raises ValueError if the template is malformed, and OSError if no process can be started now."""
        with self._lock:
            self._open()

    def render(
        self,
        conversation: list[messages.ChatMessage],
        arguments: dict[str, Any] | None,
        tools: list[dict[str, Any]] | None = None,
        *,
        continues: bool = False,
    ) -> PromptPieces:
        """Renders a conversation, with `continues` up to the end of the last message's text. Raises RequestError:
        invalid_request if the template refuses it or takes too much time or memory, unsupported if the template is
        malformed or can't be continued, internal if no process can be started now."""
        request = _encode_request(
            RenderRequest(conversation=conversation, arguments=arguments, tools=tools, continues=continues)
        )
        with self._lock:
            try:
                result = self._ask_twice(request)
            except ValueError as error:
                raise errors.request_error(errors.Code.UNSUPPORTED, str(error), param="messages") from error
            except RenderTimeoutError as error:
                problem = f"the model's chat template took more than {self._setup.cpu_s:g} s to render the messages"
                raise refused(problem) from error
            except OSError as error:
                raise errors.request_error(errors.Code.INTERNAL, f"the chat template: {error}") from error
        if result.error is not None:
            raise errors.RequestError(result.error)
        return result.pieces

    def close(self) -> None:
        """Ends the process. The next conversation starts another."""
        with self._lock:
            self._close()

    @property
    def cpu_s(self) -> float:
        """CPU seconds that its processes have used so far."""
        with self._lock:
            return self._cpu_s()

    def _ask_twice(self, request: bytes) -> RenderResult:
        """Retries once if the process was killed from outside or frozen, which is not the conversation's fault."""
        try:
            return self._ask(self._open(), request)
        except OSError as error:
            structlog.get_logger().warning("renderer_died", error=str(error))
            return self._ask(self._open(), request)

    def _open(self) -> Frames:
        if self._template_error:
            raise ValueError(self._template_error)
        if self._frames is not None:
            return self._frames
        ours, theirs = socket.socketpair()
        with theirs:
            process = _start_process(theirs.fileno())
        self._pid = process.pid
        self._frames = Frames(ours, functools.partial(_wait_until, ours, process.pid))  # refers to nothing of `self`
        # Also ends the process if this object is garbage-collected without being closed, or the interpreter exits.
        self._end = weakref.finalize(self, _end_process, process, ours)
        setup = msgspec.structs.replace(self._setup, all_cpu_s=self._setup.all_cpu_s - self._ended_cpu_s)
        try:
            self._template_error = self._ask(self._frames, encode(setup)).template_error
        except RenderTimeoutError:
            self._template_error = f"the chat template takes more than {self._setup.cpu_s:g} s to compile"
        if self._template_error:
            self._close()
            raise ValueError(self._template_error)
        return self._frames

    def _ask(self, frames: Frames, request: bytes) -> RenderResult:
        """Sends one message and waits for its answer. If this raises RenderTimeoutError or OSError the process is gone.

        A process that used up its CPU time was ended by SIGPROF."""
        try:
            frames.send(request)
            result = _result_decoder.decode(frames.receive())
        except TimeoutError:
            self._close()
            raise
        except (EOFError, OSError) as error:
            status = self._close()
            if status == -signal.SIGPROF:
                raise RenderTimeoutError from error
            raise OSError(f"the renderer process ended with status {status}") from error
        if result.kept_bytes:
            structlog.get_logger().warning("renderer_too_large", bytes=result.kept_bytes)
            self._close()
        return result

    def _cpu_s(self) -> float:
        if self._frames is None:
            return self._ended_cpu_s
        return self._ended_cpu_s + _cpu_s_of(self._pid)

    def _close(self) -> int | None:
        """Ends the process, and returns its exit status."""
        self._ended_cpu_s = self._cpu_s()
        self._frames = None
        return self._end()


def _encode_request(request: RenderRequest) -> bytes:
    """Raises RequestError, naming the field, for an integer of more than 64 bits, which JSON allows."""
    try:
        return encode(request)
    except OverflowError:
        fields = {"chat_template_kwargs": request.arguments, "tools": request.tools, "messages": request.conversation}
        for name, value in fields.items():
            try:
                encode(value)
            except OverflowError as error:
                raise refused(f"{name}: {error}", name) from error
        raise


def _start_process(fd: int) -> "subprocess.Popen[bytes]":
    # -P keeps the current folder off the module path, so this package's folder has to be put there.
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tokenbus.protocol.prompt.renderer_process", str(fd)],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env=child_environment(PYTHONPATH=path),
    )


def _end_process(process: "subprocess.Popen[bytes]", end: socket.socket) -> int:
    """Kills the process if it still runs, and returns its exit status."""
    end.close()
    process.kill()
    return process.wait()


def _wait_until(end: socket.socket, pid: int, event: int) -> None:
    """Waits until a process has sent something, or has made room, however busy the machine is: a template is limited by
    CPU time.

    Raises TimeoutError if the process got no CPU time at all for a while and so may never respond."""
    poll = select.poll()
    poll.register(end, event)
    used_s = _cpu_s_of(pid)
    while not poll.poll(limits.RENDER_STALL_S * 1e3):
        before_s, used_s = used_s, _cpu_s_of(pid)
        if used_s == before_s:
            raise TimeoutError(f"the renderer process got no CPU time for {limits.RENDER_STALL_S:g} s")


def _cpu_s_of(pid: int) -> float:
    # The clock that clock_getcpuclockid(3) returns; the process may have ended but has not been reaped.
    return time.clock_gettime(~pid << 3 | 2)


def refused(message: str, param: str = "messages") -> errors.RequestError:
    return errors.request_error(errors.Code.INVALID_REQUEST, message, param=param)
