"""The numbers of one worker that placement compares; pure."""

from typing import NamedTuple


class WorkerRow(NamedTuple):
    """One worker's numbers, from its card, its events and its bookings, and then those that are derived."""

    is_open: bool
    """Whether it may be given work unless it is silent or stuck."""
    last_seen_at: float
    step_age_ms: float
    context_length: int
    is_prefill: bool
    """Whether it computes prompts for others, and gets requests only where no other worker can take them."""
    ejected_until: float
    """Until this time it gets requests only where no other worker can take them; 0 if it is not ejected."""
    expected_answer_tokens: int
    """Tokens that its next completion is expected to have; 0 if it does not say."""
    block_size: int
    """Tokens of a KV block; 0 if it has no blocks."""
    prefill_tokens: int
    """Prompt tokens that it still has to compute, bookings included."""
    used_blocks: int
    """KV blocks of its running sequences, bookings included."""
    total_blocks: int
    requests: int
    """Requests that are running, waiting or booked."""
    max_num_seqs: int
    max_requests: int
    """With this many requests it gets no more: another one would only wait there."""
    waiting_requests: int
    """Requests that would wait there if one more came, that one included."""
    free_tokens: float
    """Tokens that fit its KV cache beside those that its requests are expected to have in the end, bookings included.
    Negative if these are too many; infinite if it has no blocks."""
    prefill_slowdown: float = 1.0
    """Its time per prompt token compared with the fastest worker's: a power of 2."""
    decode_slowdown: float = 1.0
    """The same for the tokens of streams."""
    utilization: float = 0.0
    """Its recent work compared with the most it has ever done: 0 when idle, near 1 at its most. While it has only its
    first requests, it is the median of the others'."""
    last_chosen: int = 0
    """Larger the later it was chosen last; 0 if never."""
