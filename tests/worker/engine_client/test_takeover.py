"""When an engine dies, the next one continues its streams exactly; a request that ends two engines is refused."""

import asyncio

from tests.support.engine_lives import POISON, Begin, Fragile, Life
from tests.support.engines import Recorder
from tests.support.poisonous import KNOWN_POISON, StainedRunner
from tokenbus.protocol.wire import errors, messages


class Deadly(Fragile):
    """Dies of the first request, before anything is begun."""

    is_loaded = False

    @property  # type: ignore[misc]
    def end_token_ids(self) -> frozenset[int]:  # type: ignore[override]
        if self.is_loaded:
            raise SystemExit
        self.is_loaded = True
        return frozenset()

    @end_token_ids.setter
    def end_token_ids(self, value: frozenset[int]) -> None:
        pass


async def answers(one: Life, prompts: list[list[int]]) -> list[Recorder]:
    recorders = [await one.ask(prompt) for prompt in prompts]
    for recorder in recorders:
        await recorder.terminal()
    return recorders


PROMPTS = [[1, 2, 3, number] for number in range(10, 14)]


async def assert_ended_alone_after_two_engines(one: Life, poisonous: list[int], calm: list[Recorder]) -> None:
    """Asks for something poisonous beside three streams, which get the same answers as in the calm run."""
    neighbours = [await one.ask(prompt) for prompt in PROMPTS[:3]]
    await neighbours[0].until(lambda seen: len(seen.token_ids) >= 3)
    terminal = await (await one.ask(poisonous)).terminal()
    assert terminal.error is not None
    assert terminal.error.code is errors.Code.REQUEST_CRASHES_ENGINE
    for recorder in neighbours:
        await recorder.terminal()
    assert [seen.token_ids for seen in neighbours] == [seen.token_ids for seen in calm]
    async with asyncio.timeout(60):  # if the neighbours had ended before, the last death is counted after the terminal
        while one.supervisor.restarts < 2:
            await asyncio.sleep(0.01)
    assert one.supervisor.restarts == 2


async def test_streams_continue_where_they_were_when_their_engine_dies(life: Begin) -> None:
    calm = await answers(life([Fragile()]), PROMPTS)
    torn = await answers(life([Fragile(fatal_step=7), Fragile(fatal_step=9), Fragile()]), PROMPTS)
    assert [one.token_ids for one in torn] == [one.token_ids for one in calm]
    assert [one.text for one in torn] == [one.text for one in calm]
    assert [one.outputs[-1].finish_reason for one in torn] == [messages.FinishReason.LENGTH] * 4
    for one in torn:
        timings = one.outputs[-1].timings
        assert timings is not None
        assert min(timings.queue_ms, timings.prefill_ms, timings.decode_ms) >= 0
    assert [one.outputs[-1].usage for one in torn] == [
        messages.Usage(prompt_tokens=4, completion_tokens=20, total_tokens=24, cached_tokens=0)
    ] * 4


async def test_a_stream_that_another_worker_began_continues_where_it_was_when_its_engine_dies(
    life: Begin,
) -> None:
    (calm,) = await answers(life([Fragile()]), PROMPTS[:1])
    one = life([Fragile(fatal_step=4), Fragile()])
    again = await one.ask(PROMPTS[0], given=tuple(calm.token_ids[:6]))
    await again.terminal()
    assert one.supervisor.restarts == 1
    assert (again.token_ids, again.text) == (calm.token_ids, calm.text)
    assert again.outputs[-1].usage == calm.outputs[-1].usage
    assert [output.is_resumed for output in again.outputs] == [True] + [False] * 14


async def test_a_stream_that_another_worker_began_is_suspect_like_any_other(
    life: Begin,
) -> None:
    one = life([Deadly(), Deadly(), Fragile()])
    terminal = await (await one.ask([1, 2], given=(3, 4))).terminal()
    assert terminal.error is not None
    assert terminal.error.code is errors.Code.REQUEST_CRASHES_ENGINE


