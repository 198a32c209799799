"""Rules of the contract about cached prefixes: who shares them, what they save, and what routers are told."""

from tests.contracts.driving import prompt, request, run, settled, start
from tests.support.block_hashes import block_hashes
from tests.support.engines import Recorder
from tokenbus.protocol.wire import block_hash, codec, messages
from tokenbus.worker.contract import contract, engine_request
from tokenbus.worker.kv_exchange import fetcher


class Held:
    """The blocks that a router believes the engine to hold. Fails for events that contradict each other."""

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
        self._are_single = config.checkpoint_sizes is not None
        engine.on_kv_events = self._take

    def has(self, token_ids: list[int]) -> list[bool]:
        """Whether each full block of a prompt of the domain is held."""
        return [name in self.parents for name in block_hashes(token_ids, self._block_size, self._root)]

    def _take(self, removed: list[int], stored: list[tuple[int, int]]) -> None:
        for name in removed:
            del self.parents[name]
        for parent, name in stored:
            assert name not in self.parents, "stored twice"
            self.parents[name] = parent
        for parent in () if self._are_single else self.parents.values():
            assert parent in self.parents or parent in (self._root, self._other_root), "a block hangs in the air"
        assert len(self.parents) <= self._most, "more blocks than were advertised"


async def measured(
    engine: contract.Engine, asked: engine_request.EngineRequest
) -> tuple[Recorder, messages.Usage, int]:
    """Returns a request's outputs, its usage, and the number of tokens that were computed for it."""
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


