"""The known workers, their incarnations, and the models they serve (decision 0039).

A worker is named by its model and its id. When it restarts it returns with a later epoch: a new incarnation, which
replaces the earlier one. An earlier epoch is believed only once the known incarnation has been silent long enough to be
lost. A card that is implausible, or contradicts the model's other workers, is refused, and so are its events."""

from collections.abc import Iterator

from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import codec, limits, messages
from tokenbus.protocol.wire.subjects import WorkerAddress, epoch_sort_key
from tokenbus.router.placement.hash_scheme import HashScheme
from tokenbus.router.placement.model_workers import ModelWorkers
from tokenbus.router.placement.placement import Capacity, PlacementOptions
from tokenbus.router.workers.request_owners import RequestOwners
from tokenbus.router.workers.updates import FleetUpdate
from tokenbus.router.workers.worker import SETTLE_S, Worker, incarnation_key

MAX_WORKERS = 4_096
"""Workers and model names that are kept: bounds a router's memory whatever is published."""
_REFUSAL_TTL_S = 30.0
"""A refused card is rechecked after this time: the workers that it contradicts may be gone."""
_MIN_VALUES = {
    "context_length": 1,
    "max_num_seqs": 0,
    "max_num_batched_tokens": 0,
    "kv_block_size": 1,
    "total_kv_blocks": 0,
    "host_kv_blocks": 0,
    "kv_token_bytes": 0,
}
"""The numbers in a card that placement uses, each with its minimum."""
_MAX_VALUE = 2**31 - 1
_MAX_CARD_BYTES = 65_536
"""A typical card has one or two thousand. A router keeps all cards and shows them in its reply to `models`."""


