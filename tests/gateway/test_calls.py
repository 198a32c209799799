"""Endpoints that generate nothing, over HTTP: they share admission, keys, logs and metrics with those that do."""

import gzip
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.models import random_encoder
from tests.support.models.random_encoder import EncoderShape
from tests.support.system import Gateway, running_gateway, running_worker, up_with_output
from tokenbus.gateway import openapi, refused_paths
from tokenbus.gateway.dialects import DIALECTS

SAID = [{"role": "user", "content": "What is the capital of Avaria?"}]


def post(base_url: str, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    asked = urllib.request.Request(
        base_url.removesuffix("/v1") + path, payload, {"Content-Type": "application/json"} | headers
    )
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def get(base_url: str, path: str) -> bytes:
    with urllib.request.urlopen(base_url.removesuffix("/v1") + path, timeout=60) as answer:
        found: bytes = answer.read()
    return found


def test_the_tokens_of_a_conversation_are_counted_as_a_completion_counts_them(base_url: str) -> None:
    status, found = post(base_url, "/tokenize", {"model": "demo", "messages": SAID})
    assert status == 200
    assert found["count"] == len(found["tokens"])
    _, whole = post(base_url, "/v1/chat/completions", {"model": "demo", "messages": SAID, "max_tokens": 1})
    assert whole["usage"]["prompt_tokens"] == found["count"]
    models = json.loads(get(base_url, "/v1/models"))
    assert found["max_model_len"] == models["data"][0]["context_length"]
    assert post(base_url, "/tokenize/", {"model": "demo", "messages": SAID, "only_count": True})[1]["tokens"] == []


def test_text_comes_back_from_its_tokens(base_url: str) -> None:
    _, found = post(base_url, "/tokenize", {"model": "demo", "prompt": "Grüß Gott"})
    back = {"prompt": "Grüß Gott", "content": "Grüß Gott"}
    assert post(base_url, "/detokenize", {"model": "demo", "tokens": found["tokens"]}) == (200, back)


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/tokenize", {"model": "demo"}, 400, "invalid_request", "prompt"),
        ("/tokenize", {"model": "nobody", "prompt": "x"}, 503, "no_worker", None),
        ("/tokenize", b"{", 400, "invalid_request", None),
        ("/detokenize", {"model": "demo"}, 400, "invalid_request", "tokens"),
        ("/detokenize", {"model": "demo", "tokens": [5, -5]}, 400, "invalid_request", "tokens[1]"),
        ("/detokenize", {"model": "demo", "tokens": [5, 99_999]}, 400, "invalid_request", "tokens[1]"),
    ],
)
def test_a_wrong_request_is_answered_in_openais_form_with_the_field_that_is_wrong(
    base_url: str, path: str, body: Any, status: int, code: str, param: str | None
) -> None:
    found, answer = post(base_url, path, body)
    assert (found, answer["error"]["code"], answer["error"]["param"]) == (status, code, param)


def test_calls_need_a_key_and_are_logged_and_counted_like_completions(slow_url: str, tmp_path: Path) -> None:
    with running_gateway(slow_url, tmp_path, "--metrics-port", "0", "--api-key", "secret=acme") as gateway:
        asked = {"model": "slow", "prompt": "go"}
        assert post(gateway.url, "/tokenize", asked)[0] == 401
        assert post(gateway.url, "/tokenize", asked, Authorization="Bearer secret")[0] == 200
        (page,) = gateway.log("status_page")
        metrics = f"http://127.0.0.1:{page['port']}/metrics"
        counts = {f'tokenbus_gateway_requests_total{{endpoint="/tokenize",status="{one}"}} 1.0' for one in (200, 401)}
        ends_at, shown = time.monotonic() + 60, set[str]()
        while not counts <= shown and time.monotonic() < ends_at:  # a client may have its answer before it is counted
            with urllib.request.urlopen(metrics, timeout=60) as answer:
                shown = set(answer.read().decode().splitlines())
        logged = [(one["endpoint"], one["model"]) for one in gateway.log("request_received")]
    assert logged == [("/tokenize", None), ("/tokenize", "slow")]
    assert counts <= shown


