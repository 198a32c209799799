"""Logs are configured when the first logger is made, and only then."""

import pytest

from tokenbus.protocol import late_logger


def test_logs_are_configured_once_before_the_first_logger_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_logger, "_configure", None)
    configured: list[str] = []
    late_logger.configure_first(lambda: configured.append("before"))
    assert configured == []
    for _ in range(2):
        late_logger.get_logger()
        assert configured == ["before"]
