"""A header of safetensors is checked against itself and its file, whatever it says."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import safetensors_model
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.convert import safetensors

TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([1, 2], np.uint16)}


def changed(**fields: Any) -> dict[str, Any]:
    header = safetensors_model.header_of(TENSORS)
    header["b"] |= fields
    return header


def test_tensors_are_read_with_their_values(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors_model.write(path, TENSORS, {"__metadata__": {"format": "pt"}} | safetensors_model.header_of(TENSORS))
    found = safetensors.read([path])
    assert {name: tensor.shape for name, tensor in found.items()} == {"a": (2, 3), "b": (2,)}
    assert found["a"].rows().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["b"].rows().tolist() == [[1], [2]]


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (changed(shape=[3]), "needs 6 bytes, not 4"),
        (changed(shape=[-2]), "has the shape"),
        (changed(shape=[0]), "has the shape"),
        (changed(shape=[1 << 62, 1 << 62]), "needs"),
        (changed(dtype="F32"), "needs 8 bytes, not 4"),
        (changed(dtype="F8_E4M3"), "is of type F8_E4M3; only F32, F16, BF16 can be converted here"),
        (changed(data_offsets=[24, 30]), "is said to lie at"),
        (changed(data_offsets=[20, 24]), "is said to lie at"),
        (changed(data_offsets=[28, 24]), "is said to lie at"),
        (changed(data_offsets=[-4, 0]), "is said to lie at"),
        (changed(data_offsets=[24]), "its header can't be read"),
        (changed(shape="2"), "its header can't be read"),
        ({"a": safetensors_model.header_of(TENSORS)["a"]}, "its tensors end at 24, its bytes at 28"),
        ([], "its header can't be read"),
        ({"a": 7}, "its header can't be read"),
    ],
)
def test_a_header_that_lies_is_named(tmp_path: Path, header: Any, problem: str) -> None:
    path = tmp_path / "model.safetensors"
    safetensors_model.write(path, TENSORS, header)
    with pytest.raises(ModelError, match=problem) as raised:
        safetensors.read([path])
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x08", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 200_000_000), struct.pack("<Q", 2) + b"{x"],
)
def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="is corrupt or cut short"):
        safetensors.read([path])


@pytest.mark.parametrize("end", [-1, -5, 40])
def test_a_file_that_is_cut_short_is_named(tmp_path: Path, end: int) -> None:
    path = tmp_path / "model.safetensors"
    safetensors_model.write(path, TENSORS)
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(ModelError, match="is corrupt or cut short"):
        safetensors.read([path])


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    for path in paths:
        safetensors_model.write(path, TENSORS)
    with pytest.raises(ModelError, match=r"a is in one\.safetensors too"):
        safetensors.read(paths)


def test_a_header_of_any_nesting_ends_in_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    text = b"[" * 100_000
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(ModelError, match="its header can't be read"):
        safetensors.read([path])


def test_a_header_longer_than_any_model_has_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", (32 << 20) + 1))
        file.truncate(1 << 30)
    with pytest.raises(ModelError, match="does not fit in the 32 MiB that one may have"):
        safetensors.read([path])


def test_the_positions_of_older_encoders_are_left_out(tmp_path: Path) -> None:
    path, counted = tmp_path / "model.safetensors", np.arange(3)
    header = safetensors_model.header_of(TENSORS)
    header["bert.embeddings.position_ids"] = {"dtype": "I64", "shape": [1, 3], "data_offsets": [28, 52]}
    safetensors_model.write(path, TENSORS | {"bert.embeddings.position_ids": counted}, header)
    assert set(safetensors.read([path])) == set(TENSORS)
