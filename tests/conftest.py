"""For all tests."""

import os

from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, and nothing of the rule that it tests.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process of every system here compiles each module again
