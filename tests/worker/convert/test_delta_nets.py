"""Qwen3-Next and Qwen3.5 in safetensors become a GGUF with which llama.cpp computes what they compute."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from llama_cpp import llama_cpp as llama

from tests.support import delta_net_math, safetensors_model
from tests.support.delta_net_math import KINDS
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.convert import process
from tokenbus.worker.engine.gguf import backend
from tokenbus.worker.files.layouts import SafetensorsLayout

TOKENS = [(7 * place) % 600 for place in range(40)]


def convert(folder: Path, kind: str = "f32") -> Path:
    files, output = SafetensorsLayout().find(folder), folder / "out.gguf"
    sidecars = {name: str(path) for name, path in files.sidecars.items()}
    process.convert(process.Job("tiny", [str(files.weights)], sidecars, kind, 1, str(output)))
    return output


def logits(path: Path) -> np.ndarray:
    backend.init()
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    assert model is not None
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 128
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = 0
    params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama.llama_init_from_model(model, params)
    assert context is not None
    batch = llama.llama_batch_init(len(TOKENS), 0, 1)
    batch.n_tokens = len(TOKENS)
    for place, token in enumerate(TOKENS):
        batch.token[place], batch.pos[place] = token, place
        batch.n_seq_id[place] = batch.logits[place] = 1
        batch.seq_id[place][0] = 0
    assert llama.llama_decode(context, batch) == 0
    shape = (len(TOKENS), delta_net_math.VOCAB)
    found = np.ctypeslib.as_array(llama.llama_get_logits(context), shape).copy()
    llama.llama_batch_free(batch)
    llama.llama_free(context)
    llama.llama_model_free(model)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_computes_the_logits_of_the_published_weights(tmp_path: Path, kind: str) -> None:
    weights = delta_net_math.write(tmp_path / "tiny", KINDS[kind])
    expected = delta_net_math.logits(weights, KINDS[kind], TOKENS)
    found = logits(convert(tmp_path / "tiny"))
    assert expected.std() > 0.5
    assert np.abs(found - expected).max() < 0.001


@pytest.mark.parametrize("kind", ["qwen3next", "qwen35moe"])
def test_a_quantized_one_keeps_what_is_small_exact(tmp_path: Path, kind: str) -> None:
    delta_net_math.write(tmp_path / "tiny", KINDS[kind])
    path = convert(tmp_path / "tiny", "q8_0")
    assert np.isfinite(logits(path)).all()
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    exact = {name.partition(".0.")[2] for name, type_ in types.items() if type_ == "F32" and ".0." in name}
    norms = {"attn_norm.weight", "post_attention_norm.weight", "ssm_norm.weight"}
    assert exact == norms | {
        "ffn_gate_inp.weight",
        "ffn_gate_inp_shexp.weight",
        "ssm_a",
        "ssm_conv1d.weight",
        "ssm_dt.bias",
    }


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"linear_value_head_dim": 32},
            "linear value heads of another size than their key heads is not converted here",
        ),
        ({"linear_num_value_heads": 5}, "5 linear value heads over 2 key heads make no model"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim must be at least 1, got 0"),
        ({"layer_types": ["full_attention"] * 5}, "layers that do not attend every 4th time is not converted here"),
        ({"full_attention_interval": 0}, "full_attention_interval must be at least 1, got 0"),
        ({"attn_output_gate": False}, "attention without a gate is not converted here"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "rope scaling yarn of a model with linear attention",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.1}}, "rotations of 3 numbers of a head is not converted here"),
        ({"linear_num_key_heads": 3}, "is of the shape|has the shape"),
    ],
)
def test_what_llama_cpp_would_compute_in_another_way_is_refused(
    tmp_path: Path, fields: dict[str, object], problem: str
) -> None:
    folder = tmp_path / "tiny"
    delta_net_math.write(folder, KINDS["qwen35"])
    safetensors_model.set_config(folder, **fields)
    with pytest.raises(ModelError, match=problem):
        convert(folder)
