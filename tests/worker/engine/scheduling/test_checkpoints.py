"""Where checkpoints are made, who goes on from them, and which ones go first."""

from array import array

import pytest

from tests.support.arithmetic import make_config
from tests.support.block_hashes import block_hashes
from tests.support.stateful import STATE_BYTES, TOKEN_BYTES, StatefulRunner
from tokenbus.protocol.wire import block_hash
from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.contract import CheckpointSizes
from tokenbus.worker.engine.kv.ops import Onload, RestoreState, Truncate
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.kv.prefix_tree import Domain
from tokenbus.worker.engine.scheduling.plan import StepPlan
from tokenbus.worker.engine.scheduling.scheduler import Scheduler
from tokenbus.worker.engine.scheduling.sequence import Sequence

BLOCK = 4
ACME = Domain("acme")
STEP = 9_999


def tokens(count: int, family: int = 0) -> list[int]:
    """The first tokens of an endless text."""
    return [1 + (place * (7 + family) + place // 5) % 90 for place in range(count)]


class Engine:
    """A scheduler with checkpoints whose plans are executed at once."""

    def __init__(
        self, *, budget_bytes: int = 1 << 20, total_blocks: int = 3_000, expected: int = 0, least: int = 0
    ) -> None:
        config = make_config(
            max_num_seqs=4, kv_block_size=BLOCK, total_kv_blocks=total_blocks, max_num_batched_tokens=STEP
        )
        self.runner = StatefulRunner(config, 4)
        sizes = CheckpointSizes(budget_bytes, STATE_BYTES, TOKEN_BYTES)
        self.pool = BlockPool(total_blocks, BLOCK, 4, checkpoint_sizes=sizes, min_prefix_tokens=least)
        assert self.pool.checkpoints is not None
        self.checkpoints = self.pool.checkpoints
        self.scheduler = Scheduler(self.pool, 4, expected_tokens=expected)
        self._number = 0

    def add(
        self, token_ids: list[int], max_tokens: int = 1, *, domain: Domain | None = ACME, priority: int = 0
    ) -> Sequence:
        self._number += 1
        sampling = engine_request.Sampling(max_tokens=max_tokens, ignore_eos=True)
        ids = array("I", token_ids)
        sequence = Sequence(
            self._number, ids, sampling, (), domain=domain, arrived_at=float(self._number), priority=priority
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self, budget: int = STEP) -> list[tuple[int, int, int]]:
        """Executes a step; returns each share of it: whose, from where on and how much."""
        plan = self.plan(budget)
        for result in self.scheduler.update(plan, self.runner.step(plan)):
            if result.finish_reason is not None:
                self.runner.remove_sequence(result.sequence.seq_no)
        self.scheduler.check_integrity()
        return [(part.sequence.seq_no, part.start, part.num_tokens) for part in plan.scheduled]

    def plan(self, budget: int = STEP) -> StepPlan:
        plan = self.scheduler.schedule(budget)
        for sequence in plan.started:
            self.runner.add_sequence(sequence.seq_no, sequence.sampling)
        self.runner.apply(plan.kv_ops)
        return plan

    def run(self) -> int:
        """Steps until all is done; returns the number of tokens that were computed."""
        before = self.runner.num_evaluated
        while self.scheduler.has_work:
            self.step()
        return self.runner.num_evaluated - before

    def ask(self, token_ids: list[int], max_tokens: int = 1, *, domain: Domain | None = ACME) -> Sequence:
        """Runs a sequence by itself."""
        sequence = self.add(token_ids, max_tokens, domain=domain)
        self.run()
        return sequence

    def ends(self) -> list[int]:
        """The positions of all checkpoints from which a lane could go on."""
        return sorted(one.end for one in self.checkpoints.all() if one.has_state)


def test_a_prompt_stops_at_the_last_boundary_eight_tokens_before_its_end() -> None:
    engine = Engine()
    engine.add(tokens(30))
    assert engine.step() == [(1, 0, 20)]
    assert engine.step() == [(1, 20, 10)]
    assert engine.ends() == [20, 30]


@pytest.mark.parametrize(("length", "stop"), [(11, None), (12, 4), (15, 4), (16, 8)])
def test_a_short_prompt_stops_only_where_a_block_ends(length: int, stop: int | None) -> None:
    engine = Engine()
    engine.add(tokens(length))
    assert engine.step()[0][2] == (stop or length)


def test_a_long_prompt_stops_every_2048_tokens() -> None:
    engine = Engine()
    engine.ask(tokens(5_000))
    assert engine.ends() == [2_048, 4_096, 4_992, 5_000]


def test_a_small_budget_ends_steps_before_the_stop() -> None:
    engine = Engine()
    engine.add(tokens(40))
    assert [engine.step(13) for _ in range(4)] == [[(1, 0, 13)], [(1, 13, 13)], [(1, 26, 6)], [(1, 32, 8)]]


def test_the_next_turn_goes_on_where_the_answer_ended() -> None:
    engine = Engine()
    first = engine.ask(tokens(30), max_tokens=21)
    second = engine.add([*first.token_ids, *tokens(40)[30:]])
    engine.run()
    assert (second.num_cached, engine.runner.num_evaluated) == (50, 50 + 11)  # the last token was never computed


def test_a_turn_whose_answer_is_written_otherwise_goes_on_before_the_generation_prompt() -> None:
    engine = Engine()
    engine.ask(tokens(30), max_tokens=21)
    second = engine.ask([*tokens(22), *tokens(20, family=1)])
    assert second.num_cached == 20


def test_an_answer_of_less_than_a_block_leaves_no_checkpoint_of_its_own() -> None:
    engine = Engine()
    engine.ask(tokens(28), max_tokens=1)
    before = engine.ends()
    engine.ask(tokens(28), max_tokens=4)
    assert engine.ends() == before == [20, 28]


def test_a_prompt_stops_where_it_leaves_a_known_one_and_the_next_goes_on_there() -> None:
    engine = Engine()
    engine.ask(tokens(100))
    second = engine.add(tokens(50) + tokens(40, family=1))
    assert engine.step() == [(2, 0, 48)]
    engine.run()
    third = engine.ask(tokens(50) + tokens(40, family=2))
    assert (second.num_cached, third.num_cached) == (0, 48)


def test_prompts_that_begin_alike_are_computed_once() -> None:
    engine = Engine()
    prompts = [tokens(1_000) + tokens(40, family=1 + number) for number in range(4)]
    for prompt in prompts:
        engine.add(prompt)
    assert engine.step() == [(1, 0, 1_000)]
    assert sorted(engine.step()) == [(number, 1_000, 32) for number in range(1, 5)]
    assert engine.run() + 1_000 + 4 * 32 == 1_000 + 4 * 40


def test_equal_prompts_wait_for_the_checkpoint_before_their_end() -> None:
    engine = Engine()
    for _ in range(3):
        engine.add(tokens(100))
    assert engine.step() == [(1, 0, 92)]
    assert sorted(engine.step()) == [(number, 92, 8) for number in (1, 2, 3)]


def test_a_prompt_stops_for_one_that_has_no_lane_yet() -> None:
    engine = Engine(total_blocks=60)
    engine.add(tokens(100) + tokens(50, family=1), max_tokens=40)
    engine.add(tokens(100) + tokens(50, family=2), max_tokens=40)
    assert engine.step() == [(1, 0, 100)]
    assert engine.scheduler.load().waiting == 1
    engine.run()
    assert engine.runner.num_evaluated == 100 + 2 * (50 + 39)


def test_who_has_computed_more_than_it_shares_waits_for_nobody() -> None:
    engine = Engine()
    engine.add(tokens(400))
    engine.step(20)
    engine.add(tokens(16) + tokens(50, family=1))
    assert [number for number, *_ in engine.step(50)] == [1, 2]


def test_a_lane_drops_what_it_has_computed_before_it_goes_on_elsewhere() -> None:
    engine = Engine()
    first, second = engine.add(tokens(400)), engine.add(tokens(300) + tokens(40, family=1), priority=5)
    engine.scheduler.abort(first.seq_no)
    engine.step(50)
    engine.add(tokens(300) + tokens(40, family=2))  # comes before the second one, which waits for it
    engine.step(100)
    assert second.num_computed == 50
    while second.num_computed == 50:
        plan = engine.plan()
        engine.scheduler.update(plan, engine.runner.step(plan))
    assert [type(op) for op in plan.kv_ops if getattr(op, "lane", 0) == second.lane] == [Truncate, Onload, RestoreState]
    assert second.num_cached == 250  # 50 were computed twice


def test_domains_and_requests_without_a_cache_share_nothing() -> None:
    engine = Engine()
    engine.ask(tokens(100))
    for domain in (Domain("other"), Domain("acme", "salt"), None):
        assert engine.ask(tokens(100), domain=domain).num_cached == 0
    assert engine.ask(tokens(100)).num_cached == 92
    engine = Engine()
    engine.ask(tokens(100), domain=None)
    assert engine.ends() == []


def test_the_state_that_was_not_used_for_the_longest_time_goes_first() -> None:
    engine = Engine(budget_bytes=4 * STATE_BYTES + 2 * 100 * TOKEN_BYTES)
    engine.ask(tokens(100))
    engine.ask(tokens(100, family=1))
    engine.ask(tokens(100))
    engine.ask(tokens(90, family=2))
    assert engine.ask(tokens(100)).num_cached == 92
    assert engine.ask(tokens(100, family=1)).num_cached == 0


def test_of_a_long_conversation_the_last_states_stay_and_all_keys_and_values() -> None:
    engine = Engine(budget_bytes=2 * STATE_BYTES + 330 * TOKEN_BYTES)
    turn = engine.ask(tokens(50), max_tokens=20)
    for _ in range(6):
        before = turn.num_tokens
        turn = engine.ask([*turn.token_ids, *tokens(20)], max_tokens=20)
        assert turn.num_cached == before - 1
    assert engine.ends() == [turn.num_tokens - 30, turn.num_tokens - 1]


def test_a_checkpoint_that_has_no_room_is_not_made_and_nothing_goes_for_it() -> None:
    engine = Engine(budget_bytes=STATE_BYTES + 50 * TOKEN_BYTES)
    engine.ask(tokens(40))
    assert engine.ends() == [40]
    engine.ask(tokens(300, family=1))
    assert engine.ends() == [40]


def test_routers_are_told_of_the_blocks_that_end_at_a_checkpoint() -> None:
    engine = Engine()
    engine.ask(tokens(30))
    root = block_hash.root_hash(block_hash.PrefixDomain("", (), "acme", ""))
    hashes = block_hashes(tokens(30), BLOCK, root)
    removed, stored = engine.pool.prefixes.take_events()
    assert (removed, stored) == ([], [(hashes[3], hashes[4])])
    engine.pool.clear()
    engine.runner.apply(engine.pool.cache.ops.take())
    assert engine.pool.prefixes.take_events() == ([hashes[4]], [])
    assert engine.runner.is_empty()


def test_a_sequence_that_was_preempted_goes_on_where_it_was() -> None:
    engine = Engine(total_blocks=60, expected=1)
    first, second = engine.add(tokens(60), max_tokens=120), engine.add(tokens(60, family=1), max_tokens=120)
    engine.run()
    counts = engine.scheduler.counts
    assert counts.preemptions > 0
    assert (counts.restored_tokens > 0, counts.recomputed_tokens) == (True, 0)
    assert first.num_tokens == second.num_tokens == 180


def test_a_sequence_whose_earlier_checkpoint_is_gone_copies_its_keys_and_values_again() -> None:
    engine = Engine(budget_bytes=STATE_BYTES + 60 * TOKEN_BYTES)
    engine.add(tokens(30), max_tokens=25)
    engine.step()
    assert engine.ends() == [20]
    engine.add(tokens(50, family=1), priority=-9)
    engine.step()
    assert engine.ends() == [40]
    engine.run()
    assert engine.ends() == [54]
    assert engine.ask(tokens(30)).num_cached == 0


def test_no_checkpoint_is_made_of_less_than_a_least_prefix() -> None:
    engine = Engine(least=40)
    engine.add(tokens(39))
    assert engine.step() == [(1, 0, 39)], "no step ends for a checkpoint"
    assert len(engine.checkpoints) == 0
    engine.add(tokens(60, family=1))
    assert engine.step() == [(2, 0, 52)]
    engine.step()
    assert sorted(one.end for one in engine.checkpoints.all() if one.has_state) == [52, 60]
