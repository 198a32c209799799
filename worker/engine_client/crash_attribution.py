"""Decides which sequences may have caused an engine process to die; pure.

Every sequence that was in a step is suspect, whichever replica it belongs to, since the replicas share the process.
After a crash the suspects are stepped in isolation, one at a time: if the process dies again, only the isolated one is
to blame."""


class CrashAttribution:
    """The suspects of one engine process. Any object identifies a replica."""

    def __init__(self) -> None:
        self._isolated: tuple[object, int] | None = None
        self._stuck: object | None = None

    def __repr__(self) -> str:
        return f"<CrashAttribution isolated {self._isolated} stuck {self._stuck}>"

    def step_isolated(self, replica: object, number: int) -> None:
        """From now on no other sequence of any replica is in a step."""
        self._isolated = (replica, number)

    def step_succeeded(self, replica: object, number: int) -> None:
        """A sequence survived a step, which ends its isolation."""
        if self._isolated == (replica, number):
            self._isolated = None

    def step_stuck(self, replica: object) -> None:
        """The process is killed because a step of this replica never ends."""
        self._stuck = replica

    def may_be_caused_by(self, replica: object, number: int) -> bool:
        """Returns whether this sequence may have been in the step that ended the process."""
        if self._isolated is not None:
            return self._isolated == (replica, number)
        return self._stuck is None or self._stuck is replica
