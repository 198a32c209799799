"""The rules for what may arrive on a client's reply subject, whoever publishes it and whatever the client makes of
it."""

from tests.sim.engine import Token, first_token, tokens_in
from tokenbus.protocol.wire import messages


class Heard:
    """One reply subject, and so one request id. Its checks hold for resyncs and all attempts together."""

    def __init__(self) -> None:
        self.is_streamed = False
        """Whether anything from a worker has come before a terminal."""
        self.attempt = 0
        self.num_tokens = 0
        self.tokens: dict[int, Token] = {}
        """The tokens received so far, by place."""
        self.workers: dict[int, str] = {}
        """The worker that runs each attempt."""
        self.ends: list[tuple[str, int, str | None]] = []
        self.late_keepalives: list[messages.Chunk] = []
        """Empty chunks of a router that came after the end, where only chunks repeated for a resync may come."""
        self.broken_rules: list[str] = []

    def __repr__(self) -> str:
        return f"<Heard attempt {self.attempt}: {self.num_tokens} tokens, {self.ends} {self.broken_rules}>"

    def take(self, chunk: messages.Chunk) -> None:
        """Takes every chunk, in the order of arrival."""
        self._check_order(chunk)
        self._check_worker(chunk)
        self._check_text(chunk)
        self.is_streamed |= bool(chunk.worker_id) and chunk.finish_reason is None
        if chunk.finish_reason is not None:
            self.ends.append((chunk.finish_reason, chunk.attempt, chunk.worker_id or None))
        self.attempt = max(self.attempt, chunk.attempt)
        self.num_tokens = max(self.num_tokens, chunk.offset + chunk.tokens)

    def check(self, *, ends_are_known: bool = True) -> None:
        """Asserts that no rule was broken, and that there is one end, however often it is repeated.

        If messages were lost, a router may lose the worker before it learns of an end. Then the router ends the stream
        once more: with an error, or as cancelled because the client cancels a stream that it no longer listens to. It
        has a whole answer generated again."""
        assert self.broken_rules == [], self
        others = set(self.ends[1:]) - set(self.ends[:1])
        if ends_are_known:
            assert not others, self
            assert not self.late_keepalives, self
        elif self.is_streamed:
            assert all(reason in ("error", "cancelled") and worker_id is None for reason, _, worker_id in others), self

    def _check_order(self, chunk: messages.Chunk) -> None:
        if self.ends and chunk.finish_reason is None and chunk.worker_id is None and not chunk.tokens:
            self.late_keepalives.append(chunk)
        if chunk.attempt < self.attempt and chunk.offset + chunk.tokens > self.num_tokens:
            self.broken_rules.append(f"new tokens of an attempt that another has replaced: {chunk}")

    def _check_worker(self, chunk: messages.Chunk) -> None:
        if chunk.worker_id and self.workers.setdefault(chunk.attempt, chunk.worker_id) != chunk.worker_id:
            self.broken_rules.append(f"two workers have the same attempt: {chunk}")

    def _check_text(self, chunk: messages.Chunk) -> None:
        tokens = tokens_in(chunk.text)
        if len(tokens) != chunk.tokens:
            self.broken_rules.append(f"a text of {len(tokens)} tokens: {chunk}")
        for place, token in enumerate(tokens, chunk.offset):
            if token.place != place or self.tokens.setdefault(place, token) != token:
                self.broken_rules.append(f"token {place} was {self.tokens.get(place)}: {chunk}")


def check_account(terminal: messages.Chunk, tokens: list[Token], *, knows_first: bool) -> None:
    """Asserts that a worker's terminal accounts for these tokens, and gives the account of the first token, unless only
    the client told the worker of the tokens: then it can't know. A forged worker's terminal may have no `usage`; then
    nothing is checked."""
    if not terminal.worker_id or not terminal.usage:
        return
    assert terminal.usage.completion_tokens == len(tokens), (terminal, tokens)
    if tokens and knows_first:
        first = first_token(tokens[0])
        assert terminal.timings, terminal
        said = (terminal.usage.cached_tokens, terminal.timings.queue_ms, terminal.timings.prefill_ms)
        assert said == (first.cached_tokens, first.queue_ms, first.prefill_ms), (terminal, tokens)
