"""An ONNX graph before it is loaded: its file and those of its weights, its interface, and edits of it.

Nothing is assumed of its inputs and outputs, its cache and its sizes: names and types come from the graph, and anything
not understood is refused by name.

Two edits give it logits of the last token only, and hidden states as an output. The logits of a whole prompt are its
tokens times the vocabulary: 1.2 GB for 2,048 tokens of a vocabulary of 152,000. Computing them takes up to a quarter of
the prompt's time, and only the last row is ever used. Both edits look for the projection, the node that turns hidden
states into logits, by following the graph back from its output."""

import os.path
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files.model_config import HeadSizes
from tokenbus.worker.files.model_files import check_link
from tokenbus.worker.files.regular import read_regular

Array = np.ndarray[Any, np.dtype[Any]]

_MAX_BYTES = 2 << 30
"""The most that a message of protobuf may have."""
_MAX_NAMED = 3
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
_UNKNOWN = HeadSizes()
HIDDEN = "tokenbus.hidden"
"""The added output: the hidden states, of (batch, tokens, width)."""
_LAST = "tokenbus.last"
FIRST_LOGITS = f"{_LAST}.start"
"""An input: the first of a run's tokens whose logits are computed, counted from the end, such as -1 for the last."""
_PROJECTIONS = ("MatMul", "MatMulNBits", "MatMulBnb4", "MatMulIntegerToFloat", "FusedMatMul")
"""Nodes that keep the axes of their input. Gemm is not one of them: it takes matrices, which have no token axis."""
_AFTER_PROJECTION = ("Cast", "Add", "Mul", "Div", "Tanh", "Identity")
"""Nodes that may follow the projection: a bias, a cap, a conversion."""


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


def load(path: Path, *, follow_links: bool = True) -> onnx.ModelProto:
    """Loads the graph without external weights. Raises ModelError if it is malformed or their files are missing, or if
    it is not to follow links and one of them is one out of the folder."""
    content = read_regular(path, _MAX_BYTES)
    try:
        model = onnx.ModelProto()
        model.ParseFromString(content)
    except Exception as error:  # protobuf raises various classes for bytes that are not a message
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{path}: is no ONNX model ({reason}); fetch it again") from error
    if not all(isinstance(name, str) for name in _names(model)):
        raise ModelError(f"{path}: is no ONNX model (it has names that are no text); fetch it again")
    names = sorted(set(external_files(model)))
    missing = [name for name in names if not _is_beside(path, name)]
    if missing:
        named = ", ".join(missing[:_MAX_NAMED])
        raise ModelError(f"{path}: its weights are in {named}, not beside it; fetch all its files")
    for name in () if follow_links else names:
        check_link(path.parent / name, path.parent, path)
    return model


def external_files(model: onnx.ModelProto) -> Iterator[str]:
    """Yields the names of the weight files, as the graph has them."""
    for tensor in _tensors(model.graph):
        if tensor.data_location == TensorProto.EXTERNAL:
            yield next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def resolve_external_data(model: onnx.ModelProto, folder: Path) -> Path:
    """Renames the external files in the graph to their symbolic links' targets; returns the folder that holds them all.

    onnxruntime follows no link out of a folder, and the Hub's cache consists of such links."""
    real = {name: os.path.realpath(folder / name) for name in set(external_files(model))}
    if not real:
        return folder
    common = os.path.commonpath([os.path.dirname(file) for file in real.values()])
    for tensor in _tensors(model.graph):
        for entry in tensor.external_data:
            if tensor.data_location == TensorProto.EXTERNAL and entry.key == "location":
                entry.value = Path(real[entry.value]).relative_to(common).as_posix()
    return Path(common)


def nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yields every node, including those in branches."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes(attribute.g)


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yields every weight, including constants and those in branches."""
    yield from graph.initializer
    for node in nodes(graph):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            if attribute.HasField("g"):
                yield from attribute.g.initializer


def _names(model: onnx.ModelProto) -> Iterator[object]:
    """Yields the names that are compared or shown. protobuf returns a name as bytes if it is not valid text."""
    graph = model.graph
    yield from (value.name for values in (graph.input, graph.output) for value in values)
    yield from (node.op_type for node in nodes(graph))
    yield from external_files(model)


def _is_beside(path: Path, name: str) -> bool:
    """Whether a file, or a link to one, is in the model's own folder; a name that leads out of the folder never is."""
    parts = Path(name).parts
    if not parts or ".." in parts or Path(name).is_absolute():
        return False
    return os.path.isfile(path.parent / name)


def keep_last_logits(model: onnx.ModelProto, logits: str) -> bool:
    """Makes the graph compute only the logits of the last tokens, from the one on that the input `FIRST_LOGITS` names.
    Returns False, changing nothing, if it can't."""
    graph = model.graph
    node = _projection(graph, logits)
    if node is None:
        return False
    sliced = f"{_LAST}.hidden"
    for name, value in (("end", 2**31 - 1), ("axis", 1)):
        graph.initializer.append(helper.make_tensor(f"{_LAST}.{name}", TensorProto.INT64, [1], [value]))
    graph.input.append(helper.make_tensor_value_info(FIRST_LOGITS, TensorProto.INT64, [1]))
    inputs = [node.input[0], FIRST_LOGITS, f"{_LAST}.end", f"{_LAST}.axis"]
    # Nodes must be in topological order, so the slice goes right before the projection.
    graph.node.insert(list(graph.node).index(node), helper.make_node("Slice", inputs, [sliced]))
    node.input[0] = sliced
    output = next(value for value in graph.output if value.name == logits)
    output.type.tensor_type.shape.dim[1].Clear()
    return True


def expose_hidden_states(model: onnx.ModelProto, logits: str) -> bool:
    """Adds the states from which logits are computed as an output. Returns False, changing nothing, if it can't find
    them.

    It must run before `keep_last_logits`, which leaves only the state of the last token."""
    graph = model.graph
    node = _projection(graph, logits)
    if node is None:
        return False
    graph.node.append(helper.make_node("Cast", [node.input[0]], [HIDDEN], to=TensorProto.FLOAT))
    graph.output.append(helper.make_tensor_value_info(HIDDEN, TensorProto.FLOAT, ["batch", "sequence", "width"]))
    return True


def _projection(graph: onnx.GraphProto, logits: str) -> onnx.NodeProto | None:
    """Returns the node that turns hidden states into logits, or None if it can't be identified.

    Logits must be of (batch, tokens, vocabulary)."""
    value = next(value for value in graph.output if value.name == logits)
    if len(value.type.tensor_type.shape.dim) != 3:
        return None
    makers: dict[str, onnx.NodeProto] = {output: node for node in graph.node for output in node.output}
    weights = {tensor.name for tensor in graph.initializer}
    name = logits
    while (node := makers.get(name)) is not None:
        if node.op_type in _PROJECTIONS and node.input[0] not in weights:
            return node
        # Continue through the only computed input. With two, either could carry the states.
        sources = [one for one in node.input if one in makers and not _is_constant(makers[one])]
        if node.op_type not in _AFTER_PROJECTION or len(sources) != 1:
            return None
        name = sources[0]
    return None


def _is_constant(node: onnx.NodeProto) -> bool:
    return node.op_type in ("Constant", "Transpose", "DequantizeLinear")
