"""Cohere's and Jina's form of ranking, as requests and replies of the wire."""

import json
from typing import Any

import pytest

from tokenbus.gateway import cohere
from tokenbus.gateway.serving.dialect import ParsedCall
from tokenbus.protocol.wire import errors, messages

USAGE = messages.Usage(prompt_tokens=7, completion_tokens=0, total_tokens=7, cached_tokens=0)
REPLY = messages.RerankReply(
    id="r",
    model="served",
    results=[
        messages.RankedDocument(index=1, relevance_score=2.5),
        messages.RankedDocument(index=0, relevance_score=-1.0),
    ],
    usage=USAGE,
)


def parse(**fields: Any) -> ParsedCall:
    body = {"model": "m", "query": "q", "documents": ["a", {"text": "b", "title": "t"}]} | fields
    return cohere.RERANK.parse(json.dumps(body).encode(), {}, "r")


def test_documents_may_be_texts_or_objects_with_a_text() -> None:
    assert parse(top_n=1, max_tokens_per_doc=5).request == messages.RerankRequest(
        id="r", query="q", documents=["a", "b"], top_n=1
    )


@pytest.mark.parametrize("returned", [False, True])
def test_results_have_their_documents_if_these_were_asked_for(returned: bool) -> None:
    found = json.loads(parse(return_documents=returned).encode(REPLY))
    assert [(one["index"], one["relevance_score"]) for one in found["results"]] == [(1, 2.5), (0, -1.0)]
    expected = [{"text": "b"}, {"text": "a"}] if returned else [None, None]
    assert [one.get("document") for one in found["results"]] == expected
    assert (found["id"], found["model"], found["usage"]) == ("r", "m", {"prompt_tokens": 7, "total_tokens": 7})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": None}, "query"),
        ({"query": ""}, "query"),
        ({"documents": None}, "documents"),
        ({"documents": []}, "documents"),
        ({"documents": ["a", ""]}, "documents[1]"),
        ({"documents": [{"title": "t"}]}, "documents[0]"),
        ({"documents": ["a"] * 1_001}, "documents"),
        ({"top_n": 0}, "top_n"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(errors.RequestError) as refused:
        parse(**fields)
    assert (refused.value.error.param or "").startswith(param)
