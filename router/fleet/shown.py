"""What a router shows of its workers and of itself to a client that asks; pure."""

from collections.abc import Iterable, Sequence

from tokenbus.protocol.wire import codec, messages
from tokenbus.router.fleet.tally import Tally
from tokenbus.router.fleet.worker import Worker


def card_of(worker: Worker, indexed_blocks: int) -> messages.Card:
    """A worker's card as clients see it: with its load, and with what is known of it here."""
    watched = messages.Watched(
        events=worker.events,
        indexed_blocks=indexed_blocks,
        lost_events=worker.log.num_lost,
        booked=len(worker.bookings),
    )
    return codec.replaced(worker.card, state=worker.state, load=worker.load, watched=watched)


def view_of(
    router_id: str,
    tally: Tally,
    workers: Iterable[Worker],
    refused_cards: Sequence[messages.RefusedCard],
    indexed_blocks: int,
    waiting: int,
    now: float,
) -> messages.RouterView:
    """What a router knows and has done."""
    loads = [worker.load for worker in workers]
    prompts = sum(load.prompt_tokens for load in loads)
    p50_us, p99_us = tally.decision_us()
    return messages.RouterView(
        router_id=router_id,
        decisions=tally.decisions,
        decisions_per_s=round(tally.per_s(now), 3),
        decision_p50_us=round(p50_us, 1),
        decision_p99_us=round(p99_us, 1),
        waiting=waiting,
        indexed_blocks=indexed_blocks,
        predicted_hit_rate=round(tally.predicted_hit_rate, 4),
        hit_rate=round(sum(load.cached_tokens for load in loads) / prompts, 4) if prompts else 0.0,
        refused_cards=list(refused_cards),
        refused_messages=tally.refused_messages,
    )
