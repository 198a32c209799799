"""A model that generates makes embeddings in a context of its own, wherever its inputs are cut."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import encoder_math, poisoned_model
from tests.support.models import random_encoder
from tests.support.models.random_encoder import EncoderShape
from tests.support.poisoned_model import POISON
from tokenbus.protocol.wire import messages
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.device.draws import Matrix
from tokenbus.worker.engine.gguf.pooler import CausalEmbedder
from tokenbus.worker.engine.gguf.runner import GgufRunner, load

SHAPE = EncoderShape("qwen3", None)
EXACT: dict[str, Any] = {"threads": 1, "flash_attention": "off", "cache_type_k": "f32", "cache_type_v": "f32"}
"""Without flash attention and with 32 bits, llama.cpp rounds as little as it can."""
NOISE = 1e-4
LENGTHS = (1, 2, 7, 30, 96)


def unit(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True))


def open_model(path: Path, **changes: Any) -> GgufRunner:
    fields = {**EXACT, "host_cache_mib": 0, **changes}
    runner = load(EngineSettings(model=str(path), **fields), lambda share: None)
    assert isinstance(runner, GgufRunner)
    return runner


def embedder_of(runner: GgufRunner) -> CausalEmbedder:
    assert isinstance(runner.embedder, CausalEmbedder)
    return runner.embedder


def inputs_of(*lengths: int) -> list[list[int]]:
    rng = np.random.Generator(np.random.PCG64(5))
    return [rng.integers(5, 300, length).tolist() for length in lengths]


def embed(embedder: CausalEmbedder, inputs: list[list[int]], piece: int = 1_000) -> Matrix:
    """Returns the rows of inputs that are computed in pieces of so many tokens."""
    started = embedder.begin(inputs)
    num_pieces = 1
    while (rows := started.advance(piece)) is None:
        num_pieces += 1
    assert num_pieces == -(-sum(map(len, inputs)) // piece)
    return rows


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("generates") / "model.gguf"
    random_encoder.write(path, SHAPE)
    return path


@pytest.fixture(scope="module", params=["last", "mean"])
def runner(path: Path, request: pytest.FixtureRequest) -> Iterator[GgufRunner]:
    runner = open_model(path, pooling=request.param)
    yield runner
    runner.close()


def test_vectors_are_those_that_numpy_computes(path: Path, runner: GgufRunner) -> None:
    weights, embedder = encoder_math.read_weights(path), embedder_of(runner)
    inputs = inputs_of(*LENGTHS)
    shape = SHAPE._replace(pooling=embedder.pooling)
    truth = np.stack([encoder_math.row(weights, shape, one) for one in inputs])
    assert np.abs(unit(embed(embedder, inputs)) - unit(truth)).max() < NOISE
    assert not np.allclose(unit(truth)[:-1], unit(truth)[1:], atol=100 * NOISE)


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 24), min_size=1, max_size=16), piece=st.integers(1, 80))
def test_a_vector_does_not_depend_on_where_inputs_are_cut_or_on_others(
    runner: GgufRunner, lengths: list[int], piece: int
) -> None:
    embedder, inputs = embedder_of(runner), inputs_of(*lengths)
    alone = np.concatenate([embed(embedder, [one]) for one in inputs])
    assert np.abs(unit(embed(embedder, inputs, piece)) - unit(alone)).max() < NOISE


def test_a_pass_that_is_given_up_leaves_nothing_to_the_next(runner: GgufRunner) -> None:
    embedder, (one, other) = embedder_of(runner), inputs_of(40, 30)
    before = embed(embedder, [other])
    assert embedder.begin([one, other]).advance(50) is None
    np.testing.assert_array_equal(embed(embedder, [other]), before)


@pytest.mark.parametrize("kind", ["llama", "window", "recurrent"])
def test_an_input_whose_numbers_are_none_leaves_nothing_behind(kind: str) -> None:
    made = poisoned_model.gguf_model(kind)
    runner = load(made, lambda share: None)
    assert isinstance(runner, GgufRunner)
    embedder = embedder_of(runner)
    before = embed(embedder, [[5, 6, 7]])
    assert not np.isfinite(embed(embedder, [[5, POISON, *range(5, 20)]])).any()
    np.testing.assert_array_equal(embed(embedder, [[5, 6, 7]]), before)
    assert embedder.begin([[5, POISON, *range(5, 60)]]).advance(10) is None
    np.testing.assert_array_equal(embed(embedder, [[5, 6, 7]]), before)
    far = [5, POISON, *range(5, 200)]  # of a window, the end may lie past what is no number
    embed(embedder, [far])
    np.testing.assert_array_equal(embed(embedder, [[5, 6, 7]]), before)
    runner.close()


def test_the_context_is_made_for_the_first_input_and_at_once_where_the_pooling_is_named(path: Path) -> None:
    for pooling, is_open in (("auto", False), ("last", True)):
        runner = open_model(path, pooling=pooling)
        assert ("PoolingContext" in repr(runner.embedder)) is is_open
        embed(embedder_of(runner), [[5]])
        assert "PoolingContext" in repr(runner.embedder)
        runner.close()


@pytest.mark.parametrize(("asked", "context", "longest"), [(0, 0, 96), (0, 32, 32), (10, 0, 10), (96, 0, 96)])
def test_the_card_says_how_it_embeds_and_how_long_an_input_may_be(
    path: Path, asked: int, context: int, longest: int
) -> None:
    runner = open_model(path, max_embed_tokens=asked, context_length=context)
    described = messages.CardEmbeddings(dimensions=64, pooling="last", max_input_tokens=longest)
    assert runner.config.embeddings == described
    assert {"generate", "embed"} <= set(runner.config.features)
    assert np.isfinite(embed(embedder_of(runner), inputs_of(longest))).all()
    runner.close()


def test_a_whole_context_of_more_than_2048_tokens_is_embedded_only_if_a_setting_says_so(tmp_path: Path) -> None:
    random_encoder.write(tmp_path / "long.gguf", SHAPE._replace(context=4_096))
    for asked, longest in ((0, 2_048), (4_096, 4_096)):
        runner = open_model(tmp_path / "long.gguf", max_embed_tokens=asked)
        assert (runner.config.context_length, embedder_of(runner).max_input_tokens) == (4_096, longest)
        runner.close()


def test_a_model_that_is_to_make_no_embeddings_offers_none(path: Path) -> None:
    runner = open_model(path, pooling="none")
    assert (runner.embedder, runner.config.embeddings) == (None, None)
    assert "embed" not in runner.config.features
    runner.close()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"pooling": "cls"}, "--pooling cls is not for a model that generates.*pass last, mean or none"),
        ({"pooling": "max"}, "--pooling must be one of auto, mean, cls, last, none, got max"),
        ({"max_embed_tokens": 97}, "--max-embed-tokens 97 is above the context of one sequence, 96"),
        ({"max_embed_tokens": -1}, "--max-embed-tokens must be 0 or more, got -1"),
    ],
)
def test_settings_that_can_not_be_met_are_refused(path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        open_model(path, **changes)
