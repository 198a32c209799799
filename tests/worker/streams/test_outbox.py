"""The outbox publishes a step as a whole, in the order that the wire promises, and nothing that the broker would not
take."""

import msgspec
import pytest

from tests.support.arithmetic import ArithmeticRunner, make_config
from tests.support.engines import thread_engine
from tests.support.recording_bus import RecordingBus
from tokenbus.protocol.bus.bus import Outgoing
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import block_hash, codec, errors, internal, limits, messages, subjects
from tokenbus.protocol.wire.params import GenerationParams
from tokenbus.worker.broker.announcer import Announcer
from tokenbus.worker.broker.replica_state import Serving
from tokenbus.worker.contract import engine_output
from tokenbus.worker.streams import outbox, replay_buffer
from tokenbus.worker.streams.holds import Hold
from tokenbus.worker.streams.outbox import Outbox
from tokenbus.worker.streams.request_telemetry import StreamTelemetry
from tokenbus.worker.streams.stream import WorkerStream
from tokenbus.worker.telemetry.metrics import ReplicaMetrics, WorkerMetrics

TIMINGS = messages.Timings(queue_ms=0, prefill_ms=0, ttft_ms=0, decode_ms=0, total_ms=0)
FIRST_TOKEN = engine_output.FirstTokenStats(cached_tokens=4, queue_ms=1.5, prefill_ms=2.5)
_events = codec.Decoder(internal.Events)
_seals = codec.Decoder(internal.Seal)
_chunks = codec.Decoder(messages.Chunk)

Published = messages.Chunk | internal.Events | internal.Seal


class Sender:
    """An outbox and its announcer on one bus, with an engine that serves."""

    def __init__(self, max_payload: int = 1_000_000) -> None:
        self.bus = RecordingBus(max_payload)
        self.announcer = Announcer(self.bus, subjects.Subjects(), "demo", "w1")  # type: ignore[arg-type]
        metrics = ReplicaMetrics(WorkerMetrics(), "demo", "w1")
        telemetry = StreamTelemetry(metrics, tracing.NoopTracer(), "demo", "w1")
        self.outbox = Outbox(self.bus, self.announcer, telemetry)  # type: ignore[arg-type]
        self.ended: list[WorkerStream] = []
        self.outbox.on_ended = self._on_ended
        self.announcer.engine_started(Serving(thread_engine(lambda _: ArithmeticRunner()), make_config()))
        self.bus.take()

    def _on_ended(self, stream: WorkerStream, terminal_bytes: int) -> None:
        self.ended.append(stream)
        stream.is_open = False

    def put(self, stream: WorkerStream, *outputs: engine_output.Output) -> None:
        for one in outputs:
            self.outbox.put(stream, one, 1.0)

    def flush(self) -> list[Published]:
        """Returns what a flush publishes."""
        self.outbox.flush()
        return [decoded(one) for one in self.bus.take()]

    def replay(self, stream: WorkerStream, offset: int = 0) -> list[messages.Chunk]:
        stream.lacks(offset, None)
        self.outbox.publish_again(stream, 2.0)
        return chunks_in([decoded(one) for one in self.bus.take()])


def decoded(outgoing: Outgoing) -> Published:
    if outgoing.subject.endswith(".seal"):
        return _seals.decode(outgoing.payload)
    if ".events." in outgoing.subject:
        return _events.decode(outgoing.payload)
    return _chunks.decode(outgoing.payload, codec.Encoding.JSON)


def chunks_in(published: list[Published]) -> list[messages.Chunk]:
    return [one for one in published if isinstance(one, messages.Chunk)]


def entries_in(published: list[Published]) -> list[internal.Events]:
    return [one for one in published if isinstance(one, internal.Events)]


def kinds(published: list[Published]) -> list[str]:
    return [type(one).__name__ for one in published]


def tokens_in(events: internal.Events) -> list[tuple[int, int]]:
    """Returns an entry's tokens, each with the number of its stream."""
    numbers = block_hash.unpack_token_ids(events.stream_nos)
    return list(zip(numbers, block_hash.unpack_token_ids(events.token_ids), strict=True))


