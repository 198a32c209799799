"""`tokenbus generate`, `embed`, `rerank` and `cancel`: one request each."""

import argparse
import asyncio
import sys
from functools import partial
from typing import Any

import msgspec

from tokenbus.cli.console import answers, arguments, connection_flags, session
from tokenbus.cli.console.session import EXIT_INTERRUPTED, decode_utf8, print_error, with_client
from tokenbus.client.wire.chunk_stream import ChunkStream
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.process import shutdown
from tokenbus.protocol.wire import codec, messages
from tokenbus.protocol.wire.checks import pooling

_CANCEL_TIMEOUT_S = 2.0
"""Time that a cancelled stream has to end."""
_REQUEST_FIELDS = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("seed", "stop", "ignore_eos", "id", "timeout_ms", "session_id"),
)
"""Options that are fields of a request under the same name."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    connection_flags.add_client_flags(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="the text; - reads standard input")
    session.add_model_flag(parser)
    parser.add_argument("--raw", action="store_true", help="send the text as it is, without the chat template")
    add_sampling_flags(parser)
    answers.add_form_flags(parser)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="text that ends the answer; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", default=None, help="continue past the end token")
    parser.add_argument("--id", help="the request's id")
    parser.add_argument("--session-id", metavar="ID", help="the conversation that it belongs to")
    parser.add_argument("--keep-s", type=float, metavar="S", help="keep its prefix in the cache this long; 0: drop it")
    parser.add_argument("--timeout-ms", type=float, help="time limit of the request")
    parser.add_argument("--json", action="store_true", help="print the raw messages, one per line")
    parser.set_defaults(run=lambda options: with_client(options, partial(_generate, options)))


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `generate` and `chat` share."""
    parser.add_argument("--system", metavar="TEXT", help="system message to begin with")
    parser.add_argument("--max-tokens", type=int, help="length of the answer; 0: only compute and cache the prompt")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--seed", type=int)
    answers.add_thinking_flags(parser)


def add_embed_flags(parser: argparse.ArgumentParser) -> None:
    connection_flags.add_client_flags(parser)
    session.add_model_flag(parser)
    parser.add_argument("--dimensions", type=arguments.whole(1), help="length of each vector (the model's own)")
    parser.add_argument("--no-normalize", action="store_true", help="do not scale vectors to length 1")
    parser.add_argument("--timeout-ms", type=float, help="time to wait for the answer (60,000)")
    parser.add_argument(
        "texts", metavar="TEXT", nargs="+", help="a text; a single - reads standard input, one text per line"
    )
    parser.set_defaults(run=lambda options: with_client(options, partial(_embed, options)))


def add_rerank_flags(parser: argparse.ArgumentParser) -> None:
    connection_flags.add_client_flags(parser)
    session.add_model_flag(parser)
    parser.add_argument("--top-n", type=arguments.whole(1), metavar="N", help="number of results (all texts)")
    parser.add_argument("--timeout-ms", type=float, help="time to wait for the answer (60,000)")
    parser.add_argument("query", metavar="QUERY", help="the query")
    parser.add_argument(
        "texts", metavar="TEXT", nargs="+", help="a text; a single - reads standard input, one text per line"
    )
    parser.set_defaults(run=lambda options: with_client(options, partial(_rerank, options)))


def add_cancel_flags(parser: argparse.ArgumentParser) -> None:
    connection_flags.add_client_flags(parser)
    parser.add_argument("request_id", metavar="ID", help="the request's id")
    parser.set_defaults(run=lambda options: with_client(options, partial(_cancel, options)))


def add_session_flags(parser: argparse.ArgumentParser) -> None:
    connection_flags.add_client_flags(parser)
    parser.add_argument("session_id", metavar="ID", help="the session_id of its requests")
    session.add_model_flag(parser)
    wish = parser.add_mutually_exclusive_group(required=True)
    wish.add_argument("--keep-s", type=float, metavar="S", help="keep its cached prefixes this long")
    wish.add_argument("--end", action="store_true", help="the session has ended: evict what only it has cached first")
    parser.set_defaults(run=lambda options: with_client(options, partial(_hint, options)))


