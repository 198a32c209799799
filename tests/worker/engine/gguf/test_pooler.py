"""Embeddings and scores of GGUF models are those that numpy computes from the same weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from tests.support import encoder_math, poisoned_model
from tests.support.models import random_encoder
from tests.support.models.random_encoder import EncoderShape
from tests.support.poisoned_model import POISON
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.device.pooling import PoolingRunner
from tokenbus.worker.engine.device.runner import Pooler
from tokenbus.worker.engine.gguf.runner import load
from tools.demo_model import corpus

MEAN, CLS, BERT_LAST = (EncoderShape("bert", pooling) for pooling in ("mean", "cls", "last"))
UNNAMED = EncoderShape("bert", None)
LAST, CAUSAL_MEAN = EncoderShape("qwen3", "last"), EncoderShape("qwen3", "mean")
SHAPES = {
    "bert-mean": MEAN,
    "bert-cls": CLS,
    "bert-last": BERT_LAST,
    "bert-unnamed": UNNAMED,
    "qwen3-last": LAST,
    "qwen3-mean": CAUSAL_MEAN,
    "nomic-bert": EncoderShape("nomic-bert", "mean"),
    "jina-bert-v2": EncoderShape("jina-bert-v2", "mean"),
    "gemma-embedding": EncoderShape("gemma-embedding", "mean", layers=6),
}
RERANKERS = {"bert-rank": EncoderShape("bert", "rank"), "qwen3-rank": EncoderShape("qwen3", "rank")}
EXACT: dict[str, Any] = {"threads": 1, "flash_attention": "off", "cache_type_k": "f32", "cache_type_v": "f32"}
"""Without flash attention and with 32 bits, llama.cpp rounds as little as it can."""
NOISE = 1e-4


def unit(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True))


def open_model(path: Path, **settings: Any) -> PoolingRunner:
    runner = load(EngineSettings(model=str(path), **{**EXACT, **settings}), lambda share: None)
    assert isinstance(runner, PoolingRunner)
    return runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoders")
    for name, shape in (SHAPES | RERANKERS).items():
        random_encoder.write(folder / f"{name}.gguf", shape)
    return folder


@pytest.fixture(scope="module", params=SHAPES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def runner(folder: Path, name: str) -> Iterator[PoolingRunner]:
    runner = open_model(folder / f"{name}.gguf")
    yield runner
    runner.close()


def inputs_of(*lengths: int) -> list[list[int]]:
    rng = np.random.Generator(np.random.PCG64(5))
    return [rng.integers(5, 400, length).tolist() for length in lengths]


def rows_of(pooler: Pooler | None, inputs: list[list[int]]) -> np.ndarray:
    assert pooler is not None
    rows = pooler.begin(inputs).advance(1)
    assert rows is not None, "they were cut"
    return rows


def pool(runner: PoolingRunner, inputs: list[list[int]]) -> np.ndarray:
    return rows_of(runner.embedder, inputs)


def test_vectors_are_those_that_numpy_computes(folder: Path, name: str, runner: PoolingRunner) -> None:
    shape = SHAPES[name]._replace(pooling=SHAPES[name].pooling or "mean")
    if shape.arch not in ("bert", "qwen3"):
        pytest.skip("only the binding's own embed has it")
    weights = encoder_math.read_weights(folder / f"{name}.gguf")
    inputs = inputs_of(1, 2, 7, 30, 96)
    truth = np.stack([encoder_math.row(weights, shape, one) for one in inputs])
    assert np.abs(unit(pool(runner, inputs)) - unit(truth)).max() < NOISE
    assert not np.allclose(unit(truth)[:-1], unit(truth)[1:], atol=100 * NOISE)


def test_vectors_are_those_of_the_binding_s_own_embed(folder: Path, name: str, runner: PoolingRunner) -> None:
    if SHAPES[name].pooling is None:
        pytest.skip("it does not pool where the file names no pooling")
    texts = ["a fox", "the owl, 7", "b"]
    other = llama_cpp.Llama(
        str(folder / f"{name}.gguf"), embedding=True, n_ctx=256, n_seq_max=1, verbose=False, n_threads=1,
        n_threads_batch=1, flash_attn=False, type_k=0, type_v=0,
    )  # fmt: skip
    assert runner.embedder is not None
    found = pool(runner, [runner.embedder.tokenize(text) for text in texts])
    assert np.abs(unit(found) - unit(np.array([other.embed(text) for text in texts]))).max() < NOISE
    other.close()


def test_an_input_s_vector_does_not_depend_on_its_batch(runner: PoolingRunner) -> None:
    inputs = inputs_of(*range(1, 31))
    alone = np.concatenate([pool(runner, [one]) for one in inputs])
    assert np.abs(unit(pool(runner, inputs)) - unit(alone)).max() < NOISE
    assert np.abs(unit(pool(runner, inputs[::-1])) - unit(alone[::-1])).max() < NOISE


@pytest.mark.parametrize("ubatch_tokens", [1, 7, 512])
def test_a_causal_model_s_vector_does_not_depend_on_where_a_ubatch_ends(folder: Path, ubatch_tokens: int) -> None:
    inputs = inputs_of(1, 2, 7, 30, 96)
    truth = encoder_math.read_weights(folder / "qwen3-last.gguf")
    runner = open_model(folder / "qwen3-last.gguf", ubatch_tokens=ubatch_tokens)
    expected = np.stack([encoder_math.row(truth, LAST, one) for one in inputs])
    found = np.concatenate([pool(runner, [one]) for one in inputs])
    assert np.abs(unit(found) - unit(expected)).max() < NOISE
    runner.close()


def test_flash_attention_and_16_bits_cost_a_thousandth_at_most(folder: Path, name: str, runner: PoolingRunner) -> None:
    inputs = inputs_of(1, 2, 7, 30, 96)
    fast = open_model(folder / f"{name}.gguf", flash_attention="on", cache_type_k="f16", cache_type_v="f16")
    assert np.abs(unit(pool(fast, inputs)) - unit(pool(runner, inputs))).max() < 1e-3
    fast.close()


def test_special_tokens_stand_around_a_text_and_none_is_parsed_in_it(folder: Path) -> None:
    runner = open_model(folder / "bert-mean.gguf")
    assert runner.embedder is not None
    tokenize = runner.embedder.tokenize
    cls, sep = 2, 3
    assert tokenize("a")[0] == tokenize("a [SEP] b")[0] == cls
    assert tokenize("a [SEP] b").count(sep) == 1
    runner.close()


def test_a_long_input_is_as_long_as_the_model_s_positions_unless_a_setting_is_lower(folder: Path) -> None:
    path = folder / "bert-mean.gguf"
    for asked, longest in ((0, 96), (96, 96), (10, 10)):
        runner = open_model(path, context_length=asked)
        assert runner.embedder is not None
        assert runner.embedder.max_input_tokens == runner.config.context_length == longest
        assert np.isfinite(pool(runner, inputs_of(longest))).all()
        runner.close()
    with pytest.raises(ModelError, match="--context-length 97 is above what the model was made for, 96"):
        open_model(path, context_length=97)


def test_an_input_that_is_longer_than_a_batch_is_computed_alone(folder: Path) -> None:
    runner = open_model(folder / "bert-mean.gguf", ubatch_tokens=20)
    assert runner.embedder is not None
    limits = runner.embedder.batch_limits
    assert limits.allow(1, 96, 96)
    assert not limits.allow(2, 21, 20)
    assert np.isfinite(pool(runner, inputs_of(96))).all()
    runner.close()


def test_it_offers_embeddings_and_nothing_else(runner: PoolingRunner) -> None:
    config = runner.config
    assert (config.features, config.prefix_cache) == (("embed",), False)
    assert config.embeddings is not None
    assert config.embeddings.dimensions == 64
    assert runner.bundle is None


QUERY, DOCUMENTS = "which fox?", ["the fox, 7", "an owl", "a", "the owl runs. the fox sleeps"]


@pytest.fixture(scope="module", params=RERANKERS)
def ranker(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[str, PoolingRunner]]:
    runner = open_model(folder / f"{request.param}.gguf")
    yield request.param, runner
    runner.close()


def test_scores_are_those_that_numpy_computes(folder: Path, ranker: tuple[str, PoolingRunner]) -> None:
    name, runner = ranker
    assert runner.reranker is not None
    weights = encoder_math.read_weights(folder / f"{name}.gguf")
    inputs = [*runner.reranker.pair(QUERY, DOCUMENTS), *inputs_of(1, 2, 96)]
    truth = [encoder_math.row(weights, RERANKERS[name], one)[0] for one in inputs]
    scores = rows_of(runner.reranker, inputs)[:, 0]
    assert np.abs(scores - truth).max() < NOISE
    assert len({round(score, 3) for score in truth}) == len(truth)
    alone = np.concatenate([rows_of(runner.reranker, [one]) for one in inputs])[:, 0]
    assert np.abs(scores - alone).max() < NOISE


def test_a_reranker_offers_scores_and_nothing_else(ranker: tuple[str, PoolingRunner]) -> None:
    _, runner = ranker
    assert runner.embedder is None
    assert (runner.config.features, runner.config.embeddings) == (("rerank",), None)


def whole(path: Path, text: str) -> list[int]:
    """Returns the ids of a text with all special tokens parsed, as llama.cpp's server tokenizes a filled template."""
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    ids = model.tokenize(text.encode(), add_bos=False, special=True)
    model.close()
    return list(ids)


