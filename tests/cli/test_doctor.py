"""The doctor finds what is wrong and says how to fix it."""

import sys
from pathlib import Path

import msgspec
import pytest

from tests.router.builders import card
from tests.support import auth_brokers, broken_models
from tests.support.engines import DEMO, gguf_runner
from tokenbus import demo
from tokenbus.cli.commands import doctor
from tokenbus.cli.console import connection_flags
from tokenbus.cli.console.flags import Parser
from tokenbus.protocol.wire import messages
from tokenbus.worker.engine.memory.fit import Room


def marks(findings: list[doctor.Finding]) -> dict[str, str]:
    return {finding.what: finding.mark for finding in findings}


def test_a_model_that_is_there_is_fine_and_one_that_is_none_is_bad(tmp_path: Path) -> None:
    assert doctor.check_model(str(demo.MODEL_PATH)).mark == "ok"
    assert doctor.check_model(str(demo.ONNX_PATH)).mark == "ok"
    assert doctor.check_model("org/repo:Q8_0").mark == "note"
    (tmp_path / "model.gguf").write_bytes(b"not a model")
    found = doctor.check_model(str(tmp_path / "model.gguf"))
    assert (found.mark, "not a GGUF file" in found.advice) == ("bad", True)
    assert doctor.check_model(str(tmp_path / "missing.gguf")).mark == "bad"
    (tmp_path / "empty").mkdir()
    assert "there is no GGUF file" in doctor.check_model(str(tmp_path / "empty")).advice


async def tried(path: Path) -> list[doctor.Finding]:
    return [finding async for finding in doctor.check_engine(str(path))]


async def test_a_model_that_no_engine_can_serve_is_bad_and_one_without_a_template_that_works_is_noted(
    tmp_path: Path,
) -> None:
    assert [finding.mark for finding in await tried(demo.MODEL_PATH)] == ["ok"] * 4
    (found,) = await tried(broken_models.with_value(tmp_path / "blocks.gguf", *broken_models.NO_BLOCKS))
    assert (found.mark, "GGML_ASSERT(hparams.n_layer_all > 0" in found.advice) == ("bad", True)
    for template in ("{% nonsense %}", "{{ bos_token | nonsense }}"):
        *_, found = await tried(broken_models.with_template(tmp_path / "template.gguf", template))
        assert (found.mark, "'nonsense'" in found.what) == ("note", True)


def test_weights_that_the_processor_is_slow_with_are_noted_in_one_line() -> None:
    runner = gguf_runner(DEMO)
    runner.close()
    fast = list(doctor.check_config(runner.config))
    slow = list(doctor.check_config(msgspec.structs.replace(runner.config, slow_weights="Q4_1: Q8_0 would be faster")))
    assert [finding for finding in slow if finding not in fast] == [("note", "Q4_1: Q8_0 would be faster", "")]


def test_a_machine_whose_cores_are_taken_is_noted() -> None:
    found = doctor.taken_cores(12.34, 2)
    assert found is not None
    assert (found.mark, found.what) == ("note", "12.3 processes want the 2 cores of this machine")
    assert doctor.taken_cores(2.0, 2) is None


def test_a_processor_without_the_instructions_that_numpy_needs_is_bad(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    for text, lacks in (
        ("flags\t\t: fpu sse4_1 sse4_2 popcnt\n", False),
        ("flags\t\t: fpu sse2 sse4_1\n", True),
        ("Features\t: fp asimd\n", False),
    ):
        cpuinfo.write_text(f"processor\t: 0\n{text}")
        assert doctor.lacks_sse42(cpuinfo) is lacks
    assert not doctor.lacks_sse42(tmp_path / "missing")


def test_gpus_are_named_and_a_driver_that_crashes_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.gguf_devices().mark in ("ok", "note")
    process = tmp_path / "python"
    process.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(process))
    for does, mark, words in (
        ("""echo a driver was here; echo '{"Vulkan0": "AMD Radeon"}'""", "ok", "Vulkan0 (AMD Radeon)"),
        ("echo '{}'", "note", "no GPU"),
        ("kill -SEGV $$", "bad", "SIGSEGV"),
        ("true", "bad", "GPUs"),
    ):
        process.write_text(f"#!/bin/sh\n{does}\n")
        found = doctor.gguf_devices()
        assert (found.mark, words in found.what + found.advice) == (mark, True), found


