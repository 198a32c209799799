"""Keeps what a router must know of a completion to continue it elsewhere, from its worker's event log; pure."""

from array import array

from tokenbus.protocol.wire import block_hash, errors, internal

MAX_DEATHS = 3
"""A completion with which this many workers in a row have died is blamed for their deaths."""
MAX_LOSSES = 8
"""A completion that has lost this many in a row, for whatever reason, goes on no more: it may be what holds them up."""
LOSS_WINDOW_TOKENS = 32
"""Losses with fewer tokens than this between them count together: one token from each worker is no progress."""


class Completion:
    """The sampled tokens of one request, over all its attempts."""

    def __init__(self) -> None:
        self.token_ids = array("I")
        self.logprobs = bytearray()
        """Packed by workers, for requests that ask for them."""
        self.first_token: internal.FirstToken | None = None
        """The first worker's account of its first token."""
        self.last_seq = -1
        """The entry of the present worker's event log that holds its last tokens; -1 if there is none."""
        self._losses: list[tuple[int, bool]] = []
        """The tokens that it had at each recent loss of a worker, and whether the worker had died."""

    def __repr__(self) -> str:
        return f"<Completion {len(self.token_ids)} tokens, {len(self._losses)} losses>"

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        return 4 * len(self.token_ids) + len(self.logprobs)

    def resume(self, given: internal.RunResume) -> None:
        """Takes the tokens that another router knows. Raises ValueError if they can't be told apart."""
        self.token_ids.extend(block_hash.unpack_token_ids(given.token_ids))
        self.logprobs += given.logprobs
        self.first_token = internal.FirstToken(
            stream_no=0, cached_tokens=given.cached_tokens, queue_ms=given.queue_ms, prefill_ms=given.prefill_ms
        )

    def start_attempt(self) -> None:
        """Notes that another worker is to continue it."""
        self.last_seq = -1

    def append(self, token_id: int, seq: int) -> None:
        """Adds a token from an entry of the present worker's event log."""
        self.token_ids.append(token_id)
        self.last_seq = seq

    def restore(self, running: internal.RunningRequest | internal.TakeReply, seq: int) -> bool:
        """Adds those tokens that are not known yet, from a snapshot or from a worker that gives the request up, after
        entry `seq`.

        Returns False if tokens are missing between the two, because whoever asked for them knew more."""
        num_given, rest = divmod(len(running.token_ids), 4)
        num_known = len(self.token_ids) - (running.num_tokens - num_given)
        if rest or num_known < 0:
            return False
        if num_known >= num_given:
            return num_known == num_given
        self.token_ids.extend(block_hash.unpack_token_ids(running.token_ids[4 * num_known :]))
        self.logprobs += running.logprobs[num_known * (len(running.logprobs) // num_given) :]
        self.first_token = self.first_token or running.first_token
        self.last_seq = seq
        return True

    def add_loss(self, *, is_death: bool) -> errors.Code | None:
        """Counts the loss of a worker, which has died or has only cut itself off; returns the error with which the
        completion ends if there were too many."""
        self._losses.append((len(self.token_ids), is_death))
        self._losses = [one for one in self._losses if len(self.token_ids) - one[0] < LOSS_WINDOW_TOKENS]
        if sum(died for _, died in self._losses) >= MAX_DEATHS:
            return errors.Code.REQUEST_CRASHES_ENGINE
        return errors.Code.WORKER_LOST if len(self._losses) >= MAX_LOSSES else None

    def resume_from(self, elapsed_ms: float) -> internal.RunResume | None:
        """Returns what the next worker has to know; None before the first token.

        `elapsed_ms` is the time since the first accept."""
        if not self.token_ids:
            return None
        first = self.first_token
        return internal.RunResume(
            token_ids=block_hash.pack_token_ids(self.token_ids),
            logprobs=bytes(self.logprobs),
            cached_tokens=first.cached_tokens if first else 0,
            queue_ms=first.queue_ms if first else 0.0,
            prefill_ms=first.prefill_ms if first else 0.0,
            elapsed_ms=elapsed_ms,
        )
