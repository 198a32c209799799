"""Notes which workers a request was sent to and where its time went, while it is in flight. Pure.

A note costs about a microsecond, so that every request has them; `RequestTraces` makes messages of them."""

import msgspec

from tokenbus.protocol.wire import messages
from tokenbus.router.placement.placement import Placement

MAX_STEPS = 32
"""Steps of one request that are kept: the first half of them, and the last."""


class Step(msgspec.Struct):
    """A request at one worker, from its choice on. Times are those of the router's monotonic clock."""

    worker_id: str
    begun_at: float
    accepted_at: float | None = None
    continued_at: float | None = None
    policy: str = ""
    num_candidates: int = 0
    held_tokens: int = 0
    most_held_tokens: int = 0
    wait_s: float = 0.0
    fetch_from: str = ""
    fetch_tokens: int = 0
    has_leg: bool = False
    num_tokens: int = 0
    refused: str = ""
    left_at: float | None = None
    heard_at: float | None = None


class Way(msgspec.Struct):
    """The notes of one request."""

    steps: list[Step] = []
    is_adopted: bool = False
    """Whether this router has taken it over from another one."""
    is_paused: bool = False
    """Whether its next token is the first one since it was taken from a worker."""
    tokenize_s: float = 0.0
    held_s: float = 0.0
    """The time in which it waited for its model, or for a worker of it."""
    queue_s: float = 0.0
    """The time in which it waited because all workers were busy."""

    def add(self, placement: Placement, now: float, num_tokens: int) -> None:
        """Notes that a worker was chosen, when `num_tokens` of the completion had been sampled."""
        card, source = placement.worker.card, placement.fetch_from
        size = card.kv_block_size or 0
        if len(self.steps) >= MAX_STEPS:
            del self.steps[MAX_STEPS // 2]
        self.steps.append(
            Step(
                card.worker_id,
                now,
                None,
                None,
                placement.policy,
                placement.num_candidates,
                placement.overlap_blocks * size,
                placement.most_held_blocks * size,
                placement.wait_s,
                "" if source is None else source.card.worker_id,
                placement.fetch_blocks * size,
                placement.remote_prefill_s > 0,
                num_tokens,
            )
        )

    def adopted(self, worker_id: str, now: float) -> None:
        """Notes that another router has handed it over, while it was at a worker or, with no name, at none."""
        self.is_adopted = True
        if worker_id:
            self.steps.append(Step(worker_id, now, now))

    def accepted(self, worker_id: str, now: float) -> None:
        """Notes that a worker has accepted it, or keeps it after all."""
        if not self.steps or self.steps[-1].worker_id != worker_id:
            return
        step = self.steps[-1]
        step.left_at = step.heard_at = None
        if step.accepted_at is None:
            step.accepted_at = now

    def refused(self, code: str) -> None:
        """Notes that the last worker has refused it."""
        if self.steps:
            self.steps[-1].refused = str(code)

    def left(self, now: float, heard_at: float | None) -> None:
        """Notes that it continues elsewhere, because its worker is lost, of which this router heard last at that time,
        or because it leaves, without such a time."""
        if self.steps:
            step = self.steps[-1]
            step.left_at, step.heard_at = now, heard_at
            self.is_paused = True

    def continued(self, now: float) -> None:
        """Notes the first token since it was taken from a worker."""
        self.is_paused = False
        if self.steps and self.steps[-1].continued_at is None:
            self.steps[-1].continued_at = now

    def attempts(self, received_at: float) -> list[messages.TraceAttempt]:
        """Returns the steps with times in ms since the request was received."""

        def ms(at: float | None) -> float | None:
            return None if at is None else round(1e3 * (at - received_at), 3)

        return [
            messages.TraceAttempt(
                worker_id=step.worker_id,
                begun_ms=ms(step.begun_at) or 0.0,
                accepted_ms=ms(step.accepted_at),
                continued_ms=ms(step.continued_at),
                policy=step.policy,
                candidates=step.num_candidates,
                held_tokens=step.held_tokens,
                most_held_tokens=step.most_held_tokens,
                wait_ms=round(1e3 * step.wait_s, 3),
                fetch_from=step.fetch_from,
                fetch_tokens=step.fetch_tokens,
                has_leg=step.has_leg,
                tokens=step.num_tokens,
                refused=step.refused,
                left_ms=ms(step.left_at),
                left="" if step.left_at is None else "leaving" if step.heard_at is None else "lost",
                heard_ms=ms(step.heard_at),
            )
            for step in self.steps
        ]
