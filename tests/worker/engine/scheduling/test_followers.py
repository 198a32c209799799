"""Tokens that follow a sampled one for certain are computed together with it, as a decode, and change no answer."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.arithmetic import ArithmeticRunner, next_token
from tests.support.executed_scheduler import ExecutedScheduler, generated, sizes
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.scheduling.plan import Outcome, SampledToken, StepPlan
from tokenbus.worker.engine.scheduling.scheduler import Scheduler
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, Sequence

EOS, PLAIN, STOP = 0, 5, 6


def running(
    *, num_seqs: int = 1, max_step_tokens: int = 100, num_prompt: int = 4, **sampling: object
) -> tuple[Scheduler, list[Sequence]]:
    """A scheduler in which all sequences have computed their prompts and have one token."""
    scheduler = Scheduler(BlockPool(100, 4, 8), 8, max_step_tokens=max_step_tokens)
    fields: dict[str, object] = {"max_tokens": 50} | sampling
    for number in range(1, num_seqs + 1):
        asked = engine_request.Sampling(**fields)  # type: ignore[arg-type]
        prompt = array("I", [number] * num_prompt)
        scheduler.add(Sequence(number, prompt, asked, frozenset({EOS}), arrived_at=float(number)))
    sequences: list[Sequence] = []
    while len(sequences) < num_seqs:
        plan = scheduler.schedule(1_000)
        results = scheduler.update(plan, [SampledToken(PLAIN) if part.samples else None for part in plan.scheduled])
        sequences += [result.sequence for result in results if result.sequence not in sequences]
    return scheduler, sequences


def sample(scheduler: Scheduler, *followers: int) -> StepPlan:
    """Takes a step in which every entry that samples gets PLAIN and the followers."""
    plan = scheduler.schedule(1_000)
    token = SampledToken(PLAIN, None, followers)
    scheduler.update(plan, [token if part.samples else None for part in plan.scheduled])
    scheduler.check_integrity()
    return plan


def test_followers_are_computed_in_the_next_step_with_the_token_before_them() -> None:
    scheduler, (one,) = running()
    sample(scheduler, 7, 8, 9)
    assert generated(one) == [PLAIN, PLAIN, 7, 8, 9]
    assert scheduler.num_decoding == 1
    assert sizes(scheduler.schedule(0)) == [(1, 5, 4)]


def test_they_come_before_prompts_whatever_these_may_have() -> None:
    scheduler, _ = running()
    sample(scheduler, 7, 8)
    scheduler.add(Sequence(2, array("I", [1] * 30), engine_request.Sampling(max_tokens=1), frozenset({EOS})))
    assert sizes(scheduler.schedule(0)) == [(1, 5, 3)]


def test_they_count_as_decoded_and_not_as_a_prompt() -> None:
    scheduler, _ = running()
    sample(scheduler, 7, 8)
    assert scheduler.load().queued_prefill_tokens == 0
    assert scheduler.load().generated_tokens == 4


def test_a_step_has_no_more_tokens_than_it_may_and_one_at_least_for_each_that_decodes() -> None:
    scheduler, sequences = running(num_seqs=3, num_prompt=3, max_step_tokens=10)
    sample(scheduler, 7, 8, 9, 7, 8, 9)
    before = [len(generated(one)) for one in sequences]
    assert sizes(sample(scheduler)) == [(1, 4, 7), (2, 4, 2), (3, 4, 1)]
    # those that are not done have no new token, and decode on
    assert [len(generated(one)) for one in sequences] == [before[0] + 1, before[1], before[2]]
    assert scheduler.num_decoding == 3
    assert sizes(sample(scheduler)) == [(1, 11, 1), (2, 6, 5), (3, 5, 4)]


def test_prompts_get_what_is_left() -> None:
    scheduler, _ = running(max_step_tokens=10)
    sample(scheduler, 7, 8, 9)
    scheduler.add(
        Sequence(2, array("I", [1] * 30), engine_request.Sampling(max_tokens=1), frozenset({EOS}), arrived_at=9.0)
    )
    assert sizes(scheduler.schedule(1_000)) == [(1, 5, 4), (2, 0, 6)]


def ended(*followers: int, **sampling: object) -> tuple[list[int], EngineFinishReason | None, tuple[int, ...]]:
    """The tokens behind the first, the end, and the followers that the result has."""
    scheduler, (one,) = running(**sampling)  # type: ignore[arg-type]
    plan = scheduler.schedule(0)
    (result,) = scheduler.update(plan, [SampledToken(PLAIN, None, followers)])
    assert result.sampled is not None
    return generated(one)[1:], result.finish_reason, result.sampled.followers


def test_a_sequence_ends_with_the_follower_that_ends_it() -> None:
    assert ended(7, STOP, 8, stop_token_ids=(STOP,)) == ([PLAIN, 7, STOP], EngineFinishReason.STOP_TOKEN, (7, STOP))
    assert ended(7, EOS) == ([PLAIN, 7, EOS], EngineFinishReason.STOP_TOKEN, (7, EOS))
    assert ended(7, 8, 9, max_tokens=3) == ([PLAIN, 7], EngineFinishReason.LENGTH, (7,))
    assert ended(7, max_tokens=2) == ([PLAIN], EngineFinishReason.LENGTH, ())
    # before min_tokens nothing ends it
    assert ended(STOP, 7, stop_token_ids=(STOP,), min_tokens=9) == ([PLAIN, STOP, 7], None, (STOP, 7))


class FollowingRunner(ArithmeticRunner):
    """Knows some of the tokens behind the one that it samples: as many as the sampled one says."""

    def step(self, plan: StepPlan) -> list[Outcome]:
        return [
            self._follow(part.sequence, one) if isinstance(one, SampledToken) else one
            for part, one in zip(plan.scheduled, super().step(plan), strict=True)
        ]

    def _follow(self, sequence: Sequence, sampled: SampledToken) -> SampledToken:
        token_ids = array("I", [*sequence.token_ids, sampled.token_id])
        followers: list[int] = []
        for _ in range(sampled.token_id % 4):
            followers.append(next_token(sequence.sampling, token_ids, sequence))
            token_ids.append(followers[-1])
        return sampled._replace(followers=tuple(followers))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.text("ab", min_size=1, max_size=14), st.integers(1, 20)), min_size=1, max_size=6),
    st.integers(9, 14),
    st.integers(5, 12),
    st.integers(1, 9),
)
def test_answers_are_the_same_with_and_without_them_also_under_preemption(
    asked: list[tuple[str, int]], total_blocks: int, max_step_tokens: int, budget: int
) -> None:
    executed = ExecutedScheduler(
        total_blocks, expected_tokens=1, max_step_tokens=max_step_tokens, make_runner=FollowingRunner
    )
    sequences = [executed.add(n, text, most) for n, (text, most) in enumerate(asked, start=1)]
    while executed.scheduler.has_work:
        plan = executed.step(budget)
        assert plan.num_tokens <= max_step_tokens
    for one, (text, most) in zip(sequences, asked, strict=True):
        assert generated(one) == ExecutedScheduler().answer(text, most)