def reusable(config: contract.EngineConfig, length: int) -> int:
    """Returns how much of a prompt of that length can be reused when it comes again."""
    if config.checkpoint_sizes is None:
        return length - 1
    return (length - 8) // config.kv_block_size * config.kv_block_size


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
        assert usage.cached_tokens == reusable(config, len(token_ids))
        longer = token_ids + (answers[0] if config.checkpoint_sizes is None else [])
        _, usage, _ = await measured(engine, request([*longer, *prompt(config, 42)], salt="once", max_tokens=5))
        assert usage.cached_tokens == reusable(config, len(longer))


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
    if config.checkpoint_sizes is not None:  # the first may have gone past where the others leave it
        assert recorders[-1].outputs[-1].usage.cached_tokens >= reusable(config, len(prefix))  # type: ignore[union-attr]
    elif config.prefix_cache:
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
    full = len(whole) // config.kv_block_size
    if config.checkpoint_sizes is None:
        assert held.has(whole) == [config.prefix_cache] * full
    else:
        end = reusable(config, len(token_ids)) // config.kv_block_size
        assert held.has(whole)[:end] == [*[False] * (end - 1), True]
    for number in range(12):  # many others, each as large as fits, so that blocks have to go
        await run(engine, request(prompt(config, 60 + number, config.context_length - 24), salt="others"))
    engine.clear_cache()
    _, usage, _ = await measured(engine, request(token_ids, tenant="a tenant", salt="told", max_tokens=1))
    assert usage.cached_tokens == 0
    if config.checkpoint_sizes is None:
        assert held.has(token_ids) == [config.prefix_cache] * (len(token_ids) // config.kv_block_size)
    else:
        assert held.has(token_ids)[end - 1]
    await run(engine, request(prompt(config, 53), cache=False, max_tokens=1))
    assert len(held.parents) == sum(held.has(token_ids))


async def computes_only_the_prompt_of_a_warm_up(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if "cache_control" not in config.features:
        return
    token_ids = long_prompt(config, 77)
    warm = codec.replace(request(token_ids, max_tokens=1), is_warm_up=True, cache_ttl_s=60.0, session_id="warm")
    recorder, usage, _ = await measured(engine, warm)
    assert (recorder.token_ids, usage.completion_tokens, usage.cached_tokens) == ([], 0, 0)
    assert recorder.outputs[-1].finish_reason is messages.FinishReason.LENGTH
    _, usage, _ = await measured(engine, request(token_ids, max_tokens=2))
    assert usage.cached_tokens == reusable(config, len(token_ids))
    engine.retain_session("", "warm", 0.0)
    engine.retain_session("somebody", "warm", 60.0)
    _, usage, _ = await measured(engine, request(token_ids, max_tokens=2))
    assert usage.cached_tokens == reusable(config, len(token_ids)), "a session's end drops nothing while there is room"


def prefix_of(token_ids: list[int], tenant: str = "", salt: str = "") -> contract.CachedPrefix:
    return contract.CachedPrefix(tenant, salt, (), block_hash.pack_token_ids(token_ids))


async def gives_blocks_that_another_engine_can_use(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if not config.kv_identity:
        return
    token_ids = long_prompt(config, 70)
    recorder, _, _ = await measured(engine, request(token_ids, tenant="one", salt="a", max_tokens=3))
    full = len(token_ids) // config.kv_block_size
    num_cached, blocks = await engine.export_blocks(prefix_of(token_ids, "one", "a"), 0, 99)
    assert (num_cached, len(blocks)) == (full, full)
    assert config.kv_format is not None
    for place, block in enumerate(blocks):
        assert fetcher.block_problem(config.kv_format, block, place * config.kv_block_size) == ""
    engine.clear_cache()
    engine.put_blocks(prefix_of(token_ids, "one", "a"), 0, blocks[:2])
    engine.put_blocks(prefix_of(token_ids, "one", "a"), 2, blocks[2:])
    again, usage, _ = await measured(engine, request(token_ids, tenant="one", salt="a", max_tokens=3))
    assert usage.cached_tokens == full * config.kv_block_size
    assert again.token_ids == recorder.token_ids


async def computes_what_comes_as_no_numbers(engine: contract.Engine, config: contract.EngineConfig) -> None:
    """The first block comes as it is, and the last number of the second one as NaN."""
    if not config.kv_identity or config.engine not in ("gguf", "onnx"):  # others' blocks have no numbers
        return
    token_ids = long_prompt(config, 77)
    recorder, _, _ = await measured(engine, request(token_ids, max_tokens=3))
    _, blocks = await engine.export_blocks(prefix_of(token_ids), 0, 99)
    engine.clear_cache()
    blocks[1] = blocks[1][:-4] + b"\xff" * 4
    engine.put_blocks(prefix_of(token_ids), 0, blocks)
    again, usage, _ = await measured(engine, request(token_ids, max_tokens=3))
    assert usage.cached_tokens == config.kv_block_size
    assert again.token_ids == recorder.token_ids


async def gives_no_blocks_of_others(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if not config.kv_identity:
        return
    token_ids = long_prompt(config, 71)
    await run(engine, request(token_ids, tenant="one", salt="a"))
    for tenant, salt in (("two", "a"), ("one", "b"), ("one", "")):
        assert await engine.export_blocks(prefix_of(token_ids, tenant, salt), 0, 99) == (0, [])
    assert await engine.export_blocks(prefix_of(long_prompt(config, 72), "one", "a"), 0, 99) == (0, [])


async def drops_blocks_behind_a_gap(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if not config.kv_identity:
        return
    token_ids = long_prompt(config, 73)
    await measured(engine, request(token_ids, max_tokens=1))
    _, blocks = await engine.export_blocks(prefix_of(token_ids), 0, 99)
    engine.clear_cache()
    engine.put_blocks(prefix_of(token_ids), 1, blocks[1:])
    assert await engine.export_blocks(prefix_of(token_ids), 0, 99) == (0, [])


async def computes_what_is_held_back_only_once_released(engine: contract.Engine, config: contract.EngineConfig) -> None:
    held = codec.replace(request(prompt(config, 74), max_tokens=3), is_held=True)
    recorder = start(engine, held)
    await run(engine, request(prompt(config, 75), max_tokens=3))
    assert recorder.outputs == []
    engine.release(held.key)
    engine.release(held.key)
    await recorder.terminal()
    assert len(recorder.token_ids) == 3
    await settled(engine)


async def cancels_what_is_held_back(engine: contract.Engine, config: contract.EngineConfig) -> None:
    held = codec.replace(request(prompt(config, 76), max_tokens=3), is_held=True)
    recorder = start(engine, held)
    engine.abort(held.key)
    engine.release(held.key)
    assert (await recorder.terminal()).finish_reason is messages.FinishReason.CANCELLED
    await settled(engine)


EXCHANGE_RULES = (
    computes_what_comes_as_no_numbers,
    gives_blocks_that_another_engine_can_use,
    gives_no_blocks_of_others,
    drops_blocks_behind_a_gap,
    computes_what_is_held_back_only_once_released,
    cancels_what_is_held_back,
)
