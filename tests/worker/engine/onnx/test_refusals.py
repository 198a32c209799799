"""An ONNX engine starts with a model that it can serve, and says what is wrong with any other."""

import shutil
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import helper

from tests.support import graphs
from tests.support.engines import ONNX, gqa_demo
from tokenbus import demo
from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings, OnnxSettings
from tokenbus.worker.engine.device.loaded_models import LoadedModels
from tokenbus.worker.engine.onnx import runner as onnx_runner
from tokenbus.worker.engine.onnx.runner import OnnxRunner
from tokenbus.worker.engine.scheduling.plan import SampledToken, ScheduledTokens, StepPlan, Undone
from tokenbus.worker.engine.scheduling.sequence import Sequence

FOLDERS = {"plain": lambda: demo.ONNX_PATH, "gqa": gqa_demo}
Change = Callable[[onnx.GraphProto], None]
NO_GPU_HAS_THIS_NUMBER = 99
MOST = 20
"""The tokens of a run for which a graph that was changed to run out of memory has room."""
SAMPLING = engine_request.Sampling(max_tokens=64, ignore_eos=True, logprobs=1)


def load(settings: EngineSettings) -> OnnxRunner:
    runner = onnx_runner.load(settings, lambda share: None, LoadedModels())
    assert isinstance(runner, OnnxRunner)
    return runner


def changed(to: Path, flavour: str, change: Change) -> EngineSettings:
    """Settings for the demo model with a changed graph."""
    folder = to / flavour
    shutil.copytree(FOLDERS[flavour](), folder)
    path = folder / "onnx" / "model.onnx"
    model = onnx.load(path)
    change(model.graph)
    onnx.save(model, path)
    return msgspec.structs.replace(ONNX, model=str(folder))


@pytest.fixture(params=FOLDERS)
def flavour(request: pytest.FixtureRequest) -> str:
    return request.param


class Lane:
    """A sequence with a lane of its own, and the logprob of each of its tokens."""

    def __init__(self, runner: OnnxRunner, lane: int, tokens: list[int]) -> None:
        self.sequence = Sequence(lane, array("I", tokens), SAMPLING, frozenset())
        self.sequence.lane = lane
        self.logprobs: list[float] = []
        runner.add_sequence(lane, SAMPLING)

    @property
    def completion(self) -> list[int]:
        return list(self.sequence.token_ids[self.sequence.num_prompt :])

    @property
    def next(self) -> ScheduledTokens:
        """All tokens that are not computed yet."""
        return ScheduledTokens(self.sequence, self.sequence.num_computed, self.sequence.num_uncomputed)

    def take(self, token_id: int, logprob: float) -> None:
        self.sequence.reuse_prefix(self.sequence.num_tokens - 1)
        self.sequence.num_computed += 1
        self.sequence.append([token_id])
        self.logprobs.append(logprob)


def step(runner: OnnxRunner, *lanes: Lane) -> None:
    for lane, sampled in zip(lanes, runner.step(StepPlan(tuple(lane.next for lane in lanes))), strict=True):
        assert isinstance(sampled, SampledToken)
        assert sampled.logprob is not None
        lane.take(sampled.token_id, sampled.logprob.logprob)


def assert_same(one: Lane, other: Lane) -> None:
    assert one.completion == other.completion
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-3)


@pytest.fixture
def scarce(tmp_path: Path, flavour: str) -> Iterator[OnnxRunner]:
    """A runner that has no memory for a run of more than `MOST` tokens."""
    runner = load(changed(tmp_path, flavour, partial(graphs.run_out_of_memory, above=MOST)))
    yield runner
    runner.close()


# devices


def test_a_gpu_that_is_not_there_is_refused_with_the_way_out() -> None:
    cuda = OnnxSettings(provider="cuda", device_id=NO_GPU_HAS_THIS_NUMBER)
    with pytest.raises(ModelError, match=r"^--provider cuda: .+; pass --provider cpu, or auto to have it chosen$"):
        load(msgspec.structs.replace(ONNX, onnx=cuda))


def test_a_device_that_is_not_there_is_refused_by_the_name_that_was_given() -> None:
    with pytest.raises(ModelError, match=r"^--devices cuda:99: .+; pass --devices cpu, or leave it out$"):
        load(msgspec.structs.replace(ONNX, devices=(f"cuda:{NO_GPU_HAS_THIS_NUMBER}",)))
    load(msgspec.structs.replace(ONNX, devices=("cpu",))).close()


def test_a_gpu_that_was_not_asked_for_is_not_missed() -> None:
    for provider in ("auto", "cpu"):
        runner = load(
            msgspec.structs.replace(ONNX, onnx=OnnxSettings(provider=provider, device_id=NO_GPU_HAS_THIS_NUMBER))
        )
        assert runner.config.engine_version.endswith(" on cpu")
        runner.close()


def test_an_unknown_provider_is_refused_before_anything_is_loaded() -> None:
    settings = EngineSettings(model="/nowhere/m.onnx", onnx=OnnxSettings(provider="rocm"))
    with pytest.raises(ModelError, match=r"^--provider must be one of auto, cpu, cuda, got rocm$"):
        load(settings)


# results


