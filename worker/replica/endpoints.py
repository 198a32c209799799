"""Serves a worker's subjects: decodes, checks and dispatches requests, and replies."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

import structlog
from nats.aio.msg import Msg

from tokenbus.protocol import tasks
from tokenbus.protocol.access.audit import actor_of_inbox
from tokenbus.protocol.bus.bus import (
    Bus,
    Callback,
    NoRespondersError,
    Outgoing,
    PayloadTooLargeError,
    is_no_responders,
)
from tokenbus.protocol.bus.reply_sender import ReplySender
from tokenbus.protocol.parts.assembly import UploadLimits
from tokenbus.protocol.parts.receiver import PartsReceiver
from tokenbus.protocol.parts.sender import PartsSender
from tokenbus.protocol.prompt import tokenizer_bundle
from tokenbus.protocol.wire import block_hash, codec, errors, internal, limits, messages, subjects
from tokenbus.protocol.wire.checks import pooling, validation
from tokenbus.worker.adapters.adapters import Adapters
from tokenbus.worker.broker.announcer import Announcer
from tokenbus.worker.broker.lifeline import Lifeline
from tokenbus.worker.broker.own_subjects import OwnSubjects
from tokenbus.worker.contract import contract
from tokenbus.worker.replica.client_requests import ClientRequests
from tokenbus.worker.replica.drain import Drain
from tokenbus.worker.settings.settings import OnProgress
from tokenbus.worker.streams.streams import Streams
from tokenbus.worker.telemetry.metrics import ReplicaMetrics

_cards = codec.Decoder(messages.Card)
_NO_FIELDS = b"\x80"
"""Stands for an empty message, which may ask for a snapshot."""
_MAX_PENDING_CALLS = 256
"""The most calls that may wait for their replies, apart from runs: to tokenize, embed, rerank and so on."""
_DETOKENIZED_AT_ONCE = 4_096
"""Tokens that are detokenized before yielding to the event loop: about a millisecond."""
_TOKEN_ID_BYTES = 4
_MAX_LOGGED_CHARS = 256
_MAX_UPLOAD_BYTES = 256 * 1024 * 1024
"""Memory for routers' messages that come in parts."""


def _allow(request: messages.Message) -> None:
    """Checks nothing: any message that can be decoded is allowed."""


OnLoad = Callable[[internal.Control, OnProgress], None]
"""Loads or fetches more models beside the worker's own, and reports how far it is."""
OnWant = Callable[[], internal.ControlReply]
"""Starts loading the worker's own model if necessary; returns the progress."""


class OwnModel(NamedTuple):
    """Loads and unloads the worker's own model, if that is loaded on demand."""

    want: OnWant
    release: Callable[[], internal.ControlReply]
    """Unloads it when its running requests have ended; the next request for it loads it again."""


class WorkerCommands(NamedTuple):
    """Carries out the commands that concern the whole worker."""

    drain: Drain
    adapters: Adapters
    want: OnWant
    release: Callable[[], internal.ControlReply] | None
    """Unloads the worker's own model and keeps the worker, if it is loaded on demand."""
    replaced: Callable[[str], None]
    """Another frontend has started later under the same name; takes the reason to show."""
    load: OnLoad | None
    line: Lifeline


class _Service(NamedTuple):
    """The treatment of the messages on one of a worker's subjects."""

    decoder: codec.Decoder[Any]
    check: Callable[[Any], None]
    """Raises RequestError for a message that is not allowed."""
    handle: Callable[..., Any]
    """Handles a message, given as received and decoded. For a call: takes the request, and returns the reply later."""
    refusal: Callable[..., messages.Message] | None = None
    """Makes the reply from an `error`; without it, a refused message is only logged."""
    is_call: bool = False


