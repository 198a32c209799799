"""`tokenbus generate`, `embed`, `rerank` and `cancel`: one request each."""

import argparse
import asyncio
import secrets
import sys
from functools import partial
from typing import Any

import msgspec

from tokenbus.cli.console import answers, connection_flags, session
from tokenbus.cli.console.arguments import NAME, PATH, SECONDS, SWITCH, TEXT, ArgumentType, above, real, text, whole
from tokenbus.cli.console.flags import FlagGroup, Parser, dest_of
from tokenbus.cli.console.session import EXIT_INTERRUPTED, decode_utf8, print_error, with_client
from tokenbus.client.wire import embedding
from tokenbus.client.wire.chunk_stream import ChunkStream
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.process import signals
from tokenbus.protocol.wire import codec, limits, messages
from tokenbus.protocol.wire.params import DEFAULTS, GenerationParams, ranges_of

_CANCEL_TIMEOUT_S = 2.0
"""Time that a cancelled stream has to end."""
_RANGES = ranges_of(GenerationParams)
_SAMPLING = (
    ("--temperature --temp", "randomness; 0: always the likeliest token", DEFAULTS.temperature),
    ("--top-p", "sample among the likeliest tokens that add up to this", DEFAULTS.top_p),
    ("--top-k", "sample among this many tokens; 0: off", DEFAULTS.top_k),
    ("--min-p", "drop tokens below this share of the likeliest one's; 0: off", DEFAULTS.min_p),
    ("--seed -s", "a number that makes an answer repeatable", "random"),
    ("--repetition-penalty --repeat-penalty", "divide recent tokens' logits by this", DEFAULTS.repetition_penalty),
    ("--repetition-last-n --repeat-last-n", "how many tokens are recent", "64"),
    ("--presence-penalty", "subtract from the logits of recent tokens", "0"),
    ("--frequency-penalty", "subtract from them for each time that they occur", "0"),
)
_WHOLE = ("max_tokens", "top_k", "seed", "repetition_last_n")
_REQUEST_FIELDS = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "repetition_last_n"),
    *("presence_penalty", "frequency_penalty", "stop", "ignore_eos", "id", "timeout_ms", "session_id"),
)
"""Options that are fields of a request under the same name."""
_TEXTS = "a text; a single - reads standard input, one text per line"


