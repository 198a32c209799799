"""Logs say what went wrong, and never what was asked or answered."""

import io
import json
import sys

import pytest
import structlog

from tokenbus.protocol.telemetry import logs


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "a\x07b", "a\nb", "a\rb"])
@pytest.mark.parametrize("form", ["json", "console"])
def test_what_a_client_has_chosen_is_logged_on_one_line_and_controls_no_terminal(
    form: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    try:
        logs.configure("test", logs.Settings(form=form))
        structlog.get_logger().info("request_received", model=name)
    finally:
        structlog.reset_defaults()
    assert out.getvalue().count("\n") == 1
    assert name not in out.getvalue()


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
