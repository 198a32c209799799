"""A router says how a conversation's next turn begins, if its answer has reasoning and its worker can use that."""

import asyncio
from typing import Any

import msgspec
import pytest

from tests.router.builders import card, fleet_of
from tokenbus.protocol.wire import block_hash, codec, errors, internal, messages, subjects
from tokenbus.protocol.wire.messages import ChatMessage
from tokenbus.router.requests.flights.flight import Flight
from tokenbus.router.requests.next_turns import NextTurns, following_messages
from tokenbus.router.requests.tokenization.prompt_tokenizer import Prompt
from tokenbus.router.workers.worker import Worker

QUESTION = ChatMessage(role="user", content="What is 1 + 1?")
ANSWER = ChatMessage(role="assistant", content="2")
LAST = [1, 2, 3, 4]


class Testbed:
    """A router whose renderer returns `rendered`, or raises it."""

    __test__ = False

    def __init__(self, *features: str, rendered: list[int] | Exception | None = None) -> None:
        able = codec.replace(card("w1"), features=[*card("w1").features, *features])
        self.rendered = [1, 2, 3, 8, 9] if rendered is None else rendered
        self.asked: list[Prompt] = []
        self.told: list[tuple[str, str, msgspec.Struct]] = []
        self.turns = NextTurns(fleet_of(able), self, self)  # type: ignore[arg-type]

    async def pack_beside(self, prompt: Prompt, worker: Worker) -> bytes:
        self.asked.append(prompt)
        if isinstance(self.rendered, Exception):
            raise self.rendered
        return block_hash.pack_token_ids(self.rendered)

    def publish(self, card: messages.Card, service: str, message: msgspec.Struct) -> None:
        self.told.append((card.worker_id, service, message))

    def keep(self, *conversation: ChatMessage, **fields: Any) -> Flight:
        request = messages.GenerateRequest(id="r1", messages=[QUESTION, *conversation], **fields)
        flight = Flight(request, subjects.ModelAddress("demo", "acme"), "_INBOX.a", codec.Encoding.JSON, 0.0)
        flight.held_bytes = 100
        self.turns.keep(flight)
        flight.prompt_ids, flight.worker_id = block_hash.pack_token_ids(LAST), "w1"
        return flight

    def end(self, flight: Flight, answer: ChatMessage | None = ANSWER) -> None:
        async def wait() -> None:
            flight.end = internal.StreamEnd(id=flight.key, finish_reason=messages.FinishReason.STOP, answer=answer)
            self.turns.ended(flight)
            await asyncio.sleep(0)
            await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))  # type: ignore[arg-type]

        asyncio.run(wait())
        self.turns.forget(flight)


def test_the_worker_is_told_what_follows_the_part_that_both_prompts_have() -> None:
    bed = Testbed("next_turns")
    flight = bed.keep()
    assert (flight.wants_answer, flight.wants_reasoning) == (True, False)
    bed.end(flight)
    turn = internal.NextTurn(
        request_id="acme:r1", epoch="100-a", num_known=3, token_ids=block_hash.pack_token_ids([8, 9])
    )
    assert bed.told == [("w1", "next_turn", turn)]
    (prompt,) = bed.asked
    assert prompt.source.continue_final_message
    assert prompt.source.messages == [QUESTION, ANSWER, ChatMessage(role="user", content="")]


def test_an_answer_with_calls_is_followed_by_the_result_of_the_first() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = ChatMessage(role="assistant", content="", tool_calls=[call])
    follower = ChatMessage(role="tool", content="", tool_call_id="c1")
    assert following_messages([QUESTION], answer) == [QUESTION, answer, follower]


def test_reasoning_is_wanted_from_a_conversation_whose_client_has_sent_some_back() -> None:
    earlier = ChatMessage(role="assistant", content="2", reasoning_content="1 and 1 are 2.")
    assert Testbed("next_turns").keep(earlier, QUESTION).wants_reasoning
    assert not Testbed("next_turns").keep(ANSWER, QUESTION).wants_reasoning


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_prompt": False},
        {"cache_control": messages.CacheControl(ttl_ms=0.0)},
        {"copy_of": "r0"},
        {"max_tokens": 0},
        {"parse_output": False},
        {"continue_final_message": True},
    ],
    ids=str,
)
def test_nothing_is_kept_of_a_request_whose_next_turn_would_find_nothing(fields: dict[str, Any]) -> None:
    bed = Testbed("next_turns")
    flight = bed.keep(**fields)
    assert not flight.wants_answer
    bed.end(flight)
    assert bed.asked == []


def test_nothing_is_kept_where_no_worker_computes_next_turns() -> None:
    assert not Testbed().keep().wants_answer


def test_without_an_answer_or_after_its_end_a_conversation_is_forgotten() -> None:
    bed = Testbed("next_turns")
    flight = bed.keep()
    bed.end(flight, None)
    bed.end(flight)
    assert bed.asked == []


@pytest.mark.parametrize("rendered", [LAST, [1], errors.request_error(errors.Code.UNSUPPORTED)], ids=str)
def test_nobody_is_told_of_a_turn_that_has_nothing_new_or_can_not_be_rendered(rendered: Any) -> None:
    bed = Testbed("next_turns", rendered=rendered)
    bed.end(bed.keep())
    assert len(bed.asked) == 1
    assert bed.told == []
