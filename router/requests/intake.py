"""The subjects on which clients reach a router: messages are checked, then refused or passed on.

A message is only answered if its reply subject is an inbox of its own tenant. Otherwise a client could have a router
publish on any subject that the router may write to."""

import asyncio
import contextlib
import functools
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import structlog
from nats.aio.msg import Msg

from tokenbus.protocol.access.inquiries import Inquiries, caller_of
from tokenbus.protocol.access.keys import KeyRecord, Role
from tokenbus.protocol.bus.bus import Bus, Subscription
from tokenbus.protocol.bus.reply_sender import ReplySender
from tokenbus.protocol.parts.assembly import UploadLimits
from tokenbus.protocol.parts.receiver import PartsReceiver
from tokenbus.protocol.wire import codec, errors, messages, subjects
from tokenbus.protocol.wire.checks import validation
from tokenbus.router.access import key_checks
from tokenbus.router.access.key_checks import KeyChecks
from tokenbus.router.fleet.model_part import ModelPart
from tokenbus.router.requests.calls.client_calls import Call, CallKind, ClientCalls
from tokenbus.router.requests.fleet_viewers import FleetViewers
from tokenbus.router.requests.flights.ends import RequestEnds
from tokenbus.router.requests.flights.flight import Flight
from tokenbus.router.requests.lifecycle import RequestLifecycle
from tokenbus.router.requests.listing import SystemListing
from tokenbus.router.requests.models import ModelCatalog
from tokenbus.router.requests.passing_on import PassingOn, is_passed_on
from tokenbus.router.requests.terminals import TerminalPublisher
from tokenbus.router.requests.traces import RequestTraces
from tokenbus.router.telemetry.metrics import RouterMetrics

_requests = codec.Decoder(messages.GenerateRequest)
_listings = codec.Decoder(messages.ModelsRequest)
_views = codec.Decoder(messages.FleetRequest)
_traces = codec.Decoder(messages.TraceRequest)
_DUPLICATE_GRACE_S = 0.05
"""A request whose id is in flight is tried again after this long: its client may have seen the earlier one end before
this router has."""
_MAX_DUPLICATES = 256
_MAX_LOGGED_DROPS = 100
"""Dropped messages that are logged; further ones are only counted."""


