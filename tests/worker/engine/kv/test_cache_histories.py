"""Scheduler and pool go through thousands of random histories, on a runner that notices wrong tokens, lanes and
cells."""

import os
from array import array
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.arithmetic import END_TOKEN, ArithmeticRunner, make_config
from tests.support.echo import EchoRunner
from tokenbus.protocol.wire import block_hash
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.kv.prefix_tree import Domain
from tokenbus.worker.engine.kv.retention import CacheHint, RetentionLimits
from tokenbus.worker.engine.scheduling.plan import StepPlan, StepResult, Undone
from tokenbus.worker.engine.scheduling.scheduler import Scheduler
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, Sequence

BLOCK = 4
DOMAINS = (Domain("a"), Domain("b"), Domain("a", "salt"), None)
KINDS = ("shared", "shared", "gqa", "plain", "plain without gaps")
"""The kinds of lanes: cells that several may hold, or memory of their own."""
HISTORIES = int(os.environ.get("TOKENBUS_HISTORIES", "30")) * 5


class Mirror:
    """The blocks that a router believes a worker to hold, from its events alone."""

    def __init__(self) -> None:
        self.parents: dict[int, int] = {}

    def take(self, removed: list[int], stored: list[tuple[int, int]], roots: set[int]) -> None:
        for name in removed:
            del self.parents[name]
        for parent, name in stored:
            assert name not in self.parents, "stored twice"
            self.parents[name] = parent
        for name, parent in self.parents.items():
            assert parent in self.parents or parent in roots, f"{name:x} hangs in the air"


