"""`tokenbus usage`: requests and tokens by day, tenant, key, model, adapter or operation."""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from tokenbus.cli.console import arguments, connection_flags, session, text_table
from tokenbus.cli.console.arguments import ArgumentType
from tokenbus.cli.console.flags import Parser, UsageError
from tokenbus.cli.console.plain_text import printable
from tokenbus.cli.console.session import EXIT_INTERRUPTED, print_error
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.access import usage
from tokenbus.protocol.access.usage import Counts, Dimension, UsageQuery, UsageRow
from tokenbus.protocol.access.usage_store import BUCKET, UsageReport, UsageStore
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.bus.bucket import Bucket, BucketError, BucketMissingError, bucket_name
from tokenbus.protocol.wire import subjects

_CONNECT_TIMEOUT_S = 2.0
_READ_TIMEOUT_S = 10.0
_NO_KEY = "-"
_NEEDS = "the broker needs JetStream, and room for it on its disk (max_file_store)"


class _NotKeptError(Exception):
    """There is no usage; the text says why."""


def _day(text: str) -> str:
    return usage.parse_day(text, usage.day_at(time.time()))


def _name(text: str) -> str:
    subjects.encode_name(text)
    return text


_DAY = ArgumentType(_day, "a day such as 2026-11-24, today, yesterday, or a number of days such as 7d", "DAY")
_GROUP_BY = ArgumentType(usage.parse_group_by, "", "NAME,NAME", f"some of {', '.join(usage.DIMENSIONS)}")
_NAME = ArgumentType(_name, "a name", "NAME")


def add_flags(parser: Parser) -> None:
    flag = parser.group("what to add up")
    flag("--from", _DAY, "the first day, in UTC; 7d: of the last seven", _day("7d"), unset="7d")
    flag("--to", _DAY, "the last day", _day("today"), unset="today")
    flag("--group-by", _GROUP_BY, "what has lines of its own", ("day", "tenant", "model"))
    flag("--tenant", _NAME, "only this tenant", unset="all")
    flag("--key", _NAME, f"only the key with this id; {_NO_KEY}: only requests without a key", unset="all")
    flag("--model", _NAME, "only this model", unset="all")
    flag = parser.group("display", exclusive=True)
    flag("--json", arguments.SWITCH, "print JSON")
    flag("--csv", arguments.SWITCH, "print CSV")
    parser.left_out = ("tenant",)
    connection_flags.add_flags(parser)
    parser.set_defaults(run=lambda options: _run(parser.prog, options))


def _run(prog: str, options: argparse.Namespace) -> int:
    first, last = vars(options)["from"], options.to
    try:
        usage.check_days(first, last)
    except ValueError as error:
        raise UsageError(prog, f"--from and --to: {error}") from error
    key = "" if options.key == _NO_KEY else options.key
    query = UsageQuery(first, last, options.group_by, options.tenant, key, options.model)
    session.log_errors_only()
    try:
        report = asyncio.run(_read(options, query))
    except BrokenPipeError:
        raise
    except asyncio.CancelledError:
        return EXIT_INTERRUPTED
    except _NotKeptError as error:
        return print_error(f"there is no usage: {printable(str(error))}")
    except BucketError as error:
        return print_error(f"usage can't be read: {error}")
    except (ConnectionError, ValueError) as error:
        return print_error(str(error))
    _print(options, query, report)
    return 0


async def _read(options: argparse.Namespace, query: UsageQuery) -> UsageReport:
    connection = await nats.connect(connection_flags.settings_of(options, _CONNECT_TIMEOUT_S), "tokenbus usage")
    try:
        bucket = Bucket(connection, bucket_name(options.prefix, BUCKET), _READ_TIMEOUT_S)
        return await UsageStore(bucket).report(query)
    except BucketMissingError as error:
        client = await WireClient.from_connection(connection, tenant=subjects.OPERATOR_TENANT, prefix=options.prefix)
        async with client.view_fleet() as viewer:
            raise _NotKeptError(_why_not_kept(await viewer.usage_problem())) from error
    finally:
        await connection.close()


def _why_not_kept(problem: str | None) -> str:
    """Returns why there is none, by what routers say of it; None if none answers."""
    if problem is None:
        return f"no router has kept any (router --usage), or {_NEEDS}; no router answers that would know"
    if problem:
        return f"routers can't save any ({problem}): {_NEEDS}, and then they save what they have counted"
    return "no router keeps any: start them with --usage"


def _print(options: argparse.Namespace, query: UsageQuery, report: UsageReport) -> None:
    if options.json:
        print(json.dumps(as_json(query, report), indent=2))
    elif options.csv:
        sys.stdout.write("".join(usage.csv_lines(query.group_by, report.rows)))
    elif report.rows:
        print(table(query.group_by, report.rows))
    else:
        print(f"nothing was used from {query.first_day} to {query.last_day}", file=sys.stderr)
    if report.num_unreadable:
        print(f"tokenbus: {report.num_unreadable} entries can't be read and are left out", file=sys.stderr)


def as_json(query: UsageQuery, report: UsageReport) -> dict[str, Any]:
    """Returns a report as programs read it."""
    total = usage.total_of(report.rows)
    return {
        "from": query.first_day,
        "to": query.last_day,
        "group_by": list(query.group_by),
        "data": [
            {name: usage.shown(name, value) for name, value in zip(query.group_by, row.group, strict=True)}
            | _counts(row.counts)
            for row in report.rows
        ],
        "total": _counts(total),
    }


def _counts(counts: Counts) -> dict[str, Any]:
    return {
        "requests": counts.requests,
        "prompt_tokens": counts.prompt_tokens,
        "cached_tokens": counts.cached_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.total_tokens,
        "errors": counts.errors,
    }


def table(group_by: tuple[Dimension, ...], rows: Sequence[UsageRow]) -> str:
    """Returns a table with a line for each row, and one for all if there are several."""
    cells = [[*group_by, "requests", "prompt", "cached", "completion", "errors"]]
    for group, counts in rows:
        names = [printable(usage.shown(name, value)) or _NO_KEY for name, value in zip(group_by, group, strict=True)]
        cells.append([*names, *_numbers(counts)])
    if len(rows) > 1 and group_by:
        cells.append(["total", *[""] * (len(group_by) - 1), *_numbers(usage.total_of(rows))])
    return text_table.text_of(cells, right=range(len(group_by), len(cells[0]) - 1))


def _numbers(counts: Counts) -> list[str]:
    numbers = (counts.requests, counts.prompt_tokens, counts.cached_tokens, counts.completion_tokens)
    errors = ", ".join(f"{number} {code}" for code, number in sorted(counts.errors.items()))
    return [*(f"{number:,}" for number in numbers), errors]
