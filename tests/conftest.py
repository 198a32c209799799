"""For all tests."""

import atexit
import gc
import os
import shutil
import tempfile

from hypothesis import HealthCheck, settings

pytest_plugins = ("tests.support.skips",)

# How long an example takes says how busy the machine is, and nothing of the rule that it tests.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process of every system here compiles each module again

# Systems of several tests run at a time, and engines that share a core only wait for each other's threads.
os.environ.setdefault("TOKENBUS_THREADS", "1")

# Whatever else runs on this machine, the workers of a test plan their memory as if they were alone.
os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="tokenbus-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)


def pytest_collection_finish() -> None:
    """Leaves what all tests have imported out of every later search for garbage, which would take a second each."""
    gc.collect()
    gc.freeze()
