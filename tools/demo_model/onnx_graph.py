"""Writes a llama as an ONNX graph, in either of the two flavours that published models use.

`plain` builds attention from basic nodes, as Optimum does: the cache is an input, and an output longer by the computed
tokens. `gqa` has one GroupQueryAttention node per layer, as built by onnxruntime-genai's model builder: positions
follow from the mask, and past and present may share a buffer. Weights have llama.cpp's names and the shape (outputs,
inputs).
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Flavour = Literal["plain", "gqa"]
Weights = Callable[[str], np.ndarray[Any, np.dtype[np.float32]]]
Tensors = Callable[[str, np.ndarray[Any, Any]], TensorProto]
"""Stores a weight in the graph, or in a file beside it. The array may be a non-contiguous view."""

_OPSET = 18
_IR_VERSION = 10
_ORT = "com.microsoft"
_MASKED = float(np.finfo(np.float32).min)


class Shape(NamedTuple):
    """The sizes of a llama."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    rope_base: float = 10_000.0
    epsilon: float = 1e-5
    tied: bool = True
    """Whether the embedding is also the output projection."""

    @property
    def head(self) -> int:
        return self.width // self.heads


def build(shape: Shape, weights: Weights, flavour: Flavour, tensor: Tensors | None = None) -> onnx.ModelProto:
    """Returns the graph of a model.

    Its inputs are input_ids, attention_mask, past_key_values.N.key and .value with shape (batch, kv heads, past, head
    width), and position_ids if it is `plain`; its outputs are logits, and present.N.key and .value."""
    graph = _Graph(shape, weights, flavour, tensor or _inside)
    graph.build()
    imports = [helper.make_opsetid("", _OPSET), helper.make_opsetid(_ORT, 1)]
    body = helper.make_graph(graph.nodes, "llama", list(graph.inputs()), list(graph.outputs()), graph.initializers)
    return helper.make_model(body, opset_imports=imports, ir_version=_IR_VERSION, producer_name="tokenbus")


def _inside(name: str, array: np.ndarray[Any, Any]) -> TensorProto:
    return numpy_helper.from_array(array, name)


