"""What an ONNX file says of itself: its inputs and outputs, its cache, and what it can't be served with.

Nothing is assumed: names, types and sizes are read from the graph, and what is not understood is refused by name."""

import os.path
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto

from tokenbus.worker.engine.runner import ModelError

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
        "is state that can't be cut at a token (a hybrid or recurrent model); a model whose layers all attend would "
        "work, or its GGUF",
    ),
    (
        r"block_table|slot_mapping|cumulative|seqlens",
        "is of a paged CUDA engine; a GroupQueryAttention export would work",
    ),
    (r"beam|cache_indirection", "is of beam search; an export without it would work"),
)


class KvTensor(NamedTuple):
    """One tensor of the cache, of (batch, heads, tokens, width): its input and the output that goes on from it."""

    past: str
    present: str
    heads: int
    width: int
    dtype: DType

    @property
    def bytes_per_token(self) -> int:
        return self.heads * self.width * self.dtype.itemsize


class Graph(NamedTuple):
    """How to call a graph. Names are None where it has no such input or output."""

    kv: tuple[KvTensor, ...]
    """Keys and values of every layer; none for an encoder."""
    uses_gqa: bool
    """Attention is GroupQueryAttention: rows begin at their first column, and cache may be written in place."""
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
    """What each token has become, of (batch, tokens, width)."""
    pooled: str | None
    """What the graph itself makes of a whole text, of (batch, width)."""

    @property
    def bytes_per_token(self) -> int:
        return sum(kv.bytes_per_token for kv in self.kv)


class HeadSizes(NamedTuple):
    """What the files beside a graph say of its cache, for exports that leave it open."""

    kv_heads: int | None = None
    head_width: int | None = None


_UNKNOWN = HeadSizes()


def load(path: Path) -> onnx.ModelProto:
    """The graph without weights that lie in other files. Raises ModelError where it, or one of those, is no good."""
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # whatever protobuf says of bytes that are none of its own
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{path}: is no ONNX model ({reason}); fetch it again") from error
    if not all(isinstance(name, str) for name in _names(model)):
        raise ModelError(f"{path}: is no ONNX model (it has names that are no text); fetch it again")
    missing = sorted({name for name in external_files(model) if not _is_beside(path, name)})
    if missing:
        raise ModelError(f"{path}: its weights are in {', '.join(missing)}, not beside it; fetch all its files")
    return model


def external_files(model: onnx.ModelProto) -> Iterator[str]:
    """The files that hold weights, as the graph names them."""
    for tensor in _tensors(model.graph):
        if tensor.data_location == TensorProto.EXTERNAL:
            yield next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def resolve_external_data(model: onnx.ModelProto, folder: Path) -> Path:
    """Has the graph name the files of its weights as they lie where links lead; returns the folder that they are in.

    onnxruntime follows no link out of a folder, and the Hub's cache is made of such links."""
    real = {name: os.path.realpath(folder / name) for name in set(external_files(model))}
    if not real:
        return folder
    common = os.path.commonpath([os.path.dirname(file) for file in real.values()])
    for tensor in _tensors(model.graph):
        for entry in tensor.external_data:
            if tensor.data_location == TensorProto.EXTERNAL and entry.key == "location":
                entry.value = Path(real[entry.value]).relative_to(common).as_posix()
    return Path(common)


def read(model: onnx.ModelProto, where: str, sizes: HeadSizes = _UNKNOWN) -> Graph:
    """Raises ModelError saying what of the graph can't be served, and what would work instead."""
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = {value.name: value for value in model.graph.input if value.name not in weights}
    outputs = {value.name: value for value in model.graph.output}
    kinds = {node.op_type for node in _nodes(model.graph)}
    for kind, reason in _UNSUPPORTED_NODES.items():
        if kind in kinds:
            raise ModelError(f"{where}: {reason}")
    kv = tuple(_cache(inputs, outputs, where, sizes))
    _check_inputs(inputs, {tensor.past for tensor in kv}, where)
    logits = outputs.get("logits")
    _check_use(logits is not None, bool(kv), set(outputs), where)
    keep = inputs.get(_KEEP_LOGITS)
    return Graph(
        kv=kv,
        uses_gqa="GroupQueryAttention" in kinds,
        ids_dtype=_type(inputs[_IDS], _INTEGERS, where),
        mask=_name_if_present(inputs, _MASK),
        positions=_name_if_present(inputs, _POSITIONS),
        keep_logits=keep.name if keep is not None else None,
        cache_branch=_name_if_present(inputs, _CACHE_BRANCH),
        token_types=_name_if_present(inputs, _TOKEN_TYPES),
        logits=logits.name if logits is not None else None,
        logits_dtype=_type(logits, _FLOATS, where) if logits is not None else np.dtype(np.float32),
        vocab_size=next(reversed(_dimensions(logits)), None) if logits is not None else None,
        hidden=next((name for name in _EMBEDDINGS if name in outputs), None),
        pooled=next((name for name in _POOLED if name in outputs), None),
    )


def _check_use(has_logits: bool, has_cache: bool, outputs: set[str], where: str) -> None:
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
        likely = (name.replace("past", "present", 1), f"present.{layer}.{part}", f"present_{part}_{layer}")
        present = next((candidate for candidate in likely if candidate in outputs), None)
        if present is None:
            raise ModelError(f"{where}: its cache input {name} has no output that goes on from it")
        dimensions = _dimensions(value)
        if len(dimensions) != 4:
            raise ModelError(f"{where}: its cache input {name} has {len(dimensions)} dimensions, not 4; export it anew")
        heads, width = dimensions[1] or sizes.kv_heads, dimensions[3] or sizes.head_width
        if heads is None or width is None:
            raise ModelError(f"{where}: says nowhere how large {name} is; its config.json would, put it beside")
        yield KvTensor(name, present, heads, width, _type(value, _FLOATS, where))


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Every node, those in branches too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Every weight, those of constants and in branches too."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            if attribute.HasField("g"):
                yield from _tensors(attribute.g)


def _names(model: onnx.ModelProto) -> Iterator[object]:
    """What is compared or shown: protobuf gives it as bytes, unasked, where it is no text."""
    graph = model.graph
    yield from (value.name for values in (graph.input, graph.output) for value in values)
    yield from (node.op_type for node in _nodes(graph))
    yield from external_files(model)


def _dimensions(value: onnx.ValueInfoProto) -> list[int | None]:
    dimensions = value.type.tensor_type.shape.dim
    return [one.dim_value if one.HasField("dim_value") and one.dim_value > 0 else None for one in dimensions]


def _type(value: onnx.ValueInfoProto, known: Mapping[int, DType], where: str) -> DType:
    kind = value.type.tensor_type.elem_type
    if kind not in known:
        allowed = ", ".join(TensorProto.DataType.Name(one).lower() for one in known)
        name = TensorProto.DataType.Name(kind).lower() if kind in TensorProto.DataType.values() else f"type {kind}"
        raise ModelError(f"{where}: {value.name} is of {name}, which can't be served; {allowed} can")
    return known[kind]


def _name_if_present(inputs: dict[str, onnx.ValueInfoProto], name: str) -> str | None:
    return name if name in inputs else None


def _is_beside(path: Path, name: str) -> bool:
    """Whether there is such a file in the model's own folder; a name that leads out of it never counts."""
    parts = Path(name).parts
    return bool(parts) and ".." not in parts and not Path(name).is_absolute() and os.path.isfile(path.parent / name)
