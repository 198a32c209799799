"""A prompt counts once for all answers to it that one worker gives, and a client that says so wrongly gains nothing."""

import pytest

from tests.support.published import chunk_of
from tokenbus.protocol.wire import block_hash, codec, errors, internal, messages
from tokenbus.protocol.wire.params import GenerationParams
from tokenbus.worker.contract import engine_output
from tokenbus.worker.streams.stream import WorkerStream

USAGE = messages.Usage(prompt_tokens=3, completion_tokens=2, total_tokens=5, cached_tokens=1, reasoning_tokens=1)
COPY = messages.Usage(prompt_tokens=0, completion_tokens=2, total_tokens=2, cached_tokens=0, reasoning_tokens=1)


def stream(request_id: str, prompt: tuple[int, ...] = (1, 2, 3), **fields: object) -> WorkerStream:
    run = internal.Run(
        request_id=f"acme:{request_id}",
        attempt=0,
        epoch="1-a",
        router_id="router",
        reply="_INBOX.a",
        encoding=codec.Encoding.JSON,
        token_ids=block_hash.pack_token_ids(prompt),
        params=GenerationParams(cache_salt="salt"),
        key_id="k1",
    )
    return WorkerStream(codec.replace(run, **fields), "demo", "worker-1", now=5.0)


def begun(request_id: str, prompt: tuple[int, ...] = (1, 2, 3), **fields: object) -> WorkerStream:
    """Returns a stream that has a token."""
    one = stream(request_id, prompt, **({"copy_of": request_id} | fields))
    first = engine_output.FirstTokenStats(queue_ms=0.0, prefill_ms=1.0, cached_tokens=0)
    chunk_of(one, engine_output.Output(token_ids=[1], text="a", first_token=first))
    return one


def ended(one: WorkerStream) -> messages.Chunk:
    last = engine_output.Output(token_ids=[1, 2], text="ab", finish_reason=messages.FinishReason.LENGTH, usage=USAGE)
    chunk = chunk_of(one, last)
    assert chunk is not None
    one.shed()
    return chunk


def note(one: WorkerStream, *open_streams: WorkerStream | None) -> None:
    """Has a stream look for the first answer to its prompt among others."""
    one.note_first({other.key: other for other in open_streams if other is not None}.get)


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_prompt_counts_with_its_first_answer_in_the_terminal_and_for_the_guardian(has_ended: bool) -> None:
    first, copy = begun("r-1"), stream("r-2", copy_of="r-1")
    if has_ended:
        assert ended(first).usage == USAGE
    note(copy, first)
    told = ended(copy)
    assert told.usage == COPY
    report = copy.end_report(told)
    assert (report.prompt_tokens, report.cached_tokens, report.completion_tokens) == (0, 0, 2)
    another = stream("r-3", copy_of="r-2")
    note(another, copy)
    assert ended(another).usage == USAGE, "it names no first answer, but a copy"


@pytest.mark.parametrize(
    "other",
    [
        begun("r-2", (1, 2, 4)),
        begun("r-2", key_id="k2"),
        begun("r-2", params=GenerationParams(cache_salt="other")),
        begun("r-2", adapters=[internal.RunAdapter(digest="d", scale=1.0)]),
        begun("r-1"),
        stream("r-2", copy_of="r-2"),
        None,
    ],
    ids=["prompt", "key", "salt", "adapter", "itself", "not computed", "unknown"],
)
def test_another_prompt_or_key_than_the_first_ones_counts(other: WorkerStream | None) -> None:
    one = stream("r-1", copy_of="r-2" if other is None else other.key.partition(":")[2])
    note(one, other)
    assert ended(one).usage == USAGE


def test_a_prompt_that_ended_in_an_error_is_paid_by_nobody_and_so_counts_with_each_copy() -> None:
    first, copy = begun("r-1"), stream("r-2", copy_of="r-1")
    first.fail()
    note(copy, first)
    assert ended(copy).usage == USAGE


def test_a_prompt_that_is_computed_anew_counts() -> None:
    copy = stream("r-2", copy_of="r-1", params=GenerationParams(cache_salt="salt", cache_prompt=False))
    note(copy, begun("r-1"))
    assert ended(copy).usage == USAGE


def test_a_prompt_counts_with_another_for_as_many_answers_as_one_request_may_want() -> None:
    first = begun("r-1")
    copies = [stream(f"r-{number}", copy_of="r-1") for number in range(2, 131)]
    for copy in copies:
        note(copy, first)
    assert [ended(copy).usage for copy in copies] == [COPY] * 127 + [USAGE] * 2


def test_an_error_in_place_of_a_chunk_counts_no_prompt_either() -> None:
    copy = stream("r-2", copy_of="r-1")
    note(copy, begun("r-1"))
    terminal = copy.fail()
    assert terminal.error
    assert terminal.error.code is errors.Code.INTERNAL
    assert terminal.usage == messages.Usage(prompt_tokens=0, completion_tokens=0, total_tokens=0, cached_tokens=0)
