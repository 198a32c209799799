"""The recommendations of a model's own files are read, clamped to what requests may ask for, and broken files named."""

import json
from pathlib import Path

import pytest

from tokenbus.protocol.wire.params import SamplingParams, ranges_of
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files import model_config
from tokenbus.worker.files.model_config import GenerationConfig


def read_config(tmp_path: Path, in_weights: dict[str, float] | None = None, **contents: object) -> GenerationConfig:
    sidecars = {}
    for name, content in contents.items():
        path = tmp_path / f"{name}.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        sidecars[path.name] = path
    return model_config.read_generation_config(sidecars, in_weights or {})


def test_without_files_nothing_is_recommended(tmp_path: Path) -> None:
    assert read_config(tmp_path) == GenerationConfig()


def test_the_generation_config_gives_defaults_and_end_tokens(tmp_path: Path) -> None:
    generation = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "repetition_penalty": 1.1,
        "max_new_tokens": 512,
        "eos_token_id": [7, 8],
        "do_sample": True,
        "transformers_version": "4",
    }
    one = read_config(tmp_path, generation_config=generation, config={"eos_token_id": 9, "hidden_size": 64})
    assert one.defaults == SamplingParams(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1, max_tokens=512)
    assert one.end_token_ids == {7, 8, 9}


@pytest.mark.parametrize(
    ("given", "ids"), [(5, {5}), ([5], {5}), ([], set()), (None, set()), (-1, set()), ([3, -1], {3})]
)
def test_end_tokens_may_be_a_number_or_a_list(tmp_path: Path, given: object, ids: set[int]) -> None:
    assert read_config(tmp_path, config={"eos_token_id": given}).end_token_ids == ids


@pytest.mark.parametrize("name", ["eos_token_id", "eos_token_ids"])
@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_end_tokens_may_have_either_name_in_either_file(tmp_path: Path, name: str, file: str) -> None:
    assert read_config(tmp_path, **{file: {name: [3, 4]}}).end_token_ids == {3, 4}  # type: ignore[arg-type]


def test_a_token_with_which_texts_begin_ends_a_completion_unless_it_is_an_ordinary_one(tmp_path: Path) -> None:
    one = read_config(tmp_path, generation_config={"bos_token_id": 1, "eos_token_id": 2})
    assert model_config.end_token_ids(one, [1, 2, 3]) == {1, 2}
    assert model_config.end_token_ids(one, [2, 3]) == {2}


@pytest.mark.parametrize(
    ("given", "longest"),
    [({"max_length": 300}, 300), ({"max_length": 300, "max_new_tokens": 20}, 20), ({"max_length": 0}, None)],
)
def test_the_length_of_all_is_a_limit_where_there_is_none_for_completions(
    tmp_path: Path, given: dict[str, int], longest: int | None
) -> None:
    assert read_config(tmp_path, generation_config=given).defaults == (
        SamplingParams() if longest is None else SamplingParams(max_tokens=longest)
    )


def test_the_files_come_before_what_the_weights_say(tmp_path: Path) -> None:
    in_weights = {"temperature": 0.2, "top_k": 64, "min_p": 0.05}
    one = read_config(tmp_path, in_weights, generation_config={"temperature": 0.9})
    assert (one.defaults.temperature, one.defaults.top_k, one.defaults.min_p) == (0.9, 64, 0.05)


def test_values_outside_the_wires_ranges_become_the_nearest_inside(tmp_path: Path) -> None:
    one = read_config(
        tmp_path, generation_config={"top_k": -1, "top_p": 0.0, "temperature": 200.0, "max_new_tokens": -5}
    )
    assert (one.defaults.top_k, one.defaults.temperature, one.defaults.max_tokens) == (0, 100.0, 1)
    assert 0 < one.defaults.top_p < 0.001


NO_LIMITS = [2**31, 2**32 - 1, 2**63 - 1, int(1e30), 1e30]


@pytest.mark.parametrize("name", ["max_new_tokens", "max_length", "top_k"])
@pytest.mark.parametrize("given", NO_LIMITS)
def test_a_limit_that_means_none_is_the_widest(tmp_path: Path, name: str, given: float) -> None:
    defaults = read_config(tmp_path, generation_config={name: given}).defaults
    field = "top_k" if name == "top_k" else "max_tokens"
    assert getattr(defaults, field) == ranges_of(SamplingParams)[field].high


def test_metadata_may_call_the_context_by_another_name(tmp_path: Path) -> None:
    assert read_config(tmp_path, metadata={"llm": {"max_seq_len": 512}}).context_length == 512


@pytest.mark.parametrize("wrap", [False, True])
def test_metadata_recommends_sizes_for_the_engine(tmp_path: Path, wrap: bool) -> None:
    llm = {
        "max_sequence_length": 1_024,
        "scheduler": {"max_num_seqs": 5, "max_paddings": 9},
        "kv_cache": {"block_size": 32, "total_blocks": 100},
    }
    assert read_config(tmp_path, metadata={"metadata": {"llm": llm}} if wrap else {"llm": llm}) == GenerationConfig(
        context_length=1_024, max_num_seqs=5, max_paddings=9, kv_block_size=32, total_kv_blocks=100
    )


@pytest.mark.parametrize("content", ["{", '{"top_k": "many"}', "[" * 5_000, '{"eos_token_id": {}}'])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json: .*; correct or remove it"):
        read_config(tmp_path, generation_config=content)


@pytest.mark.parametrize(
    "ids", [10**20, [10**20], -(10**20), list(range(1_000_000))], ids=["huge", "huge in a list", "low", "a million"]
)
@pytest.mark.parametrize("name", ["eos_token_id", "eos_token_ids", "bos_token_id"])
def test_ids_that_no_token_has_and_more_than_any_model_ends_with_are_refused(
    tmp_path: Path, name: str, ids: object
) -> None:
    with pytest.raises(ModelError, match=rf"generation_config\.json: Expected .* at `\$\.{name}"):
        read_config(tmp_path, generation_config={name: ids})


@pytest.mark.parametrize("field", ["max_sequence_length", "max_seq_len"])
def test_a_size_that_no_model_has_is_refused(tmp_path: Path, field: str) -> None:
    with pytest.raises(ModelError, match=r"metadata\.json: Expected `int` <= 2147483647"):
        read_config(tmp_path, metadata={"llm": {field: 10**20}})


def test_a_default_that_is_no_number_is_none(tmp_path: Path) -> None:
    weights = {"temperature": float("nan"), "top_k": float("nan"), "top_p": float("inf"), "min_p": 0.25}
    assert read_config(tmp_path, weights).defaults == SamplingParams(top_p=1.0, min_p=0.25)
