"""Rules of the contract about streams: their terminals, texts, cancels, capacity."""

import asyncio

import pytest

from tests.contracts import driving
from tests.contracts.driving import prompt, request, run, settled, start, stream
from tests.support.engines import Recorder
from tokenbus.protocol.wire import errors, messages
from tokenbus.worker.contract import contract, engine_output
from tokenbus.worker.contract.contract import StreamValidator


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
        usage = terminal.usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, max_tokens, 6 + max_tokens)


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
    for attempt in range(20):
        asked = request(prompt(config, length=half), max_tokens=half, salt=f"attempt {attempt}")
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

    def abort_at_the_third(output: engine_output.Output) -> None:
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


async def gives_everything_back_of_a_sink_that_fails(engine: contract.Engine, config: contract.EngineConfig) -> None:
    """Whatever its terminal is, and also if it aborts its own request meanwhile."""
    free = await run(engine, request(prompt(config)))
    kinds: tuple[dict[str, object], ...] = (
        {"max_tokens": 3},
        {"stop_token_ids": (free.token_ids[2],)},
        {"stop": (free.text[2:5],)},
    )
    for kind in kinds:
        asked = request(prompt(config), **kind)  # type: ignore[arg-type]
        ended = asyncio.Event()

        def fail(output: engine_output.Output, key: str = asked.key, ended: asyncio.Event = ended) -> None:
            if output.finish_reason is not None:
                ended.set()
                engine.abort(key)
                raise ValueError("a sink that fails, on purpose")

        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: None)
        engine.generate(asked, fail)
        async with asyncio.timeout(driving.SETTLE_S):
            await ended.wait()
        await settled(engine)
        loop.set_exception_handler(None)
        assert engine.load().step_age_ms == 0


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
    """Runs as many sequences as may run at the same time, which together fill every block; none of them fails."""
    blocks_each = min(config.total_kv_blocks // config.max_num_seqs, config.context_length // config.kv_block_size)
    size = blocks_each * config.kv_block_size
    recorders = [
        start(engine, request(prompt(config, number, length=size // 2), max_tokens=size - size // 2))
        for number in range(config.max_num_seqs)
    ]
    most_running = 0
    while not all(recorder.terminals for recorder in recorders):
        most_running = max(most_running, engine.load().running)
        await asyncio.sleep(0.001)  # less often would miss the moment, more often would take the engine's core
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
    assert engine.load().free_blocks + engine.load().cached_blocks == config.total_kv_blocks


async def counts_on_while_it_works(engine: contract.Engine, config: contract.EngineConfig) -> None:
    await run(engine, request(prompt(config, 1), max_tokens=2))
    before = engine.load()
    assert before.prompt_tokens >= len(prompt(config, 1))
    recorder = start(engine, request(prompt(config, 2), max_tokens=30))
    await recorder.until(lambda seen: len(seen.token_ids) >= 1)
    during = engine.load()
    assert during.prompt_tokens > before.prompt_tokens
    assert during.generated_tokens > before.generated_tokens
    await recorder.terminal()


async def ends_every_stream_at_cleanup(engine: contract.Engine, config: contract.EngineConfig) -> None:
    recorders = [start(engine, request(prompt(config, number), max_tokens=200)) for number in range(20)]
    await recorders[0].until(lambda seen: len(seen.token_ids) >= 1)
    await engine.cleanup()
    assert all(len(recorder.terminals) == 1 for recorder in recorders)
    await engine.cleanup()
    with pytest.raises(errors.RequestError) as refusal:
        engine.generate(request(prompt(config)), Recorder())
    assert refusal.value.error.retryable
