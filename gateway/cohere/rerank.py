"""Ranks documents in Cohere's and Jina's form: turns bodies into wire requests, and replies into responses."""

from collections.abc import Mapping

import msgspec
from msgspec import UNSET, UnsetType

from tokenbus.gateway.generation.model_names import checked_model
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.protocol.wire import codec
from tokenbus.protocol.wire import messages as wire
from tokenbus.protocol.wire.checks import pooling

_encoder = msgspec.json.Encoder()


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


_decoder = codec.Decoder(RerankBody)


class ParsedRerank(msgspec.Struct, frozen=True, kw_only=True):
    """A valid rerank request."""

    model: str
    request: wire.RerankRequest
    returns_documents: bool

    def encode(self, reply: wire.RerankReply) -> bytes:
        """Returns the body of the response."""
        documents = self.request.documents or []
        results = [
            CohereRerankResult(
                index=one.index,
                relevance_score=one.relevance_score,
                document=Document(text=documents[one.index]) if self.returns_documents else UNSET,
            )
            for one in reply.results or []
        ]
        tokens = reply.usage.prompt_tokens if reply.usage else 0
        usage = RerankUsage(prompt_tokens=tokens, total_tokens=tokens)
        return _encoder.encode(RerankResponse(id=reply.id, model=self.model, results=results, usage=usage))

    def named(self, error: ErrorResponse) -> ErrorResponse:
        """Returns the error: its field has the same name on the wire."""
        return error


def parse(body: bytes, headers: Mapping[str, str], request_id: str, default_model: str = "") -> ParsedRerank:
    """Parses a body, and validates it as a router would. Raises RequestError naming the field at fault."""
    asked = _decoder.decode(body, codec.Encoding.JSON)
    documents = [one if isinstance(one, str) else one.text for one in asked.documents or []]
    request = wire.RerankRequest(
        id=request_id, query=asked.query, documents=documents, top_n=asked.top_n, timeout_ms=asked.timeout_ms
    )
    model = checked_model(asked.model, default_model)
    pooling.check_rerank_request(request)
    return ParsedRerank(model=model, request=request, returns_documents=bool(asked.return_documents))


def usage_of(reply: wire.RerankReply) -> wire.Usage | None:
    """Returns the tokens of all documents, each counted with the query."""
    return reply.usage or None
