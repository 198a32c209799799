"""Every error that the wire knows, and the exception that carries one."""

import enum
from typing import NamedTuple

import msgspec

from tokenbus.protocol.wire.rate_limits import RateLimits


class Code(enum.StrEnum):
    """The closed set of error codes; `CODES` says what each of them means."""

    INVALID_REQUEST = "invalid_request"
    PROMPT_TOO_LONG = "prompt_too_long"
    UNSUPPORTED = "unsupported"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    MODEL_NOT_FOUND = "model_not_found"
    DUPLICATE_REQUEST = "duplicate_request"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    REQUEST_CRASHES_ENGINE = "request_crashes_engine"
    OVERLOADED = "overloaded"
    NO_WORKER = "no_worker"
    INSUFFICIENT_MEMORY = "insufficient_memory"
    KEYS_UNAVAILABLE = "keys_unavailable"
    WORKER_LOST = "worker_lost"
    ENGINE_POISONED = "engine_poisoned"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    SHUTTING_DOWN = "shutting_down"
    UPLOAD_LOST = "upload_lost"
    INTERNAL = "internal"


class CodeInfo(NamedTuple):
    http: int
    """Status code with which an HTTP gateway answers."""
    retryable: bool
    """Whether the same request may succeed later, or elsewhere."""
    message: str
    """Default error text, where nothing more precise is known."""


CODES: dict[Code, CodeInfo] = {
    Code.INVALID_REQUEST: CodeInfo(400, False, "the request is malformed"),
    Code.PROMPT_TOO_LONG: CodeInfo(400, False, "the prompt and one more token do not fit the model's context"),
    Code.UNSUPPORTED: CodeInfo(400, False, "the model or its engine can't do what was asked"),
    Code.UNAUTHORIZED: CodeInfo(401, False, "the API key is not valid, or not any more"),
    Code.FORBIDDEN: CodeInfo(403, False, "the API key does not allow this"),
    Code.MODEL_NOT_FOUND: CodeInfo(404, False, "no worker has ever served this model"),
    Code.DUPLICATE_REQUEST: CodeInfo(409, False, "another request with this id is in flight"),
    Code.PAYLOAD_TOO_LARGE: CodeInfo(413, False, "the message is larger than the limit"),
    Code.REQUEST_CRASHES_ENGINE: CodeInfo(422, False, "the request has crashed two engines"),
    Code.OVERLOADED: CodeInfo(429, True, "all queues are full"),
    Code.NO_WORKER: CodeInfo(503, True, "no worker serves the model now"),
    Code.INSUFFICIENT_MEMORY: CodeInfo(503, True, "there is not enough memory for the request now"),
    Code.KEYS_UNAVAILABLE: CodeInfo(503, True, "API keys can't be checked at the moment"),
    Code.WORKER_LOST: CodeInfo(502, True, "the worker died and the stream can't continue"),
    Code.ENGINE_POISONED: CodeInfo(503, True, "the device failed and the engine is being restarted"),
    Code.DEADLINE_EXCEEDED: CodeInfo(504, False, "timeout_ms passed before the answer was complete"),
    Code.CANCELLED: CodeInfo(499, False, "the request was cancelled"),
    Code.SHUTTING_DOWN: CodeInfo(503, True, "the server was stopped before the request could start"),
    Code.UPLOAD_LOST: CodeInfo(503, True, "a part is missing, or came too late: send the whole message again"),
    Code.INTERNAL: CodeInfo(500, True, "a bug; the log has the details under the request's id"),
}


class Error(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as it is sent: in a terminal, in a reply to a router, in or an embeddings reply."""

    code: Code
    message: str
    retryable: bool
    param: str | None = None
    """Path of the field at fault, such as `messages[0].content`."""
    retry_after_ms: float | None = None
    prompt_tokens: int | None = None
    """In `prompt_too_long`: a lower bound of the prompt's tokens, if it and the limit are known."""
    rate_limits: RateLimits | None = None
    """In `overloaded`: what the client has left, if a limit of its own is the reason."""
    context_length: int | None = None
    """In `prompt_too_long`, with `prompt_tokens`: the maximum number of tokens of prompt and completion together."""


def as_text(message: str) -> str:
    """Returns a message in which the bytes of a file's name that are no text are escaped: else it could not be sent."""
    return message.encode(errors="backslashreplace").decode()


def make_error(
    code: Code, message: str | None = None, *, param: str | None = None, retry_after_ms: float | None = None
) -> Error:
    """Makes an error, with the code's default message unless a better one is given."""
    info = CODES[code]
    return Error(
        code=code,
        message=as_text(message or info.message),
        retryable=info.retryable,
        param=param,
        retry_after_ms=retry_after_ms,
    )


class RequestError(Exception):
    """Ends one request with `error`; nothing else is affected."""

    def __init__(self, error: Error) -> None:
        super().__init__(f"{error.code}: {error.message}")
        self.error = error


def request_error(code: Code, message: str | None = None, *, param: str | None = None) -> RequestError:
    """Makes the exception to raise where a request turns out to be wrong."""
    return RequestError(make_error(code, message, param=param))


def prompt_too_long(prompt_tokens: int, context_length: int, *, is_minimum: bool = False) -> RequestError:
    """Makes the exception for a prompt that leaves no room for a single token; `is_minimum`: it may have more."""
    count = f"at least {prompt_tokens}" if is_minimum else prompt_tokens
    problem = f"the prompt has {count} tokens; with one to generate it must fit {context_length}"
    error = make_error(Code.PROMPT_TOO_LONG, problem)
    return RequestError(msgspec.structs.replace(error, prompt_tokens=prompt_tokens, context_length=context_length))


def prompt_not_allowed(prompt_tokens: int, max_prompt_tokens: int) -> RequestError:
    """Makes the exception for a prompt that fits the context but is longer than its worker allows."""
    error = make_error(
        Code.PROMPT_TOO_LONG, f"the prompt has {prompt_tokens} tokens; at most {max_prompt_tokens} are allowed"
    )
    return RequestError(
        msgspec.structs.replace(error, prompt_tokens=prompt_tokens, context_length=max_prompt_tokens + 1)
    )


def invalid_field(param: str, problem: str) -> RequestError:
    """Makes the exception for a field whose value is not allowed; `problem` says what is wrong or what is allowed."""
    return request_error(Code.INVALID_REQUEST, f"{param}: {problem}", param=param)


def unsupported_field(param: str, problem: str) -> RequestError:
    """Makes the exception for a field that is valid but not served; `problem` says what is served instead, or why."""
    return request_error(Code.UNSUPPORTED, f"{param}: {problem}", param=param)
