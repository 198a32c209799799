"""Names that count how often they are compared, which shows whether they are looked up or each is held against all."""


class CountedName(str):
    """A name of one test: `class Name(CountedName)` has a count of its own."""

    __slots__ = ()
    num_compared = 0

    def __eq__(self, other: object) -> bool:
        type(self).num_compared += 1
        return str(self) == other

    __hash__ = str.__hash__
