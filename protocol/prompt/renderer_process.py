"""The renderer process: reads a template, then renders conversations until its parent hangs up (`rendering.py`)."""

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

import msgspec

from tokenbus.protocol.prompt.rendering import RendererSetup, RenderRequest, RenderResult, encode, refused
from tokenbus.protocol.prompt.special_tokens import SpecialTokens
from tokenbus.protocol.prompt.template import ChatTemplate
from tokenbus.protocol.wire import errors, limits

_setup_decoder = msgspec.msgpack.Decoder(RendererSetup)
_request_decoder = msgspec.msgpack.Decoder(RenderRequest)


def main() -> None:
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _serve(Connection(int(sys.argv[1])))


def _serve(connection: Connection) -> None:
    # Address space, since resident memory can't be limited; and no core dump, which would hold conversations.
    resource.setrlimit(resource.RLIMIT_AS, (limits.RENDER_BYTES, limits.RENDER_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setup = _setup_decoder.decode(connection.recv_bytes())
    with _cpu_limit(setup.cpu_s):
        try:
            special = SpecialTokens(setup.special_tokens)
            template = ChatTemplate(setup.source, special, setup.bos_token, setup.eos_token)
        except ValueError as error:
            connection.send_bytes(encode(RenderResult(template_error=str(error))))
            return
    connection.send_bytes(encode(RenderResult()))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # whatever a template makes it print would end up in the parent's log
    while True:
        body = connection.recv_bytes()
        # The parent tokenizes the prompt without these limits, so it must not be much longer than its conversation.
        max_chars = limits.MAX_TEMPLATE_BYTES + limits.RENDERED_GROWTH * len(body)
        with _cpu_limit(setup.cpu_s):
            result = encode(_rendered(template, _request_decoder.decode(body), max_chars))
        connection.send_bytes(result)


@contextlib.contextmanager
def _cpu_limit(cpu_s: float) -> Iterator[None]:
    """Ends the process if the block uses more CPU time: nothing handles SIGPROF, so the kernel ends it at once."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def _rendered(template: ChatTemplate, request: RenderRequest, max_chars: int) -> RenderResult:
    try:
        pieces = template.render(request.conversation, request.arguments, request.tools)
    except errors.RequestError as error:
        return RenderResult(error=error.error)
    size = sum(len(piece) for piece in pieces if isinstance(piece, str))
    if size > max_chars:
        problem = f"the model's chat template made {size} characters of the messages; the limit is {max_chars}"
        return RenderResult(error=refused(problem).error)
    return RenderResult(pieces=pieces)


if __name__ == "__main__":
    main()
