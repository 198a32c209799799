"""A fleet in virtual time: nothing is lost, nothing depends on anything but the seed, and routers see each other."""

from collections import Counter

import msgspec
import pytest

from tokenbus.replay import generators
from tokenbus.replay.offline import ReplaySettings, play
from tokenbus.replay.simulation import RequestOutcome, Simulation, SimulationSettings
from tokenbus.replay.virtual_worker import VirtualWorkerSettings
from tokenbus.router.placement.policies import KvAware, Policy, RoundRobin
from tokenbus.worker.engine.sim.timing import PRESETS

MACHINE = VirtualWorkerSettings(
    kv_blocks=2_048, block_size=16, timing=PRESETS["dynamo"], max_num_seqs=8, max_num_batched_tokens=1_024
)


def outcomes(workload: str, policy: Policy, **changes: object) -> list[RequestOutcome]:
    settings = SimulationSettings(workers=(MACHINE,) * 4, policy=policy)._replace(**changes)  # type: ignore[arg-type]
    simulation = Simulation(settings)
    simulation.play(generators.generate(*generators.parse(workload), settings.seed))
    simulation.check_integrity()
    return simulation.outcomes


@pytest.mark.parametrize("routers", [1, 3])
def test_every_request_comes_to_its_end_however_many_wait(routers: int) -> None:
    done = outcomes("shared:requests=400,rate=400,shared_tokens=256", KvAware(), num_routers=routers)
    assert len(done) == 400
    assert all(one.arrived_at <= one.placed_at <= one.first_at <= one.ended_at for one in done)
    assert any(one.placed_at > one.arrived_at for one in done), "nobody had to wait"


def test_the_same_seed_gives_the_same_numbers_to_the_last_byte() -> None:
    settings = ReplaySettings(trace="conversations:requests=200,rate=20", block_size=16, kv_blocks=4_096)
    one, other = (msgspec.json.encode(play(settings, "kv")) for _ in range(2))
    assert one == other


def test_what_the_router_expects_is_what_is_cached() -> None:
    done = outcomes("conversations:requests=300,rate=3,shared_tokens=64", KvAware())
    close = sum(abs(one.predicted_tokens - one.cached_tokens) <= 16 for one in done)
    assert close >= 0.95 * len(done)


def test_conversations_are_computed_less_than_half_as_often_as_in_turns() -> None:
    workload = "conversations:requests=400,rate=6,shared_tokens=64,turns=10"
    computed = [
        sum(one.request.prompt_tokens - one.cached_tokens for one in outcomes(workload, policy))
        for policy in (KvAware(), RoundRobin())
    ]
    assert computed[0] < 0.5 * computed[1]


def test_of_three_routers_none_herds_what_they_have_in_common_onto_one_worker() -> None:
    """All prompts begin alike and come in bursts; each router hears of the others' placements late."""
    workload = "shared:requests=400,rate=60,burst=12,groups=1,shared_tokens=256,prompt_tokens=64"
    done = outcomes(workload, KvAware(), num_routers=3, delay_s=0.02)
    counts = Counter(one.worker for one in done)
    assert max(counts.values()) < 0.35 * len(done), counts


def test_a_worker_of_half_the_speed_gets_less() -> None:
    workers = (MACHINE, MACHINE, MACHINE._replace(speed=0.4), MACHINE._replace(speed=0.4))
    done = outcomes("unrelated:requests=400,rate=40,prompt_tokens=256,output_tokens=32", KvAware(), workers=workers)
    counts = Counter(one.worker for one in done)
    assert counts[2] + counts[3] < 0.8 * (counts[0] + counts[1]), counts
