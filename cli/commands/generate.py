"""The commands that are clients: `generate`, `embed`, `models`, `cancel`."""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from tokenbus.cli import connection_flags
from tokenbus.cli.supervisor import EXIT_BAD_SETTINGS
from tokenbus.client import Client, Stream
from tokenbus.protocol.process import shutdown
from tokenbus.protocol.telemetry import logs
from tokenbus.protocol.wire import codec, errors, messages
from tokenbus.protocol.wire import embeddings as embed_rules

EXIT_INTERRUPTED = 130
_TERMINAL_S = 2.0
"""How long a stream that was cancelled may take to end."""
_CONNECT_TIMEOUT_S = 2.0
REQUEST_FIELDS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "ignore_eos",
    "id",
    "timeout_ms",
)


Command = Callable[[argparse.Namespace, Client], Awaitable[int]]


def generate(options: argparse.Namespace) -> int:
    """Streams an answer to standard output; returns the exit status."""
    return with_client(options, _generate)


def embed(options: argparse.Namespace) -> int:
    """Prints the embedding of each text as a line of JSON; returns the exit status."""
    return with_client(options, _embed)


def models(options: argparse.Namespace) -> int:
    """Lists models and workers."""
    return with_client(options, _models)


def cancel(options: argparse.Namespace) -> int:
    """Cancels a request by its id."""
    return with_client(options, _cancel)


def with_client(options: argparse.Namespace, command: Command) -> int:
    """Runs a command with a client connected as the options say; what goes wrong is one line and a status."""
    logs.log_errors_only()
    try:
        settings = connection_flags.settings_of(options, _CONNECT_TIMEOUT_S)
    except ValueError as error:
        print_error(str(error))
        return EXIT_BAD_SETTINGS

    async def run() -> int:
        async with await Client.connect(tenant=options.tenant, prefix=options.prefix, settings=settings) as client:
            try:
                return await command(options, client)
            except errors.RequestError as error:
                model = getattr(options, "model", None)
                raise errors.RequestError(await with_served_models(client, model, error.error)) from error

    try:
        return asyncio.run(run())
    except BrokenPipeError:
        raise  # whoever reads our output has gone
    except asyncio.CancelledError:
        return EXIT_INTERRUPTED
    except (ConnectionError, ValueError) as error:
        return print_error(str(error))
    except errors.RequestError as error:
        return print_error(error_text(error.error))


async def _generate(options: argparse.Namespace, client: Client) -> int:
    stream = client.generate(options.model, **_fields(options))
    task = asyncio.current_task()
    assert task is not None

    def stop() -> None:
        stream.cancel()
        asyncio.get_running_loop().call_later(_TERMINAL_S, task.cancel)

    with shutdown.on_stop(stop):
        return await (_print_messages(stream) if options.json else _print_text(stream))


def _fields(options: argparse.Namespace) -> dict[str, Any]:
    text = decode_utf8(sys.stdin.buffer.read(), "standard input") if options.prompt == "-" else options.prompt
    if not text:
        raise ValueError("the prompt is empty")
    fields = {name: value for name in REQUEST_FIELDS if (value := getattr(options, name)) is not None}
    if options.raw:
        return fields | {"prompt": text}
    system = [{"role": "system", "content": options.system}] if options.system else []
    return fields | {"messages": [*system, {"role": "user", "content": text}]}


async def _print_messages(stream: Stream) -> int:
    reason = None
    async for chunk in stream:
        print(codec.encode(chunk, codec.Encoding.JSON).decode(), flush=True)
        reason = chunk.finish_reason
    return _status(reason)


async def _print_text(stream: Stream) -> int:
    began = False
    async for chunk in stream:
        began = began or bool(chunk.text)
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
        if chunk.finish_reason is not None:
            if began:
                print(flush=True)
            print_summary(chunk)
            return _status(chunk.finish_reason)
    raise AssertionError("a stream ends with a terminal")