def reply(*cards: messages.Card) -> messages.ModelsReply:
    served = messages.ServedModel(model="demo", context_length=512, features=[], workers=list(cards))
    return messages.ModelsReply(
        models=[served] if cards else [],
        limits=messages.ServerLimits(max_request_bytes=1_000),
        router=None,  # type: ignore[arg-type]
    )


def test_a_fleet_without_workers_or_without_one_that_is_ready_is_bad() -> None:
    assert marks(list(doctor.check_fleet(reply())))["the router knows no worker"] == "bad"
    restarting = card(state=messages.WorkerState.RESTARTING, tokenizer_digest="a")
    assert marks(list(doctor.check_fleet(reply(restarting))))["demo: 1 restarting"] == "bad"


def test_a_model_that_a_request_would_load_is_fine() -> None:
    unloaded = card(state=messages.WorkerState.DRAINING, loadable=True, tokenizer_digest=None)
    assert marks(list(doctor.check_fleet(reply(unloaded))))["demo: 1 loadable"] == "ok"
    assert set(marks(list(doctor.check_fleet(reply(unloaded)))).values()) == {"ok"}


def test_workers_that_pool_embeddings_in_different_ways_are_bad() -> None:
    mean, last, none = (
        None if pooling is None else messages.CardEmbeddings(dimensions=8, pooling=pooling, max_input_tokens=9)
        for pooling in ("mean", "last", None)
    )
    one, two, three = (
        card(name, tokenizer_digest="a", embeddings=made)
        for name, made in (("one", mean), ("two", last), ("three", none))
    )
    assert set(marks(list(doctor.check_fleet(reply(one, three)))).values()) == {"ok"}
    found = marks(list(doctor.check_fleet(reply(one, two, three))))
    assert found["demo: workers pool embeddings in different ways (one: mean; two: last)"] == "bad"


def test_a_fleet_that_is_ready_is_fine_and_tokenizers_that_differ_are_noted() -> None:
    one, two = card("one", tokenizer_digest="a"), card("two", tokenizer_digest="b")
    assert set(marks(list(doctor.check_fleet(reply(one)))).values()) == {"ok"}
    found = list(doctor.check_fleet(reply(one, two)))
    assert [finding.mark for finding in found] == ["ok", "ok", "note"]
    assert "different tokenizers (one: a; two: b)" in found[-1].what


async def test_a_secret_that_everybody_can_read_is_noted(tmp_path: Path) -> None:
    guard = auth_brokers.by_nkey(tmp_path)
    (seed,) = guard.right.files
    parser = Parser("doctor")
    connection_flags.add_flags(parser)
    async with auth_brokers.guarded(guard, tmp_path) as system:
        options = parser.parse_args(["--nats", system.url, *guard.right.flags])
        for mode, noted in ((0o600, False), (0o644, True)):
            seed.chmod(mode)
            found = [finding async for finding in doctor.check_broker(options)]
            assert (found[0].what == f"the broker at {system.url} answers", found[0].mark) == (True, "ok")
            assert any(f"chmod 600 {seed}" in finding.advice for finding in found) == noted


def test_models_are_compared_with_the_memory_that_there_is() -> None:
    models, plenty = [str(demo.MODEL_PATH), str(demo.MODEL_PATH)], Room(1 << 40, 1 << 39, 1 << 38)
    found = list(doctor.check_memory(models, 0, plenty))
    assert [one.mark for one in found] == ["ok", "ok", "ok"]
    assert "for contexts of 2,048 tokens, 8,192 in all; 524,288 MiB of 1,048,576 MiB are free" in found[0].what
    assert found[0].what.endswith("of which 4,096 MiB stay in reserve")
    assert [one.mark for one in doctor.check_memory(models, 200 << 20, plenty)] == ["ok", "ok", "note"]
    (alone,) = doctor.check_memory(models[:1], 50 << 20, plenty)
    assert (alone.mark, "50 MiB of 1,048,576 MiB are allowed by the budget" in alone.what) == ("bad", True)
    assert list(doctor.check_memory(["org/repo", "/no/such/file.gguf"], 0, plenty)) == []


def test_a_model_for_which_memory_is_too_small_is_told_what_would_fit() -> None:
    (found,) = doctor.check_memory([str(demo.MODEL_PATH)], 0, Room(64 << 20, 64 << 20, 48 << 20))
    assert found.mark == "bad"
    assert "64 MiB of 64 MiB are free" in found.what
    assert "more memory" in found.what
