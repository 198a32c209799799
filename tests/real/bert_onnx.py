"""Writes a checkpoint of the class `BertModel` as an ONNX model: its hidden states, which are then pooled."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_SIDECARS = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "1_Pooling")


def write(made: Path, source: Path) -> None:
    """Writes the model from a folder with its weights in 32 bits."""
    config = json.loads((source / "config.json").read_text())
    graph = _Graph(_tensors(source / "model.safetensors"), config["layer_norm_eps"])
    heads, width = config["num_attention_heads"], config["hidden_size"]
    states = graph.embeddings()
    mask = graph.mask()
    for layer in range(config["num_hidden_layers"]):
        states = graph.layer(f"encoder.layer.{layer}", states, mask, heads, width // heads)
    onnx.save(graph.model(states, width), made / "model.onnx")
    for name in _SIDECARS:
        if (source / name).is_dir():
            shutil.copytree(source / name, made / name)
        else:
            shutil.copy(source / name, made / name)


def _tensors(path: Path) -> dict[str, np.ndarray]:
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, told in json.loads(data[8:begin]).items():
        if told.get("dtype") == "F32":
            first, end = told["data_offsets"]
            found[name] = np.frombuffer(data[begin + first : begin + end], np.float32).reshape(told["shape"])
    return found


class _Graph:
    """The nodes so far. Each method adds some, and returns the name of what they compute."""

    def __init__(self, weights: dict[str, np.ndarray], epsilon: float) -> None:
        self._weights = weights
        self._epsilon = epsilon
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}

    def embeddings(self) -> str:
        length = self._node("Gather", self._node("Shape", "input_ids"), self._constant("one", np.array(1)))
        places = self._node("Range", self._constant("zero", np.array(0)), length, self._constant("one", np.array(1)))
        kinds = {"word": "input_ids", "token_type": "token_type_ids", "position": places}
        parts = [
            self._node("Gather", self._weight(f"embeddings.{kind}_embeddings.weight"), ids)
            for kind, ids in kinds.items()
        ]
        return self._normalized("embeddings.LayerNorm", self._node("Add", self._node("Add", *parts[:2]), parts[2]))

    def mask(self) -> str:
        """Adds what keeps padding out of each attention."""
        seen = self._node("Unsqueeze", "attention_mask", self._constant("axes", np.array([1, 2])))
        hidden = self._node("Sub", self._number("whole", 1.0), self._node("Cast", seen, to=TensorProto.FLOAT))
        return self._node("Mul", hidden, self._number("lowest", -1e9))

    def layer(self, name: str, states: str, mask: str, heads: int, head: int) -> str:
        shape = self._constant("heads", np.array([0, 0, heads, head]))
        query, key, value = (
            self._node("Reshape", self._linear(f"{name}.attention.self.{part}", states), shape)
            for part in ("query", "key", "value")
        )
        by_head = {"perm": [0, 2, 1, 3]}
        scores = self._node(
            "MatMul", self._node("Transpose", query, **by_head), self._node("Transpose", key, perm=[0, 2, 3, 1])
        )
        scores = self._node("Mul", scores, self._number("scale", head**-0.5))
        shares = self._node("Softmax", self._node("Add", scores, mask), axis=-1)
        mixed = self._node(
            "Transpose", self._node("MatMul", shares, self._node("Transpose", value, **by_head)), **by_head
        )
        mixed = self._node("Reshape", mixed, self._constant("joined", np.array([0, 0, heads * head])))
        mixed = self._linear(f"{name}.attention.output.dense", mixed)
        states = self._normalized(f"{name}.attention.output.LayerNorm", self._node("Add", states, mixed))
        wide = self._gelu(self._linear(f"{name}.intermediate.dense", states))
        narrow = self._linear(f"{name}.output.dense", wide)
        return self._normalized(f"{name}.output.LayerNorm", self._node("Add", states, narrow))

    def model(self, states: str, width: int) -> onnx.ModelProto:
        rows = ["batch", "sequence"]
        inputs = [
            helper.make_tensor_value_info(name, TensorProto.INT64, rows)
            for name in ("input_ids", "attention_mask", "token_type_ids")
        ]
        outputs = [helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, [*rows, width])]
        self._nodes.append(helper.make_node("Identity", [states], ["last_hidden_state"]))
        graph = helper.make_graph(self._nodes, "bert", inputs, outputs, list(self._constants.values()))
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)

    def _linear(self, name: str, states: str) -> str:
        turned = self._constant(f"{name}.turned", np.ascontiguousarray(self._weights[f"{name}.weight"].T))
        return self._node("Add", self._node("MatMul", states, turned), self._weight(f"{name}.bias"))

    def _normalized(self, name: str, states: str) -> str:
        scale, bias = self._weight(f"{name}.weight"), self._weight(f"{name}.bias")
        return self._node("LayerNormalization", states, scale, bias, axis=-1, epsilon=self._epsilon)

    def _gelu(self, states: str) -> str:
        erf = self._node("Erf", self._node("Mul", states, self._number("root", 0.5**0.5)))
        half = self._node("Mul", states, self._number("half", 0.5))
        return self._node("Mul", half, self._node("Add", erf, self._number("whole", 1.0)))

    def _weight(self, name: str) -> str:
        return self._constant(name, self._weights[name])

    def _number(self, name: str, value: float) -> str:
        return self._constant(name, np.array(value, np.float32))

    def _constant(self, name: str, value: np.ndarray) -> str:
        self._constants[name] = numpy_helper.from_array(value, name)
        return name

    def _node(self, kind: str, *inputs: str, **attributes: object) -> str:
        name = f"{kind}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name