class _Graph:
    """Collects nodes and weights. Methods take and return the names of tensors."""

    def __init__(self, shape: Shape, weights: Weights, flavour: Flavour, tensor: Tensors) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[TensorProto] = []
        self._shape = shape
        self._weights = weights
        self._flavour = flavour
        self._tensor = tensor
        self._constants: dict[object, str] = {}

    def inputs(self) -> Iterator[onnx.ValueInfoProto]:
        shape = self._shape
        yield helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])
        yield helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"])
        if self._flavour == "plain":
            yield helper.make_tensor_value_info("position_ids", TensorProto.INT64, ["batch", "sequence"])
        for layer in range(shape.layers):
            for part in ("key", "value"):
                sizes: list[str | int | None] = ["batch", shape.kv_heads, "past", shape.head]
                yield helper.make_tensor_value_info(f"past_key_values.{layer}.{part}", TensorProto.FLOAT, sizes)

    def outputs(self) -> Iterator[onnx.ValueInfoProto]:
        shape = self._shape
        yield helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", shape.vocab])
        for layer in range(shape.layers):
            for part in ("key", "value"):
                sizes: list[str | int | None] = ["batch", shape.kv_heads, "present", shape.head]
                yield helper.make_tensor_value_info(f"present.{layer}.{part}", TensorProto.FLOAT, sizes)

    def build(self) -> None:
        embedding = self._weight("token_embd.weight", lambda matrix: matrix)
        x = self._add("Gather", [embedding, "input_ids"])
        attend = self._plain_attention() if self._flavour == "plain" else self._gqa_attention()
        for layer in range(self._shape.layers):
            name = f"blk.{layer}"
            h = self._norm(x, f"{name}.attn_norm.weight")
            q = self._linear(h, f"{name}.attn_q.weight", self._halves)
            k = self._linear(h, f"{name}.attn_k.weight", self._halves)
            v = self._linear(h, f"{name}.attn_v.weight")
            attended = attend(layer, q, k, v)
            x = self._add("Add", [x, self._linear(attended, f"{name}.attn_output.weight")])
            h = self._norm(x, f"{name}.ffn_norm.weight")
            gate = self._linear(h, f"{name}.ffn_gate.weight")
            silu = self._add("Mul", [gate, self._add("Sigmoid", [gate])])
            up = self._linear(h, f"{name}.ffn_up.weight")
            down = self._linear(self._add("Mul", [silu, up]), f"{name}.ffn_down.weight")
            x = self._add("Add", [x, down])
        h = self._norm(x, "output_norm.weight")
        if self._shape.tied:
            self._add("MatMul", [h, self._add("Transpose", [embedding], perm=[1, 0])], "logits")
        else:
            self._linear(h, "output.weight", output="logits")

    # attention

    def _plain_attention(self) -> Callable[[int, str, str, str], str]:
        shape = self._shape
        cos, sin = (self._add("Gather", [table, "position_ids"]) for table in self._rotations(doubled=True))
        cos, sin = (self._add("Unsqueeze", [table, self._ints(1)]) for table in (cos, sin))
        bias = self._causal_bias()

        def attend(layer: int, q: str, k: str, v: str) -> str:
            query = self._rotate(self._split_heads(q, shape.heads), cos, sin)
            key = self._rotate(self._split_heads(k, shape.kv_heads), cos, sin)
            value = self._split_heads(v, shape.kv_heads)
            keys, values = (
                self._add("Concat", [f"past_key_values.{layer}.{part}", new], f"present.{layer}.{part}", axis=2)
                for part, new in (("key", key), ("value", value))
            )
            # Heads that share keys are adjacent, so they can be treated as additional rows of one matrix.
            grouped = self._add("Reshape", [query, self._ints(0, shape.kv_heads, -1, shape.head)])
            scores = self._add("MatMul", [grouped, self._add("Transpose", [keys], perm=[0, 1, 3, 2])])
            scores = self._add("Mul", [scores, self._number(shape.head**-0.5)])
            sizes = self._add("Concat", [self._size(q, 0), self._ints(shape.heads), self._size(q, 1), self._ints(-1)])
            scores = self._add("Add", [self._add("Reshape", [scores, sizes]), bias])
            weights = self._add("Softmax", [scores], axis=-1)
            rows = self._add("Concat", [self._size(q, 0), self._ints(shape.kv_heads, -1), self._size(keys, 2)])
            mixed = self._add("MatMul", [self._add("Reshape", [weights, rows]), values])
            sizes = self._add(
                "Concat", [self._size(q, 0), self._ints(shape.heads), self._size(q, 1), self._ints(shape.head)]
            )
            mixed = self._add("Transpose", [self._add("Reshape", [mixed, sizes])], perm=[0, 2, 1, 3])
            return self._add("Reshape", [mixed, self._ints(0, 0, shape.width)])

        return attend

    def _gqa_attention(self) -> Callable[[int, str, str, str], str]:
        shape = self._shape
        cos, sin = self._rotations(doubled=False)
        total = self._add("Cast", [self._add("ReduceSum", ["attention_mask", self._ints(1)], keepdims=0)], to=6)
        last = self._add("Sub", [total, self._constant(np.array(1, np.int32))])
        longest = self._add("Cast", [self._add("Squeeze", [self._size("attention_mask", 1)])], to=6)

        def attend(layer: int, q: str, k: str, v: str) -> str:
            past = [f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"]
            out = f"blk.{layer}.attended"
            self.nodes.append(
                helper.make_node(
                    "GroupQueryAttention",
                    [q, k, v, *past, last, longest, cos, sin],
                    [out, f"present.{layer}.key", f"present.{layer}.value"],
                    domain=_ORT,
                    num_heads=shape.heads,
                    kv_num_heads=shape.kv_heads,
                    do_rotary=1,
                )
            )
            return out

        return attend

    def _causal_bias(self) -> str:
        """Returns a bias of shape (batch, 1, sequence, total): 0 where a token may attend, the lowest number
        elsewhere."""
        total, count = self._size("attention_mask", 1), self._size("input_ids", 1)
        one, zero = self._constant(np.array(1, np.int64)), self._constant(np.array(0, np.int64))
        columns = self._add("Range", [zero, self._add("Squeeze", [total]), one])
        places = self._add("Add", [self._add("Range", [zero, self._add("Squeeze", [count]), one]),
                                   self._add("Sub", [total, count])])  # fmt: skip
        before = self._add("LessOrEqual", [columns, self._add("Unsqueeze", [places, self._ints(1)])])
        shown = self._add("Unsqueeze", [self._add("Cast", ["attention_mask"], to=9), self._ints(1, 2)])
        allowed = self._add("And", [before, shown])
        return self._add("Where", [allowed, self._number(0.0), self._number(_MASKED)])

    def _rotations(self, *, doubled: bool) -> list[str]:
        """Returns tables of cosines and sines by position, for half or all of a head's width."""
        shape = self._shape
        rates = shape.rope_base ** (-np.arange(0, shape.head, 2, dtype=np.float64) / shape.head)
        angles = np.outer(np.arange(shape.context), rates)
        angles = np.concatenate([angles, angles], axis=1) if doubled else angles
        return [self._constant(table.astype(np.float32)) for table in (np.cos(angles), np.sin(angles))]

    def _rotate(self, x: str, cos: str, sin: str) -> str:
        half = self._shape.head // 2
        first = self._add("Slice", [x, self._ints(0), self._ints(half), self._ints(3)])
        second = self._add("Slice", [x, self._ints(half), self._ints(2 * half), self._ints(3)])
        turned = self._add("Concat", [self._add("Neg", [second]), first], axis=-1)
        return self._add("Add", [self._add("Mul", [x, cos]), self._add("Mul", [turned, sin])])

    def _split_heads(self, x: str, heads: int) -> str:
        split = self._add("Reshape", [x, self._ints(0, 0, heads, self._shape.head)])
        return self._add("Transpose", [split], perm=[0, 2, 1, 3])

    def _halves(self, matrix: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Reorders the values of heads: llama.cpp rotates adjacent pairs, a graph the two halves."""
        split = matrix.reshape(-1, self._shape.head // 2, 2, matrix.shape[1])
        return np.ascontiguousarray(split.transpose(0, 2, 1, 3)).reshape(matrix.shape)

    # parts

    def _linear(
        self, x: str, name: str, change: Callable[[Any], Any] = lambda matrix: matrix, *, output: str = ""
    ) -> str:
        return self._add("MatMul", [x, self._weight(name, lambda matrix: change(matrix).T)], output)

    def _norm(self, x: str, name: str) -> str:
        scale = self._weight(name, lambda row: row)
        if self._flavour == "gqa":
            return self._add("SimplifiedLayerNormalization", [x, scale], axis=-1, epsilon=self._shape.epsilon)
        squares = self._add("ReduceMean", [self._add("Mul", [x, x]), self._ints(-1)])
        root = self._add("Sqrt", [self._add("Add", [squares, self._number(self._shape.epsilon)])])
        return self._add("Mul", [self._add("Div", [x, root]), scale])

    def _weight(self, name: str, change: Callable[[Any], Any]) -> str:
        self.initializers.append(self._tensor(name, change(self._weights(name))))
        return name

    def _size(self, x: str, axis: int) -> str:
        return self._add("Shape", [x], start=axis, end=axis + 1)

    def _number(self, value: float) -> str:
        return self._constant(np.array(value, np.float32))

    def _ints(self, *values: int) -> str:
        return self._constant(np.array(values, np.int64))

    def _constant(self, array: np.ndarray[Any, Any]) -> str:
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = f"constant.{len(self._constants)}"
            self.initializers.append(numpy_helper.from_array(array, self._constants[key]))
        return self._constants[key]

    def _add(self, op: str, inputs: list[str], output: str = "", **attributes: Any) -> str:
        if op == "Concat" and "axis" not in attributes:
            attributes["axis"] = 0
        output = output or f"{op.lower()}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [output], **attributes))
        return output