def request_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the request fields that were set by flags."""
    given = {name: value for name in _REQUEST_FIELDS if (value := getattr(options, name, None)) is not None}
    if (keep_s := getattr(options, "keep_s", None)) is not None:
        given["cache_control"] = {"ttl_ms": 1e3 * keep_s}
    return given | answers.thinking_fields(options)


async def _generate(options: argparse.Namespace, client: WireClient) -> int:
    text = decode_utf8(sys.stdin.buffer.read(), "standard input") if options.prompt == "-" else options.prompt
    if not text:
        raise ValueError("the prompt is empty")
    fields = request_fields(options) | answers.form_fields(options)
    if options.raw:
        fields["prompt"] = text
    else:
        system = [{"role": "system", "content": options.system}] if options.system else []
        fields["messages"] = [*system, {"role": "user", "content": text}]
    stream = client.generate(await session.model_of(options, client, "generate"), **fields)
    task = asyncio.current_task()
    assert task is not None

    def stop() -> None:
        stream.cancel()
        asyncio.get_running_loop().call_later(_CANCEL_TIMEOUT_S, task.cancel)

    with shutdown.on_stop(stop):
        terminal = await _print_messages(stream) if options.json else (await answers.print_stream(stream))[0]
    if terminal.finish_reason is messages.FinishReason.CANCELLED:
        return EXIT_INTERRUPTED
    return 1 if terminal.error else 0


async def _print_messages(stream: ChunkStream) -> messages.Chunk:
    async for chunk in stream:
        print(codec.encode(chunk, codec.Encoding.JSON).decode(), flush=True)
    return chunk


async def _embed(options: argparse.Namespace, client: WireClient) -> int:
    texts = _texts(options)
    request = messages.EmbedRequest(
        input=[*texts],
        dimensions=options.dimensions,
        normalize=not options.no_normalize,
        timeout_ms=options.timeout_ms,
    )
    model = await session.model_of(options, client, "embed")
    reply = await client.embed(model, request, timeout_s=_timeout_s(options))
    for row in reply.embeddings or []:
        print(msgspec.json.encode(row).decode())
    tokens = reply.usage.prompt_tokens if reply.usage else 0
    print(f"[{len(texts)} embeddings of {tokens} tokens]", file=sys.stderr)
    return 0


async def _rerank(options: argparse.Namespace, client: WireClient) -> int:
    texts = _texts(options)
    request = messages.RerankRequest(
        query=options.query, documents=texts, top_n=options.top_n, timeout_ms=options.timeout_ms
    )
    reply = await client.rerank(
        await session.model_of(options, client, "rerank"), request, timeout_s=_timeout_s(options)
    )
    for result in reply.results or []:
        print(f"{result.relevance_score:.6g}\t{texts[result.index]}")
    tokens = reply.usage.prompt_tokens if reply.usage else 0
    print(f"[{len(texts)} documents of {tokens} tokens]", file=sys.stderr)
    return 0


def _timeout_s(options: argparse.Namespace) -> float:
    """Returns one second more than the request has, so that its own error comes first."""
    return (options.timeout_ms or pooling.DEFAULT_TIMEOUT_MS) / 1e3 + 1


def _texts(options: argparse.Namespace) -> list[str]:
    """Returns the texts of the command line, or the lines of standard input."""
    if options.texts == ["-"]:
        return decode_utf8(sys.stdin.buffer.read(), "standard input").splitlines()
    return list(options.texts)


async def _hint(options: argparse.Namespace, client: WireClient) -> int:
    model = await session.model_of(options, client, "generate")
    if options.end:
        await client.end_session(model, options.session_id)
    else:
        await client.keep_session(model, options.session_id, options.keep_s)
    print(f"the workers of {model} were told")
    return 0


async def _cancel(options: argparse.Namespace, client: WireClient) -> int:
    if await client.cancel(options.request_id):
        print(f"{options.request_id} is cancelled")
        return 0
    return print_error(f"no worker or router has a request {options.request_id}")
