"""A graph itself says how it has to be called; what can't be served is refused by name."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tests.support import graphs
from tests.support.graphs import decoder, pairs, value
from tokenbus import demo
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.engine.onnx import graph

EVERY_INPUT = [value("position_ids"), value("num_logits_to_keep"), value("use_cache_branch", (), TensorProto.BOOL)]


def read(model: onnx.ModelProto, sizes: graph.HeadSizes | None = None) -> graph.Graph:
    return graph.read(model, "m.onnx", sizes or graph.HeadSizes())


def node(kind: str, domain: str = "com.microsoft") -> onnx.NodeProto:
    return helper.make_node(kind, ["input_ids"], ["out"], domain=domain)


def inside_if(inner: onnx.NodeProto) -> onnx.NodeProto:
    branches = {
        name: helper.make_graph([one], name, [], [value("out")])
        for name, one in (("then_branch", node("Identity", "")), ("else_branch", inner))
    }
    return helper.make_node("If", ["use_cache_branch"], ["out"], **branches)


def damaged(tmp_path: Path, data: bytes) -> graph.Graph:
    path = tmp_path / "damaged.onnx"
    path.write_bytes(data)
    return read(graph.load(path))


# reading


def test_the_demo_model_says_all_of_itself() -> None:
    found = read(graph.load(demo.ONNX_PATH / "onnx" / "model.onnx"))
    assert [(kv.past, kv.present) for kv in found.kv[:2]] == list(pairs(1).items())
    assert (found.mask, found.positions, found.logits) == ("attention_mask", "position_ids", "logits")
    assert found.keep_logits is found.cache_branch is found.token_types is found.hidden is found.pooled is None
    assert found.ids_dtype == np.int64
    assert found.bytes_per_token == sum(kv.heads * kv.width * 4 for kv in found.kv)
    assert not found.uses_gqa


@pytest.mark.parametrize(
    ("past", "present"),
    [
        ("past_key_values.{}.{}", "present.{}.{}"),
        ("past_{1}_{0}", "present_{1}_{0}"),
        ("past_{1}s_{0}", "present_{1}s_{0}"),
        ("past_key_values.{}.{}", "present_key_values.{}.{}"),
        ("past_key_values_{}_{}", "present_key_values_{}_{}"),
        ("past_key_values.{}.self.{}", "present_key_values.{}.self.{}"),
        ("past.{}.{}", "present.{}.{}"),
    ],
)
def test_a_cache_input_is_paired_with_its_output_however_they_are_called(past: str, present: str) -> None:
    names = pairs(12, past, present)
    assert [(kv.past, kv.present) for kv in read(decoder(names)).kv] == list(names.items())


def test_every_layer_has_its_own_heads_and_width() -> None:
    names = pairs(2)
    sizes: dict[str, graph.HeadSizes] = {
        name: ["b", 4 if ".0." in name else 1, "past", 16 if name.endswith("key") else 32] for name in names
    }
    found = read(decoder(names, sizes=sizes))
    assert [(kv.heads, kv.width) for kv in found.kv] == [(4, 16), (4, 32), (1, 16), (1, 32)]
    assert found.bytes_per_token == 4 * (4 * 16 + 4 * 32 + 16 + 32)


@pytest.mark.parametrize(("kind", "dtype"), [(TensorProto.FLOAT, np.float32), (TensorProto.FLOAT16, np.float16)])
def test_a_cache_is_of_float_or_half(kind: int, dtype: type) -> None:
    assert {kv.dtype for kv in read(decoder(kind=kind)).kv} == {np.dtype(dtype)}


@pytest.mark.parametrize("kind", [TensorProto.BFLOAT16, TensorProto.INT8, TensorProto.UNDEFINED, 77])
def test_a_cache_of_another_type_is_refused(kind: int) -> None:
    with pytest.raises(ModelError, match=r"0\.key is of [\w ]+, which can't be served; float, float16 can"):
        read(decoder(kind=kind))


@pytest.mark.parametrize(("kind", "dtype"), [(TensorProto.INT64, np.int64), (TensorProto.INT32, np.int32)])
def test_token_ids_are_of_the_graphs_own_width(kind: int, dtype: type) -> None:
    assert read(decoder(ids_kind=kind)).ids_dtype == dtype


def test_inputs_that_some_exports_have_are_seen() -> None:
    found = read(decoder(more_inputs=EVERY_INPUT))
    assert (found.positions, found.keep_logits, found.cache_branch) == tuple(one.name for one in EVERY_INPUT)
    bare = read(decoder())
    assert bare.positions is bare.keep_logits is bare.cache_branch is None


def test_logits_without_sizes_leave_the_vocabulary_open() -> None:
    found = read(decoder(logits=value("logits", ["batch", "sequence", "vocab"], TensorProto.FLOAT16)))
    assert (found.vocab_size, found.logits_dtype) == (None, np.float16)
    shapeless = helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)
    assert read(decoder(logits=shapeless)).vocab_size is None


def test_gqa_is_found_in_branches_too() -> None:
    assert read(decoder(nodes=[node("GroupQueryAttention")])).uses_gqa
    assert read(decoder(nodes=[inside_if(inside_if(node("GroupQueryAttention")))])).uses_gqa
    assert not read(decoder(nodes=[inside_if(node("MultiHeadAttention"))])).uses_gqa


def test_sizes_that_a_graph_leaves_open_are_the_configs() -> None:
    found = read(decoder(sizes=["batch", "heads", "past", "width"]), graph.HeadSizes(kv_heads=3, head_width=64))
    assert {(kv.heads, kv.width) for kv in found.kv} == {(3, 64)}
    found = read(decoder(sizes=["batch", 5, "past", "width"]), graph.HeadSizes(kv_heads=3, head_width=64))
    assert {(kv.heads, kv.width) for kv in found.kv} == {(5, 64)}


@pytest.mark.parametrize("known", [graph.HeadSizes(), graph.HeadSizes(kv_heads=3), graph.HeadSizes(head_width=64)])
def test_sizes_that_no_file_states_are_refused(known: graph.HeadSizes) -> None:
    with pytest.raises(
        ModelError, match=r"does not say how large past_key_values\.0\.key is; put its config\.json beside it"
    ):
        read(decoder(sizes=["batch", None, "past", 0]), known)


def test_an_encoder_has_embeddings_and_no_cache() -> None:
    outputs = [value(name, ["b", "s", 8], TensorProto.FLOAT) for name in ("last_hidden_state", "sentence_embedding")]
    found = read(graphs.model([value("input_ids", ["b", "s"]), value("token_type_ids", ["b", "s"])], outputs))
    assert (found.kv, found.hidden, found.pooled) == ((), "last_hidden_state", "sentence_embedding")
    assert (found.token_types, found.mask, found.logits) == ("token_type_ids", None, None)


# refusals


def test_a_graph_without_a_cache_is_refused_with_the_task_that_has_one() -> None:
    with pytest.raises(ModelError, match=r"m\.onnx: has no KV cache .*text-generation-with-past"):
        read(decoder({}))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("past_conv.0", "hybrid or recurrent"),
        ("ssm_state", "hybrid or recurrent"),
        ("past_key_values.0.recurrent_state", "hybrid or recurrent"),
        ("encoder_hidden_states", "encoder-decoder"),
        ("encoder_attention_mask", "encoder-decoder"),
        ("decoder_input_ids", "encoder-decoder"),
        ("inputs_embeds", "multimodal"),
        ("pixel_values", "multimodal"),
        ("audio_features", "multimodal"),
        ("block_table", "paged CUDA engine"),
        ("slot_mapping", "paged CUDA engine"),
        ("cumulative_sequence_lengths", "paged CUDA engine"),
        ("beam_width", "beam search"),
        ("cache_indirection", "beam search"),
        ("seed_of_mine", "is not known; known are attention_mask, input_ids"),
        ("past_0", "is not known"),
    ],
)
def test_an_input_that_cannot_be_given_is_refused_by_name_and_kind(name: str, reason: str) -> None:
    with pytest.raises(ModelError, match=rf"m\.onnx: its input {name} .*{reason}"):
        read(decoder(more_inputs=[value(name)]))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("PagedAttention", "paged attention runs in CUDA engines only"),
        ("DecoderMaskedMultiHeadAttention", "beam search"),
        ("SparseAttention", "sparse attention"),
    ],
)
def test_attention_of_other_engines_is_refused_in_a_branch_too(kind: str, reason: str) -> None:
    for made in (node(kind), inside_if(node(kind))):
        with pytest.raises(ModelError, match=rf"{reason}.* export would work"):
            read(decoder(nodes=[made]))


def test_a_cache_of_five_dimensions_is_refused() -> None:
    with pytest.raises(ModelError, match=r"past_key_values\.0\.key has 5 dimensions, not 4"):
        read(decoder(sizes=[2, "batch", 2, "past", 8]))


def test_a_cache_input_that_no_output_goes_on_from_is_refused() -> None:
    with pytest.raises(ModelError, match=r"past_key_values\.0\.key has no output that continues it"):
        read(decoder({"past_key_values.0.key": "cached.0.key"}))


def test_a_graph_without_token_ids_is_refused_with_what_it_has() -> None:
    with pytest.raises(ModelError, match="has no input input_ids; its inputs are attention_mask"):
        read(graphs.model([value("attention_mask")], [value("last_hidden_state")]))


def test_token_ids_of_a_strange_type_are_refused() -> None:
    with pytest.raises(ModelError, match="input_ids is of float, which can't be served; int64, int32 can"):
        read(decoder(ids_kind=TensorProto.FLOAT))


def test_a_graph_that_gives_nothing_of_use_is_refused_with_what_it_gives() -> None:
    with pytest.raises(ModelError, match=r"neither logits nor embeddings among its outputs \(scores\)"):
        read(graphs.model([value("input_ids")], [value("scores")]))


# external data


@pytest.mark.parametrize("data", [b"", bytes(range(256)) * 4, b"GGUF" + bytes(64), b"\xff" * 100])
def test_a_file_that_is_no_onnx_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ModelError, match=r"damaged\.onnx|m\.onnx"):
        damaged(tmp_path, data)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.onnx: can't be read: No such file"):
        graph.load(tmp_path / "none.onnx")


def test_a_file_that_ends_early_is_to_be_fetched_again(tmp_path: Path) -> None:
    path = tmp_path / "cut.onnx"
    path.write_bytes((demo.ONNX_PATH / "onnx" / "model.onnx").read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"cut\.onnx: is no ONNX model .*; fetch it again"):
        graph.load(path)


def test_weights_beside_the_graph_are_left_where_they_are(tmp_path: Path) -> None:
    loaded = graph.load(graphs.keep_outside(tmp_path / "m.onnx", "m.onnx_data"))
    assert set(graph.external_files(loaded)) == {"m.onnx_data"}
    assert read(loaded).vocab_size == graphs.VOCAB


def test_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    path = graphs.keep_outside(tmp_path / "m.onnx", "m.onnx_data")
    (tmp_path / "m.onnx_data").unlink()
    with pytest.raises(ModelError, match=r"m\.onnx: its weights are in m\.onnx_data, not beside it; fetch all"):
        graph.load(path)


def test_weights_that_lie_outside_the_folder_are_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "inner" / "deep").mkdir(parents=True)
    for location in ("../outside", str(tmp_path / "elsewhere"), "deep/../../inner/x"):
        path = graphs.keep_outside(tmp_path / "inner" / "m.onnx", location)
        with pytest.raises(ModelError, match="not beside it"):
            graph.load(path)


@pytest.mark.parametrize("location", ["", ".", "\0", "x" * 300, "inner"])
def test_weights_with_a_name_that_no_file_has_are_missing(tmp_path: Path, location: str) -> None:
    (tmp_path / "inner").mkdir()
    path = graphs.keep_outside(tmp_path / "m.onnx", "m.onnx_data")
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].external_data[0].value = location
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match="not beside it; fetch all its files"):
        graph.load(path)


@pytest.mark.parametrize("name", [b"input_ids", b"present.0.value", b"m.onnx_data", b"ReduceMean"])
def test_names_that_are_no_text_are_refused(tmp_path: Path, name: bytes) -> None:
    path = graphs.keep_outside(tmp_path / "m.onnx", "m.onnx_data")
    path.write_bytes(path.read_bytes().replace(name, b"\xff" * len(name)))
    with pytest.raises(ModelError, match=r"m\.onnx: is no ONNX model \(it has names that are no text\); fetch"):
        graph.load(path)


def test_weights_in_a_branch_or_a_constant_are_looked_for_too(tmp_path: Path) -> None:
    tensor = helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.ClearField("float_data")
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "../secret"
    constant = helper.make_node("Constant", [], ["out"], value=tensor)
    branch = helper.make_graph([node("Identity", "")], "else", [], [value("out")], [tensor])
    in_branch = helper.make_node("If", ["use_cache_branch"], ["out"], then_branch=branch, else_branch=branch)
    for made in (constant, inside_if(constant), in_branch):
        path = tmp_path / "m.onnx"
        path.write_bytes(decoder(nodes=[made]).SerializeToString())
        with pytest.raises(ModelError, match=r"its weights are in \.\./secret, not beside it"):
            graph.load(path)


WHOLE = graphs.tiny().SerializeToString()
SMALL = decoder(more_inputs=EVERY_INPUT).SerializeToString()


@given(end=st.integers(0, len(WHOLE)))
@settings(max_examples=60)
def test_any_beginning_of_a_file_loads_or_is_refused(tmp_path_factory: pytest.TempPathFactory, end: int) -> None:
    load_or_refuse(tmp_path_factory, WHOLE[:end])


@given(place=st.integers(0, len(WHOLE) - 1), byte=st.integers(0, 255))
@settings(max_examples=200)
def test_a_file_with_any_byte_changed_loads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int
) -> None:
    load_or_refuse(tmp_path_factory, WHOLE[:place] + bytes([byte]) + WHOLE[place + 1 :])


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_a_small_file_with_one_byte_changed_anywhere_loads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, byte: int
) -> None:
    for place in range(len(SMALL)):
        load_or_refuse(tmp_path_factory, SMALL[:place] + bytes([byte]) + SMALL[place + 1 :])


def load_or_refuse(folders: pytest.TempPathFactory, data: bytes) -> None:
    path = folders.getbasetemp() / "changed.onnx"
    path.write_bytes(data)
    try:
        found = read(graph.load(path))
    except ModelError:
        return
    assert found.kv or found.logits is None
