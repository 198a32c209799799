"""A stream publishes the log probabilities of its prompt before the first token, in chunks of a bounded size."""

import math

import pytest

from tests.support.published import chunk_of, opening, publish, replay
from tests.worker.streams.test_stream import PIECES, USAGE
from tokenbus.protocol.wire import block_hash, codec, internal, messages
from tokenbus.protocol.wire.params import GenerationParams
from tokenbus.worker.contract import engine_output, prompt_logprobs
from tokenbus.worker.streams import prompt_scores
from tokenbus.worker.streams.stream import WorkerStream

PROMPT = [1, 3, 2, 1, 3, 3, 1, 2]


def stream(**fields: object) -> WorkerStream:
    asked = {"prompt_logprobs": 2} | fields
    resume_from = asked.pop("resume_from", None)
    run = internal.Run(
        request_id="acme:r-1",
        attempt=1,
        epoch="1-a",
        router_id="router",
        reply="_INBOX.a",
        encoding=codec.Encoding.JSON,
        token_ids=block_hash.pack_token_ids(PROMPT),
        params=GenerationParams(**asked),  # type: ignore[arg-type]
        resume_from=resume_from,  # type: ignore[arg-type]
    )
    return WorkerStream(run, "demo", "worker-1", now=5.0, token_bytes=PIECES)


def scores(start: int, end: int) -> engine_output.Output:
    packed = [
        prompt_logprobs.pack(PROMPT[place], -place / 4, place, [(1, -0.25), (3, -0.5)])
        if place
        else prompt_logprobs.pack_first(PROMPT[0], 2)
        for place in range(start, end)
    ]
    return engine_output.Output(prompt_offset=start, num_scored=end - start, prompt_logprobs=b"".join(packed))


def ids(chunks: list[messages.Chunk]) -> list[tuple[int | None, list[int]]]:
    return [(one.prompt_offset or 0, [each.id for each in one.prompt_logprobs or ()]) for one in chunks]


def test_each_token_of_the_prompt_has_its_log_probability_its_rank_and_the_likeliest_ones() -> None:
    (chunk,) = publish(stream(), scores(0, 3), 100_000)
    first, second, _ = chunk.prompt_logprobs or ()
    assert (first.id, first.text, first.bytes, first.logprob, first.rank, first.top) == (1, "a", [97], None, None, [])
    assert (second.id, second.text, second.logprob, second.rank) == (3, "b", -0.25, 1)
    assert [(one.id, one.text, one.logprob) for one in second.top] == [(1, "a", -0.25), (3, "b", -0.5)]
    assert (chunk.tokens, chunk.text, chunk.worker_id, chunk.prompt_offset) == (0, "", "worker-1", 0)


def test_the_size_of_a_chunk_is_bounded_and_a_chunk_has_at_least_one_token() -> None:
    assert [len(one[1]) for one in ids(publish(stream(), scores(0, 8), 1))] == [1] * 8
    chunks = publish(stream(), scores(0, 8), 1_000)
    assert all(len(codec.encode(one, codec.Encoding.JSON)) < 1_200 for one in chunks)
    assert [token for _, tokens in ids(chunks) for token in tokens] == PROMPT
    assert len(chunks) > 1


def test_the_size_of_an_entry_is_never_underestimated() -> None:
    hostile = [b"\x00" * 200, "\u00e9".encode() * 100, b"\xff" * 256]
    buffer = prompt_scores.PromptScoreBuffer(3, 0, hostile)
    worst = -1.2345678e-30
    buffer.append(prompt_logprobs.pack(0, worst, 10**6, [(0, worst), (1, worst), (2, worst)]) * 2)
    for limit in (1, 10_000, 20_000, 40_000):
        for part in buffer.parts(0, limit):
            size = len(codec.encode(messages.Chunk(id="", prompt_logprobs=part.logprobs), codec.Encoding.JSON))
            assert size <= limit + 200 or len(part.logprobs) == 1


def test_every_chunk_says_how_far_the_prompt_is_scored() -> None:
    one = stream()
    head = opening(one)
    assert head is not None
    publish(one, scores(0, 5), 100_000)
    token = chunk_of(one, engine_output.Output(token_ids=[1], text="a"))
    assert token is not None
    assert (head.prompt_offset, token.prompt_offset, token.prompt_logprobs or None) == (0, 5, None)
    assert "prompt_offset" not in codec.encode(opening(stream(prompt_logprobs=None)), codec.Encoding.JSON).decode()


@pytest.mark.parametrize(("prompt_offset", "expected"), [(0, 0), (6, 6), (8, 8)])
def test_lost_ones_are_published_again_from_any_token_on(prompt_offset: int, expected: int) -> None:
    one = stream()
    publish(one, scores(0, 8), 100_000)
    chunk_of(one, engine_output.Output(token_ids=[1], text="a"))
    again = list(replay(one, 0, 100_000, prompt_offset))
    assert [token for _, tokens in ids(again) for token in tokens] == PROMPT[expected:]
    assert again[-1].tokens == 1
    assert all(chunk.offset == 0 for chunk in again)
    assert [chunk.tokens for chunk in replay(one, 0, 100_000)] == [1]


def test_a_whole_answer_has_them_in_its_terminal() -> None:
    one = stream(stream=False, prompt_logprobs_from=2)
    assert publish(one, scores(2, 8), 100) == []
    last = chunk_of(
        one, engine_output.Output(finish_reason=messages.FinishReason.LENGTH, token_ids=[1], text="a", usage=USAGE)
    )
    assert last is not None
    assert ids([last]) == [(2, PROMPT[2:])]


def test_a_continued_stream_publishes_them_only_if_it_is_asked_to() -> None:
    one = stream(resume_from=internal.RunResume(token_ids=block_hash.pack_token_ids([1])))
    one.resume(engine_output.Output(token_ids=[1], text="a", resumed_texts=["a"]))
    head = opening(one)
    assert head is not None
    assert head.prompt_offset == len(PROMPT)
    assert publish(one, scores(0, 8), 100_000) == []
    assert [token for _, tokens in ids(list(replay(one, 1, 100_000, 3))) for token in tokens] == PROMPT[3:]


def test_what_is_packed_is_what_is_unpacked() -> None:
    packed = prompt_logprobs.pack_first(7, 2) + prompt_logprobs.pack(9, -0.5, 3, [(1, -0.25), (2, -0.375)])
    first, second = prompt_logprobs.unpack(packed, 2)
    assert (first, second) == ((7, None, None, []), (9, -0.5, 3, [(1, -0.25), (2, -0.375)]))
    assert len(packed) == 2 * prompt_logprobs.record_bytes(2)
    assert math.isfinite(second.logprob or 0)
