"""Ranks and scores texts in the forms of Cohere, Jina, vLLM and TEI: turns bodies into wire requests, and replies into
responses."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from tokenbus.client.wire.embedding import rank_each
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.gateway.http import http_errors
from tokenbus.gateway.serving.dialect import ApiEndpoint, ParsedCall, RefusedPath, RequestHead, UnservedField
from tokenbus.protocol.wire import errors
from tokenbus.protocol.wire import messages as wire
from tokenbus.protocol.wire.checks import pooling

MAX_PAIRS = 1_000
"""The most pairs of texts that one request scores."""


class Document(msgspec.Struct, frozen=True, kw_only=True):
    text: str


class RerankBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a rerank request. Unknown fields are ignored."""

    model: str | None = None
    query: str | None = None
    documents: list[str | Document] | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    texts: list[str] | None = None
    """TEI's name of `documents`, in whose form the response then is."""
    raw_scores: bool | None = None
    """TEI's: whether scores are the model's own, rather than between 0 and 1. If absent, false with `texts`, and true
    otherwise."""
    return_text: bool | None = None
    """TEI's: whether results have the text. false if absent."""
    timeout_ms: float | None = None
    """Ours; has the same meaning as on the wire."""


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


class TeiRank(msgspec.Struct, frozen=True, kw_only=True):
    """A text in TEI's response, which is a list of these, most relevant first."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class ScoreBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of vLLM's score request: one text with each of several, or pairs. Unknown fields are ignored."""

    model: str | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    timeout_ms: float | None = None
    """Ours; has the same meaning as on the wire."""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    object: str = "score"
    score: float


class ScoreResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The scores, in the order of the texts."""

    id: str
    object: str = "list"
    model: str
    data: list[Score]
    usage: RerankUsage


def read(asked: RerankBody, head: RequestHead) -> ParsedCall[wire.RerankRequest, wire.RerankReply]:
    """Validates a body as a router would. Raises RequestError naming the field at fault."""
    if asked.texts is not None and asked.documents is not None:
        raise errors.invalid_field("texts", "is another name of documents: give one of them")
    given = asked.documents if asked.texts is None else asked.texts
    documents = [one if isinstance(one, str) else one.text for one in given or []]
    request = wire.RerankRequest(
        id=head.id, query=asked.query, documents=documents, top_n=asked.top_n, timeout_ms=asked.timeout_ms
    )
    name_of = http_errors.by_field({} if asked.texts is None else {"documents": "texts"})
    with http_errors.renaming(name_of):
        pooling.check_rerank_request(request)
    returned = documents if asked.return_documents or asked.return_text else None
    return ParsedCall(
        model=head.model,
        request=request,
        send=WireClient.rerank,
        encode=functools.partial(_encode, head.model, returned, is_raw=asked.raw_scores is not False)
        if asked.texts is None
        else functools.partial(_encode_for_tei, returned, is_raw=bool(asked.raw_scores)),
        usage_of=lambda reply: reply.usage or None,
        name_of=name_of,
    )


def read_score(asked: ScoreBody, head: RequestHead) -> ParsedCall[list[wire.RerankRequest], list[wire.RerankReply]]:
    """Validates a body as a router would. Raises RequestError with vLLM's name for the field at fault."""
    first, second = (_listed(one) for one in (asked.text_1, asked.text_2))
    if not first:
        raise errors.invalid_field("text_1", "must not be empty")
    if len(first) not in (1, len(second)):
        raise errors.invalid_field("text_1", f"must be one text, or as many as text_2 has, which is {len(second)}")
    if len(first) > MAX_PAIRS:
        raise errors.invalid_field("text_1", f"at most {MAX_PAIRS} pairs are scored, got {len(first)}")
    is_paired = len(first) > 1
    asks = zip(first, ([one] for one in second), strict=True) if is_paired else [(first[0], second)]
    requests = [
        wire.RerankRequest(id=f"{head.id}-{number}", query=query, documents=documents, timeout_ms=asked.timeout_ms)
        for number, (query, documents) in enumerate(asks)
    ]
    for number, request in enumerate(requests):
        with http_errors.renaming(functools.partial(_name_of, number if is_paired else None)):
            pooling.check_rerank_request(request)
    return ParsedCall(
        model=head.model,
        request=requests,
        send=rank_each,
        encode=functools.partial(_encode_scores, head),
        usage_of=_usage,
        name_of=functools.partial(_name_of, None),
    )


def _listed(texts: str | list[str] | None) -> list[str]:
    return [texts] if isinstance(texts, str) else texts or []


def _name_of(pair: int | None, param: str) -> str:
    """Returns vLLM's name for a field of the wire, given the number of a pair, if there are several."""
    if pair is None:
        return http_errors.by_field({"query": "text_1", "documents": "text_2"})(param)
    return f"text_1[{pair}]" if param == "query" else f"text_2[{pair}]"