UNNAMED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 1},
    "/v1/chat/completions/input_tokens": {"messages": SAID},
    "/v1/completions": {"prompt": "go", "max_tokens": 1},
    "/v1/responses": {"input": "go", "max_output_tokens": 1},
    "/v1/messages": {"messages": SAID, "max_tokens": 1},
    "/v1/responses/input_tokens": {"input": "go"},
    "/v1/messages/count_tokens": {"messages": SAID},
    "/v1/embeddings": {"input": "go"},
    "/v1/rerank": {"query": "go", "documents": ["a"]},
    "/v2/rerank": {"query": "go", "documents": ["a"]},
    "/v1/score": {"text_1": "go", "text_2": ["a"]},
    "/tokenize": {"prompt": "go"},
    "/detokenize": {"tokens": [5]},
    "/api/chat": {"messages": SAID, "options": {"num_predict": 1}, "stream": False},
    "/api/generate": {"prompt": "go", "options": {"num_predict": 1}, "stream": False},
    "/api/embed": {"input": "go"},
    "/api/embeddings": {"prompt": "go"},
}
"""A body for each endpoint, without a model."""


def test_requests_without_a_model_are_answered_by_the_default_one(slow_url: str, tmp_path: Path) -> None:
    assert UNNAMED.keys() == {one.path for dialect in DIALECTS for one in dialect.endpoints if one.method == "POST"}
    flags = ("--alias", "usual=slow", "--default-model", "usual")
    with running_gateway(slow_url, tmp_path, *flags) as gateway:
        found = {path: post(gateway.url, path, body) for path, body in UNNAMED.items()}
        logged = [one["model"] for one in gateway.log("request_received")]
        document = json.loads(get(gateway.url, "/openapi.json"))
    assert logged == ["usual"] * len(UNNAMED)
    unserved = (
        "/v1/embeddings",
        "/v1/rerank",
        "/v2/rerank",
        "/v1/score",
        "/api/embed",
        "/api/embeddings",
    )  # by this model
    assert {path: status for path, (status, _) in found.items()} == {
        path: 400 if path in unserved else 200 for path in UNNAMED
    }
    assert {answer["model"] for path, (_, answer) in found.items() if "model" in answer} == {"usual"}
    assert document == json.loads(json.dumps(openapi.document(document["info"]["version"])))


@pytest.mark.parametrize("name", [{}, {"model": ""}, {"model": None}])
def test_requests_without_a_model_are_for_the_only_one_that_is_served(
    slow_gateway: Gateway, name: dict[str, Any]
) -> None:
    unable = {"embed": "none of the served models makes embeddings: slow"}
    unable |= {"embeddings": unable["embed"], "rerank": "none of the served models ranks documents: slow"}
    unable |= {"score": unable["rerank"]}
    for path, body in UNNAMED.items():
        status, answer = post(slow_gateway.url, path, body | name)
        if problem := unable.get(path.rpartition("/")[2]):
            error = answer["error"]
            assert (status, error if path.startswith("/api/") else error["message"]) == (400, problem)
        else:
            assert (status, answer.get("model", "slow")) == (200, "slow"), path


def test_with_several_models_a_request_must_name_one_and_is_told_which_there_are(
    slow_url: str, slow_gateway: Gateway
) -> None:
    other = ("--engine", "sim", "--model", "steps-of-50ms", "--served-name", "other", "--grace-s", "0")
    path = "/v1/messages/count_tokens"
    with running_worker(slow_url, *other):
        while (found := post(slow_gateway.url, path, UNNAMED[path]))[0] == 200:
            pass
    status, answer = found
    assert status == 400
    assert answer["error"]["message"] == "model: is required while several models are served: other, slow"
    while post(slow_gateway.url, path, UNNAMED[path])[0] != 200:
        pass


@pytest.mark.parametrize("path", ["/chat/completions", "/chat/completions/"])
def test_paths_work_without_v1(base_url: str, path: str) -> None:
    status, found = post(base_url, path, {"model": "demo", "messages": SAID, "max_tokens": 1})
    assert (status, found["object"]) == (200, "chat.completion")
    assert get(base_url, "/models") == get(base_url, "/v1/models")


def test_a_compressed_body_is_served(base_url: str) -> None:
    body = gzip.compress(json.dumps({"model": "demo", "prompt": "12 + 30 =", "max_tokens": 1}).encode())
    assert post(base_url, "/v1/completions", body, **{"Content-Encoding": "gzip"})[0] == 200
    status, refused = post(base_url, "/v1/completions", body, **{"Content-Encoding": "br"})
    assert (status, "gzip, deflate or zstd" in refused["error"]["message"]) == (415, True)


