"""Says why a worker was chosen, to a client that asks; pure."""

import math
from collections.abc import Sequence

from tokenbus.protocol.wire import messages
from tokenbus.router.fleet.worker import Worker
from tokenbus.router.placement.policies import View


def explain(
    chosen: Worker, policy: str, workers: Sequence[Worker], view: View, costs: Sequence[float]
) -> messages.RoutingReport:
    """What was known of all that could have been chosen, each with its place in `view` and `costs`."""
    return messages.RoutingReport(
        chosen=chosen.card.worker_id,
        policy=policy,
        candidates=[_candidate(worker, view, at, costs[at]) for at, worker in enumerate(workers)],
    )


def _candidate(worker: Worker, view: View, at: int, cost: float) -> messages.Candidate:
    size = max(1.0, float(view.block_size[at]))
    to_compute = float(view.prefill_tokens[at]) + max(0.0, view.prompt_tokens - float(view.overlap_tokens[at]))
    return messages.Candidate(
        worker_id=worker.card.worker_id,
        cost=round(cost, 3),
        overlap_blocks=int(view.overlap_tokens[at] / size),
        prefill_blocks=math.ceil(to_compute / size),
        decode_blocks=int(view.used_blocks[at]),
        state=worker.state,
    )
