"""For all tests."""

import gc
import os

from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, and nothing of the rule that it tests.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process of every system here compiles each module again

# Systems of several tests run at a time, and engines that share a core only wait for each other's threads.
os.environ.setdefault("TOKENBUS_THREADS", "1")


def pytest_collection_finish() -> None:
    """Leaves what all tests have imported out of every later search for garbage, which would take a second each."""
    gc.collect()
    gc.freeze()
