"""A sequence counts until its stream has ended and the engine has given it back."""

import pytest

from tokenbus.protocol.wire import errors
from tokenbus.worker.contract import engine_output, engine_request
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason
from tokenbus.worker.engine_client.engine_faults import CrashAttribution
from tokenbus.worker.engine_client.generation import Generation
from tokenbus.worker.engine_client.reader import CompletionReader
from tokenbus.worker.engine_client.sequences import OpenSequences

TOKEN_BYTES = [b"", b"a", b"STOP"]
A, STOP = 1, 2


class Table:
    """Open sequences, what they have aborted, and the outputs of their streams."""

    def __init__(self, *names: str) -> None:
        self.aborted: list[int] = []
        self.outputs: list[engine_output.Output] = []
        self.sequences = OpenSequences(self.aborted.append)
        for name in names:
            self.open(name)

    def open(
        self,
        name: str,
        held: bytes | None = None,
        *,
        has_remote_prefill: bool = False,
        expected_cached_tokens: int = 0,
    ) -> Generation:
        request = engine_request.EngineRequest(
            key=name,
            token_ids=[1],
            sampling=engine_request.Sampling(max_tokens=9),
            stop=("STOP",),
            has_remote_prefill=has_remote_prefill,
            expected_cached_tokens=expected_cached_tokens,
        )
        generation = Generation(request, self.outputs.append, CompletionReader(request, TOKEN_BYTES), accepted_at=0.0)
        self.sequences.add(self.sequences.next_number(), generation, held)
        return generation

    def advance(
        self, number: int, token_id: int | None, end: EngineFinishReason | None = None, now: float = 1.0
    ) -> None:
        self.sequences.advance([ipc.SequenceOutput(number, [] if token_id is None else [token_id], end)], 1.0)


def test_a_sequence_that_the_engine_ends_is_gone() -> None:
    table = Table("one", "two")
    table.advance(1, A, EngineFinishReason.LENGTH)
    assert (len(table.sequences), table.aborted) == (1, [])


def test_a_stream_that_ends_first_is_aborted_and_counts_until_the_engine_reports_its_end() -> None:
    table = Table("one")
    table.advance(1, STOP)
    assert (len(table.sequences), table.aborted) == (1, [1])
    assert table.sequences.abort("one") is None
    table.advance(1, None, EngineFinishReason.ABORTED)
    assert len(table.sequences) == 0
    assert len(table.outputs) == 1


def test_a_prompt_counts_as_load_until_the_engine_has_started_it_held_back_or_not() -> None:
    table = Table("one")
    assert table.sequences.queued_tokens == 1
    table.open("held", held=b"add")
    assert table.sequences.queued_tokens == 2
    assert table.sequences.release_held("held") == b"add"
    assert table.sequences.queued_tokens == 2
    table.sequences.start([1, 2], 0.0)
    assert table.sequences.queued_tokens == 0
    table.open("cancelled", held=b"add")
    table.sequences.abort("cancelled")
    assert table.sequences.queued_tokens == 0


def test_a_sequence_is_expected_to_use_blocks_until_the_engine_reports_its_start_and_counts_them_itself() -> None:
    table = Table("one", "two")
    assert table.sequences.expected_blocks(answer_tokens=4, block_size=3) == 2 + 2
    assert table.sequences.expected_blocks(answer_tokens=256, block_size=3) == 4 + 4, "no more than max_tokens"
    table.sequences.start([1], 0.0)
    assert table.sequences.expected_blocks(answer_tokens=4, block_size=3) == 2
    table.sequences.abort("two")
    assert table.sequences.expected_blocks(answer_tokens=4, block_size=3) == 0


def test_a_prompt_that_another_worker_computes_is_no_load_here() -> None:
    table = Table()
    table.open("held", held=b"add", has_remote_prefill=True)
    assert (len(table.sequences), table.sequences.queued_tokens) == (1, 0)


@pytest.mark.parametrize(("expected_cached_tokens", "queued"), [(0, 1), (1, 0), (1_000, 0)])
def test_tokens_that_a_router_expects_to_be_cached_are_no_load(expected_cached_tokens: int, queued: int) -> None:
    table = Table()
    table.open("one", expected_cached_tokens=expected_cached_tokens)
    assert table.sequences.queued_tokens == queued


def test_intervals_between_tokens_are_counted_together_for_those_that_step_together() -> None:
    table = Table("one", "two")
    both = [ipc.SequenceOutput(number, [A], None) for number in (1, 2)]
    assert table.sequences.advance(both, 1.0) == ([], {})
    assert table.sequences.advance(both, 1.5) == ([], {0.5: 2})


@pytest.mark.parametrize("has_started", [True, False])
def test_a_sequence_that_ends_two_engines_is_given_up(has_started: bool) -> None:
    table = Table()
    generation = table.open("one")
    for _ in range(2):
        assert generation in table.sequences.take_all()
        table = Table()
        table.sequences.add(table.sequences.next_number(), generation)
        if has_started:
            table.sequences.start([1], 1.0)
        culprits = table.sequences.lose_engine(CrashAttribution(), table)
    assert culprits == [generation]
    assert len(table.sequences) == 0


def test_an_engine_that_dies_before_it_got_the_streams_is_not_counted_against_them() -> None:
    table = Table()
    generation = table.open("one")
    for _ in range(3):  # the first had it, and the others died while they were starting
        assert table.sequences.lose_engine(CrashAttribution(), table) == []
    assert generation.crashes == 1
    assert table.sequences.take_all() == [generation]
    table.sequences.add(table.sequences.next_number(), generation)
    assert table.sequences.lose_engine(CrashAttribution(), table) == [generation]


