"""Writes a GGUF file from memory-mapped tensors, a few rows at a time."""

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
import numpy.typing as npt

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.convert import encoder, safetensors
from tokenbus.worker.convert.architectures import Architecture, PlannedTensor, TensorChange
from tokenbus.worker.convert.config import SafetensorsConfig
from tokenbus.worker.convert.encoder import EncoderConfig, Words
from tokenbus.worker.convert.safetensors import Tensor
from tokenbus.worker.convert.vocabulary import Vocabulary
from tokenbus.worker.files import gguf_metadata, model_config

Array = npt.NDArray[Any]
_CHUNK_VALUES = 4 << 20
"""The number of values converted at a time: 16 MiB of float32."""
_KINDS = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32, 4),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16, 2),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16, 2),
}
_POOLINGS = {"cls": gguf.PoolingType.CLS, "mean": gguf.PoolingType.MEAN, "last": gguf.PoolingType.LAST}
PLAIN = tuple(_KINDS)
"""The types written here; llama.cpp makes the others from one of these."""


def write(
    path: Path,
    name: str,
    kind: str,
    architecture: str,
    add_metadata: Callable[[gguf.GGUFWriter], None],
    tensors: list[PlannedTensor],
    progress: Callable[[float], None],
    factors: Array | None = None,
    is_sampled: bool = False,
) -> None:
    """Writes the file with its matrices as `kind`. `architecture` is llama.cpp's name for it, and `factors` slow down
    rotations. If it `is_sampled`, only what its fingerprint is made of is written, and the rest stays a hole.

    Raises ModelError for values that the type can't hold, unless it is sampled."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(name)
    writer.add_file_type(_KINDS[kind][1])
    add_metadata(writer)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for tensor in tensors:
        quantization, _, value_bytes = _KINDS[kind if tensor.is_matrix else "f32"]
        num_bytes = math.prod(tensor.shape) * value_bytes
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), num_bytes, quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    metadata_end = os.path.getsize(path)
    writer.write_ti_data_to_file()
    writer.close()
    total, done = sum(math.prod(tensor.shape) for tensor in tensors), 0
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        _pad(file)
        if factors is not None:
            file.write(factors.tobytes())
            _pad(file)
        size = file.tell() + sum(_padded_bytes(tensor, kind) for tensor in tensors)
        samples = gguf_metadata.sample_starts(metadata_end, size) if is_sampled else None
        for tensor in tensors:
            own = kind if tensor.is_matrix else "f32"
            for source, chunk in _chunks(tensor):
                num_bytes = chunk.size * _KINDS[own][2]
                if samples is None or _is_sampled(file.tell(), num_bytes, samples):
                    rows = _encode(chunk, source, own, tensor.change, is_checked=samples is None)
                    file.write(np.ascontiguousarray(rows).data)
                else:
                    file.seek(num_bytes, os.SEEK_CUR)
                done += chunk.size
                progress(done / total)
            _pad(file)
        file.truncate()  # a hole may be last


def _padded_bytes(tensor: PlannedTensor, kind: str) -> int:
    num_bytes = math.prod(tensor.shape) * _KINDS[kind if tensor.is_matrix else "f32"][2]
    return num_bytes + -num_bytes % gguf.GGUF_DEFAULT_ALIGNMENT


def _is_sampled(start: int, num_bytes: int, samples: list[int]) -> bool:
    """Whether any of the samples, which begin at these places in order, has some of these bytes."""
    after = bisect_left(samples, start + num_bytes)
    return after > 0 and samples[after - 1] + gguf_metadata.SAMPLE_BYTES > start


def add_metadata(
    writer: gguf.GGUFWriter, architecture: Architecture, config: SafetensorsConfig, vocabulary: Vocabulary
) -> None:
    """Writes the sizes and the vocabulary of a model that generates."""
    _add_config(writer, architecture, config)
    _add_vocabulary(writer, vocabulary, config)


def _add_config(writer: gguf.GGUFWriter, architecture: Architecture, config: SafetensorsConfig) -> None:
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.rotary_size)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_vocab_size(config.vocab_size)
    rope = config.rope
    if rope.kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope.kind))
        writer.add_rope_scaling_factor(rope.factor)
    if rope.kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope.original_max_position_embeddings or config.max_position_embeddings)
    if architecture.has_experts:
        writer.add_expert_count(config.expert_count)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture.has_delta_nets:
        _add_delta_nets(writer, architecture, config)


def _add_delta_nets(writer: gguf.GGUFWriter, architecture: Architecture, config: SafetensorsConfig) -> None:
    writer.add_full_attention_interval(config.full_attention_interval)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    if architecture.has_experts:
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if not architecture.fuses_projections:
        # A text token has the same position in all three dimensions. llama.cpp assigns them in turn to a head's pairs,
        # and a pair without a dimension would not rotate at all.
        pairs = config.rotary_size // 2
        writer.add_rope_dimension_sections([*(len(range(first, pairs, 3)) for first in range(3)), 0])


def _add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary, config: SafetensorsConfig) -> None:
    rules = vocabulary.rules
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.texts)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.adds_space)
    else:
        writer.add_token_merges(vocabulary.merges)
    bos = config.bos_token_id if rules.bos_token_id is None else rules.bos_token_id
    if isinstance(bos, int) and 0 <= bos < config.vocab_size:
        writer.add_bos_token_id(bos)
    if vocabulary.eos_token_id is not None:
        writer.add_eos_token_id(vocabulary.eos_token_id)
    writer.add_add_bos_token(rules.add_bos)
    if rules.chat_template:
        writer.add_chat_template(rules.chat_template)


def add_encoder_metadata(
    writer: gguf.GGUFWriter, config: EncoderConfig, words: Words, sidecars: dict[str, Path]
) -> None:
    """Writes sizes, pooling and vocabulary. Raises ModelError for a pooling that can't be read."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_vocab_size(config.vocab_size)
    writer.add_pooling_type(_POOLINGS[model_config.pooling_mode("auto", sidecars, generates=False)])
    writer.add_tokenizer_model(encoder.NAME)
    writer.add_tokenizer_pre("default")
    writer.add_token_type_count(config.type_vocab_size)
    adds = (
        *(writer.add_bos_token_id, writer.add_sep_token_id, writer.add_pad_token_id),
        *(writer.add_unk_token_id, writer.add_mask_token_id),
    )
    for text, add in zip(encoder.SPECIAL, adds, strict=True):
        add(words.texts.index(text))
    writer.add_token_list(words.texts)
    writer.add_token_types(words.types)


