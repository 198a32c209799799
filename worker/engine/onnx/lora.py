"""LoRA adapters in a graph: finds the projections that they change, and gives these inputs for an adapter's matrices.

    y = x W        becomes        y = x W + (x a) b

`a` of (inputs, rank) and `b` of (rank, outputs) are inputs of the graph for each projection, with the rank left open.
onnxruntime's own adapters do nothing when inputs are bound, and weights can't be changed for a single sequence of a
step, or if they are quantized.

The changes of several adapters add up, and so do those of projections that one node computes: their matrices are
concatenated along the rank, and `b` is zero for the outputs of other projections."""

import re
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Listing
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper

from tokenbus.worker.engine.onnx.graph import Array

_PREFIX = "tokenbus.lora"
_PLACE = re.compile(
    r"(?:.*[./])?(?:layers|blk)\.(\d+)[./](?:(?:self_attn|attn|attention|mlp|feed_forward)[./])?(\w+?)"
    r"[./](?:MatMul\w*|weight)(?:[._]\w+)*"
)
"""A projection's place in the name of its node or weight, as Optimum, onnxruntime-genai's builder and llama.cpp write
it."""
_DTYPES: dict[int, "np.dtype[Any]"] = {
    TensorProto.FLOAT: np.dtype(np.float32),
    TensorProto.FLOAT16: np.dtype(np.float16),
}
LLAMA_CPP_NAMES = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_output": "o_proj",
    "ffn_gate": "gate_proj",
    "ffn_up": "up_proj",
    "ffn_down": "down_proj",
}
"""llama.cpp's names of projections, with transformers' names."""
_NAMES = {*LLAMA_CPP_NAMES.values(), "qkv_proj", "gate_up_proj"}
MAX_RANK = 1_024


class Place(NamedTuple):
    """A projection: the number of its layer, and its name in transformers."""

    layer: int
    name: str


class Projection(NamedTuple):
    """A node that multiplies by a weight. `y`, `a` and `b` have their own type in half-precision graphs."""

    place: Place
    inputs: int
    outputs: int
    dtype: "np.dtype[Any]"
    parts: Mapping[Place, slice]
    """The outputs of each projection that this node computes: its own, or those of three that share one weight."""

    @property
    def a(self) -> str:
        """The graph's input for a matrix of (inputs, rank)."""
        return f"{_PREFIX}.{self.place.layer}.{self.place.name}.a"

    @property
    def b(self) -> str:
        """The graph's input for a matrix of (rank, outputs)."""
        return f"{_PREFIX}.{self.place.layer}.{self.place.name}.b"


def find_projections(model: onnx.ModelProto, kv_width: int) -> tuple[Projection, ...]:
    """Returns the projections of a graph; none if they can't be identified. `kv_width` is that of a token's keys."""
    found = [projection for _, projection in _projections(model.graph, kv_width)]
    return tuple(found) if len({one.place for one in found}) == len(found) else ()


def add_inputs(model: onnx.ModelProto, kv_width: int) -> None:
    """Gives each projection inputs for an adapter's matrices, all of which must be bound in every run."""
    graph = model.graph
    behind: dict[str, list[onnx.NodeProto]] = {}
    for node, projection in _projections(graph, kv_width):
        output = node.output[0]
        base, low, change = (f"{projection.a}.{part}" for part in ("base", "low", "change"))
        node.output[0] = base
        behind[base] = [
            helper.make_node("MatMul", [node.input[0], projection.a], [low]),
            helper.make_node("MatMul", [low, projection.b], [change]),
            helper.make_node("Add", [base, change], [output]),
        ]
        kind = helper.np_dtype_to_tensor_dtype(projection.dtype)
        for name, sizes in ((projection.a, [projection.inputs, None]), (projection.b, [None, projection.outputs])):
            graph.input.append(helper.make_tensor_value_info(name, kind, sizes))
    # Nodes must be in topological order.
    nodes = [one for node in graph.node for one in (node, *behind.get(node.output[0] if node.output else "", ()))]
    ordered = onnx.GraphProto()
    ordered.node.extend(nodes)
    del graph.node[:]
    graph.node.extend(ordered.node)


def _projections(graph: onnx.GraphProto, kv_width: int) -> Iterator[tuple[onnx.NodeProto, Projection]]:
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type in _SIZES and len(node.input) > 1 and node.input[1] in weights:
            place = _place(node.name) or _place(node.input[1])
            sizes = _SIZES[node.op_type](node, weights)
            if place is not None and sizes is not None:
                inputs, outputs, dtype = sizes
                yield node, Projection(place, inputs, outputs, dtype, _parts(place, outputs, kv_width))


def _place(name: str) -> Place | None:
    found = _PLACE.fullmatch(name)
    if found is None:
        return None
    projection = LLAMA_CPP_NAMES.get(found[2], found[2])
    return Place(int(found[1]), projection) if projection in _NAMES else None


