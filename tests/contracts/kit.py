"""The conformance kit: every rule of worker/contract/contract.py as a check that any engine can be put through.

A check gets a started engine and its config, drives it, and raises AssertionError (or TimeoutError, where the engine
keeps it waiting) if the rule does not hold. `lifecycle_rules` get a factory instead, since they are about starting.
"""

import asyncio
import struct
from collections.abc import Awaitable, Callable

import pytest

from tests.contracts import (
    adapter_rules,
    cache_rules,
    constraint_rules,
    reasoning_rules,
    resume_rules,
    score_rules,
    stream_rules,
)
from tests.contracts.driving import prompt, request, run, settled, start
from tests.support.engines import Recorder
from tokenbus.protocol.wire import errors, internal
from tokenbus.worker.contract import contract

Check = Callable[[contract.Engine, contract.EngineConfig], Awaitable[None]]
LifecycleCheck = Callable[[Callable[[], contract.Engine]], Awaitable[None]]


async def embeds_each_input_by_itself(engine: contract.Engine, config: contract.EngineConfig) -> None:
    inputs: list[str | list[int]] = [
        prompt(config, number, min(3 + 5 * number, config.context_length)) for number in range(4)
    ]
    if config.embeddings is None:
        with pytest.raises(errors.RequestError) as refusal:
            await engine.embed(internal.Embed(inputs=inputs, remaining_ms=10_000))
        assert refusal.value.error.code is errors.Code.UNSUPPORTED
        return
    # Where the engine generates too, it does so meanwhile.
    recorder = start(engine, request(prompt(config), max_tokens=100)) if "generate" in config.features else None
    together = await engine.embed(internal.Embed(inputs=inputs, remaining_ms=10_000))
    assert together.prompt_tokens == sum(map(len, inputs))
    size = 4 * config.embeddings.dimensions
    assert len(together.vectors) == size * len(inputs)
    for place, one in enumerate(inputs):
        alone = await engine.embed(internal.Embed(inputs=[one], remaining_ms=10_000))
        row = struct.unpack(f"<{config.embeddings.dimensions}f", together.vectors[size * place : size * (place + 1)])
        lone = struct.unpack(f"<{config.embeddings.dimensions}f", alone.vectors)
        assert row == pytest.approx(lone, abs=1e-3)  # attention may round to 16 bits
    if recorder is not None:
        await recorder.terminal()
    late = engine.embed(internal.Embed(inputs=inputs, remaining_ms=0))
    with pytest.raises(errors.RequestError) as refusal:
        await late
    assert refusal.value.error.code is errors.Code.DEADLINE_EXCEEDED
    assert engine.load().running == engine.load().used_blocks == 0


async def keeps_what_it_embeds_apart_from_streams(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if config.embeddings is None or "generate" not in config.features:
        return
    length = min(40, config.context_length // 2)
    asked = [request(prompt(config, number), max_tokens=40, cache=False) for number in range(4)]
    alone = [(await run(engine, one)).token_ids for one in asked]
    inputs: list[str | list[int]] = [prompt(config, 9, length)] * 3
    beside = [start(engine, request(one.token_ids, max_tokens=40, cache=False)) for one in asked]
    embed = internal.Embed(inputs=inputs, remaining_ms=10_000)
    kept = asyncio.create_task(engine.embed(embed))
    cancelled = asyncio.create_task(engine.embed(embed))
    await asyncio.sleep(0)  # both are under way
    cancelled.cancel()
    await kept
    for recorder, answer in zip(beside, alone, strict=True):
        await recorder.terminal()
        assert recorder.token_ids == answer
    await settled(engine)
    usage = (await (await run(engine, request(prompt(config, 9, length)))).terminal()).usage
    assert usage is not None
    assert usage.cached_tokens == 0


async def scores_each_document_by_itself(engine: contract.Engine, config: contract.EngineConfig) -> None:
    documents = ["fox", "the owl", "a", "fox fox fox"]
    asked = internal.Rerank(query="the fox", documents=documents, remaining_ms=10_000)
    if "rerank" not in config.features:
        with pytest.raises(errors.RequestError) as refusal:
            await engine.rerank(asked)
        assert refusal.value.error.code is errors.Code.UNSUPPORTED
        return
    recorder = start(engine, request(prompt(config), max_tokens=100)) if "generate" in config.features else None
    together = await engine.rerank(asked)
    assert len(together.scores) == 4 * len(documents)
    scores = struct.unpack(f"<{len(documents)}f", together.scores)
    num_tokens = 0
    for document, score in zip(documents, scores, strict=True):
        alone = await engine.rerank(internal.Rerank(query="the fox", documents=[document], remaining_ms=10_000))
        assert [score] == pytest.approx(struct.unpack("<f", alone.scores), abs=1e-4)
        num_tokens += alone.prompt_tokens
    assert together.prompt_tokens == num_tokens
    if recorder is not None:
        await recorder.terminal()
    late = engine.rerank(internal.Rerank(query="the fox", documents=documents, remaining_ms=0))
    with pytest.raises(errors.RequestError) as refusal:
        await late
    assert refusal.value.error.code is errors.Code.DEADLINE_EXCEEDED
    assert engine.load().running == engine.load().used_blocks == 0


RULES: tuple[Check, ...] = (
    stream_rules.ends_with_exactly_one_terminal,
    stream_rules.tells_length_truthfully,
    stream_rules.stops_at_stop_tokens,
    stream_rules.stops_at_stop_strings_wherever_they_are_split,
    stream_rules.releases_text_held_for_a_stop_string_that_never_comes,
    stream_rules.does_not_stop_before_min_tokens,
    stream_rules.repeats_an_answer_for_a_seed,
    stream_rules.keeps_eight_interleaved_streams_apart,
    stream_rules.cancels_before_the_first_step,
    stream_rules.cancels_in_prefill,
    stream_rules.cancels_in_mid_stream,
    stream_rules.gives_everything_back_of_a_sink_that_fails,
    stream_rules.frees_everything_of_abandoned_streams,
    stream_rules.has_the_capacity_it_advertises,
    stream_rules.refuses_without_a_trace,
    stream_rules.ignores_aborts_of_the_unknown,
    stream_rules.drains_to_zero,
    cache_rules.computes_what_is_cached_only_once,
    cache_rules.shares_a_prefix_with_what_runs,
    cache_rules.keeps_caches_apart,
    cache_rules.leaves_nothing_where_it_must_not,
    cache_rules.tells_which_blocks_it_holds,
    cache_rules.computes_only_the_prompt_of_a_warm_up,
    stream_rules.counts_on_while_it_works,
    *cache_rules.EXCHANGE_RULES,
    *resume_rules.RULES,
    *constraint_rules.RULES,
    *reasoning_rules.RULES,
    *adapter_rules.RULES,
    *score_rules.RULES,
    embeds_each_input_by_itself,
    keeps_what_it_embeds_apart_from_streams,
    scores_each_document_by_itself,
    stream_rules.ends_every_stream_at_cleanup,
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