class Endpoints:
    """Serves everything that routers, clients and operators may ask of one worker."""

    def __init__(
        self,
        connection: Bus,
        names: subjects.Subjects,
        announcer: Announcer,
        streams: Streams,
        inbox_prefixes: tuple[str, ...],
        worker: WorkerCommands,
        metrics: ReplicaMetrics,
    ) -> None:
        self._connection = connection
        self._replies = ReplySender(connection)
        self._names = names
        self._announcer = announcer
        self._streams = streams
        self._worker = worker
        self._metrics = metrics
        model, worker_id = announcer.model, announcer.worker_id
        self.clients = ClientRequests(self._replies, names, model, streams, inbox_prefixes)
        """Cancels and resyncs."""
        self._receiver = PartsReceiver(
            connection,
            lambda owner, upload_id: names.worker(model, worker_id, f"upload.{upload_id}"),
            UploadLimits(limits.MAX_INTERNAL_BYTES, _MAX_UPLOAD_BYTES, _MAX_UPLOAD_BYTES),
            lambda part: True,
        )
        self._sender: PartsSender | None = None
        self._calls: dict[asyncio.Task[None], str | None] = {}
        """The calls in progress, with the ids of those that may be taken back."""
        self._others: set[asyncio.Task[None]] = set()
        """Changes of adapters, and replies being sent in parts."""
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<Endpoints {len(self._calls)} calls>"

    @property
    def num_calls(self) -> int:
        """The calls that wait for their replies."""
        return len(self._calls)

    async def open(self, incoming: Bus, own: OwnSubjects, sender: PartsSender) -> None:
        """Subscribes to every subject, those that others serve of `own` included; from then on the worker can be
        reached.

        Messages from others arrive over `incoming`. Only the broker's own notices, and what routers ask it about this
        process, arrive over the connection that chunks leave on, so that its answers to the frontend's pings never
        queue behind client messages."""
        self._sender = sender
        await self._receiver.open(incoming)
        model, worker_id = self._announcer.model, self._announcer.worker_id
        handlers: dict[str, Callback] = {
            name: partial(self._serve, service) for name, service in self._services().items()
        }
        for name, handler in {**handlers, "tokenizer": self._send_tokenizer}.items():
            own.serve(name, partial(self._receive, handler))
        await own.open()
        self.clients.open(incoming)
        await incoming.subscribe(self._names.discover, lambda _: self._announcer.publish_card())
        await incoming.subscribe(self._names.card(model, worker_id), self._own_card)
        await self._connection.subscribe(self._names.worker(model, worker_id, "gone.*"), self._no_responders)
        alive = self._names.alive(model, worker_id, self._announcer.process_run)
        await self._connection.subscribe(alive, self._worker.line.alive_heard)
        with contextlib.suppress(TimeoutError, ConnectionError):  # reconnecting subscribes again
            await incoming.flush()  # the broker must know the subjects before a card names this worker

    def _services(self) -> dict[str, _Service]:
        """Returns the services of the worker's own subjects, by the last token of each."""

        def service(kind: type[messages.Message], *others: Any, **options: Any) -> _Service:
            return _Service(codec.Decoder(kind), *others, **options)

        call = partial(service, is_call=True)
        return {
            "run": service(internal.Run, validation.check_run, self._run, partial(internal.RunReply, accepted=False)),
            "control": service(
                internal.Control, validation.check_control, self._control, partial(internal.ControlReply, ok=False)
            ),
            "next_turn": service(internal.NextTurn, validation.check_next_turn, self._next_turn),
            "take": service(internal.Take, validation.check_take, self._take),
            "snapshot": service(internal.SnapshotRequest, _allow, self._send_snapshot),
            "abort": service(internal.AbortCall, _allow, self._abort),
            "tokenize": call(internal.Tokenize, validation.check_tokenize, self._tokenize, internal.TokenizeResult),
            "detokenize": call(internal.Detokenize, _allow, self._detokenize, internal.DetokenizeResult),
            "embed": call(internal.Embed, pooling.check_embed, self._embed, internal.EmbedResult),
            "rerank": call(internal.Rerank, pooling.check_rerank, self._rerank, internal.RerankResult),
        }

    def _serve(self, service: _Service, message: Msg) -> None:
        try:
            if service.is_call and len(self._calls) >= _MAX_PENDING_CALLS:
                raise errors.request_error(errors.Code.OVERLOADED)
            request = service.decoder.decode(message.data or _NO_FIELDS)
            service.check(request)
        except errors.RequestError as error:
            self._refuse(service, message, error.error)
            return
        if service.is_call:
            self._worker.line.has_work()
            task = tasks.background("call", self._answer(service, message, request))
            self._calls[task] = getattr(request, "call_id", None)
            task.add_done_callback(self._calls.pop)
        else:
            service.handle(message, request)

    async def _answer(self, service: _Service, message: Msg, request: messages.Message) -> None:
        """Replies with a call's result or with its error."""
        try:
            self._reply(message, await service.handle(request))
        except errors.RequestError as error:
            self._refuse(service, message, error.error)
        except PayloadTooLargeError as error:
            self._refuse(service, message, errors.make_error(errors.Code.PAYLOAD_TOO_LARGE, str(error)))
        except Exception:  # outermost frame of the task: the requester must get a reply
            self._log.exception("request_failed", subject=message.subject)
            self._refuse(service, message, errors.make_error(errors.Code.INTERNAL))

    def _refuse(self, service: _Service, message: Msg, error: errors.Error) -> None:
        reply = service.refusal(error=error) if service.refusal is not None else None
        if reply is None:
            self._log.error("message_refused", subject=message.subject, error=error.message)
        elif isinstance(reply, internal.ControlReply):
            self._answer_operator(message, None, reply)
        else:
            self._reply(message, reply)

    def _receive(self, callback: Callback, message: Msg) -> None:
        """Passes a message on, a large one once all its parts have arrived."""
        try:
            if not self._receiver.announced(message, "routers", callback):
                callback(message)
        except errors.RequestError as error:
            self._reply(message, messages.UploadReply(error=error.error))

    def _run(self, message: Msg, run: internal.Run) -> None:
        if not self._announcer.has_card and run.epoch != self._announcer.epoch:
            # meant for another process of this name, which may live and accept it: a refusal might overtake that
            return
        self._worker.line.has_work()
        self._reply(message, self._streams.accept(run, message.headers))

    def _control(self, message: Msg, control: internal.Control) -> None:
        match control:
            # routers' messages, frequent and unlogged
            case internal.Control(op="drop", request_id=str(key), attempt=int(attempt)):
                ok = self._streams.drop(key, attempt, moved=control.moved)
                self._reply(message, internal.ControlReply(ok=ok, epoch=self._announcer.epoch))
            case internal.Control(op="cancel" | "resync"):
                self.clients.take(message, control)
            case internal.Control(op="load", model=None):
                self._reply(message, self._worker.want())
            case internal.Control(op="stop", request_id=str(key)):
                self._answer_operator(message, control, self._stop(key))
            case internal.Control(op="retain", tenant=str(tenant), session_id=str(session), ttl_ms=float(ttl_ms)):
                if (serving := self._announcer.serving) is not None:
                    serving.engine.retain_session(tenant, session, ttl_ms / 1e3)
                self._reply(message, internal.ControlReply(ok=True))
            case internal.Control(op="clear_cache"):
                if (serving := self._announcer.serving) is not None:
                    serving.engine.clear_cache()
                self._answer_operator(message, control, internal.ControlReply(ok=True))
            case internal.Control(op="load" | "pull", model=str()) if self._worker.load is not None:
                self._worker.load(control, lambda reply: self._answer_operator(message, control, reply))
            case internal.Control(op="load_adapter" | "unload_adapter", adapter=str()):
                failed = internal.ControlReply(ok=False, error=errors.make_error(errors.Code.INTERNAL))
                change = self._change_adapters(message, control)
                self._start(change, lambda _: self._answer_operator(message, control, failed))
            case internal.Control(op="unload") if self._worker.release is not None and not self._is_ending:
                self._answer_operator(message, control, self._worker.release())
            case internal.Control(op="drain" | "unload"):
                self._answer_operator(message, control, internal.ControlReply(ok=True))
                self._worker.drain.request(control.grace_s, control.handover_s)
            case _:
                refusal = errors.make_error(errors.Code.UNSUPPORTED, f"op {control.op!r} with these fields", param="op")
                self._answer_operator(message, control, internal.ControlReply(ok=False, error=refusal))

    @property
    def _is_ending(self) -> bool:
        return self._announcer.state.is_ending

    def _stop(self, key: str) -> internal.ControlReply:
        if self._streams.stop(key, messages.StoppedBy.OPERATOR):
            return internal.ControlReply(ok=True)
        unknown = errors.invalid_field("request_id", "this worker runs no request of that id").error
        return internal.ControlReply(ok=False, error=unknown)

    async def _change_adapters(self, message: Msg, control: internal.Control) -> None:
        self._answer_operator(message, control, await self._worker.adapters.carry_out(control))

    def _take(self, message: Msg, take: internal.Take) -> None:
        # while chunks wait for the broker there is no reply: the router asks again
        if (reply := self._streams.take(take)) is not None:
            self._reply(message, reply)

    def _next_turn(self, message: Msg, turn: internal.NextTurn) -> None:
        self._streams.next_turns.expect(turn)

    def _answer_operator(self, message: Msg, control: internal.Control | None, reply: internal.ControlReply) -> None:
        """Replies to an operator, and logs the command and its result.

        NATS does not tell who sent a message; with permissions on, the inbox names the user (deploy/nats.conf)."""
        # a load replies many times: log its start and its end
        if reply.progress in (None, 0.0, 1.0):
            self._log.warning(
                "control",
                worker_id=self._announcer.worker_id,
                inbox=message.reply.partition(".")[0][:_MAX_LOGGED_CHARS],
                op=control.op if control else None,
                request_id=control.request_id if control else None,
                model=(control.model or "")[:_MAX_LOGGED_CHARS] or None if control else None,
                adapter=(control.adapter or "")[:_MAX_LOGGED_CHARS] or None if control else None,
                replicas=control.replicas if control and control.op == "load" else None,
                ok=reply.ok,
                progress=reply.progress,
                worker_ids=reply.worker_ids or None,
                error=reply.error.message[:_MAX_LOGGED_CHARS] if reply.error else None,
            )
            self._audit(message, control, reply)
        self._reply(message, reply)

    def _audit(self, message: Msg, control: internal.Control | None, reply: internal.ControlReply) -> None:
        if (writer := self._worker.line.audit) is None:
            return
        tenant, actor = actor_of_inbox(message.reply)
        writer.add(
            "control",
            control.op if control else "invalid",
            tenant,
            actor,
            worker_id=self._announcer.worker_id,
            request_id=control.request_id if control else None,
            model=control.model if control else None,
            adapter=control.adapter if control else None,
            ok=reply.ok,
            progress=reply.progress,
            worker_ids=reply.worker_ids,
            error=reply.error.message if reply.error else None,
        )

    def _no_responders(self, message: Msg) -> None:
        if is_no_responders(message):
            self._streams.held.no_responders(*self._names.parse_gone(message.subject))

    def _own_card(self, message: Msg) -> None:
        """Yields to a frontend that serves the same model under the same name and started later."""
        try:
            card = _cards.decode(message.data)
        except errors.RequestError:
            return
        # another worker's card was published on this subject
        if card.address != (self._announcer.model, self._announcer.worker_id):
            return  # the routers log it
        if subjects.epoch_sort_key(card.epoch) > subjects.epoch_sort_key(self._announcer.epoch):
            self._worker.replaced(
                f"another worker {card.worker_id} has started on {card.host}: give each its own --worker-id"
            )

    def _send_snapshot(self, message: Msg, request: internal.SnapshotRequest) -> None:
        running = self._streams.running_requests(request) if message.reply else None
        if running is not None:  # else the router asks again in a second
            known = (self._streams.find_any(key) for key in request.known_tokens)
            ends = [one.end_report(one.terminal) for one in known if one is not None and one.terminal is not None]
            self._reply(message, *self._announcer.snapshot(running, ends))

    def _send_tokenizer(self, message: Msg) -> None:
        serving = self._announcer.serving
        packed = serving.engine.tokenizer_bundle() if serving is not None else None
        if packed is not None:
            self._reply(message, *tokenizer_bundle.to_parts(packed))

    def _abort(self, message: Msg, abort: internal.AbortCall) -> None:
        """Ends a call without a reply. It may already have ended."""
        for task, call_id in self._calls.items():
            if call_id == abort.call_id:
                task.cancel()

    async def _tokenize(self, request: internal.Tokenize) -> internal.TokenizeResult:
        token_ids = await self._require_engine().tokenize(request)
        return internal.TokenizeResult(token_ids=block_hash.pack_token_ids(token_ids))

    async def _embed(self, request: internal.Embed) -> internal.EmbedResult:
        result = await self._require_engine().embed(request)
        if len(result.vectors) > self._connection.max_payload - limits.MESSAGE_RESERVE_BYTES:
            problem = f"{len(request.inputs)} embeddings take {len(result.vectors)} bytes: ask for fewer at a time"
            raise errors.request_error(errors.Code.PAYLOAD_TOO_LARGE, problem, param="input")
        self._metrics.embeddings.inc(len(request.inputs))
        self._metrics.embedded_tokens.inc(result.prompt_tokens)
        return result

    async def _rerank(self, request: internal.Rerank) -> internal.RerankResult:
        result = await self._require_engine().rerank(request)
        self._metrics.scored_documents.inc(len(request.documents))
        return result

    async def _detokenize(self, request: internal.Detokenize) -> internal.DetokenizeResult:
        packed, token_bytes = request.token_ids, self._require_engine().token_bytes
        if len(packed) % _TOKEN_ID_BYTES:
            raise errors.invalid_field("token_ids", "must be 32-bit integers")
        parts: list[bytes] = []
        for start in range(0, len(packed), _DETOKENIZED_AT_ONCE * _TOKEN_ID_BYTES):
            token_ids = block_hash.unpack_token_ids(packed[start : start + _DETOKENIZED_AT_ONCE * _TOKEN_ID_BYTES])
            if max(token_ids) >= len(token_bytes):
                problem = f"the vocabulary has {len(token_bytes)} tokens, got {max(token_ids)}"
                place = start // _TOKEN_ID_BYTES + token_ids.index(max(token_ids))
                raise errors.invalid_field(f"token_ids[{place}]", problem)
            parts += map(token_bytes.__getitem__, token_ids)
            await asyncio.sleep(0)  # chunks go first
        text = b"".join(parts).decode(errors="replace")
        return internal.DetokenizeResult(text=text, pieces=parts if request.return_pieces else [])

    def _start(self, work: Coroutine[Any, Any, None], on_failure: Callable[[Exception], None] | None = None) -> None:
        task = tasks.background("call", work, on_failure)
        self._others.add(task)
        task.add_done_callback(self._others.discard)

    def _require_engine(self) -> contract.Engine:
        """Raises RequestError if there is no engine."""
        if self._announcer.serving is None:
            raise errors.request_error(errors.Code.NO_WORKER, "the engine is not running")
        return self._announcer.serving.engine

    def _reply(self, message: Msg, *replies: messages.Message) -> None:
        """Publishes one message or several on a request's reply subject, if it has one."""
        for reply in replies if message.reply else ():
            payload = codec.encode(reply)
            if self._sender is None or self._sender.fits(payload):
                self._replies.send(message.reply, payload)
            else:
                self._start(self._send_large(self._sender, Outgoing(message.reply, payload)))

    async def _send_large(self, sender: PartsSender, reply: Outgoing) -> None:
        """Sends a reply in parts, the last one after all chunks published earlier."""
        try:
            last = await sender.stage(reply)
            self._replies.send(last.subject, last.payload, last.headers)
        except (NoRespondersError, PayloadTooLargeError, TimeoutError, ConnectionError, errors.RequestError) as error:
            self._log.error("reply_not_sent", subject=reply.subject, error=str(error))
