"""Small ONNX graphs. Those that are only read have no nodes; those that are run are changed copies of the demo."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tools.demo_model import onnx_graph

Sizes = list[int | str | None]
KV: Sizes = ["batch", 2, "past", 8]
VOCAB = 32
TINY = onnx_graph.Shape(layers=1, width=16, heads=2, kv_heads=1, vocab=VOCAB, context=64)


def value(name: str, sizes: Iterable[int | str | None] = (), kind: int = TensorProto.INT64) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, list(sizes))


def decoder(
    kv: Mapping[str, str] | None = None,
    *,
    sizes: Sizes | Mapping[str, Sizes] = KV,
    kind: int = TensorProto.FLOAT,
    ids_kind: int = TensorProto.INT64,
    logits: onnx.ValueInfoProto | None = None,
    more_inputs: Iterable[onnx.ValueInfoProto] = (),
    nodes: Iterable[onnx.NodeProto] = (),
) -> onnx.ModelProto:
    """A decoder without nodes. `kv` has the output of each cache input; `sizes` are those of all inputs or of each."""
    kv = pairs(1) if kv is None else kv
    of = sizes if isinstance(sizes, Mapping) else dict.fromkeys(kv, sizes)
    cache = [value(name, of[name], kind) for name in kv]
    inputs = [value("input_ids", ["batch", "sequence"], ids_kind), value("attention_mask", ["batch", "total"])]
    outputs = [logits or value("logits", ["batch", "sequence", VOCAB], TensorProto.FLOAT)]
    outputs += [value(name, of[past], kind) for past, name in kv.items()]
    return model([*inputs, *more_inputs, *cache], outputs, nodes)


def pairs(layers: int, past: str = "past_key_values.{}.{}", present: str = "present.{}.{}") -> dict[str, str]:
    """Returns the outputs of a cache by their inputs."""
    return {past.format(n, part): present.format(n, part) for n in range(layers) for part in ("key", "value")}


def model(
    inputs: Iterable[onnx.ValueInfoProto],
    outputs: Iterable[onnx.ValueInfoProto],
    nodes: Iterable[onnx.NodeProto] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(list(nodes), "made", list(inputs), list(outputs))
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def tiny(flavour: onnx_graph.Flavour = "plain") -> onnx.ModelProto:
    """Returns a llama of one layer with random weights."""
    rng = np.random.default_rng(5)
    inner = {"attn_q": (16, 16), "attn_k": (8, 16), "attn_v": (8, 16), "attn_output": (16, 16),
             "ffn_gate": (24, 16), "ffn_up": (24, 16), "ffn_down": (16, 24)}  # fmt: skip
    sizes = {f"blk.0.{name}.weight": size for name, size in inner.items()} | {"token_embd.weight": (VOCAB, 16)}

    def weights(name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        return rng.normal(0, 0.5, sizes.get(name, (16,))).astype(np.float32)

    return onnx_graph.build(TINY, weights, flavour)


def keep_outside(path: Path, location: str) -> Path:
    """Writes a graph with its larger weights in a file at `location`."""
    onnx.save(tiny(), path, save_as_external_data=True, location="weights", size_threshold=256)
    graph = onnx.load(path, load_external_data=False)
    for tensor in graph.graph.initializer:
        for entry in tensor.external_data[:1]:
            entry.value = location
    path.write_bytes(graph.SerializeToString())
    (path.parent / "weights").rename(path.parent / location)
    return path


class Change:
    """Adds nodes before a graph's last one, which is the projection."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph

    def add(self, op: str, inputs: list[str], **attributes: Any) -> str:
        name = f"changed.{len(self._graph.node)}"
        place = len(self._graph.node) - 1
        self._graph.node.insert(place, helper.make_node(op, inputs, [name], **attributes))
        return name

    def ints(self, *values: int) -> str:
        name = f"changed.constant.{len(self._graph.initializer)}"
        self._graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    @property
    def hidden(self) -> str:
        return self._graph.node[-1].input[0]

    @hidden.setter
    def hidden(self, name: str) -> None:
        self._graph.node[-1].input[0] = name


def mix_rows(graph: onnx.GraphProto) -> None:
    """Makes the states of a token depend on the tokens of the other rows."""
    change = Change(graph)
    change.hidden = change.add("Add", [change.hidden, change.add("ReduceMean", [change.hidden, change.ints(0)])])


def run_out_of_memory(graph: onnx.GraphProto, *, above: int) -> None:
    """Makes a run of more tokens than `above` ask for memory that no machine has."""
    change = Change(graph)
    over = change.add("Sub", [change.add("Shape", ["input_ids"], start=1), change.ints(above)])
    size = change.add("Mul", [change.add("Max", [over, change.ints(0)]), change.ints(1 << 44)])
    nothing = change.add("ReduceSum", [change.add("ConstantOfShape", [size])], keepdims=0)
    change.hidden = change.add("Add", [change.hidden, nothing])


def compute_no_numbers(graph: onnx.GraphProto) -> None:
    """Makes all logits infinite."""
    change = Change(graph)
    change.hidden = change.add("Log", [change.add("Sub", [change.hidden, change.hidden])])


def shake(graph: onnx.GraphProto, *, by: float) -> None:
    """Multiplies states by noise of that standard deviation, which differs from run to run."""
    change = Change(graph)
    noise = change.add("RandomNormalLike", [change.hidden], mean=1.0, scale=by, seed=1.0)
    change.hidden = change.add("Mul", [change.hidden, noise])


def ignore_mask(graph: onnx.GraphProto) -> None:
    """Makes every token attend to all columns before its own, including padding."""
    cast = next(node for node in graph.node if node.op_type == "Cast" and node.input[0] == "attention_mask")
    cast.input[0] = "everything"
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    graph.node.insert(0, helper.make_node("ConstantOfShape", ["mask.shape"], ["everything"], value=one))
    graph.node.insert(0, helper.make_node("Shape", ["attention_mask"], ["mask.shape"]))


def have_one_row(graph: onnx.GraphProto) -> None:
    """Limits batches to one row, as some exports do."""
    for end in (*graph.input, *graph.output):
        end.type.tensor_type.shape.dim[0].dim_value = 1


def quantize(graph: onnx.GraphProto) -> None:
    """Quantizes weights to 4 bits in blocks of 32, and rounds what they are multiplied with to 8 bits."""
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for node in [node for node in graph.node if node.op_type == "MatMul" and node.input[1] in weights]:
        tensor = weights.pop(node.input[1])
        blocks = numpy_helper.to_array(tensor).T.reshape(tensor.dims[1], -1, 32)
        scales = np.abs(blocks).max(axis=2) / 7
        nibbles = (np.rint(blocks / scales[:, :, None]) + 8).astype(np.uint8)
        graph.initializer.remove(tensor)
        graph.initializer.append(numpy_helper.from_array(nibbles[:, :, ::2] | nibbles[:, :, 1::2] << 4, node.input[1]))
        graph.initializer.append(numpy_helper.from_array(scales.astype(np.float32), f"{node.input[1]}.scales"))
        sizes = {"K": tensor.dims[0], "N": tensor.dims[1], "bits": 4, "block_size": 32, "accuracy_level": 4}
        inputs = [*node.input, f"{node.input[1]}.scales"]
        node.CopyFrom(helper.make_node("MatMulNBits", inputs, list(node.output), domain="com.microsoft", **sizes))
