"""Models that are shared by replicas are loaded once, closed once, and nobody waits for another's load."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.engine.device.loaded_models import LoadedModels, ReplicaModels


class Model:
    """Weights that a test watches."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        assert not self.closed.is_set()
        self.closed.set()


class SlowLoad:
    """A load that lasts until the test ends it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self._error = error

    def __call__(self) -> Model:
        self.has_begun.set()
        assert self.may_end.wait(10)
        if self._error is not None:
            raise self._error
        return Model()


def test_a_model_is_loaded_for_its_first_user_and_closed_with_its_last() -> None:
    models = LoadedModels[Model]()
    first = models.acquire("a", Model)
    assert models.acquire("a", Model) is first
    models.release(first)
    assert not first.closed.is_set()
    models.release(first)
    assert first.closed.is_set()
    assert models.acquire("a", Model) is not first


def test_giving_a_model_up_does_not_wait_for_anothers_load_which_closes_it() -> None:
    models = LoadedModels[Model]()
    adapters, load = ReplicaModels(models), SlowLoad()
    adapters.load("a", Model)
    model = adapters["a"]
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(models.acquire, "b", load)
        assert load.has_begun.wait(10)
        adapters.unload("a")  # would wait for ever
        assert not model.closed.is_set(), "a library loads and frees one at a time"
        load.may_end.set()
        assert not loading.result(10).closed.is_set()
    assert model.closed.is_set()


def test_users_of_a_loaded_model_do_not_wait_for_anothers_load() -> None:
    models, load = LoadedModels[Model](), SlowLoad()
    model = models.acquire("a", Model)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(models.acquire, "b", load)
        assert load.has_begun.wait(10)
        assert models.acquire("a", load) is model
        load.may_end.set()
        loading.result(10)


def test_who_waited_for_a_load_that_fails_is_told_why_and_the_next_user_loads_again() -> None:
    models, load = LoadedModels[Model](), SlowLoad(ModelError("no such file"))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(models.acquire, "a", load)
        assert load.has_begun.wait(10)
        second = pool.submit(models.acquire, "a", load)
        load.may_end.set()
        for waiting in (first, second):
            with pytest.raises(ModelError, match="no such file"):
                waiting.result(10)
    models.release(models.acquire("a", Model))
