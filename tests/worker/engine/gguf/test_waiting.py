import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.worker.engine.gguf import waiting
from tokenbus.worker.engine.gguf.waiting import SpinPolicy

TEAM = """
import os
import time
from tokenbus.worker.engine.gguf import backend, waiting
def count(): return len(os.listdir("/proc/self/task"))
made, before = waiting.make(), count()
cores = waiting.find_openmp().omp_get_num_procs()
made.computed(waiting.SpinPolicy.FIRST_TRY_S)
give_up_at = time.monotonic() + 30
while before - count() < cores + 1 and time.monotonic() < give_up_at:  # threads end after the team has
    time.sleep(0.01)
print("as many:", before - count() == cores + 1)
"""
"""A process whose threads sleep has a team of threads that do nothing, one more than there are cores, with the thread
that asked for them among them."""


def sleeping_until_tried(policy: SpinPolicy) -> float:
    """Returns for how many seconds of computing threads sleep until they spin."""
    slept = 0.0
    while not policy.observe(0.0625, 0.00625):
        slept += 0.0625
    return slept + 0.0625


def test_threads_sleep_at_first_and_spin_soon() -> None:
    policy = SpinPolicy()
    assert not policy.spins
    assert sleeping_until_tried(policy) == pytest.approx(SpinPolicy.FIRST_TRY_S)


def test_threads_spin_as_long_as_nobody_takes_their_cores() -> None:
    policy = SpinPolicy()
    sleeping_until_tried(policy)
    assert all(policy.observe(0.05, 0.05 * (SpinPolicy.MOST_DELAYED - 0.01)) for _ in range(1_000))
    assert not policy.observe(0.05, 0.05)


def test_spinning_is_tried_more_rarely_the_less_it_serves() -> None:
    policy, slept = SpinPolicy(), []
    for _ in range(10):
        slept.append(sleeping_until_tried(policy))
        assert not policy.observe(0.4, 0.5)
    assert slept == pytest.approx([0.25, 0.5, 1, 2, 4, 8, 16, 32, 32, 32])


def test_after_a_long_calm_spinning_is_tried_again_soon() -> None:
    policy = SpinPolicy()
    for _ in range(6):
        sleeping_until_tried(policy)
        policy.observe(0.4, 0.5)
    sleeping_until_tried(policy)
    assert policy.observe(SpinPolicy.SOON_S, 0.0)
    assert not policy.observe(0.05, 0.05)
    assert sleeping_until_tried(policy) == pytest.approx(SpinPolicy.FIRST_TRY_S)


@given(st.lists(st.tuples(st.floats(0.05, 0.5), st.floats(0.41, 2.0)), max_size=400))
def test_on_a_busy_machine_threads_never_spin(seen: list[tuple[float, float]]) -> None:
    policy = SpinPolicy()
    assert not any(policy.observe(computed_s, part * computed_s) for computed_s, part in seen)


def test_a_system_that_does_not_say_how_long_threads_wait_is_told_from_an_idle_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "1").mkdir()
    monkeypatch.setattr(waiting, "_TASKS", tmp_path)
    with pytest.raises(OSError, match="there is no schedstat"):
        waiting.run_delays()
    (tmp_path / "1" / "schedstat").write_text("5000 2500000000 7\n")
    assert waiting.run_delays() == 2.5


def run(variables: dict[str, str], code: str) -> str:
    env = {name: value for name, value in os.environ.items() if name not in waiting.VARIABLES}
    found = subprocess.run(
        [sys.executable, "-c", code], env=env | variables, capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how long threads wait for cores")
def test_a_team_of_idle_threads_makes_the_others_sleep_until_they_may_spin() -> None:
    assert run(waiting.VARIABLES, TEAM).endswith("as many: True")


@pytest.mark.parametrize(
    "variables", [{}, {"OMP_WAIT_POLICY": "active"}, waiting.ASLEEP, {**waiting.VARIABLES, "GOMP_SPINCOUNT": "7"}]
)
def test_whoever_has_said_how_threads_wait_is_obeyed(variables: dict[str, str]) -> None:
    code = "from tokenbus.worker.engine.gguf import backend, waiting; print(waiting.make())"
    assert run(variables, code) == "None"
