"""With models whose state can't be cut at a token: answers do not depend on what was reused, and on who ran beside."""

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from llama_cpp import llama_cpp as llama

from tests.support.engines import gguf_runner
from tests.support.models import random_stateful
from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.gguf import probe
from tokenbus.worker.engine.gguf.runner import GgufRunner
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.kv.prefix_tree import Domain
from tokenbus.worker.engine.scheduling.plan import ScheduledTokens, StepPlan, Undone
from tokenbus.worker.engine.scheduling.scheduler import Scheduler
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, Sequence

BLOCK = 16
Make = Callable[..., GgufRunner]
Logits = np.ndarray[tuple[int], np.dtype[np.float32]]
Tokens = np.ndarray[tuple[int], np.dtype[np.int64]]
VOCAB = random_stateful.TINY.vocab
ROUNDING = {"hybrid": 0.0, "recurrent": 0.0, "window": 1e-3}
"""The most that logits may differ, whose standard deviation is 0.16. An attention's rounding depends on the places of
its cells. Those of a window, which wander, can't be made the same; a lane that reuses nothing differs as much."""


@pytest.fixture(scope="module", params=random_stateful.KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / f"{kind}.gguf"
    random_stateful.write(path, kind, random_stateful.TINY)
    return path


@pytest.fixture
def make(model: Path) -> Iterator[Make]:
    runners: list[GgufRunner] = []

    def make(**changes: object) -> GgufRunner:
        fields: dict[str, object] = {
            "model": str(model),
            "threads": 1,
            "max_num_seqs": 6,
            "context_length": 768,
            "kv_tokens": 1_024,
            "max_num_batched_tokens": 256,
            "cache_type_k": "f32",
            "cache_type_v": "f32",
            "flash_attention": "off",
        }
        runner = gguf_runner(EngineSettings(**(fields | changes)))  # type: ignore[arg-type]
        runners.append(runner)
        return runner

    yield make
    for runner in runners:
        runner.close()


def logits_of(runner: GgufRunner, token_ids: Tokens, start: int, lane: int) -> Logits:
    found = probe._decode(runner._context, token_ids.tolist(), start, lane + 1)
    assert found is not None
    return found


def test_a_lane_goes_on_from_copies_bit_by_bit(make: Make, kind: str) -> None:
    """All lanes begin at a multiple of 64 cells, since the rounding of an attention depends on that."""
    runner, lone = make(), make()
    draw = np.random.default_rng(1)
    prompt, other = draw.integers(5, VOCAB, (2, 600))
    for one in (runner, lone):
        logits_of(one, prompt[:96], 0, 0)
        logits_of(one, prompt[96:192], 96, 0)
    first, second, state = runner.lanes.save(0, 0, 96), runner.lanes.save(0, 96, 192), runner.lanes.save_state(0)
    logits_of(runner, other[:64], 192, 0)  # the donor goes on with something else, and another lane begins
    logits_of(runner, other[:256], 0, 3)
    runner.lanes.restore(first, 1, 0, 96)
    runner.lanes.restore(second, 1, 96, 192)
    runner.lanes.restore_state(state, 1)
    for place in range(192, 500):
        one = prompt[place : place + 1]
        difference = logits_of(runner, one, place, 1) - logits_of(lone, one, place, 0)
        assert np.abs(difference).max() <= ROUNDING[kind], place


class Turn(NamedTuple):
    """A request that has ended, and the tokens that it got."""

    prompt: list[int]
    answer: list[int]


class Fleet:
    """Sequences on a runner, whose plans are executed at once."""

    def __init__(self, runner: GgufRunner, budget_bytes: int, max_num_seqs: int = 6) -> None:
        sizes = runner.config.checkpoint_sizes
        assert sizes is not None
        assert runner.copies is not None
        runner.copies.open()
        self.runner = runner
        self.pool = BlockPool(
            1_024 // BLOCK,
            BLOCK,
            runner.num_lanes,
            checkpoint_sizes=sizes._replace(budget_bytes=budget_bytes),
        )
        assert self.pool.checkpoints is not None
        self.checkpoints = self.pool.checkpoints
        self.scheduler = Scheduler(self.pool, max_num_seqs, expected_tokens=1)
        self.turns: list[Turn] = []
        self.ended: list[Sequence] = []
        self._number = 0

    def ask(self, prompt: list[int], max_tokens: int, *, cache: bool = True) -> Sequence:
        self._number += 1
        sequence = Sequence(
            self._number,
            array("I", prompt),
            engine_request.Sampling(max_tokens=max_tokens, ignore_eos=True),
            frozenset(),
            domain=Domain("acme") if cache else None,
            arrived_at=float(self._number),
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self, budget: int) -> None:
        plan = self.scheduler.schedule(budget)
        for sequence in plan.started:
            self.runner.add_sequence(sequence.seq_no, sequence.sampling)
        self.runner.apply(plan.kv_ops)
        assert self.runner.copies is not None
        self.runner.copies.seal(plan.labels)
        for sequence, _, end in self.scheduler.update(plan, self.runner.step(plan)):
            if end is not None:
                assert end is EngineFinishReason.LENGTH
                self.runner.remove_sequence(sequence.seq_no)
                self.ended.append(sequence)
                count = sequence.num_prompt
                self.turns.append(Turn(list(sequence.token_ids[:count]), list(sequence.token_ids[count:])))
        self.scheduler.check_integrity()


def assert_alone_the_same(turn: Turn, lone: GgufRunner) -> None:
    """Asserts that a lone lane that reuses nothing gives the same answer."""
    lone.lanes.clear()
    tokens = np.array(turn.prompt + turn.answer)
    for start in range(0, len(turn.prompt), 200):
        logits = logits_of(lone, tokens[: len(turn.prompt)][start : start + 200], start, 0)
    for place, token_id in enumerate(turn.answer, start=len(turn.prompt)):
        logits[list(lone.end_token_ids)] = -np.inf
        assert token_id == logits.argmax(), f"{place}, behind {len(turn.prompt)}"
        logits = logits_of(lone, tokens[place : place + 1], place, 0)


FIRST, *OTHERS = random_stateful.KINDS
PRESSURES = [
    *((kind, 3) for kind in random_stateful.KINDS),
    (FIRST, 300),  # which evicts nothing
    *(pytest.param(kind, 300, marks=pytest.mark.long) for kind in OTHERS),
]


@pytest.mark.parametrize(("kind", "budget_states"), PRESSURES, indirect=["kind"])
def test_answers_do_not_depend_on_reuse_under_pressure(make: Make, budget_states: int) -> None:
    """Conversations that share a beginning run together in too little memory, in steps of all sizes."""
    runner, lone = make(), make()
    sizes = runner.config.checkpoint_sizes
    assert sizes is not None
    fleet = Fleet(runner, budget_states * (sizes.state_bytes + 64 * sizes.token_bytes))
    draw = np.random.default_rng(2)
    system = draw.integers(5, VOCAB, 100).tolist()
    for _ in range(8):
        fleet.ask(system + draw.integers(5, VOCAB, 30).tolist(), 60)
    num_turns = 0
    while fleet.scheduler.has_work:
        before = len(fleet.ended)
        fleet.step(int(draw.integers(1, 120)))
        for sequence in fleet.ended[before:]:
            if sequence.num_tokens < 300:
                num_turns += 1
                fleet.ask([*sequence.token_ids, *draw.integers(5, VOCAB, 25).tolist()], 60)
    assert fleet.scheduler.counts.preemptions
    assert fleet.checkpoints.restored > num_turns / 2
    assert bool(fleet.checkpoints.evicted) == (budget_states == 3)
    assert len(fleet.turns) == 8 + num_turns
    for turn in fleet.turns:
        assert_alone_the_same(turn, lone)


def test_the_memory_of_states_is_counted_by_lanes(make: Make, kind: str) -> None:
    few, many = make(max_num_seqs=2), make(max_num_seqs=6)
    assert few.config.checkpoint_sizes is not None
    _, state_bytes, token_bytes, *_ = few.config.checkpoint_sizes
    assert many.config.checkpoint_sizes == few.config.checkpoint_sizes
    assert many.config.kv_bytes - few.config.kv_bytes == 4 * state_bytes
    assert (token_bytes == 0) == (kind == "recurrent")
    if kind == "recurrent":  # whose tokens take no memory
        assert (few.config.total_kv_blocks, many.config.total_kv_blocks) == (2 * 768 // BLOCK, 6 * 768 // BLOCK)
    else:
        assert few.config.total_kv_blocks == many.config.total_kv_blocks == 1_024 // BLOCK


def test_a_step_without_room_for_its_second_batch_has_done_the_first_and_the_engine_goes_on(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make()
    sampling = engine_request.Sampling(max_tokens=4, ignore_eos=True)
    sequences = [Sequence(lane, array("I", [9 + lane, 20, 21, 22]), sampling, ()) for lane in (0, 1)]
    for lane, sequence in enumerate(sequences):
        sequence.lane, sequence.apart = lane, lane
        runner.add_sequence(lane, sampling)
    first, second = (ScheduledTokens(sequence, 0, 4) for sequence in sequences)
    decode, statuses = llama.llama_decode, iter([0, 1, 0])

    def without_room(context: object, batch: object) -> int:
        return next(statuses) or int(decode(context, batch))

    monkeypatch.setattr(llama, "llama_decode", without_room)
    done, undone = runner.step(StepPlan((first, second)))
    assert undone is Undone.NO_ROOM
    (later,) = runner.step(StepPlan((second,)))
    monkeypatch.undo()
    runner.lanes.clear()
    assert runner.step(StepPlan((first, second))) == [done, later]
