"""Rules of the encodings: which requests can be read, and how the replies are encoded."""

import base64
import json
import struct

import msgspec

from tokenbus.conformance.probing import stream_checks
from tokenbus.conformance.probing.assertions import BrokenError, expect
from tokenbus.conformance.probing.exchange import Exchange
from tokenbus.conformance.probing.probe import MSGPACK, Probe, short_request

_OPTIONAL = (
    "id", "messages", "token_ids", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "repetition_last_n", "presence_penalty", "frequency_penalty", "seed", "stop", "stop_token_ids", "ignore_eos",
    "logit_bias", "logprobs", "prompt_logprobs", "prompt_logprobs_from", "response_format",
    "regex", "choice", "grammar", "tools", "tool_choice",
    "chat_template_kwargs", "lora", "cache_prompt", "cache_salt", "session_id", "priority", "timeout_ms", "stream",
    "resume_from", "return_token_ids", "return_progress", "routing",
)  # fmt: skip
_MALFORMED = {
    "a text that is not JSON": b"hello",
    "an empty message": b"",
    "a list": b"[]",
    "truncated JSON": b'{"prompt": "x"',
    "endless nesting": b"[" * 100_000,
    "deeply nested arguments": b'{"prompt":"x","chat_template_kwargs":' + b'{"a":' * 5_000 + b"1" + b"}" * 5_001,
    "a lone surrogate": b'{"prompt": "\\ud800"}',
    "invalid UTF-8": b'{"prompt": "\xff"}',
}
_NOT_FINITE = {
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "an infinity": b'{"prompt": "x", "temperature": Infinity}',
    "a number larger than any float": b'{"prompt": "x", "temperature": 1e999}',
}


async def msgpack(probe: Probe) -> None:
    """A MessagePack request gets MessagePack replies."""
    answer = await probe.ask(short_request(), content_type=MSGPACK)
    stream_checks.check_fields(answer.messages)
    stream_checks.check_numbers(answer.messages)


async def content_type(probe: Probe) -> None:
    """Content-Type is compared case-insensitively, and its parameters are ignored."""
    for name in ("Application/MsgPack; charset=binary", "application/msgpack;a=b", "Application/JSON; charset=utf-8"):
        answer = await probe.ask(short_request(4), content_type=name)
        expect(answer.messages[-1].get("error") is None, f"{name} is refused: {answer.messages[-1].get('error')}")


async def other_content_type(probe: Probe) -> None:
    """Any other Content-Type is refused, in JSON."""
    for name in ("text/plain", "application/cbor"):
        answer = await probe.ask(short_request(), content_type=name)
        stream_checks.check_refusal(answer.messages, "invalid_request")


async def declared_encoding(probe: Probe) -> None:
    """A request that can't be decoded is refused in the encoding that it declares."""
    answer = await probe.ask(b"\xc1", content_type=MSGPACK)  # a byte that MessagePack never uses
    stream_checks.check_refusal(answer.messages, "invalid_request")


async def null_is_absent(probe: Probe) -> None:
    """null means absent, for every optional field."""
    body = dict.fromkeys(_OPTIONAL) | {"prompt": "x", "max_tokens": 2}
    for encoding in (None, MSGPACK):
        _check_accepted(await probe.ask(body, content_type=encoding), "with null fields")


async def packed_token_ids(probe: Probe) -> None:
    """Token ids may be packed into four bytes each: bytes in MessagePack, base64 in JSON."""
    ids = {"prompt": None, "token_ids": [1, 2, 3, 4]}
    packed = struct.pack("<4I", 1, 2, 3, 4)
    expected = await probe.ask(short_request(4, **ids))
    _check_accepted(expected, "with token ids")
    for given, encoding in ((packed, MSGPACK), (base64.b64encode(packed).decode(), None)):
        answer = await probe.ask(short_request(4, **ids | {"token_ids": given}), content_type=encoding)
        _check_accepted(answer, "with packed token ids")
        usages = [one.messages[-1]["usage"]["prompt_tokens"] for one in (expected, answer)]
        expect(usages[0] == usages[1], f"a prompt of {usages[0]} tokens has {usages[1]} if they are packed")
    answer = await probe.ask(short_request(4, **ids | {"token_ids": packed[:-1]}), content_type=MSGPACK)
    stream_checks.check_refusal(answer.messages, "invalid_request", param="token_ids")


