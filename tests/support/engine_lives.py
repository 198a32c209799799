"""Engines that die of what they are given, one after another, under a supervisor."""

import asyncio
from collections.abc import Callable, Sequence

from tests.support.arithmetic import ArithmeticRunner, make_config
from tests.support.engines import Recorder, ThreadLink
from tokenbus.worker.contract import contract, engine_request
from tokenbus.worker.contract.engine_errors import DeviceError
from tokenbus.worker.engine.scheduling.plan import SampledToken, StepPlan
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason
from tokenbus.worker.engine_client import engine_process
from tokenbus.worker.engine_client.client import EngineClient
from tokenbus.worker.engine_client.listener import EngineListener
from tokenbus.worker.engine_client.supervisor import EngineSupervisor

POISON = 66


class Fragile(ArithmeticRunner):
    """Dies in every step that holds the poisonous prompt, and once in its step number `fatal_step`."""

    def __init__(self, fatal_step: int = 0) -> None:
        super().__init__(make_config(max_num_seqs=4), step_s=0.002)
        self.fatal_step = fatal_step

    def add_sequence(self, seq_no: int, sampling: engine_request.Sampling) -> None:
        if POISON in sampling.stop_token_ids:
            raise ValueError("no such sampling")
        super().add_sequence(seq_no, sampling)

    def step(self, plan: StepPlan) -> list[SampledToken | EngineFinishReason]:
        poisoned = any(POISON in part.sequence.token_ids[: part.sequence.num_prompt] for part in plan.scheduled)
        if poisoned or self.num_steps + 1 == self.fatal_step:
            raise DeviceError("gone")
        return super().step(plan)


class Life(EngineListener):
    """A supervisor over engines that run on the runners given, one after another."""

    def __init__(self, runners: Sequence[ArithmeticRunner]) -> None:
        self.engine: contract.Engine | None = None
        self.serves = asyncio.Event()
        self.is_down = asyncio.Event()
        self.runners = iter(runners)
        self.supervisor = EngineSupervisor(EngineClient(self._launch, 64, self), "w", step_timeout_s=30.0)

    def engine_started(self, engine: contract.Engine, config: contract.EngineConfig) -> None:
        self.engine = engine
        self.serves.set()
        self.is_down.clear()

    def engine_died(self) -> None:
        self.serves.clear()
        self.is_down.set()

    async def _launch(self) -> engine_process.EngineLink:
        runner = next(self.runners)
        return ThreadLink(lambda _: runner)

    async def ask(
        self,
        token_ids: list[int],
        max_tokens: int = 20,
        stops: tuple[int, ...] = (),
        given: tuple[int, ...] = (),
    ) -> Recorder:
        async with asyncio.timeout(60):
            await self.serves.wait()
        assert self.engine is not None
        recorder = Recorder()
        sampling = engine_request.Sampling(
            max_tokens=max_tokens, ignore_eos=True, temperature=1.0, seed=5, stop_token_ids=stops
        )
        resumed = engine_request.ResumedCompletion(token_ids=list(given)) if given else None
        self.engine.generate(
            engine_request.EngineRequest(key=f"r{token_ids}", token_ids=token_ids, sampling=sampling, resumed=resumed),
            recorder,
        )
        return recorder


Begin = Callable[[Sequence[ArithmeticRunner]], Life]
"""Begins the life of some runners."""
