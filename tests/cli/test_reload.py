"""On SIGHUP a server applies the settings that may change and reports those that need a restart."""

from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from tokenbus.cli import main
from tokenbus.cli.commands import router
from tokenbus.cli.console.serve import Reloader
from tokenbus.protocol.telemetry import logs
from tokenbus.router.settings import RouterSettings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokenbus.toml"
    path.write_text('[router]\ntenant-limit = "1,0,0"\n')
    return path


def reloader(file: Path, *flags: str) -> Reloader[RouterSettings]:
    options = main.parse(["router", "--config", str(file), *flags])
    return Reloader(options, router.settings_of, logs.LevelFilter("info"))


def logs_info(level: logs.LevelFilter) -> bool:
    try:
        level(None, "info", {})
    except structlog.DropEvent:
        return False
    return True


def test_what_may_change_changes(file: Path) -> None:
    again = reloader(file)
    file.write_text('[router]\ntenant-limit = "2,0,0"\ntenant-limit-for = ["acme=9,0,0"]\nslow-wait-s = 1\n')
    settings = again()
    assert settings.tenant_limits.concurrency == 2
    assert settings.tenant_limit_overrides["acme"].concurrency == 9
    assert settings.request_log.slow_wait_s == 1


def test_what_may_not_change_stays_and_is_named(file: Path) -> None:
    again = reloader(file)
    file.write_text('[router]\nrouter-id = "r2"\ntemperature = 0.5\n[nats]\nurl = "nats://elsewhere:4222"\n')
    with capture_logs() as lines:
        settings = again()
    assert (settings.router_id, settings.broker.url) == ("", "nats://127.0.0.1:4222")
    assert settings.temperature == 0.5
    assert lines[0]["changed"] == ["temperature", "tenant-limit"]
    assert lines[0]["need_restart"] == ["nats", "router-id"]


def test_what_has_to_wait_is_named_each_time(file: Path) -> None:
    again = reloader(file)
    file.write_text('[router]\nrouter-id = "r2"\n')
    again()
    with capture_logs() as lines:
        again()
    assert (lines[0]["changed"], lines[0]["need_restart"]) == ([], ["router-id"])


def test_a_flag_still_goes_before_the_file(file: Path) -> None:
    again = reloader(file, "--tenant-limit", "5,0,0")
    file.write_text('[router]\ntenant-limit = "2,0,0"\n')
    assert again().tenant_limits.concurrency == 5


@pytest.mark.parametrize("text", ["[router]\nno-such = 1\n", "[router]\nslow-wait-s = 0\n", "[router\n", "[nobody]\n"])
def test_a_file_that_is_wrong_changes_nothing(file: Path, text: str) -> None:
    again = reloader(file)
    file.write_text(text)
    with pytest.raises(ValueError, match=r"tokenbus\.toml"):
        again()
    file.write_text('[router]\ntenant-limit = "1,0,0"\n')
    with capture_logs() as lines:
        again()
    assert lines[0]["changed"] == []


def test_the_level_of_the_log_changes_at_once(file: Path) -> None:
    level = logs.LevelFilter("info")
    again = Reloader(main.parse(["router", "--config", str(file)]), router.settings_of, level)
    file.write_text('[router]\nlog-level = "error"\n')
    again()
    assert not logs_info(level)


def test_a_level_that_is_taken_out_of_the_file_is_the_usual_one_again(file: Path) -> None:
    file.write_text('[router]\nlog-level = "error"\n')
    level = logs.LevelFilter("error")
    again = Reloader(main.parse(["router", "--config", str(file)]), router.settings_of, level)
    file.write_text("[router]\n")
    again()
    assert logs_info(level)


def test_a_setting_that_is_needed_and_has_gone_from_the_file_ends_nobody(file: Path) -> None:
    file.write_text('[worker]\nmodel = ["demo"]\n')
    options = main.parse(["worker", "--config", str(file)])
    file.write_text("[worker]\n")
    with pytest.raises(ValueError, match="--model"):
        options.reload()


def test_a_secret_that_is_written_wrongly_is_not_shown(file: Path) -> None:
    file.write_text('[gateway]\napi-key = [["sk-secret=acme"]]\n')
    with pytest.raises(ValueError, match="api-key") as caught:
        main.parse(["gateway", "--config", str(file)])
    assert "acme" not in str(caught.value)
