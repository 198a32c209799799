"""The numbers by which placement compares workers."""

from typing import NamedTuple


class WorkerRow(NamedTuple):
    """One worker's numbers: first those from its card, events and bookings, then derived ones."""

    is_open: bool
    """Whether it may be given work, unless it is silent or stuck."""
    last_seen_at: float
    step_age_ms: float
    context_length: int
    is_prefill: bool
    """Whether it computes prompts for others, and gets requests only if no other worker can take them."""
    ejected_until: float
    """Until this time it gets requests only if no other worker can take them; 0 if it is not ejected."""
    expected_answer_tokens: int
    """The expected tokens of its next completion; 0 if not reported."""
    block_size: int
    """Tokens of a KV block; 0 if it has no blocks."""
    prefill_tokens: int
    """Prompt tokens that it has yet to compute, bookings included."""
    used_blocks: int
    """KV blocks of its running sequences, bookings included."""
    total_blocks: int
    requests: int
    """Requests running, waiting or booked."""
    max_num_seqs: int
    max_requests: int
    """With this many requests it gets no more: another would only wait there."""
    waiting_requests: int
    """Requests that would wait there if one more arrived, including that one."""
    free_tokens: float
    """Tokens that would still fit its KV cache once its requests, bookings included, have their expected final lengths.
    Negative if those are too many; infinite if it has no blocks."""
    prefill_slowdown: float = 1.0
    """Its time per prompt token relative to the fastest worker's: a power of 2."""
    decode_slowdown: float = 1.0
    """The same for the tokens of streams."""
    utilization: float = 0.0
    """Its recent work relative to the most it has ever done: 0 when idle, near 1 at its peak. While it has only its
    first requests, the median of the others'."""
    last_chosen: int = 0
    """Larger the more recently it was chosen; 0 if never."""
