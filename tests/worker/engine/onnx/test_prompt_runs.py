"""A prompt is computed in runs of which only some give logits, whatever logits the graph computes."""

from array import array
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.support import scripted_model
from tests.support.engines import ONNX, gqa_demo
from tokenbus import demo
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.device.loaded_models import LoadedModels
from tokenbus.worker.engine.onnx.runner import OnnxRunner, load
from tokenbus.worker.engine.scheduling.plan import ScheduledTokens
from tokenbus.worker.engine.scheduling.sequence import Sequence


@pytest.mark.parametrize("kind", ["all logits", "last logits", "gqa"])
def test_runs_with_and_without_logits_may_follow_each_other(kind: str, tmp_path: Path) -> None:
    paths = {"last logits": lambda: demo.ONNX_PATH, "gqa": gqa_demo}
    model = paths.get(kind, lambda: scripted_model.write(tmp_path / "scripted", []))()
    runner = load(
        msgspec.structs.replace(ONNX, model=str(model), context_length=256), lambda share: None, LoadedModels()
    )
    assert isinstance(runner, OnnxRunner)
    try:
        compare_runs(runner)
    finally:
        runner.close()


def compare_runs(runner: OnnxRunner) -> None:
    tokens = array("I", [(7 * place + 3) % 200 for place in range(40)])
    sequence = Sequence(1, tokens, engine_request.Sampling(max_tokens=1), frozenset())
    sequence.lane = 0
    cache, lanes = runner._cache, runner._lanes
    found = []
    for start, stop, num_logits in ((0, 5, 3), (5, 19, 0), (19, 21, 2), (21, 33, 0), (33, 40, 1)):
        logits = cache.prompt(ScheduledTokens(sequence, start, stop - start), num_logits=num_logits)
        assert logits.shape == (num_logits, runner.config.vocab_size)
        lanes.grow(0, start, stop)
        found.append(logits)
    other = Sequence(2, tokens, engine_request.Sampling(max_tokens=1), frozenset())
    other.lane = 1
    whole = cache.prompt(ScheduledTokens(other, 0, 40), num_logits=40)
    np.testing.assert_allclose(np.concatenate(found), whole[[2, 3, 4, 19, 20, 39]], atol=1e-4)
