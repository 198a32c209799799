"""Renders chat templates in a process of their own: a template is a program that came with a model.

The sandbox keeps it from the machine, but not from computing for ever, or from filling all memory with a single
expression. So the process that renders is given little of both, and is ended by the kernel where it wants more."""

import contextlib
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import structlog

from tokenbus.protocol.prompt.template import ChatTemplate, SpecialTokens
from tokenbus.protocol.wire import errors, limits, messages

PromptPieces = list[str | int]
"""Of a prompt: special token ids, and the plain texts between them."""

_SIZE = struct.Struct("<Q")


class RendererSetup(msgspec.Struct, frozen=True, kw_only=True):
    """A template, and the special tokens that it may write."""

    source: str
    special_tokens: dict[str, int]
    bos_token: str = ""
    eos_token: str = ""
    cpu_s: float = limits.RENDER_CPU_S
    """For one conversation, or to compile it."""


class RenderRequest(msgspec.Struct, frozen=True, kw_only=True):
    conversation: list[messages.ChatMessage]
    arguments: dict[str, Any] | None = None


class RenderResult(msgspec.Struct, frozen=True, kw_only=True):
    pieces: PromptPieces = []
    error: errors.Error | None = None
    template_error: str = ""
    """Why the template can't be used at all."""


_encode = msgspec.msgpack.Encoder().encode
_setups = msgspec.msgpack.Decoder(RendererSetup)
_jobs = msgspec.msgpack.Decoder(RenderRequest)
_answers = msgspec.msgpack.Decoder(RenderResult)


class RenderTimeoutError(Exception):
    """A template took more time than it has."""


class Renderer:
    """Renders one template. Safe to use from several threads, which take turns; blocks for as long as it takes."""

    def __init__(self, setup: RendererSetup) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._end: Callable[[], int | None] = lambda: None
        self._template_error = ""
        """Why the template can never be used; nobody tries again."""

    def __repr__(self) -> str:
        return f"<Renderer {'not started' if self._socket is None else 'started'}>"

    def start(self) -> None:
        """Has its process at hand. Raises ValueError for a template that is malformed, and OSError where there can be
        no process now."""
        with self._lock:
            self._open()

    def render(self, conversation: list[messages.ChatMessage], arguments: dict[str, Any] | None) -> PromptPieces:
        """Raises RequestError: invalid_request where the template refuses the conversation or takes too much of the
        machine for it, unsupported where it is malformed, internal where there can be no process now."""
        try:
            job = _encode(RenderRequest(conversation=conversation, arguments=arguments))
        except OverflowError as error:
            raise _refused(f"chat_template_kwargs: {error}", "chat_template_kwargs") from error
        with self._lock:
            try:
                answer = self._answer(job)
            except ValueError as error:
                raise errors.request_error(errors.Code.UNSUPPORTED, str(error), param="messages") from error
            except RenderTimeoutError as error:
                raise _refused(f"the model's chat template took more than {self._setup.cpu_s:g} s for them") from error
            except OSError as error:
                raise errors.request_error(errors.Code.INTERNAL, f"the chat template: {error}") from error
        if answer.error is not None:
            raise errors.RequestError(answer.error)
        return answer.pieces

    def close(self) -> None:
        """Ends its process. The next render starts another."""
        with self._lock:
            self._close()

    def _answer(self, job: bytes) -> RenderResult:
        """Raises ValueError, RenderTimeoutError and OSError. A process that was killed is no fault of the
        conversation's."""
        try:
            return self._ask(self._open(), job)
        except OSError as error:
            structlog.get_logger().warning("renderer_died", error=str(error))
            return self._ask(self._open(), job)

    def _open(self) -> socket.socket:
        """Raises ValueError for a malformed template, and OSError."""
        if self._template_error:
            raise ValueError(self._template_error)
        if self._socket is not None:
            return self._socket
        ours, theirs = socket.socketpair()
        ours.settimeout(limits.RENDER_WALL_S)
        with theirs:
            process = _start_process(theirs)
        self._socket = ours
        self._end = weakref.finalize(self, _end_process, process, ours)
        try:
            self._template_error = self._ask(ours, _encode(self._setup)).template_error
        except RenderTimeoutError:
            self._template_error = f"the chat template takes more than {self._setup.cpu_s:g} s to be compiled"
        if self._template_error:
            self._close()
            raise ValueError(self._template_error)
        return ours

    def _ask(self, sock: socket.socket, body: bytes) -> RenderResult:
        """One answer. Raises RenderTimeoutError, and OSError where its process came to another end; there is none
        then."""
        try:
            _send(sock, body)
            return _answers.decode(_receive(sock))
        except TimeoutError as error:  # a machine so busy that the kernel's own limit was not reached
            self._close()
            raise RenderTimeoutError from error
        except OSError as error:
            status = self._close()
            if status == -signal.SIGPROF:
                raise RenderTimeoutError from error
            raise OSError(f"the process that renders ended with status {status}") from error

    def _close(self) -> int | None:
        """The status of its process."""
        self._socket = None
        return self._end()


