"""What many want to know at once is asked once a second."""

import asyncio

import pytest

from tokenbus.protocol.shared_answer import SharedAnswer


class Router:
    """Answers when a test lets it."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.now = 100.0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.error: OSError | None = None
        self.shared = SharedAnswer(self.ask, lambda: self.now)

    async def ask(self) -> str:
        self.num_asked += 1
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return "demo"


async def test_many_who_want_to_know_at_once_share_one_question() -> None:
    router = Router()
    router.may_answer.clear()
    asking = [asyncio.create_task(router.shared.get()) for _ in range(50)]
    await asyncio.sleep(0)
    asking[0].cancel()
    await asyncio.sleep(0)
    router.may_answer.set()
    answers = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert answers[1:] == ["demo"] * 49
    assert router.num_asked == 1


async def test_an_answer_is_good_for_a_second() -> None:
    router = Router()
    for seconds, count in ((0, 1), (0.9, 1), (0.2, 2), (0.9, 2), (60, 3)):
        router.now += seconds
        await router.shared.get()
        assert router.num_asked == count


async def test_a_failure_is_told_to_all_who_wait_and_kept_no_longer_than_an_answer() -> None:
    router = Router()
    router.error = OSError("no router")
    asked = await asyncio.gather(*[router.shared.get() for _ in range(3)], return_exceptions=True)
    assert [type(one) for one in asked] == [OSError] * 3
    router.error = None
    with pytest.raises(OSError):
        await router.shared.get()
    router.now += 1.0
    assert await router.shared.get() == "demo"
    assert router.num_asked == 2
