"""Usage over HTTP: `GET /v1/usage` in our own form, and OpenAI's `/v1/organization/usage`."""

import base64
import binascii
import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from tokenbus.gateway.admission.callers import Caller
from tokenbus.gateway.http.http_errors import ApiError, ErrorResponse
from tokenbus.gateway.serving.dialect import RefusedPath, Report
from tokenbus.protocol.access import usage
from tokenbus.protocol.access.keys import Role
from tokenbus.protocol.access.usage import Dimension, UsageQuery, UsageRow
from tokenbus.protocol.access.usage_store import UsageReport, UsageStore
from tokenbus.protocol.bus.bucket import BucketError, BucketMissingError
from tokenbus.protocol.wire import errors, subjects

Query = Mapping[str, Sequence[str]]
"""The parameters of a query, each with all its values."""

_DEFAULT_DAYS = "7d"
_DEFAULT_GROUPS = "day,model"
_MAX_ROWS = 10_000
_DEFAULT_ROWS = 1_000
_NO_KEY = "-"
_JSON, _CSV = "application/json", "text/csv; charset=utf-8"
_NOT_KEPT = ErrorResponse(404, "usage_not_kept", "no router of this fleet keeps usage: start them with --usage")
_NO_ROOM = "the broker needs JetStream, and room for it on its disk (max_file_store)"
_UNREACHABLE = ErrorResponse(503, "usage_unavailable", "usage can't be read at the moment", None, True, 1_000.0)
_MAX_BUCKETS, _DEFAULT_BUCKETS = 31, 7
_DAY_S = 86_400
_MAX_TIME = 253_402_214_400
"""The last day of the year 9999."""
_encoder = msgspec.json.Encoder()


class UsageItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The usage of one group."""

    day: str | UnsetType = UNSET
    tenant: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    """Empty for requests without a key."""
    model: str | UnsetType = UNSET
    adapter: str | UnsetType = UNSET
    operation: str | UnsetType = UNSET
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    total_tokens: int
    errors: dict[str, int]


class UsagePage(msgspec.Struct, kw_only=True, omit_defaults=True, rename={"first": "from", "last": "to"}):
    """One page of groups, in order, and the sum of all pages."""

    object: str
    first: str
    last: str
    group_by: list[str]
    data: list[UsageItem]
    total: UsageItem
    has_more: bool
    next: str | UnsetType = UNSET
    """The value of `after` for the next page, if there is one."""


class OrganizationUsage(msgspec.Struct, kw_only=True):
    object: str
    input_tokens: int
    output_tokens: int
    input_cached_tokens: int
    num_model_requests: int
    project_id: str | None = None
    """The tenant."""
    user_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    batch: bool | None = None


class OrganizationBucket(msgspec.Struct, kw_only=True):
    object: str = "bucket"
    start_time: int
    end_time: int
    results: list[OrganizationUsage]


class OrganizationPage(msgspec.Struct, kw_only=True):
    object: str = "page"
    data: list[OrganizationBucket]
    has_more: bool
    next_page: str | None


class Scope(NamedTuple):
    """Whose usage a request is answered with; None: everyone's."""

    tenant: str | None
    key: str | None


def scope_of(caller: Caller, tenant: str | None, key: str | None) -> Scope:
    """Returns whose usage a caller sees who asks for a tenant's or a key's. Raises RequestError(forbidden)."""
    if caller.is_operator:
        return Scope(tenant, key)
    if tenant not in (None, caller.tenant):
        raise errors.request_error(
            errors.Code.FORBIDDEN, "only operators see the usage of other tenants", param="tenant"
        )
    if caller.key_id and caller.role is Role.USER:
        if key not in (None, caller.key_id):
            raise errors.request_error(errors.Code.FORBIDDEN, "this API key does not see other keys", param="key")
        key = caller.key_id
    return Scope(caller.tenant, key)


def not_kept(problem: str | None) -> ErrorResponse:
    """Returns the response where there is no usage, by what routers say of it; None if none answers."""
    return _UNREACHABLE._replace(message=f"routers can't save usage ({problem}): {_NO_ROOM}") if problem else _NOT_KEPT


