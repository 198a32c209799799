"""Keeps what a router must know of a completion to continue it elsewhere, as read from its worker's event log."""

from array import array

from tokenbus.protocol.wire import block_hash, errors, internal

MAX_DEATHS = 3
"""A completion is blamed if this many workers have died with it, with little progress in between."""
MAX_LOSSES = 8
"""A completion that has lost this many workers for any reason, with little progress in between, is no longer continued:
it may be what stalls them."""
LOSS_WINDOW_TOKENS = 32
"""Losses within fewer tokens than this count together: a token or two from each worker is no progress."""


class PartialCompletion:
    """The sampled tokens of one request, over all its attempts."""

    def __init__(self) -> None:
        self.token_ids = array("I")
        self.logprobs = bytearray()
        """In the form in which workers pack them; empty unless the request asks for log probabilities."""
        self.first_token: internal.FirstToken | None = None
        """The first worker's account of its first token."""
        self.last_seq = -1
        """The entry of the current worker's event log that holds its last tokens; -1 if there is none."""
        self._losses: list[tuple[int, str, bool]] = []
        """For each recent loss of a worker, the number of tokens at that time, the incarnation, and whether it had
        died."""

    def __repr__(self) -> str:
        return f"<PartialCompletion {len(self.token_ids)} tokens, {len(self._losses)} losses>"

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        return 4 * len(self.token_ids) + len(self.logprobs)

    def resume(self, given: internal.RunResume) -> None:
        """Takes over the tokens that another router knows. Raises ValueError if the packed tokens are malformed."""
        self.token_ids.extend(block_hash.unpack_token_ids(given.token_ids))
        self.logprobs += given.logprobs
        self.first_token = internal.FirstToken(
            stream_no=0, cached_tokens=given.cached_tokens, queue_ms=given.queue_ms, prefill_ms=given.prefill_ms
        )

    def start_attempt(self) -> None:
        """Records that another worker is to continue it."""
        self.last_seq = -1

    def start_over(self) -> None:
        """Forgets all tokens, since the next worker samples them again."""
        self.token_ids, self.logprobs = array("I"), bytearray()

    def append(self, token_id: int, seq: int) -> None:
        """Adds a token from an entry of the current worker's event log."""
        self.token_ids.append(token_id)
        self.last_seq = seq

    def restore(self, running: internal.StreamState, seq: int) -> bool:
        """Adds the tokens that are not known yet, from a snapshot made after entry `seq` or from a worker that gives up
        the request after it.

        Returns False if tokens are missing between the known and the given ones, because more tokens were known when
        they were asked for."""
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

    def add_loss(self, incarnation: str, *, is_death: bool) -> errors.Code | None:
        """Counts the loss of a worker, which has died or has only fenced itself. Returns the error with which the
        completion ends if there were too many losses."""
        self._losses.append((len(self.token_ids), incarnation, is_death))
        self._losses = [one for one in self._losses if len(self.token_ids) - one[0] < LOSS_WINDOW_TOKENS]
        if sum(died for _, _, died in self._losses) >= MAX_DEATHS:
            return errors.Code.REQUEST_CRASHES_ENGINE
        return errors.Code.WORKER_LOST if len(self._losses) >= MAX_LOSSES else None

    def is_back(self, incarnation: str) -> None:
        """Records that a worker that counted as lost was only out of reach."""
        self._losses = [one for one in self._losses if one[1] != incarnation]

    def has_fenced(self, incarnation: str) -> None:
        """Records that a worker that counted as dead had only fenced itself."""
        self._losses = [(at, name, died and name != incarnation) for at, name, died in self._losses]

    def resume_from(self, elapsed_ms: float) -> internal.RunResume | None:
        """Returns what the next worker needs; None before the first token.

        `elapsed_ms` is the time since the first accept."""
        packed = block_hash.pack_token_ids(self.token_ids)
        return internal.RunResume.of(packed, bytes(self.logprobs), self.first_token, elapsed_ms)
