"""A path that somebody names is refused if it is no file or folder, or leads out of a model's folder; and nobody waits
for it."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import graphs
from tokenbus import demo
from tokenbus.protocol.wire import errors, internal
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.onnx import graph
from tokenbus.worker.files import model_files, regular
from tokenbus.worker.files.model_config import ModelSizes, read_sizes
from tokenbus.worker.files.model_files import ModelFiles
from tokenbus.worker.models import registry
from tokenbus.worker.on_demand import model_sizes
from tokenbus.worker.on_demand.measuring import Measuring
from tokenbus.worker.settings.load_requests import engine_settings


def to_itself(path: Path) -> None:
    path.symlink_to(path.name)


UNREADABLE: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a link to itself": to_itself,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "nothing": lambda path: None,
}


def find(path: Path) -> ModelFiles:
    """Finds a model that a message names."""
    layouts = registry.layouts(registry.engine_of(str(path)))
    return registry.find_as(str(path), layouts, lambda _: None, follow_links=False)


@pytest.mark.parametrize("name", ["m.gguf", "m.onnx", "m.safetensors", "m"])
@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_is_no_file_is_refused_at_once_by_all_that_measure_or_load_it(
    tmp_path: Path, name: str, kind: str
) -> None:
    UNREADABLE[kind](tmp_path / name)
    with pytest.raises(ModelError):
        model_sizes.read_facts(EngineSettings(model=str(tmp_path / name)), lambda _: None)
    with pytest.raises(ModelError):
        graph.load(tmp_path / name)
    assert model_sizes.weight_bytes(EngineSettings(model=str(tmp_path / name))) == 0


@pytest.mark.parametrize("model", ["a" * 4_000, "a" * 4_000 + "/b", "a/" * 2_000, "/" + "b" * 300 + "/m.onnx", "a\0b"])
def test_a_name_that_no_file_can_have_is_refused(model: str) -> None:
    registry.engine_of(model)
    if not model_files.is_hub_name(model):
        with pytest.raises(ModelError):
            model_sizes.read_facts(EngineSettings(model=model), lambda _: None)


def test_a_link_to_itself_has_a_name_too(tmp_path: Path) -> None:
    to_itself(tmp_path / "folder")
    assert registry.served_name(str(tmp_path / "folder" / "model.onnx")) == "folder"


def test_a_graph_behind_a_link_is_named_after_the_folder_that_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "qwen-int4").mkdir()
    (tmp_path / "current").symlink_to("qwen-int4")
    assert registry.served_name(str(tmp_path / "current" / "model.onnx")) == "qwen-int4"


@pytest.mark.parametrize("sidecar", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_sidecar_that_is_a_link_out_of_the_folder_is_refused_if_a_message_names_the_model(
    tmp_path: Path, sidecar: str
) -> None:
    secret, folder = tmp_path / "secret", tmp_path / "model"
    secret.write_text(json.dumps({"key": "s3cret"}))
    folder.mkdir()
    (folder / "m.gguf").write_bytes(demo.MODEL_PATH.read_bytes())
    (folder / sidecar).symlink_to(secret)
    for named in (folder, folder / "m.gguf"):
        with pytest.raises(ModelError, match=f"{sidecar}: is a link out of the model's folder"):
            find(named)
        assert registry.find(str(named), lambda _: None).sidecars.keys() == {sidecar}, "an operator may name it"


@pytest.mark.parametrize("sidecar", ["../model/config.json", "..data/config.json"])
def test_a_sidecar_may_be_a_link_within_the_folder_as_in_a_volume_of_kubernetes(tmp_path: Path, sidecar: str) -> None:
    folder = tmp_path / "model"
    (folder / "..2026").mkdir(parents=True)
    (folder / "..data").symlink_to("..2026")
    (folder / "..2026" / "config.json").write_text("{}")
    (folder / "m.gguf").write_bytes(demo.MODEL_PATH.read_bytes())
    (folder / "config.json").symlink_to("..data/config.json")
    assert set(find(folder).sidecars) == {"config.json"}


def test_a_sidecar_may_be_where_the_weights_are_as_in_the_hubs_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "1").write_bytes(demo.MODEL_PATH.read_bytes())
    (blobs / "2").write_text("{}")
    for name, blob in (("m.gguf", "1"), ("config.json", "2")):
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    assert set(find(snapshot).sidecars) == {"config.json"}


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "pipe", "itself", ""])
def test_weights_beside_a_graph_that_are_elsewhere_or_no_file_are_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(1 << 16))
    os.mkfifo(folder / "pipe")
    to_itself(folder / "itself")
    path = graphs.keep_outside(folder / "m.onnx", "weights")
    model = graph.load(path)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=r"its weights are in .*, not beside it"):
        graph.load(path)


def test_weights_that_are_a_link_to_another_disk_are_named_if_a_message_names_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = graphs.keep_outside(folder / "m.onnx", "weights")
    (folder / "weights").rename(tmp_path / "elsewhere")
    (folder / "weights").symlink_to("../elsewhere")
    with pytest.raises(ModelError, match=r"model/weights: is a link out of the model's folder"):
        graph.load(path, follow_links=False)
    assert graph.resolve_external_data(graph.load(path), folder) == tmp_path


def test_only_a_model_that_a_message_names_may_have_no_links_out_of_its_folder() -> None:
    own = EngineSettings(model="own")
    asked = engine_settings(own, internal.Control(op="load", model="asked"))
    assert (own.follow_links, asked.follow_links) == (True, False)
    with pytest.raises(errors.RequestError, match="follow_links is not an engine setting"):
        engine_settings(own, internal.Control(op="load", model="asked", settings={"follow_links": True}))


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_configuration_that_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "config.json"
    UNREADABLE[kind](path)
    with pytest.raises(ModelError, match=r"config\.json: "):
        read_sizes(path, ModelSizes)
    with pytest.raises(ModelError, match=r"config\.json: "):
        model_files.hold_weights(path)


def test_a_configuration_of_the_length_of_a_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match="has more than 16 MiB"):
        read_sizes(path, ModelSizes)


async def test_where_no_thread_starts_no_place_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring, path = Measuring(), tmp_path / "m.gguf"

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        for _ in range(2 * regular.MAX_WAITING):
            with pytest.raises(ModelError, match="no thread can be started"):
                await regular.on_thread(path, lambda: 1, lambda _: None)
        for _ in range(40):
            with pytest.raises(ModelError, match="no thread can be started"):
                await measuring.facts(EngineSettings(model=str(path)))
    assert await regular.on_thread(path, lambda: 1, lambda _: None) == 1
    with pytest.raises(ModelError, match=path.name):
        await measuring.facts(EngineSettings(model=str(path)))
