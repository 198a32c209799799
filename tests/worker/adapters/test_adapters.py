"""The adapters of a replica: loaded by name, withdrawn, replaced, and given to a new engine; and a folder of them."""

import asyncio
import os
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

from tokenbus.protocol.wire import codec, errors, internal, messages
from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.protocol.wire.params import GenerationParams
from tokenbus.worker.adapters import adapters as module
from tokenbus.worker.adapters.adapters import AdapterFolder, Adapters
from tokenbus.worker.contract import contract
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.engine_client.engine_process import EngineDiedError
from tokenbus.worker.settings import adapter_settings
from tokenbus.worker.settings.adapter_settings import AdapterSettings


class Engine:
    """Loads every file that exists; the digest is its text."""

    def __init__(self) -> None:
        self.loaded: Counter[str] = Counter()
        self.is_dead = False

    async def load_adapter(self, path: str) -> str:
        if self.is_dead:
            raise errors.request_error(errors.Code.WORKER_LOST)
        text = text_of(path)
        if text == "bad":
            raise errors.request_error(errors.Code.INVALID_REQUEST, f"{path}: no adapter")
        self.loaded[text] += 1
        return text

    def unload_adapter(self, digest: str) -> None:
        self.loaded[digest] -= 1


def text_of(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else "bad"


def remove(path: str) -> None:
    Path(path).unlink()


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


def as_engine(engine: Engine) -> contract.Engine:
    return cast(contract.Engine, engine)


def file(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def run_of(*digests: str, tenant: str = "acme", lora: bool = True) -> internal.Run:
    asked = [messages.Lora(name=digest) for digest in digests] if lora else None
    return internal.Run(
        request_id=f"{tenant}:r", attempt=0, epoch="e", router_id="r", reply="_INBOX.a",
        encoding=codec.Encoding.JSON, token_ids=b"", params=GenerationParams(lora=asked),
        adapters=[internal.RunAdapter(digest=digest, scale=1.0) for digest in digests],
    )  # fmt: skip


async def opened(*wanted: AdapterSettings) -> tuple[Adapters, Engine, list[int]]:
    changes: list[int] = []
    adapters, engine = Adapters(lambda: changes.append(1)), Engine()
    adapters.want(wanted)
    await adapters.load_all(as_engine(engine))
    return adapters, engine, changes


async def test_a_name_that_is_loaded_again_stands_for_the_new_file(tmp_path: Path) -> None:
    adapters, engine, changes = await opened(AdapterSettings("a", file(tmp_path, "1", "one")))
    await adapters.load(AdapterSettings("a", file(tmp_path, "2", "two")))
    assert adapters.cards() == [messages.CardAdapter(name="a", digest="two")]
    assert (engine.loaded["one"], engine.loaded["two"], len(changes)) == (0, 1, 1)
    with pytest.raises(errors.RequestError):
        await adapters.load(AdapterSettings("a", file(tmp_path, "3", "bad")))
    assert adapters.cards() == [messages.CardAdapter(name="a", digest="two")]
    await adapters.unload("a")
    assert (adapters.cards(), engine.loaded["two"]) == ([], 0)


async def test_a_run_gets_adapters_of_its_tenant_only(tmp_path: Path) -> None:
    one, two = file(tmp_path, "1", "one"), file(tmp_path, "2", "two")
    adapters, _, _ = await opened(AdapterSettings("a", one), AdapterSettings("b", two, ("acme",)))
    assert adapters.of_run(run_of("one", "two")) == (Adapter("one", 1.0), Adapter("two", 1.0))
    assert adapters.of_run(run_of(tenant="globex")) == ()
    for digests in (["two"], ["three"], ["one", "two"]):
        with pytest.raises(errors.RequestError) as refusal:
            adapters.of_run(run_of(*digests, tenant="globex"))
        assert refusal.value.error.code is errors.Code.NO_WORKER


@pytest.mark.parametrize("digests", [["two", "one"], ["one", "one"]])
async def test_a_run_whose_adapters_are_not_in_their_form_is_refused(tmp_path: Path, digests: list[str]) -> None:
    one, two = file(tmp_path, "1", "one"), file(tmp_path, "2", "two")
    adapters, _, _ = await opened(AdapterSettings("a", one), AdapterSettings("b", two))
    with pytest.raises(errors.RequestError) as refusal:
        adapters.of_run(run_of(*digests))
    assert refusal.value.error.param == "adapters"


async def test_a_run_never_goes_without_the_adapters_that_it_names(tmp_path: Path) -> None:
    adapters, _, _ = await opened(AdapterSettings("a", file(tmp_path, "1", "one")))
    with pytest.raises(errors.RequestError):
        adapters.of_run(codec.replace(run_of("one"), adapters=[]))
    with pytest.raises(errors.RequestError):
        adapters.of_run(run_of("one", lora=False))


async def test_the_first_engine_must_have_every_adapter_and_later_ones_what_is_left(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"--lora a: .*No such file"):
        await opened(AdapterSettings("a", "/no/such/file"))
    one, two = file(tmp_path, "1", "one"), file(tmp_path, "2", "two")
    adapters, _, _ = await opened(AdapterSettings("a", one), AdapterSettings("b", two))
    remove(one)
    second = Engine()
    second.is_dead = True
    with pytest.raises(EngineDiedError):
        await adapters.load_all(as_engine(second))
    third = Engine()
    await adapters.load_all(as_engine(third))
    assert adapters.cards() == [messages.CardAdapter(name="b", digest="two")]
    assert third.loaded == {"two": 1}


async def test_an_engine_that_dies_while_it_loads_the_first_adapters_leaves_nothing_open_and_is_not_the_first(
    tmp_path: Path,
) -> None:
    """It may die again and again, as when memory is short."""
    adapters, engine = Adapters(), Engine()
    folders = [str(make_folder(tmp_path / name)) for name in ("a", "b")]
    adapters.want([AdapterSettings("a", folders[0]), AdapterSettings("b", folders[1])])

    async def load(path: str) -> str:
        if path == folders[1]:
            raise errors.request_error(errors.Code.WORKER_LOST)
        return path

    engine.load_adapter = load  # type: ignore[method-assign]
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(EngineDiedError):
            await adapters.load_all(as_engine(engine))
    assert len(os.listdir("/proc/self/fd")) == num_open
    for folder in folders:
        os.rmdir(folder)
    with pytest.raises(ModelError):
        await adapters.load_all(as_engine(Engine()))


async def test_what_streams_use_is_lent_to_the_next_engine_though_it_is_unloaded_and_its_file_deleted(
    tmp_path: Path,
) -> None:
    path = file(tmp_path, "1", "GGUF one")
    adapters, _, _ = await opened(AdapterSettings("a", path))
    adapters.in_use = lambda: {"GGUF one"}
    await adapters.unload("a")
    remove(path)
    for engine in (Engine(), Engine()):
        await adapters.load_all(as_engine(engine))
        assert (engine.loaded["GGUF one"], adapters.cards()) == (1, []), "until it has the streams"
        assert adapters.has_all(run_of("GGUF one"))
        with pytest.raises(errors.RequestError):
            adapters.of_run(run_of("GGUF one"))
        await asyncio.sleep(0)
        assert engine.loaded["GGUF one"] == 0
    adapters.in_use = set
    last = Engine()
    await adapters.load_all(as_engine(last))
    assert (last.loaded.total(), adapters.has_all(run_of("GGUF one"))) == (0, False)
    adapters.close()


@pytest.mark.parametrize("text", ["GGUF two", "bad"])
async def test_what_was_written_over_is_not_lent(tmp_path: Path, text: str) -> None:
    path = file(tmp_path, "1", "GGUF one")
    adapters, _, _ = await opened(AdapterSettings("a", path))
    adapters.in_use = lambda: {"GGUF one"}
    await adapters.unload("a")
    file(tmp_path, "1", text)
    engine = Engine()
    await adapters.load_all(as_engine(engine))
    assert not adapters.has_all(run_of("GGUF one"))
    assert engine.loaded.total() == 0
    adapters.close()


async def test_what_a_later_engine_can_not_load_again_is_lent_to_it_if_it_can_still_be_read(tmp_path: Path) -> None:
    path = file(tmp_path, "1", "GGUF one")
    adapters, _, _ = await opened(AdapterSettings("a", path))
    adapters.in_use = lambda: {"GGUF one"}
    remove(path)
    await adapters.load_all(as_engine(Engine()))
    assert (adapters.cards(), adapters.has_all(run_of("GGUF one"))) == ([], True)
    adapters.close()


async def test_a_file_of_a_folder_is_loaded_once_two_looks_find_it_the_same(tmp_path: Path) -> None:
    adapters, engine, _ = await opened()
    folder = AdapterFolder(tmp_path, ("acme",), adapters)
    path = file(tmp_path, "a.gguf", "one")
    await folder.look()
    assert not adapters.cards()
    os.utime(path, ns=(1, 1))  # it is still being written
    await folder.look()
    assert not adapters.cards()
    await folder.look()
    assert adapters.cards() == [messages.CardAdapter(name="a", digest="one", tenants=["acme"])]
    await folder.look()
    assert engine.loaded == {"one": 1}
    file(tmp_path, "a.gguf", "another")
    await folder.look()
    await folder.look()
    assert adapters.cards()[0].digest == "another"
    file(tmp_path, "a.gguf", "bad")
    for _ in range(3):
        await folder.look()
    assert adapters.cards()[0].digest == "another"  # until there is a better one
    remove(path)
    await folder.look()
    assert not adapters.cards()


async def test_a_folder_of_peft_is_loaded_as_a_whole(tmp_path: Path) -> None:
    adapters, engine, _ = await opened()
    paths: list[str] = []

    async def load_folder(path: str) -> str:
        paths.append(path)
        return "one"

    engine.load_adapter = load_folder  # type: ignore[method-assign]
    folder = AdapterFolder(tmp_path, None, adapters)
    weights = file(make_folder(tmp_path / "style"), "adapter_model.safetensors", "one")
    file(make_folder(tmp_path / "other"), "model.safetensors", "two")
    for _ in range(3):
        await folder.look()
    assert adapters.cards() == [messages.CardAdapter(name="style", digest="one")]
    assert paths == [str(tmp_path / "style")]
    os.utime(weights, ns=(1, 1))
    for _ in range(3):
        await folder.look()
    assert len(paths) == 2
    remove(weights)
    await folder.look()
    assert not adapters.cards()


async def test_a_folder_does_not_take_a_name_that_an_operator_has_given(tmp_path: Path) -> None:
    folder_path = make_folder(tmp_path / "folder")
    adapters, _, _ = await opened(AdapterSettings("a", file(tmp_path, "1", "one")))
    folder = AdapterFolder(folder_path, None, adapters)
    path = file(folder_path, "a.gguf", "two")
    for _ in range(3):
        await folder.look()
    remove(path)
    await folder.look()
    assert adapters.cards() == [messages.CardAdapter(name="a", digest="one")]


async def test_what_an_operator_loads_in_place_of_a_folder_s_adapter_outlives_the_file(tmp_path: Path) -> None:
    folder_path = make_folder(tmp_path / "folder")
    adapters, _, _ = await opened()
    folder = AdapterFolder(folder_path, None, adapters)
    path = file(folder_path, "a.gguf", "one")
    for _ in range(2):
        await folder.look()
    await adapters.load(AdapterSettings("a", file(tmp_path, "2", "two")))
    file(folder_path, "a.gguf", "one again")
    for _ in range(2):
        await folder.look()
    assert adapters.cards() == [messages.CardAdapter(name="a", digest="two")]
    remove(path)
    await folder.look()
    assert adapters.cards() == [messages.CardAdapter(name="a", digest="two")]


async def test_a_pipe_is_no_adapter_and_holds_nothing_up(tmp_path: Path) -> None:
    adapters, _engine, _ = await opened()
    os.mkfifo(tmp_path / "pipe")
    control = internal.Control(op="load_adapter", adapter="p", path=str(tmp_path / "pipe"))
    reply = await adapters.carry_out(control)
    assert reply.error is not None
    assert reply.error.code is errors.Code.INVALID_REQUEST
    assert reply.error.param == "adapter"
    await adapters.load(AdapterSettings("a", str(file(tmp_path, "a.gguf", "one"))))
    assert [card.name for card in adapters.cards()] == ["a"]


async def test_an_operator_may_unload_a_folder_s_adapter_while_the_folder_does(tmp_path: Path) -> None:
    adapters, engine, _ = await opened()
    folder = AdapterFolder(tmp_path, None, adapters)
    path = file(tmp_path, "a.gguf", "one")
    for _ in range(2):
        await folder.look()
    remove(path)
    (tmp_path / "elsewhere").mkdir()
    other = str(file(tmp_path / "elsewhere", "b.gguf", "two"))
    loading, may_load = asyncio.Event(), asyncio.Event()

    async def load_adapter(path: str) -> str:
        loading.set()
        await may_load.wait()
        return "two"

    engine.load_adapter = load_adapter  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as group:
        group.create_task(adapters.load(AdapterSettings("b", other)))  # both wait for it
        await loading.wait()
        group.create_task(adapters.unload("a"))
        looking = group.create_task(folder.look())
        await asyncio.wait([looking], timeout=0.2)
        may_load.set()
    assert adapters.cards() == [messages.CardAdapter(name="b", digest="two")]
    assert engine.loaded["one"] == 0


async def test_whatever_fails_in_a_folder_it_is_looked_through_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters, _, _ = await opened()
    file(tmp_path, "a.gguf", "one")
    folder, stamps = AdapterFolder(tmp_path, None, adapters), module._stamps
    looks: list[Path] = []

    def sometimes(path: Path) -> dict[str, module.Stamp]:
        looks.append(path)
        if len(looks) == 1:
            raise KeyError("a bug")
        return stamps(path)

    monkeypatch.setattr(module, "_stamps", sometimes)
    monkeypatch.setattr(module, "_INTERVAL_S", 0.0)
    running = asyncio.create_task(folder.run())
    async with asyncio.timeout(10):
        while not adapters.cards():
            await asyncio.sleep(0.01)
    running.cancel()


async def test_a_folder_that_is_not_there_is_like_an_empty_one(tmp_path: Path) -> None:
    adapters, _, _ = await opened()
    await AdapterFolder(tmp_path / "none", None, adapters).look()
    assert not adapters.cards()


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("a=b.gguf", AdapterSettings("a", "b.gguf")),
        ("a=b.gguf@acme, globex", AdapterSettings("a", "b.gguf", ("acme", "globex"))),
        ("a=/x@1/b.gguf", AdapterSettings("a", "/x@1/b.gguf")),
        ("a=/x=1/b.gguf@t", AdapterSettings("a", "/x=1/b.gguf", ("t",))),
    ],
)
def test_settings_name_a_file_and_perhaps_tenants(text: str, settings: AdapterSettings) -> None:
    assert adapter_settings.parse(text) == settings
    assert adapter_settings.parse(str(settings)) == settings


