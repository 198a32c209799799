"""Measures conversions of safetensors: CPU time, peak memory, and how close the logits are to transformers'.

    python -m bench.conversion [--gigabytes 1] [--width 2048] [--kinds f16,q8_0,q4_k_m]
    python -m bench.conversion --logits     # needs the extra `transformers`

The first writes random weights of a Llama in BF16 with the demo's tokenizer. The second makes a tiny random model of
each architecture and lets transformers and llama.cpp compute the logits of the same 200 tokens.
"""

import argparse
import json
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from llama_cpp import llama_cpp as llama

from tokenbus.demo import ONNX_PATH
from tokenbus.protocol.telemetry import logs
from tokenbus.worker.convert.process import Job
from tokenbus.worker.engine.gguf import backend
from tokenbus.worker.files.safetensors_layout import SafetensorsLayout

_HEAD_SIZE = 128
_TOKENS = 200
_VOCAB = 640
_TINY = {
    "vocab_size": _VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
}
_LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
_DELTA_NETS = {
    "num_hidden_layers": 5,  # the fourth attends
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "tie_word_embeddings": False,
}
_SHARED_EXPERT = {"shared_expert_intermediate_size": 64, "tie_word_embeddings": False}
_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "Llama, llama3 scaling": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | _LLAMA_3},
    ),
    "Llama, yarn": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "Llama, linear scaling": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "Mistral": ("MistralConfig", {"head_dim": 48, "sliding_window": None}),
    "Qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "Qwen3": ("Qwen3Config", {"head_dim": 64}),
    "Qwen3-MoE": ("Qwen3MoeConfig", {"head_dim": 32} | _EXPERTS),
    "Qwen3-Next": ("Qwen3NextConfig", _DELTA_NETS | _EXPERTS | _SHARED_EXPERT),
    "Qwen3.5": ("Qwen3_5TextConfig", _DELTA_NETS),
    "Qwen3.5-MoE": ("Qwen3_5MoeTextConfig", _DELTA_NETS | _EXPERTS | _SHARED_EXPERT),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure conversions of safetensors.", allow_abbrev=False)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the published weights (%(default)s)")
    parser.add_argument("--width", type=int, default=2_048, help="width of the model, a multiple of 128 (%(default)s)")
    parser.add_argument("--kinds", default="f16,q8_0,q4_k_m", help="types to convert to (%(default)s)")
    parser.add_argument("--logits", action="store_true", help="compare logits with transformers instead")
    options = parser.parse_args()
    logs.configure("bench")
    with tempfile.TemporaryDirectory(prefix="tokenbus-conversion-") as name:
        if options.logits:
            _compare_logits(Path(name))
        else:
            _measure(Path(name), options.gigabytes, options.width, options.kinds.split(","))


def _measure(folder: Path, gigabytes: float, width: int, kinds: list[str]) -> None:
    published = _write_random(folder / "random", gigabytes, width)
    print(f"{published / 1e9:.2f} GB of BF16, width {width}; largest tensor {8 * width**2 / 2**20:.0f} MiB")
    for kind in kinds:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        peak = _convert(folder / "random", kind, folder / "out.gguf")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"{kind:<8}{cpu_s / published * 1e9:6.1f} s of CPU a GB, private memory at most {peak / 2**20:.0f} MiB")


def _convert(folder: Path, kind: str, output: Path) -> int:
    """Converts in a process of its own; returns its peak private memory in bytes."""
    files = SafetensorsLayout().find(folder)
    sidecars = {name: str(path) for name, path in files.sidecars.items()}
    job = Job(folder.name, [str(files.weights)], sidecars, kind, 1, str(output))
    command = [sys.executable, "-m", "tokenbus.worker.convert.process"]
    peak = 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(job) + b"\n")
        process.stdin.flush()
        for line in process.stdout:  # a line for each percent
            assert b'"error":""' in line, line
            peak = max(peak, _private_bytes(process.pid))
    return peak


def _private_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")), 0)


def _write_random(folder: Path, gigabytes: float, width: int) -> int:
    """Writes a Llama of about that size; returns the bytes of its weights."""
    _copy_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    layer_bytes = 2 * sum(int(np.prod(shape)) for shape in _layer_shapes(width).values())
    layers = max(1, round(gigabytes * 1e9 / layer_bytes))
    shape = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), width // _HEAD_SIZE)
    (folder / "config.json").write_text(json.dumps(config | shape | heads))
    tensors = dict(_random_shapes(layers, config["vocab_size"], width))
    header, at = {}, 0
    for name, sizes in tensors.items():
        num_bytes = 2 * int(np.prod(sizes))
        header[name] = {"dtype": "BF16", "shape": list(sizes), "data_offsets": [at, at + num_bytes]}
        at += num_bytes
    text = json.dumps(header).encode()
    rng = np.random.Generator(np.random.PCG64(0))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for sizes in tensors.values():
            values = rng.standard_normal(int(np.prod(sizes)), np.float32) * np.float32(0.02)
            file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    return at


def _layer_shapes(width: int) -> dict[str, tuple[int, ...]]:
    inner = 4 * width
    return {
        "input_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (width, width),
        "self_attn.k_proj.weight": (width, width),
        "self_attn.v_proj.weight": (width, width),
        "self_attn.o_proj.weight": (width, width),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }


def _random_shapes(layers: int, vocab: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (vocab, width)
    yield "model.norm.weight", (width,)
    for number in range(layers):
        for name, shape in _layer_shapes(width).items():
            yield f"model.layers.{number}.{name}", shape


def _copy_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in ONNX_PATH.iterdir():
        if path.is_file():
            shutil.copy(path, folder)


def _compare_logits(folder: Path) -> None:
    """Prints the largest difference of any logit for each architecture."""
    for name, (config_class, fields) in _CASES.items():
        model_folder = folder / name
        _copy_tokenizer(model_folder)
        expected = _transformers_logits(model_folder, config_class, fields)
        line = f"{name:<24}spread {expected.std():.2f}"
        for kind in ("f32", "f16"):
            _convert(model_folder, kind, folder / "out.gguf")
            line += f"  {kind} {np.abs(_llama_logits(folder / 'out.gguf') - expected).max():.6f}"
        print(line, flush=True)


def _transformers_logits(folder: Path, config_class: str, fields: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Makes a random model, saves it, and returns its logits."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**(_TINY | fields))
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # new ones are 0 and 1, which would hide mistakes
            parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder)
    with torch.no_grad():
        logits: np.ndarray[Any, Any] = model(torch.arange(_TOKENS)[None]).logits[0].numpy()
    return logits


def _llama_logits(path: Path) -> np.ndarray[Any, Any]:
    backend.init()
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    assert model is not None
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    params.type_k = params.type_v = 0  # keys and values in f32, so that only the weights are rounded
    params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama.llama_init_from_model(model, params)
    assert context is not None
    batch = llama.llama_batch_init(_TOKENS, 0, 1)
    batch.n_tokens = _TOKENS
    for number in range(_TOKENS):
        batch.token[number] = batch.pos[number] = number
        batch.n_seq_id[number] = batch.logits[number] = 1
        batch.seq_id[number][0] = 0
    assert llama.llama_decode(context, batch) == 0
    logits = np.ctypeslib.as_array(llama.llama_get_logits(context), (_TOKENS, _VOCAB)).copy()
    llama.llama_batch_free(batch)
    llama.llama_free(context)
    llama.llama_model_free(model)
    return logits


if __name__ == "__main__":
    main()