class CacheHistory(RuleBasedStateMachine):
    """A scheduler whose plans are executed at once."""

    @initialize(
        total=st.integers(4, 14),
        lanes=st.integers(0, 5),
        host=st.sampled_from([0, 1, 3, 40]),
        kind=st.sampled_from(KINDS),
        expected=st.sampled_from([0, 1, 3]),
        max_cached=st.sampled_from([None, 0, 2]),
        writes_through=st.booleans(),
        share=st.sampled_from([0.0, 0.2, 1.0]),
        least=st.sampled_from([0, 0, 5, 8, 14, 100]),
    )
    def begin(
        self,
        total: int,
        lanes: int,
        host: int,
        kind: str,
        expected: int,
        max_cached: int | None,
        writes_through: bool,
        share: float,
        least: int,
    ) -> None:
        self.limits = RetentionLimits(share, 20.0)
        self.config = make_config(
            max_num_seqs=3,
            kv_block_size=BLOCK,
            total_kv_blocks=total,
            host_kv_blocks=host,
            max_num_batched_tokens=99,
            writes_through=writes_through,
        )
        self.num_lanes, self.kind, self.expected, self.max_cached = 3 + lanes, kind, expected, max_cached
        self.least = least
        self.memory_fd = os.memfd_create("slots")
        self.start_engine()
        self.mirror = Mirror()
        self.roots = {self.root(domain) for domain in DOMAINS if domain is not None}
        self.open: dict[int, Sequence] = {}
        self.told: dict[int, list[int]] = {}
        self.number = 0
        self.now = 0.0

    def start_engine(self) -> None:
        """Makes an engine, which finds what the one before it has left in host memory."""
        config, lanes = self.config, self.num_lanes
        self.runner: ArithmeticRunner = ArithmeticRunner(config, num_lanes=lanes)
        if self.kind != "shared":
            self.runner = EchoRunner(config, lanes, kind=self.kind)
        self.pool = BlockPool(
            config.total_kv_blocks,
            BLOCK,
            lanes,
            host_blocks=config.host_kv_blocks,
            writes_through=config.writes_through,
            limits=self.limits,
            min_prefix_tokens=self.least,
        )
        self.scheduler = Scheduler(
            self.pool, 3, priority_s=1.0, max_cached_blocks=self.max_cached, expected_tokens=self.expected
        )
        if self.runner.copies is not None:
            self.runner.copies.open(os.dup(self.memory_fd))
            self.runner.copies.reject(self.pool.prefixes.recover(self.runner.copies.recovered))

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 30),
        fork=st.integers(0, 30),
        max_tokens=st.integers(1, 9),
        domain=st.sampled_from(DOMAINS),
        priority=st.integers(-2, 2),
        isolated=st.sampled_from([False, False, False, True]),
        session=st.sampled_from([None, None, "1", "2"]),
        ttl_s=st.sampled_from([None, None, 0.0, 3.0, 99.0]),
    )
    def ask(
        self,
        family: int,
        length: int,
        fork: int,
        max_tokens: int,
        domain: Domain | None,
        priority: int,
        isolated: bool,
        session: str | None,
        ttl_s: float | None,
    ) -> None:
        """Adds a sequence with a prompt of one of few families, which fork somewhere."""
        prompt = [1 + (family + place) % 7 for place in range(min(length, fork))]
        prompt += [50 + self.number % 3] * (length - len(prompt))
        self.number += 1
        self.now += 0.3
        sampling = engine_request.Sampling(max_tokens=max_tokens, ignore_eos=True)
        sequence = Sequence(
            self.number,
            array("I", prompt),
            sampling,
            frozenset({END_TOKEN}),
            domain=domain,
            priority=priority,
            arrived_at=self.now,
            isolated=isolated,
            hint=CacheHint(None if session is None or domain is None else (domain.tenant, session), ttl_s),
        )
        if self.pool.can_ever_allocate(sequence.max_num_tokens):
            self.open[self.number] = sequence
            self.told[self.number] = []
            self.scheduler.add(sequence)

    @rule(budget=st.integers(1, 40), transfer=st.sampled_from([0, 1, 3, 50]), times=st.integers(1, 6))
    def step(self, budget: int, transfer: int, times: int) -> None:
        for _ in range(times):
            self.one_step(budget, transfer)

    @rule(budget=st.integers(1, 40), data=st.data())
    def poison(self, budget: int, data: st.DataObject) -> None:
        """A step computes no numbers for some of its shares."""
        plan = self.plan(budget, transfer=50)
        numbers = [part.sequence.seq_no for part in plan.scheduled]
        poisoned = data.draw(st.sets(st.sampled_from(numbers))) if numbers else set()
        good = [part for part in plan.scheduled if part.sequence.seq_no not in poisoned]
        done = iter(self.runner.step(plan._replace(scheduled=tuple(good))) if good else [])
        outcomes = [Undone.POISONED if number in poisoned else next(done) for number in numbers]
        self.take(self.scheduler.update(plan, outcomes))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 50))
    def abort(self, which: int) -> None:
        number = sorted(self.open)[which % len(self.open)]
        result = self.scheduler.abort(number)
        assert result is not None
        self.take([result])

    @rule(
        family=st.integers(0, 2),
        blocks=st.integers(1, 7),
        first=st.integers(0, 3),
        domain=st.sampled_from(DOMAINS[:3]),
    )
    def put(self, family: int, blocks: int, first: int, domain: Domain) -> None:
        """Blocks come from another engine."""
        if self.config.host_kv_blocks:
            tokens = [1 + (family + place) % 7 for place in range(BLOCK * (first + blocks))]
            copies = self.pool.put(domain, array("I", tokens), first, blocks)
            self.runner.apply(self.pool.cache.ops.take())
            for place, copy in enumerate(copies):
                start = BLOCK * (first + place)
                if copy is not None:
                    content = self.runner.saved({at: tokens[at] for at in range(start, start + BLOCK)})
                    self.runner.opened_copies().write(copy, content)

    @rule(
        family=st.integers(0, 2),
        blocks=st.integers(1, 7),
        first=st.integers(0, 3),
        is_last=st.booleans(),
        domain=st.sampled_from(DOMAINS[:3]),
    )
    def export(self, family: int, blocks: int, first: int, is_last: bool, domain: Domain) -> None:
        """Another engine gets blocks, each with the tokens that it must have."""
        if self.config.host_kv_blocks:
            tokens = [1 + (family + place) % 7 for place in range(BLOCK * (first + blocks))]
            num_cached, copies = self.pool.export(domain, array("I", tokens), first, blocks, is_last=is_last)
            assert len(copies) <= max(0, min(blocks, num_cached - first))
            self.runner.apply(self.pool.cache.ops.take())
            for place, copy in enumerate(copies):
                start = BLOCK * (first + place)
                content = self.runner.opened_copies().read(copy)
                assert content == self.runner.saved({at: tokens[at] for at in range(start, start + BLOCK)})

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """The engine dies, somewhere among the changes of its next step. Another one continues all sequences."""
        known = set(self.pool.cache.tree.all_blocks())
        plan = self.scheduler.schedule(40, 50)
        self.runner.apply(plan.kv_ops[: data.draw(st.integers(0, len(plan.kv_ops)))])
        known |= set(self.pool.cache.tree.all_blocks())
        if self.runner.copies is not None:
            self.runner.copies.close()
        opened, self.open = self.open, {}
        self.start_engine()
        self.mirror.parents.clear()
        recovered = {block.hash for block in self.pool.cache.tree.all_blocks() if block.hash}
        assert recovered <= {block.hash for block in known}, "a block that never was"
        for number, sequence in opened.items():
            token_ids = sequence.token_ids
            self.open[number] = again = Sequence(
                number,
                token_ids,
                sequence.sampling,
                frozenset({END_TOKEN}),
                domain=sequence.domain,
                priority=sequence.priority,
                arrived_at=sequence.arrived_at,
                num_resumed=sequence.num_sampled,
                isolated=True,
            )
            self.scheduler.add(again)

    @rule(tenant=st.sampled_from(["a", "b"]), session=st.sampled_from(["1", "2"]), ttl_s=st.sampled_from([0.0, 5.0]))
    def retain(self, tenant: str, session: str, ttl_s: float) -> None:
        """A client keeps what a session has left, or says that it has ended. Others keep what they have."""
        cache = self.pool.cache
        before = {block: (block.kept_until, block.owner) for block in cache.tree.all_blocks()}
        self.pool.prefixes.retention.expire(self.now)
        self.pool.retain_session((tenant, session), ttl_s)
        others = [block for block, (_, owner) in before.items() if owner != (tenant, session) and block.kept_until]
        assert set(before) == set(cache.tree.all_blocks())
        if not ttl_s:
            assert [block.kept_until for block in others] == [before[block][0] for block in others]

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        self.runner.apply(self.pool.cache.ops.take())
        assert self.pool.cache.evictable_blocks == len(self.pool.cache.host) == 0

    @rule()
    def reclaim_memory(self) -> None:
        if self.scheduler.load().running:
            result = self.scheduler.reclaim_memory()
            self.take([] if result is None else [result])

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.scheduler.check_integrity()
        changes = self.pool.prefixes.take_events()
        self.mirror.take(changes.removed, [tuple(new) for new in changes.stored], self.roots)
        assert set(self.mirror.parents) == {
            b.hash for b in self.pool.cache.tree.all_blocks() if self.pool.cache.tree.is_full(b)
        }
        assert not (self.least == 100 and list(self.pool.cache.tree.all_blocks())), "no sequence is as long"
        assert len(self.mirror.parents) <= self.config.total_kv_blocks + self.config.host_kv_blocks

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for _ in range(2_000):
            if not self.scheduler.has_work:
                break
            self.one_step(40, 50)
            self.everything_adds_up()
        assert not self.open, f"never ended: {self.open}"
        self.clear()
        self.everything_adds_up()
        assert (self.pool.cache.used_blocks, self.pool.cache.free_blocks) == (0, self.pool.cache.total_blocks)
        assert not self.mirror.parents
        self.runner.apply(self.pool.cache.ops.take())
        assert self.runner.is_empty()
        if self.runner.copies is not None:
            self.runner.copies.close()
        os.close(self.memory_fd)

    def one_step(self, budget: int, transfer: int) -> None:
        plan = self.plan(budget, transfer)
        if plan.scheduled:
            self.take(self.scheduler.update(plan, self.runner.step(plan)))

    def plan(self, budget: int, transfer: int) -> StepPlan:
        """Plans a step, and executes the KV ops that come before it."""
        plan = self.scheduler.schedule(budget, transfer, self.now)
        for sequence in plan.started:
            self.runner.add_sequence(sequence.seq_no, sequence.sampling)
        self.runner.apply(plan.kv_ops)
        if self.runner.copies is not None and self.runner.copies.is_open:
            self.runner.copies.seal(plan.labels)
        decodes = [part for part in plan.scheduled if part.num_tokens == 1]
        assert sum(part.num_tokens for part in plan.scheduled) <= budget + len(decodes)
        assert plan.scheduled or plan.kv_ops or not self.scheduler.load().running or transfer == 0
        return plan

    def take(self, results: list[StepResult]) -> None:
        for sequence, sampled, end in results:
            if sampled is not None:
                self.told[sequence.seq_no].append(sampled.token_id)
            if end is not None:
                del self.open[sequence.seq_no]
                self.runner.remove_sequence(sequence.seq_no)
            if end is EngineFinishReason.LENGTH:
                self.check_answer(sequence)

    def check_answer(self, sequence: Sequence) -> None:
        """Asserts that a sequence got the tokens that it gets alone, whatever was shared, offloaded and computed
        again."""
        alone = ArithmeticRunner(make_config(total_kv_blocks=99))
        pool = BlockPool(99, 16, 1, can_share=False)
        scheduler = Scheduler(pool, 1)
        copy = Sequence(1, sequence.token_ids[: sequence.num_prompt], sequence.sampling, frozenset({END_TOKEN}))
        scheduler.add(copy)
        alone.add_sequence(1, sequence.sampling)
        while scheduler.has_work:
            plan = scheduler.schedule(60)
            alone.apply(plan.kv_ops)
            scheduler.update(plan, alone.step(plan))
        assert list(copy.token_ids[copy.num_prompt :]) == self.told[sequence.seq_no]

    def root(self, domain: Domain) -> int:
        return block_hash.root_hash(block_hash.PrefixDomain("", domain.adapters, domain.tenant, domain.cache_salt))


TestCacheHistories: Callable[[], None] = CacheHistory.TestCase
TestCacheHistories.settings = settings(  # type: ignore[attr-defined]
    max_examples=HISTORIES, stateful_step_count=30, deadline=None
)
