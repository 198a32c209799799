"""The load of a scheduler, as reported to routers."""

from collections.abc import Sequence as Listing

from tokenbus.protocol.wire import messages
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.kv.prefix_cache import PrefixCache
from tokenbus.worker.engine.scheduling.counters import Counters
from tokenbus.worker.engine.scheduling.expectation import Expectation
from tokenbus.worker.engine.scheduling.sequence import Sequence


def expected_of_running(running: Listing[Sequence], cache: PrefixCache, expectation: Expectation) -> int:
    """Returns the blocks that running sequences use and are expected to use."""
    return cache.used_blocks + sum(expectation.reserved_blocks(one) for one in running)


def make_load(
    running: Listing[Sequence],
    waiting: Listing[Sequence],
    pool: BlockPool,
    expectation: Expectation,
    counters: Counters,
) -> messages.Load:
    cache = pool.cache
    # A preempted one gets most of its tokens back from the cache.
    waiting_tokens = sum(one.num_uncomputed for one in waiting if not one.preemptions)
    prefill_tokens = sum(one.num_uncomputed for one in running if not one.is_decoding)
    expected_of_waiting = sum(expectation.blocks(one) for one in waiting)
    return messages.Load(
        running=len(running),
        waiting=len(waiting),
        queued_prefill_tokens=waiting_tokens + prefill_tokens,
        used_blocks=cache.used_blocks,
        cached_blocks=cache.evictable_blocks,
        free_blocks=cache.free_blocks,
        expected_blocks=expected_of_running(running, cache, expectation) + expected_of_waiting,
        expected_answer_tokens=expectation.answer_tokens,
        host_blocks=len(cache.host),
        kept_blocks=pool.num_kept,
        fetched_blocks=cache.host.adopted_blocks,
        generated_tokens=counters.generated_tokens,
        computed_tokens=counters.computed_tokens,
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens,
    )
