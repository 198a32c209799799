"""Lets llama.cpp's threads spin where they wait for each other, while nobody else wants their cores, and sleep
otherwise.

They wait hundreds of times in each token. Threads that sleep have to be woken, which takes half of a small model's
time. But a thread that spins keeps its core from the very thread that it waits for, once other processes want cores,
too: then a token takes seconds (decision 0064).

GNU's OpenMP spins briefly, or not at all, while it has more threads than the machine has cores. So a team of threads
that do nothing makes the others sleep for as long as it lives. How long each way is, is said by `VARIABLES`, which
OpenMP reads once, when it is loaded."""

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import structlog

VARIABLES = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}
"""The environment of a process that decides how its threads wait: they spin for 0.1 to 0.2 ms, and sleep at once while
there are too many. Values that the user has set are kept; nothing is decided then."""
ASLEEP = {"OMP_WAIT_POLICY": "passive"}
"""The same for a process whose threads always sleep."""
CHECK_S = 0.05
"""The seconds of computing between two checks."""
_TASKS = Path("/proc/self/task")
_MAPS = Path("/proc/self/maps")
_LIBRARY = "libgomp"


class SpinPolicy:
    """Decides whether threads that wait should spin, by how long they had to wait for a core.

    Spinning is tried again once it has been calm for a while, and later the less it has served."""

    MOST_DELAYED = 0.6
    """The part of the time that threads which spin may wait for cores, in sum. Beside one busy process they wait for
    nearly all of it; beside what runs with every engine, such as the process that sends its tokens, for a third."""
    CALM_DELAYED = 0.4
    """The same for threads that sleep before they are to spin: they wait whenever they are woken, for a tenth of the
    time in sum, and beside one busy process for nearly all of it."""
    FIRST_TRY_S = 0.25
    """The seconds of computing that must have been calm before threads spin."""
    LAST_TRY_S = 32.0
    """The same, if they had to stop soon again and again: a try costs a step or two."""
    SOON_S = 8.0

    def __init__(self) -> None:
        self.spins = False
        self._sleeps_s = self.FIRST_TRY_S
        self._lasted_s = 0.0

    def observe(self, computed_s: float, delayed_s: float) -> bool:
        """Returns whether threads should spin, after they have computed and have waited for cores, in sum."""
        self._lasted_s += computed_s
        if self.spins and delayed_s > self.MOST_DELAYED * computed_s:
            was_soon = self._lasted_s < self.SOON_S
            self._sleeps_s = min(2 * self._sleeps_s, self.LAST_TRY_S) if was_soon else self.FIRST_TRY_S
            self.spins, self._lasted_s = False, 0.0
        elif not self.spins and delayed_s > self.CALM_DELAYED * computed_s:
            self._lasted_s = 0.0
        elif not self.spins and self._lasted_s >= self._sleeps_s:
            self.spins, self._lasted_s = True, 0.0
        return self.spins


class IdleTeam:
    """Threads that do nothing, which make the process have more of them than there are cores."""

    def __init__(self, openmp: ctypes.CDLL) -> None:
        self._openmp = openmp
        self._is_made = threading.Event()
        self._may_end = threading.Event()
        # OpenMP keeps a team's threads as long as the thread that asked for them.
        self._thread = threading.Thread(target=self._run, name="idle-team", daemon=True)
        self._thread.start()
        self._is_made.wait()

    def _run(self) -> None:
        try:
            self._make()
        finally:
            self._is_made.set()
        self._may_end.wait()

    def _make(self) -> None:
        nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # of no pointer
        parallel = self._openmp.GOMP_parallel
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        parallel(nothing, None, self._openmp.omp_get_num_procs() + 1, 0)

    def close(self) -> None:
        """Ends the threads."""
        self._may_end.set()
        self._thread.join()


class Waiting:
    """Tells the threads of this process how to wait for each other. Any thread may use it."""

    def __init__(self, openmp: ctypes.CDLL, delays: Callable[[], float]) -> None:
        """`delays` returns for how many seconds this process's threads have waited for cores, in sum."""
        self._openmp = openmp
        self._delays = delays
        self._policy = SpinPolicy()
        self._lock = threading.Lock()
        self._computed_s = 0.0
        self._delayed_s = delays()
        self._team: IdleTeam | None = IdleTeam(openmp)

    def computed(self, seconds: float) -> None:
        """Takes how long a computation has taken."""
        with self._lock:
            self._computed_s += seconds
            if self._computed_s >= CHECK_S:
                self._check()

    def _check(self) -> None:
        computed_s, self._computed_s = self._computed_s, 0.0
        before, self._delayed_s = self._delayed_s, self._delays()
        delayed_s = max(0.0, self._delayed_s - before)  # a thread that has ended counts no more
        spins = self._policy.observe(computed_s, delayed_s)
        if spins == (self._team is None):
            return
        if self._team is not None:
            self._team.close()
        self._team = None if spins else IdleTeam(self._openmp)
        structlog.get_logger().debug("threads_wait", spin=spins, share=round(delayed_s / computed_s, 2))


def run_delays() -> float:
    """Returns for how many seconds this process's threads were ready to run and had no core. Raises OSError and
    ValueError if the system doesn't say."""
    waited_ns = []
    for task in os.listdir(_TASKS):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            waited_ns.append(int((_TASKS / task / "schedstat").read_text().split()[1]))
    if not waited_ns:
        raise FileNotFoundError(f"there is no schedstat in {_TASKS}")
    return sum(waited_ns) / 1e9


def find_openmp() -> ctypes.CDLL | None:
    """Returns GNU's OpenMP if this process has loaded exactly one."""
    try:
        paths = {line.split(maxsplit=5)[-1] for line in _MAPS.read_text().splitlines() if _LIBRARY in line}
        (path,) = (path for path in paths if Path(path).name.startswith(_LIBRARY))
        return ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
    except (OSError, ValueError):
        return None


def make() -> Waiting | None:
    """Returns what decides for this process; None if its user has decided, or where that can't be done."""
    if any(os.environ.get(name) != value for name, value in VARIABLES.items()):
        return None
    openmp = find_openmp()
    if openmp is None:
        return None
    try:
        return Waiting(openmp, run_delays)
    except (OSError, ValueError, IndexError):
        IdleTeam(openmp)  # for good
        return None


_of_this_process = functools.cache(make)
_making = threading.Lock()


def computed(seconds: float) -> None:
    """Takes how long one of llama.cpp's computations with more than one thread has taken."""
    with _making:  # replicas of one process compute on threads of their own
        waiting = _of_this_process()
    if waiting is not None:
        waiting.computed(seconds)
