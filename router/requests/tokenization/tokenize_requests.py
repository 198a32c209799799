"""Clients' own requests to tokenize and to detokenize: each is answered once.

Their memory is bounded, and a tenant may have at most a quarter of it, so that none can crowd out the others."""

import asyncio
import itertools
import time
from collections import Counter
from typing import NamedTuple

import structlog
from msgspec import UNSET

from tokenbus.protocol import tasks
from tokenbus.protocol.bus.bus import PayloadTooLargeError
from tokenbus.protocol.bus.reply_sender import ReplySender
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import codec, errors, internal, messages, subjects
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.requests.tokenization.prompt_tokenizer import Prompt, PromptTokenizer
from tokenbus.router.telemetry.metrics import RouterMetrics

MAX_OPEN_BYTES = 64 * 1024 * 1024
MAX_TENANT_BYTES = MAX_OPEN_BYTES // 4
REQUEST_BYTES = 16 * 1024
"""The cost of a request in addition to the bytes of its message."""
_DEFAULT_TIMEOUT_MS = 60_000.0

Body = messages.TokenizeRequest | messages.DetokenizeRequest
Reply = messages.TokenizeReply | messages.DetokenizeReply
_Replies = type[messages.TokenizeReply] | type[messages.DetokenizeReply]


class ClientTokenizeCall(NamedTuple):
    """A valid request, and where its reply goes."""

    request_id: str
    address: subjects.ModelAddress
    body: Body
    reply: str
    encoding: codec.Encoding
    received_at: float
    num_bytes: int
    """The size of its message."""

    @property
    def operation(self) -> str:
        return "tokenize" if isinstance(self.body, messages.TokenizeRequest) else "detokenize"

    @property
    def replies(self) -> _Replies:
        """The type of its reply."""
        return messages.TokenizeReply if self.operation == "tokenize" else messages.DetokenizeReply

    @property
    def cost_bytes(self) -> int:
        return REQUEST_BYTES + self.num_bytes

    @property
    def remaining_s(self) -> float:
        timeout_s = (self.body.timeout_ms or _DEFAULT_TIMEOUT_MS) / 1e3
        return max(0.0, self.received_at + timeout_s - time.monotonic())


class TokenizeRequests:
    """The requests of one router's clients for tokens or their text."""

    def __init__(
        self,
        replies: ReplySender,
        prompts: PromptTokenizer,
        fleet: Fleet,
        metrics: RouterMetrics,
        tracer: tracing.Tracer,
    ) -> None:
        self._replies = replies
        self._prompts = prompts
        self._fleet = fleet
        self._metrics = metrics
        self._tracer = tracer
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open_bytes: Counter[str] = Counter()
        """The cost of each tenant's open requests."""
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<TokenizeRequests, {len(self._tasks)} open>"

    def start(self, call: ClientTokenizeCall, headers: tracing.Headers) -> None:
        """Takes a request. Raises RequestError(overloaded) if too many are open."""
        tenant = call.address.tenant
        if (
            self._open_bytes.total() + call.cost_bytes > MAX_OPEN_BYTES
            or self._open_bytes[tenant] + call.cost_bytes > MAX_TENANT_BYTES
        ):
            raise errors.RequestError(errors.make_error(errors.Code.OVERLOADED, retry_after_ms=1_000.0))
        self._open_bytes[tenant] += call.cost_bytes
        known = {
            tracing.MODEL: call.address.model,
            tracing.OPERATION: call.operation,
            tracing.REQUEST_ID: call.request_id,
        }
        span = tracing.start_span(self._tracer, "route", "server", headers, known, call.received_at)
        task = tasks.background("tokenize request", self._carry(call, span))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Returns when every request was answered."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def shut_down(self) -> None:
        """Answers the open requests with an error."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def refuse(
        self, subject: str, encoding: codec.Encoding, replies: _Replies, request_id: str, error: errors.Error
    ) -> None:
        """Answers a request that can't be taken."""
        self._log.info("tokenize_refused", request_id=request_id, code=error.code, param=error.param)
        self._send(subject, encoding, replies(id=request_id, error=error))

    async def _carry(self, call: ClientTokenizeCall, span: tracing.Span) -> None:
        with span:
            try:
                reply = await self._answer(call)
            except errors.RequestError as error:
                reply = call.replies(id=call.request_id, error=error.error)
            except asyncio.CancelledError:  # only `shut_down` cancels
                reply = call.replies(id=call.request_id, error=errors.make_error(errors.Code.SHUTTING_DOWN))
            except Exception:  # outermost frame of a request: whatever went wrong, the client gets a reply
                self._log.exception("request_failed", request_id=call.request_id)
                reply = call.replies(id=call.request_id, error=errors.make_error(errors.Code.INTERNAL))
            finally:
                self._open_bytes[call.address.tenant] -= call.cost_bytes
                self._open_bytes += Counter()  # drops entries that are not above 0
            sent = self._send(call.reply, call.encoding, reply)
            if sent.error:
                span.set_error(str(sent.error.code))
        code = sent.error.code if sent.error else None
        self._metrics.tokenizations.labels(call.operation, code or "ok").inc()
        self._log.info(
            "tokenize_finished",
            request_id=call.request_id,
            op=call.operation,
            model=call.address.model,
            code=code,
            total_ms=round((time.monotonic() - call.received_at) * 1e3, 1),
        )

    async def _answer(self, call: ClientTokenizeCall) -> Reply:
        model, body = call.address.model, call.body
        if isinstance(body, messages.DetokenizeRequest):
            text = await self._prompts.detokenize(model, body.token_ids or [], call.remaining_s)
            return messages.DetokenizeReply(id=call.request_id, model=model, text=text)
        prompt = Prompt(
            _source(body),
            model,
            call.address.tenant,
            f"{call.address.tenant}:tokenize {next(self._numbers)}",  # no request's key has a space
            call.received_at,
            call.num_bytes,
        )
        token_ids = await self._prompts.tokenize(prompt, call.remaining_s)
        contexts = [worker.card.context_length for worker in self._fleet.workers_of(model)]
        return messages.TokenizeReply(
            id=call.request_id,
            model=model,
            count=len(token_ids),
            token_ids=UNSET if body.only_count else token_ids,
            context_length=min(contexts) if contexts else UNSET,
        )

    def _send(self, subject: str, encoding: codec.Encoding, reply: Reply) -> Reply:
        """Publishes a reply, or an error in its place if it is too large for the broker, and returns what it sent."""
        headers = codec.error_headers(reply.error) if reply.error else None
        try:
            self._replies.send(subject, codec.encode(reply, encoding), headers)
        except PayloadTooLargeError as problem:
            error = errors.make_error(errors.Code.PAYLOAD_TOO_LARGE, f"{problem}: ask for less at a time")
            return self._send(subject, encoding, type(reply)(id=reply.id, error=error))
        return reply


def _source(body: messages.TokenizeRequest) -> internal.Tokenize:
    return internal.Tokenize(
        text=body.prompt,
        messages=body.messages,
        chat_template_kwargs=body.chat_template_kwargs,
        tools=body.tools,
        add_special_tokens=body.add_special_tokens is not False,
    )