def print_summary(terminal: messages.Chunk) -> None:
    """The line below the answer: on standard error, so that the answer can be piped. Raises RequestError where there is
    none."""
    if terminal.error:
        raise errors.RequestError(terminal.error)
    usage, timings = terminal.usage, terminal.timings
    counts = f", {usage.prompt_tokens} + {usage.completion_tokens} tokens" if usage else ""
    times = f", first after {timings.ttft_ms:.0f} ms, all in {timings.total_ms:.0f} ms" if timings else ""
    print(f"[{terminal.finish_reason}{counts}{times}, {terminal.worker_id or 'router'}]", file=sys.stderr)


def _status(reason: messages.FinishReason | None) -> int:
    if reason is messages.FinishReason.CANCELLED:
        return EXIT_INTERRUPTED
    return 1 if reason in (None, messages.FinishReason.ERROR) else 0


async def _embed(options: argparse.Namespace, client: Client) -> int:
    texts = options.texts
    if texts == ["-"]:
        texts = decode_utf8(sys.stdin.buffer.read(), "standard input").splitlines()
    request = messages.EmbedRequest(
        input=list(texts),
        dimensions=options.dimensions,
        normalize=not options.no_normalize,
        timeout_ms=options.timeout_ms,
    )
    reply = await client.embed(
        options.model, request, timeout_s=(options.timeout_ms or embed_rules.DEFAULT_TIMEOUT_MS) / 1e3 + 1
    )
    for row in reply.embeddings or []:
        print(msgspec.json.encode(row).decode())
    tokens = reply.usage.prompt_tokens if reply.usage else 0
    print(f"[{len(texts)} embeddings of {tokens} tokens]", file=sys.stderr)
    return 0


async def _models(options: argparse.Namespace, client: Client) -> int:
    reply = await client.models()
    if options.json:
        print(codec.encode(reply, codec.Encoding.JSON).decode())
        return 0
    table = Table("model", "context", "worker", "state", "engine", "running", "waiting", "features")
    for served in reply.models:
        for card in served.workers or []:
            load = card.load or messages.Load()
            numbers = (str(load.running), str(load.waiting))
            is_silent = card.watched is not None and card.watched.events == "silent"
            features = " ".join(card.features)
            table.add_row(
                served.model,
                str(served.context_length),
                card.worker_id,
                f"{card.state}, events silent" if is_silent else card.state,
                card.engine,
                *numbers,
                features,
            )
        if not served.workers:
            table.add_row(served.model, str(served.context_length))
    Console().print(table if reply.models else "no model is being served")
    for refused in reply.router.refused_cards if reply.router else []:
        print(f"refused: {refused.worker_id} of {refused.model}: {refused.reason}")
    return 0


async def _cancel(options: argparse.Namespace, client: Client) -> int:
    if await client.cancel(options.request_id):
        print(f"{options.request_id} is cancelled")
        return 0
    return print_error(f"nobody holds a request {options.request_id}")


def decode_utf8(data: bytes, what: str) -> str:
    """The text. Raises ValueError saying where it is none."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is not UTF-8: byte {error.start + 1} of it is {data[error.start]:#04x}") from error


async def with_served_models(client: Client, model: str | None, error: errors.Error) -> errors.Error:
    """The error; where the model is not served it says what is."""
    if model is None or error.code not in (errors.Code.MODEL_NOT_FOUND, errors.Code.NO_WORKER):
        return error
    try:
        names = [served.model for served in (await client.models(timeout_s=2.0)).models]
    except errors.RequestError:
        return error
    if model in names:
        return error
    return msgspec.structs.replace(error, message=f"{error.message}; what is served: {', '.join(names) or 'nothing'}")


def error_text(error: errors.Error) -> str:
    """What an error says to a person."""
    again = f" (try again in {error.retry_after_ms:.0f} ms)" if error.retry_after_ms else ""
    return f"{error.code}: {error.message}{again}"


def print_error(text: str) -> int:
    """Says what went wrong; returns the exit status."""
    print(f"tokenbus: {text}", file=sys.stderr)
    return 1
