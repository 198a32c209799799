"""A scheduler whose plans are executed at once, on a runner that notices every wrong token."""

from array import array

from tests.support.arithmetic import ArithmeticRunner, make_config
from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.kv.prefix_tree import Domain
from tokenbus.worker.engine.scheduling.lanes import LaneShare
from tokenbus.worker.engine.scheduling.next_turns import TurnAhead
from tokenbus.worker.engine.scheduling.plan import StepPlan, StepResult
from tokenbus.worker.engine.scheduling.scheduler import Scheduler
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, Sequence

EOS = 0


def sizes(plan: StepPlan) -> list[tuple[int, int, int]]:
    """The sequence number, start and token count of each entry."""
    return [(part.sequence.seq_no, part.start, part.num_tokens) for part in plan.scheduled]


class ExecutedScheduler:
    """Prompts are texts of one tenant, a token for each character; blocks have four tokens."""

    def __init__(
        self,
        total_blocks: int = 32,
        max_num_seqs: int = 4,
        num_lanes: int = 8,
        *,
        host_blocks: int = 0,
        expected_tokens: int = 0,
        max_cached_blocks: int | None = None,
        max_step_tokens: int = 999,
        make_runner: type[ArithmeticRunner] = ArithmeticRunner,
        lane_share: LaneShare | None = None,
    ) -> None:
        config = make_config(
            kv_block_size=4, total_kv_blocks=total_blocks, host_kv_blocks=host_blocks, max_num_batched_tokens=999
        )
        self.runner = make_runner(config, num_lanes=num_lanes)
        self.pool = BlockPool(total_blocks, 4, num_lanes, host_blocks=host_blocks)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs,
            max_step_tokens=max_step_tokens,
            max_cached_blocks=max_cached_blocks,
            expected_tokens=expected_tokens,
            lane_share=lane_share,
        )
        self.sequences: dict[int, Sequence] = {}
        self.ends: dict[int, EngineFinishReason] = {}

    def add(self, seq_no: int, text: str, max_tokens: int = 4, adapters: tuple[Adapter, ...] = ()) -> Sequence:
        return self.add_tokens(seq_no, [ord(letter) % 90 for letter in text], max_tokens, adapters)

    def add_tokens(
        self, seq_no: int, token_ids: list[int], max_tokens: int = 4, adapters: tuple[Adapter, ...] = ()
    ) -> Sequence:
        sampling = engine_request.Sampling(max_tokens=max_tokens, ignore_eos=True)
        one = Sequence(
            seq_no,
            array("I", token_ids),
            sampling,
            frozenset({EOS}),
            adapters=adapters,
            domain=Domain("acme", adapters=adapters),
            arrived_at=float(seq_no),
        )
        self.sequences[seq_no] = one
        self.scheduler.add(one)
        return one

    def expect(self, seq_no: int, text: str, num_known: int, tenant: str = "acme") -> TurnAhead:
        """Adds a turn that is expected."""
        token_ids, domain = array("I", [ord(letter) % 90 for letter in text]), Domain(tenant)
        sampling = engine_request.Sampling(max_tokens=1)
        turn = TurnAhead(
            token_ids, domain, num_known, Sequence(seq_no, token_ids, sampling, (), domain=domain, is_ahead=True)
        )
        self.scheduler.next_turns.add(turn)
        return turn

    def step(self, budget: int = 99, transfer_blocks: int = 0, ahead_tokens: int = 0) -> StepPlan:
        """Schedules a step and executes it."""
        plan = self.schedule(budget, transfer_blocks, ahead_tokens)
        if plan.scheduled:
            for result in self.scheduler.update(plan, self.runner.step(plan)):
                self.take(result)
        self.scheduler.check_integrity()
        return plan

    def schedule(self, budget: int = 99, transfer_blocks: int = 0, ahead_tokens: int = 0) -> StepPlan:
        """Schedules a step, of which only the KV ops are executed."""
        plan = self.scheduler.schedule(budget, transfer_blocks, ahead_tokens=ahead_tokens)
        self.scheduler.check_integrity()
        for sequence in plan.started:
            self.runner.add_sequence(sequence.seq_no, sequence.sampling)
        self.runner.apply(plan.kv_ops)
        if self.scheduler.borrowed_lanes is not None:
            self.scheduler.borrowed_lanes.give_back()
        return plan

    def reclaim_memory(self) -> StepResult | None:
        result = self.scheduler.reclaim_memory()
        self.scheduler.check_integrity()
        if result is not None:
            self.take(result)
        return result

    def abort(self, seq_no: int) -> None:
        result = self.scheduler.abort(seq_no)
        assert result is not None
        self.take(result)
        self.scheduler.check_integrity()

    def run(self, transfer_blocks: int = 0) -> None:
        """Steps until all sequences have ended."""
        while self.scheduler.has_work:
            self.step(transfer_blocks=transfer_blocks)

    def answer(self, text: str, max_tokens: int = 4) -> list[int]:
        """The tokens that a sequence generates when it runs alone."""
        alone = ExecutedScheduler()
        one = alone.add(1, text, max_tokens)
        alone.run()
        return generated(one)

    def take(self, result: StepResult) -> None:
        if result.finish_reason is not None:
            assert result.sequence.seq_no not in self.ends
            self.ends[result.sequence.seq_no] = result.finish_reason
            self.runner.remove_sequence(result.sequence.seq_no)


def generated(sequence: Sequence) -> list[int]:
    return list(sequence.token_ids[sequence.num_prompt :])
