"""A virtual worker computes a prompt for another one, which goes on with its streams meanwhile."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.replay.test_virtual_transfers import BLOCK_S, CPU, TOKEN_S, advance, first_token, prompt
from tokenbus.protocol.wire import messages
from tokenbus.replay import generators
from tokenbus.replay.simulation import Simulation
from tokenbus.replay.virtual_worker import VirtualWorker, own_token
from tokenbus.router.placement.policies import KvAware
from tokenbus.worker.engine.sim.runner import VOCAB_SIZE

DECODE_S = 0.045
"""More than a step of one sequence takes."""


def pair() -> tuple[VirtualWorker, VirtualWorker]:
    return VirtualWorker("p", CPU, role=messages.WorkerRole.PREFILL), VirtualWorker("d", CPU)


def test_the_prompt_is_computed_at_one_worker_and_its_answer_at_the_other() -> None:
    other, own = fleet = pair()
    own.submit_with_remote_prefill(1, prompt(321), 0.0, other)
    assert (other.step_ends_at, own.step_ends_at) == (pytest.approx(320 * TOKEN_S), None)
    advance(list(fleet), 20.0)
    at_s, cached = first_token(own, 1)
    assert cached == 320
    # all but the last block have moved while the others were computed
    assert 320 * TOKEN_S + BLOCK_S < at_s < 320 * TOKEN_S + BLOCK_S + TOKEN_S + DECODE_S
    assert other.num_remote_prefill_tokens == 320
    assert not other.progress
    (remote_prefill,) = [key for _, entry in other.events for key in entry.legs]
    assert remote_prefill == prompt(321).key(1)
    assert not [entry for _, entry in other.events if entry.started or entry.finished]


def test_the_start_of_the_last_block_moves_too() -> None:
    other, own = fleet = pair()
    own.submit_with_remote_prefill(1, prompt(330), 0.0, other)
    advance(list(fleet), 20.0)
    assert first_token(own, 1)[1] == other.num_remote_prefill_tokens == 329


def test_what_the_other_worker_has_already_is_not_computed_there_again() -> None:
    other, own = fleet = pair()
    other.submit(1, prompt(160), 0.0)
    advance(list(fleet), 10.0)
    own.submit_with_remote_prefill(2, prompt(321), 10.0, other)
    advance(list(fleet), 20.0)
    assert other.num_remote_prefill_tokens == 160
    assert first_token(own, 2)[1] == 320


def test_a_prompt_that_is_awaited_counts_as_a_request_and_not_as_work() -> None:
    other, own = fleet = pair()
    own.submit_with_remote_prefill(1, prompt(321), 0.0, other)
    assert (own.events[-1][1].load.waiting, own.events[-1][1].load.queued_prefill_tokens) == (1, 0)
    assert other.events[-1][1].load.queued_prefill_tokens == 320
    advance(list(fleet), 20.0)
    assert own.events[-1][1].load.waiting == 0


def test_streams_are_not_slowed_by_a_prompt_that_is_computed_elsewhere() -> None:
    gaps = []
    for has_remote_prefill in (False, True):
        other, own = fleet = pair()
        own.submit(1, prompt(16, group=9, output=100), 0.0)
        advance(list(fleet), 0.5)
        if has_remote_prefill:
            own.submit_with_remote_prefill(2, prompt(321), 0.5, other)
        else:
            own.submit(2, prompt(321), 0.5)
        advance(list(fleet), 60.0)
        gaps.append(max(gap for steps in own.steps for gap in steps.gaps_s))
    assert gaps[1] < gaps[0] / 3


SPLIT = msgspec.structs.replace(CPU, workers=4, prefill_workers=2, step_target_ms=400.0)


@settings(max_examples=10)
@given(st.integers(0, 5), st.sampled_from((0.0, 10_000.0)), st.integers(1, 3))
def test_every_request_of_a_trace_ends_once_whatever_the_roles(seed: int, delay_ms: float, num_prefill: int) -> None:
    changed = msgspec.structs.replace(SPLIT, prefill_workers=num_prefill, delay_ms=delay_ms, seed=seed, kv_blocks=1_000)
    trace = generators.load("unrelated:requests=30,rate=1,prompt_tokens=900,output_tokens=20", seed)
    simulation = Simulation(changed, KvAware())
    simulation.play(trace)
    simulation.check_integrity()
    assert len(simulation.outcomes) == 30
    assert all(one.worker >= num_prefill for one in simulation.outcomes)
    again = Simulation(changed, KvAware())
    again.play(trace)
    assert again.outcomes == simulation.outcomes


def test_a_fleet_with_roles_has_remote_prefills_and_one_without_has_none() -> None:
    trace = generators.load("unrelated:requests=20,rate=0.5,prompt_tokens=900,output_tokens=20", 1)
    computed = []
    for num_prefill in (0, 2):
        fleet = msgspec.structs.replace(SPLIT, prefill_workers=num_prefill, kv_blocks=1_000)
        simulation = Simulation(fleet, KvAware())
        simulation.play(trace)
        computed.append(simulation.num_remote_prefill_tokens)
    assert computed[0] == 0
    assert computed[1] > 0


def test_no_sequence_and_no_remote_prefill_samples_a_token_of_a_prompt_or_of_another_one() -> None:
    numbers = range(-3 * VOCAB_SIZE, 3 * VOCAB_SIZE)
    tokens = {own_token(number) for number in numbers}
    assert len(tokens) == len(numbers)
    assert min(tokens) >= VOCAB_SIZE