class Intake:
    """Receives the messages of one router's clients."""

    def __init__(
        self,
        bus: Bus,
        replies: ReplySender,
        names: subjects.Subjects,
        inbox_prefixes: tuple[str, ...],
        uploads: UploadLimits,
        models: ModelCatalog,
        lifecycle: RequestLifecycle,
        passing_on: PassingOn,
        calls: ClientCalls,
        kinds: Sequence[CallKind[Any, Any]],
        terminals: TerminalPublisher,
        metrics: RouterMetrics,
        part: ModelPart,
        listing: SystemListing,
        keys: KeyChecks | None,
        viewers: FleetViewers,
        traces: RequestTraces,
        ends: RequestEnds,
    ) -> None:
        self._traces = traces
        self._inquiries = Inquiries("this router")
        self._ends = ends
        self._keys = keys
        self._part = part
        self._viewers = viewers
        self._listing = listing
        self._bus = bus
        self._replies = replies
        self._names = names
        self._inbox_prefixes = inbox_prefixes
        self._max_request_bytes = uploads.message_bytes
        receiver = secrets.token_hex(8)
        self._parts = PartsReceiver(
            bus,
            lambda tenant, upload_id: names.upload(receiver, tenant, upload_id),
            uploads,
            self._may_answer,
            is_public=True,
            on_ended=lambda outcome: metrics.uploads.labels(outcome).inc(),
        )
        self._models = models
        listing.parts = self._parts
        self._lifecycle = lifecycle
        self._passing_on = passing_on
        self._calls = calls
        self._kinds = kinds
        self._terminals = terminals
        self._metrics = metrics
        self._subscriptions: list[Subscription] = []
        self._duplicates: dict[asyncio.TimerHandle, Callable[[], None]] = {}
        """Timers of requests whose id was in flight, each with the function that tries to start the request again."""
        self._log = structlog.get_logger()
        self.is_open = False
        """Whether new requests are received."""
        self._num_drops_logged = 0

    def __repr__(self) -> str:
        return f"<Intake {self._lifecycle!r} {self._parts!r}>"

    @property
    def parts(self) -> PartsReceiver:
        """The clients' large requests that are arriving in parts."""
        return self._parts

    async def open(self) -> None:
        """Subscribes to everything that clients publish. Requests are shared between routers; the rest reaches all."""
        await self._parts.open()
        self.is_open = True
        is_whole = self._part.is_whole
        if is_whole:
            await self._share(self._requests_on(self._subjects_of(None)))
        await self._share((subject, self._on_models) for subject in self._names.models)
        if self._keys is not None:
            await self._share([(self._names.models_of_keys, self._on_models)])
        for subject in (*self._names.fleet, *([] if self._keys is None else [self._names.fleet_of_keys])):
            self._subscriptions.append(await self._bus.subscribe(subject, self._on_fleet))
        for subject in (*self._names.trace, *([] if self._keys is None else [self._names.trace_of_keys])):
            self._subscriptions.append(await self._bus.subscribe(subject, self._on_trace))
        # of all routers with the same models, one passes such a message on
        await self._share(((subject, self._pass_on) for subject in self._names.without_model), self._part.queue)
        for subject in self._names.all_cancels if is_whole else self._names.all_cancels[:2]:
            await self._bus.subscribe(subject, self._on_cancel)
        for subject in self._names.all_resyncs if is_whole else self._names.all_resyncs[:2]:
            await self._bus.subscribe(subject, self._on_resync)

    async def hear(self, name: str) -> None:
        """Receives requests for a model, or for a model with an adapter, too."""
        await self._share(self._requests_on(self._subjects_of(name)))

    async def hear_cancels(self, model: str) -> None:
        """Receives cancels and resyncs of a model's requests, too."""
        await self._bus.subscribe(self._names.cancels_of(model), self._on_cancel)
        await self._bus.subscribe(self._names.resyncs_of(model), self._on_resync)

    def _subjects_of(self, name: str | None) -> Callable[[str], Iterable[str]]:
        """Returns a function from an operation to its subjects, for one model or for all. Requests of keys are left to
        routers that know keys."""

        def subjects_of(operation: str) -> tuple[str, ...]:
            names = self._names
            plain = names.all_of(operation) if name is None else names.of_model(operation, name)
            return plain if self._keys is None else (*plain, names.of_keys(operation, name))

        return subjects_of

    def _requests_on(self, subjects_of: Callable[[str], Iterable[str]]) -> Iterator[tuple[str, Callable[[Msg], None]]]:
        for subject in subjects_of("generate"):
            yield subject, self._on_generate
        for kind in self._kinds:
            for subject in subjects_of(kind.operation):
                yield subject, functools.partial(self._on_call, kind)

    async def _share(self, heard: Iterable[tuple[str, Callable[[Msg], None]]], queue: str = "router") -> None:
        """Subscribes as one of a queue group of routers, unless this one has stopped receiving requests."""
        for subject, callback in heard:
            if self.is_open:
                self._subscriptions.append(await self._bus.subscribe(subject, callback, queue=queue))

    async def close(self) -> None:
        """Stops receiving requests: other routers get those published from now on."""
        self.is_open = False
        for subscription in self._subscriptions:
            await self._bus.unsubscribe(subscription)
        self._parts.stop()
        self._viewers.close()
        for timer, try_again in list(self._duplicates.items()):
            timer.cancel()
            try_again()

    def _on_generate(self, message: Msg) -> None:
        if not self._may_answer(message):
            return
        encoding, request_id = codec.Encoding.JSON, ""
        try:
            encoding = codec.encoding_of(message.headers)
            address = self._parse_address(message)
            key = self._find_key(address)
            if self._parts.announced(message, self._names.tenant_token(message.subject), self._on_generate):
                return
            self._check_size(message, encoding)
            request = _requests.decode(message.data, encoding)
            validation.check_id(request.id)
            request_id = request.id or ""
            address, adapter = self._models.with_adapter(address)
            if adapter is not None:
                request = codec.replace(request, lora=[messages.Lora(name=adapter), *(request.lora or [])])
            request = validation.check_request(request)
            if key is not None:
                key_checks.check_model(key, address.model, [one.name for one in request.lora or ()])
                request = key_checks.bounded(key, request)
            if request.id is None:
                request = codec.replace(request, id=secrets.token_urlsafe(16))
            flight = Flight(request, address, message.reply, encoding, time.monotonic())
            try:
                self._lifecycle.admit(flight, len(message.data), message.headers)
            except errors.RequestError as error:
                if error.error.code is not errors.Code.DUPLICATE_REQUEST or len(self._duplicates) >= _MAX_DUPLICATES:
                    raise
                self._start_later(flight, message)
        except codec.MediaTypeError as error:
            self._refuse(message, encoding, "", errors.make_error(errors.Code.INVALID_REQUEST, str(error)))
        except errors.RequestError as error:
            self._refuse(message, encoding, request_id or _read_id(message, encoding), error.error)
        except Exception:  # a bug of ours, which is logged further out: the client must not wait for ever
            self._refuse(message, encoding, request_id, errors.make_error(errors.Code.INTERNAL))
            raise

    def _start_later(self, flight: Flight, message: Msg) -> None:
        def try_again() -> None:
            del self._duplicates[timer]
            try:
                self._lifecycle.admit(flight, len(message.data), message.headers)
            except errors.RequestError as error:
                self._refuse(message, flight.encoding, flight.request_id, error.error)
            except Exception:  # as in `_on_generate`
                self._refuse(message, flight.encoding, flight.request_id, errors.make_error(errors.Code.INTERNAL))
                raise

        timer = asyncio.get_running_loop().call_later(_DUPLICATE_GRACE_S, try_again)
        self._duplicates[timer] = try_again

    def _on_call(self, kind: CallKind[Any, Any], message: Msg) -> None:
        """Takes a request with one reply and no stream."""
        if not self._may_answer(message):
            return
        encoding, request_id = codec.Encoding.JSON, ""
        try:
            encoding = codec.encoding_of(message.headers)
            take_whole = functools.partial(self._on_call, kind)
            address = self._parse_address(message)
            key = self._find_key(address)
            if self._parts.announced(message, self._names.tenant_token(message.subject), take_whole):
                return
            self._check_size(message, encoding)
            body = kind.bodies.decode(message.data, encoding)
            validation.check_id(body.id)
            request_id = body.id or secrets.token_urlsafe(16)
            address, adapter = self._models.with_adapter(address)
            if key is not None:
                key_checks.check_model(key, address.model, () if adapter is None else (adapter,))
            if adapter is not None and not kind.names_adapters:
                problem = f"adapters are for generating: ask {address.model} without {adapter}"
                raise errors.request_error(errors.Code.UNSUPPORTED, problem, param="model")
            work, size, now = kind.check(body), len(message.data), time.monotonic()
            call = Call(request_id, address, body, work, message.reply, encoding, now, size)
            self._calls.admit_call(kind, call, message.headers)
            return
        except codec.MediaTypeError as problem:
            error = errors.make_error(errors.Code.INVALID_REQUEST, str(problem))
        except errors.RequestError as problem:
            error = problem.error
            request_id = request_id or _read_id(message, encoding)
        except Exception:  # as above
            self._calls.refuse(kind, message.reply, encoding, request_id, errors.make_error(errors.Code.INTERNAL))
            raise
        self._calls.refuse(kind, message.reply, encoding, request_id, error)
        self._tell_refused(kind.operation, message, request_id, error)

    def _on_models(self, message: Msg) -> None:
        def answer(encoding: codec.Encoding, who: subjects.ModelAddress, key: KeyRecord | None) -> None:
            asked = _listings.decode(message.data, encoding) if message.data else messages.ModelsRequest()
            self._listing.answer(message.reply, asked, encoding, who.tenant)

        self._show("models", message, answer, self._listing.refuse, may_be_strange=not message.data)

    def _on_fleet(self, message: Msg) -> None:
        def answer(encoding: codec.Encoding, who: subjects.ModelAddress, key: KeyRecord | None) -> None:
            asked = _views.decode(message.data, encoding) if message.data else messages.FleetRequest()
            # only the operator's user may ask under this name without a key
            is_operator = who.tenant == subjects.OPERATOR_TENANT if key is None else key.role is Role.OPERATOR
            self._viewers.ask(message.reply, asked, encoding, who.tenant, who.key_id, is_operator=is_operator)

        self._show("fleet", message, answer, self._viewers.refuse)

    def _on_trace(self, message: Msg) -> None:
        def answer(encoding: codec.Encoding, who: subjects.ModelAddress, key: KeyRecord | None) -> None:
            asked = _traces.decode(message.data, encoding) if message.data else messages.TraceRequest()
            validation.check_ranges(asked)
            self._traces.answer(message.reply, asked, encoding, who.tenant)

        self._show("trace", message, answer, self._traces.refuse)

    def _show(
        self,
        question: str,
        message: Msg,
        answer: Callable[[codec.Encoding, subjects.ModelAddress, KeyRecord | None], None],
        refuse: Callable[[str, codec.Encoding, errors.Error], None],
        *,
        may_be_strange: bool = False,
    ) -> None:
        """Answers one who only looks, in the message's encoding and for its tenant. With `may_be_strange` a
        Content-Type that is not known stands for JSON. Each question has an account of its own: a gateway asks several
        for many callers over one connection."""
        if not self._may_answer(message):
            return
        try:
            tenant, key_id = self._names.parse_models(message.subject)
        except ValueError:
            return
        encoding, who, began_at = codec.Encoding.JSON, subjects.ModelAddress("", tenant, key_id), time.monotonic()
        caller = f"{question} {caller_of(who, message.reply)}"
        refusal = self._inquiries.refusal(caller, began_at)
        try:
            try:
                encoding = codec.encoding_of(message.headers)
            except codec.MediaTypeError:
                if not may_be_strange:
                    raise
            if refusal is not None:  # before anything else is looked at: refusing must be cheap
                refuse(message.reply, encoding, refusal)
            else:
                answer(encoding, who, self._find_key(who))
        except codec.MediaTypeError as problem:
            refuse(message.reply, encoding, errors.make_error(errors.Code.INVALID_REQUEST, str(problem)))
        except errors.RequestError as problem:
            refuse(message.reply, encoding, problem.error)
        except Exception:  # as above
            refuse(message.reply, encoding, errors.make_error(errors.Code.INTERNAL))
            raise
        finally:
            if refusal is None:
                self._inquiries.pay(caller, time.monotonic() - began_at, time.monotonic())

    def _pass_on(self, message: Msg) -> None:
        if not message.reply or self._is_inbox(message):
            self._passing_on.to_workers(message)

    def _on_cancel(self, message: Msg) -> None:
        if is_passed_on(message) or (message.reply and not self._may_answer(message)):
            return
        try:
            address = self._names.parse_request(message.subject)
            encoding = codec.encoding_of(message.headers)
        except ValueError:
            return
        found = {holder.cancel(address.key, address.model) for holder in (self._lifecycle, self._calls)}
        # also to a worker for which this router answers since it has been silent: it may just have stood still
        self._passing_on.to_holder("cancel", message, address, is_answered=True in found)
        if True in found and message.reply:
            self._replies.send(message.reply, codec.encode(messages.CancelReply(cancelled=True), encoding))

    def _on_resync(self, message: Msg) -> None:
        if is_passed_on(message) or not self._may_answer(message):
            return
        try:
            address = self._names.parse_request(message.subject)
        except ValueError:
            return
        if not self._lifecycle.replay(address.key):
            self._passing_on.to_holder("resync", message, address)
        else:
            encoding, _, error = validation.read_resync(message.headers, message.data)
            self._replies.send(message.reply, codec.encode(messages.ResyncReply(found=True, error=error), encoding))

    def _is_inbox(self, message: Msg) -> bool:
        tenant = self._names.tenant_token(message.subject)
        return subjects.is_inbox(message.reply, self._inbox_prefixes, tenant)

    def _may_answer(self, message: Msg) -> bool:
        if self._is_inbox(message):
            return True
        self._metrics.messages_dropped.inc()
        if self._num_drops_logged < _MAX_LOGGED_DROPS:
            self._num_drops_logged += 1
            self._log.warning("reply_subject_refused", subject=message.subject, reply=message.reply[:200])
        return False

    def _parse_address(self, message: Msg) -> subjects.ModelAddress:
        try:
            return self._names.parse_model(message.subject)
        except ValueError as error:
            raise errors.request_error(errors.Code.INVALID_REQUEST, str(error), param="model") from error

    def _find_key(self, address: subjects.ModelAddress) -> KeyRecord | None:
        """Returns the key that a request names, if it names one. Raises RequestError for one that is not valid."""
        if not address.key_id:
            return None
        assert self._keys is not None, address
        return self._keys.find(address.tenant, address.key_id, time.time(), time.monotonic())

    def _check_size(self, message: Msg, encoding: codec.Encoding) -> None:
        if len(message.data) > self._max_request_bytes:
            raise errors.request_error(
                errors.Code.PAYLOAD_TOO_LARGE,
                f"the message has {len(message.data)} bytes; the limit is {self._max_request_bytes}",
            )
        codec.check_structure(message.data, encoding)

    def _refuse(self, message: Msg, encoding: codec.Encoding, request_id: str, error: errors.Error) -> None:
        key = f"{self._names.tenant_token(message.subject)}:{request_id}"
        self._terminals.refuse(message.reply, encoding, request_id, key, error)
        self._tell_refused("generate", message, request_id, error)

    def _tell_refused(self, operation: str, message: Msg, request_id: str, error: errors.Error) -> None:
        with contextlib.suppress(ValueError):  # nobody is to blame for a subject without proper names
            address = self._names.parse_model(message.subject)
            self._ends.tell_refused(operation, address, request_id, error.code)


def _read_id(message: Msg, encoding: codec.Encoding) -> str:
    """Returns the id of a request that is otherwise invalid, or an empty string if it has none that is valid."""
    try:
        request_id = _ids.decode(message.data, encoding).id
        validation.check_id(request_id)
    except errors.RequestError:
        return ""
    return request_id or ""


class _OnlyId(msgspec.Struct, frozen=True):
    id: str | None = None


_ids = codec.Decoder(_OnlyId)
