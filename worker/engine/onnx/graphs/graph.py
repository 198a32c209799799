"""Reads an ONNX graph's interface: its inputs and outputs, its cache, and its sizes.

Nothing is assumed: names, types and sizes come from the graph, and anything not understood is refused by name."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.engine.onnx.graphs.external_data import nodes
from tokenbus.worker.files.model_config import HeadSizes

_IDS = "input_ids"
_MASK = "attention_mask"
_POSITIONS = "position_ids"
_KEEP_LOGITS = "num_logits_to_keep"
_CACHE_BRANCH = "use_cache_branch"
_TOKEN_TYPES = "token_type_ids"
_KNOWN = {_IDS, _MASK, _POSITIONS, _KEEP_LOGITS, _CACHE_BRANCH, _TOKEN_TYPES}
_PAST = re.compile(r"past(?:_key_values)?[._](\d+)[._](?:self[._])?(key|value)|past_(key|value)s?_(\d+)")
_EMBEDDINGS = ("last_hidden_state", "token_embeddings", "hidden_states")
_POOLED = ("sentence_embedding", "pooler_output", "text_embeds")
DType = np.dtype[Any]
_INTEGERS: dict[int, DType] = {TensorProto.INT64: np.dtype(np.int64), TensorProto.INT32: np.dtype(np.int32)}
_FLOATS: dict[int, DType] = {TensorProto.FLOAT: np.dtype(np.float32), TensorProto.FLOAT16: np.dtype(np.float16)}

_UNSUPPORTED_NODES = {
    "PagedAttention": "its paged attention runs in CUDA engines only; a GroupQueryAttention export would work",
    "DecoderMaskedMultiHeadAttention": "its attention is for beam search on CUDA; a plain export would work",
    "SparseAttention": "sparse attention is not supported; a dense export would work",
}
_UNSUPPORTED_INPUTS = (
    (r"encoder_|decoder_input_ids", "is of an encoder-decoder model; a decoder-only model would work"),
    (r"inputs_embeds|pixel_values|audio|image", "is of a multimodal model; a text-only export would work"),
    (
        r"conv|ssm|recurrent|rwkv|state",
        "is state that can't be truncated at a token (a hybrid or recurrent model); a model whose layers all attend "
        "would work, or its GGUF",
    ),
    (
        r"block_table|slot_mapping|cumulative|seqlens",
        "is of a paged CUDA engine; a GroupQueryAttention export would work",
    ),
    (r"beam|cache_indirection", "is of beam search; an export without it would work"),
)


class KvTensor(NamedTuple):
    """One tensor of the cache, of (batch, heads, tokens, width), as an input and as the output that continues it."""

    past: str
    present: str
    heads: int
    width: int
    dtype: DType

    @property
    def bytes_per_token(self) -> int:
        return self.heads * self.width * self.dtype.itemsize


class Graph(NamedTuple):
    """The inputs and outputs of a graph. The name of a missing one is None."""

    kv: tuple[KvTensor, ...]
    """The keys and values of every layer; empty for an encoder."""
    uses_gqa: bool
    """Whether attention is a GroupQueryAttention node: rows begin at column 0, and the cache is written in place."""
    ids_dtype: DType
    mask: str | None
    positions: str | None
    keep_logits: str | None
    cache_branch: str | None
    token_types: str | None
    logits: str | None
    logits_dtype: DType
    vocab_size: int | None
    hidden: str | None
    """The hidden states of (batch, tokens, width)."""
    pooled: str | None
    """The vectors of (batch, width) that the graph itself computes for whole texts."""

    @property
    def kv_width(self) -> int:
        """The width of a token's keys in a layer, which equals that of its values; 0 for an encoder."""
        return self.kv[0].heads * self.kv[0].width if self.kv else 0

    @property
    def bytes_per_token(self) -> int:
        return sum(kv.bytes_per_token for kv in self.kv)


_UNKNOWN = HeadSizes()


