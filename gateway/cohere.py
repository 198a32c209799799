"""Ranks documents in Cohere's and Jina's form: turns bodies into wire requests, and replies into responses."""

import functools

import msgspec
from msgspec import UNSET, UnsetType

from tokenbus.client.wire.wire_client import WireClient
from tokenbus.gateway.serving.dialect import ApiEndpoint, ParsedCall, RequestHead
from tokenbus.protocol.wire import messages as wire
from tokenbus.protocol.wire.checks import pooling


class Document(msgspec.Struct, frozen=True, kw_only=True):
    text: str


class RerankBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a rerank request. Unknown fields are ignored."""

    model: str | None = None
    query: str | None = None
    documents: list[str | Document] | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    timeout_ms: float | None = None
    """Not from Cohere or Jina; has the same meaning as on the wire."""


class CohereRerankResult(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    """The number of the document in the request, from 0."""
    relevance_score: float
    document: Document | UnsetType = UNSET


class RerankUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class RerankResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The documents, most relevant first."""

    id: str
    model: str
    results: list[CohereRerankResult]
    usage: RerankUsage


def read(asked: RerankBody, head: RequestHead) -> ParsedCall[wire.RerankRequest, wire.RerankReply]:
    """Validates a body as a router would. Raises RequestError naming the field at fault."""
    documents = [one if isinstance(one, str) else one.text for one in asked.documents or []]
    request = wire.RerankRequest(
        id=head.id, query=asked.query, documents=documents, top_n=asked.top_n, timeout_ms=asked.timeout_ms
    )
    pooling.check_rerank_request(request)
    returned = documents if asked.return_documents else None
    return ParsedCall(
        model=head.model,
        request=request,
        send=WireClient.rerank,
        encode=functools.partial(_encode, head.model, returned),
        usage_of=lambda reply: reply.usage or None,
    )


RERANK = ApiEndpoint(
    path="/v1/rerank",
    feature="rerank",
    summary="Documents ordered by relevance",
    body=RerankBody,
    read=read,
    response=RerankResponse,
    required=("query", "documents"),
)


def _encode(model: str, documents: list[str] | None, reply: wire.RerankReply) -> bytes:
    results = [
        CohereRerankResult(
            index=one.index,
            relevance_score=one.relevance_score,
            document=UNSET if documents is None else Document(text=documents[one.index]),
        )
        for one in reply.results or []
    ]
    tokens = reply.usage.prompt_tokens if reply.usage else 0
    usage = RerankUsage(prompt_tokens=tokens, total_tokens=tokens)
    return msgspec.json.encode(RerankResponse(id=reply.id, model=model, results=results, usage=usage))
