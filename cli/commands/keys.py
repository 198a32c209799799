"""`tokenbus keys`: creates, lists, shows, changes, rotates and revokes the API keys of a fleet."""

import argparse
import asyncio
import contextlib
import fnmatch
import getpass
import json
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from tokenbus.cli.console import arguments, audit_flags, connection_flags, key_flags, key_table, moments, session
from tokenbus.cli.console.arguments import ArgumentType
from tokenbus.cli.console.flags import Parser, UsageError
from tokenbus.cli.console.plain_text import printable
from tokenbus.cli.console.session import EXIT_INTERRUPTED, print_error
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.access import key_audit, key_changes, keys
from tokenbus.protocol.access.audit_log import AuditSettings
from tokenbus.protocol.access.key_audit import KeyAudit
from tokenbus.protocol.access.key_source import BUCKET
from tokenbus.protocol.access.key_stores import KeyInDoubtError, KeyStore, KeyStoreError
from tokenbus.protocol.access.keys import KeyLimits, KeyRecord, Role
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.bus.bucket import BucketError, BucketMissingError, BucketOfflineError
from tokenbus.protocol.bus.connection import Connection
from tokenbus.protocol.wire import errors, limits, subjects

_CONNECT_TIMEOUT_S = 2.0
_MODELS_TIMEOUT_S = 1.0
_MAX_LABEL_CHARS = 200
_NUM_AMBIGUOUS = 5
"""Keys that are named where a prefix of an id has several."""


def _tenant(text: str) -> str:
    subjects.encode_name(text)
    if not text.isprintable() or set(text) & set(" *>"):
        raise ValueError
    return text


def _pattern(text: str) -> str:
    if not 0 < len(text.encode()) <= limits.MAX_NAME_BYTES or not text.isprintable() or " " in text:
        raise ValueError
    if "[" in _CLASS.sub("", text):  # it would stand for itself, which no name of a model has
        raise ValueError
    return text


def _label(text: str) -> str:
    if len(text) > _MAX_LABEL_CHARS or not text.isprintable():
        raise ValueError
    return text


def _expiry(text: str) -> float | None:
    return None if text.lower() == _NEVER else moments.moment(text)


_NEVER = "never"
_CLASS = re.compile(r"\[!?\]?[^\]]*\]")
_TENANT = ArgumentType(_tenant, f"a name of 1 to {limits.MAX_NAME_BYTES} bytes without spaces, * and >", "NAME")
_PATTERN = ArgumentType(
    _pattern, f"a pattern of 1 to {limits.MAX_NAME_BYTES} bytes without spaces, such as chat-* or chat-[ab]", "PATTERN"
)
_EXPIRY = ArgumentType(_expiry, f"{moments.MOMENT.noun}, or {_NEVER}", f"DATE|DURATION|{_NEVER}")
_LABEL = ArgumentType(_label, f"at most {_MAX_LABEL_CHARS} printable characters", "TEXT")


def add_flags(parser: Parser) -> None:
    do = arguments.one_of(*_ACTIONS)
    parser.add_argument("do", type=do.__call__, metavar="ACTION", help=do.allowed)
    text = "for show, change, rotate and revoke: the id of the key, or the beginning of it"
    parser.add_argument("ids", nargs="*", default=[], metavar="KEY", help=text)
    flag = parser.group(f"{_CREATE} and {_CHANGE}")
    flag("--name", _LABEL, "what its owner calls it", "")
    flag("--role", arguments.one_of(*Role), "what it may do: make requests, look on, or operate the fleet", Role.USER)
    models = "a model that it may use, or a pattern such as chat-*; adapters have names such as base:style"
    flag("--models", _PATTERN, models, [], unset="all models")
    priority = "the least `priority` that a request may have: lower is served sooner"
    flag("--max-priority", arguments.whole(-1_000, 1_000), priority, 0)
    flag("--not-before", moments.MOMENT, "when it becomes valid", unset="at once")
    flag("--expires", _EXPIRY, "when it ceases to be valid", unset=_NEVER)
    flag = parser.group(f"{_CREATE} and {_CHANGE}, limits (0: none)", KeyLimits())
    flag("--requests-per-minute", arguments.COUNT, "requests a minute")
    flag("--tokens-per-minute", arguments.COUNT, "tokens a minute, of prompts and completions")
    flag("--tokens-per-day", arguments.COUNT, "tokens a day, until midnight UTC")
    flag("--concurrency", arguments.COUNT, "requests that may be open at a time")
    flag("--max-tokens", arguments.COUNT, "largest max_tokens of a request")
    flag("--connections", arguments.COUNT, "connections to brokers at a time, where `tokenbus auth` runs")
    flag = parser.group(_ROTATE)
    flag("--grace", moments.DURATION, "time for which the old secret stays valid", unset="it is invalid at once")
    flag = parser.group(_REVOKE)
    flag("--yes -y", arguments.SWITCH, "don't ask")
    of_action = tuple(flag.name for flag in parser.flags.values())
    given = parser.pass_on(of_action)
    flag = parser.group("keys")
    flag(
        "--tenant",
        _TENANT,
        "for create, the key's tenant; for list, the tenant whose keys are shown",
        unset="default, or all",
    )
    flag("--json", arguments.SWITCH, "print JSON, with Unix times in seconds")
    flag.add(key_flags.KEYS._replace(default=BUCKET, unset=""))
    flag.add(audit_flags.AUDIT)
    parser.left_out = ("tenant",)
    connection_flags.add_flags(parser)
    parser.set_defaults(run=lambda options: _run(parser.prog, options, given))


