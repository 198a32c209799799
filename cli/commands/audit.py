"""`tokenbus audit`: who did what, from the audit log."""

import argparse
import asyncio
import datetime
import json
import sys
import time

import msgspec

from tokenbus.cli.console import arguments, connection_flags, moments, session
from tokenbus.cli.console.arguments import ArgumentType
from tokenbus.cli.console.flags import Parser
from tokenbus.cli.console.plain_text import printable
from tokenbus.cli.console.session import EXIT_INTERRUPTED, print_error
from tokenbus.protocol.access import audit
from tokenbus.protocol.access.audit import AuditRecord
from tokenbus.protocol.access.audit_log import AuditLog, StoredRecord
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.bus.bucket import BucketError, BucketMissingError
from tokenbus.protocol.wire import subjects

_CONNECT_TIMEOUT_S = 2.0
_FOLLOW_INTERVAL_S = 0.5
_NONE = "-"


def _since(text: str) -> float:
    """Returns the Unix time of a date, or of a duration before now. Raises ValueError."""
    try:
        return max(0.0, time.time() - moments.duration_s(text))
    except ValueError:
        return moments.moment(text)


def _name(text: str) -> str:
    subjects.encode_name(text)
    return text


_SINCE = ArgumentType(
    _since, "a date such as 2026-11-24, or a duration such as 2d: so long before now", "DATE|DURATION"
)
_TENANT = ArgumentType(_name, "a name", "NAME")


def add_flags(parser: Parser) -> None:
    flag = parser.group("what to show")
    flag("--since", _SINCE, "when to begin", _since("1d"), unset="1d")
    flag("--tenant", _TENANT, "only what concerns this tenant", unset="all")
    flag("--key", _TENANT, "only acts of this key, and changes of it; the beginning of its id is enough", unset="all")
    flag("--kind", arguments.one_of(*audit.KINDS), "only acts of this kind", unset="all")
    flag = parser.group("display")
    flag("--follow -f", arguments.SWITCH, "wait for further records")
    flag("--json", arguments.SWITCH, "print a line of JSON for each record")
    parser.left_out = ("tenant",)
    connection_flags.add_flags(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    session.log_errors_only()
    try:
        asyncio.run(_show(options))
    except BrokenPipeError:
        raise
    except (asyncio.CancelledError, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BucketMissingError:
        return print_error(
            "there is no audit log: no process has written to it (--audit), or the broker needs JetStream, and room "
            "for it on its disk (max_file_store), which those processes' logs say then (audit_not_written)"
        )
    except BucketError as error:
        return print_error(f"the audit log can't be read: {error}")
    except (ConnectionError, ValueError) as error:
        return print_error(str(error))
    return 0


async def _show(options: argparse.Namespace) -> None:
    connection = await nats.connect(connection_flags.settings_of(options, _CONNECT_TIMEOUT_S), "tokenbus audit")
    try:
        log, keys = AuditLog(connection, options.prefix), audit.pattern_of(options.tenant, options.kind)
        first: int | str = datetime.datetime.fromtimestamp(options.since, datetime.UTC).isoformat()
        is_known = is_failing = is_any = False
        while True:
            try:
                found, is_complete = await log.page(first, keys)
            except BucketError as error:
                if not options.follow or not is_known:
                    raise
                if not is_failing:
                    print(f"tokenbus: the audit log can't be read, trying again: {error}", file=sys.stderr)
                is_failing, is_complete, found = True, True, []
            else:
                is_known, is_failing = True, False
            is_any = _print(options, found) or is_any
            if found:
                first = found[-1].number + 1
            if is_complete and not options.follow:
                if not is_any:
                    print(f"nothing of this is recorded since {moments.text_of_moment(options.since)}", file=sys.stderr)
                return
            if is_complete:
                await asyncio.sleep(_FOLLOW_INTERVAL_S)
    finally:
        await connection.close()


def _print(options: argparse.Namespace, found: list[StoredRecord]) -> bool:
    """Prints the records that were asked for; returns whether there are any."""
    is_any = False
    for number, record in found:
        if record is None:
            print(f"tokenbus: the record {number} can't be read", file=sys.stderr)
        elif options.key is None or _is_about(record, options.key):
            print(json.dumps(as_json(number, record)) if options.json else line(record))
            is_any = True
    sys.stdout.flush()
    return is_any


def _is_about(record: AuditRecord, key: str) -> bool:
    return record.actor.startswith(key) or str(record.fields.get("key_id", "")).startswith(key)


def as_json(number: int, record: AuditRecord) -> dict[str, object]:
    """Returns a record as programs read it, with its place in the log."""
    return {"number": number, **{name: getattr(record, name) for name in ("at", "kind", "tenant", "actor", "what")}} | {
        "fields": msgspec.to_builtins(record.fields)
    }


def line(record: AuditRecord) -> str:
    """Returns a record as people read it. Nothing in it, which others have chosen, can move the cursor."""
    at = datetime.datetime.fromtimestamp(record.at, datetime.UTC)
    fields = [f"{_word(name)}={_word(value)}" for name, value in record.fields.items()]
    who = [_word(one) or _NONE for one in (record.tenant, record.actor)]
    return " ".join([f"{at:%Y-%m-%d %H:%M:%S}Z", record.kind, *who, _word(record.what), *fields])


def _word(value: object) -> str:
    """Returns a value that can't be taken for several."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return printable(json.dumps(text, ensure_ascii=False) if set(text) & set(' ="') else text)
