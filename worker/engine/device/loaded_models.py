"""Models in memory, each loaded once for all replicas of a process that use it."""

import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar


class LoadedModel(Protocol):
    """A model's weights and everything that belongs to them."""

    def close(self) -> None:
        """Frees its memory, once it has no users."""
        ...


ModelT = TypeVar("ModelT", bound=LoadedModel)


class _Shared(Generic[ModelT]):
    """A model that is loaded or being loaded, and the number of its users."""

    def __init__(self) -> None:
        self.loading: Future[ModelT] = Future()
        self.users = 0


class LoadedModels(Generic[ModelT]):
    """Counts the users of each model, by a key that is equal for users of the same model. Safe to use from any
    thread. Models are loaded and closed one at a time; nobody else waits for that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[Hashable, _Shared[ModelT]] = {}
        self._working = threading.Lock()
        self._unused: deque[ModelT] = deque()

    def __repr__(self) -> str:
        return f"<LoadedModels {list(self._models)}>"

    def acquire(self, key: Hashable, load: Callable[[], ModelT]) -> ModelT:
        """Returns the model of a key to one more user, who must `release` it; `load` makes it for the first one. What
        `load` raises is raised for all who waited for it."""
        with self._lock:
            is_first = key not in self._models
            shared = self._models.setdefault(key, _Shared())
            shared.users += 1
        if is_first:
            try:
                with self._working:
                    shared.loading.set_result(load())
            except BaseException as error:
                with self._lock:
                    del self._models[key]
                shared.loading.set_exception(error)
            self._close_unused()
        return shared.loading.result()

    def release(self, model: ModelT) -> None:
        """Notes that a user is gone; when the last one goes, the model is closed: at once, or else after the model
        that is being loaded, without waiting for it."""
        with self._lock:
            loaded = ((key, shared) for key, shared in self._models.items() if shared.loading.done())
            key, shared = next(one for one in loaded if one[1].loading.result() is model)
            shared.users -= 1
            if shared.users:
                return
            del self._models[key]
            self._unused.append(model)
        self._close_unused()

    def _close_unused(self) -> None:
        while self._unused and self._working.acquire(blocking=False):
            try:
                if self._unused:  # else another thread has closed it meanwhile
                    self._unused.popleft().close()
            finally:
                self._working.release()


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
