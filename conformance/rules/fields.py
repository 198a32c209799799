"""Rules of a request's fields: ranges, the prompt's three forms, sizes and the model."""

import asyncio
import json
from typing import NamedTuple

from tokenbus.conformance.probing import stream_checks
from tokenbus.conformance.probing.assertions import BrokenError, Message, SkippedError, expect, shorten
from tokenbus.conformance.probing.exchange import Exchange
from tokenbus.conformance.probing.probe import MSGPACK, Probe, short_request


class FieldLimits(NamedTuple):
    """Values of one field: the outermost allowed ones and the first ones beyond."""

    field: str
    accepted: tuple[object, ...]
    rejected: tuple[object, ...]


_STOP = "s" * 1_024

LIMITS = (
    FieldLimits("max_tokens", (1,), (-1,)),
    FieldLimits("min_tokens", (0,), (-1,)),
    FieldLimits("temperature", (0, 100), (-0.001, 100.1)),
    FieldLimits("top_p", (0.000001, 1), (0, -0.1, 1.001)),
    FieldLimits("top_k", (0,), (-1,)),
    FieldLimits("min_p", (0, 1), (-0.001, 1.001)),
    FieldLimits("repetition_penalty", (0.01, 10), (0.009, 10.01)),
    FieldLimits("presence_penalty", (-2, 2), (-2.01, 2.01)),
    FieldLimits("frequency_penalty", (-2, 2), (-2.01, 2.01)),
    FieldLimits("seed", (0, 2**32 - 1), (-1, 2**32)),
    FieldLimits("logprobs", (0, 20), (-1, 21)),
    FieldLimits("prompt_logprobs", (0, 20), (-1, 21)),
    FieldLimits("priority", (-1_000, 1_000), (-1_001, 1_001)),
    FieldLimits("timeout_ms", (600_000,), (0, -1)),
    FieldLimits("stop", ("s", _STOP, [_STOP] * 16), ("", _STOP + "s", ["a"] * 17, ["a", ""])),
    FieldLimits("id", ("i", "A-Za-z0-9_" + "x" * 118), ("", "x" * 129, "a.b", "a b", "ü", "a*", ">")),
)
_CONCURRENCY = 8
"""Requests sent at the same time. More might exceed a tenant's limit."""
_UNKNOWN_MODEL_CODES = ("model_not_found", "no_worker")


async def at_the_limits(probe: Probe) -> None:
    """Every value at the limit of its field's range is accepted."""
    cases = [(limits.field, value) for limits in LIMITS for value in limits.accepted]
    for (field, value), answer in zip(cases, await _ask_all(probe, cases), strict=True):
        error = answer.messages[-1].get("error") or {}
        is_refused = error.get("code") == "invalid_request"
        expect(not is_refused, f"{field} {shorten(value)} is refused: {error.get('message')}")


async def beyond_the_limits(probe: Probe) -> None:
    """Every value just beyond its field's range is refused as invalid_request, with the field's name in param."""
    cases = [(limits.field, value) for limits in LIMITS for value in limits.rejected]
    for (field, value), answer in zip(cases, await _ask_all(probe, cases), strict=True):
        try:
            stream_checks.check_refusal(answer.messages, "invalid_request", param=field)
        except BrokenError as error:
            raise BrokenError(f"{field} {shorten(value)}: {error}") from error


async def one_prompt(probe: Probe) -> None:
    """A request must have exactly one of messages, prompt and token_ids."""
    forms: Message = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "token_ids": [1]}
    wrong = [[], ["messages", "prompt"], ["prompt", "token_ids"], ["messages", "token_ids"], list(forms)]
    for names in wrong:
        answer = await probe.ask({"max_tokens": 1, **{name: forms[name] for name in names}})
        try:
            stream_checks.check_refusal(answer.messages, "invalid_request")
        except BrokenError as error:
            raise BrokenError(f"with {' and '.join(names) or 'none of them'}: {error}") from error


async def token_ids_as_they_are(probe: Probe) -> None:
    """token_ids are the prompt, unchanged."""
    answer = await probe.ask({"token_ids": [1, 2, 3, 4, 5], "max_tokens": 1})
    stream_checks.check_usage(answer.messages)
    seen = answer.messages[-1]["usage"]["prompt_tokens"]
    expect(seen == 5, f"prompt_tokens {seen} for 5 token ids")


