"""LoRA adapters of ONNX models: what is computed with them, and which files are refused."""

import shutil
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.support import adapters, safetensors_model
from tests.support.engines import ONNX, gguf_runner, gqa_demo
from tokenbus import demo
from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.engine.device.loaded_models import LoadedModels
from tokenbus.worker.engine.kv.ops import Truncate
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.onnx.runner import OnnxRunner, load
from tokenbus.worker.engine.scheduling.plan import SampledToken
from tokenbus.worker.engine.scheduling.scheduler import Scheduler
from tokenbus.worker.engine.scheduling.sequence import Sequence

Tensors = Mapping[str, np.ndarray[Any, np.dtype[Any]]]
FOLDERS: Mapping[str, Callable[[], Path]] = {"plain": lambda: demo.ONNX_PATH, "gqa": gqa_demo}
PROMPTS = ([11, 12, 13, 14, 15], [21, 22, 23], [31, 32, 33, 34], [41, 42, 43, 44, 45, 46], [51, 52], [61, 62, 63])
TOKENS = 12
TOLERANCE = 1e-3
OURS = {theirs: ours for ours, theirs in safetensors_model.SOURCES.items()}


def open_runner(folder: Path, models: LoadedModels[Any] | None = None) -> OnnxRunner:
    settings = msgspec.structs.replace(ONNX, model=str(folder))
    runner = load(settings, lambda share: None, LoadedModels() if models is None else models)
    assert isinstance(runner, OnnxRunner)
    return runner


@pytest.fixture(scope="module")
def runner() -> Iterator[OnnxRunner]:
    opened = open_runner(demo.ONNX_PATH)
    yield opened
    opened.close()


def load_adapter(runner: OnnxRunner, path: Path) -> str:
    assert runner.adapters is not None
    return runner.adapters.load(path)


def merged(folder: Path, source: Path, changes: list[tuple[Tensors, float]]) -> Path:
    """Writes a model with the adapters' changes added to its weights."""
    shutil.copytree(source, folder)
    path = folder / "onnx" / "model.onnx"
    model = onnx.load(path)
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    for tensors, scale in changes:
        for name in [name for name in tensors if ".lora_A." in name]:
            module = name.partition(".lora_A.")[0]
            _, _, place = module.partition(".layers.")
            layer, _, projection = place.partition(".")
            weight = weights[f"blk.{layer}.{OURS[projection]}.weight"]
            added = scale * (tensors[f"{module}.lora_B.weight"] @ tensors[name]).T
            weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) + np.float32(added), weight.name))
    onnx.save(model, path)
    return folder


def answers(runner: OnnxRunner, asked: Mapping[int, tuple[Adapter, ...]]) -> dict[int, list[SampledToken]]:
    """Returns the answers to prompts, by their numbers, with their adapters; all of them run at once."""
    scheduler = Scheduler(BlockPool(64, 16, runner.num_lanes), len(asked), max_step_tokens=256)
    sampling = engine_request.Sampling(max_tokens=TOKENS, ignore_eos=True, logprobs=1)
    for number, used in asked.items():
        sequence = Sequence(number, array("I", PROMPTS[number]), sampling, (), adapters=used, arrived_at=float(number))
        scheduler.add(sequence)
    found: dict[int, list[SampledToken]] = {number: [] for number in asked}
    while scheduler.has_work:
        plan = scheduler.schedule(64)
        for sequence in plan.started:
            runner.add_sequence(sequence.seq_no, sequence.sampling)
        runner.apply(plan.kv_ops)
        for result in scheduler.update(plan, runner.step(plan)):
            assert result.sampled is not None
            found[result.sequence.seq_no].append(result.sampled)
    for number in asked:
        runner.remove_sequence(number)
    runner.apply([Truncate(lane, 0) for lane in range(runner.num_lanes)])
    return found


