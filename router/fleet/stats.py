"""Counts a router's placement decisions, and reports them to clients that ask."""

from collections import deque
from collections.abc import Iterable, Sequence

from tokenbus.protocol.averages import DecayingRate
from tokenbus.protocol.wire import messages
from tokenbus.router.placement.placement import Placement
from tokenbus.router.workers.worker import Worker

_MAX_SAMPLES = 1_024
"""The number of decisions whose durations are kept."""


class DecisionStats:
    """Totals since the router started, and the durations of its latest decisions."""

    def __init__(self) -> None:
        self.decisions = 0
        self.prompt_tokens = 0
        self.predicted_tokens = 0
        self.fetch_tokens = 0
        self.remote_prefills = 0
        self.refused_messages = 0
        self.continued = 0
        self.passed_on = 0
        self._durations_s: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self._rate = DecayingRate()

    def __repr__(self) -> str:
        return f"<DecisionStats {self.decisions} decisions>"

    def record_placement(self, prompt_tokens: int, placement: Placement, now: float) -> None:
        """Counts a placed request, how many of its prompt's tokens are predicted to be cached, and how many of these
        its worker must fetch first."""
        self.decisions += 1
        self.remote_prefills += placement.has_remote_prefill
        self.prompt_tokens += prompt_tokens
        self.predicted_tokens += placement.overlap_tokens + placement.fetch_tokens
        self.fetch_tokens += placement.fetch_tokens
        self._rate.add(now)

    def record_decision_time(self, seconds: float) -> None:
        """Records how long one decision took, from a prompt's token ids to its booking."""
        self._durations_s.append(seconds)

    def report(
        self,
        router_id: str,
        workers: Iterable[Worker],
        refused_cards: Sequence[messages.RefusedCard],
        indexed_blocks: int,
        waiting: int,
        now: float,
    ) -> messages.RouterStats:
        """Returns this router's entry in the reply to `models`."""
        loads = [worker.load for worker in workers]
        prompts = sum(load.prompt_tokens for load in loads)
        times_s = sorted(self._durations_s) or [0.0]
        placed_tokens = self.prompt_tokens or 1
        return messages.RouterStats(
            router_id=router_id,
            decisions=self.decisions,
            decisions_per_s=round(self._rate.per_s(now), 3),
            decision_p50_us=round(times_s[len(times_s) // 2] * 1e6, 1),
            decision_p99_us=round(times_s[len(times_s) * 99 // 100] * 1e6, 1),
            waiting=waiting,
            indexed_blocks=indexed_blocks,
            predicted_hit_rate=round(self.predicted_tokens / placed_tokens, 4),
            hit_rate=round(sum(load.cached_tokens for load in loads) / prompts, 4) if prompts else 0.0,
            refused_cards=list(refused_cards),
            refused_messages=self.refused_messages,
            continued=self.continued,
            passed_on=self.passed_on,
            predicted_fetch_rate=round(self.fetch_tokens / placed_tokens, 4),
            legs=self.remote_prefills,
        )
