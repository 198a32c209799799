"""Renders chat templates in a process of their own: a template is a program that came with a model.

The sandbox keeps it from the machine, but not from computing for ever, or from filling all memory with a single
expression. So the process that renders is given little of both, and is ended by the kernel where it wants more."""

import contextlib
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from protocol import errors, limits, messages
from protocol.template import ChatTemplate, SpecialTokens

Pieces = list[str | int]
"""Of a prompt: special token ids, and the plain texts between them."""

_SIZE = struct.Struct("<Q")


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """A template, and the special tokens that it may write."""

    source: str
    special_tokens: dict[str, int]
    bos_token: str = ""
    eos_token: str = ""
    cpu_s: float = limits.RENDER_CPU_S
    """For one conversation, or to compile it."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    conversation: list[messages.ChatMessage]
    arguments: dict[str, Any] | None = None


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    pieces: Pieces = []
    error: errors.Error | None = None
    malformed: str | None = None
    """Why the template can't be used at all."""


_encode = msgspec.msgpack.Encoder().encode
_setups = msgspec.msgpack.Decoder(Setup)
_jobs = msgspec.msgpack.Decoder(Job)
_answers = msgspec.msgpack.Decoder(Rendered)


class Renderer:
    """Renders one template. Safe to use from several threads, which take turns; blocks for as long as it takes."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._end: Callable[[], object] = lambda: None

    def __repr__(self) -> str:
        return f"<Renderer {'not started' if self._socket is None else 'started'}>"

    def start(self) -> None:
        """Has its process at hand. Raises ValueError for a template that is malformed."""
        with self._lock:
            self._open()

    def render(self, conversation: list[messages.ChatMessage], arguments: dict[str, Any] | None) -> Pieces:
        """Raises RequestError(invalid_request) where the template refuses the conversation or takes too much of the
        machine for it, and RequestError(unsupported) where it is malformed."""
        try:
            job = _encode(Job(conversation=conversation, arguments=arguments))
        except OverflowError as error:
            raise _refused(f"chat_template_kwargs: {error}", "chat_template_kwargs") from error
        with self._lock:
            try:
                answer = self._ask(self._open(), job)
            except ValueError as error:
                raise errors.request_error(errors.Code.UNSUPPORTED, str(error), param="messages") from error
        if answer.error is not None:
            raise errors.RequestError(answer.error)
        return answer.pieces

    def close(self) -> None:
        """Ends its process. The next render starts another."""
        with self._lock:
            self._close()

    def _open(self) -> socket.socket:
        """Raises ValueError for a malformed template."""
        if self._socket is not None:
            return self._socket
        ours, theirs = socket.socketpair()
        ours.settimeout(limits.RENDER_WALL_S)
        process = subprocess.Popen(
            [sys.executable, "-m", "protocol.rendering", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._socket = ours
        self._end = weakref.finalize(self, _ended, process, ours)
        theirs.close()
        answer = self._ask(ours, _encode(self._setup))
        if answer.malformed or answer.error:
            self._close()
            raise ValueError(answer.malformed or (answer.error.message if answer.error else ""))
        return ours

    def _ask(self, sock: socket.socket, body: bytes) -> Rendered:
        """One answer; where its process came to an end over it, that."""
        try:
            _send(sock, body)
            answer = _receive(sock)
        except OSError:  # the time-out included: a machine so busy that the kernel's own limit was not reached
            answer = None
        if answer is not None:
            return _answers.decode(answer)
        self._close()
        most = f"{self._setup.cpu_s:g} s or {limits.RENDER_BYTES >> 20} MiB"
        return Rendered(error=_refused(f"the model's chat template took more than {most} for them").error)

    def _close(self) -> None:
        self._end()
        self._socket = None


def _ended(process: subprocess.Popen[bytes], sock: socket.socket) -> None:
    sock.close()
    process.kill()
    process.wait()


def _refused(message: str, param: str = "messages") -> errors.RequestError:
    return errors.request_error(errors.Code.INVALID_REQUEST, message, param=param)


def _send(sock: socket.socket, body: bytes) -> None:
    sock.sendall(_SIZE.pack(len(body)) + body)


def _receive(sock: socket.socket) -> bytes | None:
    """The next body; None where there will be none."""
    head = sock.recv(_SIZE.size, socket.MSG_WAITALL)
    if len(head) < _SIZE.size:
        return None
    (size,) = _SIZE.unpack(head)
    body = bytearray()
    while len(body) < size:
        part = sock.recv(min(size - len(body), 1 << 20))
        if not part:
            return None
        body += part
    return bytes(body)


def main() -> None:
    """The process that renders: a template first, then one conversation after another, until its parent hangs up."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        _serve(socket.socket(fileno=int(sys.argv[1])))


def _serve(sock: socket.socket) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (limits.RENDER_BYTES, limits.RENDER_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setup = _setups.decode(_receive(sock) or b"")
    with _bounded(setup.cpu_s):
        try:
            special = SpecialTokens(setup.special_tokens)
            template = ChatTemplate(setup.source, special, setup.bos_token, setup.eos_token)
        except ValueError as error:
            _send(sock, _encode(Rendered(malformed=str(error))))
            return
    _send(sock, _encode(Rendered()))
    while (body := _receive(sock)) is not None:
        with _bounded(setup.cpu_s):
            answer = _encode(_rendered(template, _jobs.decode(body)))
        _send(sock, answer)


@contextlib.contextmanager
def _bounded(cpu_s: float) -> Iterator[None]:
    """Ends the process where more CPU time is used: the signal can't be caught by what is being computed."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def _rendered(template: ChatTemplate, job: Job) -> Rendered:
    try:
        pieces = template.render(job.conversation, job.arguments)
    except errors.RequestError as error:
        return Rendered(error=error.error)
    size = sum(len(piece) for piece in pieces if isinstance(piece, str))
    if size > limits.MAX_RENDERED_CHARS:
        problem = f"the model's chat template made {size} characters of them; {limits.MAX_RENDERED_CHARS} may be"
        return Rendered(error=_refused(problem).error)
    return Rendered(pieces=pieces)


if __name__ == "__main__":
    main()
