"""LoRA adapters of GGUF models: what is computed with them, and which files are refused."""

import ctypes
import itertools
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from llama_cpp import llama_cpp as llama

from tests.support import adapters
from tests.support.engines import Recorder, exact_demo, gguf_runner, thread_engine
from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.engine.gguf import probe
from tokenbus.worker.engine.gguf.runner import GgufRunner, load
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.scheduling.plan import Outcome, SampledToken, ScheduledTokens, StepPlan, Undone
from tokenbus.worker.engine.scheduling.scheduler import Scheduler
from tokenbus.worker.engine.scheduling.sequence import Sequence

QUERY = "blk.0.attn_q.weight"
PROMPTS = ([11, 12, 13, 14, 15], [21, 22, 23], [31, 32, 33, 34], [41, 42, 43, 44, 45, 46])
TOKENS = 24
END = 1
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def runner() -> Iterator[GgufRunner]:
    opened = gguf_runner(exact_demo())
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def digests(runner: GgufRunner, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("adapters")
    assert runner.adapters is not None
    return [runner.adapters.load(adapters.write(folder / f"{seed}.gguf", seed)) for seed in (1, 2)]


def likeliest(row: list[float]) -> int:
    """The likeliest token that is not the end token, which `ignore_eos` rules out."""
    return int(np.argmax([-np.inf if token_id == END else logit for token_id, logit in enumerate(row)]))


def bare_answer(path: Path | None, scale: float, prompt: list[int]) -> list[list[float]]:
    """Computes a prompt and what follows with llama.cpp alone: the logits of each token."""
    model = llama.llama_model_load_from_file(exact_demo().model.encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_threads, params.type_k, params.type_v = 256, 1, 0, 0
    params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama.llama_init_from_model(model, params)
    if path is not None:
        handle = llama.llama_adapter_lora_init(model, str(path).encode())
        one = (llama.llama_adapter_lora_p_ctypes * 1)(handle)
        assert llama.llama_set_adapters_lora(context, one, 1, (ctypes.c_float * 1)(scale)) == 0
    rows, tokens, start = [], prompt, 0
    for _ in range(TOKENS):
        logits = probe._decode(context, tokens, start, 0)
        assert logits is not None
        start += len(tokens)
        rows.append(logits.tolist())
        tokens = [likeliest(rows[-1])]
    llama.llama_free(context)
    llama.llama_model_free(model)
    return rows


def test_each_sequence_has_the_logits_of_a_lone_run_with_its_adapter(
    runner: GgufRunner, digests: list[str], tmp_path: Path
) -> None:
    paths = [adapters.write(tmp_path / f"{seed}.gguf", seed) for seed in (1, 2)]
    sets: list[tuple[Adapter, ...]] = [
        (),
        (Adapter(digests[0], 1.0),),
        (Adapter(digests[1], 1.0),),
        (Adapter(digests[0], 0.25),),
    ]
    bare = [
        bare_answer(None, 0.0, PROMPTS[0]),
        bare_answer(paths[0], 1.0, PROMPTS[1]),
        bare_answer(paths[1], 1.0, PROMPTS[2]),
        bare_answer(paths[0], 0.25, PROMPTS[3]),
    ]
    pool = BlockPool(64, 16, runner.num_lanes)
    scheduler = Scheduler(pool, 4, max_step_tokens=256)
    sampling = engine_request.Sampling(max_tokens=TOKENS, ignore_eos=True, logprobs=1)
    for number, (used, prompt) in enumerate(zip(sets, PROMPTS, strict=True)):
        scheduler.add(Sequence(number, array("I", prompt), sampling, (), adapters=used, arrived_at=float(number)))
    found: dict[int, list[SampledToken]] = {number: [] for number in range(4)}
    while scheduler.has_work:
        plan = scheduler.schedule(64)
        for sequence in plan.started:
            runner.add_sequence(sequence.seq_no, sequence.sampling)
        runner.apply(plan.kv_ops)
        for result in scheduler.update(plan, runner.step(plan)):
            assert result.sampled is not None
            found[result.sequence.seq_no].append(result.sampled)
    for number, rows in enumerate(bare):
        assert [one.token_id for one in found[number]] == [likeliest(row) for row in rows]
        for one, row in zip(found[number], rows, strict=True):
            assert one.logprob is not None
            logits = np.array(row)
            expected = logits[one.token_id] - np.log(np.exp(logits).sum())
            assert one.logprob.logprob == pytest.approx(float(expected), abs=TOLERANCE)
        runner.remove_sequence(number)
        runner.lanes.truncate(number, 0)


def test_a_step_without_room_for_its_second_set_has_done_the_first_and_nothing_of_the_second(
    runner: GgufRunner, digests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = engine_request.Sampling(max_tokens=4, ignore_eos=True, logprobs=1)
    sequences = [
        Sequence(number, array("I", PROMPTS[number]), sampling, (), adapters=used)
        for number, used in enumerate([(), (Adapter(digests[0], 1.0),)])
    ]
    for number, sequence in enumerate(sequences):
        sequence.lane = number
        runner.add_sequence(number, sampling)
    plan = StepPlan(tuple(ScheduledTokens(one, 0, one.num_tokens) for one in sequences))
    decode, statuses = llama.llama_decode, itertools.chain([0, 1], itertools.repeat(0))

    def fail_second(context: object, batch: object) -> int:
        return next(statuses) or int(decode(context, batch))

    monkeypatch.setattr(llama, "llama_decode", fail_second)
    half = runner.step(plan)
    assert half[1] is Undone.NO_ROOM
    memory = llama.llama_get_memory(runner._context)
    assert [llama.llama_memory_seq_pos_max(memory, 1 + lane) for lane in (0, 1)] == [len(PROMPTS[0]) - 1, -1]
    runner.lanes.truncate(0, 0)
    first = runner.step(plan)
    for lane in (0, 1):
        runner.lanes.truncate(lane, 0)
    assert runner.step(plan) == first == [half[0], first[1]]
    for number in (0, 1):
        runner.remove_sequence(number)
        runner.lanes.truncate(number, 0)


def write_tensors(path: Path, tensors: Mapping[str, tuple[int, ...]], dtype: type = np.float32) -> Path:
    return write_arrays(path, {name: np.ones(shape, dtype) for name, shape in tensors.items()})


def write_arrays(path: Path, tensors: Mapping[str, npt.NDArray[Any]], alpha: float = 4.0) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


REFUSED: Mapping[str, tuple[Mapping[str, tuple[int, ...]], str]] = {
    "another rank on each side": ({f"{QUERY}.lora_a": (4, 128), f"{QUERY}.lora_b": (128, 8)}, "the ranks differ"),
    "a rank above the limit": ({f"{QUERY}.lora_a": (2048, 128), f"{QUERY}.lora_b": (128, 2048)}, "the rank 2048"),
    "a larger base": ({f"{QUERY}.lora_a": (4, 256), f"{QUERY}.lora_b": (256, 4)}, "another base"),
    "more layers": ({"blk.9.attn_q.weight.lora_a": (4, 128), "blk.9.attn_q.weight.lora_b": (128, 4)}, "another base"),
    "three dimensions": ({f"{QUERY}.lora_a": (2, 4, 128), f"{QUERY}.lora_b": (2, 128, 4)}, "another base"),
    "one half": ({f"{QUERY}.lora_a": (4, 128)}, f"has no {QUERY}.lora_b"),
    "a tensor of its own": ({f"{QUERY}.lora_a": (4, 128), f"{QUERY}.lora_b": (128, 4), "x": (4,)}, "has no x.lora_a"),
    "the embedding": ({"token_embd.weight.lora_a": (640, 4), "token_embd.weight.lora_b": (128, 4)}, "can't be changed"),
    "a norm": ({"blk.0.attn_norm.weight.lora_a": (4, 128), "blk.0.attn_norm.weight.lora_b": (1, 4)}, "is not a matrix"),
    "nothing": ({}, "has no matrices"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_that_does_not_fit_the_model_is_refused(name: str, runner: GgufRunner, tmp_path: Path) -> None:
    tensors, problem = REFUSED[name]
    assert runner.adapters is not None
    with pytest.raises(ModelError, match=problem) as refusal:
        runner.adapters.load(write_tensors(tmp_path / "wrong.gguf", tensors))
    assert "wrong.gguf" in str(refusal.value)


@pytest.mark.parametrize("dtype", [np.float64, np.int32])
def test_an_adapter_of_a_type_that_cannot_be_computed_is_refused(
    dtype: type, runner: GgufRunner, tmp_path: Path
) -> None:
    tensors = {f"{QUERY}.lora_a": (4, 128), f"{QUERY}.lora_b": (128, 4)}
    assert runner.adapters is not None
    with pytest.raises(ModelError, match="must be one of F32, F16"):
        runner.adapters.load(write_tensors(tmp_path / "wrong.gguf", tensors, dtype))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("wrong", ["lora_a", "lora_b"])
def test_an_adapter_with_a_value_that_is_not_finite_is_refused_by_the_name_of_its_tensor(
    wrong: str, dtype: type, value: float, runner: GgufRunner, tmp_path: Path
) -> None:
    tensors = {f"{QUERY}.lora_a": np.ones((4, 128), dtype), f"{QUERY}.lora_b": np.ones((128, 4), dtype)}
    tensors[f"{QUERY}.{wrong}"][2, 3] = value
    path = write_arrays(tmp_path / "wrong.gguf", tensors)
    assert runner.adapters is not None
    with pytest.raises(ModelError, match=rf"wrong\.gguf: {QUERY}\.{wrong} has values that are not finite"):
        runner.adapters.load(path)


def test_an_adapter_whose_scale_is_not_finite_is_refused(runner: GgufRunner, tmp_path: Path) -> None:
    tensors = {f"{QUERY}.lora_a": np.ones((4, 128), np.float32), f"{QUERY}.lora_b": np.ones((128, 4), np.float32)}
    assert runner.adapters is not None
    with pytest.raises(ModelError, match=r"adapter\.lora\.alpha is inf"):
        runner.adapters.load(write_arrays(tmp_path / "wrong.gguf", tensors, alpha=np.inf))


def test_an_adapter_of_another_architecture_and_a_model_are_refused(runner: GgufRunner, tmp_path: Path) -> None:
    assert runner.adapters is not None
    with pytest.raises(ModelError, match="for the architecture 'qwen2', and the model is a 'llama'"):
        runner.adapters.load(adapters.write(tmp_path / "wrong.gguf", architecture="qwen2"))
    with pytest.raises(ModelError, match="is not a LoRA adapter"):
        runner.adapters.load(Path(exact_demo().model))
    with pytest.raises(ModelError, match="is a folder, as PEFT writes it; convert it"):
        runner.adapters.load(tmp_path)


def test_an_adapter_that_is_cut_anywhere_is_refused(runner: GgufRunner, tmp_path: Path) -> None:
    whole = adapters.write(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    assert runner.adapters is not None
    for size in (0, 3, 10, 60, 200, 900, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            runner.adapters.load(path)


def test_an_adapter_is_freed_when_it_was_unloaded_as_often_as_loaded(tmp_path: Path) -> None:
    runner = gguf_runner(exact_demo())
    path = adapters.write(tmp_path / "one.gguf", 7)
    assert runner.adapters is not None
    digest = runner.adapters.load(path)
    assert runner.adapters.load(path) == digest
    runner.adapters.activate((Adapter(digest, 1.0),))
    runner.adapters.unload(digest)
    assert digest in runner.adapters
    runner.adapters.unload(digest)
    assert digest not in runner.adapters
    assert not runner._model._adapters._models
    runner.adapters.load(path)
    runner.close()  # frees it, and then the model


async def test_answers_are_the_same_when_there_is_no_room_for_the_later_sets_of_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = thread_engine(lambda progress: load(exact_demo(), progress))
    await engine.start("w")
    digests = [await engine.load_adapter(str(adapters.write(tmp_path / f"{seed}.gguf", seed))) for seed in (1, 2)]
    sets: list[tuple[Adapter, ...]] = [(), (Adapter(digests[0], 1.0),), (Adapter(digests[1], 1.0),), ()]
    recorders: list[Recorder] = []
    for together in (False, True):
        for number, (used, prompt) in enumerate(zip(sets, PROMPTS, strict=True)):
            sampling = engine_request.Sampling(max_tokens=60, temperature=number % 2, seed=number, ignore_eos=True)
            recorders.append(Recorder())
            key = f"{together}-{number}"
            request = engine_request.EngineRequest(
                key=key, token_ids=prompt * 8, sampling=sampling, adapters=used, cache_salt=key
            )
            engine.generate(request, recorders[-1])
            if not together:
                await recorders[-1].terminal()
        if not together:
            failures = _fail_later_sets(monkeypatch)
    for recorder in recorders:
        await recorder.terminal()
    answers = [recorder.token_ids for recorder in recorders]
    assert answers[4:] == answers[:4]
    assert next(failures) > 10
    await engine.cleanup()


def _fail_later_sets(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Has every fourth decode of a batch that is not the first of its step find no room; counts them."""
    decode, step = llama.llama_decode, GgufRunner.step
    later, failures = itertools.count(1), itertools.count()
    is_first = True

    def begin(runner: GgufRunner, plan: StepPlan) -> list[Outcome]:
        nonlocal is_first
        is_first = True
        return step(runner, plan)

    def may_fail(context: object, batch: object) -> int:
        nonlocal is_first
        if not is_first and next(later) % 4 == 0:
            next(failures)
            return 1
        is_first = False
        return int(decode(context, batch))

    monkeypatch.setattr(GgufRunner, "step", begin)
    monkeypatch.setattr(llama, "llama_decode", may_fail)
    return failures
