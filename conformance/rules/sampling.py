"""Rules of sampling: lengths, stops, seeds. They run alone, since batching with other sequences may change the
numbers."""

from tokenbus.conformance.probing import stream_checks
from tokenbus.conformance.probing.assertions import Message, SkippedError, expect, shorten
from tokenbus.conformance.probing.exchange import Exchange
from tokenbus.conformance.probing.probe import Probe, short_request, skip_if_unsupported

_STOP_CHARACTERS = 3


async def max_tokens(probe: Probe) -> None:
    """max_tokens ends a stream with finish reason length after exactly that many tokens."""
    for count in (1, 7):
        terminal = (await probe.short(count)).messages[-1]
        seen = (terminal.get("finish_reason"), terminal["usage"]["completion_tokens"])
        expect(seen == ("length", count), f"max_tokens {count} ends with {seen}")


async def max_tokens_0(probe: Probe) -> None:
    """max_tokens 0 computes the prompt and ends with length and no tokens."""
    for stream in (True, False):
        answer = await probe.short(0, stream=stream)
        terminal = answer.messages[-1]
        skip_if_unsupported(terminal)
        seen = (terminal.get("finish_reason"), terminal["usage"]["completion_tokens"], answer.text)
        expect(seen == ("length", 0, ""), f"max_tokens 0 ends with {seen}")
        stream_checks.check_usage(answer.messages)


async def greedy(probe: Probe) -> None:
    """Temperature 0 gives the same text every time."""
    _check_equal(await probe.short(), await probe.short())


async def seeded(probe: Probe) -> None:
    """The same seed gives the same text again."""
    fields = {"temperature": 1.0, "seed": 11, **_pinned(probe)}
    _check_equal(await probe.short(24, **fields), await probe.short(24, **fields))


async def same_when_not_streamed(probe: Probe) -> None:
    """With stream: false the text is the same as when streamed."""
    _check_equal(await probe.short(), await probe.short(stream=False))


async def same_in_both_encodings(probe: Probe) -> None:
    """JSON and MessagePack give the same text."""
    _check_equal(await probe.short(), await probe.ask(short_request(), content_type="application/msgpack"))


async def stop_string(probe: Probe) -> None:
    """A stop string ends the text before it, is never sent, and is reported in stop_match."""
    whole = (await probe.short(32)).text
    stop = _middle(whole)
    for wanted in (stop, [stop], ["\x00never", stop]):  # a text, a list, and a list whose first text never occurs
        answer = await probe.short(32, stop=wanted)
        terminal = answer.messages[-1]
        seen = (terminal.get("finish_reason"), terminal.get("stop_match"))
        expect(seen == ("stop", stop), f"finish_reason, stop_match {seen} for stop {wanted!r}")
        expect(answer.text == whole[: whole.index(stop)], f"{shorten(answer.text)} with stop {stop!r}")
        stream_checks.check_numbers(answer.messages)
        stream_checks.check_usage(answer.messages)


async def stop_token(probe: Probe) -> None:
    """A stop token ends the stream, counts as a sampled token, and is reported in stop_match."""
    token_ids = await _token_ids(probe)
    stop = _first_new(token_ids)
    terminal = (await probe.short(len(token_ids), stop_token_ids=[stop], ignore_eos=False)).messages[-1]
    seen = (terminal.get("finish_reason"), terminal.get("stop_match"), terminal["usage"]["completion_tokens"])
    expected = ("stop", stop, token_ids.index(stop) + 1)
    expect(seen == expected, f"finish_reason, stop_match, completion_tokens {seen} instead of {expected}")


async def min_tokens(probe: Probe) -> None:
    """A stream does not stop before min_tokens."""
    token_ids = await _token_ids(probe)
    least = token_ids.index(_first_new(token_ids)) + 3  # without min_tokens the stream would stop three tokens earlier
    fields = {"stop_token_ids": [_first_new(token_ids)], "ignore_eos": False, "min_tokens": least}
    terminal = (await probe.short(least + 8, **fields)).messages[-1]
    seen = terminal["usage"]["completion_tokens"]
    expect(seen >= least, f"{seen} tokens with min_tokens {least}")


async def returned_token_ids(probe: Probe) -> None:
    """return_token_ids gives each message exactly one id per token."""
    answer = await probe.short(return_token_ids=True)
    skip_if_unsupported(answer.messages[-1])
    stream_checks.check_token_ids(answer.messages)
    whole = await probe.short(return_token_ids=True, stream=False)
    stream_checks.check_token_ids(whole.messages)
    streamed = [token_id for message in answer.messages for token_id in message.get("token_ids") or []]
    expect(whole.messages[0].get("token_ids") == streamed, "the ids differ from those of a streamed answer")


async def _token_ids(probe: Probe) -> list[int]:
    answer = await probe.short(return_token_ids=True)
    skip_if_unsupported(answer.messages[-1])
    return [token_id for message in answer.messages for token_id in message.get("token_ids") or []]


def _first_new(token_ids: list[int]) -> int:
    """Returns the first token that differs from the very first. Raises SkippedError if there is none."""
    for token_id in token_ids:
        if token_id != token_ids[0]:
            return token_id
    raise SkippedError("the model repeats a single token")


def _middle(text: str) -> str:
    """Returns a few characters from the middle of a text. Raises SkippedError if the text is too short for that."""
    at = len(text) // 2
    piece = text[at : at + _STOP_CHARACTERS]
    if len(piece) < _STOP_CHARACTERS or "\ufffd" in piece:
        raise SkippedError(f"the model's text has no usable stop string: {shorten(text)}")
    return piece


def _pinned(probe: Probe) -> Message:
    """Returns fields that pin requests to one worker, since a seed is not reproducible across builds."""
    workers = probe.target.worker_ids
    return {"routing": {"worker_id": workers[0]}} if workers else {}


def _check_equal(one: Exchange, other: Exchange) -> None:
    for answer in (one, other):
        expect(answer.messages[-1].get("error") is None, f"the stream ends with {answer.messages[-1].get('error')}")
    expect(one.text == other.text, f"first {shorten(one.text)}, then {shorten(other.text)}")
