"""Serves an endpoint that generates nothing: one wire request and one reply, in its dialect's terms."""

import asyncio
import functools
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from tokenbus.gateway.admission.endpoint import Endpoint, HttpExchange, Services
from tokenbus.gateway.calls.dialect import CallDialect, ParsedCall, ReplyT, RequestT
from tokenbus.gateway.http import body, http_errors
from tokenbus.protocol import tasks
from tokenbus.protocol.wire import errors

ResultT = TypeVar("ResultT")


class CallEndpoint(Endpoint, Generic[RequestT, ReplyT]):
    """The ASGI application of one endpoint; watches for a client disconnect until the reply."""

    def __init__(self, services: Services, dialect: CallDialect[RequestT, ReplyT]) -> None:
        super().__init__(services, dialect)
        self._dialect = dialect

    async def _serve(self, exchange: HttpExchange) -> None:
        parsed = await self._read(exchange)
        served_as = self._services.aliases.resolve(parsed.model, exchange.request_id)
        try:
            await body.cancel_on_disconnect(exchange.request.receive, self._respond(exchange, served_as, parsed))
        except errors.RequestError as refused:
            raise http_errors.ApiError(parsed.named(http_errors.from_error(refused.error))) from refused

    async def _read(self, exchange: HttpExchange) -> ParsedCall[RequestT, ReplyT]:
        # In a separate method, so that nothing holds the body while the request is served.
        payload = await body.read(exchange.request, self._services.bodies.max_body_bytes, exchange.held_body)
        default = self._services.aliases.default
        parse = functools.partial(self._dialect.parse, payload, exchange.request.headers, exchange.request_id, default)
        parsed = await self._services.parser.parse(parse, len(payload))
        exchange.log.received(parsed.model, body_bytes=len(payload))
        return parsed

    async def _respond(self, exchange: HttpExchange, served_as: str, parsed: ParsedCall[RequestT, ReplyT]) -> None:
        open_call = OpenCall()
        with self._services.limit.track(open_call):
            reply = await open_call.run(self._dialect.send(exchange.tenant.client, served_as, parsed.request))
        exchange.log.set_usage(self._dialect.usage_of(reply))
        await exchange.writer.send_json(200, parsed.encode(reply))


class OpenCall:
    """A call that can be ended when the gateway shuts down."""

    def __init__(self) -> None:
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return f"<OpenCall{', failed' if self._failure.done() else ''}>"

    async def run(self, call: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Returns the call's result. Raises RequestError with the error of `fail` if that is called first."""
        working = tasks.awaited(call)
        try:
            either: set[asyncio.Future[Any]] = {working, self._failure}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                self._failure.result()
            return working.result()
        finally:
            working.cancel()

    def cancel(self) -> None:
        """Does nothing: `fail` follows, and the client library then cancels whatever can be cancelled."""

    def fail(self, error: errors.Error) -> None:
        """Ends the call with an error."""
        if not self._failure.done():
            self._failure.set_exception(errors.RequestError(error))
            self._failure.exception()  # marks it as retrieved: the call may have just ended by itself