async def too_long(probe: Probe) -> None:
    """A prompt that leaves no room for a single token is refused as prompt_too_long, with both numbers."""
    count = probe.target.context_length
    if count + 100 > probe.target.max_request_bytes:  # small ids are one byte each in MessagePack
        raise SkippedError(f"{count} token ids do not fit into a request")
    answer = await probe.ask({"token_ids": [1] * count, "max_tokens": 1}, content_type=MSGPACK)
    stream_checks.check_refusal(answer.messages, "prompt_too_long")
    error = answer.messages[-1]["error"]
    seen = [error.get(name) for name in ("prompt_tokens", "context_length")]
    expect(seen == [count, count], f"prompt_tokens and context_length {seen} for {count} tokens")


async def too_large(probe: Probe) -> None:
    """A request larger than max_upload_bytes is refused as payload_too_large."""
    size = (probe.target.max_upload_bytes or probe.target.max_request_bytes) + 1
    if size + 4_096 > probe.link.max_payload:  # headers count too, and the broker would cut the connection
        refused = [await _part(probe, probe.subject, b"", "Tokenbus-Size", size)]
    else:
        refused = (await probe.ask(b'{"prompt": "' + b"x" * size + b'"}')).messages
    stream_checks.check_refusal(refused, "payload_too_large")


async def in_parts(probe: Probe) -> None:
    """A request that is announced and sent in parts, one of them twice, is answered like one in a single message."""
    body = json.dumps(short_request(8, id=probe.new_id())).encode()
    upload = await _announce(probe, len(body))
    for begin, end in ((0, 1), (1, 40), (1, 40)):
        answer = await _part(probe, upload, body[begin:end], "Tokenbus-Offset", begin)
        expect(answer.get("received") == end, f"after {end} bytes the answer is {shorten(answer)}")
    exchange = await probe.listen(probe.link.new_inbox(), msgpack=False)
    await probe.publish(upload, body[40:], exchange.inbox, {"Tokenbus-Offset": "40"})
    await exchange.terminal()
    stream_checks.check_order(exchange.messages)
    whole = await probe.short(8)
    expect(exchange.text == whole.text, f"its text is {shorten(exchange.text)} and not {shorten(whole.text)}")


async def parts_that_do_not_follow(probe: Probe) -> None:
    """A part that overlaps or exceeds the size is refused as invalid_request, one that can't be placed as
    upload_lost."""
    for begin, end, code in ((5, 15, "invalid_request"), (10, 101, "invalid_request"), (11, 20, "upload_lost")):
        upload = await _announce(probe, 100)
        await _part(probe, upload, bytes(10), "Tokenbus-Offset", 0)
        for expected in (code, "upload_lost"):  # the second time the upload is no longer known
            refused = await _part(probe, upload, bytes(end - begin), "Tokenbus-Offset", begin)
            stream_checks.check_refusal([refused], expected)


async def unknown_model(probe: Probe) -> None:
    """A request for a model that is not served ends at once, as no_worker or model_not_found."""
    subject = probe.names.generate(probe.new_id(), probe.tenant)
    answer = await probe.send({"prompt": "x"}, subject=subject)
    await answer.terminal(timeout_s=2.0)
    stream_checks.check_refusal(answer.messages, *_UNKNOWN_MODEL_CODES)


async def _announce(probe: Probe, size: int) -> str:
    """Announces a request, and returns the subject for its parts."""
    answer = await _part(probe, probe.subject, b"", "Tokenbus-Size", size)
    upload = answer.get("upload")
    expect(isinstance(upload, str), f"the answer to an announcement is {shorten(answer)}")
    return str(upload)


async def _part(probe: Probe, subject: str, part: bytes, header: str, number: int) -> Message:
    """Sends an announcement or a part, and returns the answer."""
    exchange = await probe.listen(probe.link.new_inbox(), msgpack=False)
    await probe.publish(subject, part, exchange.inbox, {header: str(number)})
    return await exchange.first(f"an answer to {header} {number}")


async def _ask_all(probe: Probe, cases: list[tuple[str, object]]) -> list[Exchange]:
    answers: list[Exchange] = []
    for at in range(0, len(cases), _CONCURRENCY):
        bodies = [{"prompt": "x", "max_tokens": 1, field: value} for field, value in cases[at : at + _CONCURRENCY]]
        answers += await asyncio.gather(*(probe.ask(body) for body in bodies))
    return answers
