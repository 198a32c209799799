"""Reasoning and tool calls are told apart from the text token by token, and wherever an answer is continued."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.engine_client.test_resumed_generation import after
from tokenbus.protocol.wire import errors, messages
from tokenbus.worker.chat_format.chat_rules import ChatRules
from tokenbus.worker.contract import engine_output, engine_request
from tokenbus.worker.contract.chat_format import Calls, ChatFormat, Kind, Reasoning
from tokenbus.worker.contract.contract import StreamValidator
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine.scheduling.sequence import FinishRule
from tokenbus.worker.engine_client import generation, reader
from tokenbus.worker.engine_client.generation import Generation
from tokenbus.worker.engine_client.reader import CompletionReader, PartsReader

PIECES = [
    *(b"", b"", b"", b"</think>", b"<|assistant|>", b"\n", b"Hello", b" ST", b"OP", b'{"name": "f", "arguments": '),
    *(b'{"a": ', b"1", b"}", b"\xe2\x82", b"\xac", b"<tool_call>"),
]
EOS, CALL, END_CALL, END_THINK, TURN, LINE, HELLO, ST, OP, HEAD, ARGUMENT, ONE, CLOSE, HALF, HALF_2, SPELLED = range(16)
FORMAT = ChatFormat(
    calls=Calls(kind=Kind.JSON, call_open="\n<tool_call>\n", call_close="\n</tool_call>"),
    reasoning=Reasoning(open="<think>", close="</think>"),
    turn_open="<|assistant|>",
    tokens={"<tool_call>": CALL, "</tool_call>": END_CALL, "</think>": END_THINK, "<|assistant|>": TURN},
)
RULES = ChatRules(FORMAT, PIECES)
WHOLE_CALL = (CALL, LINE, HEAD, ARGUMENT, ONE, CLOSE, CLOSE, LINE, END_CALL)
TOOLS: dict[str, dict[str, Any]] = {"f": {"type": "object"}}


class Answering:
    """A generation with a reader, and everything that it hands out."""

    def __init__(
        self,
        *stop: str,
        resumed: engine_request.ResumedCompletion | None = None,
        tools: dict[str, dict[str, Any]] | None = TOOLS,
        thinks: bool = False,
        hold_calls: bool = False,
        **sampling: Any,
    ) -> None:
        prompt = "<think>" if thinks else ""
        request = engine_request.EngineRequest(
            key="default:g",
            token_ids=[1, 2, 3],
            sampling=engine_request.Sampling(**({"max_tokens": 1_000} | sampling)),
            stop=stop,
            resumed=resumed,
            parsing=engine_request.OutputParsing(tools=tools, generation_prompt=prompt, hold_calls=hold_calls),
        )
        self.outputs: list[engine_output.Output] = []
        self.rule = FinishRule(request.sampling, [EOS])
        sink = StreamValidator(request, self.outputs.append)
        self.generation = Generation(request, sink, CompletionReader(request, PIECES, RULES), 10.0)
        self.generation.resume([EOS])
        self.generation.started_at = 10.25

    def sample(self, *token_ids: int) -> "Answering":
        if self.generation.is_complete:
            self.generation.end_resumed(12.0)
        for place, token_id in enumerate(token_ids, start=len(self.generation.sampled)):
            if self.outputs and self.outputs[-1].finish_reason is not None:
                break
            end = self.rule.finish_reason(token_id, place + 1)
            self.generation.advance(ipc.SequenceOutput(1, [token_id], end, [], 0 if place else 2), 11.0)
        return self

    @property
    def parts(self) -> list[tuple[str, str, tuple[engine_output.ToolCallPart, ...]]]:
        """Returns the parts that came with each token, and last those that came with the terminal alone."""
        found: list[tuple[str, str, tuple[engine_output.ToolCallPart, ...]]] = []
        for output in self.outputs:
            if output.resumed_texts is not None:
                for place, text in enumerate(output.resumed_texts):
                    found.append((text, *output.resumed_parts.get(place, engine_output.AnswerParts())))
            else:
                found.append((output.text, output.reasoning, output.tool_calls))
        return found

    @property
    def text(self) -> str:
        return "".join(text for text, _, _ in self.parts)

    @property
    def reasoning(self) -> str:
        return "".join(reasoning for _, reasoning, _ in self.parts)

    @property
    def calls(self) -> list[tuple[str, str]]:
        """The name and the arguments of each call."""
        found: list[tuple[str, str]] = []
        for part in (part for _, _, parts in self.parts for part in parts):
            if part.name:
                found.append((part.name, ""))
            name, arguments = found[part.call]
            found[part.call] = (name, arguments + part.arguments)
        return found

    @property
    def terminal(self) -> engine_output.Output:
        return self.outputs[-1]


def test_reasoning_text_and_calls_come_apart_and_the_finish_reason_says_so() -> None:
    one = Answering(thinks=True).sample(HELLO, END_THINK, HELLO, *WHOLE_CALL, *WHOLE_CALL, EOS)
    assert (one.reasoning, one.text, one.calls) == ("Hello", "Hello", [("f", '{"a": 1}')] * 2)
    assert (one.terminal.finish_reason, one.terminal.stop_match) == (messages.FinishReason.TOOL_CALLS, None)
    assert one.terminal.usage is not None
    assert one.terminal.usage.reasoning_tokens == 2  # with the token that closes it
    ids = [part.id for _, _, parts in one.parts for part in parts if part.id]
    assert len(set(ids)) == 2


def test_arguments_come_as_they_are_generated() -> None:
    one = Answering().sample(CALL, LINE, HEAD, ARGUMENT)
    assert one.calls == [("f", '{"a": ')]
    one.sample(ONE, CLOSE)  # a number is complete once something else follows
    assert one.outputs[-1].tool_calls == (engine_output.ToolCallPart(0, "1}"),)


def test_a_call_that_is_cut_off_is_told_as_a_length() -> None:
    one = Answering(max_tokens=4).sample(CALL, LINE, HEAD, ARGUMENT)
    assert one.terminal.finish_reason is messages.FinishReason.LENGTH
    assert one.calls == [("f", '{"a": ')]


def test_a_whole_answer_has_only_complete_calls() -> None:
    one = Answering(max_tokens=13, hold_calls=True).sample(*WHOLE_CALL, CALL, LINE, HEAD, ARGUMENT)
    assert one.terminal.finish_reason is messages.FinishReason.LENGTH
    assert one.calls == [("f", '{"a": 1}')]


def test_text_that_spells_a_marker_is_no_call() -> None:
    one = Answering().sample(SPELLED, LINE, HEAD, ARGUMENT, ONE, CLOSE, CLOSE, EOS)
    assert one.calls == []
    assert one.text == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}'
    assert one.terminal.finish_reason is messages.FinishReason.STOP


def test_without_tools_calls_are_text() -> None:
    one = Answering(tools=None).sample(HELLO, *WHOLE_CALL, EOS)
    assert one.calls == []
    assert '"arguments"' in one.text


@pytest.mark.parametrize("stop", ["STOP", "lo ST"])
def test_text_that_is_held_back_for_a_stop_string_stands_before_a_marker(stop: str) -> None:
    one = Answering(stop).sample(HELLO, ST, *WHOLE_CALL, OP, EOS)
    assert one.text == ("Hello STOP" if stop == "STOP" else "Hel")
    assert one.calls == ([("f", '{"a": 1}')] if stop == "STOP" else [])


def test_a_stop_string_ends_an_answer_with_calls_as_a_stop() -> None:
    one = Answering("STOP").sample(*WHOLE_CALL, ST, OP)
    assert (one.terminal.finish_reason, one.terminal.stop_match) == (messages.FinishReason.STOP, "STOP")


@given(
    pieces=st.lists(
        st.one_of(st.sampled_from(range(len(PIECES))).map(lambda one: (one,)), st.just(WHOLE_CALL)), max_size=12
    ),
    stops=st.lists(st.sampled_from(["STOP", "lo", "€"]), max_size=2, unique=True),
    thinks=st.booleans(),
    hold_calls=st.booleans(),
    max_tokens=st.integers(1, 60),
    data=st.data(),
)
@settings(max_examples=300)
def test_an_answer_continued_at_any_place_is_the_undisturbed_one(
    pieces: list[tuple[int, ...]],
    stops: list[str],
    thinks: bool,
    hold_calls: bool,
    max_tokens: int,
    data: st.DataObject,
) -> None:
    token_ids = [token_id for piece in pieces for token_id in piece] + [EOS]
    options: dict[str, Any] = {"thinks": thinks, "hold_calls": hold_calls, "max_tokens": max_tokens}
    whole = Answering(*stops, **options).sample(*token_ids)
    sampled = [token_id for output in whole.outputs for token_id in output.token_ids]
    count = data.draw(st.integers(1, len(sampled)))
    again = Answering(*stops, resumed=after(*sampled[:count]), **options).sample(*token_ids[count:])
    assert (again.text, again.reasoning, again.calls) == (whole.text, whole.reasoning, whole.calls)
    assert again.parts[: len(sampled) - 1] == whole.parts[: len(sampled) - 1]
    assert again.terminal.finish_reason is whole.terminal.finish_reason
    assert again.terminal.usage == whole.terminal.usage


def test_given_tokens_that_take_too_long_to_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Markers take longest: 100,000 of them took more than two seconds, and a frontend may stand still for 1.5."""
    monkeypatch.setattr(generation, "_MAX_RESUME_S", 0.01)
    with pytest.raises(errors.RequestError) as refused:
        Answering(max_tokens=100_000, resumed=after(*[CALL, LINE] * 10_000))
    assert (refused.value.error.code, refused.value.error.param) == (errors.Code.UNSUPPORTED, "resume_from")


class _BrokenReader(PartsReader):
    """Has a bug that shows at one token."""

    def read(self, token_id: int, text: str) -> str:
        if token_id == ONE:
            raise ZeroDivisionError
        return super().read(token_id, text)

    def finish(self, *, cut_off: bool) -> str:
        raise ZeroDivisionError


async def test_a_bug_in_reading_an_answer_ends_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context["exception"]))
    monkeypatch.setattr(reader, "PartsReader", _BrokenReader)
    for token_ids, cancels in (((HELLO, ONE), False), ((HELLO, EOS), False), ((HELLO,), True)):
        answering = Answering().sample(*token_ids)
        if cancels:
            answering.generation.cancel(12.0)
        terminal = answering.outputs[-1]
        assert terminal.error is not None
        assert (terminal.error.code, terminal.text) == (errors.Code.INTERNAL, "")
        assert answering.generation.has_ended
    with pytest.raises(errors.RequestError) as refused:
        Answering(resumed=after(HELLO, ONE))
    assert refused.value.error.code is errors.Code.INTERNAL
    Answering(resumed=after(HELLO, EOS)).sample()
    assert len(problems) == 5