def test_a_graph_that_mixes_the_rows_of_a_batch_is_refused(tmp_path: Path, flavour: str) -> None:
    with pytest.raises(ModelError, match=r"model\.onnx: computes different results in a batch than alone"):
        load(changed(tmp_path, flavour, graphs.mix_rows))


def test_rounding_that_differs_from_run_to_run_is_borne_and_more_than_that_is_not(tmp_path: Path, flavour: str) -> None:
    load(changed(tmp_path / "little", flavour, partial(graphs.shake, by=0.015))).close()
    with pytest.raises(ModelError, match=r"model\.onnx: computes different results in a batch than alone"):
        load(changed(tmp_path / "much", flavour, partial(graphs.shake, by=0.1)))


def test_a_graph_with_weights_of_four_bits_is_served(tmp_path: Path, flavour: str) -> None:
    runner = load(changed(tmp_path, flavour, graphs.quantize))
    alone, *together = (Lane(runner, number, [1, 40, 41, 42]) for number in range(3))
    for lanes in ([alone], together):
        for _ in range(4):
            step(runner, *lanes)
    for lane in together:
        assert_same(alone, lane)
    runner.close()


def test_a_graph_for_one_row_is_refused(tmp_path: Path, flavour: str) -> None:
    with pytest.raises(ModelError, match=r"model\.onnx: can't compute a first step: "):
        load(changed(tmp_path, flavour, graphs.have_one_row))


def test_a_graph_that_computes_no_numbers_is_refused(tmp_path: Path, flavour: str) -> None:
    with pytest.raises(ModelError, match=r"gives no logits for a vocabulary of \d+, or no finite ones"):
        load(changed(tmp_path, flavour, graphs.compute_no_numbers))


def test_a_graph_with_a_node_that_nobody_knows_is_refused_with_what_onnxruntime_says(tmp_path: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        graph.node.append(helper.make_node("Nonsense", ["input_ids"], ["nothing"], domain="nowhere"))

    with pytest.raises(ModelError, match=r"model\.onnx: onnxruntime [\d.]+ can't load it: .*nowhere"):
        load(changed(tmp_path, "plain", change))


@pytest.mark.parametrize("most_paddings", [-1, 0])
def test_a_graph_that_ignores_its_mask_is_given_rows_of_one_length_only(tmp_path: Path, most_paddings: int) -> None:
    settings = changed(tmp_path, "plain", graphs.ignore_mask)
    runner = load(msgspec.structs.replace(settings, onnx=OnnxSettings(max_paddings=most_paddings)))
    prompts = [[1, 40, 41, 42], [1, 50, 51, 52, 53, 54], [1, 60, 61, 62, 63, 64]]
    alone, together = (
        [Lane(runner, first + number, tokens) for number, tokens in enumerate(prompts)] for first in (0, len(prompts))
    )
    for lane in alone:
        for _ in range(4):
            step(runner, lane)
    for _ in range(4):
        step(runner, *together)
    for one, other in zip(alone, together, strict=True):
        assert_same(one, other)
    runner.close()


# memory


def test_with_less_memory_free_than_is_to_stay_no_prompt_is_computed_and_nothing_disturbed(flavour: str) -> None:
    floor = OnnxSettings(min_free_mib=1 << 40)
    runner = load(msgspec.structs.replace(ONNX, model=str(FOLDERS[flavour]()), onnx=floor))
    lane = Lane(runner, 0, [1, 40, 41, 42])
    before = repr(runner)
    for _ in range(2):
        assert runner.step(StepPlan((lane.next,))) == [Undone.NO_ROOM]
        assert repr(runner) == before
    runner.close()


def test_a_floor_of_zero_looks_at_nothing(flavour: str) -> None:
    settings = msgspec.structs.replace(ONNX, model=str(FOLDERS[flavour]()), onnx=OnnxSettings(min_free_mib=0))
    runner = load(settings)
    step(runner, Lane(runner, 0, [1, 40, 41, 42]))
    runner.close()


def test_a_prompt_without_room_leaves_its_lane_as_it_was_and_the_others_done(scarce: OnnxRunner) -> None:
    prompts = [1, 40, 41, 42], [1, 50, 51, 52, 53], [1, 60, 61, 62, 63]
    expected = [Lane(scarce, number, tokens) for number, tokens in enumerate(prompts[:2])]
    found = [Lane(scarce, number, tokens) for number, tokens in enumerate(prompts[:2], 2)]
    large = Lane(scarce, 4, [1, *range(40, 40 + MOST)])
    for lanes in (expected, found):
        step(scarce, lanes[0])
        if lanes is found:
            assert scarce.step(StepPlan((large.next,))) == [Undone.NO_ROOM]
        for _ in range(4):
            step(scarce, *lanes)
    for one, other in zip(expected, found, strict=True):
        assert_same(one, other)


def test_a_run_has_room_for_as_many_tokens_as_it_has_and_not_for_one_more(scarce: OnnxRunner) -> None:
    step(scarce, Lane(scarce, 0, [1, *range(40, 39 + MOST)]))
    assert scarce.step(StepPlan((Lane(scarce, 1, [1, *range(40, 40 + MOST)]).next,))) == [Undone.NO_ROOM]
