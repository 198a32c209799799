"""Keeps prompts with a common prefix from being computed side by side: all but the first wait, and reuse its blocks."""

from collections.abc import Iterable

from tokenbus.worker.engine.kv.allocation import CheckpointedAllocation
from tokenbus.worker.engine.scheduling.sequence import Sequence


def distinct_prompts(running: Iterable[Sequence], waiting: Iterable[Sequence]) -> list[Sequence]:
    """Returns the prompts to continue: of several that would compute the same block next, only the first.

    The others reuse that block in the next step, like those that wait for a copy from host memory. Where only
    checkpoints can be reused, they wait for one at the point where they diverge from the first, which also makes one
    for each prompt in `waiting`, which have no lane yet."""
    prompts, blocks = list[Sequence](), set[object]()
    for sequence in running:
        if sequence.lane is None or sequence.is_decoding or sequence.kv.awaits_onload(sequence.token_ids):
            continue
        block = sequence.kv.next_block(sequence.token_ids)
        if block in blocks or _awaits_checkpoint(sequence, prompts):
            continue
        prompts.append(sequence)
        if block is not None:
            blocks.add(block)
    for sequence in waiting:
        _awaits_checkpoint(sequence, prompts)
    return prompts


def _awaits_checkpoint(sequence: Sequence, prompts: Iterable[Sequence]) -> bool:
    """Makes each earlier prompt with a common prefix stop where this one can continue; returns whether there is any."""
    awaits = False
    for one in prompts:
        if isinstance(one.kv, CheckpointedAllocation) and one.domain is not None and one.domain == sequence.domain:
            position = one.kv.stop_for(one.token_ids, sequence.token_ids, one.num_computed)
            awaits |= position > max(one.num_computed, sequence.num_computed)
    return awaits
