"""Continues a prompt with a runner alone, without a scheduler."""

from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.gguf.runner import GgufRunner
from tokenbus.worker.engine.kv.ops import Truncate
from tokenbus.worker.engine.onnx.runner import OnnxRunner
from tokenbus.worker.engine.scheduling.plan import SampledToken, ScheduledTokens, StepPlan
from tokenbus.worker.engine.scheduling.sequence import Sequence


def greedy(runner: OnnxRunner | GgufRunner, prompt: list[int], count: int) -> list[int]:
    """Returns the greedy continuation of a prompt that is computed in one step."""
    sampling = engine_request.Sampling(max_tokens=count, ignore_eos=True)
    sequence = Sequence(0, prompt, sampling, runner.end_token_ids)
    sequence.lane = 0
    runner.add_sequence(0, sampling)
    told: list[int] = []
    for _ in range(count):
        (result,) = runner.step(StepPlan((ScheduledTokens(sequence, sequence.num_computed, sequence.num_uncomputed),)))
        assert isinstance(result, SampledToken), result
        sequence.num_computed = sequence.num_tokens
        sequence.append([result.token_id])
        told.append(result.token_id)
    runner.remove_sequence(0)
    runner.apply([Truncate(0)])
    return told