_UNCUT = "a text that is too long is refused, never cut"
_TEXTS = "use text_1 and text_2"
_RERANKERS = "only models that rank documents score them"
_UNSERVED = {
    "mm_processor_kwargs": UnservedField("only text is served", (None, {})),
    "padding": UnservedField("texts are not padded", (None, "do_not_pad")),
    "truncate_prompt_tokens": UnservedField(_UNCUT),
    "use_activation": UnservedField("the meaning of a score depends on the model"),
}
_IGNORED = {
    "cache_salt": "texts are not cached",
    "priority": "texts are scored in the order in which they come",
    "request_id": "the header X-Request-ID names requests",
    "truncation_side": "a parameter of truncate_prompt_tokens, which is refused",
    "user": "a name for abuse reports",
}
RERANK = ApiEndpoint(
    path="/v1/rerank",
    feature="rerank",
    summary="Documents ordered by relevance",
    body=RerankBody,
    read=read,
    response=RerankResponse | list[TeiRank],
    required=("query",),
    one_of=("documents", "texts"),
    unserved=_UNSERVED
    | {
        "instruct": UnservedField("write the instruction into the query as the model expects it"),
        "rank_fields": UnservedField("documents are ranked by their text", (None, [], ["text"])),
        "return_embeddings": UnservedField("use /v1/embeddings", (None, False)),
        "top_k": UnservedField("use top_n"),
    },
    ignored=_IGNORED
    | {
        "max_chunks_per_doc": _UNCUT,
        "max_tokens_per_doc": _UNCUT,
        "truncate": _UNCUT,
        "truncation": _UNCUT,
        "truncation_direction": _UNCUT,
    },
)
SCORE = ApiEndpoint(
    path="/v1/score",
    feature="rerank",
    summary="How relevant texts are to others",
    body=ScoreBody,
    read=read_score,
    response=ScoreResponse,
    required=("text_1", "text_2"),
    unserved=_UNSERVED
    | dict.fromkeys(("data_1", "data_2", "documents", "items", "queries", "query"), UnservedField(_TEXTS))
    | {
        "apply_softmax": UnservedField(_RERANKERS, (None, False)),
        "item_first": UnservedField(_RERANKERS, (None, False)),
        "label_token_ids": UnservedField(_RERANKERS),
        "return_pooled_hidden_states": UnservedField("no states of the model are returned", (None, False)),
    },
    ignored=_IGNORED,
)
RERANKS = (RERANK, dataclasses.replace(RERANK, path="/v2/rerank"))
_OTHERS = "only reranking is served in the form of Cohere's and TEI's APIs"
REFUSED = (
    *(
        RefusedPath(path, ("POST",), f"{_OTHERS}: use /v1/chat/completions, /v1/messages or /api/chat")
        for path in ("/v1/chat", "/v2/chat", "/chat")
    ),
    *(
        RefusedPath(path, ("POST",), f"{_OTHERS}: use /v1/embeddings")
        for path in ("/v1/embed", "/v2/embed", "/embed", "/embed_all", "/embed_sparse")
    ),
    *(
        RefusedPath(path, ("POST",), f"{_OTHERS}: there are no classifiers")
        for path in ("/v1/classify", "/classify", "/predict")
    ),
    RefusedPath("/similarity", ("POST",), f"{_OTHERS}: use /v1/embeddings, whose vectors have length 1, or /v1/score"),
    RefusedPath("/info", ("GET",), f"{_OTHERS}: GET /v1/models lists the models"),
)


def _encode(model: str, documents: list[str] | None, reply: wire.RerankReply, *, is_raw: bool) -> bytes:
    results = [
        CohereRerankResult(
            index=one.index,
            relevance_score=one.relevance_score if is_raw else _sigmoid(one.relevance_score),
            document=UNSET if documents is None else Document(text=documents[one.index]),
        )
        for one in reply.results or []
    ]
    return msgspec.json.encode(RerankResponse(id=reply.id, model=model, results=results, usage=_encode_usage([reply])))


def _encode_for_tei(documents: list[str] | None, reply: wire.RerankReply, *, is_raw: bool) -> bytes:
    return msgspec.json.encode(
        [
            TeiRank(
                index=one.index,
                score=one.relevance_score if is_raw else _sigmoid(one.relevance_score),
                text=UNSET if documents is None else documents[one.index],
            )
            for one in reply.results or []
        ]
    )


def _encode_scores(head: RequestHead, replies: Sequence[wire.RerankReply]) -> bytes:
    scores = [
        one.relevance_score for reply in replies for one in sorted(reply.results or [], key=lambda one: one.index)
    ]
    data = [Score(index=number, score=score) for number, score in enumerate(scores)]
    return msgspec.json.encode(ScoreResponse(id=head.id, model=head.model, data=data, usage=_encode_usage(replies)))


def _usage(replies: Sequence[wire.RerankReply]) -> wire.Usage | None:
    """Returns the tokens of all requests."""
    usages = [one.usage for one in replies if one.usage]
    if not usages:
        return None
    tokens = sum(one.prompt_tokens for one in usages)
    cached = sum(one.cached_tokens for one in usages)
    return wire.Usage(prompt_tokens=tokens, completion_tokens=0, total_tokens=tokens, cached_tokens=cached)


def _encode_usage(replies: Sequence[wire.RerankReply]) -> RerankUsage:
    usage = _usage(replies)
    tokens = usage.prompt_tokens if usage else 0
    return RerankUsage(prompt_tokens=tokens, total_tokens=tokens)


def _sigmoid(score: float) -> float:
    return 0.5 * (1 + math.tanh(0.5 * score))  # which can't overflow