def test_a_template_is_filled_and_tokenized_as_a_whole(folder: Path) -> None:
    path = folder / "qwen3-rank.gguf"
    runner = open_model(path)
    assert runner.reranker is not None
    for document, ids in zip(DOCUMENTS, runner.reranker.pair(QUERY, DOCUMENTS), strict=True):
        text = random_encoder.RERANK_TEMPLATE.replace("{query}", QUERY).replace("{document}", document)
        assert ids == whole(path, text)
    (end,) = whole(path, corpus.END)
    (sly,) = runner.reranker.pair("{document}", [f"{corpus.END} x {{query}}"])
    assert sly.count(end) == 2
    runner.close()


def test_without_a_template_the_vocabulary_s_own_tokens_stand_around_the_texts(folder: Path) -> None:
    runner = open_model(folder / "bert-rank.gguf")
    assert runner.reranker is not None
    (ids,) = runner.reranker.pair("a", ["b c"])
    cls, sep = 2, 3
    letters = {letter: 5 + place for place, letter in enumerate("abc")}
    # llama.cpp's server has no separator at the end where the vocabulary has no end token.
    assert ids == [cls, letters["a"], sep, letters["b"], letters["c"]]
    runner.close()


def test_a_setting_may_name_another_pooling_than_the_file(folder: Path) -> None:
    weights, inputs = encoder_math.read_weights(folder / "bert-mean.gguf"), inputs_of(7, 30)
    for pooling in ("mean", "cls", "last"):
        runner = open_model(folder / "bert-mean.gguf", pooling=pooling)
        truth = np.stack([encoder_math.row(weights, EncoderShape("bert", pooling), one) for one in inputs])
        assert np.abs(unit(pool(runner, inputs)) - unit(truth)).max() < NOISE
        runner.close()


