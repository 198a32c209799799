"""Requests to rank documents are validated, and scores become an order."""

import struct

import pytest

from tokenbus.protocol.wire import errors, limits, messages
from tokenbus.protocol.wire.checks import pooling


def refused(**fields: object) -> errors.Error:
    with pytest.raises(errors.RequestError) as refusal:
        pooling.check_rerank_request(messages.RerankRequest(**fields))  # type: ignore[arg-type]
    return refusal.value.error


def packed(*scores: float) -> bytes:
    return struct.pack(f"<{len(scores)}f", *scores)


def test_what_is_left_out_has_the_wire_s_default() -> None:
    work = pooling.check_rerank_request(messages.RerankRequest(query="q", documents=["a", "b"]))
    assert (work.query, work.documents, work.remaining_ms) == ("q", ["a", "b"], 60_000.0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "q"}, "documents"),
        ({"query": "q", "documents": []}, "documents"),
        ({"query": "q", "documents": ["a", ""]}, "documents[1]"),
        ({"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        ({"query": "q", "documents": ["a"], "timeout_ms": 0.0}, "timeout_ms"),
        ({"query": "q", "documents": ["a"], "id": "a b"}, "id"),
    ],
)
def test_a_refusal_names_the_field(fields: dict[str, object], param: str) -> None:
    error = refused(**fields)
    assert (error.code, error.param) == (errors.Code.INVALID_REQUEST, param)


def test_as_many_documents_as_the_limit_are_taken_and_one_more_is_not() -> None:
    most = limits.MAX_RERANK_DOCUMENTS
    assert (
        len(pooling.check_rerank_request(messages.RerankRequest(query="q", documents=["a"] * most)).documents) == most
    )
    assert str(most) in refused(query="q", documents=["a"] * (most + 1)).message


def test_the_best_document_comes_first_and_of_equal_ones_the_earlier() -> None:
    found = pooling.rank(packed(0.5, -1.0, 2.0, 0.5), None)
    assert [one.index for one in found] == [2, 0, 3, 1]
    assert [one.relevance_score for one in found] == [2.0, 0.5, 0.5, -1.0]


@pytest.mark.parametrize(("top_n", "count"), [(1, 1), (3, 3), (9, 3)])
def test_no_more_results_come_than_were_asked_for(top_n: int, count: int) -> None:
    assert [one.index for one in pooling.rank(packed(1.0, 2.0, 3.0), top_n)] == [2, 1, 0][:count]
