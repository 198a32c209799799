"""A stream numbers its chunks without gaps, and its terminal carries everything that the wire promises."""

import msgspec
import pytest
from msgspec import UNSET

from tests.support.published import chunk_of, opening, publish, replay
from tokenbus.protocol.wire import block_hash, codec, errors, internal, messages
from tokenbus.protocol.wire.params import GenerationParams
from tokenbus.worker.contract import engine_output
from tokenbus.worker.streams import replay_buffer
from tokenbus.worker.streams.stream import WorkerStream

USAGE = messages.Usage(prompt_tokens=2, completion_tokens=3, total_tokens=5, cached_tokens=0)
PIECES = [b"", b"a", b"\xe2\x82", b"b"]
TIMINGS = messages.Timings(queue_ms=1, prefill_ms=2, ttft_ms=3, decode_ms=4, total_ms=7)


def stream(
    attempt: int = 0,
    routing: messages.RoutingReport | None = None,
    resume_from: internal.RunResume | None = None,
    **params: object,
) -> WorkerStream:
    run = internal.Run(
        request_id="acme:r-1",
        attempt=attempt,
        epoch="1-a",
        router_id="router",
        reply="_INBOX.a",
        encoding=codec.Encoding.JSON,
        token_ids=b"",
        params=GenerationParams(**params),  # type: ignore[arg-type]
        routing=routing,
        resume_from=resume_from,
    )
    return WorkerStream(run, "demo", "worker-1", now=5.0, token_bytes=PIECES, hash_scheme="xxh3-64:f", stream_no=6)


def output(text: str = "", *token_ids: int) -> engine_output.Output:
    return engine_output.Output(token_ids=list(token_ids), text=text)


def terminal(
    text: str = "",
    *token_ids: int,
    reason: messages.FinishReason = messages.FinishReason.LENGTH,
    stop_match: str | int | None = None,
    error: errors.Error | None = None,
) -> engine_output.Output:
    return engine_output.Output(
        token_ids=list(token_ids),
        text=text,
        finish_reason=reason,
        stop_match=stop_match,
        error=error,
        usage=USAGE,
        timings=TIMINGS,
    )


def made(stream: WorkerStream, output: engine_output.Output) -> messages.Chunk:
    """Returns the chunk of an output that has one."""
    chunk = chunk_of(stream, output)
    assert chunk is not None
    return chunk


def test_the_head_names_the_worker_and_its_hash_scheme_and_nothing_else() -> None:
    head = opening(stream(attempt=2))
    assert head is not None
    assert (head.id, head.attempt, head.worker_id, head.model) == ("r-1", 2, "worker-1", "demo")
    assert (head.offset, head.tokens, head.text_offset, head.text, head.finish_reason) == (0, 0, 0, "", None)
    assert isinstance(head.created, int)
    assert head.hash_scheme == "xxh3-64:f"
    assert (head.usage, head.error, head.token_ids) == (UNSET, UNSET, UNSET)


def test_a_later_empty_chunk_has_the_current_offset() -> None:
    one = stream()
    made(one, output("né", 1, 2))
    empty = opening(one)
    assert empty is not None
    assert (empty.offset, empty.tokens, empty.text_offset, empty.text) == (2, 0, 3, "")


def test_offsets_count_sampled_tokens_and_bytes_of_text() -> None:
    one = stream()
    chunks = [made(one, output(text, *ids)) for text, ids in [("aé", (1,)), ("", (2,)), ("😀", (3, 4)), ("z", (5,))]]
    assert [(c.offset, c.tokens) for c in chunks] == [(0, 1), (1, 1), (2, 2), (4, 1)]
    assert [c.text_offset for c in chunks] == [0, 3, 3, 7]
    last = made(one, terminal("!", 6))
    assert (last.offset, last.tokens, last.text_offset, last.text) == (5, 1, 8, "!")


def test_a_chunk_in_mid_stream_carries_only_what_every_chunk_must() -> None:
    chunk = made(stream(), output("a", 1))
    assert (chunk.worker_id, chunk.model, chunk.created, chunk.usage, chunk.timings) == (UNSET,) * 5
    assert chunk.finish_reason is None


def test_token_ids_are_there_when_asked_for_and_only_then() -> None:
    assert made(stream(), output("a", 1)).token_ids is UNSET
    assert made(stream(), terminal("a", 1)).token_ids is UNSET
    asked = stream(return_token_ids=True)
    assert made(asked, output("a", 1, 2)).token_ids == [1, 2]
    assert made(asked, terminal("b", 3)).token_ids == [3]


