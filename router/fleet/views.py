"""What a router shows of its workers and of itself to a client that asks; pure."""

from collections.abc import Iterable, Sequence

from tokenbus.protocol.wire import codec, messages
from tokenbus.router.fleet.stats import DecisionStats
from tokenbus.router.fleet.worker import Worker


def card_view(worker: Worker, indexed_blocks: int) -> messages.Card:
    """A worker's card as clients see it: with its load, and with what is known of it here."""
    watched = messages.WorkerTracking(
        events=worker.event_state,
        indexed_blocks=indexed_blocks,
        lost_events=worker.log.num_lost,
        booked=len(worker.bookings),
    )
    return codec.replace(worker.card, state=worker.state, load=worker.load, watched=watched)


def router_view(
    router_id: str,
    stats: DecisionStats,
    workers: Iterable[Worker],
    refused_cards: Sequence[messages.RefusedCard],
    indexed_blocks: int,
    waiting: int,
    now: float,
) -> messages.RouterStats:
    """What a router knows and has done."""
    loads = [worker.load for worker in workers]
    prompts = sum(load.prompt_tokens for load in loads)
    p50_us, p99_us = stats.decision_percentiles_us()
    return messages.RouterStats(
        router_id=router_id,
        decisions=stats.decisions,
        decisions_per_s=round(stats.decisions_per_s(now), 3),
        decision_p50_us=round(p50_us, 1),
        decision_p99_us=round(p99_us, 1),
        waiting=waiting,
        indexed_blocks=indexed_blocks,
        predicted_hit_rate=round(stats.predicted_hit_rate, 4),
        hit_rate=round(sum(load.cached_tokens for load in loads) / prompts, 4) if prompts else 0.0,
        refused_cards=list(refused_cards),
        refused_messages=stats.refused_messages,
    )
