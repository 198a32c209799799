"""Whose request may have brought an engine process down: that of anyone who was in a step, unless one was alone."""


class CrashAttribution:
    """Of one engine process, whose replicas share it. A replica is known by any object of its own."""

    def __init__(self) -> None:
        self._isolated: tuple[object, int] | None = None
        self._stuck: object | None = None

    def __repr__(self) -> str:
        return f"<Blame alone {self._isolated} stuck {self._stuck}>"

    def step_isolated(self, replica: object, number: int) -> None:
        """From now on no other sequence is in a step of any replica."""
        self._isolated = (replica, number)

    def step_succeeded(self, replica: object, number: int) -> None:
        """A sequence's step has gone well."""
        if self._isolated == (replica, number):
            self._isolated = None

    def step_stuck(self, replica: object) -> None:
        """The process is ended for a step of this replica, which never ends."""
        self._stuck = replica

    def may_be_caused_by(self, replica: object, number: int) -> bool:
        """Whether this sequence, if it had begun, may have been in the step that ended the process."""
        if self._isolated is not None:
            return self._isolated == (replica, number)
        return self._stuck is None or self._stuck is replica