def test_a_terminal_by_length_names_worker_model_usage_and_timings() -> None:
    chunk = made(stream(attempt=1), terminal("a", 1))
    assert (chunk.finish_reason, chunk.attempt) == (messages.FinishReason.LENGTH, 1)
    assert (chunk.worker_id, chunk.model, chunk.usage, chunk.timings) == ("worker-1", "demo", USAGE, TIMINGS)
    assert (chunk.stop_match, chunk.error, chunk.routing) == (UNSET, UNSET, UNSET)


def test_a_terminal_by_stop_says_what_matched_even_if_it_is_token_zero() -> None:
    for match in ("END", 0, 17):
        chunk = made(stream(), terminal("a", 1, reason=messages.FinishReason.STOP, stop_match=match))
        assert (chunk.finish_reason, chunk.stop_match) == (messages.FinishReason.STOP, match)


def test_a_terminal_by_error_carries_the_error() -> None:
    error = errors.make_error(errors.Code.WORKER_LOST)
    chunk = made(stream(), terminal(reason=messages.FinishReason.ERROR, error=error))
    assert (chunk.finish_reason, chunk.error, chunk.usage) == (messages.FinishReason.ERROR, error, USAGE)


def test_the_terminal_explains_the_routing_to_a_client_that_asked() -> None:
    report = messages.RoutingReport(chosen="worker-1", policy="least_loaded", candidates=[])
    one = stream(routing=report)
    assert made(one, output("a", 1)).routing is UNSET
    assert made(one, terminal("b", 2)).routing == report


def test_a_clients_cancel_is_cancelled_and_one_of_our_own_is_an_error_with_its_reason() -> None:
    cancelled = terminal("held", reason=messages.FinishReason.CANCELLED)
    assert made(stream(), cancelled).finish_reason is messages.FinishReason.CANCELLED
    late = stream()
    late.cancel_error = errors.make_error(errors.Code.DEADLINE_EXCEEDED)
    chunk = made(late, cancelled)
    assert (chunk.finish_reason, chunk.error, chunk.text) == (messages.FinishReason.ERROR, late.cancel_error, "held")


def test_a_stream_that_ended_by_itself_keeps_its_reason() -> None:
    late = stream()
    late.cancel_error = errors.make_error(errors.Code.DEADLINE_EXCEEDED)
    chunk = made(late, terminal("a", 1, reason=messages.FinishReason.STOP, stop_match="x"))
    assert (chunk.finish_reason, chunk.error) == (messages.FinishReason.STOP, UNSET)


def test_a_client_that_wants_no_stream_gets_one_terminal_with_everything() -> None:
    whole = stream(stream=False, return_token_ids=True)
    assert opening(whole) is None
    assert chunk_of(whole, output("né", 1)) is None
    assert chunk_of(whole, output("", 2)) is None
    chunk = made(whole, terminal("w!", 3))
    assert (chunk.offset, chunk.tokens, chunk.text_offset, chunk.text) == (0, 3, 0, "néw!")
    assert (chunk.token_ids, chunk.usage) == ([1, 2, 3], USAGE)


def test_a_client_that_wants_no_stream_gets_what_there_is_when_it_is_cancelled() -> None:
    whole = stream(stream=False)
    assert chunk_of(whole, output("par", 1)) is None
    chunk = made(whole, terminal("t", reason=messages.FinishReason.CANCELLED))
    assert (chunk.tokens, chunk.text, chunk.finish_reason) == (1, "part", messages.FinishReason.CANCELLED)
    assert chunk.token_ids is UNSET


def likely(token_id: int, *alternatives: int) -> engine_output.Logprob:
    return engine_output.Logprob(token_id, -0.5, [(other, -other / 8) for other in alternatives])


def named(token_id: int, *alternatives: int) -> messages.TokenLogprob:
    """Returns the log probabilities that a client gets for `likely`."""

    def text(one: int) -> str:
        return PIECES[one].decode(errors="replace")

    top = [
        messages.TokenAlternative(id=one, text=text(one), bytes=list(PIECES[one]), logprob=-one / 8)
        for one in alternatives
    ]
    return messages.TokenLogprob(id=token_id, text=text(token_id), bytes=list(PIECES[token_id]), logprob=-0.5, top=top)


def spoken(text: str, *likelihoods: engine_output.Logprob) -> engine_output.Output:
    return engine_output.Output(token_ids=[one.token_id for one in likelihoods], text=text, logprobs=list(likelihoods))


def ended(text: str, *likelihoods: engine_output.Logprob) -> engine_output.Output:
    return msgspec.structs.replace(terminal(text, *(one.token_id for one in likelihoods)), logprobs=list(likelihoods))


def test_log_probabilities_come_with_the_text_and_bytes_of_their_tokens() -> None:
    one = stream(logprobs=2)
    assert made(one, spoken("a", likely(1, 1, 3))).logprobs == [named(1, 1, 3)]
    assert made(one, spoken("", likely(2, 2, 0))).logprobs == [named(2, 2, 0)]
    assert made(one, ended("b", likely(3, 1, 3))).logprobs == [named(3, 1, 3)]
    assert named(2).text == "\ufffd"


