"""`tokenbus trace`: where recent requests went and why, and what one of them waited for."""

import argparse
import datetime
from collections.abc import Sequence
from functools import partial

import msgspec

from tokenbus.cli.console import arguments, connection_flags, text_table
from tokenbus.cli.console.arguments import above, whole
from tokenbus.cli.console.flags import Parser, UsageError
from tokenbus.cli.console.plain_text import printable
from tokenbus.cli.console.session import print_error, with_client
from tokenbus.client.wire import trace_story
from tokenbus.client.wire.trace_reader import RoutedTrace, bare_id
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import messages, subjects
from tokenbus.protocol.wire.traces import MAX_TRACES, first_token_ms

_HEAD = ("received", "id", "model", "state", "workers", "prompt", "cached", "tokens", "first token", "in all")
_NUM_NAMES = 5


def add_trace_flags(parser: Parser) -> None:
    parser.add_argument("request_id", metavar="ID", nargs="?", help="the request to tell of; without, the last ones")
    flag = parser.group("which requests")
    flag("--failed", arguments.SWITCH, "only those that ended in an error")
    flag("--slower-than-ms", above(0, metavar="MS"), "only those whose first token came later", unset="all")
    flag("--limit", whole(1, MAX_TRACES), "the most requests to list", 20)
    flag("--json", arguments.SWITCH, "print JSON")
    connection_flags.add_flags(parser)
    parser.set_defaults(run=lambda options: _run(parser.prog, options))


def _run(prog: str, options: argparse.Namespace) -> int:
    if options.request_id is None:
        return with_client(options, partial(_list, options))
    if options.failed or options.slower_than_ms is not None:
        raise UsageError(prog, "--failed and --slower-than-ms are for lists, not for one request")
    if not subjects.is_request_id(bare_id(options.request_id)):
        raise UsageError(prog, "ID: this can't be the id of a request")
    return with_client(options, partial(_tell, options))


async def _list(options: argparse.Namespace, client: WireClient) -> int:
    asked = messages.TraceRequest(failed=options.failed, slower_than_ms=options.slower_than_ms, limit=options.limit)
    found = (await client.traces(asked)).requests[: options.limit]
    if options.json:
        for one in found:
            print(_json(one))
    elif found:
        print(table(found))
    else:
        print("the routers remember no such request of this tenant")
    return 0


async def _tell(options: argparse.Namespace, client: WireClient) -> int:
    request_id = bare_id(options.request_id)
    one = (await client.traces(messages.TraceRequest(id=request_id))).named(request_id)
    if one is None:
        return print_error(
            f"no router knows this request of the tenant {options.tenant}: each remembers its last 4,096 requests "
            "until it is restarted"
        )
    if options.json:
        print(_json(one))
    else:
        print(f"{printable(one.trace.id)}, a request for {printable(one.trace.model)}")
        for sentence in trace_story.story(one.trace, one.router_id):
            print(f"- {printable(sentence)}")
    return 0


def _json(one: RoutedTrace) -> str:
    told = {"router_id": one.router_id, "first_token_ms": first_token_ms(one.trace)}
    return msgspec.json.encode(told | msgspec.to_builtins(one.trace)).decode()


def table(found: Sequence[RoutedTrace]) -> str:
    """Returns a table with a line for each request, the latest first, times in local time and seconds."""
    rows = [_HEAD, *(_row(one.trace) for one in found)]
    return text_table.text_of(rows, right=range(_NUM_NAMES, len(_HEAD)))


def _row(trace: messages.RequestTrace) -> tuple[str, ...]:
    received = datetime.datetime.fromtimestamp(trace.received_at_ms / 1e3)
    workers = [attempt.worker_id for attempt in trace.attempts if attempt.accepted_ms is not None]
    first_ms = first_token_ms(trace)
    return (
        f"{received:%H:%M:%S}",
        printable(trace.id),
        printable(trace.model),
        printable(trace.code or trace.state),
        printable(" > ".join(workers)) or "-",
        *(f"{number:,}" for number in (trace.prompt_tokens, trace.cached_tokens, trace.completion_tokens)),
        *("-" if ms is None else f"{ms / 1e3:.2f} s" for ms in (first_ms, trace.total_ms)),
    )
