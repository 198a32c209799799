"""A prompt counts once for all answers to it that one worker gives, and a client that says so wrongly gains nothing."""

import pytest

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


def ended(one: WorkerStream) -> messages.Chunk:
    last = engine_output.Output(token_ids=[1, 2], text="ab", finish_reason=messages.FinishReason.LENGTH, usage=USAGE)
    chunk = one.chunk(last)
    assert chunk is not None
    one.shed()
    return chunk


def note(one: WorkerStream, *open_streams: WorkerStream | None) -> None:
    """Has a stream look for the first answer to its prompt among others."""
    one.note_first({other.key: other for other in open_streams if other is not None}.get)


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_prompt_counts_with_its_first_answer_in_the_terminal_and_for_the_guardian(has_ended: bool) -> None:
    first, copy = stream("r-1", copy_of="r-1"), stream("r-2", copy_of="r-1")
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
        stream("r-2", (1, 2, 4)),
        stream("r-2", key_id="k2"),
        stream("r-2", params=GenerationParams(cache_salt="other")),
        stream("r-2", adapters=[internal.RunAdapter(digest="d", scale=1.0)]),
        stream("r-1"),
        None,
    ],
    ids=["prompt", "key", "salt", "adapter", "itself", "unknown"],
)
def test_another_prompt_or_key_than_the_first_ones_counts(other: WorkerStream | None) -> None:
    one = stream("r-1", copy_of="r-2" if other is None else other.key.partition(":")[2])
    note(one, other)
    assert ended(one).usage == USAGE


def test_what_a_router_has_found_to_be_counted_elsewhere_does_not_count_here() -> None:
    assert ended(stream("r-2", counts_prompt=False)).usage == COPY


def test_an_error_in_place_of_a_chunk_counts_no_prompt_either() -> None:
    copy = stream("r-2", copy_of="r-1")
    note(copy, stream("r-1"))
    terminal = copy.fail()
    assert terminal.error
    assert terminal.error.code is errors.Code.INTERNAL
    assert terminal.usage == messages.Usage(prompt_tokens=0, completion_tokens=0, total_tokens=0, cached_tokens=0)
