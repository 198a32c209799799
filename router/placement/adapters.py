"""The LoRA adapters that a model's workers have for a tenant, by name and by digest."""

from collections import Counter
from collections.abc import Iterable, Sequence

from tokenbus.protocol.wire import errors, messages
from tokenbus.protocol.wire.block_hash import Adapter

_MAX_SHOWN_CHARS = 128


def visible(card: messages.Card, tenant: str) -> dict[str, str]:
    """Returns the digests of a worker's adapters that a tenant may use, by name."""
    return {one.name: one.digest for one in card.adapters if one.tenants is None or tenant in one.tenants}


def resolve(cards: Iterable[messages.Card], lora: Sequence[messages.Lora], tenant: str) -> tuple[Adapter, ...]:
    """Returns the adapters that a request names, as most of the model's workers have them.

    Raises RequestError(model_not_found) for a name that no worker has for this tenant, even if one has it for another,
    and RequestError(unsupported) if no worker supports adapters."""
    names = [one.name for one in lora]
    found: Counter[tuple[str, ...]] = Counter()
    known: set[str] = set()
    is_served = False
    for card in cards:
        is_served = is_served or "lora" in card.features
        digests = visible(card, tenant)
        known |= digests.keys()
        if digests.keys() >= set(names):
            found[tuple(digests[name] for name in names)] += 1
    if not found:
        raise _not_found(names, known, is_served=is_served)
    # The smallest of equals, so that all routers make the same choice.
    digests_of_most = min(found, key=lambda digests: (-found[digests], digests))
    return combined(zip(digests_of_most, (one.scale for one in lora), strict=True))


def combined(adapters: Iterable[tuple[str, float]]) -> tuple[Adapter, ...]:
    """Returns digests with scales in canonical form, so that requests with the same effect compare equal: sorted, with
    the scales of equal weights added up and scales of zero left out."""
    scales: dict[str, float] = {}
    for digest, scale in adapters:
        scales[digest] = scales.get(digest, 0.0) + scale
    return tuple(Adapter(digest, scale) for digest, scale in sorted(scales.items()) if scale)


def has_all(card: messages.Card, adapters: Iterable[Adapter], tenant: str) -> bool:
    """Whether a worker has these adapters for a tenant."""
    if not card.adapters:
        return not any(True for _ in adapters)
    digests = set(visible(card, tenant).values())
    return all(one.digest in digests for one in adapters)


def _not_found(names: Sequence[str], known: set[str], *, is_served: bool) -> errors.RequestError:
    if not is_served:
        return errors.request_error(errors.Code.UNSUPPORTED, "lora is not served by this model's engine", param="lora")
    index = next((index for index, name in enumerate(names) if name not in known), None)
    if index is None:
        return errors.request_error(errors.Code.NO_WORKER, "no worker has all of these adapters", param="lora")
    shown = names[index][:_MAX_SHOWN_CHARS]
    return errors.request_error(
        errors.Code.MODEL_NOT_FOUND, f"no worker has an adapter {shown!r} of this model", param=f"lora[{index}].name"
    )
