"""Rules of a stream: its parts, their fields, and how they are counted."""

import asyncio

from tokenbus.conformance import stream_checks
from tokenbus.conformance.assertions import expect
from tokenbus.conformance.probe import Probe, short_request

_AFTERWARDS_S = 0.5


async def one_terminal(probe: Probe) -> None:
    """A stream is a head, chunks and exactly one terminal, and nothing follows."""
    answer = await probe.short()
    await asyncio.sleep(_AFTERWARDS_S)
    stream_checks.check_order(answer.messages)


async def fields(probe: Probe) -> None:
    """Every message has the fields of its kind, with their types."""
    for wanted in ({}, {"ignore_eos": False}, {"stream": False}):
        stream_checks.check_fields((await probe.short(**wanted)).messages)


async def fields_of_errors(probe: Probe) -> None:
    """An error has code, message and retryable, and its code says which."""
    answer = await probe.ask({"prompt": 5})
    stream_checks.check_fields(answer.messages)
    stream_checks.check_refusal(answer.messages, "invalid_request", param="prompt")


async def numbers(probe: Probe) -> None:
    """Offsets count sampled tokens, text offsets UTF-8 bytes, both without gaps."""
    wild = await probe.short(64, temperature=3.0, seed=1)  # rare tokens: characters of several bytes, and parts of them
    for answer in (await probe.short(), wild):
        stream_checks.check_numbers(answer.messages)


async def usage(probe: Probe) -> None:
    """completion_tokens is the last offset + tokens, and total_tokens the sum."""
    stream_checks.check_usage((await probe.short()).messages)


async def timings(probe: Probe) -> None:
    """The terminal has the five timings."""
    stream_checks.check_timings((await probe.short()).messages[-1])


async def attempts(probe: Probe) -> None:
    """A worker's messages have an attempt of 1 or more, which never falls."""
    stream_checks.check_attempts((await probe.short()).messages)


async def not_streamed(probe: Probe) -> None:
    """With stream: false the terminal is the only message and counts everything."""
    answer = await probe.short(stream=False)
    await asyncio.sleep(_AFTERWARDS_S)
    stream_checks.check_alone(answer.messages)


async def headers(probe: Probe) -> None:
    """Messages carry no headers, but an error terminal carries the two of a NATS service."""
    for received in (await probe.short()).received:
        expect(not received.headers, f"a chunk with headers {received.headers}")
    (refused,) = (await probe.ask({"prompt": 5})).received
    for name in ("Nats-Service-Error-Code", "Nats-Service-Error"):
        expect(bool(refused.headers.get(name)), f"an error terminal without {name}: {refused.headers}")


async def only_on_request(probe: Probe) -> None:
    """Token ids, logprobs, progress and routing come only when asked for."""
    for message in (await probe.short()).messages:
        for name in ("token_ids", "logprobs", "progress", "routing", "tool_calls"):
            expect(message.get(name) is None, f"{name} in a message that nobody asked it of")


async def concurrent_streams(probe: Probe) -> None:
    """Streams that run together keep apart."""
    answers = [await probe.send(short_request(12, id=probe.new_id())) for _ in range(8)]
    for answer in answers:
        await answer.terminal()
        assert answer.request_id is not None
        stream_checks.check_ids(answer.messages, answer.request_id)
        stream_checks.check_order(answer.messages)
        stream_checks.check_numbers(answer.messages)


RULES = (
    one_terminal,
    fields,
    fields_of_errors,
    numbers,
    usage,
    timings,
    attempts,
    not_streamed,
    headers,
    only_on_request,
    concurrent_streams,
)