_CREATE, _LIST, _SHOW, _CHANGE, _ROTATE, _REVOKE = "create", "list", "show", "change", "rotate", "revoke"


def _run(prog: str, options: argparse.Namespace, of_actions: Sequence[Any]) -> int:
    for flag in of_actions:
        actions = flag.title.partition(",")[0].split(" and ")
        if flag.dest in options and options.do not in actions:
            raise UsageError(prog, f"{flag.option} is an option of `{prog} {actions[0]}`, not of {options.do}")
    if options.tenant is not None and options.do not in (_CREATE, _LIST):
        why = ": a key's tenant never changes" if options.do == _CHANGE else ""
        raise UsageError(prog, f"--tenant is an option of `{prog} {_CREATE}` and `{_LIST}`, not of {options.do}{why}")
    needs_key = options.do not in (_CREATE, _LIST)
    if bool(options.ids) != needs_key or (len(options.ids) > 1 and options.do != _REVOKE):
        wants = "the id of a key" if needs_key else "no further arguments"
        raise UsageError(prog, f"{options.do} takes {wants}, got {' '.join(options.ids) or 'none'}")
    for one in options.ids:
        if keys.id_of(one) is not None:  # by now every user of this machine has had the time to read it
            text = "is a whole key with its secret, which others can read in the list of processes: pass its id only"
            raise UsageError(prog, f"the argument {text}, {keys.id_of(one)}")
    options.audit = audit_flags.is_wanted(prog, options)
    session.log_errors_only()
    action = _ACTIONS[options.do](options)
    try:
        return asyncio.run(_with_store(options, action))
    except BrokenPipeError:
        raise
    except asyncio.CancelledError:
        return EXIT_INTERRUPTED
    except KeyStoreError as error:
        return print_error(_explained(options, error))
    except ConnectionError as error:
        return print_error(str(error))


_Action = Callable[[KeyStore, Connection | None], Awaitable[int]]


async def _with_store(options: argparse.Namespace, action: _Action) -> int:
    settings = key_flags.settings_of(options)
    if settings.keys != BUCKET and not options.audit:
        return await action(settings.store(None, options.prefix), None)
    async with _connected(options) as connection:
        return await action(settings.store(connection, options.prefix), connection)


async def _audit(options: argparse.Namespace, connection: Connection | None, record: KeyRecord, **fields: Any) -> None:
    """Writes a change to the audit log, if that is wanted. The change is made, also if this fails."""
    if not options.audit or connection is None:
        return
    try:
        await KeyAudit(connection, options.prefix, AuditSettings(), _user()).add(options.do, record, **fields)
    except BucketError as error:
        _say(f"this change of the key {record.id} is not in the audit log: {error}")


@contextlib.asynccontextmanager
async def _connected(options: argparse.Namespace) -> AsyncIterator[Connection]:
    connection = await nats.connect(connection_flags.settings_of(options, _CONNECT_TIMEOUT_S), "tokenbus keys")
    try:
        yield connection
    finally:
        await connection.close()


def _explained(options: argparse.Namespace, error: KeyStoreError) -> str:
    if isinstance(error.__cause__, BucketMissingError) and options.do != _CREATE:
        return "there are no keys yet: `tokenbus keys create` makes the first one, in a broker with JetStream"
    if isinstance(error, KeyInDoubtError):
        what = "nobody has its secret: revoke it if `tokenbus keys list` shows it, and create another one"
        return f"it is not known whether the key {error.key_id} was made, and {what} ({error})"
    if options.do == _CREATE and isinstance(error.__cause__, BucketOfflineError):
        return f"no key was made: {error}; try again when `tokenbus doctor` finds the brokers in order"
    if isinstance(error.__cause__, BucketMissingError):
        return "the broker has no JetStream: start nats-server with -js, or name a file, --keys FILE"
    return str(error)