def test_log_probabilities_come_without_alternatives_if_none_were_asked_for() -> None:
    assert made(stream(logprobs=0), spoken("a", likely(1))).logprobs == [named(1)]


def test_log_probabilities_come_only_if_asked_for() -> None:
    assert made(stream(), output("a", 1)).logprobs is UNSET
    assert made(stream(), terminal("a", 1)).logprobs is UNSET


def test_a_client_that_wants_no_stream_gets_all_log_probabilities_at_the_end() -> None:
    whole = stream(stream=False, logprobs=1)
    assert chunk_of(whole, spoken("a", likely(1, 3))) is None
    assert made(whole, ended("b", likely(3, 1))).logprobs == [named(1, 3), named(3, 1)]


def test_more_alternatives_than_there_are_tokens_are_all_there_are() -> None:
    assert made(stream(logprobs=20), spoken("a", likely(1, 1, 0, 2, 3))).logprobs == [named(1, 1, 0, 2, 3)]


def test_replayed_chunks_have_the_same_log_probabilities() -> None:
    one = stream(logprobs=1)
    for output_ in (spoken("a", likely(1, 1)), spoken("b", likely(3, 1))):
        made(one, output_)
    (again,) = replay(one, 1, 10_000)
    assert (again.offset, again.text, again.logprobs) == (1, "b", [named(3, 1)])


def test_progress_comes_in_an_empty_chunk_and_only_in_a_stream() -> None:
    progress = messages.Progress(prompt_tokens=9, processed_tokens=4, cached_tokens=2)
    seen = engine_output.Output(token_ids=[], text="", progress=progress)
    one = stream()
    chunk = made(one, seen)
    assert (chunk.progress, chunk.offset, chunk.tokens, chunk.text) == (progress, 0, 0, "")
    assert made(one, output("a", 1)).progress is UNSET
    assert chunk_of(stream(stream=False), seen) is None


def given(*pieces: tuple[str, int]) -> engine_output.Output:
    texts, token_ids = [text for text, _ in pieces], [token_id for _, token_id in pieces]
    return engine_output.Output(token_ids=token_ids, text="".join(texts), resumed_texts=texts)


def test_a_stream_that_continues_another_begins_where_that_one_was() -> None:
    one = stream(attempt=2)
    one.resume(given(("né", 1), ("", 2)))
    head = opening(one)
    assert head is not None
    assert (head.attempt, head.offset, head.tokens, head.text_offset, head.text) == (2, 2, 0, 3, "")
    first = made(one, output("w", 3))
    assert (first.offset, first.tokens, first.text_offset, first.text) == (2, 1, 3, "w")
    (again,) = replay(one, 0, 10_000)
    assert (again.attempt, again.offset, again.tokens, again.text) == (2, 0, 3, "néw")


def test_a_stream_that_continues_another_began_when_that_one_did_and_does_not_keep_its_tokens_twice() -> None:
    one = stream(resume_from=internal.RunResume(token_ids=b"\1\0\0\0", elapsed_ms=2_000.0))
    assert (one.accepted_at, one.began_at) == (5.0, 3.0)
    assert one.run.resume_from
    assert one.run.resume_from.token_ids == b""
    assert stream().began_at == 5.0


def test_a_whole_answer_that_continues_another_holds_what_was_given() -> None:
    whole = stream(stream=False, return_token_ids=True)
    whole.resume(given(("a", 1)))
    chunk = made(whole, terminal("b", 3))
    assert (chunk.offset, chunk.tokens, chunk.text, chunk.token_ids) == (0, 2, "ab", [1, 3])


def test_a_replay_begins_behind_the_tokens_whose_log_probabilities_are_unknown() -> None:
    one = stream(logprobs=1)
    one.resume(given(("a", 1)))
    (alone,) = replay(one, 0, 10_000)
    assert (alone.offset, alone.tokens) == (1, 0)
    made(one, spoken("b", likely(3, 1)))
    (again,) = replay(one, 0, 10_000)
    assert (again.offset, again.text_offset, again.text, again.logprobs) == (1, 1, "b", [named(3, 1)])


def test_a_terminal_that_is_too_large_becomes_an_error_without_text() -> None:
    whole = stream(attempt=3, stream=False, return_token_ids=True)
    large = made(whole, terminal("x" * 1000, 1, 2, 3))
    small = whole.too_large(large)
    assert (small.id, small.attempt, small.worker_id, small.model) == ("r-1", 3, "worker-1", "demo")
    assert (small.finish_reason, small.text, small.token_ids) == (messages.FinishReason.ERROR, "", UNSET)
    assert (small.usage, small.timings, small.created) == (USAGE, TIMINGS, large.created)
    assert small.error is not UNSET
    assert small.error.code is errors.Code.PAYLOAD_TOO_LARGE


