"""Whose request may have brought an engine process down: that of anyone who was in a step, unless one was alone."""


class Blame:
    """Of one engine process, whose replicas share it. A replica is known by any object of its own."""

    def __init__(self) -> None:
        self._alone: tuple[object, int] | None = None
        self._stuck: object | None = None

    def __repr__(self) -> str:
        return f"<Blame alone {self._alone} stuck {self._stuck}>"

    def stepped_alone(self, replica: object, number: int) -> None:
        """From now on no other sequence is in a step of any replica."""
        self._alone = (replica, number)

    def advanced(self, replica: object, number: int) -> None:
        """A sequence's step has gone well."""
        if self._alone == (replica, number):
            self._alone = None

    def stuck(self, replica: object) -> None:
        """The process is ended for a step of this replica, which never ends."""
        self._stuck = replica

    def may_be_of(self, replica: object, number: int) -> bool:
        """Whether this sequence, if it had begun, may have been in the step that ended the process."""
        if self._alone is not None:
            return self._alone == (replica, number)
        return self._stuck is None or self._stuck is replica
