"""Rules of a stream: its messages, their fields and their counts."""

import asyncio

from tokenbus.conformance.probing import stream_checks
from tokenbus.conformance.probing.assertions import expect
from tokenbus.conformance.probing.probe import Probe, short_request

_AFTERWARDS_S = 0.5


async def one_terminal(probe: Probe) -> None:
    """A stream is a head, chunks and exactly one terminal, and nothing follows the terminal."""
    answer = await probe.short()
    await asyncio.sleep(_AFTERWARDS_S)
    stream_checks.check_order(answer.messages)


async def fields(probe: Probe) -> None:
    """Every message has the fields of its kind, with the right types."""
    for wanted in ({}, {"ignore_eos": False}, {"stream": False}):
        stream_checks.check_fields((await probe.short(**wanted)).messages)


async def fields_of_errors(probe: Probe) -> None:
    """An error has code, message and retryable, and retryable matches the code."""
    answer = await probe.ask({"prompt": 5})
    stream_checks.check_fields(answer.messages)
    stream_checks.check_refusal(answer.messages, "invalid_request", param="prompt")


async def numbers(probe: Probe) -> None:
    """offset counts sampled tokens and text_offset counts UTF-8 bytes, both without gaps."""
    wild = await probe.short(64, temperature=3.0, seed=1)  # rare tokens: multi-byte characters and fragments
    for answer in (await probe.short(), wild):
        stream_checks.check_numbers(answer.messages)


async def usage(probe: Probe) -> None:
    """completion_tokens is the last offset + tokens, and total_tokens adds the prompt's."""
    stream_checks.check_usage((await probe.short()).messages)


async def timings(probe: Probe) -> None:
    """The terminal has all five timings."""
    stream_checks.check_timings((await probe.short()).messages[-1])


async def attempts(probe: Probe) -> None:
    """A worker's messages have an attempt of at least 1, which never decreases."""
    stream_checks.check_attempts((await probe.short()).messages)


async def not_streamed(probe: Probe) -> None:
    """With stream: false the terminal is the only message and counts everything."""
    answer = await probe.short(stream=False)
    await asyncio.sleep(_AFTERWARDS_S)
    stream_checks.check_alone(answer.messages)


async def headers(probe: Probe) -> None:
    """Messages have no headers, except that an error terminal has the two of a NATS service error."""
    for received in (await probe.short()).received:
        expect(not received.headers, f"a chunk with headers {received.headers}")
    (refused,) = (await probe.ask({"prompt": 5})).received
    for name in ("Nats-Service-Error-Code", "Nats-Service-Error"):
        expect(bool(refused.headers.get(name)), f"an error terminal without {name}: {refused.headers}")


async def only_on_request(probe: Probe) -> None:
    """token_ids, logprobs, progress and routing appear only if requested."""
    for message in (await probe.short()).messages:
        for name in (
            "token_ids",
            "logprobs",
            "prompt_offset",
            "prompt_logprobs",
            "progress",
            "routing",
            "tool_calls",
            "reasoning",
        ):
            expect(message.get(name) is None, f"{name} appears in a message though it was not requested")


async def concurrent_streams(probe: Probe) -> None:
    """Concurrent streams do not mix."""
    answers = [await probe.send(short_request(12, id=probe.new_id())) for _ in range(8)]
    for answer in answers:
        await answer.terminal()
        assert answer.request_id is not None
        stream_checks.check_ids(answer.messages, answer.request_id)
        stream_checks.check_order(answer.messages)
        stream_checks.check_numbers(answer.messages)
