"""Whatever a client sends gets one terminal with the right code and does not disturb a running stream."""

# ruff: noqa: E501

import asyncio
import json
from collections.abc import AsyncIterator

import msgspec
import pytest

from tests.support.raw_client import PREFIX, Answer, RawClient, check_stream

INVALID, UNSUPPORTED = "invalid_request", "unsupported"
DEEP = b'{"chat_template_kwargs":' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b',"prompt":"x"}'

CASES: dict[str, tuple[bytes, str, str | None]] = {
    "no json": (b"hello", INVALID, None),
    "empty": (b"", INVALID, None),
    "cut short": (b'{"prompt": "x"', INVALID, None),
    "an array": (b"[]", INVALID, None),
    "deep nesting": (b"[" * 100_000, INVALID, None),
    "deep arguments": (DEEP, INVALID, None),
    "lone surrogate": (b'{"prompt": "\\ud800"}', INVALID, None),
    "broken utf-8": (b'{"prompt": "\xff"}', INVALID, None),
    "huge integer": (b'{"prompt": "x", "max_tokens": 99999999999999999999999}', INVALID, "max_tokens"),
    "NaN": (b'{"prompt": "x", "temperature": NaN}', INVALID, None),
    "infinite": (b'{"prompt": "x", "temperature": 1e999}', INVALID, None),
    "number as text": (b'{"prompt": "x", "max_tokens": "5"}', INVALID, "max_tokens"),
    "text as number": (b'{"prompt": 5}', INVALID, "prompt"),
    "wrong type inside": (b'{"messages": [{"role": "user", "content": [{"type": 1}]}]}', INVALID, "messages[0].content[0].type"),
    "message without role": (b'{"messages": [{"content": "x"}]}', INVALID, "messages[0].role"),
    "message without content": (b'{"messages": [{"role": "user"}]}', INVALID, "messages[0].content"),
    "picture": (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', UNSUPPORTED, "messages[0].content[0].type"),
    "nothing to do": (b"{}", INVALID, "prompt"),
    "empty prompt": (b'{"prompt": ""}', INVALID, "prompt"),
    "no messages": (b'{"messages": []}', INVALID, "messages"),
    "no token ids": (b'{"token_ids": []}', INVALID, "token_ids"),
    "two prompts": (b'{"prompt": "x", "token_ids": [1]}', INVALID, "token_ids"),
    "negative token id": (b'{"token_ids": [1, -1]}', INVALID, "token_ids[1]"),
    "token id outside the vocabulary": (b'{"token_ids": [1, 640]}', INVALID, "token_ids[1]"),
    "token id outside 32 bits": (b'{"token_ids": [4294967296]}', INVALID, "token_ids[0]"),
    "failing template": (b'{"messages": [{"role": "pirate", "content": "x"}]}', INVALID, "messages"),
    "max_tokens -1": (b'{"prompt": "x", "max_tokens": -1}', INVALID, "max_tokens"),
    "temperature below": (b'{"prompt": "x", "temperature": -0.1}', INVALID, "temperature"),
    "top_p 0": (b'{"prompt": "x", "top_p": 0}', INVALID, "top_p"),
    "seed beyond": (b'{"prompt": "x", "seed": 4294967296}', INVALID, "seed"),
    "empty stop": (b'{"prompt": "x", "stop": ["a", ""]}', INVALID, "stop[1]"),
    "17 stops": (json.dumps({"prompt": "x", "stop": list("abcdefghijklmnopq")}).encode(), INVALID, "stop"),
    "id with a dot": (b'{"prompt": "x", "id": "a.b"}', INVALID, "id"),
    "unknown policy": (b'{"prompt": "x", "routing": {"policy": "magic"}}', INVALID, "routing.policy"),
    "prompt beyond the context": (json.dumps({"token_ids": [5] * 2048}).encode(), "prompt_too_long", "token_ids"),
    "text beyond the context": (json.dumps({"prompt": "x" * 600_000}).encode(), "prompt_too_long", "prompt"),
    "logprobs": (b'{"prompt": "x", "logprobs": 21}', INVALID, "logprobs"),
    "penalty": (b'{"prompt": "x", "presence_penalty": 2.5}', INVALID, "presence_penalty"),
    "logit bias of a word": (b'{"prompt": "x", "logit_bias": {"five": 1.0}}', INVALID, "logit_bias"),
    "logit bias beyond the vocabulary": (b'{"prompt": "x", "logit_bias": {"5000": 1.0}}', INVALID, "logit_bias"),
    "a schema of an unknown type": (
        b'{"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "poem"}}}}',
        INVALID, "response_format.json_schema.schema",
    ),
    "regex": (b'{"prompt": "x", "regex": "(a"}', INVALID, "regex"),
    "regex that allows nothing": (b'{"prompt": "x", "regex": "[^\\\\s\\\\S]"}', INVALID, "regex"),
    "grammar": (b'{"prompt": "x", "grammar": "root ::= \\"a"}', INVALID, "grammar"),
    "two constraints": (b'{"prompt": "x", "grammar": "root ::= \\"a\\"", "regex": "a"}', INVALID, "grammar"),
    "a constraint without an end": (b'{"prompt": "x", "regex": "a", "ignore_eos": true}', INVALID, "ignore_eos"),
    "empty choice": (b'{"prompt": "x", "choice": ["a", ""]}', INVALID, "choice[1]"),
    "tools without a conversation": (
        b'{"prompt": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}', INVALID, "tools"
    ),
    "a tool to call that is none": (
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f"}}], '
        b'"tool_choice": {"type": "function", "function": {"name": "g"}}}', INVALID, "tool_choice.function.name",
    ),
    "tools and a regex": (
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f"}}], '
        b'"regex": "a"}', INVALID, "regex",
    ),
    "a tool without a name": (
        b'{"prompt": "x", "tools": [{"type": "function", "function": {}}]}', INVALID, "tools[0].function.name"
    ),
    "lora": (b'{"prompt": "x", "lora": [{"name": "a"}]}', "model_not_found", "lora[0].name"),
    "a lora twice": (b'{"prompt": "x", "lora": [{"name": "a"}, {"name": "a"}]}', INVALID, "lora[1].name"),
    "a lora beyond its scale": (b'{"prompt": "x", "lora": [{"name": "a", "scale": 5}]}', INVALID, "lora[0].scale"),
    "no tokens to resume from": (b'{"prompt": "x", "resume_from": {"token_ids": []}}', INVALID, "resume_from.token_ids"),
    "tokens to resume from beyond the vocabulary": (
        b'{"prompt": "x", "resume_from": {"token_ids": [5, 5000]}}', INVALID, "resume_from.token_ids[1]"
    ),
    "as many tokens to resume from as max_tokens": (
        b'{"prompt": "x", "max_tokens": 2, "resume_from": {"token_ids": [5, 6]}}', INVALID, "resume_from.token_ids"
    ),
    "a negative token to resume from": (
        b'{"prompt": "x", "resume_from": {"token_ids": [-1]}}', INVALID, "resume_from.token_ids[0]"
    ),
    "tokens of another hash scheme": (
        b'{"prompt": "x", "resume_from": {"token_ids": [5], "hash_scheme": "xxh3-64:another"}}',
        UNSUPPORTED, "resume_from.hash_scheme",
    ),
    "a whole answer with logprobs": (
        b'{"prompt": "x", "stream": false, "logprobs": 1, "resume_from": {"token_ids": [5]}}', UNSUPPORTED, "resume_from"
    ),
}  # fmt: skip


@pytest.fixture
async def neighbour(bare: RawClient) -> AsyncIterator[Answer]:
    """Runs a stream during the test, which must end undisturbed."""
    body = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    answer = await bare.generate(body)
    await answer.until(2)
    yield answer
    assert (await answer.terminal())["finish_reason"] == "length"
    check_stream(answer)


def check_refusal(answer: Answer, code: str, param: str | None) -> None:
    *signs, refusal = answer.messages  # a router that takes a second over a prompt says that it is still there
    assert not any(sign["tokens"] or sign["text"] or sign["worker_id"] for sign in signs)
    assert refusal["finish_reason"] == "error"
    assert refusal["error"]["code"] == code
    assert refusal["error"].get("param") == param
    assert refusal["error"]["message"]
    assert [refusal[name] for name in ("attempt", "offset", "tokens", "text_offset", "text")][1:] == [0, 0, 0, ""]
    headers = answer.raw[-1].headers
    assert headers is not None
    assert headers["Nats-Service-Error"].startswith(code)
    assert headers["Nats-Service-Error-Code"].isdigit()


@pytest.mark.parametrize("case", CASES)
async def test_refused_with_its_code_and_param(bare: RawClient, case: str) -> None:
    payload, code, param = CASES[case]
    answer = await bare.ask(payload)
    check_refusal(answer, code, param)


async def test_all_of_them_at_once_do_not_disturb_a_running_stream(bare: RawClient, neighbour: Answer) -> None:
    answers = [await bare.generate(payload) for payload, _, _ in CASES.values()]
    for answer, (_, code, param) in zip(answers, CASES.values(), strict=True):
        await answer.terminal()
        check_refusal(answer, code, param)


async def test_values_that_change_nothing_are_as_if_absent(bare: RawClient) -> None:
    nothing = {
        "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}, "tools": [],
        "lora": [], "response_format": {"type": "text"}, "grammar": "", "regex": "", "choice": [], "stop": [], "logprobs": None, "seed": None,
        "return_progress": False, "session_id": "s", "priority": 3, "cache_prompt": False, "cache_salt": "x",
        "chat_template_kwargs": {}, "resume_from": None, "max_tokens": 3.0, "from_the_future": 1,
    }  # fmt: skip
    answer = await bare.ask({"prompt": "12 + 30 =", "temperature": 0} | nothing)
    check_stream(answer)
    assert answer.text == " 42"


async def test_msgpack_that_cannot_be_read_is_answered_in_msgpack(bare: RawClient) -> None:
    bodies = [b"\xc1", b"\x81\xa6prompt\xa1\xff", b"\x81\xa1x" * 50_000, b"", msgspec.msgpack.encode({"prompt": 1})]
    bodies.append(msgspec.msgpack.encode({"prompt": "x", "temperature": float("nan")}))
    bodies.append(msgspec.msgpack.encode({"prompt": "x", "max_tokens": 2**64 - 1}))
    for body in bodies:
        answer = await bare.ask(body, content_type="application/msgpack")
        assert answer.messages[0]["error"]["code"] == INVALID


async def test_another_content_type_is_refused_in_json(bare: RawClient) -> None:
    answer = await bare.ask(b"prompt: x", content_type="application/yaml")
    check_refusal(answer, INVALID, None)
    assert "application/json" in answer.messages[0]["error"]["message"]


async def test_an_unknown_model_is_refused_within_one_round_trip(bare: RawClient) -> None:
    async with asyncio.timeout(1):
        answer = await bare.ask({"prompt": "x"}, subject=f"{PREFIX}.generate.nobody")
    code = answer.messages[0]["error"]["code"]
    assert code in ("no_worker", "model_not_found"), "the latter once the router is a minute old"
    check_refusal(answer, code, None)


async def test_a_model_name_in_no_subject_form_is_refused(bare: RawClient) -> None:
    for name in ("=ZZ", "a=2", "=41", "=FF"):
        answer = await bare.ask({"prompt": "x"}, subject=f"{PREFIX}.generate.{name}")
        check_refusal(answer, INVALID, "model")


async def test_nothing_is_published_to_a_reply_subject_that_is_no_inbox(bare: RawClient) -> None:
    heard: list[str] = []

    async def hear(message: object) -> None:
        heard.append(message.subject)  # type: ignore[attr-defined]

    victims = [f"{PREFIX}.worker.demo.worker-1.victim", "orders.new", "_INBOX", "_INBOXES.a", f"{PREFIX}.cancel.victim"]
    for victim in victims:
        await bare.nats.subscribe(victim, cb=hear)
    live = await bare.generate({"id": "hostile", "prompt": "Once", "max_tokens": 300, "ignore_eos": True})
    await live.until(2)
    for victim in victims:
        await bare.nats.publish(f"{PREFIX}.generate.demo", b'{"prompt": "x", "max_tokens": 1}', reply=victim)
        await bare.nats.publish(f"{PREFIX}.generate.demo", b"not json", reply=victim)
        await bare.nats.publish(f"{PREFIX}.models", b"", reply=victim)
        await bare.nats.publish(f"{PREFIX}.embed.demo", b"", reply=victim)
        await bare.nats.publish(f"{PREFIX}.cancel.hostile", b"", reply=victim)
    await bare.nats.publish(f"{PREFIX}.generate.demo", b'{"prompt": "x"}')
    answers = [await bare.ask({"prompt": "12 + 30 =", "max_tokens": 3}) for _ in range(4)]
    assert all(answer.messages[-1]["finish_reason"] == "length" for answer in answers)
    assert (await live.terminal())["finish_reason"] == "length"
    await bare.settle()
    assert heard == []


async def test_cancels_of_unknown_requests_are_answered_by_nobody(bare: RawClient) -> None:
    for subject in ("cancel.nobody", "cancel.acme.nobody", "cancel.=ZZ", "cancel.a.b"):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await bare.nats.request(f"{PREFIX}.{subject}", b"", timeout=2)