async def _answer(store: UsageStore, caller: Caller, query: Query, accept: str, now: float) -> tuple[bytes, str]:
    today = usage.day_at(now)
    first = _parsed(query, "from", lambda text: usage.parse_day(text, today), _DEFAULT_DAYS)
    last = _parsed(query, "to", lambda text: usage.parse_day(text, today), "today")
    group_by = _parsed(query, "group_by", usage.parse_group_by, _DEFAULT_GROUPS, separator=",")
    limit = _parsed(query, "limit", lambda text: _whole(text, _MAX_ROWS), str(_DEFAULT_ROWS))
    form = _parsed(query, "format", _form, "csv" if "text/csv" in accept.lower() else "json")
    after = _parsed(query, "after", _decode_cursor, "")
    try:
        usage.check_days(first, last)
    except ValueError as error:
        raise errors.invalid_field("from", str(error)) from error
    asked = UsageQuery(first, last, group_by, *_scope(caller, query), model=_name(query, "model"))
    report = await _read(store, asked)
    rows = [row for row in report.rows if after is None or row.group > after]
    shown, has_more = rows[:limit], len(rows) > limit
    if form == "csv":
        return "".join(usage.csv_lines(group_by, shown)).encode(), _CSV
    page = UsagePage(
        object="list",
        first=first,
        last=last,
        group_by=list(group_by),
        data=[_item(group_by, row) for row in shown],
        total=_item((), UsageRow((), usage.total_of(report.rows))),
        has_more=has_more,
        next=_encode_cursor(shown[-1].group) if has_more else UNSET,
    )
    return _encoder.encode(page), _JSON


def _scope(caller: Caller, query: Query) -> Scope:
    key = _name(query, "key")
    return scope_of(caller, _name(query, "tenant"), "" if key == _NO_KEY else key)


async def _read(store: UsageStore, asked: UsageQuery) -> UsageReport:
    try:
        return await store.report(asked)
    except usage.TooManyRowsError as error:
        raise errors.invalid_field("group_by", str(error)) from error
    except BucketMissingError:
        raise
    except BucketError as error:
        raise ApiError(_UNREACHABLE) from error


def _item(group_by: tuple[Dimension, ...], row: UsageRow) -> UsageItem:
    counts = row.counts
    names: dict[str, Any] = {name: usage.shown(name, value) for name, value in zip(group_by, row.group, strict=True)}
    return UsageItem(
        **names,
        requests=counts.requests,
        prompt_tokens=counts.prompt_tokens,
        cached_tokens=counts.cached_tokens,
        completion_tokens=counts.completion_tokens,
        total_tokens=counts.total_tokens,
        errors=counts.errors,
    )


_GROUPS: dict[str, Dimension] = {"project_id": "tenant", "api_key_id": "key", "model": "model"}
"""OpenAI's names of what is kept."""


def _organization(operation: str, result: str) -> Any:
    """Returns the function that answers in OpenAI's form for one kind of requests."""

    async def answer(store: UsageStore, caller: Caller, query: Query, accept: str, now: float) -> tuple[bytes, str]:
        start = _parsed(query, "start_time", lambda text: _whole(text, _MAX_TIME), "")
        if start is None:
            raise errors.invalid_field("start_time", "is missing: the first moment, in Unix seconds")
        end = _parsed(query, "end_time", lambda text: _whole(text, _MAX_TIME), str(int(now)))
        limit = _parsed(query, "limit", lambda text: _whole(text, _MAX_BUCKETS), str(_DEFAULT_BUCKETS))
        page = _parsed(query, "page", lambda text: _whole(text, _MAX_TIME), "")
        _parsed(query, "bucket_width", _only_days, "1d")
        for name in ("user_ids", "batch"):
            if _values(query, name):
                raise errors.unsupported_field(name, "is not kept")
        groups = _parsed(query, "group_by", _openai_groups, "", separator=",") or ()
        scope = scope_of(caller, _one(query, "project_ids"), _one(query, "api_key_ids"))
        days = list(_days(max(start, page or 0), end, limit + 1))
        shown, has_more = days[:limit], len(days) > limit
        buckets = []
        if shown:
            dimensions: tuple[Dimension, ...] = ("day", *groups)
            asked = UsageQuery(
                shown[0], shown[-1], dimensions, *scope, model=_one(query, "models"), operation=operation
            )
            found = (await _read(store, asked)).rows
            buckets = [_bucket(day, [row for row in found if row.group[0] == day], groups, result) for day in shown]
        told = OrganizationPage(
            data=buckets, has_more=has_more, next_page=str(_start_of(days[limit])) if has_more else None
        )
        return _encoder.encode(told), _JSON

    return answer


def _days(start: int, end: int, at_most: int) -> Iterator[str]:
    """Yields the days from one Unix time until before another."""
    at = start - start % _DAY_S
    while at < end and at_most:
        yield usage.day_at(at)
        at, at_most = at + _DAY_S, at_most - 1


def _start_of(day: str) -> int:
    midnight = datetime.datetime.combine(usage.to_day(day), datetime.time(), datetime.UTC)
    return int(midnight.timestamp())


