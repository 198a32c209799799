"""A server that can't start says why in one line, and by its exit status whether another start may help."""

import argparse
import signal

import pytest

from tokenbus.cli.console import serve
from tokenbus.protocol.telemetry import logs
from tokenbus.worker.contract.engine_errors import ModelError, ModelTooLargeError


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ModelTooLargeError("it needs more"), 1),
        (ConnectionError("no broker"), 1),
        (ModelError("no model"), 2),
        (ValueError("no setting"), 2),
    ],
)
def test_what_another_start_can_not_mend_has_a_status_of_its_own(
    error: Exception, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "configure", lambda *_: None)  # other tests log to where they did
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    async def fail(settings: None, reload: object) -> None:
        raise error

    options = argparse.Namespace(log_level=None, log_format=None, reloads=frozenset())
    assert serve.run("worker", options, lambda _: None, fail) == status
    assert f"tokenbus: {error}\n" in capsys.readouterr().err
