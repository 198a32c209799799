"""An adapter's matrices change what a projection computes, whatever its exporter calls it and however it is stored."""

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support import graphs
from tokenbus.worker.engine.onnx import lora
from tokenbus.worker.engine.onnx.lora import Change, OnnxAdapter, Place, arrange, combine, no_adapters

Array = np.ndarray[Any, np.dtype[Any]]
KV_WIDTH = 8
NAMES = {
    "Optimum": ("/model/layers.3/self_attn/q_proj/MatMul", "onnx::MatMul_3456", "q_proj"),
    "Optimum, quantized": ("/model/layers.3/mlp/down_proj/MatMul_Q4", "onnx::MatMul_9_Q4", "down_proj"),
    "onnxruntime-genai": ("/model/layers.3/attn/o_proj/MatMul", "model.layers.3.attn.o_proj.MatMul.weight", "o_proj"),
    "onnxruntime-genai, 4 bits": ("/model/layers.3/mlp/up_proj/MatMulNBits", "w", "up_proj"),
    "onnxruntime-genai, unnamed node": ("", "model.layers.3.attn.k_proj.MatMul.weight_Q4", "k_proj"),
    "onnxruntime-genai, packed": ("/model/layers.3/attn/qkv_proj/MatMul_Quant", "w", "qkv_proj"),
    "transformers": ("", "model.layers.3.self_attn.v_proj.weight", "v_proj"),
    "llama.cpp": ("", "blk.3.ffn_gate.weight", "gate_proj"),
}
NOT = {
    "a trained adapter": "/model/layers.3/attn/q_proj/lora_A/MatMul",
    "an expert": "/model/layers.3/mlp/experts.7/gate_proj/MatMul",
    "the output": "/lm_head/MatMul",
    "scores of attention": "/model/layers.3/self_attn/MatMul",
    "a bias": "/model/layers.3/self_attn/q_proj/Add",
}


def one_node(name: str, weight: str, *, inputs: int = 32, outputs: int = 24) -> onnx.ModelProto:
    """A graph that multiplies with one weight, and adds 1."""
    ends = [
        helper.make_tensor_value_info(end, TensorProto.FLOAT, ["batch", "sequence", size])
        for end, size in (("x", inputs), ("z", outputs))
    ]
    nodes = [
        helper.make_node("MatMul", ["x", weight], ["y"], name=name),
        helper.make_node("Add", ["y", "one"], ["z"]),
    ]
    matrix = np.random.default_rng(3).normal(0, 0.3, (inputs, outputs)).astype(np.float32)
    weights = [numpy_helper.from_array(matrix, weight), numpy_helper.from_array(np.float32([1]), "one")]
    graph = helper.make_graph(nodes, "one", ends[:1], ends[1:], weights)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def run(model: onnx.ModelProto, **given: Array) -> Array:
    opened = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: Array = opened.run(["z"], given)[0]
    return found


def change(seed: int, rank: int, inputs: int, outputs: int) -> Change:
    rng = np.random.default_rng(seed)
    return Change(*(rng.normal(0, 0.3, sizes).astype(np.float32) for sizes in ((rank, inputs), (outputs, rank))))


X = np.random.default_rng(4).normal(0, 1, (2, 3, 32)).astype(np.float32)


@pytest.mark.parametrize("exporter", NAMES)
def test_a_projection_is_found_by_the_names_of_every_exporter(exporter: str) -> None:
    node, weight, name = NAMES[exporter]
    (found,) = lora.find_projections(one_node(node, weight), KV_WIDTH)
    assert (found.place, found.inputs, found.outputs) == (Place(3, name), 32, 24)


@pytest.mark.parametrize("what", NOT)
def test_what_is_no_projection_is_not_found(what: str) -> None:
    assert lora.find_projections(one_node(NOT[what], "x.weight"), KV_WIDTH) == ()


def test_projections_that_can_t_be_told_apart_are_none() -> None:
    model = one_node("/vision/layers.3/self_attn/q_proj/MatMul", "w")
    model.graph.node.insert(1, helper.make_node("MatMul", ["x", "w"], ["u"], name=NAMES["Optimum"][0]))
    assert lora.find_projections(model, KV_WIDTH) == ()


@pytest.mark.parametrize("is_quantized", [False, True])
def test_the_product_of_an_adapter_s_matrices_is_added_to_what_a_projection_computes(is_quantized: bool) -> None:
    model = one_node(*NAMES["onnxruntime-genai"][:2])
    if is_quantized:
        graphs.quantize(model.graph)
    found = lora.find_projections(model, KV_WIDTH)
    base = run(model, x=X)
    lora.add_inputs(model, KV_WIDTH)
    assert (run(model, x=X, **no_adapters(found)) == base).all()
    one = change(1, 5, 32, 24)
    changed = run(model, x=X, **arrange({Place(3, "o_proj"): one}, found))
    np.testing.assert_allclose(changed - base, X @ one.a.T @ one.b.T, atol=1e-5)


def test_adapters_of_several_ranks_and_scales_add_up() -> None:
    model = one_node(*NAMES["Optimum"][:2])
    found, base = lora.find_projections(model, KV_WIDTH), run(model, x=X)
    lora.add_inputs(model, KV_WIDTH)
    changes = [change(1, 2, 32, 24), change(2, 7, 32, 24)]
    loaded = [OnnxAdapter(arrange({Place(3, "q_proj"): one}, found)) for one in changes]
    changed = run(model, x=X, **combine(list(zip(loaded, (0.5, 1.0), strict=True))))
    expected = sum(scale * X @ one.a.T @ one.b.T for one, scale in zip(changes, (0.5, 1.0), strict=True))
    np.testing.assert_allclose(changed - base, expected, atol=1e-5)


def test_projections_in_one_weight_are_changed_each_by_its_own_matrices() -> None:
    model = one_node(*NAMES["onnxruntime-genai, packed"][:2])
    found, base = lora.find_projections(model, KV_WIDTH), run(model, x=X)
    lora.add_inputs(model, KV_WIDTH)
    q, v = change(1, 2, 32, 8), change(2, 3, 32, 8)
    arrays = arrange({Place(3, "q_proj"): q, Place(3, "v_proj"): v}, found)
    changed = run(model, x=X, **arrays) - base
    expected = [X @ q.a.T @ q.b.T, np.zeros((2, 3, 8)), X @ v.a.T @ v.b.T]
    np.testing.assert_allclose(changed, np.concatenate(expected, axis=2), atol=1e-5)


def test_matrices_have_the_type_of_the_graph() -> None:
    model = one_node(*NAMES["Optimum"][:2])
    weight = model.graph.initializer[0]
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight).astype(np.float16), weight.name))
    found = lora.find_projections(model, KV_WIDTH)
    arrays = arrange({Place(3, "q_proj"): change(1, 2, 32, 24)}, found)
    combined = combine([(OnnxAdapter(arrays), 0.5)])
    assert {array.dtype for array in (*arrays.values(), *combined.values())} == {np.dtype(np.float16)}