@pytest.mark.parametrize("flavour", FOLDERS)
def test_each_sequence_has_the_logits_of_a_model_with_its_adapters_in_the_weights(flavour: str, tmp_path: Path) -> None:
    folder = FOLDERS[flavour]()
    tensors = [
        adapters.peft_tensors(1),
        adapters.peft_tensors(2, rank=7, shapes={name: adapters.PEFT_SHAPES[name] for name in _QUERIES_AND_VALUES}),
    ]
    runner = open_runner(folder)
    one, other = (
        load_adapter(runner, adapters.write_peft(tmp_path / str(number), one, lora_alpha=2 * len(_rank(one))))
        for number, one in enumerate(tensors)
    )
    sets: list[dict[str, float]] = [{}, {one: 1.0}, {other: 1.0}, {one: 0.25}, {one: 0.5, other: 0.75}, {other: 1.0}]
    digests = {one: tensors[0], other: tensors[1]}
    used = {number: tuple(sorted(Adapter(*item) for item in scales.items())) for number, scales in enumerate(sets)}
    found = answers(runner, used)
    runner.close()
    for number, scales in enumerate(sets):
        changes = [(digests[digest], 2 * scale) for digest, scale in scales.items()]
        truth = open_runner(merged(tmp_path / f"merged-{number}", folder, changes))
        expected = answers(truth, {number: ()})[number]
        truth.close()
        assert [token.token_id for token in found[number]] == [token.token_id for token in expected]
        for token, right in zip(found[number], expected, strict=True):
            assert token.logprob is not None
            assert right.logprob is not None
            assert token.logprob.logprob == pytest.approx(right.logprob.logprob, abs=TOLERANCE)


_QUERIES_AND_VALUES = [name for name in adapters.PEFT_SHAPES if name.endswith(("q_proj", "v_proj"))]


def _rank(tensors: Tensors) -> Any:
    return next(iter(tensors.values()))


@pytest.mark.parametrize("name", demo.ADAPTER_PATHS)
def test_an_adapter_of_llama_cpp_has_the_same_digest_for_both_kinds_of_engines(name: str, runner: OnnxRunner) -> None:
    other = gguf_runner(msgspec.structs.replace(ONNX, engine="gguf", model=str(demo.MODEL_PATH)))
    assert other.adapters is not None
    assert load_adapter(runner, demo.ADAPTER_PATHS[name]) == other.adapters.load(demo.ADAPTER_PATHS[name])
    other.close()


@pytest.mark.parametrize("flavour", FOLDERS)
def test_a_model_computes_the_same_without_adapters_once_it_takes_them(flavour: str, tmp_path: Path) -> None:
    runner = open_runner(FOLDERS[flavour]())
    before = answers(runner, {0: (), 1: ()})
    embedded = runner.embedder and runner.embedder.pool([[5, 6, 7]])
    session = runner._model.graph_runner.session
    digest = load_adapter(runner, adapters.write_peft(tmp_path, adapters.peft_tensors()))
    assert runner._model.graph_runner.session is not session
    used = (Adapter(digest, 1.0),)
    for asked in ({0: (), 1: ()}, {0: used, 1: used}, {0: (), 1: ()}):
        assert (answers(runner, asked) == before) is (asked[0] == ())
    assert (runner.embedder and runner.embedder.pool([[5, 6, 7]])) == pytest.approx(embedded)
    session = runner._model.graph_runner.session
    load_adapter(runner, adapters.write_peft(tmp_path, adapters.peft_tensors(2)))
    assert runner._model.graph_runner.session is session  # opened once
    assert digest in runner._adapters._loaded  # type: ignore[union-attr]
    runner.close()


@pytest.mark.parametrize("flavour", FOLDERS)
def test_a_session_and_an_adapter_are_freed_when_nobody_uses_them(flavour: str, tmp_path: Path) -> None:
    models: LoadedModels[Any] = LoadedModels()
    runner, replica = (open_runner(FOLDERS[flavour](), models) for _ in range(2))
    assert runner.adapters is not None
    answers(runner, {0: (), 1: ()})
    first = weakref.ref(runner._model.graph_runner.session)
    path = adapters.write_peft(tmp_path, adapters.peft_tensors())
    digest = load_adapter(runner, path)
    assert [load_adapter(runner, path), load_adapter(replica, path)] == [digest, digest]
    answers(runner, {0: (), 1: (Adapter(digest, 1.0),)})
    assert first() is None
    loaded = weakref.ref(runner._adapters._loaded[digest])  # type: ignore[union-attr]
    for _ in range(2):
        assert digest in runner.adapters
        runner.adapters.unload(digest)
    assert digest not in runner.adapters
    assert not runner._adapters._sets  # type: ignore[union-attr]
    assert loaded() is not None  # the other replica has it
    replica.close()
    assert loaded() is None
    runner.close()