def test_a_model_that_only_embeds_or_scores_can_not_do_without(folder: Path) -> None:
    for name, pooling, does in (
        ("bert-mean", "none", "make embeddings"), ("bert-rank", "none", "score documents"),
        ("bert-rank", "mean", "score documents"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=f"can only {does}: leave --pooling {pooling} out"):
            open_model(folder / f"{name}.gguf", pooling=pooling)


def test_a_model_that_tells_classes_apart_is_no_reranker(tmp_path: Path) -> None:
    path = tmp_path / "classes.gguf"
    random_encoder.write(path, EncoderShape("bert", "rank"), labels=("joy", "rage", "fear"))
    with pytest.raises(ModelError, match="sorts texts into 3 classes"):
        open_model(path)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_input_whose_numbers_are_none_leaves_nothing_behind(pooling: str, tmp_path: Path) -> None:
    path = tmp_path / "poisoned.gguf"
    random_encoder.write(path, EncoderShape("qwen3", pooling))
    poisoned_model.poison(path)
    runner = open_model(path)
    assert runner.embedder is not None
    before = rows_of(runner.embedder, [[5, 6, 7]])
    assert not np.isfinite(rows_of(runner.embedder, [[5, POISON, *range(5, 60)]])).any()
    np.testing.assert_array_equal(rows_of(runner.embedder, [[5, 6, 7]]), before)
    runner.close()
