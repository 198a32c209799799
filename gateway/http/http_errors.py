"""Error responses, before a dialect gives them the body its clients expect."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from tokenbus.protocol.access.key_ring import KeyProblem, KeyRefusedError
from tokenbus.protocol.wire import codec, errors, messages


class ErrorResponse(NamedTuple):
    """The status, reason and headers of an HTTP error response."""

    status: int
    code: str
    """A code of the wire, or one of the gateway's own."""
    message: str
    param: str | None = None
    retryable: bool = False
    """Whether the same request may succeed later. SDKs retry automatically unless told not to."""
    retry_after_ms: float | None = None
    prompt_tokens: int | None = None
    """In `prompt_too_long`."""
    context_length: int | None = None
    """In `prompt_too_long`."""
    request_id: str | None = None
    """The id of the HTTP request, if it has one."""
    rate_limits: messages.RateLimits | None = None
    """The limits of the client, if one of them is the reason."""
    allow: str | None = None
    """The methods that the path has, if it lacks the one of the request."""

    @property
    def headers(self) -> dict[str, str]:
        headers = {"x-should-retry": "true" if self.retryable else "false"}
        if self.retry_after_ms is not None:
            headers["retry-after"] = str(math.ceil(self.retry_after_ms / 1e3))
            headers["retry-after-ms"] = str(math.ceil(self.retry_after_ms))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.allow is not None:
            headers["allow"] = self.allow
        return headers


ErrorT = TypeVar("ErrorT", errors.Error, ErrorResponse)
NameOf = Callable[[str], str]
"""Returns an API's name for a wire field."""
_END = re.compile(r"$|[.\[]")


class ApiError(Exception):
    """Ends an HTTP request with an error response."""

    def __init__(self, response: ErrorResponse) -> None:
        super().__init__(f"{response.code}: {response.message}")
        self.response = response


def from_error(error: errors.Error) -> ErrorResponse:
    """Returns the response for a wire error."""
    return ErrorResponse(
        errors.CODES[error.code].http,
        str(error.code),
        error.message,
        error.param,
        error.retryable,
        error.retry_after_ms,
        error.prompt_tokens,
        error.context_length,
        rate_limits=error.rate_limits,
    )


def renamed(error: ErrorT, name_of: NameOf) -> ErrorT:
    """Returns an error with an API's name for the field at fault, also at the beginning of its message."""
    if error.param is None:
        return error
    theirs = name_of(error.param)
    message, rest = error.message, error.message.removeprefix(error.param)
    if rest != message and not rest[:1].isalnum():  # "stop: ..." and no "stopwatches ..."
        message = theirs + rest
    if isinstance(error, ErrorResponse):
        return error._replace(param=theirs, message=message)
    return codec.replace(error, param=theirs, message=message)


@contextlib.contextmanager
def renaming(name_of: NameOf) -> Iterator[None]:
    """Gives a RequestError raised in the block an API's name for the field at fault."""
    try:
        yield
    except errors.RequestError as refused:
        raise errors.RequestError(renamed(refused.error, name_of)) from refused


def by_field(names: Mapping[str, str]) -> NameOf:
    """Returns a function that translates the path of a field, or of a part of one, into an API's. `names` has the paths
    that differ; of several that fit the longest counts."""
    longest_first = sorted(names, key=len, reverse=True)

    def name_of(param: str) -> str:
        known = next((one for one in longest_first if param.startswith(one) and _END.match(param, len(one))), "")
        return names[known] + param[len(known) :] if known else param

    return name_of


def from_terminal(chunk: messages.Chunk) -> ErrorResponse | None:
    """Returns the response for a failed stream, or None if the chunk is not a terminal, or is a successful one."""
    if chunk.finish_reason is messages.FinishReason.ERROR:
        return from_error(chunk.error or errors.make_error(errors.Code.INTERNAL))
    return CANCELLED if chunk.finish_reason is messages.FinishReason.CANCELLED else None


CANCELLED = ErrorResponse(499, "cancelled", "the request was cancelled")
"""Another client has cancelled the request (`tokenbus cancel`). SDKs don't retry a 499."""
INVALID_API_KEY = ErrorResponse(
    401, "invalid_api_key", "a valid API key is required: Authorization: Bearer KEY, x-api-key: KEY or api-key: KEY"
)
OVERLOADED = ErrorResponse(503, "overloaded", "this gateway has too many open requests", None, True, 1_000.0)
SHUTTING_DOWN = ErrorResponse(503, str(errors.Code.SHUTTING_DOWN), "this gateway is shutting down", None, True, 1_000.0)
VIEWER = ErrorResponse(403, "forbidden", "the role of this API key (viewer) lets it look on, and make no requests")
STORE_FAILED = ErrorResponse(503, "overloaded", "stored responses can't be reached at the moment", None, True, 1_000.0)
BODY_TIMEOUT = ErrorResponse(408, "request_timeout", "the body was not received in time", None, True)
TOO_MANY_LOGPROBS = ErrorResponse(
    413,
    str(errors.Code.PAYLOAD_TOO_LARGE),
    "the log probabilities are too many for a whole response: ask for a stream, or for fewer answers, tokens or "
    "alternatives",
)
TOO_MANY_PROMPT_TOKENS = ErrorResponse(
    413,
    str(errors.Code.PAYLOAD_TOO_LARGE),
    "return_token_ids: the prompts have too many tokens for one response: send fewer or shorter ones, or a smaller n",
    "return_token_ids",
)
UNSUPPORTED_MEDIA_TYPE = ErrorResponse(
    415, "unsupported_media_type", "the request must be sent with Content-Type: application/json"
)
BROKEN_COMPRESSION = ErrorResponse(
    400, str(errors.Code.INVALID_REQUEST), "the body is not the compressed data that its Content-Encoding names"
)
INTERNAL_ERROR = from_error(errors.make_error(errors.Code.INTERNAL))


def key_refused(error: KeyRefusedError) -> ErrorResponse:
    """Returns the response to a request whose key is refused."""
    match error.problem:
        case KeyProblem.UNAVAILABLE:
            return ErrorResponse(503, "keys_unavailable", str(error), None, True, 1_000.0)
        case KeyProblem.NOT_VALID_NOW:
            return INVALID_API_KEY._replace(message=str(error))
        case KeyProblem.INVALID:
            return INVALID_API_KEY


def strange_host(host: str) -> ErrorResponse:
    """Returns the response to a request to a name that may be a stranger's."""
    return ErrorResponse(
        403,
        "forbidden",
        f"without API keys, this gateway is used under localhost or its address: give it keys, or --allowed-origin "
        f"https://{host[:200]} if that name is yours",
    )


def too_large(limit_bytes: int) -> ErrorResponse:
    return ErrorResponse(413, str(errors.Code.PAYLOAD_TOO_LARGE), f"the body must have at most {limit_bytes} bytes")


def unsupported_encoding(encoding: str) -> ErrorResponse:
    return ErrorResponse(
        415,
        "unsupported_media_type",
        f"the body's Content-Encoding must be gzip, deflate or zstd, or none, got {encoding[:40]!r}",
    )


def unknown_path(status: int, method: str, path: str, allow: str | None = None) -> ErrorResponse:
    """Returns the response for a path that does not exist, or has only the methods `allow`."""
    return ErrorResponse(status, "unknown_url", f"unknown URL: {method} {path[:200]}", allow=allow)