def _given_fields(options: argparse.Namespace, now: float) -> tuple[dict[str, Any], dict[str, int]]:
    """Returns the fields of a record and its limits that flags name. Raises ValueError for times that contradict each
    other."""
    given = vars(options)
    expires_at, not_before = given.get("expires"), given.get("not_before", 0.0)
    if expires_at is not None and expires_at <= max(now, not_before):
        what = "in the future" if expires_at <= now else "later than --not-before"
        raise ValueError(f"--expires must be {what}, got {moments.text_of_moment(expires_at)}")
    fields: dict[str, Any] = {}
    fields |= {name: given[name] for name in ("name", "role", "max_priority", "not_before") if name in given}
    if "models" in given:
        fields["models"] = tuple(given["models"])
    if "expires" in given:
        fields["expires_at"] = expires_at
    return fields, {name: given[name] for name in KeyLimits.__struct_fields__ if name in given}


def _create(options: argparse.Namespace) -> _Action:
    """Raises ValueError for times that contradict each other."""
    now = time.time()
    fields, limit_fields = _given_fields(options, now)

    def make() -> tuple[str, KeyRecord]:
        new = keys.new_key()
        return new.text, KeyRecord(
            id=new.id,
            hash=new.hash,
            tenant=options.tenant or subjects.DEFAULT_TENANT,
            limits=KeyLimits(**limit_fields),
            created_at=now,
            created_by=_user(),
            **fields,
        )

    async def create(store: KeyStore, connection: Connection | None) -> int:
        secret, record = make()
        await key_changes.add(store, record)
        await _audit(options, connection, record, **key_audit.facts_of(record))
        if connection is not None and record.models != ("*",):
            await _warn_of_models(options, connection, record)
        _say(f"made the key {record.id} of the tenant {record.tenant}; its secret is shown this once")
        return _print_secret(options, secret, record)

    return create


def _change(options: argparse.Namespace) -> _Action:
    """Raises ValueError if nothing is to change, or for times that contradict each other."""
    fields, limit_fields = _given_fields(options, time.time())
    if not fields and not limit_fields:
        raise ValueError(
            "change takes at least one option of what is to change, such as --models or --tokens-per-minute 0"
        )

    async def change(store: KeyStore, connection: Connection | None) -> int:
        key_id, now, befores = await _find(store, options.ids[0]), time.time(), []

        def edit(before: KeyRecord) -> KeyRecord:
            befores.append(before)
            return key_changes.changed(before, fields, limit_fields, now)

        record = await key_changes.change(store, key_id, edit)
        changes = key_changes.differences(befores[-1], record)
        if changes:
            await _audit(options, connection, record, changed=tuple(changes), **changes)
        if connection is not None and "models" in changes:
            await _warn_of_models(options, connection, record)
        _say(f"the key {key_id} {'has changed in ' + ', '.join(changes) if changes else 'has all of this already'}")
        shown = record.shown(now)
        print(json.dumps(shown) if options.json else key_table.details(record, now))
        return 0

    return change


def _rotate(options: argparse.Namespace) -> _Action:
    async def rotate(store: KeyStore, connection: Connection | None) -> int:
        key_id = await _find(store, options.ids[0])
        new, grace_s, now = keys.new_key(key_id), vars(options).get("grace", 0.0), time.time()
        record = await key_changes.change(store, key_id, lambda one: key_changes.rotated(one, new, grace_s, now))
        await _audit(options, connection, record, grace_s=grace_s)
        until = f"is valid until {moments.text_of_moment(now + grace_s)}" if grace_s else "is not valid any more"
        _say(f"the key {key_id} has a new secret, shown this once; the old one {until}")
        return _print_secret(options, new.text, record)

    return rotate


def _revoke(options: argparse.Namespace) -> _Action:
    if "yes" not in options and not sys.stdin.isatty():
        raise ValueError("revoke needs --yes where nobody can be asked: standard input is not a terminal")

    async def revoke(store: KeyStore, connection: Connection | None) -> int:
        found = [await _get(store, await _find(store, one)) for one in options.ids]
        if "yes" not in options and not all([await asyncio.to_thread(_may_revoke, record) for record in found]):
            return print_error("nothing was revoked")
        shown, now = [], time.time()
        for before in found:
            record = await key_changes.change(store, before.id, lambda one: key_changes.revoked(one, now))
            await _audit(options, connection, record, was_revoked=before.revoked_at is not None or None)
            shown.append(record.shown(now))
            since = f"had been revoked at {moments.text_of_moment(record.revoked_at or now)} already"
            _say(f"the key {record.id} {'is revoked' if before.revoked_at is None else since}")
        if options.json:
            print(json.dumps(shown))
        return 0

    return revoke


