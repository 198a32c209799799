"""Ranks and scores in the forms of Cohere, Jina, vLLM and TEI, as requests and replies of the wire."""

import json
import math
from typing import Any

import pytest

from tokenbus.gateway import rerank
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
    return rerank.RERANK.parse(json.dumps(body).encode(), {}, "r")


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


@pytest.mark.parametrize(("raw_scores", "score"), [(None, 2.5), (True, 2.5), (False, 1 / (1 + math.exp(-2.5)))])
def test_scores_are_between_0_and_1_if_they_are_not_to_be_raw(raw_scores: bool | None, score: float) -> None:
    found = json.loads(parse(raw_scores=raw_scores).encode(REPLY))
    assert found["results"][0]["relevance_score"] == pytest.approx(score)


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


def parse_for_tei(**fields: Any) -> ParsedCall:
    return rerank.RERANK.parse(json.dumps({"model": "m", "query": "q", "texts": ["a", "b"]} | fields).encode(), {}, "r")


def test_texts_are_ranked_in_teis_form_with_scores_between_0_and_1_unless_they_are_to_be_raw() -> None:
    assert parse_for_tei().request == messages.RerankRequest(id="r", query="q", documents=["a", "b"])
    raw = json.loads(parse_for_tei(raw_scores=True, return_text=True).encode(REPLY))
    assert raw == [{"index": 1, "score": 2.5, "text": "b"}, {"index": 0, "score": -1.0, "text": "a"}]
    first, second = json.loads(parse_for_tei().encode(REPLY))
    assert (first["score"], second["score"]) == (pytest.approx(0.924142, abs=1e-6), pytest.approx(0.268941, abs=1e-6))
    assert "text" not in first


def test_a_wrong_text_is_named_as_tei_does() -> None:
    for fields, param in (
        ({"texts": ["a", ""]}, "texts[1]"),
        ({"documents": ["a"]}, "texts"),
        ({"texts": []}, "texts"),
    ):
        with pytest.raises(errors.RequestError) as refused:
            parse_for_tei(**fields)
        assert refused.value.error.param == param


def parse_score(**fields: Any) -> ParsedCall:
    return rerank.SCORE.parse(json.dumps({"model": "m"} | fields).encode(), {}, "r")


def test_one_text_is_scored_with_each_of_several_by_one_request_in_their_order() -> None:
    parsed = parse_score(text_1="q", text_2=["a", "b"])
    (request,) = parsed.request
    assert (request.query, request.documents) == ("q", ["a", "b"])
    found = json.loads(parsed.encode([REPLY]))
    assert [(one["index"], one["score"]) for one in found["data"]] == [(0, -1.0), (1, 2.5)]
    assert found["usage"]["prompt_tokens"] == 7


def test_pairs_are_scored_one_by_one() -> None:
    parsed = parse_score(text_1=["p", "q"], text_2=["a", "b"])
    assert [(one.id, one.query, one.documents) for one in parsed.request] == [("r-0", "p", ["a"]), ("r-1", "q", ["b"])]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text_1": ["p", "q"], "text_2": ["a"]}, "text_1"),
        ({"text_1": ["p", "q"], "text_2": ["a", ""]}, "text_2[1]"),
        ({"text_1": ["p", ""], "text_2": ["a", "b"]}, "text_1[1]"),
        ({"text_1": "q", "text_2": ["a", ""]}, "text_2[1]"),
        ({"text_1": "", "text_2": "a"}, "text_1"),
        ({"text_1": [], "text_2": []}, "text_1"),
        ({"text_1": "q"}, "text_2"),
        ({"text_1": ["q"] * 1_001, "text_2": ["a"] * 1_001}, "text_1"),
    ],
)
def test_a_wrong_text_to_score_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(errors.RequestError) as refused:
        parse_score(**fields)
    assert refused.value.error.param == param
