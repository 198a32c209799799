"""A command that lacks packages says in one line what to install, and starts nothing."""

import sys
from collections.abc import Iterator

import pytest
import structlog

from tokenbus.cli import main
from tokenbus.protocol import late_logger


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Commands set up logging for their process."""
    yield
    structlog.reset_defaults()
    late_logger.configure_first(None)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["tokenbus", *arguments])
    main.main()


@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [
        ("starlette", ("gateway",), "gateway"),
        ("tokenizers", ("router", "--help"), "router"),
        ("llguidance", ("worker", "--model", "demo"), "worker"),
        ("llguidance", ("up",), "up"),
        ("numpy", ("bench", "--model", "demo"), "bench"),
        ("huggingface_hub", ("pull", "org/model"), "worker"),
        ("huggingface_hub", ("models", "--local"), "worker"),
        ("huggingface_hub", ("doctor", "--model", "demo"), "worker"),
        ("tokenizers", ("config", "check", "router"), "router"),
        ("opentelemetry.sdk", ("up", "--otlp-traces-endpoint", "http://127.0.0.1:1"), "traces"),
    ],
)
def test_a_command_that_lacks_a_package_names_its_extra_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    module: str,
    arguments: tuple[str, ...],
    extra: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, *arguments)
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"needs packages that are not installed ({module}); run: pip install 'tokenbus[{extra}]'" in line


def test_variables_of_a_server_that_is_not_installed_are_not_called_misspelled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setenv("TOKENBUS_ROUTER_LOG_LEVEL", "info")
    monkeypatch.setenv("TOKENBUS_GATEWAY_GRACE", "3")
    main.parse(["gateway"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "TOKENBUS_GATEWAY_GRACE is unknown: did you mean TOKENBUS_GATEWAY_GRACE_S?" in line