def _parts(place: Place, outputs: int, kv_width: int) -> dict[Place, slice]:
    layer, name = place
    parts = {place: slice(0, outputs)}
    if name == "qkv_proj":
        ends = (0, outputs - 2 * kv_width, outputs - kv_width, outputs)
        parts |= {Place(layer, f"{one}_proj"): slice(*ends[n : n + 2]) for n, one in enumerate("qkv")}
    elif name == "gate_up_proj":
        half = outputs // 2
        parts |= {Place(layer, "gate_proj"): slice(0, half), Place(layer, "up_proj"): slice(half, outputs)}
    return parts


_Weights = Mapping[str, TensorProto]
_Sizes = tuple[int, int, "np.dtype[Any]"]


def _matmul_sizes(node: onnx.NodeProto, weights: _Weights) -> _Sizes | None:
    weight = weights[node.input[1]]
    dtype = _DTYPES.get(weight.data_type)
    return None if dtype is None or len(weight.dims) != 2 else (weight.dims[0], weight.dims[1], dtype)


def _nbits_sizes(node: onnx.NodeProto, weights: _Weights) -> _Sizes | None:
    numbers = {one.name: one.i for one in node.attribute}
    scales = weights.get(node.input[2]) if len(node.input) > 2 else None
    dtype = None if scales is None else _DTYPES.get(scales.data_type)
    return None if dtype is None else (numbers["K"], numbers["N"], dtype)


_SIZES = {"MatMul": _matmul_sizes, "MatMulNBits": _nbits_sizes}
"""The nodes that are projections, with the number and type of their inputs and outputs."""


class Base(NamedTuple):
    """The projections of a model with their inputs and outputs."""

    sizes: Mapping[Place, tuple[int, int]]
    architecture: str
    """The name of its transformers class without the task, in lower case; empty if unknown."""
    head_width: int


def make_base(projections: Iterable[Projection], architecture: str, head_width: int) -> Base:
    sizes = {
        place: (one.inputs, columns.stop - columns.start) for one in projections for place, columns in one.parts.items()
    }
    return Base(sizes, architecture, head_width)


class Change(NamedTuple):
    """The matrices of one projection in an adapter, as trained: `b @ a @ x` is added."""

    a: Array
    """(rank, inputs)"""
    b: Array
    """(outputs, rank), including the adapter's own scale."""


class OnnxAdapter:
    """The matrices of one adapter, by input of the graph."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays = arrays

    def __repr__(self) -> str:
        return f"<OnnxAdapter of {len(self.arrays)} matrices>"

    def close(self) -> None:
        """Frees the matrices."""
        self.arrays = {}


def arrange(changes: Mapping[Place, Change], projections: Iterable[Projection]) -> dict[str, Array]:
    """Returns the inputs of the graph for an adapter whose matrices have the shapes of the projections."""
    arrays: dict[str, Array] = {}
    for projection in projections:
        found = [(columns, changes[place]) for place, columns in projection.parts.items() if place in changes]
        if not found:
            continue
        rank = sum(len(change.a) for _, change in found)
        b = np.zeros((rank, projection.outputs), projection.dtype)
        at = 0
        with np.errstate(over="ignore"):  # values out of range become infinite
            for columns, change in found:
                b[at : at + len(change.a), columns] = change.b.T
                at += len(change.a)
            arrays[projection.a] = np.concatenate([change.a.T for _, change in found], axis=1).astype(projection.dtype)
        arrays[projection.b] = b
    return arrays


def combine(adapters: Listing[tuple[OnnxAdapter, float]]) -> dict[str, Array]:
    """Returns the inputs of the graph for a set of adapters with their scales."""
    names = {name for adapter, _ in adapters for name in adapter.arrays}
    combined: dict[str, Array] = {}
    for name in names:
        is_b = name.endswith(".b")
        found = [
            _scaled(adapter.arrays[name], scale if is_b else 1.0)
            for adapter, scale in adapters
            if name in adapter.arrays
        ]
        combined[name] = found[0] if len(found) == 1 else np.concatenate(found, axis=0 if is_b else 1)
    return combined


def _scaled(array: Array, scale: float) -> Array:
    scaled: Array = array if scale == 1.0 else array * array.dtype.type(scale)
    return scaled


def no_adapters(projections: Iterable[Projection]) -> dict[str, Array]:
    """Returns inputs that change nothing: of rank 1, since an empty matrix is a special case for every kernel."""
    arrays: dict[str, Array] = {}
    zeros: dict[tuple[Any, ...], Array] = {}
    for one in projections:
        for name, shape in ((one.a, (one.inputs, 1)), (one.b, (1, one.outputs))):
            arrays[name] = zeros.setdefault((shape, one.dtype), np.zeros(shape, one.dtype))
    return arrays
