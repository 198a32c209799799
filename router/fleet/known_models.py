"""Which models have ever been served; pure."""

from collections.abc import Iterator

from tokenbus.protocol.wire import limits


class KnownModels:
    """The models that a router has seen served since it began, the latest `most` of them."""

    def __init__(self, began_at: float, most: int) -> None:
        self._began_at = began_at
        self._most = most
        self._models: dict[str, None] = {}

    def __repr__(self) -> str:
        return f"<KnownModels {len(self._models)} models>"

    def __len__(self) -> int:
        return len(self._models)

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def add(self, model: str) -> None:
        """A worker says that it serves a model."""
        self._models[model] = None
        if len(self._models) > self._most:
            del self._models[next(iter(self._models))]

    def is_unknown(self, model: str, now: float) -> bool:
        """Whether it was never served, as far as a router can say that is old enough."""
        return model not in self._models and self.is_old_enough(now)

    def is_old_enough(self, now: float) -> bool:
        """Whether a model that was not seen by now was never served."""
        return now - self._began_at > limits.MODEL_NOT_FOUND_AFTER_S
