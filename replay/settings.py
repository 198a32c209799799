"""The settings shared by all parts of a replay."""

import msgspec


class ReplaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """A trace and the fleet that replays it."""

    trace: str
    """A trace file, or a workload as `generators.parse` takes it."""
    workers: int = 8
    prefill_workers: int = 0
    """The number of these that compute prompts for the others, which are then `decode` workers."""
    kv_blocks: int = 3_000
    """KV blocks of each worker."""
    block_size: int = 512
    """Tokens of a KV block."""
    speedup: float = 1.0
    """The factor by which requests arrive faster than in the trace."""
    timing: str = "dynamo"
    seed: int = 0
    max_requests: int = 0
    """Replays only the first requests of the trace; 0 replays all."""
    routers: int = 1
    temperature: float = 0.0
    delay_ms: float = 1.0
    """The time that events take to reach a router."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8_192
    step_target_ms: float = 0.0
    """The step duration that prompt chunks are sized for; with 0 they are as large as `max_num_batched_tokens`
    allows."""
    speeds: tuple[float, ...] = (1.0,)
    """The factors by which the workers, in turn, are faster than the timing model."""
    kv_token_bytes: int = 0
    """Bytes of a token's keys and values; with 0 workers fetch no blocks from each other."""
    transfer_mb_per_s: float = 60.0
    """The rate at which a worker sends blocks, and at which it receives them."""
