"""A worker's flags make its settings: devices are shared by all replicas, or each has its own."""

import argparse

import pytest

from tokenbus.cli.commands import worker
from tokenbus.worker.frontend.settings import WorkerSettings


def settings(*flags: str) -> WorkerSettings:
    parser = argparse.ArgumentParser()
    worker.add_flags(parser)
    return worker.settings_of(parser.parse_args(["--model", "demo", *flags]))


def test_devices_that_are_given_once_are_those_of_every_replica() -> None:
    (model,) = settings("--replicas", "3", "--devices", "CUDA0, CUDA1").models
    assert model.replicas == 3
    assert model.engine.devices == ("CUDA0", "CUDA1")


def test_without_devices_the_engine_chooses() -> None:
    (model,) = settings("--replicas", "2").models
    assert (model.replicas, model.engine.devices) == (2, ())


def test_devices_that_are_given_for_each_replica_are_its_own() -> None:
    models = settings("--model", "demo", "--replicas", "2", "--devices", "cuda:0", "--devices", "cuda:1").models
    assert [(model.served_name, model.replicas, model.engine.devices) for model in models] == [
        ("demo", 1, ("cuda:0",)),
        ("demo", 1, ("cuda:1",)),
        ("demo", 1, ("cuda:0",)),
        ("demo", 1, ("cuda:1",)),
    ]


@pytest.mark.parametrize("replicas", ["1", "3"])
def test_devices_for_another_number_of_replicas_are_refused(replicas: str) -> None:
    with pytest.raises(ValueError, match="--devices was given 2 times: give it once, or once for each of the"):
        settings("--replicas", replicas, "--devices", "a", "--devices", "b")


def test_an_empty_name_of_a_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings("--devices", "CUDA0,")
    assert "must be names with commas between them, got 'CUDA0,'" in capsys.readouterr().err
