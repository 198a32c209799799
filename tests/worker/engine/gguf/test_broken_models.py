"""A worker gives a model up after several engines have died at their start, and reports the last one's reason. A model
with a broken chat template is served without it."""

from pathlib import Path

import pytest
from llama_cpp import llama_cpp as llama

from tests.support import broken_models
from tests.support.engines import DEMO, gguf_runner
from tests.support.models import random_model
from tests.support.models.shape import Shape
from tokenbus.protocol.wire import errors, internal
from tokenbus.protocol.wire.messages import ChatMessage
from tokenbus.worker.contract import contract
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.gguf import backend, context, settings_resolution
from tokenbus.worker.engine.gguf.model import GgufModel
from tokenbus.worker.engine.memory.planner import MemoryPlanner
from tokenbus.worker.engine_client.client import EngineClient
from tokenbus.worker.engine_client.engine_process import EngineLink, EngineProcess
from tokenbus.worker.engine_client.listener import EngineListener
from tokenbus.worker.engine_client.supervisor import MAX_START_FAILURES, EngineSupervisor
from tokenbus.worker.files.layouts import GgufLayout


class Listener(EngineListener):
    """Counts engines that died."""

    def __init__(self) -> None:
        self.num_deaths = 0

    def engine_started(self, engine: contract.Engine, config: contract.EngineConfig) -> None:
        raise AssertionError("no engine can serve this")

    def engine_died(self) -> None:
        self.num_deaths += 1


def settings_of(path: Path) -> EngineSettings:
    return EngineSettings(model=str(path), threads=1, max_num_seqs=2, kv_tokens=256)


async def test_an_engine_that_dies_before_it_serves_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    path = broken_models.with_value(tmp_path / "model.gguf", *broken_models.NAN)
    process, launched = EngineProcess(), 0

    async def launch() -> EngineLink:
        nonlocal launched
        launched += 1
        return await process.open(settings_of(path))

    supervisor = EngineSupervisor(EngineClient(launch, 64, Listener()), "w", 30.0)
    with pytest.raises(ModelError, match=r"died 3 times .*SIGABRT: ops.cpp:\d+: GGML_ASSERT\(eps"):
        await supervisor.run()
    assert launched == MAX_START_FAILURES


@pytest.mark.parametrize("template", ["{% nonsense %}", "{{ bos_token | nonsense }}"])
def test_a_model_whose_chat_template_is_broken_serves_prompts(tmp_path: Path, template: str) -> None:
    runner = gguf_runner(settings_of(broken_models.with_template(tmp_path / "model.gguf", template)))
    assert runner.tokenize(internal.Tokenize(text="hello"))
    with pytest.raises(errors.RequestError, match="nonsense") as caught:
        runner.tokenize(internal.Tokenize(messages=[ChatMessage(role="user", content="hello")]))
    assert caught.value.error.code is errors.Code.UNSUPPORTED
    assert caught.value.error.param == "messages"
    assert "chat" not in runner.config.features or "|" in template  # this template fails only when it is compiled
    runner.close()


def test_a_context_of_one_token_is_refused_and_one_of_two_can_be_served() -> None:
    with pytest.raises(ModelError, match=r"--context-length must be at least 2, .* got 1"):
        settings_resolution.validate(EngineSettings(model="", context_length=1))
    gguf_runner(EngineSettings(model=DEMO.model, threads=1, context_length=2)).close()


@pytest.mark.parametrize("kv_tokens", [2, 255, 256, 257, 1_000])
def test_a_batch_may_be_as_large_as_the_memory_that_llama_cpp_makes(kv_tokens: int) -> None:
    settings = EngineSettings(model=DEMO.model, threads=1, kv_tokens=kv_tokens, max_num_seqs=2)
    model = GgufModel(GgufLayout().find(Path(DEMO.model)), settings, lambda _: None)
    made = context.create(model.handle, settings, partial_state=False)
    assert llama.llama_n_batch(made) == llama.llama_n_ctx(made) >= kv_tokens
    llama.llama_free(made)
    model.close()


@pytest.mark.parametrize("setting", ["cache_type_k", "cache_type_v"])
def test_a_cache_type_that_does_not_fit_the_model_s_heads_is_refused_with_advice_that_helps(
    tmp_path: Path, setting: str
) -> None:
    path = tmp_path / "narrow.gguf"
    random_model.write(path, Shape(layers=1, width=64, feed_forward=64, heads=4, kv_heads=2, vocab=600, context=512))
    backend._log(backend._ERROR, b"what another request had done", None)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"block size 32 does not divide .* pass f16"):
        gguf_runner(EngineSettings(model=str(path), threads=1, **{setting: "q8_0"}))
    gguf_runner(EngineSettings(model=str(path), threads=1, **{setting: "f16"})).close()


@pytest.mark.parametrize("fails", ["GgufTokenizer", "gguf_bundle.build", "model_files.hold_weights"])
def test_a_load_that_fails_once_the_weights_are_there_frees_them(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    freed: list[object] = []
    free, planner = llama.llama_model_free, MemoryPlanner()

    def fail(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(llama, "llama_model_free", lambda handle: (freed.append(handle), free(handle)))
    monkeypatch.setattr(planner, "release_weights", freed.append)
    monkeypatch.setattr(f"tokenbus.worker.engine.gguf.model.{fails}", fail)
    backend.init()
    with pytest.raises(KeyError):
        GgufModel(GgufLayout().find(Path(DEMO.model)), DEMO, lambda share: None, planner)
    assert len(freed) == 2
