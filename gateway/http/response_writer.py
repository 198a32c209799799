"""Writes the response to an HTTP request: in one piece, or as a stream of events."""

import time
from collections.abc import Callable, Mapping

from starlette.types import Send

from tokenbus.gateway.http import rate_limit_headers
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.protocol.wire import messages

LimitHeaders = Callable[[messages.RateLimits, float], dict[str, str]]
"""Returns an API's headers for what a client has left, at a Unix time."""

EVENT_STREAM = "text/event-stream"
_STREAMED = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""The last header makes nginx pass events on immediately."""
_ID_HEADERS = (b"x-request-id", b"request-id")
"""OpenAI's and Anthropic's clients look for the request's id in these."""


class ResponseWriter:
    """Writes one response. Writing waits while the client reads slowly."""

    def __init__(
        self,
        send: Send,
        request_id: str,
        event_type: str = EVENT_STREAM,
        limit_headers: LimitHeaders = rate_limit_headers.to_openai,
    ) -> None:
        """`event_type` is the media type of a stream of events."""
        self._send = send
        self._event_type = event_type
        self._request_id = request_id
        self._limit_headers = limit_headers
        self.rate_limits: messages.RateLimits | None = None
        """The limits of the client, for the headers."""
        self.status: int | None = None
        """None until the response has started."""

    def __repr__(self) -> str:
        return f"<ResponseWriter {self.status or 'not started'}>"

    @property
    def has_started(self) -> bool:
        return self.status is not None

    async def send_json(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Sends a whole JSON response."""
        length = {"content-type": "application/json", "content-length": str(len(body))}
        await self._start(status, length | dict(headers or {}))
        await self._write(body, more=False)

    async def send_error(self, status: int, response: ErrorResponse, encode: Callable[[ErrorResponse], bytes]) -> None:
        """Sends a whole error response, with its API's status and body."""
        self.rate_limits = response.rate_limits or self.rate_limits
        await self.send_json(status, encode(self.named(response)), response.headers)

    def named(self, response: ErrorResponse) -> ErrorResponse:
        """Returns an error with the id of this request."""
        return response._replace(request_id=self._request_id)

    async def send_events(self, *events: bytes, last: bool = False) -> None:
        """Sends events, starting the response with the first; `last` completes it."""
        if not self.has_started:
            await self._start(200, {"content-type": f"{self._event_type}; charset=utf-8"} | _STREAMED)
        await self._write(b"".join(events), more=not last)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        assert not self.has_started, self
        self.status = status
        if self.rate_limits is not None:
            headers = {**headers, **self._limit_headers(self.rate_limits, time.time())}
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        pairs += [(name, self._request_id.encode()) for name in _ID_HEADERS]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _write(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
