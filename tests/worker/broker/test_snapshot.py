"""A snapshot is split into parts that a broker takes and that together hold everything exactly once."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenbus.protocol.wire import codec, internal, limits, messages
from tokenbus.worker.broker.event_log import (
    HASHES_PER_PART,
    REQUESTS_PER_PART,
    RUNS_PER_PART,
    TOKEN_BYTES_PER_PART,
    split_snapshot,
)

LOAD = messages.Load(running=3, used_blocks=7)


def requests(count: int) -> list[internal.RunningRequest]:
    return [internal.RunningRequest(id=f"acme:{number}", attempt=number, stream_no=number) for number in range(count)]


def runs(*lengths: int) -> list[internal.BlockRun]:
    """Runs of so many blocks, all of whose hashes differ."""
    numbers = itertools.count(1)
    return [
        internal.BlockRun(parent=next(numbers), hashes=list(itertools.islice(numbers, length))) for length in lengths
    ]


def made(running: list[internal.RunningRequest], blocks: list[internal.BlockRun]) -> list[internal.SnapshotPart]:
    parts = split_snapshot("w1", "5-ab", 17, running, blocks, LOAD)
    assert [(part.part, part.parts) for part in parts] == [(number, len(parts)) for number in range(len(parts))]
    assert all((part.worker_id, part.epoch, part.seq, part.load) == ("w1", "5-ab", 17, LOAD) for part in parts)
    return parts


def pairs_of(runs: list[internal.BlockRun]) -> list[tuple[int, int]]:
    return [pair for one in runs for pair in zip([one.parent, *one.hashes], one.hashes, strict=False)]


def sizes(parts: list[internal.SnapshotPart]) -> list[list[int]]:
    """The lengths of the runs of each part."""
    return [[len(one.hashes) for one in part.runs] for part in parts]


def test_an_empty_snapshot_has_one_part() -> None:
    (part,) = made([], [])
    assert (part.running, part.runs) == ([], [])


@pytest.mark.parametrize(
    ("count", "lengths"),
    [
        (1, [1]),
        (REQUESTS_PER_PART, [REQUESTS_PER_PART]),
        (REQUESTS_PER_PART + 1, [REQUESTS_PER_PART, 1]),
        (2 * REQUESTS_PER_PART + 1, [REQUESTS_PER_PART, REQUESTS_PER_PART, 1]),
    ],
)
def test_requests_are_split_at_the_limit_of_a_part(count: int, lengths: list[int]) -> None:
    parts = made(requests(count), [])
    assert [len(part.running) for part in parts] == lengths
    assert [request for part in parts for request in part.running] == requests(count)


def test_a_run_as_long_as_a_part_stays_whole_and_one_block_more_is_split() -> None:
    assert sizes(made([], runs(HASHES_PER_PART))) == [[HASHES_PER_PART]]
    (long,) = runs(HASHES_PER_PART + 1)
    first, second = made([], [long])
    assert (first.runs[0].parent, first.runs[0].hashes) == (long.parent, long.hashes[:-1])
    assert (second.runs[0].parent, second.runs[0].hashes) == (long.hashes[-2], long.hashes[-1:])


def test_runs_that_just_fit_one_part_are_in_one_and_one_block_more_opens_another() -> None:
    assert sizes(made([], runs(HASHES_PER_PART - 1, 1))) == [[HASHES_PER_PART - 1, 1]]
    assert sizes(made([], runs(HASHES_PER_PART - 1, 2))) == [[HASHES_PER_PART - 1], [2]]


def test_as_many_runs_as_a_part_may_have_are_in_one_and_one_more_opens_another() -> None:
    assert sizes(made([], runs(*[1] * RUNS_PER_PART))) == [[1] * RUNS_PER_PART]
    assert sizes(made([], runs(*[1] * (RUNS_PER_PART + 1)))) == [[1] * RUNS_PER_PART, [1]]


def test_the_largest_part_of_blocks_stays_below_the_limit_in_bytes() -> None:
    """With hashes that take nine bytes each."""
    numbers = itertools.count(2**64 - 1, -1)
    rest = HASHES_PER_PART - RUNS_PER_PART + 1
    worst = [
        internal.BlockRun(parent=next(numbers), hashes=list(itertools.islice(numbers, length)))
        for length in [1] * (RUNS_PER_PART - 1) + [rest]
    ]
    (part,) = made([], worst)
    assert len(codec.encode(part)) <= limits.PART_BYTES


@pytest.mark.parametrize(
    ("num_bytes", "sizes"),
    [
        (TOKEN_BYTES_PER_PART, [TOKEN_BYTES_PER_PART]),
        (TOKEN_BYTES_PER_PART + 4, [TOKEN_BYTES_PER_PART, 4]),
        (2 * TOKEN_BYTES_PER_PART + 4, [TOKEN_BYTES_PER_PART, TOKEN_BYTES_PER_PART, 4]),
    ],
)
def test_tokens_that_do_not_fit_one_part_follow_one_another_in_several(num_bytes: int, sizes: list[int]) -> None:
    (plain,) = requests(1)
    parts = made([msgspec.structs.replace(plain, token_ids=bytes(num_bytes))], [])
    assert [[len(one.token_ids) for one in part.running] for part in parts] == [[size] for size in sizes]
    assert {msgspec.structs.replace(one, token_ids=b"").id for part in parts for one in part.running} == {plain.id}


@given(
    lengths=st.lists(
        st.tuples(*[st.one_of(st.integers(0, 99), st.integers(0, 3 * TOKEN_BYTES_PER_PART))] * 2), max_size=9
    )
)
@settings(max_examples=40)
def test_the_tokens_of_each_request_are_those_of_its_items_and_no_part_is_too_large(
    lengths: list[tuple[int, int]],
) -> None:
    numbers = itertools.cycle(range(256))
    running = [
        msgspec.structs.replace(
            plain,
            token_ids=bytes(itertools.islice(numbers, token_bytes)),
            logprobs=bytes(itertools.islice(numbers, logprob_bytes)),
        )
        for plain, (token_bytes, logprob_bytes) in zip(requests(len(lengths)), lengths, strict=True)
    ]
    parts = made(running, [])
    for whole in running:
        items = [one for part in parts for one in part.running if one.id == whole.id]
        assert b"".join(one.token_ids for one in items) == whole.token_ids
        assert b"".join(one.logprobs for one in items) == whole.logprobs
    for part in parts:
        assert sum(len(one.token_ids) + len(one.logprobs) for one in part.running) <= TOKEN_BYTES_PER_PART


def test_the_largest_part_of_requests_stays_below_the_limit_in_bytes() -> None:
    key = f"{'=00' * limits.MAX_NAME_BYTES}:{'x' * limits.MAX_ID_BYTES}"
    top = 2**32 - 1
    account = internal.FirstToken(stream_no=top, cached_tokens=top, queue_ms=0.1, prefill_ms=0.1)
    largest = internal.RunningRequest(
        id=key,
        attempt=top,
        num_tokens=1,
        stream_no=top,
        token_ids=bytes(TOKEN_BYTES_PER_PART // REQUESTS_PER_PART),
        first_token=account,
    )
    (part,) = made([largest] * REQUESTS_PER_PART, [])
    assert len(codec.encode(part)) <= limits.PART_BYTES


@given(
    num_requests=st.integers(0, 600),
    lengths=st.lists(
        st.one_of(st.integers(1, 9), st.integers(HASHES_PER_PART - 2, 2 * HASHES_PER_PART + 2)), max_size=6
    ),
    singles=st.integers(0, 2 * RUNS_PER_PART + 2),
)
@settings(max_examples=40)
def test_everything_is_in_exactly_one_part_and_no_part_is_too_large(
    num_requests: int, lengths: list[int], singles: int
) -> None:
    blocks = runs(*lengths, *[1] * singles)
    parts = made(requests(num_requests), blocks)
    assert [request for part in parts for request in part.running] == requests(num_requests)
    assert pairs_of([one for part in parts for one in part.runs]) == pairs_of(blocks)
    for part in parts:
        assert len(part.running) <= REQUESTS_PER_PART
        assert len(part.runs) <= RUNS_PER_PART
        assert sum(len(one.hashes) for one in part.runs) <= HASHES_PER_PART
        assert all(one.hashes for one in part.runs)
        assert not (part.running and part.runs)
