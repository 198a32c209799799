"""LoRA adapters from end to end: by name in requests and in models' names, for some tenants or all, while they come,
go and are replaced."""

import asyncio
import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from tests.gateway.test_calls import post
from tests.support import adapters
from tests.support.exact_client import until_ready
from tests.support.raw_client import PREFIX, RawClient, check_stream
from tests.support.system import System, command, running_gateway
from tokenbus import demo

PROMPT = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
SAID = [{"role": "user", "content": "hi"}]
Request = dict[str, Any]


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    system = await System.start(tmp_path)
    yield system
    await system.stop()


def with_lora(*names: str, **fields: object) -> Request:
    return PROMPT | {"lora": [{"name": name} for name in names]} | fields


async def text(bare: RawClient, request: Request, tenant: str = "acme", model: str = "demo") -> str:
    answer = await bare.ask(request, subject=f"{PREFIX}.generate.{model}.{tenant}")
    assert answer.terminals[0]["finish_reason"] == "length", answer.terminals
    return answer.text


async def refusal(bare: RawClient, request: Request, tenant: str = "acme", model: str = "demo") -> tuple[str, str]:
    answer = await bare.ask(request, subject=f"{PREFIX}.generate.{model}.{tenant}")
    error = answer.terminals[0]["error"]
    return error["code"], error.get("param", "")


async def wire_check(*flags: str) -> str:
    done = await asyncio.to_thread(
        subprocess.run, command("wire-check", *flags), capture_output=True, text=True, check=False
    )
    return str(done.stdout)


async def engine_pid(bare: RawClient) -> int:
    reply = msgspec.json.decode((await bare.nats.request(f"{PREFIX}.models", b"", timeout=5)).data)
    return int(reply["models"][0]["workers"][0]["pids"]["engine"])


async def until_listed(bare: RawClient, *names: str) -> dict[str, Any]:
    """Waits until the default tenant may use exactly these adapters; returns the digests by name."""
    async with asyncio.timeout(30):
        while True:
            reply = msgspec.json.decode((await bare.nats.request(f"{PREFIX}.models", b"", timeout=5)).data)
            served = reply["models"][0]
            if sorted(served["adapters"]) == sorted(names):
                return {one["name"]: one["digest"] for card in served["workers"] for one in card.get("adapters", [])}
            await asyncio.sleep(0.1)


async def test_requests_name_adapters_and_tenants_see_their_own(system: System, tmp_path: Path) -> None:
    one, other = (adapters.write(tmp_path / f"{seed}.gguf", seed) for seed in (1, 2))
    system.router("router")
    system.worker("worker", "--lora", f"style={one}", "--lora", f"secret={other}@acme,globex")
    bare = await system.connect()
    await until_ready(bare, 1)
    base = await text(bare, PROMPT)
    style, secret = await text(bare, with_lora("style")), await text(bare, with_lora("secret"))
    assert len({base, style, secret}) == 3
    # the same as a model's name
    assert await text(bare, PROMPT, model="demo=3Astyle") == style
    assert await text(bare, PROMPT, model="demo=3Asecret") == secret
    assert await text(bare, PROMPT | {"lora": [{"name": "style", "scale": 0}]}) == base
    # four at once, each with its own
    answers = await asyncio.gather(
        *(text(bare, one) for one in (PROMPT, with_lora("style"), with_lora("secret"), PROMPT))
    )
    assert answers == [base, style, secret, base]
    # for other tenants a hidden adapter is like one that does not exist
    hidden = await refusal(bare, with_lora("secret"), "initech")
    assert hidden == await refusal(bare, with_lora("nothing"), "initech") == ("model_not_found", "lora[0].name")
    assert (await refusal(bare, PROMPT, "initech", "demo=3Asecret"))[0] == "no_worker"  # this router is too young
    assert await text(bare, with_lora("style"), "initech") == style
    assert set(await until_listed(bare, "style")) == {"style"}
    for rule in ("lora uses", "The models reply has"):
        flags = ("--nats", system.url, "--model", "demo", "--tenant", "acme", "--only", rule)
        assert "1 rules hold, 0 broken, 0 skipped" in await wire_check(*flags)
    assert await refusal(bare, with_lora("style", "style")) == ("invalid_request", "lora[1].name")
    assert await refusal(bare, PROMPT | {"lora": [{"name": "style", "scale": 5}]}) == (
        "invalid_request",
        "lora[0].scale",
    )
    too_many = with_lora(*(f"a{number}" for number in range(5)))
    assert await refusal(bare, too_many) == ("invalid_request", "lora")


