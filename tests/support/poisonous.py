"""A runner whose model computes no numbers for some tokens, and which harms what is computed beside them."""

from collections.abc import Sequence as Listing

from tests.support.arithmetic import ArithmeticRunner, make_config
from tests.support.stateful import StatefulRunner
from tokenbus.worker.contract import contract
from tokenbus.worker.engine.kv.ops import Truncate
from tokenbus.worker.engine.scheduling.plan import Outcome, ScheduledTokens, StepPlan, Undone

POISON = 999
"""The token after which the numbers of a sequence are none. No answer has it."""
KNOWN_POISON = 66
"""The same for `StainedRunner`; a frontend accepts it as a part of a prompt."""


class PoisonousRunner(ArithmeticRunner):
    """A share with the token POISON is poisoned, and every `reach`-th one of those that are computed with it too; 0
    reaches none. It fails if anything is left of a share that was poisoned."""

    def __init__(self, config: contract.EngineConfig, num_lanes: int = 24, *, reach: int = 1) -> None:
        super().__init__(config, num_lanes=num_lanes)
        self.reach = reach
        self.num_poisoned = 0
        """The tokens of all shares that were poisoned."""

    def step(self, plan: StepPlan) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        for batch in plan.batches():
            poisoned = self._poisoned(batch)
            good = [part for part in batch if part not in poisoned]
            outcomes |= dict(zip([part.lane for part in good], self._compute(plan, good), strict=True))
            outcomes |= {part.lane: self._take_back(part) for part in poisoned}
            self.num_poisoned += sum(part.num_tokens for part in poisoned)
        return [outcomes[part.lane] for part in plan.scheduled]

    def _compute(self, plan: StepPlan, parts: Listing[ScheduledTokens]) -> list[Outcome]:
        return super().step(plan._replace(scheduled=tuple(parts))) if parts else []

    def _poisoned(self, batch: Listing[ScheduledTokens]) -> list[ScheduledTokens]:
        if not any(POISON in part.token_ids for part in batch):
            return []
        return [
            part
            for number, part in enumerate(batch)
            if POISON in part.token_ids or (self.reach and not number % self.reach)
        ]

    def _take_back(self, part: ScheduledTokens) -> Undone:
        return Undone.POISONED


class StainedRunner(PoisonousRunner):
    """After a prompt with the token KNOWN_POISON, all shares are poisoned: what is written over its memory does not
    help. `num_tries` counts the shares since then."""

    def __init__(self, config: contract.EngineConfig | None = None, *, canary: Listing[int] = (1,)) -> None:
        super().__init__(config or make_config(max_num_seqs=4))
        self.canary = canary
        self.num_tries = 0

    def _poisoned(self, batch: Listing[ScheduledTokens]) -> list[ScheduledTokens]:
        prompts = [part.sequence.token_ids[: part.sequence.num_prompt] for part in batch]
        is_stained = self.num_tries or any(KNOWN_POISON in one for one in prompts)
        self.num_tries += len(batch) if is_stained else 0
        return list(batch) if is_stained else []


class PoisonousStatefulRunner(StatefulRunner):
    """The same with lanes that can't be cut: what is poisoned is lost. Every sequence is reached."""

    def __init__(self, config: contract.EngineConfig, num_lanes: int = 24) -> None:
        super().__init__(config, num_lanes)
        self.num_poisoned = 0

    def step(self, plan: StepPlan) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        for batch in plan.batches():
            if any(POISON in part.token_ids for part in batch):
                self.apply([Truncate(part.lane) for part in batch])
                outcomes |= {part.lane: Undone.LOST for part in batch}
                self.num_poisoned += sum(part.num_tokens for part in batch)
            else:
                done = super().step(plan._replace(scheduled=tuple(batch)))
                outcomes |= dict(zip([part.lane for part in batch], done, strict=True))
        return [outcomes[part.lane] for part in plan.scheduled]
