"""Bad input of every kind, at every endpoint: it is refused in the words of the endpoint's API, and disturbs nobody."""

import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import openai
import pytest

from tests.gateway.test_calls import UNNAMED, post
from tests.support.in_part import in_part
from tests.support.system import Gateway, running_gateway, running_up, running_worker
from tokenbus.protocol.wire import limits

MAX_BODY_BYTES = 1_000_000
KEY = {"Authorization": "Bearer secret"}
BODIES: dict[str, dict[str, Any]] = {path: {"model": "demo"} | body for path, body in UNNAMED.items()}
BODIES["/api/show"] = {"model": "demo"}
DEEP = b'{"model": "demo", "x": ' + b"[" * 30_000 + b"]" * 30_000 + b"}"
NO_JSON = {
    "nothing": b"",
    "half of an object": b'{"model": "demo"',
    "two objects": b'{"model": "demo"} {}',
    "a null byte behind it": b'{"model": "demo"}\x00',
    "a byte order mark": b'\xef\xbb\xbf{"model": "demo"}',
    "no UTF-8": b'{"model": "\xff"}',
    "half a surrogate pair": b'{"model": "\\ud800"}',
    "not a number": b'{"model": "demo", "temperature": NaN}',
    "deep nesting": DEEP,
    "a list": b"[]",
}
NUMBERS = (b"1" + b"0" * 5_000, b"1e999", b"-1", b"0", b'"5"', b"true")
"""Values that no `timeout_ms` has."""
IMAGES: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
    {"type": "input_image", "image_url": "data:image/png;base64,AA=="},
]
LIST = "messages"
CONVERSATIONS = {
    "/v1/chat/completions": LIST,
    "/v1/messages": LIST,
    "/v1/messages/count_tokens": LIST,
    "/tokenize": LIST,
    "/v1/responses": "input",
    "/v1/responses/input_tokens": "input",
}
"""The field of each endpoint that has a conversation."""


class Refusal(NamedTuple):
    """The fields that the three forms of an error have in common."""

    status: int
    kind: str
    """The code, or the type in Anthropic's API; Ollama has neither."""
    param: str | None
    """The field at fault; None where the API does not name it in a field of its own."""
    message: str


def refusal_of(path: str, answer: tuple[int, dict[str, Any]]) -> Refusal:
    """Returns a refusal, and checks that it has the form of the endpoint's API and nothing else."""
    status, body = answer
    if path.startswith("/api/"):
        assert list(body) == ["error"], body
        return Refusal(status, "", None, body["error"])
    if path.startswith("/v1/messages"):
        assert body.keys() == {"type", "error", "request_id"}, body
        assert body["type"] == "error"
        assert body["error"].keys() == {"type", "message"}
        return Refusal(status, body["error"]["type"], None, body["error"]["message"])
    assert list(body) == ["error"], body
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}, error
    return Refusal(status, error["code"], error["param"], error["message"])


def kind(path: str, code: str, anthropic: str = "invalid_request_error") -> str:
    """Returns the kind of a refusal in the words of the endpoint's API."""
    return "" if path.startswith("/api/") else anthropic if path.startswith("/v1/messages") else code


def asking(path: str, field: str, conversation: list[Any]) -> dict[str, Any]:
    """Returns a body with this conversation in place of its own, or of its prompt."""
    return {name: value for name, value in BODIES[path].items() if name != "prompt"} | {field: conversation}


def answer_with(gateway: Gateway) -> str:
    """Returns the text of a stream of two seconds, which is the same each time."""
    client = openai.OpenAI(base_url=gateway.url, api_key="secret", max_retries=0, timeout=60)
    asked = [{"role": "user", "content": "Tell me a story."}]
    body = {"ignore_eos": True}
    with (
        client,
        client.chat.completions.create(
            model="slow",
            messages=asked,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=40,
            stream=True,
            extra_body=body,
        ) as stream,
    ):
        return "".join(event.choices[0].delta.content or "" for event in stream)


def models_of(gateway: Gateway) -> list[Any]:
    asked = urllib.request.Request(f"{gateway.url}/models", headers=KEY)
    with urllib.request.urlopen(asked, timeout=60) as answer:
        found: list[Any] = json.loads(answer.read())["data"]
    return found