def _list(options: argparse.Namespace) -> _Action:
    async def list_keys(store: KeyStore, connection: Connection | None) -> int:
        found, now = await store.load(), time.time()
        records = [one for one in found.records.values() if options.tenant in (None, one.tenant)]
        for name, problem in found.problems.items():
            _say(f"the record {name!r} can't be used: {problem}")
        if options.json:
            print(json.dumps([one.shown(now) for one in records]))
        elif records:
            print(key_table.table(records, now))
        else:
            _say("there are no keys" + (f" of the tenant {options.tenant}" if options.tenant else ""))
        return 0

    return list_keys


def _show(options: argparse.Namespace) -> _Action:
    async def show(store: KeyStore, connection: Connection | None) -> int:
        record, now = await _get(store, await _find(store, options.ids[0])), time.time()
        fields = record.shown(now)
        print(json.dumps(fields) if options.json else key_table.details(record, now))
        return 0

    return show


_ACTIONS: dict[str, Callable[[argparse.Namespace], _Action]] = {
    _CREATE: _create,
    _LIST: _list,
    _SHOW: _show,
    _CHANGE: _change,
    _REVOKE: _revoke,
    _ROTATE: _rotate,
}


async def _find(store: KeyStore, beginning: str) -> str:
    """Returns the only id that begins like this. Raises KeyStoreError."""
    if keys.is_key_id(beginning):
        return beginning
    found = sorted(one for one in (await store.load()).records if one.startswith(beginning.lower()))
    if len(found) == 1:
        return found[0]
    if not found:
        raise key_changes.UnknownKeyError(f"there is no key whose id begins with {beginning[:50]!r}")
    more = f" and {len(found) - _NUM_AMBIGUOUS} more" if len(found) > _NUM_AMBIGUOUS else ""
    raise KeyStoreError(f"{beginning!r} begins {len(found)} ids: {', '.join(found[:_NUM_AMBIGUOUS])}{more}")


async def _get(store: KeyStore, key_id: str) -> KeyRecord:
    found = await store.get(key_id)
    if found is None:
        raise key_changes.UnknownKeyError(f"there is no key {key_id}")
    return found.record


def _print_secret(options: argparse.Namespace, secret: str, record: KeyRecord) -> int:
    """Prints a whole key, and nothing else, on standard output."""
    fields = {"key": secret} | record.shown(time.time())
    try:
        print(json.dumps(fields) if options.json else secret, flush=True)
    except OSError as error:
        again = f"`tokenbus keys rotate {record.id}` makes another one"
        return print_error(f"the secret of {record.id} could not be shown ({error.strerror}): {again}")
    return 0


def _may_revoke(record: KeyRecord) -> bool:
    print(key_table.details(record, time.time()), file=sys.stderr)
    print("Revoke this key, for good? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


async def _warn_of_models(options: argparse.Namespace, connection: Connection, record: KeyRecord) -> None:
    """Says which patterns of a key no model has that is served now, if a router answers."""
    # A user of the broker may often ask as one tenant only: as that one, whose name it has, it does not see the
    # adapters that others have for themselves.
    for tenant in dict.fromkeys((record.tenant, options.nats_user or record.tenant)):
        client = await WireClient.from_connection(connection, tenant=tenant, prefix=options.prefix)
        with contextlib.suppress(errors.RequestError):
            served = (await client.models(_MODELS_TIMEOUT_S, with_workers=False)).models
            break
    else:
        return
    names = [one.model for one in served] + [f"{one.model}:{name}" for one in served for name in one.adapters]
    for pattern in record.models:
        is_hidden = tenant != record.tenant and fnmatch.filter(names, pattern.partition(":")[0])
        if not is_hidden and not fnmatch.filter(names, pattern):
            _say(f"nothing that is served now has the name {printable(pattern)}")


def _user() -> str:
    with contextlib.suppress(Exception):  # there may be no entry for this user, as in a container
        return f"{getpass.getuser()}@{socket.gethostname()}"[:_MAX_LABEL_CHARS]
    return socket.gethostname()[:_MAX_LABEL_CHARS]


def _say(text: str) -> None:
    """Explains something beside the output."""
    print(f"tokenbus: {text}", file=sys.stderr)
