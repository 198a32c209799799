"""The size of the KV memory is known before it is allocated, and kept within its budget."""

import ctypes
from pathlib import Path

import msgspec
import pytest
from llama_cpp import llama_cpp as llama

from tests.architectures import tiny_model
from tests.support.engines import DEMO, gguf_runner
from tokenbus import demo
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.gguf import backend, context, model_facts
from tokenbus.worker.files import gguf_metadata

LLAMA: dict[str, gguf_metadata.Value] = {
    "general.architecture": "llama",
    "llama.block_count": 4,
    "llama.embedding_length": 256,
    "llama.attention.head_count": 8,
}


def facts(**more: gguf_metadata.Value) -> gguf_metadata.Metadata:
    named = {f"llama.{key.replace('__', '.')}": value for key, value in more.items()}
    return gguf_metadata.Metadata(LLAMA | named, "f")


def settings(**fields: object) -> EngineSettings:
    return msgspec.structs.replace(EngineSettings(model="m", kv_block_size=16), **fields)


@pytest.mark.parametrize(
    ("given", "kinds", "expected"),
    [
        ({}, {}, 4 * 8 * (32 + 32) * 2),
        ({"attention__head_count_kv": 2}, {}, 4 * 2 * (32 + 32) * 2),
        ({"attention__head_count_kv": [2, 0, 1, 0]}, {}, 3 * (32 + 32) * 2),
        ({"attention__key_length": 64, "attention__value_length": 96}, {}, 4 * 8 * (64 + 96) * 2),
        ({}, {"cache_type_k": "q8_0", "cache_type_v": "f32"}, 4 * 8 * (34 + 32 * 4)),
    ],
)
def test_a_tokens_bytes_follow_from_heads_and_types(
    given: dict[str, gguf_metadata.Value], kinds: dict[str, object], expected: int
) -> None:
    assert model_facts.bytes_per_token(facts(**given), settings(**kinds)) == expected


def test_the_demo_models_cells_are_as_large_as_llama_cpp_saves_them() -> None:
    runner = gguf_runner(DEMO)
    try:
        each = model_facts.bytes_per_token(gguf_metadata.read(Path(demo.MODEL_PATH)), DEMO)
        assert runner.config.kv_bytes == DEMO.kv_tokens * each
    finally:
        runner.close()


def test_without_a_limit_settings_stay_as_they_are() -> None:
    asked = settings(kv_tokens=4_096)
    assert model_facts.fit_to_budget(asked, facts(), 1_024) is asked


def test_a_limit_lowers_what_is_asked_for_to_whole_blocks() -> None:
    each = model_facts.bytes_per_token(facts(), settings())
    limited = model_facts.fit_to_budget(settings(kv_tokens=4_096, kv_limit_bytes=1_000 * each + 5), facts(), 512)
    assert (limited.kv_tokens, limited.context_length) == (992, 512)
    limited = model_facts.fit_to_budget(settings(kv_tokens=512, kv_limit_bytes=1_000 * each), facts(), 512)
    assert limited.kv_tokens == 512


def test_a_chosen_context_becomes_shorter_and_one_that_was_asked_for_does_not() -> None:
    each = model_facts.bytes_per_token(facts(), settings())
    assert model_facts.fit_to_budget(settings(kv_limit_bytes=100 * each), facts(), 512).context_length == 96
    with pytest.raises(ModelError, match=r"--kv-budget leaves .* 96 tokens .* may need 512"):
        model_facts.fit_to_budget(settings(kv_limit_bytes=100 * each, context_length=512), facts(), 512)
    with pytest.raises(ModelError, match="--kv-budget"):
        model_facts.fit_to_budget(settings(kv_limit_bytes=1), facts(), 512)


def _mib(line: str) -> float:
    return float(line.split("size =")[1].split("MiB")[0])


@pytest.mark.parametrize("architecture", ["mamba2", "falcon-h1", "granitehybrid", "qwen3next"])
def test_recurrent_states_are_counted_as_large_as_llama_cpp_allocates_them(tmp_path: Path, architecture: str) -> None:
    path = tmp_path / "model.gguf"
    tiny_model.write(path, architecture)
    asked = EngineSettings(model=str(path), max_num_seqs=4, kv_tokens=2_048, context_length=512, kv_block_size=16)
    said: list[str] = []
    callback = llama.llama_log_callback(lambda level, text, _: said.append(text.decode()))
    backend.init()
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    llama.llama_log_set(callback, ctypes.c_void_p(0))
    try:
        llama.llama_free(context.create(model, asked, partial_state=True))
    finally:
        llama.llama_log_set(backend._log_callback, ctypes.c_void_p(0))
        llama.llama_model_free(model)
    states = max(_mib(one) for one in said if "llama_memory_recurrent: size" in one)
    cells = max((_mib(one) for one in said if "llama_kv_cache: size" in one), default=0.0)
    found = gguf_metadata.read(path)
    assert model_facts.states_bytes(found, asked.max_num_seqs) / 2**20 == pytest.approx(states, abs=0.01)
    if architecture != "mamba2":  # its file names heads, which no layer has
        assert asked.kv_tokens * model_facts.bytes_per_token(found, asked) / 2**20 == pytest.approx(cells, abs=0.01)


def test_a_limit_counts_recurrent_states_first() -> None:
    recurrent = facts(ssm__inner_size=512, ssm__state_size=16, ssm__conv_kernel=4)
    each, states = (
        model_facts.bytes_per_token(recurrent, settings()),
        model_facts.states_bytes(recurrent, settings().max_num_seqs),
    )
    assert states == (settings().max_num_seqs + 1) * 4 * (3 * 512 + 512 * 16) * 4
    limited = model_facts.fit_to_budget(settings(kv_tokens=4_096, kv_limit_bytes=states + 512 * each), recurrent, 512)
    assert limited.kv_tokens == 512
    with pytest.raises(ModelError, match=f"take {states}: raise it, or lower --max-num-seqs"):
        model_facts.fit_to_budget(settings(kv_limit_bytes=states - 1), recurrent, 512)
