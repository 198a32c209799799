"""Models in memory, each loaded once for all replicas of a process that use it."""

import threading
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar


class Model(Protocol):
    """A model's weights and what belongs to them."""

    def close(self) -> None:
        """Frees its memory, when nobody uses it any more."""
        ...


ModelT = TypeVar("ModelT", bound=Model)


class LoadedModels(Generic[ModelT]):
    """Counts the users of each model, by a key that is equal for users of the same one. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[Hashable, ModelT] = {}
        self._users: dict[Hashable, int] = {}

    def __repr__(self) -> str:
        return f"<LoadedModels {list(self._models.values())}>"

    def acquire(self, key: Hashable, load: Callable[[], ModelT]) -> ModelT:
        """Returns the model of a key to one more user, who must `release` it; `load` makes it for the first one."""
        with self._lock:
            if key not in self._models:
                self._models[key] = load()
            self._users[key] = self._users.get(key, 0) + 1
            return self._models[key]

    def release(self, model: ModelT) -> None:
        """Notes that a user has gone; when the last one goes, the model is closed."""
        with self._lock:
            key = next(key for key, known in self._models.items() if known is model)
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._models.pop(key).close()
