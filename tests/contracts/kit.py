"""The conformance kit: every rule of worker/contract.py as a check that any engine can be put through.

A check gets a started engine and its config, drives it, and raises AssertionError (or TimeoutError, where the engine
keeps it waiting) if the rule does not hold. `lifecycle_rules` get a factory instead, since they are about starting.
"""

import asyncio
import itertools
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.support.engines import Recorder
from tokenbus.protocol.wire import block_hash, errors, internal, messages
from tokenbus.worker import contract
from tokenbus.worker.validator import StreamValidator

SETTLE_S = 10.0
Check = Callable[[contract.Engine, contract.EngineConfig], Awaitable[None]]
LifecycleCheck = Callable[[Callable[[], contract.Engine]], Awaitable[None]]

_keys = itertools.count()


def request(
    token_ids: list[int],
    *,
    stop: tuple[str, ...] = (),
    tenant: str = "",
    salt: str = "",
    cache: bool = True,
    **sampling: object,
) -> contract.EngineRequest:
    fields: dict[str, object] = {"max_tokens": 24, "ignore_eos": True} | sampling
    return contract.EngineRequest(
        key=f"default:kit-{next(_keys)}",
        token_ids=token_ids,
        sampling=contract.Sampling(**fields),  # type: ignore[arg-type]
        stop=stop,
        tenant=tenant,
        cache_salt=salt,
        cache_prompt=cache,
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

        def fail(output: contract.Output, key: str = asked.key, ended: asyncio.Event = ended) -> None:
            if output.finish_reason is not None:
                ended.set()
                engine.abort(key)
                raise ValueError("a sink that fails, on purpose")

        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: None)
        engine.generate(asked, fail)
        async with asyncio.timeout(SETTLE_S):
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
    assert engine.load().free_blocks + engine.load().cached_blocks == config.total_kv_blocks


class Held:
    """What a router would believe that the engine holds. Fails for events that don't fit each other."""

    def __init__(
        self,
        engine: contract.Engine,
        config: contract.EngineConfig,
        domain: block_hash.PrefixDomain,
        others: block_hash.PrefixDomain,
    ) -> None:
        self.parents: dict[int, int] = {}
        self._most = config.total_kv_blocks + config.host_kv_blocks
        self._root = block_hash.root_hash(domain)
        self._other_root = block_hash.root_hash(others)
        self._block_size = config.kv_block_size
        engine.on_kv_events = self._take

    def has(self, token_ids: list[int]) -> list[bool]:
        """Whether each full block of a prompt of the domain is held."""
        return [name in self.parents for name in block_hash.block_hashes(token_ids, self._block_size, self._root)]

    def _take(self, removed: list[int], stored: list[tuple[int, int]]) -> None:
        for name in removed:
            del self.parents[name]
        for parent, name in stored:
            assert name not in self.parents, "stored twice"
            self.parents[name] = parent
        for parent in self.parents.values():
            assert parent in self.parents or parent in (self._root, self._other_root), "a block hangs in the air"
        assert len(self.parents) <= self._most, "more blocks than were advertised"


async def measured(engine: contract.Engine, asked: contract.EngineRequest) -> tuple[Recorder, messages.Usage, int]:
    """An answer, its usage, and how many tokens were computed for it."""
    before = engine.load().computed_tokens
    recorder = await run(engine, asked)
    await settled(engine)
    usage = recorder.outputs[-1].usage
    assert usage is not None
    return recorder, usage, engine.load().computed_tokens - before