def test_a_known_path_that_is_not_served_is_refused_with_what_to_use(base_url: str) -> None:
    for one in refused_paths.REFUSED:
        for method in one.methods:
            if method == "POST":
                status, refused = post(base_url, one.path, b"no JSON")
            else:
                with pytest.raises(urllib.error.HTTPError) as raised:
                    get(base_url, one.path)
                status, refused = raised.value.code, json.loads(raised.value.read())
            assert (status, refused["error"]["message"]) == (405 if one.path == "/" else 400, one.problem), one


def test_the_root_says_what_this_is_to_programs_and_to_people(base_url: str) -> None:
    about = json.loads(get(base_url, "/"))
    assert about["name"] == "Tokenbus"
    for link in about["links"]:
        assert get(base_url, link)
    asked = urllib.request.Request(base_url.removesuffix("/v1") + "/", headers={"Accept": "text/html"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/html")
        assert b'<a href="/v1/models">' in answer.read()


@pytest.mark.parametrize(("path", "instead"), [("/v1/embed", "/v1/embeddings"), ("/similarity", "/v1/score")])
def test_a_call_of_another_server_that_is_not_served_is_refused_with_what_is(
    base_url: str, path: str, instead: str
) -> None:
    status, refused = post(base_url, path, {"inputs": "a"})
    assert (status, refused["error"]["code"]) == (400, "unsupported")
    assert instead in refused["error"]["message"]


def test_ollamas_calls_find_a_model_and_what_it_can_do(base_url: str) -> None:
    assert json.loads(get(base_url, "/api/version"))["version"]
    for path in ("/api/tags", "/api/ps"):
        assert [one["name"] for one in json.loads(get(base_url, path))["models"]] == ["demo"]
    for name in ({"model": "demo"}, {"name": "demo:latest"}):
        status, shown = post(base_url, "/api/show", name)
        assert status == 200
        assert "completion" in shown["capabilities"]
    status, refused = post(base_url, "/api/show", {"model": "nobody"})
    # a router younger than a minute doesn't know yet which models never existed
    assert status in (404, 503)
    assert list(refused) == ["error"]
    assert post(base_url, "/api/show", {})[0] == 400
    assert post(base_url, "/api/nothing", {}) == (404, {"error": "unknown URL: POST /api/nothing"})


def serving(folder: Path, pooling: str) -> AbstractContextManager[dict[str, Any]]:
    """Runs a system with a model that is written here."""
    random_encoder.write(folder / "model.gguf", EncoderShape("bert", pooling))
    return up_with_output("--workers", "1", "--threads", "1", "--model", str(folder / "model.gguf"))


@pytest.fixture(scope="module")
def embedder_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("embedder"), "mean") as said:
        yield str(said["http"])


@pytest.fixture(scope="module")
def ranker_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("ranker"), "rank") as said:
        yield str(said["http"])


def test_openais_client_gets_embeddings_of_texts_and_of_tokens(embedder_url: str) -> None:
    with openai.OpenAI(base_url=embedder_url, api_key="none", max_retries=0, timeout=60) as client:
        found = client.embeddings.create(model="model", input=["a", "b c"])
        plain = client.embeddings.create(model="model", input=["a", "b c"], encoding_format="float")
        many = client.embeddings.create(model="model", input=["a"] * 70)
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(model="model", input=["a"] * 40 + ["word " * 5_000])
    assert [one.index for one in found.data] == [0, 1]
    for one, other in zip(found.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert math.hypot(*one.embedding) == pytest.approx(1, abs=1e-5)
    assert found.usage.total_tokens == plain.usage.total_tokens > 2
    assert len(many.data) == 70
    assert refused.value.param == "input[40]"


def test_documents_are_ranked_over_http(ranker_url: str) -> None:
    body = {"model": "model", "query": "a", "documents": ["b", {"text": "c"}, "d"]}
    status, found = post(ranker_url, "/v1/rerank", body)
    assert status == 200
    scores = [one["relevance_score"] for one in found["results"]]
    assert scores == sorted(scores, reverse=True)
    assert sorted(one["index"] for one in found["results"]) == [0, 1, 2]
    assert post(ranker_url, "/v1/rerank", body | {"top_n": 1})[1]["results"] == found["results"][:1]
    status, refused = post(ranker_url, "/v1/embeddings", {"model": "model", "input": "a"})
    assert (status, refused["error"]["code"]) == (400, "unsupported")
