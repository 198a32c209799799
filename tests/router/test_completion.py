"""A router's knowledge of a completion, from the entries and the snapshots of its workers."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.protocol.wire import block_hash, errors, internal
from tokenbus.router.requests.flights.completion import LOSS_WINDOW_TOKENS, MAX_DEATHS, MAX_LOSSES, PartialCompletion

FIRST = internal.FirstToken(stream_no=7, cached_tokens=3, queue_ms=1.0, prefill_ms=2.0)


def of(*token_ids: int) -> PartialCompletion:
    completion = PartialCompletion()
    for token_id in token_ids:
        completion.append(token_id, seq=0)
    return completion


def running(num_tokens: int, *token_ids: int, logprobs: bytes = b"") -> internal.RunningRequest:
    return internal.RunningRequest(
        id="default:r1",
        attempt=1,
        stream_no=7,
        num_tokens=num_tokens,
        token_ids=block_hash.pack_token_ids(token_ids),
        logprobs=logprobs,
        first_token=FIRST,
    )


def test_a_completion_without_tokens_is_not_resumed() -> None:
    assert PartialCompletion().resume_from(5.0) is None


def test_the_next_worker_gets_every_token_and_the_account_of_the_first() -> None:
    completion = of(11, 12)
    completion.first_token, completion.logprobs = FIRST, bytearray(b"ab")
    assert completion.resume_from(5.0) == internal.RunResume(
        token_ids=block_hash.pack_token_ids([11, 12]),
        logprobs=b"ab",
        cached_tokens=3,
        queue_ms=1.0,
        prefill_ms=2.0,
        elapsed_ms=5.0,
    )


def test_log_probabilities_are_added_in_place() -> None:
    """A completion may have megabytes of them: a copy for each token would take longer than the tokens do."""
    completion = of(11)
    kept = completion.logprobs
    completion.logprobs += b"ab"
    assert completion.restore(running(2, 12, logprobs=b"cd"), seq=1)
    assert completion.logprobs is kept
    assert kept == b"abcd"


def test_the_last_entry_with_tokens_is_that_of_the_present_worker() -> None:
    completion = PartialCompletion()
    completion.append(11, seq=5)
    assert completion.last_seq == 5
    completion.start_attempt()
    assert completion.last_seq == -1


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=12),
    known=st.integers(0, 12),
    asked=st.integers(0, 12),
)
def test_a_snapshot_adds_exactly_what_is_missing_or_is_of_no_use(tokens: list[int], known: int, asked: int) -> None:
    """`asked` tokens were known when the snapshot was requested, which may be another number now."""
    completion = of(*tokens[:known])
    given = tokens[asked:]
    logprobs = bytes(token_id % 251 for token_id in given)
    completion.logprobs = bytearray(token_id % 251 for token_id in tokens[:known])
    is_whole = completion.restore(running(len(tokens), *given, logprobs=logprobs), seq=9)
    has_a_hole = min(known, len(tokens)) < len(tokens) - len(given)
    assert is_whole is not has_a_hole
    if is_whole:
        assert completion.token_ids == array("I", tokens)
        assert completion.logprobs == bytes(token_id % 251 for token_id in tokens)
    else:
        assert completion.token_ids == array("I", tokens[:known])


@pytest.mark.parametrize("claim", [running(1), running(0, 11), running(5, 11, 12)])
def test_a_snapshot_that_contradicts_what_is_known_changes_nothing(claim: internal.RunningRequest) -> None:
    completion = of(21, 22)
    assert not completion.restore(claim, seq=9)
    assert completion.token_ids == array("I", [21, 22])


def test_three_deaths_without_progress_are_blamed_on_the_request() -> None:
    completion = of(1, 2)
    ends = [completion.add_loss("w", is_death=True) for _ in range(MAX_DEATHS)]
    assert ends == [None] * (MAX_DEATHS - 1) + [errors.Code.REQUEST_CRASHES_ENGINE]


def test_workers_that_cut_themselves_off_are_no_deaths_but_too_many_of_them_end_the_request_too() -> None:
    completion = of(1, 2)
    ends = [completion.add_loss("w", is_death=False) for _ in range(MAX_LOSSES)]
    assert ends == [None] * (MAX_LOSSES - 1) + [errors.Code.WORKER_LOST]


def test_a_worker_that_was_only_out_of_reach_is_no_death() -> None:
    completion = of(1, 2)
    for _ in range(5 * MAX_LOSSES):
        assert completion.add_loss("a", is_death=True) is None
        completion.is_back("a")
    assert [completion.add_loss(name, is_death=True) for name in "bc"] == [None, None]
    completion.is_back("a")
    assert completion.add_loss("d", is_death=True) is errors.Code.REQUEST_CRASHES_ENGINE


@pytest.mark.parametrize("is_death", [False, True])
def test_losses_with_enough_tokens_between_them_are_forgotten(is_death: bool) -> None:
    completion = PartialCompletion()
    for _ in range(5 * MAX_LOSSES):
        assert completion.add_loss("w", is_death=is_death) is None
        for token_id in range(LOSS_WINDOW_TOKENS // (MAX_DEATHS - 1)):
            completion.append(token_id, seq=0)
