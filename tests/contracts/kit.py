"""The conformance kit: every rule of worker/contract.py as a check that any engine can be put through.

A check gets a started engine and its config, drives it, and raises AssertionError (or TimeoutError, where the engine
keeps it waiting) if the rule does not hold. `lifecycle_rules` get a factory instead, since they are about starting.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from protocol import errors, messages
from tests.support.engines import Recorder
from worker import contract
from worker.validator import StreamValidator

SETTLE_S = 10.0
Check = Callable[[contract.Engine, contract.EngineConfig], Awaitable[None]]
LifecycleCheck = Callable[[Callable[[], contract.Engine]], Awaitable[None]]

_keys = itertools.count()


def request(token_ids: list[int], *, stop: tuple[str, ...] = (), **sampling: object) -> contract.EngineRequest:
    fields: dict[str, object] = {"max_tokens": 24, "ignore_eos": True} | sampling
    return contract.EngineRequest(
        key=f"default:kit-{next(_keys)}",
        token_ids=token_ids,
        sampling=contract.Sampling(**fields),  # type: ignore[arg-type]
        stop=stop,
    )


def start(engine: contract.Engine, asked: contract.EngineRequest) -> Recorder:
    recorder = Recorder()
    engine.generate(asked, StreamValidator(asked, recorder))
    return recorder


async def run(engine: contract.Engine, asked: contract.EngineRequest) -> Recorder:
    recorder = start(engine, asked)
    await recorder.terminal()
    return recorder


async def stream(engine: contract.Engine, asked: contract.EngineRequest) -> AsyncIterator[contract.Output]:
    """The outputs one by one; leaving early aborts."""
    queue: asyncio.Queue[contract.Output] = asyncio.Queue()
    engine.generate(asked, queue.put_nowait)
    try:
        while True:
            output = await queue.get()
            yield output
            if output.finish_reason is not None:
                return
    finally:
        engine.abort(asked.key)


def prompt(config: contract.EngineConfig, number: int = 0, length: int = 6) -> list[int]:
    """Different prompts of ordinary tokens."""
    return [7 + (31 * number + 13 * place + place * place) % (config.vocab_size - 8) for place in range(length)]


async def settled(engine: contract.Engine) -> None:
    """Everything is given back."""
    async with asyncio.timeout(SETTLE_S):
        await engine.drain()
    load = engine.load()
    assert (load.running, load.waiting, load.used_blocks, load.queued_prefill_tokens) == (0, 0, 0, 0), load


async def ends_with_exactly_one_terminal(engine: contract.Engine, config: contract.EngineConfig) -> None:
    recorders = [start(engine, request(prompt(config, number))) for number in range(4)]
    for recorder in recorders:
        await recorder.terminal()
    await settled(engine)
    await asyncio.sleep(0.05)  # what must not come can only be given time to come
    for recorder in recorders:
        assert len(recorder.terminals) == 1
        assert recorder.outputs[-1].finish_reason is not None


async def tells_length_truthfully(engine: contract.Engine, config: contract.EngineConfig) -> None:
    for max_tokens in (1, 2, 17):
        recorder = await run(engine, request(prompt(config), max_tokens=max_tokens))
        terminal = recorder.outputs[-1]
        assert terminal.finish_reason is messages.FinishReason.LENGTH
        assert len(recorder.token_ids) == max_tokens
        assert terminal.usage == messages.Usage(
            prompt_tokens=6, completion_tokens=max_tokens, total_tokens=6 + max_tokens, cached_tokens=0
        )


async def stops_at_stop_tokens(engine: contract.Engine, config: contract.EngineConfig) -> None:
    free = await run(engine, request(prompt(config)))
    for place, token_id in enumerate(free.token_ids[:12]):
        first = free.token_ids.index(token_id)
        recorder = await run(engine, request(prompt(config), stop_token_ids=(token_id,)))
        terminal = recorder.outputs[-1]
        assert terminal.finish_reason is messages.FinishReason.STOP, place
        assert terminal.stop_match == token_id
        assert recorder.token_ids == free.token_ids[: first + 1]
        assert free.text.startswith(recorder.text.removesuffix("\ufffd"))


async def stops_at_stop_strings_wherever_they_are_split(engine: contract.Engine, config: contract.EngineConfig) -> None:
    free = await run(engine, request(prompt(config)))
    assert len(free.text) > 8
    for start_at in range(len(free.text) - 4):
        stop = free.text[start_at : start_at + 4]
        recorder = await run(engine, request(prompt(config), stop=("\x00never", stop)))
        terminal = recorder.outputs[-1]
        assert terminal.finish_reason is messages.FinishReason.STOP, (stop, recorder.text)
        assert terminal.stop_match == stop
        assert recorder.text == free.text[: free.text.index(stop)]
        assert free.token_ids[: len(recorder.token_ids)] == recorder.token_ids
    await settled(engine)


async def releases_text_held_for_a_stop_string_that_never_comes(
    engine: contract.Engine, config: contract.EngineConfig
) -> None:
    free = await run(engine, request(prompt(config)))
    recorder = await run(engine, request(prompt(config), stop=(free.text[-5:] + "\x00",)))
    assert recorder.outputs[-1].finish_reason is messages.FinishReason.LENGTH
    assert recorder.text == free.text


async def does_not_stop_before_min_tokens(engine: contract.Engine, config: contract.EngineConfig) -> None:
    free = await run(engine, request(prompt(config)))
    early = free.token_ids[0]
    recorder = await run(engine, request(prompt(config), stop_token_ids=(early,), min_tokens=5))
    assert early not in recorder.token_ids[:5]
    assert len(recorder.token_ids) > 5
    text = free.text[:3]
    recorder = await run(engine, request(prompt(config), stop=(text,), min_tokens=8, max_tokens=12))
    assert len(recorder.token_ids) > 8


async def repeats_an_answer_for_a_seed(engine: contract.Engine, config: contract.EngineConfig) -> None:
    asked = {"temperature": 1.5, "top_k": 0, "top_p": 1.0}
    answers = [
        (await run(engine, request(prompt(config), seed=seed, **asked))).token_ids for seed in (1, 1, 2, 2, 3, 3)
    ]
    assert answers[0::2] == answers[1::2]
    assert len({tuple(answer) for answer in answers}) > 1


async def keeps_eight_interleaved_streams_apart(engine: contract.Engine, config: contract.EngineConfig) -> None:
    prompts = [prompt(config, number, length=3 + 5 * number) for number in range(8)]
    alone = [(await run(engine, request(token_ids, max_tokens=20))).token_ids for token_ids in prompts]
    together = [start(engine, request(token_ids, max_tokens=20)) for token_ids in prompts]
    for recorder in together:
        await recorder.terminal()
    assert [recorder.token_ids for recorder in together] == alone
    assert len({tuple(answer) for answer in alone}) > 4


async def cancels_before_the_first_step(engine: contract.Engine, config: contract.EngineConfig) -> None:
    asked = request(prompt(config))
    recorder = start(engine, asked)
    engine.abort(asked.key)
    assert [output.finish_reason for output in recorder.outputs] == [messages.FinishReason.CANCELLED]
    await settled(engine)
    assert len(recorder.outputs) == 1


async def cancels_in_prefill(engine: contract.Engine, config: contract.EngineConfig) -> None:
    half = config.context_length // 2
    for _ in range(20):
        asked = request(prompt(config, length=half), max_tokens=half)
        recorder = start(engine, asked)
        while engine.load().running == 0 and not recorder.outputs:
            await asyncio.sleep(0)
        caught = not recorder.outputs
        engine.abort(asked.key)
        await settled(engine)
        if caught:
            assert [output.finish_reason for output in recorder.outputs] == [messages.FinishReason.CANCELLED]
            return
    raise AssertionError("no prompt was ever seen before its first token")


async def cancels_in_mid_stream(engine: contract.Engine, config: contract.EngineConfig) -> None:
    asked = request(prompt(config), max_tokens=200)
    recorder = Recorder()

    def abort_at_the_third(output: contract.Output) -> None:
        recorder(output)
        if len(recorder.token_ids) == 3:
            engine.abort(asked.key)

    engine.generate(asked, StreamValidator(asked, abort_at_the_third))
    await recorder.terminal()
    assert recorder.outputs[-1].finish_reason is messages.FinishReason.CANCELLED
    assert len(recorder.token_ids) == 3
    engine.abort(asked.key)
    await settled(engine)
    assert len(recorder.terminals) == 1


async def frees_everything_of_abandoned_streams(engine: contract.Engine, config: contract.EngineConfig) -> None:
    for rounds in range(3):
        streams = [stream(engine, request(prompt(config, number), max_tokens=100)) for number in range(6)]
        for one in streams:
            await anext(one)
        for one in streams:
            await one.aclose()  # type: ignore[attr-defined]
        await settled(engine)
        assert (await run(engine, request(prompt(config, rounds)))).terminals


async def has_the_capacity_it_advertises(engine: contract.Engine, config: contract.EngineConfig) -> None:
    """As many sequences as may run, which together fill every block, all at the same time and none of them failing."""
    blocks_each = min(config.total_kv_blocks // config.max_num_seqs, config.context_length // config.kv_block_size)
    size = blocks_each * config.kv_block_size
    recorders = [
        start(engine, request(prompt(config, number, length=size // 2), max_tokens=size - size // 2))
        for number in range(config.max_num_seqs)
    ]
    most_running = 0
    while not all(recorder.terminals for recorder in recorders):
        most_running = max(most_running, engine.load().running)
        await asyncio.sleep(0)
    assert [recorder.outputs[-1].finish_reason for recorder in recorders] == ["length"] * config.max_num_seqs
    assert most_running == config.max_num_seqs
    whole = request(prompt(config, length=config.context_length - 4), max_tokens=4)
    assert (await run(engine, whole)).outputs[-1].finish_reason is messages.FinishReason.LENGTH


async def refuses_without_a_trace(engine: contract.Engine, config: contract.EngineConfig) -> None:
    neighbour = start(engine, request(prompt(config), max_tokens=60))
    wrong = {
        errors.Code.INVALID_REQUEST: request([1, config.vocab_size]),
        errors.Code.PROMPT_TOO_LONG: request(prompt(config, length=config.context_length), max_tokens=1),
    }
    for code, asked in wrong.items():
        recorder = Recorder()
        with pytest.raises(errors.RequestError) as refusal:
            engine.generate(asked, recorder)
        assert refusal.value.error.code is code
        assert not recorder.outputs
    terminal = await neighbour.terminal()
    assert terminal.finish_reason is messages.FinishReason.LENGTH


async def ignores_aborts_of_the_unknown(engine: contract.Engine, config: contract.EngineConfig) -> None:
    engine.abort("default:nobody")
    recorder = await run(engine, request(prompt(config)))
    assert recorder.outputs[-1].finish_reason is messages.FinishReason.LENGTH


async def drains_to_zero(engine: contract.Engine, config: contract.EngineConfig) -> None:
    recorders = [start(engine, request(prompt(config, number), max_tokens=9 + number)) for number in range(20)]
    await settled(engine)
    assert all(len(recorder.terminals) == 1 for recorder in recorders)
    assert engine.load().free_blocks == config.total_kv_blocks


async def ends_every_stream_at_cleanup(engine: contract.Engine, config: contract.EngineConfig) -> None:
    recorders = [start(engine, request(prompt(config, number), max_tokens=200)) for number in range(20)]
    await recorders[0].until(lambda seen: len(seen.token_ids) >= 1)
    await engine.cleanup()
    assert all(len(recorder.terminals) == 1 for recorder in recorders)
    await engine.cleanup()
    with pytest.raises(errors.RequestError) as refusal:
        engine.generate(request(prompt(config)), Recorder())
    assert refusal.value.error.retryable


RULES: tuple[Check, ...] = (
    ends_with_exactly_one_terminal,
    tells_length_truthfully,
    stops_at_stop_tokens,
    stops_at_stop_strings_wherever_they_are_split,
    releases_text_held_for_a_stop_string_that_never_comes,
    does_not_stop_before_min_tokens,
    repeats_an_answer_for_a_seed,
    keeps_eight_interleaved_streams_apart,
    cancels_before_the_first_step,
    cancels_in_prefill,
    cancels_in_mid_stream,
    frees_everything_of_abandoned_streams,
    has_the_capacity_it_advertises,
    refuses_without_a_trace,
    ignores_aborts_of_the_unknown,
    drains_to_zero,
    ends_every_stream_at_cleanup,
)


async def cleans_up_before_start_and_twice(make: Callable[[], contract.Engine]) -> None:
    engine = make()
    await engine.cleanup()
    await engine.cleanup()
    started = make()
    await started.start("kit")
    await started.cleanup()
    await started.cleanup()


async def refuses_before_start(make: Callable[[], contract.Engine]) -> None:
    engine = make()
    recorder = Recorder()
    with pytest.raises(errors.RequestError) as refusal:
        engine.generate(request([1]), recorder)
    assert refusal.value.error.retryable
    await engine.cleanup()
    assert not recorder.outputs


LIFECYCLE_RULES: tuple[LifecycleCheck, ...] = (cleans_up_before_start_and_twice, refuses_before_start)