def stream(name: str = "r1", number: int = 0, token_bytes: tuple[bytes, ...] = (), **params: object) -> WorkerStream:
    run = internal.Run(
        request_id=f"default:{name}",
        attempt=0,
        epoch="1-a",
        router_id="router",
        reply=f"_INBOX.{name}",
        encoding=codec.Encoding.JSON,
        token_ids=b"",
        params=GenerationParams(**params),  # type: ignore[arg-type]
    )
    made = WorkerStream(run, "demo", "w1", now=0.0, token_bytes=token_bytes, stream_no=number)
    made.is_open = True
    return made


def output(text: str, *token_ids: int, last: bool = False) -> engine_output.Output:
    plain = engine_output.Output(token_ids=list(token_ids or (1,)), text=text)
    if not last:
        return plain
    usage = messages.Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2, cached_tokens=0)
    return msgspec.structs.replace(plain, finish_reason=messages.FinishReason.LENGTH, usage=usage, timings=TIMINGS)


# Order


async def test_a_step_is_an_entry_with_its_tokens_then_its_chunks_then_a_seal() -> None:
    sender, one, two = Sender(), stream("r1", 7), stream("r2", 9)
    sender.put(one, output("a", 11))
    sender.put(two, output("bc", 12, 13))
    sender.put(one, output("d", 14))
    events, *chunks, seal = sender.flush()
    assert isinstance(events, internal.Events)
    assert tokens_in(events) == [(7, 11), (7, 14), (9, 12), (9, 13)]
    assert [(chunk.id, chunk.offset, chunk.tokens, chunk.text) for chunk in chunks_in(chunks)] == [
        ("r1", 0, 2, "ad"),
        ("r2", 0, 2, "bc"),
    ]
    assert seal == internal.Seal(epoch=sender.announcer.epoch, seq=events.seq)


async def test_a_step_is_published_together() -> None:
    sender, one = Sender(), stream()
    sender.put(one, output("a"), output("b", last=True))
    sender.outbox.flush()
    assert [len(batch) for batch in sender.bus.take_batches()] == [4]  # two entries, a chunk and a terminal


async def test_an_entry_announces_the_end_of_a_stream_after_its_terminal_and_seals_the_step() -> None:
    sender, one, two = Sender(), stream("r1"), stream("r2")
    sender.put(one, output("a", 5, last=True))
    sender.put(two, output("b", 6))
    before, terminal, _, after = published = sender.flush()
    assert kinds(published) == ["Events", "Chunk", "Chunk", "Events"]
    assert isinstance(before, internal.Events)
    assert isinstance(terminal, messages.Chunk)
    assert isinstance(after, internal.Events)
    assert (before.finished, terminal.finish_reason, after.finished) == ([], "length", ["default:r1"])
    assert (after.seq, after.token_ids) == (before.seq + 1, b"")
    assert (sender.ended, one.terminal) == ([one], terminal)


async def test_a_terminal_without_tokens_needs_no_entry_before_it() -> None:
    sender, one = Sender(), stream()
    error = errors.make_error(errors.Code.WORKER_LOST)
    sender.put(one, engine_output.Output(token_ids=[], text="", finish_reason=messages.FinishReason.ERROR, error=error))
    assert kinds(sender.flush()) == ["Chunk", "Events"]


async def test_a_head_has_neither_an_entry_nor_a_seal() -> None:
    sender, one = Sender(), stream()
    sender.outbox.put_head(one, 3.0)
    assert kinds(sender.flush()) == ["Chunk"]
    assert (one.first_token_sent, one.last_chunk_at) == (False, 3.0)


async def test_an_entry_announces_a_request_before_its_head() -> None:
    sender, one = Sender(), stream()
    started = internal.Started(id=one.key, stream_no=0, attempt=1, prompt_tokens=3)
    sender.announcer.log.started.append(started)
    sender.outbox.put_head(one, 3.0)
    events, head = sender.flush()
    assert isinstance(events, internal.Events)
    assert isinstance(head, messages.Chunk)
    assert events.started == [started]


async def test_the_account_of_a_first_token_is_in_the_entry_with_that_token() -> None:
    sender, one = Sender(), stream(number=5)
    sender.put(one, msgspec.structs.replace(output("a"), first_token=FIRST_TOKEN), output("b"))
    (events,) = entries_in(sender.flush())
    assert events.first_tokens == [
        internal.FirstToken(stream_no=5, cached_tokens=4, queue_ms=1.5, prefill_ms=2.5),
    ]


