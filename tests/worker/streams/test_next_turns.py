"""A worker tells a whole answer that has reasoning, and completes the next turn's prompt from the last one."""

from typing import Any, NamedTuple

import pytest

from tests.support.published import chunk_of
from tests.worker.streams.test_copies import USAGE, stream
from tokenbus.protocol.wire import block_hash, codec, internal, messages
from tokenbus.protocol.wire.messages import ChatMessage
from tokenbus.protocol.wire.params import GenerationParams
from tokenbus.worker.adapters.adapters import Adapters
from tokenbus.worker.broker.event_log import Ends
from tokenbus.worker.contract import engine_output, engine_request
from tokenbus.worker.contract.engine_output import ToolCallPart
from tokenbus.worker.streams.next_turns import EndedTurns
from tokenbus.worker.streams.stream import WorkerStream

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def answer_of(
    one: WorkerStream, text: str = "It is 2.", reason: messages.FinishReason = messages.FinishReason.STOP
) -> ChatMessage | None:
    """Ends a stream whose answer has a thought, a text and a call, in several outputs."""
    chunk_of(one, engine_output.Output(token_ids=[1], reasoning="1 and 1 "))
    chunk_of(one, engine_output.Output(token_ids=[2], reasoning="are 2."))
    chunk_of(one, engine_output.Output(token_ids=[3], text=text[:3]))
    chunk_of(one, engine_output.Output(token_ids=[4], tool_calls=[ToolCallPart(0, '{"a"', "c1", "f")]))
    last = engine_output.Output(
        token_ids=[5], text=text[3:], tool_calls=[ToolCallPart(0, ": 1}", "", "")], finish_reason=reason, usage=USAGE
    )
    terminal = chunk_of(one, last)
    assert terminal is not None
    return one.end_report(terminal, tells_answer=True).answer


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("with_reasoning", [True, False])
def test_the_answer_is_told_as_its_client_sends_it_back(is_streamed: bool, with_reasoning: bool) -> None:
    one = stream("r", wants_answer=True, wants_reasoning=with_reasoning, params=GenerationParams(stream=is_streamed))
    thought = "1 and 1 are 2." if with_reasoning else None
    expected = ChatMessage(role="assistant", content="It is 2.", reasoning_content=thought, tool_calls=[CALL])
    assert answer_of(one) == expected
    assert one.has_told_answer


def test_no_answer_is_told_that_is_not_wanted_not_complete_too_long_or_without_reasoning() -> None:
    assert answer_of(stream("r")) is None
    assert answer_of(stream("r", wants_answer=True), reason=messages.FinishReason.LENGTH) is None
    assert answer_of(stream("r", wants_answer=True), text="x" * 25_000) is None
    plain = stream("r", wants_answer=True)
    last = engine_output.Output(token_ids=[1], text="2", finish_reason=messages.FinishReason.STOP, usage=USAGE)
    terminal = chunk_of(plain, last)
    assert terminal is not None
    assert plain.end_report(terminal, tells_answer=True).answer is None
    assert not plain.has_told_answer


def test_entries_have_few_long_answers_each() -> None:
    answers = [None, ChatMessage(role="assistant", content="x" * 20_000), ChatMessage(role="assistant", content="x")]
    reports = [
        internal.StreamEnd(id=f"acme:{place}", finish_reason=messages.FinishReason.STOP, answer=answers[place % 3])
        for place in range(9)
    ]
    parts = list(Ends([one.id for one in reports], ["acme:4"], reports).parts())
    assert [key for part in parts for key in part.keys] == [one.id for one in reports]
    assert [one for part in parts for one in part.reports] == reports
    assert [key for part in parts for key in part.failed] == ["acme:4"]
    assert all(len(codec.encode(report)) < 24 * 1024 for report in reports)
    assert all(sum(len(codec.encode(report)) for report in part.reports) < 25 * 1024 for part in parts)


class Config(NamedTuple):
    features: tuple[str, ...] = ("next_turns",)
    context_length: int = 16
    vocab_size: int = 100


class Worker:
    """A worker that serves, as far as `EndedTurns` sees it."""

    epoch = "1-a"

    def __init__(self, config: Config | None) -> None:
        self.expected: list[engine_request.ExpectedTurn] = []
        self.serving = None if config is None else contract_serving(self, config)
        self.turns = EndedTurns(self, Adapters())  # type: ignore[arg-type]

    def expect_turn(self, turn: engine_request.ExpectedTurn) -> None:
        self.expected.append(turn)


class Serving(NamedTuple):
    engine: Any
    config: Any


def contract_serving(engine: Worker, config: Config) -> Any:
    return Serving(engine, config)


def told(request_id: str, **fields: Any) -> WorkerStream:
    """Returns a stream whose answer was told."""
    one = stream(request_id, **fields)
    one.has_told_answer = True
    return one


def turn(num_known: int = 2, token_ids: tuple[int, ...] = (8, 9), epoch: str = "1-a") -> internal.NextTurn:
    packed = block_hash.pack_token_ids(token_ids)
    return internal.NextTurn(request_id="acme:r", epoch=epoch, num_known=num_known, token_ids=packed)


def test_a_turn_is_completed_from_the_prompt_that_was_kept_and_once() -> None:
    worker = Worker(Config())
    hint = messages.CacheControl(ttl_ms=5_000.0)
    params = GenerationParams(cache_salt="salt", session_id="s", cache_control=hint)
    worker.turns.keep(told("r", params=params))
    worker.turns.expect(turn())
    worker.turns.expect(turn())
    packed = block_hash.pack_token_ids([1, 2, 8, 9])
    assert worker.expected == [engine_request.ExpectedTurn(packed, 2, "acme", "salt", "s", (), 5.0)]


@pytest.mark.parametrize(
    ("config", "next_turn"),
    [
        (None, turn()),
        (Config(features=()), turn()),
        (Config(context_length=4), turn()),
        (Config(), turn(token_ids=(8, 100))),
        (Config(), turn(epoch="2-b")),
    ],
    ids=["no engine", "no feature", "too long", "unknown token", "other epoch"],
)
def test_a_turn_that_can_not_be_computed_here_is_ignored(config: Config | None, next_turn: internal.NextTurn) -> None:
    worker = Worker(config)
    worker.turns.keep(told("r"))
    worker.turns.expect(next_turn)
    worker.turns.expect(codec.replace(turn(), request_id="acme:unknown"))
    assert worker.expected == []


def test_nothing_is_kept_of_a_stream_whose_answer_was_not_told_or_of_an_earlier_epoch() -> None:
    worker = Worker(Config())
    worker.turns.keep(stream("r"))
    worker.turns.expect(turn())
    worker.turns.keep(told("r"))
    worker.epoch = "2-b"
    worker.turns.expect(turn(epoch="2-b"))
    assert worker.expected == []