def test_the_inputs_of_at_most_eight_sets_are_kept(tmp_path: Path, runner: OnnxRunner) -> None:
    digest = load_adapter(runner, adapters.write_peft(tmp_path, adapters.peft_tensors()))
    kept = runner._adapters
    assert kept is not None
    first = kept.inputs_of((Adapter(digest, 1.0),))
    for scale in range(2, 9):
        kept.inputs_of((Adapter(digest, scale / 8),))
    assert kept.inputs_of((Adapter(digest, 1.0),)) is first
    for scale in range(2, 10):
        kept.inputs_of((Adapter(digest, scale / 16),))
    assert kept.inputs_of((Adapter(digest, 1.0),)) is not first
    assert len(kept._sets) == 8


def test_a_model_whose_file_was_replaced_takes_no_adapters(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo.ONNX_PATH, folder)
    runner = open_runner(folder)
    path = folder / "onnx" / "model.onnx"
    model = onnx.load(path)
    model.graph.initializer[0].CopyFrom(
        numpy_helper.from_array(2 * numpy_helper.to_array(model.graph.initializer[0]), model.graph.initializer[0].name)
    )
    path.unlink()
    onnx.save(model, path)
    with pytest.raises(ModelError, match="restart the worker"):
        load_adapter(runner, adapters.write_peft(tmp_path / "adapter", adapters.peft_tensors()))
    runner.close()


QUERY = "base_model.model.model.layers.0.self_attn.q_proj"


def pair(a: tuple[int, ...] = (4, 128), b: tuple[int, ...] = (128, 4), module: str = QUERY) -> dict[str, Any]:
    return {f"{module}.lora_{part}.weight": np.ones(sizes, np.float32) for part, sizes in (("A", a), ("B", b))}


