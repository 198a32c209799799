"""Serves what an operator does at the console: commands to workers, and changes of keys.

Only a gateway with `--console-operate` does any of it, for operators' keys of the fleet; where there are no keys, for
viewers on this machine, who could use the command line as well. Pages from elsewhere are refused. Workers and the audit
log name the operator's key: commands are answered in a part of that key's inbox, which only such a gateway and the key
itself may read."""

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tokenbus.gateway.admission.callers import Caller
from tokenbus.gateway.console.access import FOREIGN, PRIVATE, check_local, private_json
from tokenbus.gateway.http import body
from tokenbus.gateway.http.http_errors import CANCELLED, OVERLOADED, ApiError, ErrorResponse
from tokenbus.gateway.serving.endpoint import Services
from tokenbus.protocol.access import key_audit, key_changes, keys
from tokenbus.protocol.access.key_audit import KeyAudit
from tokenbus.protocol.access.key_changes import UnknownKeyError
from tokenbus.protocol.access.key_stores import KeyInDoubtError, KeyStore, KeyStoreError
from tokenbus.protocol.access.keys import KeyLimits, KeyRecord, Moment, Role
from tokenbus.protocol.bus.bucket import BucketError
from tokenbus.protocol.wire import codec, errors, internal, subjects
from tokenbus.protocol.wire.checks import validation
from tokenbus.protocol.wire.subjects import WorkerAddress

ActT = TypeVar("ActT", bound=msgspec.Struct)

_MAX_BODY_BYTES = 256 * 1024
_MAX_WORKERS = 1_024
_MAX_ACTS = 32
"""Acts in progress; a load is one until it ends or its page is closed."""
_MAX_KEYS_SHOWN = 500
_OF_CONSOLE = "console"
"""The token of inboxes that are read here, after the tokens of a key."""
_LINES = "application/x-ndjson"
_Label = Annotated[str, msgspec.Meta(max_length=200)]
_Patterns = Annotated[tuple[str, ...], msgspec.Meta(max_length=64)]
_Priority = Annotated[int, msgspec.Meta(ge=-1_000, le=1_000)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=4_096)]

_NOT_HERE = ErrorResponse(
    403, "forbidden", "this gateway only shows the fleet: start one with --console-operate to operate it"
)
_NO_OPERATOR = ErrorResponse(
    403,
    "forbidden",
    "only a key of the fleet with the role operator may do this (tokenbus keys create --role operator)",
)
_NO_KEYS = ErrorResponse(404, "keys_not_used", "this fleet has no keys: start its routers and gateways with --keys")


class WorkersCommand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /console/control`: a command to workers. The fields besides `workers` are those of the wire."""

    op: Literal["load", "unload", "drain", "clear_cache", "load_adapter", "unload_adapter", "pull"]
    workers: Annotated[list[WorkerAddress], msgspec.Meta(min_length=1, max_length=_MAX_WORKERS)]
    """Model and id of each."""
    model: _Name | None = None
    served_name: _Name | None = None
    replicas: int = 1
    settings: dict[str, Any] = {}
    adapter: _Name | None = None
    path: _Name | None = None
    tenants: list[_Name] | None = None
    grace_s: float | None = None
    handover_s: float | None = None


class WorkerAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of the answer: what one worker says. The last one of a worker is `done`."""

    model: str
    worker_id: str
    ok: bool
    done: bool
    progress: float | None = None
    worker_ids: list[str] = []
    error: errors.Error | None = None


class NewKeyFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /console/keys`."""

    tenant: str = subjects.DEFAULT_TENANT
    name: _Label = ""
    role: Role = Role.USER
    models: _Patterns = ("*",)
    limits: KeyLimits = KeyLimits()
    max_priority: _Priority = 0
    not_before: Moment = 0.0
    expires_at: Moment | None = None


class KeyChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /console/keys/ID/change`: what is to change. The other fields stay."""

    name: _Label | UnsetType = UNSET
    role: Role | UnsetType = UNSET
    models: _Patterns | UnsetType = UNSET
    limits: KeyLimits | UnsetType = UNSET
    """All of them."""
    max_priority: _Priority | UnsetType = UNSET
    not_before: Moment | UnsetType = UNSET
    expires_at: Moment | Literal["never"] | UnsetType = UNSET


class KeyRotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /console/keys/ID/rotate`."""

    grace_s: Annotated[float, msgspec.Meta(ge=0, le=365 * 86_400)] = 0.0
    """Seconds for which the old secret stays valid."""


class KeyRevocation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /console/keys/ID/revoke`, which has no fields."""


_commands = codec.Decoder(WorkersCommand, free_form=frozenset(("settings",)))
_new_keys = codec.Decoder(NewKeyFields)
_changes = codec.Decoder(KeyChange)
_rotations = codec.Decoder(KeyRotation)
_revocations = codec.Decoder(KeyRevocation)


class ConsoleActs:
    """The acts of one gateway's console."""

    def __init__(
        self,
        services: Services,
        store: KeyStore | None,
        log: Callable[[str], KeyAudit] | None,
        *,
        is_allowed: bool,
    ) -> None:
        """`store` is None if the fleet has no keys. `log` returns the audit log for an actor; None if there is none."""
        self._services = services
        self._store = store
        self._log = log
        self._is_allowed = is_allowed
        self._num_acts = 0

    def __repr__(self) -> str:
        return f"<ConsoleActs, {self._num_acts} in progress>"

    def routes(self) -> list[Route]:
        return [
            Route("/console/control", self.control, methods=["POST"]),
            Route("/console/keys", self.list_keys, methods=["GET"]),
            Route("/console/keys", self.create_key, methods=["POST"]),
            Route("/console/keys/{id}/change", self.change_key, methods=["POST"]),
            Route("/console/keys/{id}/rotate", self.rotate_key, methods=["POST"]),
            Route("/console/keys/{id}/revoke", self.revoke_key, methods=["POST"]),
        ]

    def parts_of(self, caller: Caller) -> tuple[str, ...]:
        """Returns the parts of the page with which a viewer may do something."""
        if not self._is_allowed or not self._may_operate(caller):
            return ()
        return ("operate",) if self._store is None else ("operate", "keys")

    async def control(self, request: Request) -> Response:
        """Serves `POST /console/control`: a command to some workers, answered by lines of JSON as they reply."""
        caller = await self._operator(request)
        command = await self._read(request, _commands)
        fields = {name: getattr(command, name) for name in command.__struct_fields__ if name != "workers"}
        control = internal.Control(**fields)
        validation.check_control(control)
        for at, address in enumerate(command.workers):
            _check_address(address, f"workers[{at}]")
        inbox = f"{keys.inbox_prefix(caller.tenant, caller.key_id)}.{_OF_CONSOLE}" if caller.key_id else ""
        if self._num_acts >= _MAX_ACTS:
            raise ApiError(OVERLOADED)
        return StreamingResponse(self._answers(command.workers, control, inbox), media_type=_LINES, headers=PRIVATE)

    async def list_keys(self, request: Request) -> Response:
        """Serves `GET /console/keys`: those that have `text` in their id, name or tenant; the first 500."""
        _, store = await self._operator(request), self._keys()
        wanted, now = request.query_params.get("text", "").lower(), time.time()
        with _explained():
            loaded = await store.load()
        found = [one for one in loaded.records.values() if wanted in f"{one.id} {one.name} {one.tenant}".lower()]
        found.sort(key=lambda one: (one.revoked_at is not None, one.tenant, one.name, one.id))
        return private_json(
            {
                "data": [one.shown(now) for one in found[:_MAX_KEYS_SHOWN]],
                "total": len(found),
                "problems": [f"{name[:50]}: {problem}" for name, problem in list(loaded.problems.items())[:10]],
            }
        )

    async def create_key(self, request: Request) -> Response:
        """Serves `POST /console/keys`: makes a key, whose secret is in this answer and nowhere else."""
        caller, store = await self._operator(request), self._keys()
        asked = await self._read(request, _new_keys)
        now = time.time()
        _check_label(asked.name)
        if asked.expires_at is not None and asked.expires_at <= max(now, asked.not_before):
            raise errors.invalid_field("expires_at", "must be in the future, and later than not_before")

        new, fields = keys.new_key(), {name: getattr(asked, name) for name in asked.__struct_fields__}
        with _explained():
            record = KeyRecord(id=new.id, hash=new.hash, created_at=now, created_by=caller.key_id, **fields)
            await key_changes.add(store, record)
        warning = await self._note(caller, "create", record, **key_audit.facts_of(record))
        return _changed(record, warning, new.text, 201)

    async def change_key(self, request: Request) -> Response:
        """Serves `POST /console/keys/ID/change`: changes what a key may do. Its secret stays."""
        caller, store = await self._operator(request), self._keys()
        asked = await self._read(request, _changes)
        given = {name: getattr(asked, name) for name in asked.__struct_fields__}
        fields = {name: value for name, value in given.items() if value is not UNSET}
        _check_label(fields.get("name", ""))
        if asked.expires_at == "never":
            fields["expires_at"] = None
        limits = fields.pop("limits", None)
        new_limits = msgspec.structs.asdict(limits) if limits is not None else {}
        if not fields and not new_limits:
            raise errors.request_error(errors.Code.INVALID_REQUEST, "nothing is to change")

        now, befores = time.time(), []

        def edit(before: KeyRecord) -> KeyRecord:
            befores.append(before)
            return key_changes.changed(before, fields, new_limits, now)

        with _explained():
            record = await key_changes.change(store, _key_id(request), edit)
        changes = key_changes.differences(befores[-1], record)
        warning = await self._note(caller, "change", record, changed=tuple(changes), **changes) if changes else ""
        return _changed(record, warning)

    async def rotate_key(self, request: Request) -> Response:
        """Serves `POST /console/keys/ID/rotate`: gives a key a new secret, which is in this answer alone."""
        caller, store = await self._operator(request), self._keys()
        asked = await self._read(request, _rotations)
        key_id, now = _key_id(request), time.time()
        new = keys.new_key(key_id)
        with _explained():
            record = await key_changes.change(
                store, key_id, lambda one: key_changes.rotated(one, new, asked.grace_s, now)
            )
        return _changed(record, await self._note(caller, "rotate", record, grace_s=asked.grace_s), new.text)

    async def revoke_key(self, request: Request) -> Response:
        """Serves `POST /console/keys/ID/revoke`: makes a key invalid for good."""
        caller, store = await self._operator(request), self._keys()
        await self._read(request, _revocations)
        now = time.time()
        with _explained():
            record = await key_changes.change(store, _key_id(request), lambda one: key_changes.revoked(one, now))
        was_revoked = record.revoked_at != now or None
        return _changed(record, await self._note(caller, "revoke", record, was_revoked=was_revoked))

    async def _operator(self, request: Request) -> Caller:
        """Returns who acts. Raises ApiError for those who may not."""
        callers = self._services.tenants.callers
        if callers.allows_anonymous:
            check_local(request)
        caller = await callers.sender_of(request)
        if not self._may_operate(caller):
            raise ApiError(_NO_OPERATOR)
        if not self._is_allowed:
            raise ApiError(_NOT_HERE)
        _check_origin(request)
        return caller

    def _may_operate(self, caller: Caller) -> bool:
        """Whether a caller is an operator. A viewer without a key, where there are none, is on this machine."""
        return (caller.is_operator and bool(caller.key_id)) or self._services.tenants.callers.allows_anonymous

    def _keys(self) -> KeyStore:
        if self._store is None:
            raise ApiError(_NO_KEYS)
        return self._store

    async def _note(self, caller: Caller, what: str, record: KeyRecord, **fields: Any) -> str:
        """Adds a change to the audit log, if there is one; returns why that failed. The change is made all the same."""
        try:
            if self._log is not None:
                await self._log(caller.key_id).add(what, record, **fields)
        except BucketError as error:
            return f"this change of the key {record.id} is not in the audit log: {error}"
        return ""

    async def _read(self, request: Request, decoder: codec.Decoder[ActT]) -> ActT:
        """Returns a body. Raises ApiError, RequestError."""
        try:
            with self._services.bodies.holding() as held:
                payload = await body.read(request, _MAX_BODY_BYTES, held)
        except body.ClientDisconnectedError as error:
            raise ApiError(CANCELLED) from error  # its client is gone
        return decoder.decode(payload, codec.Encoding.JSON)

    async def _answers(
        self, workers: list[WorkerAddress], control: internal.Control, inbox: str
    ) -> AsyncIterator[bytes]:
        client = self._services.tenants.gateway_client
        self._num_acts += 1
        try:
            async with contextlib.aclosing(client.command_workers(workers, control, inbox)) as replies:
                async for one in replies:
                    (model, worker_id), reply = one
                    answer = WorkerAnswer(
                        model=model,
                        worker_id=worker_id,
                        ok=reply.ok,
                        done=one.is_last,
                        progress=reply.progress,
                        worker_ids=reply.worker_ids,
                        error=reply.error,
                    )
                    yield msgspec.json.encode(answer) + b"\n"
                    if self._services.limit.is_draining:
                        return  # what a worker has been told it goes on with
        finally:
            self._num_acts -= 1


