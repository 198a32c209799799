"""An edited graph computes the same as before, and no more than is asked for."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support import graphs
from tests.support.engines import ONNX, gqa_demo
from tokenbus import demo
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.engine.onnx import graph, session
from tokenbus.worker.engine.onnx.device import Device

Arrays = dict[str, np.ndarray[Any, Any]]
CPU = Device("cpu")
FOLDERS = {"plain": lambda: demo.ONNX_PATH, "gqa": gqa_demo}
TOKENS = [[1, 5, 9, 30, 12, 7]]


@pytest.fixture(params=FOLDERS)
def model(request: pytest.FixtureRequest) -> onnx.ModelProto:
    """The demo model, in both flavours."""
    return graph.load(FOLDERS[request.param]() / "onnx" / "model.onnx")


def described(model: onnx.ModelProto) -> graph.Graph:
    """What a graph says of itself, without the input that it has got."""
    other = copy(model)
    for one in [one for one in other.graph.input if one.name == graph.FIRST_LOGITS]:
        other.graph.input.remove(one)
    return graph.read(other, "m.onnx")


def run(model: onnx.ModelProto, tokens: list[list[int]] = TOKENS, num_logits: int = 1) -> Arrays:
    """All outputs for a prompt without a past."""
    found = described(model)
    ids = np.array(tokens, np.int64)
    given: Arrays = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    if any(one.name == graph.FIRST_LOGITS for one in model.graph.input):
        given[graph.FIRST_LOGITS] = np.array([-num_logits], np.int64)
    given |= {kv.past: np.zeros((len(ids), kv.heads, 0, kv.width), kv.dtype) for kv in found.kv}
    if found.positions is not None:
        given[found.positions] = np.tile(np.arange(ids.shape[1]), (len(ids), 1))
    opened = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in model.graph.output]
    return dict(zip(names, opened.run(names, given), strict=True))


def ending(*steps: onnx.NodeProto, dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """A small model whose logits pass through these nodes, from `raw` to `logits`."""
    model = graphs.tiny()
    model.graph.node[-1].output[0] = "raw"
    model.graph.node.extend(steps)
    model.graph.output[0].type.tensor_type.elem_type = dtype
    for name, array in {
        "bias": np.arange(graphs.VOCAB, dtype=np.float32),
        "cap": np.array(3, np.float32),
        "mask": np.array([True]),
    }.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def node(kind: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs, [output], **attributes)


def copy(model: onnx.ModelProto) -> onnx.ModelProto:
    other = onnx.ModelProto()
    other.CopyFrom(model)
    return other


def test_a_trimmed_graph_gives_the_last_of_its_logits_and_the_same_cache(model: onnx.ModelProto) -> None:
    whole = run(model)
    assert graph.keep_last_logits(model, "logits")
    trimmed = run(model)
    assert trimmed["logits"].shape == (1, 1, whole["logits"].shape[2])
    np.testing.assert_allclose(trimmed.pop("logits"), whole.pop("logits")[:, -1:], atol=1e-4)
    for name, array in trimmed.items():
        np.testing.assert_allclose(array, whole[name], atol=1e-5)


def test_a_trimmed_graph_gives_the_last_logits_of_every_row() -> None:
    model = graphs.tiny()
    rows = [[1, 2, 3], [7, 8, 9], [4, 4, 4]]
    whole = run(model, rows)["logits"]
    assert graph.keep_last_logits(model, "logits")
    np.testing.assert_allclose(run(model, rows)["logits"], whole[:, -1:], atol=1e-5)


def test_a_trimmed_graph_gives_the_logits_of_as_many_tokens_as_it_is_told() -> None:
    model = graphs.tiny()
    whole = run(model)["logits"]
    assert graph.keep_last_logits(model, "logits")
    np.testing.assert_allclose(run(model, num_logits=2)["logits"], whole[:, -2:], atol=1e-5)


def test_a_trimmed_graph_says_how_many_logits_a_token_has(model: onnx.ModelProto) -> None:
    graph.keep_last_logits(model, "logits")
    sizes = model.graph.output[0].type.tensor_type.shape.dim
    assert sizes[2].dim_value == run(model)["logits"].shape[2]


def test_hidden_states_are_those_that_the_logits_are_made_of(model: onnx.ModelProto) -> None:
    embedding = next(weight for weight in model.graph.initializer if weight.name == "token_embd.weight")
    whole = run(model)
    assert graph.expose_hidden_states(model, "logits")
    assert graph.keep_last_logits(model, "logits")
    found = run(model)
    matrix = numpy_helper.to_array(embedding)
    assert found[graph.HIDDEN].shape == (1, len(TOKENS[0]), matrix.shape[1])
    np.testing.assert_allclose(found[graph.HIDDEN] @ matrix.T, whole["logits"], atol=1e-3)
    assert found["logits"].shape[1] == 1


@pytest.mark.parametrize(
    "steps",
    [
        [node("Identity", ["raw"], "logits")],
        [node("Add", ["raw", "bias"], "logits")],
        [node("Add", ["bias", "raw"], "logits")],
        [node("Div", ["raw", "cap"], "a"), node("Tanh", ["a"], "b"), node("Mul", ["b", "cap"], "logits")],
        [node("Constant", [], "c", value_float=2.0), node("Mul", ["raw", "c"], "logits")],
        [node("Cast", ["raw"], "half", to=TensorProto.FLOAT16), node("Cast", ["half"], "logits", to=1)],
    ],
    ids=["identity", "bias", "bias-first", "cap", "constant", "casts"],
)
def test_logits_that_are_changed_further_are_trimmed_in_front_of_their_projection(
    steps: list[onnx.NodeProto],
) -> None:
    model = ending(*steps)
    whole = run(model)["logits"]
    assert graph.expose_hidden_states(model, "logits")
    assert graph.keep_last_logits(model, "logits")
    found = run(model)
    np.testing.assert_allclose(found["logits"], whole[:, -1:], atol=1e-5)
    assert found[graph.HIDDEN].shape == (1, len(TOKENS[0]), graphs.TINY.width)


def test_logits_of_half_precision_are_trimmed_and_stay_so() -> None:
    model = ending(node("Cast", ["raw"], "logits", to=TensorProto.FLOAT16), dtype=TensorProto.FLOAT16)
    whole = run(model)["logits"]
    assert graph.keep_last_logits(model, "logits")
    found = run(model)["logits"]
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, whole[:, -1:])


UNCHANGED = {
    "a mean over all tokens": [
        node("ReduceMean", ["raw"], "mean", keepdims=1),
        node("Sub", ["raw", "mean"], "logits"),
    ],
    "two branches": [node("Neg", ["raw"], "other"), node("Add", ["raw", "other"], "logits")],
    "another matrix product of weights": [
        node("Unsqueeze", ["bias", "axes"], "row"),
        node("MatMul", ["bias", "column"], "logits"),
    ],
}


@pytest.mark.parametrize("steps", UNCHANGED.values(), ids=UNCHANGED)
def test_a_graph_whose_logits_are_made_otherwise_is_left_as_it_is(steps: list[onnx.NodeProto]) -> None:
    model = ending(*steps)
    before = copy(model)
    assert not graph.keep_last_logits(model, "logits")
    assert not graph.expose_hidden_states(model, "logits")
    assert model == before


def test_logits_that_come_out_of_a_branch_are_left_as_they_are() -> None:
    branch = helper.make_graph([node("Identity", ["raw"], "out")], "branch", [], [graphs.value("out", (), 1)])
    model = ending(helper.make_node("If", ["mask"], ["logits"], then_branch=branch, else_branch=branch))
    before = copy(model)
    assert not graph.keep_last_logits(model, "logits")
    assert not graph.expose_hidden_states(model, "logits")
    assert model == before


def test_a_projection_of_matrices_without_a_batch_is_left_as_it_is() -> None:
    model = ending()
    projection = model.graph.node[-1]
    flat = node("Reshape", [projection.input[0], "flat"], "rows")
    gemm = node("Gemm", ["rows", projection.input[1]], "logits")
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1, graphs.TINY.width]), "flat"))
    del model.graph.node[-1]
    model.graph.node.extend([flat, gemm])
    before = copy(model)
    assert not graph.keep_last_logits(model, "logits")
    assert not graph.expose_hidden_states(model, "logits")
    assert model == before


@pytest.mark.parametrize("sizes", [None, ["rows", graphs.VOCAB]])
def test_logits_that_are_not_by_row_and_token_are_left_as_they_are(sizes: list[int | str] | None) -> None:
    model = graphs.tiny()
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("logits", TensorProto.FLOAT, sizes))
    before = copy(model)
    assert not graph.keep_last_logits(model, "logits")
    assert model == before


# external data


def test_a_changed_graph_is_loaded_with_the_weights_beside_its_file(tmp_path: Path) -> None:
    path = graphs.keep_outside(tmp_path / "m.onnx", "m.onnx_data")
    model = graph.load(path)
    assert graph.keep_last_logits(model, "logits")
    assert logits_of(model, path).shape == (1, 1, graphs.VOCAB)
    np.testing.assert_allclose(logits_of(model, path), run(graphs.tiny())["logits"][:, -1:], atol=1e-5)


def test_weights_may_be_links_to_another_folder_as_in_the_hubs_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    path = graphs.keep_outside(snapshot / "m.onnx", "m.onnx_data")
    for name in ("m.onnx", "m.onnx_data"):
        (snapshot / name).rename(blobs / name)
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    np.testing.assert_allclose(logits_of(graph.load(path), path), run(graphs.tiny())["logits"], atol=1e-5)


def test_weights_that_are_too_short_are_refused_with_what_onnxruntime_says(tmp_path: Path) -> None:
    path = graphs.keep_outside(tmp_path / "m.onnx", "m.onnx_data")
    weights = tmp_path / "m.onnx_data"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelError, match=r"m\.onnx: onnxruntime [\d.]+ can't load it: "):
        logits_of(graph.load(path), path)


def logits_of(model: onnx.ModelProto, path: Path) -> np.ndarray[Any, Any]:
    """Runs the engine's own session, bound as a cache would bind it."""
    found = described(model)
    opened = session.Session(model, path, ONNX, CPU)
    binding = opened.bind()
    ids = np.array(TOKENS, np.int64)
    for name, array in (
        ("input_ids", ids),
        ("attention_mask", np.ones_like(ids)),
        ("position_ids", np.arange(6)[None]),
    ):
        binding.bind_input(name, array)
    for kv in found.kv:
        binding.bind_input(kv.past, np.zeros((1, kv.heads, 0, kv.width), kv.dtype))
    last = any(one.name == graph.FIRST_LOGITS for one in model.graph.input)
    if last:
        binding.keep_logits(graph.FIRST_LOGITS, 1)
    logits = np.empty((1, 1 if last else ids.shape[1], graphs.VOCAB), np.float32)
    binding.bind_output("logits", logits)
    binding.run()
    return logits