@pytest.mark.parametrize("text", ["", "a", "a=", "=b", "a:b=c", "a=b@", "a=b@x,", "a" * 129 + "=b", "a=@t"])
def test_other_settings_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"name|must be"):
        adapter_settings.parse(text)


async def test_an_operator_is_told_what_is_wrong(tmp_path: Path) -> None:
    adapters, _, _ = await opened()
    commands: list[tuple[dict[str, Any], errors.Code]] = [
        ({"op": "load_adapter", "adapter": "a:b", "path": "x"}, errors.Code.INVALID_REQUEST),
        ({"op": "load_adapter", "adapter": "a"}, errors.Code.INVALID_REQUEST),
        ({"op": "load_adapter", "adapter": "a", "path": "/no/such/file"}, errors.Code.INVALID_REQUEST),
        ({"op": "unload_adapter", "adapter": "a"}, errors.Code.MODEL_NOT_FOUND),
    ]
    for fields, code in commands:
        reply = await adapters.carry_out(internal.Control(**fields))
        assert reply.error is not None
        assert (reply.ok, reply.error.code) == (False, code)
    done = internal.Control(op="load_adapter", adapter="a", path=file(tmp_path, "1", "one"), tenants=["acme"])
    assert (await adapters.carry_out(done)).ok
    assert adapters.cards() == [messages.CardAdapter(name="a", digest="one", tenants=["acme"])]