def _check_origin(request: Request) -> None:
    """Raises ApiError for a request that a page of another origin has a browser send."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None and site != "same-origin":
        raise ApiError(FOREIGN)
    if (
        site is None
        and origin is not None
        and origin.lower().partition("://")[2] != request.headers.get("host", "").lower()
    ):
        raise ApiError(FOREIGN)


def _check_label(name: str) -> None:
    if not name.isprintable():
        raise errors.invalid_field("name", "must be printable characters")


def _check_address(address: WorkerAddress, path: str) -> None:
    """Raises RequestError for names that no worker has."""
    for name in address:
        try:
            subjects.encode_name(name)
        except ValueError as error:
            raise errors.invalid_field(path, str(error)) from error


def _key_id(request: Request) -> str:
    key_id: str = request.path_params["id"]
    if not keys.is_key_id(key_id):
        raise ApiError(_unknown(f"there is no key {key_id[:50]!r}"))
    return key_id


def _changed(record: KeyRecord, warning: str, secret: str = "", status: int = 200) -> Response:
    told = record.shown(time.time()) | {"warning": warning}
    return private_json(told | ({"key": secret} if secret else {}), status)


def _unknown(problem: str) -> ErrorResponse:
    return ErrorResponse(404, "not_found", problem)


@contextlib.contextmanager
def _explained() -> Any:
    """Turns the errors of keys into responses."""
    try:
        yield
    except UnknownKeyError as error:
        raise ApiError(_unknown(str(error))) from error
    except KeyInDoubtError as error:  # another try would make another key
        what = f"it is not known whether the key {error.key_id} was made, of which nobody has the secret"
        problem = f"{what}: revoke it if it is in the list, and create another one ({error})"
        raise ApiError(ErrorResponse(503, "keys_unavailable", problem)) from error
    except KeyStoreError as error:
        raise ApiError(ErrorResponse(503, "keys_unavailable", str(error), None, True, 1_000.0)) from error
    except ValueError as error:
        raise errors.request_error(errors.Code.INVALID_REQUEST, str(error)) from error
