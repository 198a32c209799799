"""Blocks move between virtual workers in the time that their bytes take, while both ends compute."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.protocol.wire import internal
from tokenbus.replay import generators
from tokenbus.replay.settings import ReplaySettings
from tokenbus.replay.simulation import Simulation
from tokenbus.replay.traces import TracedRequest
from tokenbus.replay.virtual_worker import VirtualWorker
from tokenbus.router.placement.policies import LeastLoaded

CPU = ReplaySettings(
    trace="",
    kv_blocks=400,
    block_size=16,
    timing="cpu-0.5b-q8_0",
    max_num_seqs=8,
    max_num_batched_tokens=512,
    kv_token_bytes=10_000,
    transfer_mb_per_s=16.0,
)
BLOCK_S = 0.01
"""The time in which a block moves: 16 tokens of 10 kB at 16 MB/s."""
TOKEN_S = 0.0083


def prompt(tokens: int, group: int = 1, output: int = 1) -> TracedRequest:
    ids = tuple(range(1_000 * group, 1_000 * group + -(-tokens // 16)))
    return TracedRequest(0.0, tokens, output, ids, 16)


def workers(count: int) -> list[VirtualWorker]:
    return [VirtualWorker(f"w{number}", CPU) for number in range(count)]


def advance(fleet: list[VirtualWorker], now: float) -> None:
    """Lets time pass in the order of what happens, as the simulation does."""
    while (at := min((one.next_at for one in fleet if one.next_at is not None), default=now + 1)) <= now:
        for one in fleet:
            one.advance(at, at)
    for one in fleet:
        one.advance(now, now)
        one.check_integrity()


def fetches(worker: VirtualWorker) -> list[internal.Fetched]:
    return [one for _, entry in worker.events for one in entry.fetches]


def first_token(worker: VirtualWorker, number: int) -> tuple[float, int | None]:
    found = next(one for one in worker.progress if one.number == number)
    return found.at_s, found.cached_tokens


def test_a_fetched_prefix_is_cached_after_the_time_that_its_bytes_take() -> None:
    holder, receiver = fleet = workers(2)
    holder.submit(1, prompt(161), 0.0)
    advance(fleet, 10.0)
    receiver.submit(2, prompt(161), 10.0, holder)
    advance(fleet, 20.0)
    at_s, cached = first_token(receiver, 2)
    assert (at_s, cached) == (pytest.approx(10.0 + 10 * BLOCK_S + TOKEN_S + 0.0307, abs=0.04), 160)
    (fetched,) = fetches(receiver)
    assert (fetched.worker_id, fetched.fetched_tokens, fetched.fetched_bytes) == ("w0", 160, 1_600_000)
    assert fetched.fetch_ms == pytest.approx(100.0)


def test_only_what_the_receiver_lacks_moves() -> None:
    holder, receiver = fleet = workers(2)
    holder.submit(1, prompt(161), 0.0)
    receiver.submit(2, prompt(65), 0.0)
    advance(fleet, 10.0)
    receiver.submit(3, prompt(161), 10.0, holder)
    advance(fleet, 20.0)
    assert [one.fetched_tokens for one in fetches(receiver)] == [96]
    assert first_token(receiver, 3)[1] == 160


def test_a_receiver_waits_for_half_of_the_time_that_computing_takes() -> None:
    slow = msgspec.structs.replace(CPU, transfer_mb_per_s=1.0)  # a block moves in 0.16 s and is computed in 0.13 s
    holder, receiver = fleet = [VirtualWorker(name, slow) for name in ("w0", "w1")]
    holder.submit(1, prompt(161), 0.0)
    advance(fleet, 10.0)
    receiver.submit(2, prompt(161), 10.0, holder)
    advance(fleet, 20.0)
    (fetched,) = fetches(receiver)
    assert fetched.fetched_tokens == 4 * 16  # in 0.67 s
    assert first_token(receiver, 2)[1] == 4 * 16


def test_others_are_computed_while_blocks_come() -> None:
    holder, receiver = fleet = workers(2)
    holder.submit(1, prompt(1_601), 0.0)
    advance(fleet, 100.0)
    receiver.submit(2, prompt(1_601), 100.0, holder)  # for a second
    receiver.submit(3, prompt(33, group=2), 100.0)
    advance(fleet, 200.0)
    assert first_token(receiver, 3)[0] < 100.0 + 100 * BLOCK_S < first_token(receiver, 2)[0]


def test_a_worker_gives_to_two_at_a_time_one_after_the_other() -> None:
    holder, *receivers = fleet = workers(4)
    holder.submit(1, prompt(161), 0.0)
    advance(fleet, 10.0)
    for number, receiver in enumerate(receivers):
        receiver.submit(2 + number, prompt(161), 10.0, holder)
    advance(fleet, 20.0)
    found = [(one.fetched_tokens, round(one.fetch_ms)) for receiver in receivers for one in fetches(receiver)]
    assert found == [(160, 100), (160, 200), (0, 0)]
    assert [first_token(receiver, 2 + number)[1] for number, receiver in enumerate(receivers)] == [160, 160, 0]


def test_what_is_sent_may_be_evicted_meanwhile() -> None:
    small = msgspec.structs.replace(CPU, kv_blocks=20, transfer_mb_per_s=8.0)
    holder, receiver = fleet = [VirtualWorker(name, small) for name in ("w0", "w1")]
    holder.submit(1, prompt(161), 0.0)
    advance(fleet, 10.0)
    receiver.submit(2, prompt(161), 10.0, holder)  # 0.2 s
    holder.submit(3, prompt(300, group=2), 10.01)  # needs all blocks
    advance(fleet, 30.0)
    assert first_token(receiver, 2)[1] == 160
    assert [one for _, entry in holder.events for one in entry.removed]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 200), st.integers(0, 2), st.floats(0, 0.5)),
        min_size=1,
        max_size=12,
    )
)
def test_whatever_is_fetched_from_wherever_every_request_ends_and_every_pool_is_whole(
    asked: list[tuple[int, int, int, int, float]],
) -> None:
    small = msgspec.structs.replace(CPU, kv_blocks=30)
    fleet, now = [VirtualWorker(f"w{number}", small) for number in range(3)], 0.0
    for number, (receiver, holder, tokens, group, after_s) in enumerate(asked):
        now += after_s
        advance(fleet, now)
        source = fleet[holder] if holder < 3 and holder != receiver else None
        fleet[receiver].submit(number, prompt(tokens, group, output=3), now, source)
    advance(fleet, now + 1_000.0)
    ended = [one.number for worker in fleet for one in worker.progress if one.finish_reason is not None]
    assert sorted(ended) == list(range(len(asked)))
    asked_for = sum(holder < 3 and holder != receiver for receiver, holder, *_ in asked)
    assert sum(len(fetches(worker)) for worker in fleet) == asked_for
    assert all(worker.next_at is None for worker in fleet)


def test_a_fleet_that_fetches_computes_less() -> None:
    trace = generators.load("conversations:requests=200,rate=2,shared_tokens=64,turns=10", seed=0)
    settings = msgspec.structs.replace(CPU, workers=4, kv_blocks=2_048, transfer_mb_per_s=60.0)
    cached = []
    for token_bytes in (0, 12_300):
        simulation = Simulation(msgspec.structs.replace(settings, kv_token_bytes=token_bytes), LeastLoaded())
        simulation.play(trace)
        simulation.check_integrity()
        cached.append(sum(one.cached_tokens for one in simulation.outcomes))
        assert (simulation.num_fetched_tokens > 0) == (token_bytes > 0)
    assert cached[1] > 1.2 * cached[0]
