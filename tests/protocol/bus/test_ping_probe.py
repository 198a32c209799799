"""A process knows whether its broker drops connections that stand still within seconds."""

from pathlib import Path

import pytest
import structlog

from tokenbus.cli.console import nats_server
from tokenbus.protocol.bus import ping_probe
from tokenbus.protocol.bus.settings import BusSettings

SHIPPED = Path(__file__).parents[3] / "deploy/nats.conf"


async def test_the_broker_that_comes_with_it_pings_each_second(tmp_path: Path) -> None:
    broker = await nats_server.start(0, tmp_path / "nats.log")
    with structlog.testing.capture_logs() as lines:
        await ping_probe.warn_if_slow(BusSettings(url=broker.url))
    assert not lines
    broker.stop()


@pytest.mark.parametrize(("interval", "seen"), [("3s", 3.0), ("2m", None)])
async def test_a_broker_that_drops_late_is_reported(interval: str, seen: float | None, tmp_path: Path) -> None:
    config = tmp_path / "nats.conf"
    config.write_text(f'ping_interval: "{interval}"')
    broker = await nats_server.start(0, tmp_path / "nats.log", config)
    with structlog.testing.capture_logs() as lines:
        await ping_probe.warn_if_slow(BusSettings(url=broker.url))
    assert [(line["event"], line["ping_interval_s"]) for line in lines] == [
        ("broker_drops_late", None if seen is None else pytest.approx(seen, abs=0.5))
    ]
    broker.stop()


def test_the_files_for_brokers_say_the_same() -> None:
    assert nats_server.DEFAULTS.splitlines() == ['ping_interval: "1s"', "ping_max: 2"]
    for line in nats_server.DEFAULTS.splitlines():
        assert line in SHIPPED.read_text().splitlines()
        assert line in (SHIPPED.parent / "compose.yaml").read_text()
        assert line in (SHIPPED.parent / "kubernetes/nats/nats.yaml").read_text()  # of pings between brokers