REFUSED: Mapping[str, tuple[Tensors, dict[str, object], str]] = {
    "another rank on each side": (pair(b=(128, 8)), {}, "the ranks differ"),
    "a rank above the limit": (pair((2048, 128), (128, 2048)), {}, "the rank 2048"),
    "a larger base": (pair((4, 256), (256, 4)), {}, "another base"),
    "more layers": (pair(module=QUERY.replace("0", "9")), {}, "layer 9's q_proj is not a projection of the graph"),
    "an unknown projection": (
        pair(module=QUERY.replace("q_proj", "x_proj")),
        {},
        "layer 0's x_proj is not a projection",
    ),
    "three dimensions": (pair((1, 4, 128)), {}, "is neither lora_A nor lora_B"),
    "one half": ({f"{QUERY}.lora_A.weight": np.ones((4, 128), np.float32)}, {}, "has no .*q_proj.lora_B.weight"),
    "a bias": (pair() | {f"{QUERY}.lora_B.bias": np.ones(128, np.float32)}, {}, "is neither lora_A nor lora_B"),
    "the embedding": (pair(module="base_model.model.model.embed_tokens"), {}, "is not a projection of a layer"),
    "the output": (pair(module="base_model.model.lm_head"), {}, "is not a projection of a layer"),
    "two of one place": (pair() | pair(module="base_model.model.vision.layers.0.self_attn.q_proj"), {}, "told apart"),
    "nothing": ({}, {}, "has no matrices"),
    "another kind": (pair(), {"peft_type": "IA3"}, "is of the kind 'IA3'"),
    "magnitudes": (pair(), {"use_dora": True}, "has magnitudes"),
    "biases": (pair(), {"bias": "all"}, "trains biases"),
    "biases of its own": (pair(), {"lora_bias": True}, "trains biases"),
    "other modules": (pair(), {"modules_to_save": ["lm_head"]}, "has modules of its own"),
    "repeated layers": (pair(), {"layer_replication": [[0, 4], [2, 4]]}, "repeats layers"),
    "invocation tokens": (pair(), {"alora_invocation_tokens": [1]}, "after its invocation tokens"),
    "a changed base": (pair(), {"init_lora_weights": "pissa_niter_16"}, "for a base that pissa_niter_16 has changed"),
    "values that are not finite": (
        pair() | {f"{QUERY}.lora_B.weight": np.full((128, 4), np.nan, np.float32)},
        {},
        "lora_B of layer 0's q_proj has values that are not finite",
    ),
    "an infinite scale": (pair(), {"lora_alpha": 1e308}, "lora_B of layer 0's q_proj has values that are not finite"),
    "a scale that is none": (pair(), {"lora_alpha": "x"}, "can't be read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_that_does_not_fit_the_model_is_refused(name: str, runner: OnnxRunner, tmp_path: Path) -> None:
    tensors, config, problem = REFUSED[name]
    with pytest.raises(ModelError, match=problem) as refusal:
        load_adapter(runner, adapters.write_peft(tmp_path / "wrong", tensors, **config))
    assert str(tmp_path / "wrong") in str(refusal.value)


def test_a_file_that_is_no_adapter_is_refused(runner: OnnxRunner, tmp_path: Path) -> None:
    for name in ("adapter.onnx_adapter", "adapter_model.bin"):
        (tmp_path / name).write_bytes(b"    TORT")
        with pytest.raises(ModelError, match="pass a PEFT folder"):
            load_adapter(runner, tmp_path / name)
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors: can't be read"):
        load_adapter(runner, tmp_path)
    with pytest.raises(ModelError, match="is not a LoRA adapter"):
        load_adapter(runner, demo.MODEL_PATH)
    folder = adapters.write_peft(tmp_path / "bare", pair())
    (folder / "adapter_config.json").unlink()
    with pytest.raises(ModelError, match=r"adapter_config\.json: can't be read"):
        load_adapter(runner, folder)


def test_an_adapter_that_is_cut_anywhere_is_refused(runner: OnnxRunner, tmp_path: Path) -> None:
    for whole in (
        adapters.write_peft(tmp_path, pair()) / "adapter_model.safetensors",
        adapters.write(tmp_path / "whole.gguf"),
    ):
        data = whole.read_bytes()
        cut = tmp_path / f"cut{whole.suffix}"
        for size in (0, 3, 10, 60, 200, 900, len(data) // 2, len(data) - 1):
            cut.write_bytes(data[:size])
            with pytest.raises(ModelError, match=cut.name):
                load_adapter(runner, cut)


def test_an_adapter_of_llama_cpp_is_refused_where_its_names_are_unknown(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo.ONNX_PATH, folder)
    (folder / "config.json").write_text('{"architectures": ["GemmaForCausalLM"]}')
    runner = open_runner(folder)
    with pytest.raises(ModelError, match="this is 'gemma'"):
        load_adapter(runner, demo.ADAPTER_PATHS["pirate"])
    load_adapter(runner, adapters.write_peft(tmp_path / "adapter", pair()))
    runner.close()


SCALES: Mapping[str, tuple[dict[str, object], float]] = {
    "alpha over rank": ({"lora_alpha": 6}, 1.5),
    "alpha over the root of the rank": ({"lora_alpha": 6, "use_rslora": True}, 3.0),
    "another alpha for a projection": ({"lora_alpha": 6, "alpha_pattern": {"q_proj": 12}}, 3.0),
    "another alpha for others": ({"lora_alpha": 6, "alpha_pattern": {r"layers\.1\..*": 12, "proj": 1}}, 1.5),
}


@pytest.mark.parametrize("name", SCALES)
def test_an_adapter_is_scaled_as_peft_does(name: str, runner: OnnxRunner, tmp_path: Path) -> None:
    config, scale = SCALES[name]
    digest = load_adapter(runner, adapters.write_peft(tmp_path, pair(), **config))
    arrays = runner._adapters._loaded[digest].arrays  # type: ignore[union-attr]
    assert {float(array.max()) for name, array in arrays.items() if name.endswith(".b")} == {scale}


def test_values_of_every_type_are_read(runner: OnnxRunner, tmp_path: Path) -> None:
    exact = pair()
    half = {name: array.astype(np.float16) for name, array in exact.items()}
    brain = {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in exact.items()}
    found = []
    for number, tensors in enumerate((exact, half, brain)):
        digest = load_adapter(runner, adapters.write_peft(tmp_path / str(number), tensors))
        found.append(runner._adapters._loaded[digest].arrays)  # type: ignore[union-attr]
    assert all((arrays[name] == found[0][name]).all() for arrays in found for name in found[0])


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.BF16])
def test_values_of_a_gguf_are_read_as_llama_cpp_reads_them(
    kind: gguf.GGMLQuantizationType, runner: OnnxRunner, tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    values = {
        f"blk.0.attn_v.weight.{part}": gguf.quants.quantize(rng.normal(0, 1, sizes).astype(np.float32), kind)
        for part, sizes in (("lora_a", (32, 128)), ("lora_b", (64, 32)))
    }
    path = tmp_path / "quantized.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    for name, data in values.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    arrays = runner._adapters._loaded[load_adapter(runner, path)].arrays  # type: ignore[union-attr]
    a, b = (gguf.quants.dequantize(data, kind) for data in values.values())
    (found_a,) = (array for name, array in arrays.items() if name.endswith(".a"))
    (found_b,) = (array for name, array in arrays.items() if name.endswith(".b"))
    assert (found_a == a.T).all()
    assert (found_b == b.T).all()
