"""A call for embeddings that kills two engines is refused; others lose at most the engine they had."""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Listing

import numpy as np

from tests.support.arithmetic import Sums, make_config
from tests.support.engine_lives import Begin, Fragile, Life
from tokenbus.protocol.wire import errors, internal, messages
from tokenbus.worker.contract.engine_errors import DeviceError
from tokenbus.worker.engine.device.draws import Matrix
from tokenbus.worker.engine_client.client import EngineClient

POISON = "poison"


class FragileSums(Sums):
    """Dies of a batch with the poisonous text; `batches` are the numbers of inputs that were computed together."""

    def __init__(self) -> None:
        super().__init__(make_config())
        self.batches: list[int] = []
        self.on_tokenize: Callable[[str], None] = lambda text: None

    def tokenize(self, text: str) -> list[int]:
        self.on_tokenize(text)
        return super().tokenize(text)

    def pool(self, inputs: Listing[Listing[int]]) -> Matrix:
        self.batches.append(len(inputs))
        if super().tokenize(POISON) in [list(one) for one in inputs]:
            raise DeviceError("gone")
        return super().pool(inputs)


class FragilePooler(Fragile):
    def __init__(self) -> None:
        super().__init__()
        self.embedder = self.sums = FragileSums()


async def embed(one: Life, *texts: str, remaining_ms: float = 60_000) -> list[list[float]] | errors.Code:
    """Returns the rows of the texts, or the error's code."""
    async with asyncio.timeout(60):
        await one.serves.wait()
        assert one.engine is not None
        try:
            result = await one.engine.embed(
                internal.Embed(inputs=list(texts), remaining_ms=remaining_ms, normalize=False)
            )
        except errors.RequestError as problem:
            return problem.error.code
    rows: list[list[float]] = np.frombuffer(result.vectors, "<f4").reshape(-1, Sums.width).tolist()
    return rows


def row(text: str) -> list[float]:
    tokens = Sums(make_config()).tokenize(text)
    return [sum(tokens), len(tokens), tokens[-1]]


async def test_a_call_that_ends_two_engines_is_refused(life: Begin) -> None:
    one = life([FragilePooler() for _ in range(3)])
    assert await embed(one, POISON) is errors.Code.REQUEST_CRASHES_ENGINE
    assert await embed(one, "a") == [row("a")]
    assert one.supervisor.restarts == 2


async def test_calls_of_the_batch_that_ended_an_engine_are_tried_one_at_a_time_and_answered(
    life: Begin,
) -> None:
    runners = [FragilePooler() for _ in range(3)]
    one = life(runners)
    texts = ["a", POISON, "b", "c"]
    answers = await asyncio.gather(*(embed(one, text) for text in texts))
    expected = [[row("a")], errors.Code.REQUEST_CRASHES_ENGINE, [row("b")], [row("c")]]
    # a call that a busy machine lets come too late for the batch is given back
    taken = sum(runners[0].sums.batches)
    assert answers[:taken] == expected[:taken]
    assert all(one in (errors.Code.WORKER_LOST, wanted) for one, wanted in zip(answers, expected, strict=True))
    assert max(runners[1].sums.batches) == 1


async def test_a_call_that_was_not_in_the_batch_is_given_back_at_once(
    life: Begin,
) -> None:
    one = life([FragilePooler() for _ in range(3)])
    large = [f"text {number}" for number in range(40)]
    answers = await asyncio.gather(embed(one, POISON), embed(one, *large), embed(one, "z"))
    assert answers[0] is errors.Code.REQUEST_CRASHES_ENGINE
    assert all(one is errors.Code.WORKER_LOST or isinstance(one, list) for one in answers[1:])


async def test_a_call_whose_text_ends_two_engines_before_it_is_computed_is_refused(
    life: Begin,
) -> None:
    runners = [FragilePooler() for _ in range(3)]
    one = life(runners)

    def kill(text: str) -> None:
        connection = one.supervisor.engine._connection
        if text == "kill" and connection is not None:
            connection.link.kill()

    for runner in runners:
        runner.sums.on_tokenize = kill
    assert await embed(one, "kill") is errors.Code.REQUEST_CRASHES_ENGINE
    assert await embed(one, "a") == [row("a")]
    assert one.supervisor.restarts == 2


async def test_streams_are_not_blamed_for_a_batch_of_inputs(life: Begin) -> None:
    calm = await life([FragilePooler()]).ask([1, 2, 3], max_tokens=200)
    await calm.terminal()
    one = life([FragilePooler() for _ in range(3)])
    stream = await one.ask([1, 2, 3], max_tokens=200)
    await stream.until(lambda seen: len(seen.token_ids) >= 3)
    assert await embed(one, POISON) is errors.Code.REQUEST_CRASHES_ENGINE
    assert (await stream.terminal()).finish_reason is messages.FinishReason.LENGTH
    assert stream.token_ids == calm.token_ids


async def test_a_call_whose_time_is_over_before_the_next_engine_serves_is_told(
    life: Begin,
) -> None:
    one = life([FragilePooler() for _ in range(2)])
    assert await embed(one, POISON, remaining_ms=50) is errors.Code.DEADLINE_EXCEEDED
    assert await embed(one, "a") == [row("a")]


async def test_a_call_that_is_cancelled_while_there_is_no_engine_is_not_tried_again(
    life: Begin,
) -> None:
    runners = [FragilePooler() for _ in range(2)]
    one = life(runners)
    call = asyncio.create_task(embed(one, POISON))
    async with asyncio.timeout(60):
        await one.serves.wait()
        await one.is_down.wait()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert await embed(one, "a") == [row("a")]
    assert runners[1].sums.batches == [1]


async def test_a_call_ends_at_its_deadline_though_no_engine_follows(
    life: Begin,
) -> None:
    one = life([FragilePooler()])
    async with asyncio.timeout(60):
        await one.serves.wait()
    engine = one.engine
    assert isinstance(engine, EngineClient)
    assert await embed(one, POISON, remaining_ms=100) is errors.Code.DEADLINE_EXCEEDED
    assert not engine._pooling