async def test_openai_s_client_sees_and_uses_the_adapters_of_its_tenant(system: System, tmp_path: Path) -> None:
    one, other = (adapters.write(tmp_path / f"{seed}.gguf", seed) for seed in (1, 2))
    system.router("router")
    system.worker("worker", "--lora", f"style={one}", "--lora", f"secret={other}@acme")
    bare = await system.connect()
    await until_ready(bare, 1)
    expected = await text(bare, with_lora("secret"))
    with running_gateway(system.url, tmp_path, "--api-key", "key-a=acme", "--api-key", "key-b=globex") as gateway:
        async with (
            openai.AsyncOpenAI(base_url=gateway.url, api_key="key-a", max_retries=0) as acme,
            openai.AsyncOpenAI(base_url=gateway.url, api_key="key-b", max_retries=0) as globex,
        ):
            listed = [model async for model in acme.models.list()]
            assert [model.id for model in listed] == ["demo", "demo:secret", "demo:style"]
            assert [model.model_dump()["parent"] for model in listed] == [None, "demo", "demo"]
            assert [model.id async for model in globex.models.list()] == ["demo", "demo:style"]
            asked: dict[str, Any] = {
                "prompt": PROMPT["prompt"], "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True},
            }  # fmt: skip
            answer = await acme.completions.create(model="demo:secret", **asked)
            assert (answer.choices[0].text, answer.model) == (expected, "demo:secret")
            with pytest.raises(openai.APIStatusError) as refused:
                await globex.completions.create(model="demo:secret", **asked)
            with pytest.raises(openai.APIStatusError) as unknown:
                await globex.completions.create(model="demo:nothing", **asked)
            with pytest.raises(openai.BadRequestError, match="adapters are for generating: ask demo without secret"):
                await acme.embeddings.create(model="demo:secret", input="the fox")
            with pytest.raises(openai.APIStatusError, match="nothing serves"):
                await globex.embeddings.create(model="demo:secret", input="the fox")
            assert len((await acme.embeddings.create(model="demo", input="the fox")).data[0].embedding) == 128
            assert refused.value.status_code == unknown.value.status_code
            with pytest.raises(openai.APIStatusError):
                await globex.models.retrieve("demo:secret")
            named = await acme.completions.create(
                model="demo:secret", prompt="the fox", max_tokens=1, extra_body={"return_token_ids": True}
            )
            assert len(named.choices[0].model_dump()["prompt_token_ids"]) == (named.usage and named.usage.prompt_tokens)
            kept = await acme.responses.create(model="demo:secret", input="the fox", max_output_tokens=1)
            for call in (globex.responses.retrieve, globex.responses.input_items.list, globex.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    await call(kept.id)
            reference: Any = {"type": "item_reference", "id": kept.output[0].id}
            for stolen in ({"previous_response_id": kept.id}, {"input": [reference]}):
                with pytest.raises(openai.BadRequestError):
                    await globex.responses.create(**{"model": "demo", "input": "go", "max_output_tokens": 1} | stolen)
            assert (await acme.responses.retrieve(kept.id)).id == kept.id
        check_ollamas_calls(gateway.url)


def check_ollamas_calls(url: str) -> None:
    """An adapter of another tenant is like one that does not exist."""

    def ask(path: str, body: dict[str, Any], key: str = "key-b") -> tuple[int, dict[str, Any]]:
        return post(url, path, body, Authorization=f"Bearer {key}")

    for path in ("/api/tags", "/api/ps"):
        asked = urllib.request.Request(url.removesuffix("/v1") + path, headers={"Authorization": "Bearer key-b"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert [one["name"] for one in json.load(answer)["models"]] == ["demo", "demo:style"]
    for path, body in (
        ("/api/show", {}),
        ("/api/chat", {"messages": SAID, "stream": False}),
        ("/api/pull", {"stream": False}),
    ):
        hidden, unknown = (ask(path, body | {"model": f"demo:{name}"}) for name in ("secret", "nothing"))
        assert hidden[0] == unknown[0]
        assert hidden[0] >= 400
        assert hidden[1]["error"].replace("secret", "nothing") == unknown[1]["error"]
        assert ask(path, body | {"model": "demo:secret"}, "key-a")[0] == 200, path


async def test_operators_load_and_unload_adapters_while_requests_run(system: System, tmp_path: Path) -> None:
    one, wrong = adapters.write(tmp_path / "1.gguf", 1), adapters.write(tmp_path / "2.gguf", architecture="gemma")
    system.router("router")
    system.worker("worker")
    bare = await system.connect()
    await until_ready(bare, 1)
    base = await text(bare, PROMPT)

    async def control(**fields: object) -> dict[str, Any]:
        subject = f"{PREFIX}.worker.demo.worker.control"
        reply = await bare.nats.request(subject, msgspec.msgpack.encode(fields), timeout=20)
        return msgspec.msgpack.decode(reply.data)  # type: ignore[no-any-return]

    running = await bare.generate(PROMPT | {"max_tokens": 300}, subject=f"{PREFIX}.generate.demo.acme")
    refused = await control(op="load_adapter", adapter="style", path=str(wrong))
    assert refused["error"]["code"] == "invalid_request"
    assert "for the architecture 'gemma', and the model is a 'llama'" in refused["error"]["message"]
    assert (await control(op="load_adapter", adapter="a:b", path=str(one)))["error"]["code"] == "invalid_request"
    assert (await control(op="load_adapter", adapter="style", path=str(one)))["ok"]
    await until_listed(bare, "style")
    style = await text(bare, with_lora("style"))
    assert style != base
    long = await bare.generate(with_lora("style", max_tokens=300), subject=f"{PREFIX}.generate.demo.acme")
    await long.until(2)
    assert (await control(op="unload_adapter", adapter="style"))["ok"]
    assert (await control(op="unload_adapter", adapter="style"))["error"]["code"] == "model_not_found"
    await until_listed(bare)
    assert await refusal(bare, with_lora("style")) == ("model_not_found", "lora[0].name")
    assert (await long.terminal())["finish_reason"] == "length"
    assert long.text.startswith(style)
    assert (await running.terminal())["finish_reason"] == "length"


async def test_a_watched_folder_s_files_are_loaded_replaced_and_unloaded(system: System, tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    folder.mkdir()
    system.router("router")
    system.worker("worker", "--lora-dir", str(folder))
    bare = await system.connect()
    await until_ready(bare, 1)
    base = await text(bare, PROMPT)
    adapters.write(folder / "wrong.gguf", architecture="gemma")
    adapters.write(folder / "style.gguf", 1)
    first = (await until_listed(bare, "style"))["style"]
    style = await text(bare, with_lora("style"))
    adapters.write(folder / "style.gguf", 2)
    async with asyncio.timeout(30):
        while (await until_listed(bare, "style"))["style"] == first:
            await asyncio.sleep(0.1)
    assert len({base, style, await text(bare, with_lora("style"))}) == 3
    (folder / "style.gguf").unlink()
    await until_listed(bare)
    assert await refusal(bare, with_lora("style")) == ("model_not_found", "lora[0].name")
    assert [line["adapter"] for line in system.log("worker") if line["event"] == "adapter_failed"] == ["wrong"]


async def test_an_engine_that_is_started_anew_has_the_adapters_again(system: System, tmp_path: Path) -> None:
    one = adapters.write(tmp_path / "1.gguf", 1)
    system.router("router")
    system.worker("worker", "--lora", f"style={one}")
    bare = await system.connect()
    await until_ready(bare, 1)
    whole = await text(bare, with_lora("style", max_tokens=200))
    stream = await bare.generate(with_lora("style", max_tokens=200), subject=f"{PREFIX}.generate.demo.acme")
    await stream.until(3)
    os.kill(await engine_pid(bare), signal.SIGKILL)
    assert (await stream.terminal())["finish_reason"] == "length"
    assert stream.text == whole


async def unload(bare: RawClient, worker: str) -> None:
    message = msgspec.msgpack.encode({"op": "unload_adapter", "adapter": "style"})
    await bare.nats.request(f"{PREFIX}.worker.demo.{worker}.control", message, timeout=20)


async def test_a_stream_outlives_its_engine_though_its_adapter_was_unloaded_and_deleted(
    system: System, tmp_path: Path
) -> None:
    one = adapters.write(tmp_path / "1.gguf", 1)
    system.router("router")
    system.worker("worker", "--lora", f"style={one}")
    bare = await system.connect()
    await until_ready(bare, 1)
    whole = await text(bare, with_lora("style", max_tokens=400))
    stream = await bare.generate(with_lora("style", max_tokens=400), subject=f"{PREFIX}.generate.demo.acme")
    await stream.until(3)
    await unload(bare, "worker")
    os.unlink(one)
    os.kill(await engine_pid(bare), signal.SIGKILL)
    assert (await stream.terminal())["finish_reason"] == "length"
    assert stream.text == whole


async def test_a_stream_whose_adapter_is_lost_with_its_engine_continues_where_another_worker_has_it(
    system: System, tmp_path: Path
) -> None:
    files = {name: adapters.write(tmp_path / f"{name}.gguf", 1) for name in ("w0", "w1")}
    system.router("router")
    for name, path in files.items():
        system.worker(name, "--lora", f"style={path}")
    bare = await system.connect()
    await until_ready(bare, 2)
    whole = await text(bare, with_lora("style", max_tokens=400))
    stream = await bare.generate(with_lora("style", max_tokens=400), subject=f"{PREFIX}.generate.demo.acme")
    await stream.until(3)
    name = str(stream.messages[0]["worker_id"])
    await unload(bare, name)
    os.truncate(files[name], 0)
    reply = msgspec.json.decode((await bare.nats.request(f"{PREFIX}.models", b"", timeout=5)).data)
    (pids,) = [one["pids"] for one in reply["models"][0]["workers"] if one["worker_id"] == name]
    os.kill(pids["engine"], signal.SIGKILL)
    terminal = await stream.terminal()
    assert (terminal["finish_reason"], stream.text) == ("length", whole)
    assert terminal["worker_id"] != name
    check_stream(stream)


async def test_a_worker_does_not_start_with_an_adapter_that_does_not_fit(system: System, tmp_path: Path) -> None:
    wrong = adapters.write(tmp_path / "wrong.gguf", shapes={"blk.0.attn_q.weight": (256, 256)})
    system.worker("worker", "--lora", f"style={wrong}")
    assert await system.wait("worker", timeout_s=150) != 0
    assert "another base" in system.text_log("worker")


async def test_workers_of_both_formats_have_the_same_adapter(system: System, tmp_path: Path) -> None:
    one, same = adapters.write(tmp_path / "1.gguf", 1), ("--fingerprint", "demo-1")
    peft = adapters.write_peft(tmp_path / "peft", adapters.peft_tensors(2))
    system.router("router")
    system.worker("onnx", "--lora", f"style={one}", "--lora", f"peft={peft}", *same, model=str(demo.ONNX_PATH))
    bare = await system.connect()
    await until_ready(bare, 1)
    style = await text(bare, with_lora("style"))
    assert len({style, await text(bare, PROMPT), await text(bare, with_lora("peft"))}) == 3
    digests = await until_listed(bare, "peft", "style")
    system.worker("gguf", "--lora", f"style={one}", *same)
    await until_ready(bare, 2)
    assert await until_listed(bare, "peft", "style") == digests  # of one digest each
    system.kill("onnx")
    assert await text(bare, with_lora("style")) == style


async def test_a_worker_whose_engine_has_no_adapters_says_so(system: System, tmp_path: Path) -> None:
    one = adapters.write(tmp_path / "1.gguf", 1)
    system.router("router")
    system.worker("worker", "--lora", f"style={one}", "--engine", "sim", model="dynamo")
    assert await system.wait("worker", timeout_s=150) != 0
    assert "LoRA adapters need a gguf engine, or an onnx engine" in system.text_log("worker")
