"""For all tests."""

import gc
import os
import signal
import unittest
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, is_hypothesis_test, settings

from tests.support import zygote
from tokenbus.protocol import late_logger
from tokenbus.worker.engine.gguf import waiting

gc.disable()  # until all tests are collected: none of what they import is garbage

pytest_plugins = ("tests.support.forks", "tests.support.skips", "tests.support.jetstream")

# How long an example takes says how busy the machine is, and nothing of the rule that it tests.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

IS_LONG = os.environ.get("TOKENBUS_TESTS") == "long"
"""Whether this is `make test-long`, which CI runs after `make test`."""
QUICK_SHARE = 8
"""`make test` tries one in this many of a rule's examples, but at least `QUICK_LEAST`; others at every run."""
QUICK_LEAST = 10

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process of every system here compiles each module again

# In the background of a shell or below nohup these are ignored, and so they would be by what tests start.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# Systems of several tests run at a time, and engines that share a core only wait for each other's threads.
os.environ.setdefault("TOKENBUS_THREADS", "1")

# Engines get these, which OpenMP reads when it is loaded: where the zygotes don't have them, each engine is executed.
os.environ.update(waiting.VARIABLES)

zygote.install()


@pytest.fixture
def executed() -> Iterator[None]:
    """Lets a test start processes as users do, by executing Python."""
    with zygote.uninstalled():
        yield


def pytest_runtest_teardown() -> None:
    """Leaves no test's logs as a command has configured them in this process."""
    late_logger.configure_first(None)
    if structlog.is_configured():
        structlog.reset_defaults()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not IS_LONG:
        tests = [item.obj for item in items if isinstance(item, pytest.Function)]
        for one in {_rule(test) for test in tests if is_hypothesis_test(test)}:
            _shorten(one)


def _rule(test: Any) -> Any:
    """Returns what has the settings of a test: its function, or the class of histories that it runs."""
    machine = getattr(test, "__self__", None)
    return type(machine) if isinstance(machine, unittest.TestCase) else getattr(test, "__func__", test)


def _shorten(rule: Any) -> None:
    name = "settings" if isinstance(rule, type) else "_hypothesis_internal_use_settings"
    full = getattr(rule, name)
    num = min(full.max_examples, max(full.max_examples // QUICK_SHARE, QUICK_LEAST))
    setattr(rule, name, settings(full, max_examples=num))


def pytest_collection_finish() -> None:
    """Leaves what all tests have imported out of every later search for garbage, which would take a second each."""
    gc.collect()
    gc.freeze()
    gc.enable()
