"""Whatever streams do, and whenever too much waits for the broker: clients get every token once and in order, and
routers hear of it before."""

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, rule

from tests.worker.streams.test_outbox import (
    Published,
    Sender,
    chunks_in,
    decoded,
    entries_in,
    output,
    stream,
    tokens_in,
)
from tokenbus.protocol.wire import internal, limits, messages
from tokenbus.worker.contract import engine_output
from tokenbus.worker.streams.stream import WorkerStream

TEXTS = st.sampled_from(["", "a", "né", "😀 and more"])


class Record:
    """One stream: what its engine has put out, what its client got, and what routers heard."""

    def __init__(self, stream: WorkerStream) -> None:
        self.stream = stream
        self.made: list[int] = []
        self.made_text = ""
        self.got: list[int] = []
        self.got_text = ""
        self.heard: list[int] = []
        self.has_ended = False
        self.terminal: messages.Chunk | None = None

    def take(self, chunk: messages.Chunk) -> None:
        assert self.terminal is None
        assert (chunk.offset, chunk.text_offset) == (len(self.got), len(self.got_text.encode()))
        assert chunk.token_ids is not msgspec.UNSET or not chunk.tokens
        self.got += chunk.token_ids or []
        self.got_text += chunk.text
        # nothing that an entry has not named, and all that it has
        assert self.got == self.heard[: len(self.got)]
        if chunk.finish_reason is not None:
            self.terminal = chunk


class OutboxHistory(RuleBasedStateMachine):
    """Random outputs, flushes, full buffers, drops and fences."""

    streams = Bundle("streams")

    @initialize()
    def make(self) -> None:
        self.sender = Sender()
        self.records: list[Record] = []
        self.live: list[Record] = []
        """The streams that were not dropped or fenced off."""
        self.num_tokens = 0
        self.num_blocks = 0
        self.next_seq: int | None = None

    @rule(target=streams, is_streamed=st.booleans())
    def open(self, is_streamed: bool) -> Record:
        number = len(self.records)
        new = Record(stream(f"r{number}", number, stream=is_streamed, return_token_ids=True))
        self.records.append(new)
        self.live.append(new)
        self.sender.outbox.put_head(new.stream, 1.0)
        return new

    @rule(one=streams, count=st.integers(1, 3), text=TEXTS)
    def put_tokens(self, one: Record, count: int, text: str) -> None:
        self._put(one, count, output(text))

    @rule(one=streams, count=st.integers(0, 2), text=TEXTS)
    def end(self, one: Record, count: int, text: str) -> None:
        self._put(one, count, output(text, last=True))

    @rule(one=streams)
    def show_alive(self, one: Record) -> None:
        if self._takes_outputs(one):
            self.sender.outbox.put_head(one.stream, 1.0)

    @rule(one=consumes(streams))
    def drop(self, one: Record) -> None:
        if one in self.live and one.terminal is None:
            self.sender.outbox.remove(one.stream)
            self.live.remove(one)

    @rule()
    def store_a_block(self) -> None:
        self.num_blocks += 1
        self.sender.announcer.blocks_changed([], [(self.num_blocks - 1, self.num_blocks)])

    @rule()
    def publish_a_heartbeat(self) -> None:
        self.sender.announcer.publish_events()
        self._read()

    @rule(is_busy=st.booleans())
    def fill_the_buffer(self, is_busy: bool) -> None:
        self.sender.bus.is_busy = is_busy

    @rule()
    def flush(self) -> None:
        self.sender.outbox.flush()
        self._read()
        if not self.sender.bus.is_busy:
            for one in self.live:
                self._check_complete(one)

    @rule()
    def fence(self) -> None:
        self.sender.announcer.start_epoch("2-b")
        for one in self.live:
            self.sender.outbox.remove(one.stream)
        self.live = []
        self.next_seq = limits.FIRST_EVENT_SEQ
        self.sender.announcer.announce_epoch()
        self._read()

    def teardown(self) -> None:
        self.sender.bus.is_busy = False
        self.flush()

    def _takes_outputs(self, one: Record) -> bool:
        return one in self.live and not one.has_ended

    def _put(self, one: Record, count: int, made: engine_output.Output) -> None:
        if not self._takes_outputs(one):
            return
        token_ids = list(range(self.num_tokens, self.num_tokens + count))
        self.num_tokens += count
        self.sender.put(one.stream, msgspec.structs.replace(made, token_ids=token_ids))
        one.made += token_ids
        one.made_text += made.text
        one.has_ended = made.finish_reason is not None

    def _read(self) -> None:
        """Has routers and clients read what was published, and checks each batch of messages."""
        for batch in self.sender.bus.take_batches():
            self._read_batch([decoded(one) for one in batch if ".card." not in one.subject])

    def _read_batch(self, batch: list[Published]) -> None:
        for events in entries_in(batch):
            assert self.next_seq in (None, events.seq)
            self.next_seq = events.seq + 1
            for number, token_id in tokens_in(events):
                assert self.records[number] in self.live
                self.records[number].heard.append(token_id)
        for chunk in chunks_in(batch):
            assert self.records[int(chunk.id[1:])] in self.live
            self.records[int(chunk.id[1:])].take(chunk)
        for one in self.live:
            is_owed = one.stream.run.params.is_streamed or one.terminal is not None
            assert not is_owed or one.got == one.heard
        self._check_order(batch)

    def _check_order(self, batch: list[Published]) -> None:
        """An entry with tokens comes before all chunks, one with ends behind them, and otherwise a seal."""
        chunks = [at for at, one in enumerate(batch) if isinstance(one, messages.Chunk)]
        tokens = [at for at, one in enumerate(batch) if isinstance(one, internal.Events) and one.token_ids]
        ends = [at for at, one in enumerate(batch) if isinstance(one, internal.Events) and one.finished]
        assert not chunks or (all(at < chunks[0] for at in tokens) and all(at > chunks[-1] for at in ends))
        sealed = [one.seq for one in batch if isinstance(one, internal.Seal)]
        assert sealed == ([entries_in(batch)[-1].seq] if tokens and not ends else [])
        assert not sealed or isinstance(batch[-1], internal.Seal)

    def _check_complete(self, one: Record) -> None:
        assert one.heard == one.made
        assert (one.terminal is not None) == one.has_ended
        if one.stream.run.params.is_streamed or one.has_ended:
            assert (one.got, one.got_text) == (one.made, one.made_text)


TestOutboxHistory = OutboxHistory.TestCase
TestOutboxHistory.settings = settings(max_examples=100, stateful_step_count=40)