async def unknown_fields(probe: Probe) -> None:
    """Unknown fields are ignored, at every depth."""
    message = {"role": "user", "content": "x", "wire-check": {"a": [1]}}
    for body in (short_request(2), {"messages": [message], "max_tokens": 2}):
        answer = await probe.ask({**body, "wire-check": {"deep": [1, None]}, "routing": {"wire-check": 1}})
        if (answer.messages[-1].get("error") or {}).get("code") != "unsupported":  # the model has no chat template
            _check_accepted(answer, "with unknown fields")


async def last_key_wins(probe: Probe) -> None:
    """The last of duplicate keys wins."""
    answer = await probe.ask(b'{"prompt": "x", "ignore_eos": true, "max_tokens": 0, "max_tokens": 2}')
    _check_accepted(answer, "with duplicate keys")
    seen = answer.messages[-1]["usage"]["completion_tokens"]
    expect(seen == 2, f"{seen} tokens, but the last key asks for 2")


async def integral_floats(probe: Probe) -> None:
    """Where an integer is expected, an integral float is accepted and any other float is refused."""
    for encoding in (None, MSGPACK):  # JSON has no integer type of its own, MessagePack does
        answer = await probe.ask(short_request(2) | {"max_tokens": 2.0, "seed": 7.0}, content_type=encoding)
        _check_accepted(answer, "with integral floats")
        refused = await probe.ask({"prompt": "x", "max_tokens": 2.5}, content_type=encoding)
        stream_checks.check_refusal(refused.messages, "invalid_request", param="max_tokens")


async def not_finite(probe: Probe) -> None:
    """NaN and infinities are refused."""
    for name, payload in _NOT_FINITE.items():
        await _check_invalid(probe, name, payload)
    for value in (float("nan"), float("inf")):
        payload = msgspec.msgpack.encode({"prompt": "x", "temperature": value})
        await _check_invalid(probe, f"{value} in MessagePack", payload, MSGPACK)


async def malformed(probe: Probe) -> None:
    """Malformed, too deeply nested and non-Unicode requests are refused as invalid_request."""
    for name, payload in _MALFORMED.items():
        await _check_invalid(probe, name, payload)


async def wrong_types(probe: Probe) -> None:
    """A field of the wrong type is refused, with its path in param."""
    part = {"role": "user", "content": [{"type": 1}]}
    cases = {"prompt": 5, "max_tokens": "5", "stream": "no", "stop": [1], "token_ids": ["a"], "messages": [part]}
    for name, value in cases.items():
        body = {name: value} if name in ("prompt", "token_ids", "messages") else {"prompt": "x", name: value}
        answer = await probe.ask(json.dumps(body).encode())
        stream_checks.check_refusal(answer.messages, "invalid_request", param=name)


async def replies_use_request_encoding(probe: Probe) -> None:
    """Replies to models, cancel and resync use the encoding of the request."""
    await probe.call(probe.names.models_for(probe.tenant), {}, content_type=MSGPACK)
    live = await probe.live()
    assert live.request_id is not None
    resync = probe.resync_subject(live.request_id)
    found = await probe.call(resync, {"offset": 0}, content_type=MSGPACK)
    expect(found.get("found") is True, f"resync got {found}")
    cancelled = await probe.call(probe.cancel_subject(live.request_id), {}, content_type=MSGPACK)
    expect(cancelled.get("cancelled") is True, f"cancel got {cancelled}")


async def _check_invalid(probe: Probe, name: str, payload: bytes, encoding: str | None = None) -> None:
    try:
        stream_checks.check_refusal((await probe.ask(payload, content_type=encoding)).messages, "invalid_request")
    except BrokenError as error:
        raise BrokenError(f"{name}: {error}") from error


def _check_accepted(answer: Exchange, what: str) -> None:
    error = answer.messages[-1].get("error")
    expect(error is None, f"a request {what} is refused: {error}")
