"""`tokenbus inspect` shows a model's chat format without starting a worker."""

import shutil
from pathlib import Path

import pytest

from tests.support import broken_models
from tests.support.models import random_model
from tests.support.models.shape import PRESETS
from tokenbus import demo
from tokenbus.cli.console import inspection
from tokenbus.worker.engine.gguf import backend

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function | tojson }}</call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
CALL = '<call>{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}</call><|end|>'


@pytest.fixture(params=["gguf", "onnx"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "gguf":
        return broken_models.with_template(tmp_path / "model.gguf", TEMPLATE)
    folder = shutil.copytree(demo.ONNX_PATH, tmp_path / "model", copy_function=shutil.copyfile)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_it_prints_features_format_and_an_example(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspection.show(str(model)) == 0
    features, form, example = capsys.readouterr().out.split("\n\n")
    assert features.endswith("features: tools")
    assert '"call_open": "<call>"' in form
    assert example.splitlines()[0] == "a call as the model writes it:"
    assert example.splitlines()[1].rstrip() == CALL


def test_a_model_whose_template_shows_nothing_serves_plain_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = broken_models.with_template(tmp_path / "model.gguf", PLAIN)
    assert inspection.show(str(path)) == 0
    assert "served as plain text" in capsys.readouterr().out


@pytest.mark.parametrize("path", [demo.MODEL_PATH, demo.ONNX_PATH], ids=["gguf", "onnx"])
def test_the_demo_model_calls_tools_and_reasons(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspection.show(str(path)) == 0
    features, form, example = capsys.readouterr().out.split("\n\n", 2)
    assert features.endswith("features: tools, reasoning")
    assert '"switch": "enable_thinking"' in form
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>' in example


def test_weights_of_a_type_that_the_processor_is_slow_with_are_told_last_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "processor_features", lambda: frozenset({"AVX", "AVX2", "LLAMAFILE"}))
    random_model.write(tmp_path / "tiny.gguf", PRESETS["tiny"], "q4_1", threads=1)
    assert inspection.show(str(tmp_path / "tiny.gguf")) == 0
    said = "Q4_1: Q4_0 or Q8_0 would compute prompts 1.5 to 2 times as fast on this processor"
    assert capsys.readouterr().out.splitlines()[-2:] == ["", said]


def test_a_model_that_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspection.show(str(tmp_path / "none.gguf")) == 1
    assert "no such file" in capsys.readouterr().err
