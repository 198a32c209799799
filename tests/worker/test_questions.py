"""Each question has its own answer, whoever comes first, and none is left open."""

import asyncio

import pytest

from tokenbus.protocol.wire import errors
from tokenbus.worker.engine_client.questions import Questions


async def test_answers_find_those_who_asked_in_any_order() -> None:
    questions: Questions[str] = Questions()
    tickets: list[int] = []
    asking = [asyncio.create_task(questions.ask(tickets.append)) for _ in range(3)]
    await asyncio.sleep(0)
    for ticket in reversed(tickets):
        questions.answer(ticket, f"answer {ticket}")
    assert await asyncio.gather(*asking) == [f"answer {ticket}" for ticket in tickets]
    assert len(questions) == 0


async def test_a_refusal_and_the_end_of_the_engine_are_errors() -> None:
    questions: Questions[str] = Questions()
    tickets: list[int] = []
    asking = [asyncio.create_task(questions.ask(tickets.append)) for _ in range(2)]
    await asyncio.sleep(0)
    questions.refuse(tickets[0], errors.make_error(errors.Code.INVALID_REQUEST))
    questions.lose()
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert [error.error.code for error in found if isinstance(error, errors.RequestError)] == [
        errors.Code.INVALID_REQUEST,
        errors.Code.WORKER_LOST,
    ]


async def test_who_has_gone_is_forgotten_and_answers_to_nobody_are_dropped() -> None:
    questions: Questions[str] = Questions()
    tickets: list[int] = []
    asking = asyncio.create_task(questions.ask(tickets.append))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert len(questions) == 0
    questions.answer(tickets[0], "late")
    questions.refuse(99, errors.make_error(errors.Code.INTERNAL))


async def test_a_question_that_can_not_be_sent_is_not_open() -> None:
    questions: Questions[str] = Questions()

    def fail(ticket: int) -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await questions.ask(fail)
    assert len(questions) == 0