async def test_a_request_that_ends_two_engines_is_refused_and_its_neighbours_never_notice(
    life: Begin,
) -> None:
    calm = await answers(life([Fragile()]), PROMPTS[:3])
    one = life([Fragile(), Fragile(), Fragile()])
    await assert_ended_alone_after_two_engines(one, [1, POISON, 2], calm)


async def test_a_stream_can_be_cancelled_while_there_is_no_engine(life: Begin) -> None:
    one = life([Fragile(fatal_step=4), Fragile()])
    recorder = await one.ask([1, 2, 3])
    engine = one.engine
    assert engine is not None
    async with asyncio.timeout(60):
        await one.is_down.wait()
    engine.abort("r[1, 2, 3]")
    assert recorder.outputs[-1].finish_reason is messages.FinishReason.CANCELLED
    again = await one.ask([4, 5])
    assert (await again.terminal()).finish_reason is messages.FinishReason.LENGTH
    assert len(recorder.terminals) == 1


async def test_a_request_that_the_engine_can_not_even_take_ends_alone(life: Begin) -> None:
    one = life([Fragile()])
    neighbour = await one.ask(PROMPTS[0], max_tokens=60)
    await neighbour.until(lambda seen: len(seen.token_ids) >= 3)
    terminal = await (await one.ask([1, 2], max_tokens=-5)).terminal()
    assert terminal.error is not None
    assert terminal.error.code is errors.Code.INTERNAL
    assert (await neighbour.terminal()).finish_reason is messages.FinishReason.LENGTH
    assert one.supervisor.restarts == 0


async def test_a_request_that_the_engine_can_not_start_ends_alone(life: Begin) -> None:
    one = life([Fragile()])
    neighbour = await one.ask(PROMPTS[0], max_tokens=60)
    await neighbour.until(lambda seen: len(seen.token_ids) >= 3)
    terminal = await (await one.ask([1, 2], stops=(POISON,))).terminal()
    assert terminal.error is not None
    assert terminal.error.code is errors.Code.INTERNAL
    assert (await neighbour.terminal()).finish_reason is messages.FinishReason.LENGTH
    assert one.supervisor.restarts == 0
    assert one.engine is not None
    async with asyncio.timeout(10):
        await one.engine.drain()
    assert one.engine.load().used_blocks == 0


async def test_a_request_that_kills_engines_before_they_start_any_is_found(
    life: Begin,
) -> None:
    one = life([Deadly(), Deadly(), Fragile()])
    terminal = await (await one.ask([1, 2])).terminal()
    assert terminal.error is not None
    assert terminal.error.code is errors.Code.REQUEST_CRASHES_ENGINE
    assert (await (await one.ask([3, 4])).terminal()).finish_reason is messages.FinishReason.LENGTH


async def test_a_running_stream_is_not_suspect_if_its_engine_dies_before_it_starts_any(
    life: Begin,
) -> None:
    one = life([Fragile(fatal_step=7), Deadly(), Fragile()])
    recorder = await one.ask([1, 2, 3])
    assert (await recorder.terminal()).finish_reason is messages.FinishReason.LENGTH
    assert one.supervisor.restarts == 2


async def test_streams_continue_when_their_engine_ends_because_its_memory_stays_poisoned(life: Begin) -> None:
    calm = await answers(life([StainedRunner()]), PROMPTS[:3])
    one = life([StainedRunner() for _ in range(3)])
    await assert_ended_alone_after_two_engines(one, [1, KNOWN_POISON, 2], calm)


async def test_a_model_that_never_has_finite_numbers_ends_its_requests_and_no_engine(life: Begin) -> None:
    runner = StainedRunner(canary=())
    runner.num_tries = 1
    one = life([runner])
    for recorder in await answers(one, PROMPTS):
        assert recorder.terminals[0].error is not None
        assert recorder.terminals[0].error.code is errors.Code.INTERNAL
    assert one.supervisor.restarts == 0
