"""Reasoning and tool calls are published again exactly, from any token on, and a client takes only what is new."""

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from tests.support.published import chunk_of, replay
from tests.worker.streams.test_stream import stream as open_stream
from tokenbus.client.wire.reassembler import ReadyChunks, Reassembler
from tokenbus.protocol.wire import messages
from tokenbus.worker.contract import engine_output
from tokenbus.worker.streams.stream import WorkerStream

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)


class Answer(NamedTuple):
    """An answer as its client has it: text, reasoning, and the id, name and arguments of each call."""

    text: str
    reasoning: str
    calls: list[tuple[str, str, str]]


@st.composite
def outputs(draw: st.DrawFn) -> list[engine_output.Output]:
    """Outputs of one to three tokens, some of which bring reasoning, more of a call, or new calls."""
    made: list[engine_output.Output] = []
    num_calls = 0
    for place in range(draw(st.integers(1, 12))):
        parts = []
        if num_calls and draw(st.booleans()):
            parts.append(engine_output.ToolCallPart(num_calls - 1, draw(TEXTS)))
        for _ in range(draw(st.integers(0, 2))):
            parts.append(engine_output.ToolCallPart(num_calls, draw(TEXTS), f"id{num_calls}", f"f{num_calls}"))
            num_calls += 1
        ids = [10 * place + number for number in range(draw(st.integers(1, 3)))]
        text, reasoning = draw(TEXTS), draw(TEXTS)
        made.append(engine_output.Output(token_ids=ids, text=text, reasoning=reasoning, tool_calls=tuple(parts)))
    return made


def collected(chunks: list[messages.Chunk]) -> Answer:
    """Puts an answer together as a simple client does, which trusts in what it gets."""
    calls: list[tuple[str, str, str]] = []
    for chunk in chunks:
        for delta in chunk.tool_calls or ():
            if delta.function.name:
                assert delta.index == len(calls)
                assert delta.type == "function"
                calls.append((delta.id or "", delta.function.name, ""))
            call_id, name, arguments = calls[delta.index]
            assert delta.arguments_offset == len(arguments.encode())
            calls[delta.index] = (call_id, name, arguments + delta.function.arguments)
    return Answer("".join(one.text for one in chunks), "".join(one.reasoning or "" for one in chunks), calls)


def stream_of(made: list[engine_output.Output]) -> tuple[WorkerStream, list[messages.Chunk]]:
    stream = open_stream()
    chunks = [chunk_of(stream, output) for output in made]
    return stream, [chunk for chunk in chunks if chunk is not None]


@given(outputs(), st.data())
def test_what_is_published_again_from_any_token_on_is_what_was_published_there(
    made: list[engine_output.Output], data: st.DataObject
) -> None:
    stream, chunks = stream_of(made)
    cut = data.draw(st.integers(0, len(chunks)))
    offset = sum(chunk.tokens for chunk in chunks[:cut])
    again = [one for one in replay(stream, offset, data.draw(st.sampled_from([1, 1_500, 100_000]))) if one.tokens]
    assert collected([*chunks[:cut], *again]) == collected(chunks)


@given(outputs(), st.data())
def test_a_client_that_gets_parts_twice_takes_only_what_is_new(
    made: list[engine_output.Output], data: st.DataObject
) -> None:
    stream, chunks = stream_of(made)
    known = data.draw(st.integers(0, len(chunks)))
    num_tokens = sum(chunk.tokens for chunk in chunks[:known])
    again = replay(stream, data.draw(st.integers(0, num_tokens)), data.draw(st.sampled_from([1, 1_500, 100_000])))
    reassembler = Reassembler()
    taken = [reassembler.add(chunk) for chunk in (*chunks[:known], *again)]
    assert collected([one.chunk for one in taken if isinstance(one, ReadyChunks)]) == collected(chunks)


@given(outputs())
def test_a_stream_that_continues_knows_the_parts_of_resumed_tokens(before: list[engine_output.Output]) -> None:
    one = [part for output in before for part in _per_token(output)]
    whole, chunks = stream_of(one)
    resumed = open_stream()
    parts = {n: engine_output.AnswerParts(output.reasoning, output.tool_calls) for n, output in enumerate(one)}
    texts = [output.text for output in one]
    ids = [output.token_ids[0] for output in one]
    resumed.resume(engine_output.Output(token_ids=ids, text="".join(texts), resumed_texts=texts, resumed_parts=parts))
    for offset in range(len(ids)):
        assert list(replay(resumed, offset, 700)) == list(replay(whole, offset, 700))
    assert collected([one for one in replay(resumed, 0, 100_000) if one.tokens]) == collected(chunks)


def _per_token(output: engine_output.Output) -> list[engine_output.Output]:
    """Divides an output so that each token has one: the last has everything that came with them."""
    *first, last = output.token_ids
    empty = [engine_output.Output(token_ids=[token_id], text="") for token_id in first]
    return [
        *empty,
        engine_output.Output(
            token_ids=[last], text=output.text, reasoning=output.reasoning, tool_calls=output.tool_calls
        ),
    ]
