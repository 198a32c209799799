"""The renderer process: reads a template, then renders conversations until its parent closes the connection
(`rendering.py`)."""

import tokenbus.protocol.process.lean_imports  # isort: skip  # noqa: F401  # before structlog

import contextlib
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator

import msgspec

from tokenbus.protocol.process import memory
from tokenbus.protocol.prompt.rendering import Frames, RendererSetup, RenderRequest, RenderResult, encode, refused
from tokenbus.protocol.prompt.special_tokens import SpecialTokens
from tokenbus.protocol.prompt.template import ChatTemplate
from tokenbus.protocol.wire import errors, limits

_setup_decoder = msgspec.msgpack.Decoder(RendererSetup)
_request_decoder = msgspec.msgpack.Decoder(RenderRequest)
_LEAST_CPU_S = 1e-3


def main() -> None:
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _serve(Frames(socket.socket(fileno=int(sys.argv[1]))))


def _serve(parent: Frames) -> None:
    # Address space, since resident memory can't be limited; and no core dump, which would hold conversations.
    resource.setrlimit(resource.RLIMIT_AS, (limits.RENDER_BYTES, limits.RENDER_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setup = _setup_decoder.decode(parent.receive())
    with _cpu_limit(setup):
        try:
            special = SpecialTokens(setup.special_tokens)
            template = ChatTemplate(setup.source, special, setup.bos_token, setup.eos_token)
        except ValueError as error:
            parent.send(encode(RenderResult(template_error=str(error))))
            return
    parent.send(encode(RenderResult()))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # anything that a template prints would end up in the parent's log
    while True:
        body = parent.receive()
        with _cpu_limit(setup):
            result = _rendered(template, body)
        parent.send(encode(msgspec.structs.replace(result, kept_bytes=_kept_bytes())))


@contextlib.contextmanager
def _cpu_limit(setup: RendererSetup) -> Iterator[None]:
    """Ends the process if the block uses more CPU time: SIGPROF is unhandled, so the kernel ends it at once."""
    cpu_s = min(setup.cpu_s, setup.all_cpu_s - time.process_time())
    signal.setitimer(signal.ITIMER_PROF, max(cpu_s, _LEAST_CPU_S))  # zero would mean no limit
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def _kept_bytes() -> int:
    """Returns the memory that rendering has left in use, or 0 if that is no more than a renderer may keep."""
    if memory.resident_bytes() <= limits.RENDER_KEPT_BYTES:
        return 0
    memory.trim_heap()
    kept_bytes = memory.resident_bytes()
    return kept_bytes if kept_bytes > limits.RENDER_KEPT_BYTES else 0


def _rendered(template: ChatTemplate, body: bytes) -> RenderResult:
    request = _request_decoder.decode(body)
    try:
        pieces = template.render(request.conversation, request.arguments, request.tools, continues=request.continues)
    except errors.RequestError as error:
        return RenderResult(error=error.error)
    size = sum(len(piece) for piece in pieces if isinstance(piece, str))
    # The parent tokenizes the prompt without these limits, so it must not be much longer than its conversation.
    max_chars = limits.MAX_TEMPLATE_BYTES + limits.RENDERED_GROWTH * len(body)
    if size > max_chars:
        problem = f"the model's chat template made {size} characters of the messages; the limit is {max_chars}"
        return RenderResult(error=refused(problem).error)
    return RenderResult(pieces=pieces)


if __name__ == "__main__":
    main()