async def test_changed_blocks_are_published_before_the_chunks_of_their_step() -> None:
    sender, one = Sender(), stream()
    sender.announcer.blocks_changed([], [(1, 2), (2, 3), (2, 4)])
    sender.put(one, output("a"))
    published = sender.flush()
    assert kinds(published) == ["Events", "Chunk", "Seal"]
    stored = [internal.BlockRun(parent=1, hashes=[2, 3]), internal.BlockRun(parent=2, hashes=[4])]
    assert (entries_in(published)[0].removed, entries_in(published)[0].stored) == ([], stored)
    sender.announcer.blocks_changed([4], [])
    sender.put(one, output("b"))
    (events,) = entries_in(sender.flush())
    assert (events.removed, events.stored) == ([4], [])


async def test_more_blocks_than_fit_one_entry_precede_the_step() -> None:
    sender, one = Sender(), stream()
    sender.announcer.blocks_changed([], [(number, number + 1) for number in range(1, 600)])
    sender.put(one, output("a", 8))
    published = sender.flush()
    assert kinds(published) == ["Events", "Events", "Events", "Chunk", "Seal"]
    assert [len(tokens_in(one)) for one in entries_in(published)] == [0, 0, 1]


async def test_more_tokens_than_fit_one_entry_are_in_several_before_their_chunks() -> None:
    sender, one = Sender(), stream()
    token_ids = list(range(limits.PART_BYTES // 16 + 1))
    sender.put(one, *(output("", token_id) for token_id in token_ids))
    published = sender.flush()
    assert kinds(published) == ["Events", "Events", "Chunk", "Seal"]
    first, second = entries_in(published)
    assert [token_id for _, token_id in tokens_in(first) + tokens_in(second)] == token_ids
    assert published[-1] == internal.Seal(epoch=second.epoch, seq=second.seq)
    assert second.seq == first.seq + 1


async def test_log_probabilities_are_in_the_entry_as_they_are_kept_if_they_were_asked_for() -> None:
    pieces = (b"a", b"b", b"c")
    sender, one, other = Sender(), stream("r1", 3, pieces, logprobs=1), stream("r2", 4, pieces)
    seen = [engine_output.Logprob(token_id, -0.5, [(2, -0.25), (0, -3.0)]) for token_id in (0, 1)]
    for number, logprob in enumerate(seen):
        sender.put(one, msgspec.structs.replace(output("x", number), logprobs=[logprob]))
        sender.put(other, msgspec.structs.replace(output("x", number), logprobs=[logprob]))
    (events,) = entries_in(sender.flush())
    assert events.logprobs.keys() == {3}
    kept = [msgspec.structs.replace(logprob, top=logprob.top[:1]) for logprob in seen]
    assert replay_buffer.unpack_logprobs(events.logprobs[3], 1) == kept


async def test_a_client_that_wants_no_stream_gets_no_chunk_before_the_end_but_its_tokens_are_logged() -> None:
    sender, whole = Sender(), stream(number=2, stream=False)
    sender.put(whole, output("a", 5))
    events, seal = sender.flush()
    assert isinstance(events, internal.Events)
    assert isinstance(seal, internal.Seal)
    assert tokens_in(events) == [(2, 5)]
    assert not whole.first_token_sent
    sender.put(whole, output("b", 6, last=True))
    published = sender.flush()
    assert kinds(published) == ["Events", "Chunk", "Events"]
    assert tokens_in(entries_in(published)[0]) == [(2, 6)]
    assert [(chunk.offset, chunk.tokens, chunk.text) for chunk in chunks_in(published)] == [(0, 2, "ab")]


async def test_tokens_of_another_worker_are_not_published_again() -> None:
    sender, one = Sender(), stream()
    one.resume(engine_output.Output(token_ids=[5, 6], text="né", resumed_texts=["n", "é"]))
    sender.outbox.put_head(one, 1.0)
    (head,) = sender.flush()
    assert isinstance(head, messages.Chunk)
    assert (head.offset, head.text_offset, head.tokens, one.first_token_sent) == (2, 3, 0, False)
    sender.put(one, output("w", 7))
    events, chunk, _ = sender.flush()
    assert isinstance(events, internal.Events)
    assert isinstance(chunk, messages.Chunk)
    assert tokens_in(events) == [(0, 7)]
    assert (chunk.offset, chunk.text_offset, chunk.text) == (2, 3, "w")
    assert [again.text for again in sender.replay(one)] == ["néw"]


async def test_nothing_is_published_before_the_flush_or_twice() -> None:
    sender = Sender()
    sender.put(stream(), output("a"))
    assert sender.bus.take() == []
    assert len(sender.flush()) == 3
    assert sender.flush() == []


# All or nothing


async def test_while_too_much_waits_nothing_is_published_and_later_all_of_it_is() -> None:
    sender, one = Sender(), stream(number=3)
    sender.put(one, output("a", 5))
    (before,) = entries_in(sender.flush())
    sender.bus.is_busy = True
    for number in (6, 7):
        sender.put(one, output(str(number), number))
        assert sender.flush() == []
    sender.bus.is_busy = False
    published = sender.flush()
    assert kinds(published) == ["Events", "Chunk", "Seal"]
    (events,) = entries_in(published)
    assert (events.seq, tokens_in(events)) == (before.seq + 1, [(3, 6), (3, 7)])
    chunks = [(chunk.offset, chunk.text_offset, chunk.tokens, chunk.text) for chunk in chunks_in(published)]
    assert chunks == [(1, 1, 2, "67")]


async def test_a_head_is_published_unless_there_is_more() -> None:
    sender, one = Sender(), stream()
    sender.bus.is_busy = True
    sender.outbox.put_head(one, 1.0)
    assert sender.flush() == []
    sender.bus.is_busy = False
    heads = [(chunk.offset, chunk.tokens, chunk.worker_id) for chunk in chunks_in(sender.flush())]
    assert heads == [(0, 0, "w1")]
    sender.outbox.put_head(one, 1.0)
    sender.put(one, output("a"))
    sender.outbox.put_head(one, 2.0)
    assert [(chunk.offset, chunk.tokens) for chunk in chunks_in(sender.flush())] == [(0, 1)]
    assert sender.flush() == []


async def test_a_flush_says_whether_nothing_is_left() -> None:
    sender, one, whole = Sender(), stream("r1"), stream("r2", stream=False)
    for put_out in (one, whole):
        assert sender.outbox.flush()
        sender.put(put_out, output("a"))
        sender.bus.is_busy = True
        assert not sender.outbox.flush()
        sender.bus.is_busy = False
        assert sender.outbox.flush()


async def test_a_stream_has_not_ended_for_anyone_before_its_terminal_is_published() -> None:
    sender, one = Sender(), stream()
    sender.put(one, output("a"))
    sender.flush()
    sender.bus.is_busy = True
    sender.put(one, output("b", last=True))
    assert sender.flush() == []
    sender.announcer.publish_events()
    assert sender.ended == []
    sender.bus.is_busy = False
    sender.announcer.publish_events()
    (heartbeat,) = sender.bus.take()
    assert _events.decode(heartbeat.payload).finished == []
    published = sender.flush()
    assert kinds(published) == ["Events", "Chunk", "Events"]
    assert sender.ended == [one]
    assert [(again.text, again.finish_reason) for again in sender.replay(one)] == [("a", None), ("b", "length")]


async def test_more_first_tokens_than_fit_one_entry_are_in_several() -> None:
    sender = Sender()
    for number in range(2_000):
        first = msgspec.structs.replace(output("a", 7), first_token=FIRST_TOKEN)
        sender.put(stream(f"{number}", number), first)
    sender.outbox.flush()
    (batch,) = sender.bus.take_batches()
    assert max(len(one.payload) for one in batch) < limits.PART_BYTES // 2
    entries = entries_in([decoded(one) for one in batch])
    assert [first.stream_no for entry in entries for first in entry.first_tokens] == list(range(2_000))


@pytest.mark.parametrize("has_tokens", [False, True])
async def test_more_ends_than_fit_one_entry_are_in_several_after_the_terminals(has_tokens: bool) -> None:
    """As when no engine continues the streams of one that has died."""
    sender, error = Sender(), errors.make_error(errors.Code.WORKER_LOST)
    streams = [stream(f"{number:0{limits.MAX_ID_BYTES}}", number) for number in range(200)]
    if has_tokens:
        sender.put(streams[0], output("a", 7))
    for one in streams:
        end = msgspec.structs.replace(output("", last=True), finish_reason=messages.FinishReason.ERROR, gaps=[99] * 14)
        sender.put(one, msgspec.structs.replace(end, token_ids=[], error=error if one.stream_no % 2 else None))
    sender.outbox.flush()
    (batch,) = sender.bus.take_batches()
    assert max(len(one.payload) for one in batch) < 64 * 1024 - limits.MESSAGE_RESERVE_BYTES
    published = [decoded(one) for one in batch]
    entries, num_ends = entries_in(published), kinds(published)[::-1].index("Chunk")
    assert kinds(published) == ["Events"] * has_tokens + ["Chunk"] * (200 + has_tokens) + ["Events"] * num_ends
    assert [entry.seq - entries[0].seq for entry in entries] == list(range(len(entries)))
    ended = entries[has_tokens:]
    keys = [one.key for one in streams]
    assert [key for entry in ended for key in entry.finished] == keys
    assert [end.id for entry in ended for end in entry.ends] == keys
    assert [key for entry in ended for key in entry.failed] == keys[1::2]
    assert sender.ended == streams


async def test_tokens_that_wait_are_not_published_with_an_entry_that_chunks_do_not_follow() -> None:
    sender, one = Sender(), stream()
    sender.put(one, output("a"))
    sender.announcer.publish_events()
    (heartbeat,) = sender.bus.take()
    assert _events.decode(heartbeat.payload).token_ids == b""
    assert kinds(sender.flush()) == ["Events", "Chunk", "Seal"]


async def test_what_a_stream_had_to_publish_is_forgotten_with_it() -> None:
    sender, one, two = Sender(), stream("r1", 1, (b"a", b"b"), logprobs=0), stream("r2", 2)
    sender.put(
        one,
        msgspec.structs.replace(output("a"), logprobs=[engine_output.Logprob(1, -1.0)], first_token=FIRST_TOKEN),
    )
    sender.put(two, output("b", 9))
    sender.outbox.remove(one)
    published = sender.flush()
    (events,) = entries_in(published)
    assert (tokens_in(events), events.logprobs, events.first_tokens) == ([(2, 9)], {}, [])
    assert [chunk.id for chunk in chunks_in(published)] == ["r2"]


async def test_the_tokens_of_others_are_announced_though_a_stream_that_filled_an_entry_is_forgotten() -> None:
    sender, one, two = Sender(), stream("r1", 1), stream("r2", 2)
    sender.put(one, *[output("")] * (limits.PART_BYTES // 16))
    sender.put(two, output("b", 9))
    sender.outbox.remove(one)
    published = sender.flush()
    assert kinds(published) == ["Events", "Chunk", "Seal"]
    assert tokens_in(entries_in(published)[0]) == [(2, 9)]


# Replay and probe


async def test_a_replay_has_what_was_still_to_be_published() -> None:
    sender, one = Sender(), stream()
    sender.put(one, output("a"))
    sender.flush()
    sender.put(one, output("b"))
    one.lacks(0, None)
    sender.outbox.publish_again(one, 2.0)
    published = [decoded(outgoing) for outgoing in sender.bus.take()]
    assert kinds(published) == ["Events", "Chunk", "Seal"]
    assert [(chunk.offset, chunk.text) for chunk in chunks_in(published)] == [(0, "ab")]
    assert [(again.offset, again.text) for again in sender.replay(one, 1)] == [(1, "b")]
    assert [(again.offset, again.text) for again in sender.replay(one, 2)] == [(2, "")]


async def test_a_long_stream_is_published_again_in_turns_and_others_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "_AT_ONCE_BYTES", 1)
    sender, one, other = Sender(max_payload=limits.MESSAGE_RESERVE_BYTES + 700), stream("r1", 1), stream("r2", 2)
    words = [f"word {number} " * 4 for number in range(9)]
    for text in words:
        sender.put(one, output(text))
        sender.flush()
    seen = sender.replay(one)
    assert len(seen) == 1
    sender.put(other, output("o"))
    sender.put(one, output("the end", last=True))
    while published := sender.flush():
        seen += chunks_in(published)
    assert "".join(chunk.text for chunk in seen if chunk.id == "r1") == "".join(words) + "the end"
    assert [chunk.id for chunk in seen].index("r2") <= 3
    assert seen[-1].finish_reason is messages.FinishReason.LENGTH
    assert sender.ended == [one]
    again = sender.replay(one)
    again += sender.replay(one, again[-1].offset + again[-1].tokens)
    assert "".join(words).startswith("".join(chunk.text for chunk in again))


async def test_nothing_is_replayed_while_chunks_wait() -> None:
    sender, one = Sender(), stream()
    sender.put(one, output("a"))
    sender.flush()
    sender.put(one, output("b"))
    sender.announcer.start_epoch("2-b")  # nothing can be published
    assert sender.replay(one) == []


def gone_stream() -> WorkerStream:
    """Returns a stream whose chunks ask for notices."""
    made = WorkerStream(stream().run, "demo", "w1", now=0.0, gone_subject="gone")
    made.is_open = True
    return made


async def test_the_notice_of_a_probe_can_be_told_from_those_of_the_chunks_before_it() -> None:
    sender, one = Sender(), gone_stream()
    published = []
    for text in ("a", "b"):
        sender.put(one, output(text))
        sender.outbox.flush()
        published += sender.bus.take()
    _, first, _, _, second, _ = published
    one.hold = Hold(0.0, 2, is_blind=False)
    one.lacks(1, None)
    assert sender.outbox.probe(one)
    (probe,) = sender.bus.take()
    head = decoded(probe)
    assert isinstance(head, messages.Chunk)
    assert (head.offset, head.tokens, probe.reply) == (1, 0, "gone" + subjects.PROBE_SUFFIX)
    marks = [subjects.Subjects().parse_gone(f"x.{one.reply}")[1] for one in (first, second)]
    assert [one.marks.carried(mark) for mark in marks if mark is not None] == [(0, None), None]


async def test_a_held_stream_is_still_announced_and_its_chunks_leave_when_it_is_released() -> None:
    sender, one = Sender(), gone_stream()
    sender.put(one, output("a", 1))
    one.hold = Hold(0.0, 0, is_blind=False)  # what waited is withheld too
    sender.put(one, output("b", 2))
    sender.outbox.put_head(one, 2.0)
    sender.put(one, output("c", 3, last=True))
    events, seal = sender.flush()
    assert isinstance(events, internal.Events)
    assert isinstance(seal, internal.Seal)
    assert [token for _, token in tokens_in(events)] == [1, 2, 3]
    assert (one.published, sender.ended) == (0, [])
    one.hold = None
    sender.outbox.publish_again(one, 3.0)
    chunk, terminal, ended = [decoded(one) for one in sender.bus.take()]
    assert isinstance(chunk, messages.Chunk)
    assert isinstance(terminal, messages.Chunk)
    assert (chunk.text, terminal.text, terminal.finish_reason) == ("ab", "c", messages.FinishReason.LENGTH)
    assert isinstance(ended, internal.Events)
    assert ended.finished == [one.key]
    assert sender.ended == [one]


# Chunks that do not fit


@pytest.mark.parametrize(("spare_bytes", "fits"), [(0, True), (-1, False)])
async def test_a_terminal_that_just_fits_is_sent_and_one_byte_more_makes_it_an_error(
    spare_bytes: int, fits: bool
) -> None:
    whole = stream(stream=False)
    size = len(codec.encode(_terminal_of(stream(stream=False), "x" * 500), codec.Encoding.JSON))
    sender = Sender(max_payload=size + limits.MESSAGE_RESERVE_BYTES + spare_bytes)
    whole.created = 1_000_000_000
    sender.put(whole, output("x" * 500, last=True))
    sender.outbox.flush()
    _, outgoing, _ = sender.bus.take()
    terminal = decoded(outgoing)
    assert isinstance(terminal, messages.Chunk)
    if fits:
        assert (terminal.text, terminal.finish_reason, outgoing.headers) == ("x" * 500, "length", None)
    else:
        assert (terminal.text, terminal.finish_reason) == ("", "error")
        assert terminal.error
        assert terminal.error.code is errors.Code.PAYLOAD_TOO_LARGE
        assert outgoing.headers == codec.error_headers(terminal.error)


def _terminal_of(one: WorkerStream, text: str) -> messages.Chunk:
    one.created = 1_000_000_000
    one.take(output(text, last=True))
    assert one.terminal is not None
    return one.terminal


@pytest.mark.parametrize("waits", [False, True])
async def test_a_chunk_that_does_not_fit_ends_its_stream_and_nothing_follows(waits: bool) -> None:
    sender, one, other = Sender(max_payload=limits.MESSAGE_RESERVE_BYTES + 700), stream("r1"), stream("r2")
    sender.put(one, output("a"))
    sender.put(other, output("o"))
    sender.flush()
    sender.put(one, output("x" * 800))
    sender.put(other, output("o"))
    if waits:
        sender.bus.is_busy = True
        assert sender.flush() == []
        sender.bus.is_busy = False
    published = sender.flush()
    assert kinds(published) == ["Events", "Chunk", "Chunk", "Events"]
    terminal, chunk = chunks_in(published)
    assert (terminal.offset, terminal.tokens, terminal.finish_reason) == (1, 1, "error")
    assert terminal.error
    assert terminal.usage
    assert terminal.timings
    assert (terminal.error.code, terminal.worker_id) == (errors.Code.PAYLOAD_TOO_LARGE, "w1")
    assert terminal.usage.completion_tokens == 2
    assert (chunk.id, chunk.finish_reason) == ("r2", None)
    assert entries_in(published)[-1].finished == ["default:r1"]
    assert sender.ended == [one]
    assert [(again.offset, again.finish_reason) for again in sender.replay(one)] == [(0, None), (1, "error")]


async def test_what_follows_a_chunk_that_a_new_broker_does_not_take_is_left_out() -> None:
    sender, one, other = Sender(), stream("r1"), stream("r2")
    sender.bus.is_busy = True
    for text in ("a", "x" * 800, "b"):
        sender.put(one, output(text))
        sender.put(other, output("o"))
    sender.put(one, output("c", last=True))
    assert sender.flush() == []
    sender.bus.max_payload = limits.MESSAGE_RESERVE_BYTES + 700
    assert sender.flush() == []
    assert one.terminal is not None
    assert (one.terminal.offset, one.terminal.finish_reason, sender.ended) == (1, "error", [])
    sender.bus.is_busy = False
    chunks = chunks_in(sender.flush())
    assert [(chunk.offset, chunk.text, chunk.finish_reason) for chunk in chunks if chunk.id == "r1"] == [
        (0, "a", None),
        (1, "", "error"),
    ]
    assert [chunk.text for chunk in chunks if chunk.id == "r2"] == ["ooo"]
    assert sender.ended == [one]


async def test_a_stream_that_a_new_broker_does_not_take_ends_when_it_is_asked_for() -> None:
    sender, one, other = Sender(), stream("r1"), stream("r2")
    sender.put(one, output("x" * 800))
    sender.put(other, output("x" * 800, last=True))
    sender.flush()
    sender.bus.max_payload = limits.MESSAGE_RESERVE_BYTES + 700
    for open_or_ended in (one, other):
        (terminal,) = sender.replay(open_or_ended)
        assert terminal.error
        assert terminal.error.code is errors.Code.PAYLOAD_TOO_LARGE
    assert sender.ended == [other, one]


async def test_an_error_terminal_has_its_error_in_headers_too() -> None:
    sender, one = Sender(), stream()
    error = errors.make_error(errors.Code.WORKER_LOST)
    sender.put(
        one, msgspec.structs.replace(output("", last=True), finish_reason=messages.FinishReason.ERROR, error=error)
    )
    sender.outbox.flush()
    assert [one.headers for one in sender.bus.take()] == [None, codec.error_headers(error), None]


async def test_a_stream_whose_chunk_can_not_be_made_ends_alone_and_nothing_of_it_is_published() -> None:
    sender, broken, other = Sender(), stream("r1", 1, (b"a",), logprobs=0), stream("r2", 2)
    sender.put(broken, msgspec.structs.replace(output("x", 0), logprobs=[engine_output.Logprob(0, -1.0)]))
    sender.flush()
    sender.put(other, output("o", 8))
    sender.put(broken, msgspec.structs.replace(output("y", 77), logprobs=[engine_output.Logprob(77, -1.0)]))
    published = sender.flush()
    assert kinds(published) == ["Events", "Chunk", "Chunk", "Events"]
    assert tokens_in(entries_in(published)[0]) == [(2, 8)]
    terminal = chunks_in(published)[-1]
    assert (terminal.id, terminal.offset, terminal.tokens, terminal.text) == ("r1", 1, 0, "")
    assert terminal.error
    assert terminal.error.code is errors.Code.INTERNAL
    assert sender.ended == [broken]
    assert [(again.text, again.finish_reason) for again in sender.replay(broken)] == [("x", None), ("", "error")]
