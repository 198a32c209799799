"""A gateway asks a router for the models at most once a second."""

import asyncio

import pytest

from tokenbus.gateway.serving.catalog import Catalog, Listing
from tokenbus.protocol.wire import errors, messages

REPLY = messages.ModelsReply(
    models=[messages.ServedModel(model="demo", context_length=512, features=[])],
    limits=messages.ServerLimits(max_request_bytes=1),
)


class Router:
    """Answers when a test lets it."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.now = 100.0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.error: errors.RequestError | None = None
        self.catalog = Catalog(self.ask, lambda: self.now)

    async def ask(self) -> messages.ModelsReply:
        self.num_asked += 1
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return REPLY


async def test_many_who_want_to_know_at_once_share_one_question() -> None:
    router = Router()
    router.may_answer.clear()
    asking = [asyncio.create_task(router.catalog.listing()) for _ in range(50)]
    await asyncio.sleep(0)
    asking[0].cancel()
    await asyncio.sleep(0)
    router.may_answer.set()
    answers = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert [[model.id for model in answer.models] for answer in answers[1:] if isinstance(answer, Listing)] == [
        ["demo"]
    ] * 49
    assert router.num_asked == 1


async def test_an_answer_is_good_for_a_second() -> None:
    router = Router()
    for seconds, count in ((0, 1), (0.9, 1), (0.2, 2), (0.9, 2), (60, 3)):
        router.now += seconds
        await router.catalog.listing()
        assert router.num_asked == count


async def test_a_failure_is_told_to_all_who_wait_and_kept_no_longer_than_an_answer() -> None:
    router = Router()
    router.error = errors.request_error(errors.Code.NO_WORKER, "no router")
    asked = await asyncio.gather(*[router.catalog.listing() for _ in range(3)], return_exceptions=True)
    assert [type(one) for one in asked] == [errors.RequestError] * 3
    router.error = None
    with pytest.raises(errors.RequestError):
        await router.catalog.listing()
    router.now += 1.0
    assert (await router.catalog.listing()).find("demo").context_length == 512
    assert router.num_asked == 2


@pytest.mark.parametrize(
    ("unserved", "code"),
    [
        (None, errors.Code.NO_WORKER),
        (frozenset({"gone"}), errors.Code.NO_WORKER),
        (frozenset({"other"}), errors.Code.MODEL_NOT_FOUND),
    ],
)
def test_a_model_that_is_not_there_is_the_error_that_a_request_for_it_would_end_in(
    unserved: frozenset[str] | None, code: errors.Code
) -> None:
    with pytest.raises(errors.RequestError) as raised:
        Listing([], unserved).find("gone")
    assert raised.value.error.code is code
