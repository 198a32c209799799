"""Decides whether an engine's step will never end, and what may have caused an engine process to die.

An engine reports every step once it is computed. While it has work and reports nothing, the step in progress ages. A
fixed limit alone would kill large models on slow devices, so a step counts as stuck only when it is older than the
limit and also ten times older than the longest step so far.

Every sequence that was in a step is suspect of a crash, and every call for embeddings or scores that was in a batch, of
any replica, since replicas share the process. A process that ends while a library loads a model for the first time has
ended for that, unless it was trying out a suspect: engine libraries end on some files. After a crash the suspects are
tried one at a time: if the process dies again, only the one that was tried is to blame (decision 0023).
"""

from collections.abc import Iterable

_STUCK_FACTOR = 10


class StepWatchdog:
    """Measures the step in progress. Times are seconds of one monotonic clock."""

    def __init__(self, now: float) -> None:
        self._step_started_at = now
        self.longest_step_s = 0.0

    def __repr__(self) -> str:
        return f"<StepWatchdog longest {self.longest_step_s:.3f} s>"

    def restart(self, now: float) -> None:
        """Restarts measuring: an idle engine got work, or the frontend itself was frozen and missed reports."""
        self._step_started_at = now

    def step_reported(self, now: float, *, has_outputs: bool) -> None:
        """Notes the end of a step. One without outputs may have been cut short and does not count as the longest."""
        if has_outputs:
            self.longest_step_s = max(self.longest_step_s, self.age_s(now))
        self._step_started_at = now

    def age_s(self, now: float) -> float:
        """Returns the age of the step in progress, in seconds."""
        return now - self._step_started_at

    def is_stuck(self, now: float, timeout_s: float) -> bool:
        """Returns whether the step in progress will never end."""
        return self.age_s(now) > max(timeout_s, _STUCK_FACTOR * self.longest_step_s)


MAX_CRASHES = 2
"""A request that may have ended this many engines gets no other."""


class CrashAttribution:
    """The suspects of one engine process. Any object identifies a replica."""

    def __init__(self) -> None:
        self._isolated: tuple[object, int] | None = None
        self._stuck: object | None = None
        self._poisoned: tuple[object, frozenset[int]] | None = None
        self._pooled: dict[object, frozenset[int]] = {}
        """The calls in the batch that each replica is computing."""
        self._on_probation: object | None = None
        """The replica whose batch has a call that was in a dead process's batch."""
        self._new: set[int] = set()
        """The numbers of the replicas whose models have never been served."""
        self._loading: set[int] = set()
        """Those of them whose models a library loads, which takes no hours, as a download may. They give up after a few
        deaths, so no request that ends engines is excused for long."""

    def __repr__(self) -> str:
        return f"<CrashAttribution isolated {self._isolated} stuck {self._stuck} pooled {self._pooled}>"

    def will_load(self, number: int) -> None:
        """Notes that a model will be loaded that has never been served. The number is the replica's in the process."""
        self._new.add(number)

    def load_began(self, number: int) -> None:
        """Notes that a library loads a replica's model. This may be learned after its end."""
        self._loading |= {number} & self._new

    def load_ended(self, number: int) -> None:
        """Notes that a replica serves or can't. One whose process has ended is still loading, as far as that goes."""
        self._new.discard(number)
        self._loading.discard(number)

    @property
    def may_be_a_load(self) -> bool:
        """Whether loading a model is what has ended the process, as far as one can tell."""
        is_known = self._poisoned or self._isolated or self._on_probation is not None or self._stuck is not None
        return bool(self._loading) and not is_known

    def step_isolated(self, replica: object, number: int) -> None:
        """Notes that from now on steps contain no other sequence of any replica."""
        self._isolated = (replica, number)

    def step_succeeded(self, replica: object, numbers: Iterable[int]) -> None:
        """Notes that these sequences survived a step, which ends the isolation of one."""
        if self._isolated is not None and self._isolated[0] is replica and self._isolated[1] in numbers:
            self._isolated = None

    def memory_poisoned(self, replica: object, numbers: Iterable[int]) -> None:
        """Notes that the process ends because one of these sequences has left non-finite numbers that remain."""
        self._poisoned = (replica, frozenset(numbers))

    def batch_changed(self, replica: object, call_ids: Iterable[int], *, on_probation: bool) -> None:
        """Notes that a replica computes a batch of these calls' inputs, and no step; without calls, it has ended."""
        calls = frozenset(call_ids)
        self._pooled[replica] = calls
        if calls and on_probation:
            self._on_probation = replica
        elif self._on_probation is replica:
            self._on_probation = None

    def step_stuck(self, replica: object) -> None:
        """Notes that the process is killed because a step of this replica never ends."""
        self._stuck = replica

    def may_be_caused_by(self, replica: object, number: int) -> bool:
        """Returns whether this sequence may have been in the step that ended the process."""
        if self.may_be_a_load:
            return False
        if self._poisoned is not None:
            return self._poisoned[0] is replica and number in self._poisoned[1]
        if self._on_probation is not None or self._pooled.get(replica):
            return False
        if self._isolated is not None:
            return self._isolated == (replica, number)
        return self._stuck is None or self._stuck is replica

    def suspect_calls(self, replica: object) -> frozenset[int]:
        """Returns the calls of a replica that may have been in the batch that ended the process."""
        if (
            self.may_be_a_load
            or self._poisoned
            or self._on_probation not in (None, replica)
            or self._stuck not in (None, replica)
        ):
            return frozenset()
        return self._pooled.get(replica, frozenset())