def rope_factors(config: SafetensorsConfig) -> Array | None:
    """Returns the factors by which Llama 3 slows down its rotations: long waves by `factor`, short ones not at all."""
    rope = config.rope
    if rope.kind != "llama3":
        return None
    size, context = config.head_size, rope.original_max_position_embeddings or config.max_position_embeddings
    waves = 2 * math.pi * config.rope_base ** (np.arange(0, size, 2, dtype=np.float64) / size)
    smooth = (context / waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = 1 / ((1 - smooth) / rope.factor + smooth)
    long, short = waves > context / rope.low_freq_factor, waves < context / rope.high_freq_factor
    return np.where(short, 1.0, np.where(long, rope.factor, between)).astype(np.float32)


def _chunks(tensor: PlannedTensor) -> Iterator[tuple[Tensor, Array]]:
    for source in tensor.sources:
        rows = source.rows()
        order = tensor.rows
        step = max(1, _CHUNK_VALUES // rows.shape[1])
        for start in range(0, rows.shape[0] if order is None else len(order), step):
            chunk = rows[start : start + step] if order is None else rows[order[start : start + step]]
            yield source, chunk if tensor.columns is None else chunk[:, tensor.columns]


def _encode(rows: Array, source: Tensor, kind: str, change: TensorChange, *, is_checked: bool) -> Array:
    if source.dtype.lower() == kind and change is TensorChange.NONE:
        return rows
    floats = _changed(safetensors.to_float32(rows, source.dtype), change)
    if kind == "f32":
        return floats
    if kind == "bf16":
        bits = floats.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    try:
        with np.errstate(over="raise" if is_checked else "ignore"):
            return floats.astype(np.float16)
    except FloatingPointError as error:
        raise ModelError(f"{source.path}: has values too large for f16; pass --quantize bf16 or q8_0") from error


def _changed(values: Array, change: TensorChange) -> Array:
    match change:
        case TensorChange.ADD_ONE:
            return values + np.float32(1)
        case TensorChange.NEGATIVE_EXP:
            return -np.exp(values)
        case TensorChange.NONE:
            return values


def _pad(file: BinaryIO) -> None:
    """Pads the file to GGUF's alignment, before the first tensor and after each."""
    file.write(bytes(-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))
