"""Models in memory, each loaded once for all replicas of a process that use it."""

import threading
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar


class LoadedModel(Protocol):
    """A model's weights and everything that belongs to them."""

    def close(self) -> None:
        """Frees its memory, once it has no users."""
        ...


ModelT = TypeVar("ModelT", bound=LoadedModel)


class LoadedModels(Generic[ModelT]):
    """Counts the users of each model, by a key that is equal for users of the same model. Safe to use from any
    thread."""

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
        """Notes that a user is gone; when the last one goes, the model is closed."""
        with self._lock:
            key = next(key for key, known in self._models.items() if known is model)
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._models.pop(key).close()


class ReplicaModels(Generic[ModelT]):
    """The models that one replica uses, with the number of times that it has loaded each.

    `load` may be called from any thread, everything else only from the thread that steps. `shared` holds the models of
    all replicas."""

    def __init__(self, shared: LoadedModels[ModelT]) -> None:
        self._shared = shared
        self._lock = threading.Lock()
        self._loaded: dict[str, list[ModelT]] = {}
        """Each model as many times as it was loaded."""

    def __repr__(self) -> str:
        return f"<ReplicaModels {sorted(self._loaded)}>"

    def __contains__(self, key: str) -> bool:
        return key in self._loaded

    def __getitem__(self, key: str) -> ModelT:
        return self._loaded[key][0]

    def load(self, key: str, load: Callable[[], ModelT]) -> None:
        """Loads a model once more; `load` makes it if no replica has it."""
        model = self._shared.acquire(key, load)
        with self._lock:
            self._loaded.setdefault(key, []).append(model)

    def is_last(self, key: str) -> bool:
        """Whether the next `unload` of a model leaves none."""
        return len(self._loaded[key]) == 1

    def unload(self, key: str) -> None:
        """Reverses one `load`."""
        with self._lock:
            times = self._loaded[key]
            model = times.pop()
            if not times:
                del self._loaded[key]
        self._shared.release(model)

    def close(self) -> None:
        """Reverses every `load`."""
        for key in [key for key, times in self._loaded.items() for _ in times]:
            self.unload(key)
