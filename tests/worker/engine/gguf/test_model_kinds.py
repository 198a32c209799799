"""Models of other kinds than most: refused before they end an engine, or served right."""

from array import array
from pathlib import Path

import numpy as np
import pytest

from tests.architectures import tiny_model
from tests.architectures.examine import Bare, Turn, settings_of
from tests.architectures.hyperparameters import VOCABULARY
from tests.support.engines import gguf_runner
from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.engine.gguf.runner import GgufRunner
from tokenbus.worker.engine.scheduling.plan import SampledToken, ScheduledTokens, StepPlan
from tokenbus.worker.engine.scheduling.sequence import Sequence


def runner_of(folder: Path, architecture: str) -> GgufRunner:
    path = folder / "model.gguf"
    tiny_model.write(path, architecture)
    return gguf_runner(settings_of(path))


def together(runner: GgufRunner, prompts: list[list[int]], count: int) -> list[Turn]:
    """Computes prompts of several sequences in the same steps, and the greedy answers to them."""
    sampling = engine_request.Sampling(max_tokens=count, ignore_eos=True, temperature=0.0)
    sequences = []
    for number, prompt in enumerate(prompts):
        sequence = Sequence(number, array("I", prompt), sampling, runner.end_token_ids)
        sequence.lane = number
        runner.add_sequence(number, sampling)
        sequences.append(sequence)
    for _ in range(count):
        shares = tuple(ScheduledTokens(one, one.num_computed, one.num_uncomputed) for one in sequences)
        for sequence, outcome in zip(sequences, runner.step(StepPlan(shares)), strict=True):
            assert isinstance(outcome, SampledToken)
            sequence.num_computed = sequence.num_tokens
            sequence.append([outcome.token_id])
    return [Turn(prompt, list(one.token_ids)[len(prompt) :]) for prompt, one in zip(prompts, sequences, strict=True)]


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("t5", "encoder-decoders and draft models are not supported"),
        ("t5encoder", "has no decoder and names no pooling"),
        ("dream", "is a diffusion model"),
        ("llada", "is a diffusion model"),
    ],
)
def test_a_model_that_does_not_generate_token_after_token_is_refused(
    tmp_path: Path, architecture: str, reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        runner_of(tmp_path, architecture)


@pytest.mark.parametrize(("architecture", "is_apart"), [("plamo2", True), ("llama", False), ("mamba", False)])
def test_sequences_that_llama_cpp_can_not_compute_together_have_batches_of_their_own(
    tmp_path: Path, architecture: str, is_apart: bool
) -> None:
    runner = runner_of(tmp_path, architecture)
    assert ("batches" in runner.config.missing) == is_apart
    draw = np.random.default_rng(1)
    prompts = [draw.integers(5, VOCABULARY, size).tolist() for size in (9, 5, 14)]
    turns = together(runner, prompts, 12)
    runner.close()
    bare = Bare(tmp_path / "model.gguf")
    assert max(bare.shortfall(turn) for turn in turns) < 1e-3


def test_a_model_that_names_a_window_to_which_no_layer_is_bound_shares_prefixes_at_any_block(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "exaone4")
    assert runner.config.prefix_cache
    assert runner.config.checkpoint_sizes is None
    assert runner.config.kv_format is not None
    runner.close()


@pytest.mark.parametrize(
    ("architecture", "missing"),
    [
        ("llama", set()),
        ("qwen2vl", set()),
        ("jamba", {"kv_exchange"}),
        ("mamba", {"kv_exchange"}),
        ("gemma3", {"kv_exchange"}),
    ],
)
def test_a_model_says_what_it_lacks(tmp_path: Path, architecture: str, missing: set[str]) -> None:
    runner = runner_of(tmp_path, architecture)
    runner.close()
    assert runner.config.missing.keys() - {"router_tokenizing"} == missing
    assert ("kv_exchange" in missing) == (not runner.config.kv_identity)
