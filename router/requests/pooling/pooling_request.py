"""One request for embeddings or ranked documents."""

import asyncio
import time
from typing import Generic, NamedTuple, TypeVar

from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import codec, errors, internal, messages, subjects

BodyT = TypeVar("BodyT", messages.EmbedRequest, messages.RerankRequest)
WorkT = TypeVar("WorkT", internal.Embed, internal.Rerank)


class PoolingRequest(NamedTuple, Generic[BodyT, WorkT]):
    """A valid request, and where its reply goes."""

    request_id: str
    address: subjects.ModelAddress
    body: BodyT
    work: WorkT
    reply: str
    encoding: codec.Encoding
    received_at: float
    end: "asyncio.Future[errors.Code]"
    """Ends the request before there is a result, with this code."""
    span: tracing.Span = tracing.NOOP_SPAN

    @property
    def key(self) -> str:
        return subjects.request_key(self.address.tenant, self.request_id)

    @property
    def remaining_s(self) -> float:
        return self.received_at + self.work.remaining_ms / 1e3 - time.monotonic()
