"""Logs say what went wrong, and never what was asked or answered."""

import contextlib
import io
import json
import re
import sys

import pytest
import structlog

from tokenbus.protocol.telemetry import logs
from tokenbus.protocol.wire import messages


def logged(monkeypatch: pytest.MonkeyPatch, form: str, event: str, **values: object) -> str:
    """Returns what a process with logs of that form writes for one event."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    try:
        logs.configure("test", logs.LogSettings(form=form))
        structlog.get_logger().info(event, **values)
    finally:
        structlog.reset_defaults()
    return out.getvalue()


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "a\x07b", "a\nb", "a\rb"])
@pytest.mark.parametrize("form", ["json", "console"])
def test_what_a_client_has_chosen_is_logged_on_one_line_and_controls_no_terminal(
    form: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = logged(monkeypatch, form, "request_received", model=name)
    assert out.count("\n") == 1
    assert name not in out


@pytest.mark.parametrize(("form", "shown"), [("json", '"state":"ready"'), ("console", "state='ready'")])
def test_the_member_of_an_enumeration_is_logged_as_its_value(
    form: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = logged(monkeypatch, form, "worker_state_changed", state=messages.WorkerState.READY)
    assert shown in re.sub("\x1b\\[[0-9;]*m", "", out)


def test_a_name_that_is_no_text_is_logged_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert r"a\udcff" in logged(monkeypatch, "json", "model_not_loaded", error="a\udcff.gguf")


@pytest.mark.parametrize("form", ["json", "console"])
def test_an_exception_is_logged_without_the_values_of_its_variables(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setenv("TOKENBUS_LOG_FORMAT", form)
    monkeypatch.setattr(sys, "stderr", out)
    try:
        logs.configure("test")
        prompt = "".join(["my ", "secret ", "question"])
        try:
            raise ValueError("wrong")
        except ValueError:
            structlog.get_logger().exception("message_failed", length=len(prompt))
    finally:
        structlog.reset_defaults()
    assert "wrong" in out.getvalue()
    assert "secret question" not in out.getvalue()
    if form == "json":
        assert json.loads(out.getvalue())["event"] == "message_failed"


def test_a_flood_of_warnings_is_cut_off_and_counted_and_other_events_are_not() -> None:
    now = [10.0]
    flood = logs.FloodFilter(lambda: now[0])

    def passes(level: str, event: str) -> bool:
        with contextlib.suppress(structlog.DropEvent):
            lines.append(flood(None, level, {"event": event}))
            return True
        return False

    lines: list[structlog.typing.EventDict] = []
    assert sum(passes("warning", "duplicate_dropped") for _ in range(1_000)) == logs.MAX_LINES_PER_S
    assert passes("error", "engine_died")
    assert all(passes("info", "request_finished") for _ in range(1_000))
    assert all(passes("warning", "control") for _ in range(1_000))
    now[0] += 1.0
    assert passes("warning", "duplicate_dropped")
    assert lines[-1] == {"event": "duplicate_dropped", "unlogged": 1_000 - logs.MAX_LINES_PER_S}
    assert passes("warning", "duplicate_dropped")
    assert "unlogged" not in lines[-1]


def test_a_line_for_which_the_disk_has_no_room_is_lost_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        try:
            logs.configure("test")
            structlog.get_logger().warning("event")
        finally:
            structlog.reset_defaults()
        with pytest.raises(OSError, match="No space left"):
            full.write("a line\n")
        with contextlib.suppress(OSError):
            full.close()
