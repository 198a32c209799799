"""Embeddings of encoders and of the demo model are equal to those computed by hand."""

from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support import encoder
from tests.support.engines import ONNX, Recorder, demo_engine, gqa_demo
from tokenbus.protocol.wire import errors, internal
from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine_client.client import EngineClient

Start = Callable[[EngineSettings], Coroutine[Any, Any, EngineClient]]
CLS, SEP, THE, FOX, SLEEP, S = 2, 3, 4, 5, 7, 8


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    engines = []

    async def start(settings: EngineSettings) -> EngineClient:
        engines.append(demo_engine(settings))
        await engines[-1].start("test")
        return engines[-1]

    yield start
    for engine in engines:
        await engine.cleanup()


async def rows(engine: EngineClient, *inputs: str | list[int], **options: Any) -> np.ndarray:
    reply = await engine.embed(internal.Embed(inputs=list(inputs), remaining_ms=10_000, **options))
    return np.frombuffer(reply.vectors, "<f4").reshape(len(inputs), -1)


def states(*token_ids: int) -> np.ndarray:
    return encoder.table()[list(token_ids)]


@pytest.mark.parametrize(
    ("asked", "said", "expected"),
    [
        ("auto", None, "mean"),
        ("auto", "cls", "cls"),
        ("auto", "last", "last"),
        ("auto", "mean", "mean"),
        ("cls", "mean", "cls"),
    ],
)
async def test_an_encoder_s_vectors_are_pooled_as_its_files_or_a_setting_say(
    start: Start, tmp_path: Path, asked: str, said: str | None, expected: str
) -> None:
    encoder.write(tmp_path, pooling=said)
    engine = await start(EngineSettings(model=str(tmp_path), threads=1, pooling=asked))
    whole = states(CLS, THE, FOX, SLEEP, S, SEP)
    truth = {"mean": whole.mean(axis=0), "cls": whole[0], "last": whole[-1]}[expected]
    (found,) = await rows(engine, "the fox sleeps", normalize=False)
    assert np.allclose(found, truth, atol=1e-6)


async def test_every_input_has_its_row_whatever_the_others_are(start: Start, tmp_path: Path) -> None:
    encoder.write(tmp_path)
    engine = await start(EngineSettings(model=str(tmp_path), threads=1))
    texts = ["the", "the fox", "fox fox fox fox fox", "owl", "the owl runs"]
    together = await rows(engine, *texts)
    alone = np.concatenate([await rows(engine, text) for text in texts])
    assert np.allclose(together, alone, atol=1e-6)
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)


async def test_token_ids_are_taken_as_they_are_and_a_special_token_in_a_text_is_none(
    start: Start, tmp_path: Path
) -> None:
    encoder.write(tmp_path)
    engine = await start(EngineSettings(model=str(tmp_path), threads=1))
    (by_ids,) = await rows(engine, [THE, FOX], normalize=False)
    assert np.allclose(by_ids, states(THE, FOX).mean(axis=0), atol=1e-6)
    (bare,) = await rows(engine, [SEP], normalize=False)
    (said,) = await rows(engine, "[SEP]", normalize=False)
    assert not np.allclose(bare, said)
    assert (await engine.embed(internal.Embed(inputs=["[SEP]"], remaining_ms=1e4))).prompt_tokens > 3


async def test_dimensions_are_the_first_numbers_of_the_vector(start: Start, tmp_path: Path) -> None:
    encoder.write(tmp_path)
    engine = await start(EngineSettings(model=str(tmp_path), threads=1))
    (whole,) = await rows(engine, "fox", normalize=False, dimensions=encoder.WIDTH)
    (short,) = await rows(engine, "fox", normalize=False, dimensions=2)
    assert np.array_equal(short, whole[:2])
    with pytest.raises(errors.RequestError, match="at most 6, got 7"):
        await rows(engine, "fox", dimensions=encoder.WIDTH + 1)


async def test_an_input_as_long_as_the_model_takes_fits_and_one_token_more_does_not(
    start: Start, tmp_path: Path
) -> None:
    encoder.write(tmp_path)
    engine = await start(EngineSettings(model=str(tmp_path), threads=1))
    await rows(engine, [FOX] * 16)
    with pytest.raises(errors.RequestError, match=r"input\[1\] has 17 tokens") as refusal:
        await rows(engine, "fox", [FOX] * 17)
    assert refusal.value.error.code is errors.Code.PROMPT_TOO_LONG
    with pytest.raises(errors.RequestError, match="the vocabulary has 10 tokens"):
        await rows(engine, [len(encoder.WORDS)])


async def test_an_encoder_generates_nothing_and_says_so(start: Start, tmp_path: Path) -> None:
    encoder.write(tmp_path)
    engine = demo_engine(EngineSettings(model=str(tmp_path), threads=1))
    config = await engine.start("test")
    assert (config.features, config.prefix_cache) == (("embed",), False)
    assert config.embeddings is not None
    assert config.embeddings.dimensions == encoder.WIDTH
    asked = engine_request.EngineRequest(key="k", token_ids=[1], sampling=engine_request.Sampling(max_tokens=1))
    with pytest.raises(errors.RequestError, match="generates nothing"):
        engine.generate(asked, lambda output: None)
    await engine.cleanup()


@pytest.mark.parametrize("flavour", ["plain", "gqa"])
async def test_the_hidden_state_of_the_demo_model_is_what_its_next_token_is_made_of(start: Start, flavour: str) -> None:
    model = ONNX.model if flavour == "plain" else str(gqa_demo())
    engine = await start(msgspec.structs.replace(ONNX, model=model))
    token_ids = await engine.tokenize(internal.Tokenize(text="The capital of Avaria is"))
    (hidden,) = await rows(engine, token_ids, normalize=False)
    recorder = Recorder()
    sampling = engine_request.Sampling(max_tokens=1, ignore_eos=True)
    engine.generate(engine_request.EngineRequest(key="k", token_ids=token_ids, sampling=sampling), recorder)
    await recorder.terminal()
    assert int((_embedding_matrix() @ hidden).argmax()) == recorder.token_ids[0]


async def test_embeddings_are_made_while_streams_run(start: Start) -> None:
    engine = await start(ONNX)
    token_ids = await engine.tokenize(internal.Tokenize(text="Once upon a time"))
    alone = await rows(engine, "the fox", "the owl")
    recorder = Recorder()
    sampling = engine_request.Sampling(max_tokens=200, ignore_eos=True)
    engine.generate(engine_request.EngineRequest(key="k", token_ids=token_ids, sampling=sampling), recorder)
    await recorder.until(lambda seen: len(seen.token_ids) > 2)
    beside = await rows(engine, "the fox", "the owl")
    assert not recorder.terminals
    assert np.array_equal(alone, beside)
    assert (await recorder.terminal()).finish_reason == "length"


def _embedding_matrix() -> np.ndarray:
    import gguf

    from tokenbus import demo

    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(demo.MODEL_PATH).tensors}
    return tensors["token_embd.weight"].astype(np.float32)
