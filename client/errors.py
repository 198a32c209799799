"""The exceptions of the client library, by the error codes of the wire.

```
TokenbusError
├── InvalidRequestError (ValueError)      the request is wrong and stays wrong
│   └── PromptTooLongError
├── ModelNotFoundError (LookupError)      no worker has ever served the model
├── OverloadedError                       try again after `retry_after` seconds
├── UnavailableError                      nothing can serve it now: try again
│   └── BrokerUnreachableError (ConnectionError)
├── RequestLostError                      the answer can't be continued
├── DeadlineExceededError (TimeoutError)
├── RequestCancelledError                 by someone else
└── ServerFailureError                    a bug, or a request that crashes engines
```
"""

from typing import Any

from tokenbus.client.answer import TokenUsage
from tokenbus.protocol.wire import errors
from tokenbus.protocol.wire.errors import Code


class TokenbusError(errors.RequestError):
    """A request has failed. `str(error)` is its code and its message."""

    def __init__(self, error: errors.Error, partial: str = "", usage: TokenUsage | None = None) -> None:
        super().__init__(error)
        self.partial = partial
        """The text that had arrived before."""
        self.usage = usage
        """Tokens of the request until then, if they are known."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.error, self.partial, self.usage)

    @property
    def code(self) -> Code:
        """The error's code, such as `overloaded`; docs/wire.md has all of them."""
        return self.error.code

    @property
    def message(self) -> str:
        """A sentence that says what is wrong, and what is allowed."""
        return self.error.message

    @property
    def param(self) -> str | None:
        """Path of the field at fault, such as `messages[0].content`, if it is one."""
        return self.error.param

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return self.error.retryable

    @property
    def retry_after(self) -> float | None:
        """Seconds after which to try again, if the server has said so."""
        return None if self.error.retry_after_ms is None else self.error.retry_after_ms / 1e3


class InvalidRequestError(TokenbusError, ValueError):
    """The request is wrong, or asks for what the model can't do; `param` names the field."""


class PromptTooLongError(InvalidRequestError):
    """The prompt leaves no room for an answer in the model's context."""

    @property
    def prompt_tokens(self) -> int | None:
        """At least how many tokens the prompt has, if known."""
        return self.error.prompt_tokens

    @property
    def context_length(self) -> int | None:
        """The most tokens that prompt and answer may have together, if known."""
        return self.error.context_length


class ModelNotFoundError(TokenbusError, LookupError):
    """No worker has ever served the model, or the adapter."""


class AccessDeniedError(TokenbusError, PermissionError):
    """The API key is not valid, or does not allow what was asked."""


class OverloadedError(TokenbusError):
    """All queues are full, or the tenant has used up its share: try again after `retry_after` seconds."""


class UnavailableError(TokenbusError):
    """Nothing can serve the request now: no router or worker runs, or it has no memory for it. Try again later."""


class BrokerUnreachableError(UnavailableError, ConnectionError):
    """The NATS broker does not answer, or does not accept this client."""


class RequestLostError(TokenbusError):
    """The request's worker is lost and no other can continue the answer, which ends with `partial`."""


class DeadlineExceededError(TokenbusError, TimeoutError):
    """The request's `timeout_ms` has passed."""


class RequestCancelledError(TokenbusError):
    """The request was cancelled by someone else, or its client was closed."""


class ServerFailureError(TokenbusError):
    """The system has a bug, which its log has under the request's id, or the request has crashed two engines."""


CODE_TO_ERROR: dict[Code, type[TokenbusError]] = {
    Code.INVALID_REQUEST: InvalidRequestError,
    Code.PROMPT_TOO_LONG: PromptTooLongError,
    Code.UNSUPPORTED: InvalidRequestError,
    Code.DUPLICATE_REQUEST: InvalidRequestError,
    Code.PAYLOAD_TOO_LARGE: InvalidRequestError,
    Code.MODEL_NOT_FOUND: ModelNotFoundError,
    Code.UNAUTHORIZED: AccessDeniedError,
    Code.FORBIDDEN: AccessDeniedError,
    Code.OVERLOADED: OverloadedError,
    Code.NO_WORKER: UnavailableError,
    Code.INSUFFICIENT_MEMORY: UnavailableError,
    Code.KEYS_UNAVAILABLE: UnavailableError,
    Code.ENGINE_POISONED: UnavailableError,
    Code.SHUTTING_DOWN: UnavailableError,
    Code.WORKER_LOST: RequestLostError,
    Code.UPLOAD_LOST: RequestLostError,
    Code.DEADLINE_EXCEEDED: DeadlineExceededError,
    Code.CANCELLED: RequestCancelledError,
    Code.REQUEST_CRASHES_ENGINE: ServerFailureError,
    Code.INTERNAL: ServerFailureError,
}
"""The class of the exception for each of the wire's codes."""


def exception_of(error: errors.Error, partial: str = "", usage: TokenUsage | None = None) -> TokenbusError:
    """Makes the exception for an error of the wire."""
    return CODE_TO_ERROR[error.code](error, partial, usage)


def broker_unreachable(problem: str) -> BrokerUnreachableError:
    """Makes the exception for a broker to which no connection can be made."""
    return BrokerUnreachableError(errors.make_error(Code.NO_WORKER, problem))


def invalid(param: str, problem: str) -> InvalidRequestError:
    """Makes the exception for an argument that is wrong."""
    return InvalidRequestError(errors.invalid_field(param, problem).error)


def cancelled(problem: str) -> RequestCancelledError:
    """Makes the exception for a request that its reader has not cancelled itself."""
    return RequestCancelledError(errors.make_error(Code.CANCELLED, problem))