def _start_process(theirs: socket.socket) -> "subprocess.Popen[bytes]":
    """This package, wherever the process was started: its own folder says nothing."""
    root = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tokenbus.protocol.prompt.rendering", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": path},
    )


def _end_process(process: "subprocess.Popen[bytes]", sock: socket.socket) -> int:
    """The status of a process that has ended, or is ended now."""
    sock.close()
    process.kill()
    return process.wait()


def _refused(message: str, param: str = "messages") -> errors.RequestError:
    return errors.request_error(errors.Code.INVALID_REQUEST, message, param=param)


def _send(sock: socket.socket, body: bytes) -> None:
    sock.sendall(_SIZE.pack(len(body)) + body)


def _receive(sock: socket.socket) -> bytes:
    """The next body. Raises ConnectionResetError where there will be none."""
    (size,) = _SIZE.unpack(_exactly(sock, _SIZE.size))
    return _exactly(sock, size)


def _exactly(sock: socket.socket, size: int) -> bytes:
    body = bytearray()
    while len(body) < size:
        part = sock.recv(min(size - len(body), 1 << 20))
        if not part:
            raise ConnectionResetError("the other side has hung up")
        body += part
    return bytes(body)


def main() -> None:
    """The process that renders: a template first, then one conversation after another, until its parent hangs up."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        _serve(socket.socket(fileno=int(sys.argv[1])))


def _serve(sock: socket.socket) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (limits.RENDER_BYTES, limits.RENDER_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setup = _setups.decode(_receive(sock))
    with _cpu_limit(setup.cpu_s):
        try:
            special = SpecialTokens(setup.special_tokens)
            template = ChatTemplate(setup.source, special, setup.bos_token, setup.eos_token)
        except ValueError as error:
            _send(sock, _encode(RenderResult(template_error=str(error))))
            return
    _send(sock, _encode(RenderResult()))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what it wrote there would stand in its parent's log
    while True:
        body = _receive(sock)
        most = limits.MAX_TEMPLATE_BYTES + limits.RENDERED_GROWTH * len(body)
        with _cpu_limit(setup.cpu_s):
            answer = _encode(_rendered(template, _jobs.decode(body), most))
        _send(sock, answer)


@contextlib.contextmanager
def _cpu_limit(cpu_s: float) -> Iterator[None]:
    """Ends the process where more CPU time is used: the signal can't be caught by what is being computed."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def _rendered(template: ChatTemplate, job: RenderRequest, max_chars: int) -> RenderResult:
    try:
        pieces = template.render(job.conversation, job.arguments)
    except errors.RequestError as error:
        return RenderResult(error=error.error)
    size = sum(len(piece) for piece in pieces if isinstance(piece, str))
    if size > max_chars:
        problem = f"the model's chat template made {size} characters of them; {max_chars} may be"
        return RenderResult(error=_refused(problem).error)
    return RenderResult(pieces=pieces)


if __name__ == "__main__":
    main()
