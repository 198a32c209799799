"""Step budgets: how much a step may carry, so that no stream waits long for its next token because of another's prompt;
and which prompts it carries."""

from collections.abc import Iterable
from collections.abc import Sequence as Listing

from tokenbus.protocol.averages import MovingAverage
from tokenbus.worker.engine.kv.allocation import CheckpointedAllocation
from tokenbus.worker.engine.kv.ops import KvOp, Offload, Onload
from tokenbus.worker.engine.scheduling.sequence import Sequence

_WEIGHT = 0.3
"""The newest step's weight in the running estimate, which adapts to a change of speed within a handful of steps."""
_NO_DECODE_FACTOR = 3
"""A step may take this many times its target while no sequence decodes. Routers take a step of 2 s for a hung one."""
_AHEAD_SHARE = 0.25
"""The part of its target that a step may take in which nobody waits for anything, but a request may come."""
_TILE_FACTOR = 2
"""A step may take this many times its target to have a whole tile of tokens: in the middle of a prompt of 1,200 tokens,
a step of 64 takes 0.52 s and two of 36 take 0.75 s (0.5B shape, 2 cores)."""
_FIRST_BLOCKS = 16
"""Blocks to copy before the first copies have been timed."""
_MIN_OBSERVED_TOKENS = 8
"""With fewer tokens a step's time is dominated by its fixed cost."""


class StepBudget:
    """Learns how fast prompts are computed and bounds a step's tokens by `target_s` seconds.

    Where the device computes prompts in tiles of `tile_rows` tokens, a step has a multiple of these."""

    def __init__(self, target_s: float, min_tokens: int, max_tokens: int, *, tile_rows: int = 1) -> None:
        assert 0 < min_tokens <= max_tokens, (min_tokens, max_tokens)
        self._target_s = target_s
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._tile_rows = tile_rows
        self._tokens_per_s = MovingAverage(_WEIGHT)

    def __repr__(self) -> str:
        return f"<StepBudget {self._tokens_per_s.value or 0:.0f} tokens/s, {self.prefill_tokens(1)} a step>"

    def target_s(self, num_decoding: int) -> float:
        """The time that a step with `num_decoding` decoding sequences may take.

        While none decodes, a step may take longer: large steps compute more tokens per second."""
        return self._target_s if num_decoding else _NO_DECODE_FACTOR * self._target_s

    def prefill_tokens(self, num_decoding: int) -> int:
        """The prompt tokens for a step with `num_decoding` decoding sequences: few until steps have been timed."""
        return self.tokens_within(self.target_s(num_decoding), num_decoding)

    @property
    def ahead_tokens(self) -> int:
        """The tokens of an expected turn in a step: few, since a request that comes waits for that step."""
        return self.tokens_within(_AHEAD_SHARE * self._target_s)

    def tokens_within(self, seconds: float, num_decoding: int = 0) -> int:
        """The prompt tokens that can be computed in this time alongside `num_decoding` decoding sequences."""
        rate = self._tokens_per_s.value
        if rate is None:
            return self._min_tokens
        wanted = int(rate * seconds) - num_decoding  # a decode counts as one token
        if self._tile_rows <= _TILE_FACTOR * seconds * rate:
            wanted = max(1, round(wanted / self._tile_rows)) * self._tile_rows
        return max(self._min_tokens, min(self._max_tokens, wanted))

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learns from a step of `num_tokens` that took `seconds`."""
        if num_tokens >= _MIN_OBSERVED_TOKENS and seconds > 0:
            self._tokens_per_s.add(num_tokens / seconds)


class TransferBudget:
    """Learns how fast blocks are copied to host memory and back, and limits how many are copied between two steps."""

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._s_per_block = MovingAverage(_WEIGHT)

    def __repr__(self) -> str:
        return f"<TransferBudget {self.blocks} blocks a step>"

    @property
    def blocks(self) -> int:
        """The blocks for the next step, in each direction; at least one, so that all waiting sequences make
        progress."""
        s_per_block = self._s_per_block.value
        return _FIRST_BLOCKS if s_per_block is None else max(1, int(self._target_s / s_per_block))

    def observe(self, kv_ops: Listing[KvOp], seconds: float) -> None:
        """Learns from KV ops that took `seconds` in total."""
        count = sum(isinstance(op, Offload | Onload) for op in kv_ops)
        if count:
            self._s_per_block.add(seconds / count)


def distinct_prompts(running: Iterable[Sequence], waiting: Iterable[Sequence]) -> list[Sequence]:
    """Returns the prompts to continue: of several that would compute the same block next, only the first, so that
    prompts with a common prefix are not computed side by side.

    The others reuse that block in the next step, like those that wait for a copy from host memory. Where only
    checkpoints can be reused, they wait for one at the point where they diverge from the first, which also makes one
    for each prompt in `waiting`, which have no lane yet."""
    prompts, blocks = list[Sequence](), set[object]()
    for sequence in running:
        if sequence.lane is None or sequence.is_decoding:
            continue
        block = sequence.kv.next_block(sequence.token_ids)
        if sequence.num_computed < sequence.max_reused and (
            sequence.kv.awaits_onload(sequence.token_ids) or block in blocks or _awaits_checkpoint(sequence, prompts)
        ):
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