def read(model: onnx.ModelProto, where: str, sizes: HeadSizes = _UNKNOWN) -> Graph:
    """Raises ModelError saying what about the graph is not supported, and what would work instead."""
    weights = {tensor.name for tensor in model.graph.initializer}
    # Older exporters list weights among the inputs.
    inputs = {value.name: value for value in model.graph.input if value.name not in weights}
    outputs = {value.name: value for value in model.graph.output}
    op_types = {node.op_type for node in nodes(model.graph)}
    for op_type, reason in _UNSUPPORTED_NODES.items():
        if op_type in op_types:
            raise ModelError(f"{where}: {reason}")
    kv = tuple(_cache(inputs, outputs, where, sizes))
    _check_inputs(inputs, {tensor.past for tensor in kv}, where)
    logits = outputs.get("logits")
    _check_outputs(logits is not None, bool(kv), set(outputs), where)
    return Graph(
        kv=kv,
        uses_gqa="GroupQueryAttention" in op_types,
        ids_dtype=_type(inputs[_IDS], _INTEGERS, where),
        mask=_if_present(inputs, _MASK),
        positions=_if_present(inputs, _POSITIONS),
        keep_logits=_if_present(inputs, _KEEP_LOGITS),
        cache_branch=_if_present(inputs, _CACHE_BRANCH),
        token_types=_if_present(inputs, _TOKEN_TYPES),
        logits=logits.name if logits is not None else None,
        logits_dtype=_type(logits, _FLOATS, where) if logits is not None else np.dtype(np.float32),
        vocab_size=next(reversed(_dimensions(logits)), None) if logits is not None else None,
        hidden=_if_present(outputs, *_EMBEDDINGS),
        pooled=_if_present(outputs, *_POOLED),
    )


def _check_outputs(has_logits: bool, has_cache: bool, outputs: set[str], where: str) -> None:
    if has_logits and not has_cache:
        raise ModelError(
            f"{where}: has no KV cache (no past_key_values inputs), so that every token would cost the whole prompt; "
            "export it with past, as Optimum's task text-generation-with-past does"
        )
    if not has_logits and not outputs & {*_EMBEDDINGS, *_POOLED}:
        raise ModelError(f"{where}: has neither logits nor embeddings among its outputs ({', '.join(sorted(outputs))})")


def _check_inputs(inputs: dict[str, onnx.ValueInfoProto], cache: set[str], where: str) -> None:
    for name in inputs:
        if name in _KNOWN or name in cache:
            continue
        for pattern, reason in _UNSUPPORTED_INPUTS:
            if re.search(pattern, name):
                raise ModelError(f"{where}: its input {name} {reason}")
        known = ", ".join(sorted(_KNOWN))
        raise ModelError(f"{where}: its input {name} is not known; known are {known} and a KV cache")
    if _IDS not in inputs:
        raise ModelError(f"{where}: has no input {_IDS}; its inputs are {', '.join(sorted(inputs))}")


def _cache(
    inputs: dict[str, onnx.ValueInfoProto], outputs: dict[str, onnx.ValueInfoProto], where: str, sizes: HeadSizes
) -> Iterator[KvTensor]:
    for name, value in inputs.items():
        found = _PAST.fullmatch(name)
        if found is None:
            continue
        layer, part = found[1] or found[4], found[2] or found[3]
        # Exporters name the output in three ways.
        likely = (name.replace("past", "present", 1), f"present.{layer}.{part}", f"present_{part}_{layer}")
        present = _if_present(outputs, *likely)
        if present is None:
            raise ModelError(f"{where}: its cache input {name} has no output that continues it")
        dimensions = _dimensions(value)
        if len(dimensions) != 4:
            raise ModelError(
                f"{where}: its cache input {name} has {len(dimensions)} dimensions, not 4; export it again"
            )
        heads, width = dimensions[1] or sizes.kv_heads, dimensions[3] or sizes.head_width
        if heads is None or width is None:
            raise ModelError(f"{where}: does not say how large {name} is; put its config.json beside it, which would")
        yield KvTensor(name, present, heads, width, _type(value, _FLOATS, where))


def _dimensions(value: onnx.ValueInfoProto) -> list[int | None]:
    # A dimension is a number or a name; 0 or less also stands for an open one.
    dimensions = value.type.tensor_type.shape.dim
    return [one.dim_value if one.HasField("dim_value") and one.dim_value > 0 else None for one in dimensions]


def _type(value: onnx.ValueInfoProto, known: Mapping[int, DType], where: str) -> DType:
    element = value.type.tensor_type.elem_type
    if element not in known:
        allowed = ", ".join(TensorProto.DataType.Name(one).lower() for one in known)
        is_named = element in TensorProto.DataType.values()
        name = TensorProto.DataType.Name(element).lower() if is_named else f"type {element}"
        raise ModelError(f"{where}: {value.name} is of {name}, which can't be served; {allowed} can")
    return known[element]


def _if_present(values: dict[str, onnx.ValueInfoProto], *names: str) -> str | None:
    return next((name for name in names if name in values), None)
