"""A model is tried out in a process of its own, within limits, and what comes of it is told; one that hangs keeps no
other waiting."""

import asyncio
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from tests.support import broken_models
from tests.support.engines import DEMO
from tests.support.models import random_encoder
from tokenbus import demo
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine_client import trial
from tokenbus.worker.engine_client.engine_process import EngineConnection, EngineProcess
from tokenbus.worker.engine_client.trial import Trials, try_out

SIM = EngineSettings(model="steps-of-50ms", engine="sim")


def limits_of(folder: str) -> tuple[str, str]:
    """Returns the limit of a process's own memory, and how readily the system ends it."""
    lines = Path(folder, "limits").read_text().splitlines()
    return next(line for line in lines if line.startswith("Max data size")), Path(
        folder, "oom_score_adj"
    ).read_text().strip()


async def test_a_model_that_computes_passes() -> None:
    await try_out(DEMO, {})


@pytest.mark.parametrize(
    "changes", [{"max_embed_tokens": 2_048}, {"kv_block_size": 1_024}, {"context_length": 64}, {"kv_tokens": 4_096}]
)
async def test_settings_that_are_right_for_the_model_are_for_its_trial(changes: dict[str, int]) -> None:
    await try_out(msgspec.structs.replace(EngineSettings(model=DEMO.model, threads=1), **changes), {})


@pytest.mark.parametrize("threads", [0, 8])
def test_a_trial_computes_with_one_thread_whatever_the_model_will(threads: int) -> None:
    assert trial._small(EngineSettings(model=DEMO.model, threads=threads)).threads == 1


async def test_a_model_whose_own_context_is_short_passes(tmp_path: Path) -> None:
    folder = tmp_path / "short"
    shutil.copytree(demo.ONNX_PATH, folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 128}
    (folder / "config.json").write_text(json.dumps(config))
    await try_out(EngineSettings(model=str(folder), threads=1), {})


async def test_an_encoder_passes(tmp_path: Path) -> None:
    random_encoder.write(tmp_path / "encoder.gguf", random_encoder.EncoderShape("bert", "mean")._replace(context=128))
    await try_out(EngineSettings(model=str(tmp_path / "encoder.gguf"), threads=1), {})


async def test_one_on_which_the_engine_ends_is_refused_with_its_last_words(tmp_path: Path) -> None:
    path = broken_models.with_value(tmp_path / "model.gguf", *broken_models.NAN)
    with pytest.raises(ModelError, match=r"the engine ended while it loaded .*: .*SIGABRT: ops.cpp:\d+: GGML_ASSERT"):
        await try_out(EngineSettings(model=str(path), threads=1), {})


async def test_one_whose_first_step_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "STEP_TIMEOUT_S", 0.2)
    with pytest.raises(ModelError, match=r"the model has computed nothing within 0\.2 s"):
        await try_out(EngineSettings(model=SIM.model, engine="sim", sim_faults="hang@1"), {})


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what limits a process has")
@pytest.mark.parametrize("is_trial", [True, False])
async def test_only_a_trial_has_a_limit_of_memory_and_ends_first(is_trial: bool) -> None:
    process = EngineProcess(is_trial=is_trial)
    connection = EngineConnection(await process.open(SIM), lambda report: None, lambda: None)
    await connection.open()
    own, adjustment = await asyncio.to_thread(limits_of, f"/proc/{connection.link.pid}")
    inherited, _ = limits_of("/proc/self")
    assert (own != inherited, adjustment == "1000") == (is_trial, is_trial)
    await process.end()


async def test_a_trial_that_hangs_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(settings: EngineSettings, variables: Mapping[str, str]) -> None:
        if settings.model != "right":
            await asyncio.Event().wait()

    monkeypatch.setattr(trial, "try_out", hang)
    trials = Trials({})
    stuck = [
        asyncio.create_task(trials.run(EngineSettings(model=f"stuck-{number}"), lambda: None)) for number in range(3)
    ]
    async with asyncio.timeout(10):
        await trials.run(EngineSettings(model="right"), lambda: None)
    assert not any(one.done() for one in stuck)
    for one in stuck:
        one.cancel()
    await asyncio.gather(*stuck, return_exceptions=True)
