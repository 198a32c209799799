"""With the demo model: an answer does not depend on how its steps are divided into passes, nor on padding."""

from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Listing

import pytest

from tests.support.engines import DEMO, gguf_runner
from tokenbus.worker.contract.engine_request import Sampling
from tokenbus.worker.contract.engine_settings import EngineSettings, SchedulerSettings
from tokenbus.worker.engine.gguf.context import BatchPart, LlamaBatch, Outputs
from tokenbus.worker.engine.gguf.runner import GgufRunner
from tokenbus.worker.engine.process import scheduler_setup
from tokenbus.worker.engine.scheduling.plan import SampledToken
from tokenbus.worker.engine.scheduling.row_tiles import RowTiles
from tokenbus.worker.engine.scheduling.sequence import Sequence

PADS = RowTiles(rows=64, token_cost=10.0, tile_cost=0.0)
"""Attention that is worth any padding, and no pass."""
DIVIDES = RowTiles(rows=64, token_cost=0.0, tile_cost=10.0)
"""Attention that is worth any number of passes."""
PROMPTS = [
    [10 + (place * place + 37 * number) % 600 for place in range(length)] for number, length in enumerate((9, 70, 150))
]


def answers(
    runner: GgufRunner, tiles: RowTiles | None, prompts: Listing[list[int]] = PROMPTS, budget: int = 80
) -> list[list[tuple[int, float]]]:
    """Computes prompts beside each other, in steps of `budget` tokens; returns each answer's tokens and their log
    probabilities."""
    runner.row_tiles = None  # the scheduler would fill tiles up itself
    runner.lanes.clear()
    pool = scheduler_setup.make_pool(runner, SchedulerSettings())
    scheduler = scheduler_setup.make_scheduler(runner, pool, SchedulerSettings(), None)
    runner.row_tiles = tiles
    seen: dict[int, list[tuple[int, float]]] = {number: [] for number in range(len(prompts))}
    for number, prompt in enumerate(prompts):
        sampling = Sampling(max_tokens=6, ignore_eos=True, logprobs=1)
        runner.add_sequence(number, sampling)
        scheduler.add(Sequence(number, array("I", prompt), sampling, frozenset()))
    while scheduler.has_work:
        plan = scheduler.schedule(budget)
        runner.apply(plan.kv_ops)
        outcomes = runner.step(plan)
        for part, outcome in zip(plan.scheduled, outcomes, strict=True):
            if isinstance(outcome, SampledToken):
                assert outcome.logprob is not None
                seen[part.sequence.seq_no].append((outcome.token_id, outcome.logprob.logprob))
        scheduler.update(plan, outcomes)
    for number in seen:
        runner.remove_sequence(number)
    return [*seen.values()]


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[BatchPart]]:
    """The parts of each batch that is computed."""
    seen: list[list[BatchPart]] = []
    fill = LlamaBatch.fill

    def record(batch: LlamaBatch, parts: Iterable[BatchPart], outputs: Outputs) -> None:
        seen.append([*parts])
        fill(batch, seen[-1], outputs)

    monkeypatch.setattr(LlamaBatch, "fill", record)
    return seen


@pytest.fixture
def runner() -> Iterator[GgufRunner]:
    made = gguf_runner(
        EngineSettings(model=DEMO.model, threads=1, context_length=256, kv_tokens=256, max_num_seqs=4, host_cache_mib=0)
    )
    yield made
    made.close()


def are_same(some: list[list[tuple[int, float]]], others: list[list[tuple[int, float]]]) -> bool:
    for one, other in zip(some, others, strict=True):
        if [token for token, _ in one] != [token for token, _ in other]:
            return False
        if [logprob for _, logprob in one] != pytest.approx([logprob for _, logprob in other], abs=0.01):
            return False
    return True


def test_answers_are_the_same_if_every_part_has_a_pass_of_its_own(
    runner: GgufRunner, batches: list[list[BatchPart]]
) -> None:
    whole = answers(runner, None)
    assert max(map(len, batches)) == 3
    batches.clear()
    assert are_same(whole, answers(runner, DIVIDES))
    assert max(sum(len(part.token_ids) for part in parts) for parts in batches if len(parts) > 1) < 64


def test_answers_are_the_same_if_tiles_are_filled_up(runner: GgufRunner, batches: list[list[BatchPart]]) -> None:
    whole = answers(runner, None, budget=40)
    batches.clear()
    assert are_same(whole, answers(runner, PADS, budget=40))
    assert sum(parts[-1].number < 0 for parts in batches) >= 4


def test_a_tile_for_which_there_is_no_room_is_not_filled_up(runner: GgufRunner, batches: list[list[BatchPart]]) -> None:
    prompt = [[10 + place % 600 for place in range(245)]]
    whole = answers(runner, None, prompt)
    batches.clear()
    assert are_same(whole, answers(runner, PADS, prompt))
    sizes = [[len(part.token_ids) for part in parts] for parts in batches]
    assert sizes[1:5] == [[80], [80], [5, 59], [5]]
