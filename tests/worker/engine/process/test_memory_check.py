"""An engine ends itself where non-finite numbers stay in its memory, and only then."""

import queue

import pytest

from tests.support import poisoned_model
from tests.support.arithmetic import ArithmeticRunner, make_config
from tests.support.engines import gguf_runner
from tests.support.poisonous import KNOWN_POISON, POISON, PoisonousRunner, StainedRunner
from tokenbus.protocol.wire import block_hash
from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.engine_errors import DeviceError
from tokenbus.worker.engine.device.runner import Runner
from tokenbus.worker.engine.gguf.lanes import Lanes
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine.process.loop import Inbox, StepLoop
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason

BAD = EngineFinishReason.BAD_LOGITS
LENGTH = EngineFinishReason.LENGTH


def add(seq_no: int, *token_ids: int, max_tokens: int = 6) -> ipc.Add:
    sampling = engine_request.Sampling(max_tokens=max_tokens, ignore_eos=True)
    return ipc.Add(seq_no, block_hash.pack_token_ids(token_ids), sampling, ("acme", ""))


class Ended:
    """A loop that has run until all its sequences had ended, or the engine ended itself."""

    def __init__(self, runner: Runner, *commands: ipc.Add) -> None:
        self.ends: dict[int, EngineFinishReason] = {}
        self.suspects: list[int] | None = None
        self.failure = ""
        self._left = len(commands)
        self._inbox: Inbox = queue.SimpleQueue()
        for command in commands:
            self._inbox.put(command)
        if runner.copies is not None:
            runner.copies.open()
        try:
            StepLoop(runner, self._inbox, self._take, 0.05, debug=True).run()
        except DeviceError as error:
            self.failure = str(error)

    def _take(self, report: ipc.Report) -> None:
        match report:
            case ipc.MemoryPoisoned(suspects):
                self.suspects = suspects
            case ipc.StepReport(outputs=outputs):
                self.ends |= {one.seq_no: one.finish_reason for one in outputs if one.finish_reason is not None}
                if len(self.ends) == self._left:
                    self._inbox.put(None)


def test_an_engine_whose_memory_stays_poisoned_ends_and_names_the_suspect_whom_it_has_not_ended() -> None:
    ended = Ended(StainedRunner(), add(1, 4, KNOWN_POISON))
    assert (ended.suspects, ended.ends) == ([1], {})
    assert "non-finite numbers stay" in ended.failure


def test_an_engine_whose_memory_is_good_again_ends_only_the_culprit() -> None:
    runner = PoisonousRunner(make_config(max_num_seqs=4))
    runner.canary = (1,)
    ended = Ended(runner, add(1, 1, 2, 3), add(2, 4, POISON))
    assert (ended.suspects, ended.failure) == (None, "")
    assert ended.ends == {1: LENGTH, 2: BAD}


def test_an_engine_whose_model_never_had_finite_numbers_does_not_end() -> None:
    runner = StainedRunner(canary=())
    runner.num_tries = 1
    ended = Ended(runner, add(1, 1, 2, 3), add(2, 4, 5))
    assert (ended.suspects, ended.failure) == (None, "")
    assert ended.ends == {1: BAD, 2: BAD}


def test_a_canary_for_which_there_is_no_room_proves_nothing() -> None:
    runner = StainedRunner(make_config(max_num_seqs=4, kv_block_size=16, total_kv_blocks=4), canary=range(70))
    assert Ended(runner, add(1, 1, KNOWN_POISON)).ends == {1: BAD}


def test_only_copies_that_were_made_before_are_left_for_the_next_engine() -> None:
    config = make_config(max_num_seqs=1, kv_block_size=4, host_kv_blocks=16, writes_through=True)
    runner = StainedRunner(config)
    assert Ended(runner, add(1, *range(1, 9), max_tokens=9), add(2, KNOWN_POISON)).suspects == [2]
    copies = runner.opened_copies()
    assert 1 <= len(copies) == copies.last_number <= 4


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_llama_cpp_whose_memory_is_not_overwritten_keeps_what_is_not_finite(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*commands: ipc.Add) -> Ended:
        runner = gguf_runner(poisoned_model.gguf_model(kind))
        try:
            return Ended(runner, *commands)
        finally:
            runner.close()

    commands = add(1, 5, 6, 7, max_tokens=30), add(2, 8, poisoned_model.POISON, 9)
    good = run(*commands)
    assert (good.suspects, good.ends) == (None, {1: LENGTH, 2: BAD})
    monkeypatch.setattr(Lanes, "wipe", lambda self: None)
    assert run(*commands).suspects is not None


def test_a_runner_without_a_canary_has_the_same_steps() -> None:
    runner = ArithmeticRunner()
    assert Ended(runner, add(1, 1, 2), add(2, 3, 4)).ends == {1: LENGTH, 2: LENGTH}
    assert runner.num_steps == 6