def _bucket(day: str, rows: list[UsageRow], groups: tuple[Dimension, ...], result: str) -> OrganizationBucket:
    start = _start_of(day)
    to_openai = {ours: name for name, ours in _GROUPS.items()}
    results = []
    for row in rows:
        names: dict[str, Any] = {
            to_openai[ours]: usage.shown(ours, value) for ours, value in zip(groups, row.group[1:], strict=True)
        }
        results.append(
            OrganizationUsage(
                object=f"organization.usage.{result}.result",
                input_tokens=row.counts.prompt_tokens,
                output_tokens=row.counts.completion_tokens,
                input_cached_tokens=row.counts.cached_tokens,
                num_model_requests=row.counts.requests,
                **names,
            )
        )
    return OrganizationBucket(start_time=start, end_time=start + _DAY_S, results=results)


def _openai_groups(text: str) -> tuple[Dimension, ...]:
    names = [one for one in text.split(",") if one]
    if any(one not in _GROUPS for one in names):
        raise ValueError(f"must be some of {', '.join(_GROUPS)}, got {text[:100]!r}")
    return tuple(ours for name, ours in _GROUPS.items() if name in names)


def _only_days(text: str) -> str:
    if text != "1d":
        raise ValueError(f"must be 1d, since usage is kept by day, got {text[:20]!r}")
    return text


def _form(text: str) -> str:
    if text not in ("json", "csv"):
        raise ValueError(f"must be json or csv, got {text[:20]!r}")
    return text


def _whole(text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and 1 <= int(text) <= most):
        raise ValueError(f"must be a whole number from 1 to {most:,}, got {text[:50]!r}")
    return int(text)


def _values(query: Query, name: str) -> Sequence[str]:
    """Returns the values of a parameter; several may have brackets after its name, as in OpenAI's library."""
    return [*query.get(name, ()), *query.get(f"{name}[]", ())]


def _one(query: Query, name: str) -> str | None:
    values = [one for text in _values(query, name) for one in text.split(",") if one]
    if len(values) > 1:
        raise errors.invalid_field(name, "may name one only: ask for each, or group by it")
    return _checked(name, values[0]) if values else None


def _name(query: Query, name: str) -> str | None:
    values = _values(query, name)
    return _checked(name, values[-1]) if values else None


def _checked(name: str, text: str) -> str:
    try:
        subjects.encode_name(text)
    except ValueError as error:
        raise errors.invalid_field(name, str(error)) from error
    return text


def _parsed(query: Query, name: str, parse: Any, default: str, separator: str = "") -> Any:
    """Returns a parameter's parsed value, or that of the default; None if both are empty. Raises RequestError."""
    values = _values(query, name)
    text = (separator.join(values) if separator else values[-1]) if values else default
    if not text and not (separator and values):
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise errors.invalid_field(name, str(error)) from error


def _encode_cursor(group: tuple[str, ...]) -> str:
    return base64.urlsafe_b64encode(_encoder.encode(group)).decode()


def _decode_cursor(text: str) -> tuple[str, ...]:
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(text), type=tuple[str, ...])
    except (binascii.Error, ValueError) as error:
        raise ValueError("must be the `next` of an earlier page") from error


_TEXT = dict.fromkeys(("from", "to", "group_by", "tenant", "key", "model", "after", "format"), str)
_OPENAI = {"start_time": int, "end_time": int, "bucket_width": str, "limit": int, "page": str} | dict.fromkeys(
    ("group_by", "project_ids", "api_key_ids", "models"), list[str]
)
REPORTS = (
    Report("/v1/usage", "What was used, by day, key, model", UsagePage, _answer, {**_TEXT, "limit": int}),
    Report(
        "/v1/organization/usage/completions",
        "What generations used, in OpenAI's form",
        OrganizationPage,
        _organization("generate", "completions"),
        _OPENAI,
    ),
    Report(
        "/v1/organization/usage/embeddings",
        "What embeddings used, in OpenAI's form",
        OrganizationPage,
        _organization("embed", "embeddings"),
        _OPENAI,
    ),
)
_NOT_USED = "nothing of this kind is used here: there are /v1/usage and /v1/organization/usage/completions"
REFUSED = (
    *(
        RefusedPath(f"/v1/organization/usage/{kind}", ("GET",), _NOT_USED)
        for kind in ("images", "audio_speeches", "audio_transcriptions", "moderations", "vector_stores")
    ),
    RefusedPath("/v1/organization/costs", ("GET",), "there are no prices: /v1/usage has the tokens"),
)