# Ends


def test_a_stream_has_a_terminal_once_that_is_made_and_no_head_after_it() -> None:
    for one in (stream(), stream(stream=False)):
        chunk_of(one, output("a", 1))
        assert one.terminal is None
        last = made(one, terminal("b", 1))
        assert (one.terminal, opening(one)) == (last, None)


def test_what_a_client_lacks_begins_with_the_first_chunk_that_it_missed() -> None:
    one = stream()
    for token_id in range(9):
        chunk_of(one, output("a", token_id))
    for offset in (8, 5, 6):
        one.lacks(offset, None)
    assert [(chunk.offset, chunk.tokens) for chunk in publish(one)] == [(5, 4)]
    assert publish(one) == []


def test_a_client_that_does_without_what_it_lacks_gets_the_terminal() -> None:
    one = stream()
    chunk_of(one, output("a", 1))
    one.lacks(0, None)
    one.take(terminal("b", 2))
    one.skip()
    assert [(chunk.offset, chunk.text) for chunk in publish(one)] == [(1, "b")]


def test_only_tokens_that_were_sampled_here_count_as_sent() -> None:
    one, whole = stream(), stream(stream=False)
    for resumed in (one, whole):
        resumed.resume(given(("n", 1), ("é", 2)))
        opening(resumed)
        chunk_of(resumed, output(""))
        assert not resumed.first_token_sent
        chunk_of(resumed, output("w", 3))
    assert (one.first_token_sent, whole.first_token_sent) == (True, False)


@pytest.mark.parametrize(("is_streamed", "counted"), [(True, (1, 0, 1)), (False, (0, 1, 0))])
def test_a_stream_that_failed_counts_its_tokens_and_has_no_text(
    is_streamed: bool, counted: tuple[int, int, int]
) -> None:
    one = stream(stream=is_streamed)
    chunk_of(one, output("a", 1))
    chunk = one.fail()
    assert one.terminal == chunk
    assert ((chunk.offset, chunk.tokens, chunk.text_offset), chunk.text) == (counted, "")
    assert chunk.error
    assert chunk.usage
    assert (chunk.error.code, chunk.usage.completion_tokens) == (errors.Code.INTERNAL, 1)


# Snapshots


@pytest.mark.parametrize(
    ("known_tokens", "token_ids"), [(None, []), (0, [1, 3]), (1, [3]), (2, []), (2**60, []), (-1, [1, 3])]
)
def test_a_snapshot_has_the_tokens_behind_those_that_are_known(known_tokens: int | None, token_ids: list[int]) -> None:
    one = stream(attempt=4, logprobs=1)
    chunk_of(one, spoken("a", likely(1, 3)))
    chunk_of(one, spoken("b", likely(3, 1)))
    seen = one.snapshot(known_tokens)
    assert (seen.id, seen.attempt, seen.stream_no) == ("acme:r-1", 4, 6)
    assert block_hash.unpack_token_ids(seen.token_ids).tolist() == token_ids
    assert [found.token_id for found in replay_buffer.unpack_logprobs(seen.logprobs, 1)] == token_ids


def test_a_snapshot_has_the_account_of_the_first_token_once_there_is_one() -> None:
    one = stream()
    assert one.snapshot(None).first_token is None
    first = engine_output.FirstTokenStats(cached_tokens=1, queue_ms=2.0, prefill_ms=3.0)
    chunk_of(one, msgspec.structs.replace(output("a", 1), first_token=first))
    account = internal.FirstToken(stream_no=6, cached_tokens=1, queue_ms=2.0, prefill_ms=3.0)
    assert one.snapshot(None).first_token == account


def test_resumed_tokens_are_in_a_snapshot() -> None:
    one = stream()
    one.resume(given(("a", 1), ("", 2)))
    chunk_of(one, output("b", 3))
    assert block_hash.unpack_token_ids(one.snapshot(1).token_ids).tolist() == [2, 3]


def test_a_new_stream_has_sent_no_token() -> None:
    new = stream()
    assert (new.key, new.first_token_sent, new.last_chunk_at, new.cancel_error) == ("acme:r-1", False, 5.0, None)


def test_an_ended_stream_can_be_replayed_without_the_tools_and_constraints_of_its_request() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "long " * 10_000}}
    one = stream(stream=True, return_token_ids=True, tools=[tool], regex="a" * 10_000, stop=["x" * 1_000])
    made(one, output("a", 1))
    made(one, terminal("b", 3))
    before = [codec.encode(chunk) for chunk in replay(one, 0, 1 << 20)]
    one.shed()
    assert [codec.encode(chunk) for chunk in replay(one, 0, 1 << 20)] == before
    assert len(codec.encode(one.run)) < 500