RANKING = ("/v1/rerank", "/v2/rerank", "/v1/score")
"""Endpoints that the system's models can't serve."""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with a key, while whose tests a stream runs again and again, which has to stay the same.

    Its tokens come every 50 ms: a stream of the model that the tests use would take a core for as long as they last."""
    flags = ("--max-body-bytes", str(MAX_BODY_BYTES), "--api-key", "secret=default")
    slow = ("--engine", "sim", "--model", "steps-of-50ms", "--served-name", "slow")
    with (
        running_up("--workers", "1", "--threads", "1") as url,
        running_worker(url, *slow),
        running_gateway(url, tmp_path_factory.mktemp("bad"), *flags) as gateway,
    ):
        while len(models_of(gateway)) < 2:
            time.sleep(0.02)
        undisturbed, is_over = answer_with(gateway), threading.Event()
        found: list[str] = []

        def stream() -> None:
            while not is_over.wait(0.2):
                found.append(answer_with(gateway))

        thread = threading.Thread(target=stream)
        thread.start()
        try:
            yield gateway
        finally:
            is_over.set()
            thread.join()
        assert found
        assert set(found) == {undisturbed}
        assert not gateway.log("request_failed")


def test_the_table_has_every_endpoint_that_takes_a_body(gateway: Gateway) -> None:
    for path, body in BODIES.items():
        status, answer = post(gateway.url, path, body, **KEY)
        if path in RANKING:
            assert refusal_of(path, (status, answer))[:3] == (400, "unsupported", "model")
        else:
            assert status == 200, answer


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("given", in_part(NO_JSON, 2))
def test_what_is_no_object_of_json_is_refused(gateway: Gateway, path: str, given: str) -> None:
    found = refusal_of(path, post(gateway.url, path, NO_JSON[given], **KEY))
    assert found[:3] == (400, kind(path, "invalid_request"), None)


@pytest.mark.parametrize("path", BODIES)
def test_a_field_of_a_wrong_type_is_refused_and_named(gateway: Gateway, path: str) -> None:
    for value in (5, ["demo"], {}):
        found = refusal_of(path, post(gateway.url, path, BODIES[path] | {"model": value}, **KEY))
        assert found[:2] == (400, kind(path, "invalid_request"))
        assert "model" in (found.param or found.message)


@pytest.mark.parametrize("path", [*(path for path in UNNAMED if "tokenize" not in path)])
@pytest.mark.parametrize("number", in_part(NUMBERS, 2), ids=lambda number: number[:6].decode())
def test_a_number_that_can_not_be_is_refused(gateway: Gateway, path: str, number: bytes) -> None:
    body = json.dumps(BODIES[path]).encode()[:-1] + b', "timeout_ms": ' + number + b"}"
    assert refusal_of(path, post(gateway.url, path, body, **KEY))[:2] == (400, kind(path, "invalid_request"))


@pytest.mark.parametrize("path", [*(path for path in BODIES if path not in ("/v1/embeddings", *RANKING))])
def test_the_last_of_two_fields_of_a_name_counts(gateway: Gateway, path: str) -> None:
    body = json.dumps(BODIES[path]).encode()
    assert post(gateway.url, path, b'{"model": "nobody", ' + body[1:], **KEY)[0] == 200
    found = refusal_of(path, post(gateway.url, path, body[:-1] + b', "model": 5}', **KEY))
    assert found[:2] == (400, kind(path, "invalid_request"))


@pytest.mark.parametrize("path", BODIES)
def test_another_type_of_content_is_refused(gateway: Gateway, path: str) -> None:
    for content_type in ("text/plain", "multipart/form-data; boundary=x", "application/msgpack"):
        headers = KEY | {"Content-Type": content_type, "Origin": "http://example.org"}
        found = refusal_of(path, post(gateway.url, path, BODIES[path], **headers))
        assert found[:3] == (415, kind(path, "unsupported_media_type"), None)


@pytest.mark.parametrize("path", [path for path in BODIES if path.startswith("/api/")])
def test_ollamas_paths_take_what_curl_sends_if_it_is_not_told_otherwise(gateway: Gateway, path: str) -> None:
    form = KEY | {"Content-Type": "application/x-www-form-urlencoded"}
    statuses = {post(gateway.url, path, BODIES[path], **headers)[0] for headers in (KEY, form)}
    assert len(statuses) == 1


@pytest.mark.parametrize("path", BODIES)
def test_a_key_that_is_not_there_or_nobodys_is_refused(gateway: Gateway, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer other"}, {"x-api-key": "SECRET"}, {"Authorization": "Basic secret"}):
        found = refusal_of(path, post(gateway.url, path, BODIES[path], **headers))
        assert found[:3] == (401, kind(path, "invalid_api_key", "authentication_error"), None)


@pytest.mark.parametrize(("path", "field"), CONVERSATIONS.items())
def test_a_role_that_no_model_has_is_refused(gateway: Gateway, path: str, field: str) -> None:
    asked = asking(path, field, [{"role": "wizard", "content": "hi"}])
    found = refusal_of(path, post(gateway.url, path, asked, **KEY))
    assert found[:2] == (400, kind(path, "invalid_request"))
    assert "wizard" in found.message


@pytest.mark.parametrize(("path", "field"), CONVERSATIONS.items())
@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image["type"])
def test_an_image_is_refused_by_its_place(gateway: Gateway, path: str, field: str, image: dict[str, Any]) -> None:
    asked = asking(path, field, [{"role": "user", "content": [image]}])
    found = refusal_of(path, post(gateway.url, path, asked, **KEY))
    assert found[:2] == (400, kind(path, "unsupported"))
    place = f"{field}.0.content.0.type" if path.startswith("/v1/messages") else f"{field}[0].content[0].type"
    assert found.message.startswith(place)


@pytest.mark.parametrize(("path", "field"), CONVERSATIONS.items())
@pytest.mark.parametrize("item", [5, None, [], {"role": "user", "content": 5}, {"role": 5, "content": "hi"}])
def test_a_message_of_a_wrong_type_is_refused(gateway: Gateway, path: str, field: str, item: object) -> None:
    asked = asking(path, field, [item])
    assert refusal_of(path, post(gateway.url, path, asked, **KEY))[:2] == (400, kind(path, "invalid_request"))


@pytest.mark.parametrize(("path", "field"), CONVERSATIONS.items())
def test_ten_thousand_messages_are_refused(gateway: Gateway, path: str, field: str) -> None:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": "hi"} for number in range(10_001)]
    found = refusal_of(path, post(gateway.url, path, asking(path, field, messages), **KEY))
    assert found[:2] == (400, kind(path, "invalid_request"))
    assert found.message.startswith(f"{field}: at most {limits.MAX_MESSAGES} messages")


@pytest.mark.parametrize(("path", "field"), [("/v1/responses", "input"), ("/v1/messages", "messages")])
def test_more_items_than_any_conversation_is_made_of_are_refused(gateway: Gateway, path: str, field: str) -> None:
    items = [{"role": "user", "content": ""}] * (4 * limits.MAX_MESSAGES + 1)
    found = refusal_of(path, post(gateway.url, path, asking(path, field, items), **KEY))
    assert found.message == f"{field}: must have at most {4 * limits.MAX_MESSAGES} items, got {len(items)}"


def head(gateway: Gateway, path: str, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Host: {urlsplit(gateway.url).netloc}", "Authorization: Bearer secret"]
    return "\r\n".join([*lines, "Content-Type: application/json", *headers, "", ""]).encode()


def connected(gateway: Gateway) -> socket.socket:
    found = urlsplit(gateway.url)
    return socket.create_connection((found.hostname or "", found.port or 0), timeout=30)


def read_answer(connection: socket.socket, path: str) -> Refusal:
    with connection.makefile("rb") as answer:
        status = int(answer.readline().split()[1])
        headers = dict(line.lower().rstrip().split(b": ", 1) for line in iter(answer.readline, b"\r\n"))
        return refusal_of(path, (status, json.loads(answer.read(int(headers[b"content-length"])))))


@pytest.mark.parametrize("path", BODIES)
def test_a_body_of_one_byte_above_the_limit_is_refused(gateway: Gateway, path: str) -> None:
    with connected(gateway) as connection:
        connection.sendall(head(gateway, path, f"Content-Length: {MAX_BODY_BYTES + 1}"))
        for _ in range(0, MAX_BODY_BYTES, 50_000):
            connection.sendall(b" " * 50_000)
        connection.sendall(b"{")
        assert read_answer(connection, path)[:3] == (413, kind(path, "payload_too_large", "request_too_large"), None)


@pytest.mark.parametrize("path", BODIES)
def test_a_body_above_the_limit_that_does_not_say_its_size_is_refused(gateway: Gateway, path: str) -> None:
    chunk = b"%x\r\n" % 50_000 + b" " * 50_000 + b"\r\n"
    with connected(gateway) as connection:
        connection.sendall(head(gateway, path, "Transfer-Encoding: chunked"))
        for _ in range(MAX_BODY_BYTES // 50_000 + 1):
            connection.sendall(chunk)
        connection.sendall(b"0\r\n\r\n")
        assert read_answer(connection, path)[:3] == (413, kind(path, "payload_too_large", "request_too_large"), None)


@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_goes_half_way_is_forgotten(gateway: Gateway, path: str) -> None:
    body = json.dumps(BODIES[path]).encode()
    with connected(gateway) as connection:
        connection.sendall(head(gateway, path, f"Content-Length: {len(body)}") + body[:-5])
    with connected(gateway) as connection:
        connection.sendall(head(gateway, path, "Transfer-Encoding: chunked") + b"%x\r\n" % len(body) + body[:-5])
    is_able = path not in RANKING
    assert post(gateway.url, path, BODIES[path], **KEY)[0] == (200 if is_able else 400)
