"""Decides whether a request's API key allows it. The broker has bound the key's id to the client's connection, so only
the id is looked up, never a secret."""

from collections.abc import Iterable

from tokenbus.protocol.access.key_ring import KeyProblem, KeyRefusedError, KeyRing
from tokenbus.protocol.access.keys import KeyLimits, KeyRecord, Role
from tokenbus.protocol.wire import codec, errors, messages
from tokenbus.router.access.limits import NO_LIMITS

_CODES = {
    KeyProblem.INVALID: errors.Code.UNAUTHORIZED,
    KeyProblem.NOT_VALID_NOW: errors.Code.UNAUTHORIZED,
    KeyProblem.UNAVAILABLE: errors.Code.KEYS_UNAVAILABLE,
}
_RETRY_MS = 1_000.0
_MAX_SHOWN = 8


class KeyChecks:
    """The checks of one router, whose ring somebody else keeps up to date."""

    def __init__(self, ring: KeyRing) -> None:
        self._ring = ring

    def __repr__(self) -> str:
        return f"<KeyChecks {self._ring!r}>"

    def limits_of(self, key_id: str) -> KeyLimits:
        """Returns the limits of a key; none for one that was removed."""
        record = self._ring.get(key_id)
        return NO_LIMITS if record is None else record.limits

    def find(self, tenant: str, key_id: str, now: float, clock: float) -> KeyRecord:
        """Returns the record of a tenant's key; `now` is Unix time, `clock` monotonic. Raises
        RequestError(unauthorized) for a key that is unknown, not valid now or another tenant's, and
        RequestError(keys_unavailable) if its store is silent."""
        try:
            record = self._ring.find_by_id(key_id, now, clock)
        except KeyRefusedError as refused:
            code = _CODES[refused.problem]
            retry_ms = _RETRY_MS if errors.CODES[code].retryable else None
            raise errors.RequestError(errors.make_error(code, str(refused), retry_after_ms=retry_ms)) from refused
        if record.tenant != tenant:
            raise errors.request_error(errors.Code.UNAUTHORIZED, "the API key is that of another tenant")
        return record


def check_model(record: KeyRecord, model: str, adapters: Iterable[str] = ()) -> None:
    """Raises RequestError(forbidden) if the key may not be used for a model with these adapters. A key for a model is
    one for its adapters too; one for `<model>:<adapter>` allows the model with that adapter only."""
    if record.role is Role.VIEWER:
        raise errors.request_error(errors.Code.FORBIDDEN, f"the API key {record.id} is a viewer's: it may ask nothing")
    if record.allows_model(model):
        return
    named = [f"{model}:{adapter}" for adapter in adapters]
    if not named or not all(map(record.allows_model, named)):
        allowed = ", ".join(record.models[:_MAX_SHOWN]) + (", ..." if len(record.models) > _MAX_SHOWN else "")
        problem = f"the API key {record.id} does not allow {', '.join(named) or model}; it allows {allowed}"
        raise errors.request_error(errors.Code.FORBIDDEN, problem, param="model")


def bounded(record: KeyRecord, request: messages.GenerateRequest) -> messages.GenerateRequest:
    """Returns a request within its key's largest `max_tokens`. Raises RequestError if it asks for more, or for a
    priority that the key does not allow."""
    if (request.priority or 0) < record.max_priority:  # lower is served sooner
        problem = f"priority: the API key {record.id} allows {record.max_priority} and above, got {request.priority}"
        raise errors.request_error(errors.Code.FORBIDDEN, problem, param="priority")
    most = record.limits.max_tokens
    if not most:
        return request
    if request.max_tokens is None:
        return codec.replace(request, max_tokens=most)
    if request.max_tokens > most:
        raise errors.invalid_field(
            "max_tokens", f"the API key {record.id} allows at most {most}, got {request.max_tokens}"
        )
    return request
