"""Copies in the engine's own memory, of any size. They end with the engine."""


class MemoryCopies:
    """The data of each copy, by its id."""

    def __init__(self) -> None:
        self._copies: dict[int, memoryview] = {}

    def __repr__(self) -> str:
        return f"<MemoryCopies {len(self._copies)}>"

    def write(self, number: int, data: memoryview) -> None:
        """Takes ownership of `data`."""
        assert number not in self._copies, number
        self._copies[number] = data

    def read(self, number: int) -> memoryview:
        return self._copies[number]

    def discard(self, number: int) -> None:
        """Removes a copy; nothing of it remains readable."""
        data = self._copies.pop(number)
        data[:] = bytes(len(data))
