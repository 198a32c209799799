"""Models in memory, each only once for all replicas of a process that use it."""

import threading
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar


class Model(Protocol):
    """Weights and what belongs to them."""

    def close(self) -> None:
        """Gives its memory back. Nobody uses it any more."""
        ...


ModelT = TypeVar("ModelT", bound=Model)


class LoadedModels(Generic[ModelT]):
    """Models by what two users must have in common to share one. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[Hashable, ModelT] = {}
        self._users: dict[Hashable, int] = {}

    def __repr__(self) -> str:
        return f"<Models {list(self._models.values())}>"

    def acquire(self, key: Hashable, load: Callable[[], ModelT]) -> ModelT:
        """A model for one more user, who gives it back by `release`; `load` makes it for the first one."""
        with self._lock:
            if key not in self._models:
                self._models[key] = load()
            self._users[key] = self._users.get(key, 0) + 1
            return self._models[key]

    def release(self, model: ModelT) -> None:
        """One user less; the last one's going frees the memory."""
        with self._lock:
            key = next(key for key, known in self._models.items() if known is model)
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._models.pop(key).close()