def long_prompt(config: contract.EngineConfig, number: int) -> list[int]:
    """Several blocks and half of one."""
    size = config.kv_block_size
    return prompt(config, number, length=min(5 * size + size // 2, config.context_length - 32))


async def computes_what_is_cached_only_once(engine: contract.Engine, config: contract.EngineConfig) -> None:
    token_ids = long_prompt(config, 41)
    answers = []
    for turn in range(3):
        recorder, usage, computed = await measured(engine, request(token_ids, salt="once", max_tokens=5))
        assert computed == usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens - 1
        assert (usage.cached_tokens > 0) == (config.prefix_cache and turn > 0), (turn, usage)
        answers.append(recorder.token_ids)
    assert answers[0] == answers[1] == answers[2]
    if config.prefix_cache:
        assert usage.cached_tokens == len(token_ids) - 1
        longer = token_ids + answers[0]
        _, usage, _ = await measured(engine, request([*longer, *prompt(config, 42)], salt="once", max_tokens=5))
        assert usage.cached_tokens == len(longer) - 1


async def shares_a_prefix_with_what_runs(engine: contract.Engine, config: contract.EngineConfig) -> None:
    """Those that come while it is being computed, and while its sequence runs, compute only their own part."""
    prefix = long_prompt(config, 43)
    tails = [prompt(config, 44 + number) for number in range(4)]
    asked = [request(prefix + tail, salt="apart", cache=False, max_tokens=12) for tail in tails]
    alone = [(await run(engine, one)).token_ids for one in asked]
    before = engine.load().computed_tokens
    recorders = [start(engine, request(prefix + tails[0], salt="together", max_tokens=12))]
    recorders += [start(engine, request(prefix + tail, salt="together", max_tokens=12)) for tail in tails[1:3]]
    await recorders[0].until(lambda seen: len(seen.token_ids) >= 2)
    recorders.append(start(engine, request(prefix + tails[3], salt="together", max_tokens=12)))
    for recorder in recorders:
        await recorder.terminal()
    await settled(engine)
    assert [recorder.token_ids for recorder in recorders] == alone
    if config.prefix_cache:
        shared = len(prefix) // config.kv_block_size * config.kv_block_size
        everything = sum(len(prefix) + len(tail) + 11 for tail in tails)
        assert engine.load().computed_tokens - before <= everything - 3 * shared
        assert all(seen.outputs[-1].usage.cached_tokens >= shared for seen in recorders[1:])  # type: ignore[union-attr]


async def keeps_caches_apart(engine: contract.Engine, config: contract.EngineConfig) -> None:
    token_ids = long_prompt(config, 50)
    await run(engine, request(token_ids, tenant="one", salt="a"))
    for tenant, salt, cache in (("two", "a", True), ("one", "b", True), ("one", "", True), ("one", "a", False)):
        asked = request(token_ids, tenant=tenant, salt=salt, cache=cache, max_tokens=3)
        _, usage, computed = await measured(engine, asked)
        assert usage.cached_tokens == 0, (tenant, salt, cache)
        assert computed == len(token_ids) + 2


async def leaves_nothing_where_it_must_not(engine: contract.Engine, config: contract.EngineConfig) -> None:
    token_ids = long_prompt(config, 51)
    await run(engine, request(token_ids, salt="bare", cache=False))
    _, usage, _ = await measured(engine, request(token_ids, salt="bare"))
    assert usage.cached_tokens == 0


async def tells_which_blocks_it_holds(engine: contract.Engine, config: contract.EngineConfig) -> None:
    domain = block_hash.PrefixDomain(config.fingerprint, (), "a tenant", "told")
    held = Held(engine, config, domain, block_hash.PrefixDomain(config.fingerprint, cache_salt="others"))
    token_ids = long_prompt(config, 52)
    recorder = await run(engine, request(token_ids, tenant="a tenant", salt="told"))
    await settled(engine)
    whole = token_ids + recorder.token_ids[:-1]
    assert held.has(whole) == [config.prefix_cache] * (len(whole) // config.kv_block_size)
    for number in range(12):  # many others, each as large as fits, so that blocks have to go
        await run(engine, request(prompt(config, 60 + number, config.context_length - 24), salt="others"))
    engine.clear_cache()
    _, usage, _ = await measured(engine, request(token_ids, tenant="a tenant", salt="told", max_tokens=1))
    assert usage.cached_tokens == 0
    assert held.has(token_ids) == [config.prefix_cache] * (len(token_ids) // config.kv_block_size)
    await run(engine, request(prompt(config, 53), cache=False, max_tokens=1))
    assert len(held.parents) == sum(held.has(token_ids))


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


async def embeds_each_input_by_itself(engine: contract.Engine, config: contract.EngineConfig) -> None:
    inputs: list[str | list[int]] = [prompt(config, number, 3 + 5 * number) for number in range(4)]
    if not config.embedding_width:
        with pytest.raises(errors.RequestError) as refusal:
            await engine.embed(internal.Embed(inputs=inputs, remaining_ms=10_000))
        assert refusal.value.error.code is errors.Code.UNSUPPORTED
        return
    recorder = start(engine, request(prompt(config), max_tokens=100))
    together = await engine.embed(internal.Embed(inputs=inputs, remaining_ms=10_000))
    assert together.prompt_tokens == sum(map(len, inputs))
    size = 4 * config.embedding_width
    assert len(together.vectors) == size * len(inputs)
    for place, one in enumerate(inputs):
        alone = await engine.embed(internal.Embed(inputs=[one], remaining_ms=10_000))
        row = struct.unpack(f"<{config.embedding_width}f", together.vectors[size * place : size * (place + 1)])
        assert row == pytest.approx(struct.unpack(f"<{config.embedding_width}f", alone.vectors), abs=1e-4)
    await recorder.terminal()
    late = engine.embed(internal.Embed(inputs=inputs, remaining_ms=0))
    with pytest.raises(errors.RequestError) as refusal:
        await late
    assert refusal.value.error.code is errors.Code.DEADLINE_EXCEEDED
    assert engine.load().running == engine.load().used_blocks == 0


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
    gives_everything_back_of_a_sink_that_fails,
    frees_everything_of_abandoned_streams,
    has_the_capacity_it_advertises,
    refuses_without_a_trace,
    ignores_aborts_of_the_unknown,
    drains_to_zero,
    computes_what_is_cached_only_once,
    shares_a_prefix_with_what_runs,
    keeps_caches_apart,
    leaves_nothing_where_it_must_not,
    tells_which_blocks_it_holds,
    counts_on_while_it_works,
    embeds_each_input_by_itself,
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
