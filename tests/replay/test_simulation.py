"""A simulation loses no request, depends on nothing but its seed, and lets routers see each other."""

from collections import Counter

import msgspec
import pytest

from tokenbus.replay import generators
from tokenbus.replay.offline import play
from tokenbus.replay.settings import ReplaySettings
from tokenbus.replay.simulation import RequestOutcome, Simulation
from tokenbus.router.placement.policies import KvAware, Policy, RoundRobin

FLEET = ReplaySettings(
    trace="", workers=4, kv_blocks=2_048, block_size=16, max_num_seqs=8, max_num_batched_tokens=1_024
)


def outcomes(workload: str, policy: Policy, **changes: object) -> list[RequestOutcome]:
    simulation = Simulation(msgspec.structs.replace(FLEET, **changes), policy)
    simulation.play(generators.load(workload, seed=0))
    simulation.check_integrity()
    return simulation.outcomes


@pytest.mark.parametrize("routers", [1, 3])
def test_every_request_ends_however_many_wait(routers: int) -> None:
    done = outcomes("shared:requests=200,rate=400,shared_tokens=256", KvAware(), routers=routers)
    assert len(done) == 200
    assert all(one.arrived_at <= one.placed_at <= one.first_at <= one.ended_at for one in done)
    assert any(one.placed_at > one.arrived_at for one in done), "nobody had to wait"


def test_the_same_seed_gives_the_same_numbers_to_the_last_byte() -> None:
    settings = ReplaySettings(trace="conversations:requests=100,rate=20", block_size=16, kv_blocks=4_096)
    one, other = (msgspec.json.encode(play(settings, "kv")) for _ in range(2))
    assert one == other


def test_the_router_predicts_what_is_cached() -> None:
    done = outcomes("conversations:requests=150,rate=3,shared_tokens=64", KvAware())
    close = sum(abs(one.predicted_tokens - one.cached_tokens) <= 16 for one in done)
    assert close >= 0.95 * len(done)


def test_kv_computes_less_than_half_of_what_round_robin_computes_for_conversations() -> None:
    workload = "conversations:requests=200,rate=6,shared_tokens=64,turns=10"
    computed = [
        sum(one.request.prompt_tokens - one.cached_tokens for one in outcomes(workload, policy))
        for policy in (KvAware(), RoundRobin())
    ]
    assert computed[0] < 0.5 * computed[1]


def test_three_routers_do_not_send_a_common_prefix_to_one_worker() -> None:
    """All prompts have a common prefix and arrive in bursts, and each router learns of the others' placements late."""
    workload = "shared:requests=200,rate=60,burst=12,groups=1,shared_tokens=256,prompt_tokens=64"
    done = outcomes(workload, KvAware(), routers=3, delay_ms=20.0)
    counts = Counter(one.worker for one in done)
    assert max(counts.values()) < 0.35 * len(done), counts


def test_a_worker_of_half_the_speed_gets_less() -> None:
    workload = "unrelated:requests=200,rate=40,prompt_tokens=256,output_tokens=32"
    counts = Counter(one.worker for one in outcomes(workload, KvAware(), speeds=(1.0, 1.0, 0.4, 0.4)))
    assert counts[2] + counts[3] < 0.8 * (counts[0] + counts[1]), counts
