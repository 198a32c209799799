"""Chunks become parts that begin, grow and end, in order and each once."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tokenbus.gateway.serving.answer_events import (
    AnswerEnded,
    AnswerEventReader,
    AnswerPart,
    PartEnded,
    PartGrew,
    PartKind,
    PartStarted,
    PromptComputed,
    TokensCounted,
    TokensSampled,
)
from tokenbus.protocol.wire import messages

REASONING, TEXT, TOOL_CALL = PartKind.REASONING, PartKind.TEXT, PartKind.TOOL_CALL


def chunk(reason: messages.FinishReason | None = None, **fields: Any) -> messages.Chunk:
    return messages.Chunk(id="r", finish_reason=reason, **fields)


def call(index: int, arguments: str, name: str = "") -> messages.ToolCallDelta:
    if name:
        function = messages.FunctionDelta(name=name, arguments=arguments)
        return messages.ToolCallDelta(index=index, id=f"c{index}", type="function", function=function)
    return messages.ToolCallDelta(index=index, function=messages.FunctionDelta(arguments=arguments))


def parts_of(reader: AnswerEventReader) -> list[tuple[PartKind, str, str]]:
    return [(part.kind, part.name, part.text) for part in reader.parts]


def test_a_part_ends_when_the_next_begins_or_with_the_answer() -> None:
    reader = AnswerEventReader()
    events = reader.read(chunk(reasoning="hm", text="so"))
    events += reader.read(chunk(text=" it is", tool_calls=[call(0, "{", "f"), call(0, "}"), call(1, "{}", "g")]))
    events += reader.read(chunk(messages.FinishReason.TOOL_CALLS))
    thought, said, first, second = reader.parts
    assert events == [
        PartStarted(thought),
        PartGrew(thought, "hm"),
        PartEnded(thought),
        PartStarted(said),
        PartGrew(said, "so"),
        PartGrew(said, " it is"),
        PartEnded(said),
        PartStarted(first),
        PartGrew(first, "{"),
        PartGrew(first, "}"),
        PartEnded(first),
        PartStarted(second),
        PartGrew(second, "{}"),
        PartEnded(second),
        AnswerEnded(messages.FinishReason.TOOL_CALLS, None, None),
    ]
    assert parts_of(reader) == [
        (REASONING, "", "hm"),
        (TEXT, "", "so it is"),
        (TOOL_CALL, "f", "{}"),
        (TOOL_CALL, "g", "{}"),
    ]
    assert [part.index for part in reader.parts] == [0, 1, 2, 3]


def test_the_prompts_progress_is_an_event() -> None:
    progress = messages.Progress(prompt_tokens=9, processed_tokens=6, cached_tokens=4)
    assert AnswerEventReader().read(chunk(progress=progress)) == [PromptComputed(9, 4, 6)]


def test_tokens_are_counted_only_for_those_who_ask() -> None:
    piece = messages.Chunk(id="r", offset=3, tokens=2, text="a")
    assert TokensCounted(5) in AnswerEventReader(counts_tokens=True).read(piece)
    assert not any(isinstance(one, TokensCounted) for one in AnswerEventReader().read(piece))


def test_an_answer_that_fails_ends_its_part_and_has_no_end() -> None:
    for reason in (messages.FinishReason.ERROR, messages.FinishReason.CANCELLED):
        reader = AnswerEventReader()
        reader.read(chunk(text="a"))
        (ended,) = reader.read(chunk(reason))
        assert isinstance(ended, PartEnded)
        assert reader.end is None


def test_a_part_has_the_log_probabilities_of_its_tokens_and_of_those_before_it_without_a_text() -> None:
    a, b, c, d, e = (messages.TokenLogprob(id=number, text="", bytes=[], logprob=-1.0, top=[]) for number in range(5))
    reader = AnswerEventReader()
    for one in (
        chunk(reasoning="hm", logprobs=[a]),
        chunk(logprobs=[b]),
        chunk(text="so", logprobs=[c]),
        chunk(text=" it", logprobs=[d]),
        chunk(messages.FinishReason.STOP, logprobs=[e]),
    ):
        reader.read(one)
    thought, said = reader.parts
    assert (thought.logprobs, said.logprobs) == ([a], [b, c, d])
    assert reader.logprobs == [a, b, c, d, e]


def test_log_probabilities_that_need_not_be_kept_are_only_passed_on() -> None:
    one = messages.TokenLogprob(id=1, text="", bytes=[], logprob=-1.0, top=[])
    reader = AnswerEventReader(keeps_logprobs=False)
    events = [*reader.read(chunk(text="a", logprobs=[one])), *reader.read(chunk(messages.FinishReason.STOP))]
    assert [event.logprobs for event in events if isinstance(event, TokensSampled)] == [[one]]
    assert (reader.logprobs, reader.parts[0].logprobs) == ([], [])


deltas = st.one_of(
    st.builds(lambda text: {"text": text}, st.text(max_size=3)),
    st.builds(lambda text: {"reasoning": text}, st.text(max_size=3)),
    st.builds(lambda text: {"text": text, "reasoning": text}, st.text(max_size=3)),
)


@given(st.lists(deltas))
def test_grown_pieces_are_the_texts_between_a_start_and_an_end_each(fields: list[dict[str, str]]) -> None:
    reader = AnswerEventReader()
    events = [event for one in fields for event in reader.read(chunk(**one))]
    events += reader.read(chunk(messages.FinishReason.STOP))
    grown: dict[int, str] = {}
    open_part: AnswerPart | None = None
    for event in events:
        match event:
            case PartStarted(part):
                assert open_part is None
                open_part = part
            case PartGrew(part, added):
                assert part is open_part
                grown[part.index] = grown.get(part.index, "") + added
            case PartEnded(part):
                assert part is open_part
                open_part = None
            case _:
                pass
    assert open_part is None
    assert [grown[part.index] for part in reader.parts] == [part.text for part in reader.parts]
    said = "".join(part.text for part in reader.parts if part.kind is TEXT)
    assert said == "".join(one.get("text", "") for one in fields)