class WorkerRegistry:
    """The workers of all models, with lookups."""

    def __init__(self, began_at: float, expected_models: tuple[str, ...] = ()) -> None:
        """`expected_models` count as known before any worker has served them."""
        self._began_at = began_at
        self._workers: dict[WorkerAddress, Worker] = {}
        self._models: dict[str, ModelWorkers] = {}
        """The workers of each model that has any."""
        self._unserved = ModelWorkers()
        """Stands in for every other model."""
        self._known_models: dict[str, None] = dict.fromkeys(expected_models)
        """Models served by some worker since `began_at`, in order of their first card."""
        self._owners = RequestOwners()
        self._refused: TTLCache[messages.RefusedCard] = TTLCache(_REFUSAL_TTL_S, MAX_WORKERS)
        """Refused cards by incarnation."""
        self._superseded: TTLCache[Worker] = TTLCache(SETTLE_S, MAX_WORKERS)
        """Incarnations recently replaced by a later one: their last messages may still be in transit."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self._workers)} workers, {len(self._known_models)} known models>"

    def apply_card(self, card: messages.Card, now: float) -> FleetUpdate:
        """Applies a card, which announces a new worker, a new incarnation of a known one, or a change."""
        self._known_models[card.model] = None
        if len(self._known_models) > MAX_WORKERS:  # evicts the one added first
            del self._known_models[next(iter(self._known_models))]
        known, current = self._workers.get(card.address), self._current(card)
        if card.state is messages.WorkerState.STOPPED:
            if current is not None:
                self._remove(current)
            return FleetUpdate(left=current is not None)
        if known is not None and current is None and not _is_superseded(known, card.epoch, now):
            return FleetUpdate()
        if refusal := _implausibility(card) or self._model(card.model).incompatibility(card):
            key = incarnation_key(card.address, card.epoch)
            is_new = self._refused.get(key, now) is None  # logged once, though workers repeat their cards
            refused = messages.RefusedCard(worker_id=card.worker_id, model=card.model, reason=refusal)
            self._refused.put(key, refused, now)
            return FleetUpdate(refused=refusal if is_new else None)
        if current is not None:  # a card is not a sign of life: only events are
            current.card, current.state = card, card.state
            self._model(card.model).update_card(current)
            return FleetUpdate()
        if known is None:
            if len(self._workers) < MAX_WORKERS:
                self._add(Worker(card, now))
            return FleetUpdate()
        self._remove(known)
        known.supersede(card, now)
        self._superseded.put(known.incarnation, known, now)
        self._add(Worker(card, now))
        return FleetUpdate(lost=known)

    def find(self, address: WorkerAddress) -> Worker | None:
        return self._workers.get(address)

    def models(self) -> Iterator[tuple[str, list[Worker]]]:
        """Yields each served model with its workers, by name."""
        for model in sorted(self._models):
            yield model, list(self._models[model].workers)

    def workers_of(self, model: str) -> list[Worker]:
        """Returns all workers of the model, in any state."""
        return list(self._model(model).workers)

    def sample_workers(self, model: str, now: float) -> list[Worker]:
        """Returns a few workers of the model, eligible ones if any."""
        return self._model(model).sample(now)

    def eligible_workers(self, model: str, now: float) -> list[Worker]:
        """Returns the workers of the model that may be given a request now."""
        return self._model(model).eligible(now)

    def is_served(self, model: str) -> bool:
        """Whether some worker has the model loaded."""
        return any(worker.has_loaded for worker in self._model(model).workers)

    def loaders_of(self, model: str) -> list[Worker]:
        """Returns the workers that can load the model, those already doing so first. The order is the same for all
        routers, and differs between models."""
        return sorted((one for one in self._model(model).workers if one.is_loadable), key=lambda one: one.load_order)

    def capacity(self, model: str, now: float, options: PlacementOptions | None = None) -> Capacity:
        """Returns whether the model's workers that `options` allow can start another request now."""
        return self._model(model).capacity(now, options)

    def hash_scheme_of(self, model: str) -> HashScheme | None:
        """Returns the hash scheme of the model's KV blocks; None if no worker has any."""
        return self._model(model).hash_scheme

    def num_blocks(self, model: str) -> int:
        """Returns the number of blocks in the model's prefix index."""
        return self._model(model).num_blocks

    def transfer_mb_per_s(self, model: str) -> float:
        """Returns how fast blocks move between the model's workers."""
        return self._model(model).transfer_mb_per_s

    def max_context_length(self, model: str) -> int:
        """Returns the tokens of the longest sequence that one of the model's workers can hold."""
        return self._model(model).max_context_length

    def known_models(self) -> Iterator[str]:
        """Yields each model served by some worker since the router started."""
        return iter(self._known_models)

    def unserved(self, now: float) -> list[str] | None:
        """Returns the known models that no worker serves now; None if the router has not been up long enough to
        know."""
        if not self._is_old_enough(now):
            return None
        return [model for model in self._known_models if model not in self._models]

    def is_unknown(self, model: str, now: float) -> bool:
        """Whether no worker has ever served the model, as far as a router that has been up long enough knows."""
        return model not in self._known_models and self._is_old_enough(now)

    def owner_of(self, key: str, model: str) -> Worker | None:
        """Returns the model's worker that reports running a request, whichever router placed it there."""
        return self._owners.find(model, key)

    def blocks_of(self, worker: Worker) -> set[int]:
        """Returns the hashes of all blocks that a worker is known to hold; slow, since it scans the whole index."""
        return self._model(worker.card.model).blocks_of(worker)

    def check_integrity(self) -> None:
        assert len(self._workers) <= MAX_WORKERS
        assert all(address == worker.card.address for address, worker in self._workers.items())
        assert len(self._known_models) <= MAX_WORKERS
        by_model = {worker.card.address for model in self._models.values() for worker in model.workers}
        assert by_model == self._workers.keys()
        assert not self._unserved.workers
        for model in self._models.values():
            assert model.workers
            model.check_integrity()
        self._owners.check_integrity(self._workers)

    def _add(self, worker: Worker) -> None:
        self._workers[worker.card.address] = worker
        self._models.setdefault(worker.card.model, ModelWorkers()).add_worker(worker)

    def _remove(self, worker: Worker) -> None:
        del self._workers[worker.card.address]
        self._owners.remove_worker(worker)
        model = self._models[worker.card.model]
        model.remove_worker(worker)
        if not model.workers:
            del self._models[worker.card.model]

    def _model(self, model: str) -> ModelWorkers:
        return self._models.get(model, self._unserved)

    def _current(self, card: messages.Card) -> Worker | None:
        """Returns the worker described by a card, if its incarnation is the current one."""
        worker = self._workers.get(card.address)
        return worker if worker is not None and worker.card.epoch == card.epoch else None

    def _is_old_enough(self, now: float) -> bool:
        """Whether every worker has had time to announce its model."""
        return now - self._began_at > limits.MODEL_NOT_FOUND_AFTER_S


def _is_superseded(known: Worker, epoch: str, now: float) -> bool:
    """Whether an incarnation with that epoch replaces a known one: a later one does, an earlier one only if the known
    one has been silent long enough to be lost."""
    if epoch_sort_key(epoch) > epoch_sort_key(known.card.epoch):
        return True
    return now - known.last_seen_at >= limits.WORKER_LOST_AFTER_S


def _implausibility(card: messages.Card) -> str | None:
    """Returns why a card is implausible regardless of the model's other workers, or None if it is plausible."""
    if (size := len(codec.encode(card))) > _MAX_CARD_BYTES:
        return f"it has {size} bytes, more than {_MAX_CARD_BYTES}"
    for name, least in _MIN_VALUES.items():
        number = getattr(card, name)
        if number is not None and not least <= number <= _MAX_VALUE:
            return f"its {name} is {number}; it must be {least} to {_MAX_VALUE}"
    return None
