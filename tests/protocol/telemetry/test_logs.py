"""Logs say what went wrong, and never what was asked or answered."""

import io
import json
import sys

import pytest
import structlog

from tokenbus.protocol.telemetry import logs


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