def test_while_no_engine_has_the_streams_none_can_be_stuck() -> None:
    table = Table("one")
    assert table.sequences.num_computing == 1
    table.sequences.lose_engine(CrashAttribution(), table)
    assert (len(table.sequences), table.sequences.num_computing) == (1, 0)


def test_without_its_engine_an_abort_leaves_nothing_to_wait_for() -> None:
    table = Table("one")
    assert table.sequences.lose_engine(CrashAttribution(), table) == []
    assert table.sequences.abort("one") is not None
    assert (len(table.sequences), table.aborted) == (0, [])


def test_a_sequence_whose_constraint_cannot_be_compiled_is_gone() -> None:
    table = Table("one", "two")
    problem = errors.make_error(errors.Code.INVALID_REQUEST, param="regex")
    table.sequences.constraint_compiled(ipc.ConstraintCompiled(1, 0.1, problem), 1.0)
    assert (len(table.sequences), table.aborted) == (1, [])
    assert [output.error for output in table.outputs] == [problem]


def test_one_that_was_aborted_before_is_forgotten_with_that_report() -> None:
    table = Table("one")
    table.sequences.abort("one")
    problem = errors.make_error(errors.Code.INVALID_REQUEST, param="regex")
    table.sequences.constraint_compiled(ipc.ConstraintCompiled(1, 0.1, problem), 1.0)
    assert len(table.sequences) == 0
    assert table.outputs == []


def test_a_compiled_constraint_is_news_for_its_stream() -> None:
    table = Table("one")
    table.sequences.constraint_compiled(ipc.ConstraintCompiled(1, 0.1), 1.0)
    table.sequences.constraint_compiled(ipc.ConstraintCompiled(9, 0.1), 1.0)
    assert [output.is_constraint_ready for output in table.outputs] == [True]
    assert len(table.sequences) == 1


def held(table: Table, name: str) -> Generation:
    """Opens a sequence that the engine has not been given."""
    sampling = engine_request.Sampling(max_tokens=9)
    request = engine_request.EngineRequest(key=name, token_ids=[1], sampling=sampling, is_held=True)
    generation = Generation(request, table.outputs.append, CompletionReader(request, TOKEN_BYTES), accepted_at=0.0)
    table.sequences.add(table.sequences.next_number(), generation, b"command")
    return generation


def test_a_sequence_that_is_held_back_is_given_to_the_engine_once() -> None:
    table = Table("one")
    held(table, "two")
    assert (len(table.sequences), table.sequences.num_given) == (2, 1)
    assert table.sequences.release_held("one") is None
    assert table.sequences.release_held("nobody") is None
    assert table.sequences.release_held("two") == b"command"
    assert table.sequences.release_held("two") is None
    assert table.sequences.num_given == 2


def test_a_sequence_that_the_engine_never_had_is_not_aborted_there() -> None:
    table = Table()
    held(table, "one")
    assert table.sequences.abort("one") is not None
    assert (len(table.sequences), table.aborted, table.sequences.release_held("one")) == (0, [], None)


def test_a_sequence_that_the_engine_never_had_is_not_why_it_died() -> None:
    table = Table()
    waiting, generation = table.open("one"), held(table, "two")
    assert table.sequences.lose_engine(CrashAttribution(), table) == []
    assert (waiting.crashes, generation.crashes) == (1, 0)
    assert table.sequences.release_held("two") is None
    assert table.sequences.take_all() == [waiting, generation]


def constrained(table: Table, name: str, held: bytes | None = None) -> Generation:
    constraint = engine_request.Constraint(kind=engine_request.ConstraintKind.REGEX, source="a", param="regex")
    sampling = engine_request.Sampling(max_tokens=9)
    request = engine_request.EngineRequest(key=name, token_ids=[1], sampling=sampling, constraint=constraint)
    generation = Generation(request, table.outputs.append, CompletionReader(request, TOKEN_BYTES), accepted_at=0.0)
    table.sequences.add(table.sequences.next_number(), generation, held)
    return generation


def test_a_sequence_that_waits_for_its_constraint_is_not_why_an_engine_died_or_stands_still() -> None:
    table = Table()
    waiting, new, held_back = constrained(table, "waits"), table.open("new"), constrained(table, "held", b"add")
    assert table.sequences.num_computing == 1
    table.sequences.release_held("held")
    assert table.sequences.num_computing == 1
    assert table.sequences.lose_engine(CrashAttribution(), table) == []
    assert (waiting.crashes, held_back.crashes, new.crashes) == (0, 0, 1)


def test_one_whose_constraint_the_engine_itself_was_compiling_may_be_why_it_died() -> None:
    table = Table()
    waiting, compiling, ready = (constrained(table, name) for name in ("waits", "compiling", "ready"))
    table.sequences.constraint_started(2)
    table.sequences.constraint_compiled(ipc.ConstraintCompiled(3, 0.1), 1.0)
    assert table.sequences.num_computing == 2
    table.sequences.lose_engine(CrashAttribution(), table)
    assert (waiting.crashes, compiling.crashes, ready.crashes) == (0, 1, 0)


def test_one_that_is_aborted_while_its_constraint_is_compiled_leaves_nothing() -> None:
    table = Table()
    constrained(table, "one")
    table.sequences.abort("one")
    table.sequences.constraint_started(1)
    assert table.sequences.num_computing == 1
    table.advance(1, None, EngineFinishReason.ABORTED)
    assert (table.sequences.num_computing, len(table.sequences)) == (0, 0)