def add_flags(parser: Parser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the text; - reads standard input")
    flag = add_chat_flags(parser)
    flag("--raw", SWITCH, "send the text as it is, without the chat template")
    flag("--stop -r --reverse-prompt", TEXT, "text that ends the answer", [])
    flag("--ignore-eos", SWITCH, "continue past the end token")
    flag("--tools", PATH, "tools that may be called: a JSON array in the form of OpenAI's API")
    flag("--tool-choice", text("CHOICE"), "auto, required, none or the name of a tool", unset="auto")
    flag("--id", NAME, "the request's id", unset="random")
    flag("--session-id", NAME, "the conversation that it belongs to")
    flag("--keep-s", SECONDS, "keep its prefix in the cache this long; 0: drop it", unset="as others")
    flag("--timeout-ms", above(0, metavar="MS"), "time limit of the request", unset="no limit")
    flag("--json", SWITCH, "print the raw messages, one per line")
    answers.add_form_flags(parser)
    add_sampling_flags(parser)
    parser.set_defaults(run=lambda options: with_client(options, partial(_generate, options)))


def add_chat_flags(parser: Parser) -> FlagGroup:
    """Adds the flags that `generate` and `chat` share; returns a group for more."""
    flag = parser.group("request")
    flag.add(session.MODEL)
    flag("--system -sys --system-prompt", TEXT, "system message to begin with")
    length = "length of the answer; 0: only compute and cache the prompt"
    flag("--max-tokens -n --predict --n-predict", _kind("max_tokens"), length, unset="the worker's --max-new-tokens")
    return flag


def add_sampling_flags(parser: Parser) -> None:
    """Adds the last flags that `generate` and `chat` share. Their ranges are those of the request's fields."""
    flag = parser.group("sampling")
    for names, meaning, default in _SAMPLING:
        unset = default if isinstance(default, str) else f"the model's own, else {default:g}"
        flag(names, _kind(dest_of(names)), meaning, unset=unset)
    answers.add_thinking_flags(parser)
    connection_flags.add_flags(parser)


def _kind(field: str) -> ArgumentType:
    low, most, is_above = _RANGES[field]
    high = None if most == limits.MAX_TOKENS else most
    if field in _WHOLE:
        return whole(int(low), None if high is None else int(high))
    return above(low, high) if is_above else real(low, high)


def add_embed_flags(parser: Parser) -> None:
    parser.add_argument("texts", metavar="TEXT", nargs="+", help=_TEXTS)
    flag = _add_text_flags(parser)
    flag("--dimensions", whole(1), "length of each vector", unset="the model's own")
    flag("--no-normalize", SWITCH, "do not scale vectors to length 1")
    connection_flags.add_flags(parser)
    parser.set_defaults(run=lambda options: with_client(options, partial(_embed, options)))


def add_rerank_flags(parser: Parser) -> None:
    parser.add_argument("query", metavar="QUERY", help="the query")
    parser.add_argument("texts", metavar="TEXT", nargs="+", help=_TEXTS)
    flag = _add_text_flags(parser)
    flag("--top-n", whole(1), "number of results", unset="all texts")
    connection_flags.add_flags(parser)
    parser.set_defaults(run=lambda options: with_client(options, partial(_rerank, options)))


def _add_text_flags(parser: Parser) -> FlagGroup:
    flag = parser.group("request")
    flag.add(session.MODEL)
    flag(
        "--timeout-ms",
        above(0, metavar="MS"),
        "time to wait for the answer",
        unset=f"{limits.DEFAULT_CALL_TIMEOUT_MS:g}",
    )
    return flag


def add_cancel_flags(parser: Parser) -> None:
    parser.add_argument("request_id", metavar="ID", help="the request's id")
    connection_flags.add_flags(parser)
    parser.set_defaults(run=lambda options: with_client(options, partial(_cancel, options)))


def add_session_flags(parser: Parser) -> None:
    parser.add_argument("session_id", metavar="ID", help="the session_id of its requests")
    parser.group("session").add(session.MODEL)
    flag = parser.group("what to do (one of these)", exclusive=True, required=True)
    flag("--keep-s", SECONDS, "keep its cached prefixes this long")
    flag("--end", SWITCH, "the session has ended: evict what only it has cached first")
    connection_flags.add_flags(parser)
    parser.set_defaults(run=lambda options: with_client(options, partial(_hint, options)))


def request_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the request fields that were set by flags."""
    values = {name: getattr(options, name, None) for name in _REQUEST_FIELDS}
    given = {name: value for name, value in values.items() if value is not None and value is not False and value != []}
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

    with signals.on_stop(stop):
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
        id=secrets.token_urlsafe(16),
        input=[*texts],
        dimensions=options.dimensions,
        normalize=not options.no_normalize,
        timeout_ms=options.timeout_ms,
    )
    model = await session.model_of(options, client, "embed")
    reply = await embedding.embed(client, model, request)
    for row in reply.embeddings or []:
        print(msgspec.json.encode(row).decode())
    tokens = reply.usage.prompt_tokens if reply.usage else 0
    print(f"[{_counted(len(texts), 'embedding')} of {_counted(tokens, 'token')}]", file=sys.stderr)
    return 0


async def _rerank(options: argparse.Namespace, client: WireClient) -> int:
    texts = _texts(options)
    request = messages.RerankRequest(
        query=options.query, documents=texts, top_n=options.top_n, timeout_ms=options.timeout_ms
    )
    reply = await client.rerank(await session.model_of(options, client, "rerank"), request)
    for result in reply.results or []:
        print(f"{result.relevance_score:.6g}\t{texts[result.index]}")
    tokens = reply.usage.prompt_tokens if reply.usage else 0
    print(f"[{_counted(len(texts), 'document')} of {_counted(tokens, 'token')}]", file=sys.stderr)
    return 0


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


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
