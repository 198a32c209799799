"""Stored responses: their records, the conversations that continue them, and the endpoints that show and delete them.

A response has two records, both compressed JSON: `resp_TOKEN`, the response, and `input_TOKEN`, the items of the whole
conversation before it. So a conversation continues while its latest response is stored, whatever became of earlier
ones (docs/decisions/0071-stored-responses.md). The ids of a response's items contain its token, by which references to
them are found."""

import functools
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from tokenbus.gateway.http.body import LargeBodyParser
from tokenbus.gateway.http.http_errors import ApiError, ErrorResponse
from tokenbus.gateway.openai.responses.body import InputItem, PlacedItem, ResponsesBody
from tokenbus.gateway.openai.responses.output import Response
from tokenbus.gateway.serving.dialect import RecordResource, RefusedPath, RequestHead, UnreadRecordsError
from tokenbus.gateway.storage.records import TenantRecords
from tokenbus.protocol.wire import errors

NOT_STORED = "nothing is stored here: send the whole conversation as input, with store: false"
_MAX_EXPANDED_BYTES = 64 * 1024 * 1024
"""A limit for the items that a small request may refer to."""
_MAX_CONVERSATION_BYTES = 16 * 1024 * 1024
"""A limit for the items that are stored with one response, before they are compressed: repetitions take a thousandth of
their size, and have to be read again."""
_MAX_REFERENCES = 1_024
"""The most different records that a request may refer to."""
_FAST = 1
"""zlib's level: a conversation of 600 KB takes 10 ms."""
_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{48}")
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{48})_(in)?[0-9]+")
_PREFIXES = {
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "function_call_output": "fco",
    "custom_tool_call_output": "ctco",
}
_MAX_LISTED = 100
_encoder = msgspec.json.Encoder()
_items_decoder = msgspec.json.Decoder(list[InputItem])


class _Said(msgspec.Struct, frozen=True):
    """The output items of a response, as input of the next."""

    output: list[InputItem]


_said_decoder = msgspec.json.Decoder(_Said)


def whole_conversation(body: ResponsesBody, head: RequestHead) -> list[PlacedItem]:
    """Returns the items of the whole conversation: those of the response that it continues, and its own, with what they
    refer to.

    Raises UnreadRecordsError if records are needed that are not in `head.earlier`, ApiError if the response to continue
    is not stored, and RequestError for an item that is not."""
    previous, own = body.previous_response_id, body.placed
    if not head.max_record_bytes:
        if previous is not None:
            raise errors.unsupported_field("previous_response_id", NOT_STORED)
        return own  # a reference is refused as an item
    needed = {name for item, _ in own if _is_reference(item) and (name := _record_with(item.id)) is not None}
    if previous is not None and _RESPONSE_ID.fullmatch(previous):
        needed |= {previous, _input_name(previous)}
    if len(needed) > _MAX_REFERENCES:
        raise errors.invalid_field("input", f"must refer to at most {_MAX_REFERENCES} responses, got {len(needed)}")
    if unread := needed - head.earlier.keys():
        raise UnreadRecordsError(frozenset(unread))
    source = _Source(head.earlier)
    earlier = [] if previous is None else source.conversation(previous)
    return [PlacedItem(item, "previous_response_id") for item in earlier] + [source.resolved(one) for one in own]


class _Source:
    """The records that a request refers to."""

    def __init__(self, records: Mapping[str, bytes | None]) -> None:
        self._records = records
        self._items: dict[str, list[InputItem]] = {}
        self._ids: dict[str, dict[str | None, InputItem]] = {}
        self._num_bytes = 0

    def conversation(self, response_id: str) -> list[InputItem]:
        """Returns the items up to the end of a response."""
        given, said = self._items_of(_input_name(response_id)), self._items_of(response_id)
        if given is None or said is None:
            problem = f"no response {response_id[:100]!r} is stored, or no longer: send the whole conversation as input"
            code, param = "previous_response_not_found", "previous_response_id"
            raise ApiError(ErrorResponse(400, code, f"{param}: {problem}", param))
        return given + said

    def resolved(self, place: PlacedItem) -> PlacedItem:
        """Returns the item that a reference means, or any other item itself."""
        item, path = place
        if not _is_reference(item):
            return place
        found = self._by_id(_record_with(item.id) or "").get(item.id)
        if found is None:
            raise errors.invalid_field(f"{path}.id", "names no stored item, or no longer: send the item itself")
        self._count(len(_encoder.encode(found)))
        return PlacedItem(found, path)

    def _by_id(self, name: str) -> dict[str | None, InputItem]:
        """Returns the items in a record by their ids; of several with the same one the first."""
        if name not in self._ids:
            self._ids[name] = {one.id: one for one in reversed(self._items_of(name) or [])}
        return self._ids[name]

    def _items_of(self, name: str) -> list[InputItem] | None:
        """Returns the items in a record, or None if it is not stored."""
        packed = self._records.get(name)
        if packed is None:
            return None
        if name not in self._items:
            plain = _expanded(packed)
            self._count(len(plain))
            is_response = _RESPONSE_ID.fullmatch(name)
            self._items[name] = _said_decoder.decode(plain).output if is_response else _items_decoder.decode(plain)
        return self._items[name]

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > _MAX_EXPANDED_BYTES:
            raise errors.invalid_field("input", f"refers to more than {_MAX_EXPANDED_BYTES} bytes of stored items")


def input_record(
    body: ResponsesBody, head: RequestHead, conversation: Sequence[PlacedItem], token: str
) -> bytes | None:
    """Returns the record of a response's input, or None if the response is not to be stored.

    Raises RequestError if `store: true` asks for what can't be stored. If nothing is asked, it is just not stored, and
    the response says so."""
    if body.store is False:
        return None
    if not head.max_record_bytes:
        if body.store:
            raise errors.unsupported_field("store", NOT_STORED)
        return None
    plain = _encoder.encode([_identified(item, token, number) for number, (item, _) in enumerate(conversation)])
    size, most = len(plain), _MAX_CONVERSATION_BYTES
    if size <= most:
        packed = zlib.compress(plain, _FAST)
        size, most = len(packed), head.max_record_bytes
        if size <= most:
            return packed
    if body.store:
        problem = f"the conversation takes {size} bytes, and at most {most} can be stored: send store: false"
        raise errors.invalid_field("store", problem)
    return None


def records_of(response_id: str, response: bytes, given: bytes) -> dict[str, bytes]:
    """Returns the records of a response: of its input, and of itself."""
    return {_input_name(response_id): given, response_id: zlib.compress(response, _FAST)}


def _identified(item: InputItem, token: str, number: int) -> InputItem:
    if item.id is not None:
        return item
    prefix = _PREFIXES.get(item.type or "message", "msg")
    return msgspec.structs.replace(item, id=f"{prefix}_{token}_in{number}")


def _is_reference(item: InputItem) -> bool:
    return item.type == "item_reference" or (item.type is None and item.role is None)


def _record_with(item_id: str | None) -> str | None:
    """Returns the name of the record that has an item, or None for an id that is not one of ours."""
    found = _ITEM_ID.fullmatch(item_id or "")
    return None if found is None else f"{'input' if found[2] else 'resp'}_{found[1]}"


def _input_name(response_id: str) -> str:
    return f"input_{response_id.removeprefix('resp_')}"


def _expanded(packed: bytes) -> bytes:
    return zlib.decompressobj().decompress(packed, _MAX_EXPANDED_BYTES)


class DeletedResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "response"
    deleted: bool = True


class InputItemList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of the items of a response's input."""

    object: str = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


async def _show(records: TenantRecords, response_id: str, query: Mapping[str, str], parser: LargeBodyParser) -> bytes:
    if query.get("stream", "false") != "false":
        raise errors.unsupported_field("stream", "a stored response is returned whole")
    if "starting_after" in query:
        raise errors.unsupported_field("starting_after", "a stored response is returned whole")
    packed = await _read(records, response_id, response_id)
    return await parser.parse(functools.partial(_expanded, packed), len(packed), expands=True)


async def _delete(records: TenantRecords, response_id: str, query: Mapping[str, str], parser: LargeBodyParser) -> bytes:
    await _read(records, response_id, response_id)
    await records.delete(response_id, _input_name(response_id))
    return _encoder.encode(DeletedResponse(id=response_id))


async def _list_items(
    records: TenantRecords, response_id: str, query: Mapping[str, str], parser: LargeBodyParser
) -> bytes:
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    if not re.fullmatch("[0-9]{1,9}", limit) or not 1 <= int(limit) <= _MAX_LISTED:
        raise errors.invalid_field("limit", f"must be 1 to {_MAX_LISTED}, got {limit[:20]!r}")
    if order not in ("asc", "desc"):
        raise errors.invalid_field("order", f"must be asc or desc, got {order[:20]!r}")
    packed = await _read(records, response_id, _input_name(response_id))
    page = functools.partial(_page_of, packed, int(limit), order, query.get("after"))
    return await parser.parse(page, len(packed), expands=True)


def _page_of(packed: bytes, limit: int, order: str, after: str | None) -> bytes:
    """Returns some of the items in a record. Raises ApiError if `after` is none of them."""
    items = _items_decoder.decode(_expanded(packed))
    items = items if order == "asc" else items[::-1]
    start = 0
    if after is not None:
        start = next((number for number, item in enumerate(items, 1) if item.id == after), 0)
        if not start:
            problem = f"after: no item {after[:100]!r} is in this response's input"
            raise ApiError(ErrorResponse(404, "item_not_found", problem, "after"))
    shown = items[start : start + limit]
    page = InputItemList(
        data=[_shown(item) for item in shown],
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
        has_more=start + len(shown) < len(items),
    )
    return _encoder.encode(page)


async def _read(records: TenantRecords, response_id: str, name: str) -> bytes:
    """Returns a record of a response. Raises ApiError if it is not stored."""
    found = await records.read(name) if _RESPONSE_ID.fullmatch(response_id) else None
    if found is None:
        problem = f"no response {response_id[:100]!r} is stored, or no longer"
        raise ApiError(ErrorResponse(404, "response_not_found", problem, "response_id"))
    return found


def _shown(item: InputItem) -> dict[str, Any]:
    """Returns an item of the input in the form that clients expect: with parts for texts, and a status."""
    fields: dict[str, Any] = {"type": "message", "status": "completed"} | msgspec.to_builtins(item)
    content = fields.get("content")
    if isinstance(content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        fields["content"] = content = [{"type": kind, "text": content}]
    for part in content or ():
        if part["type"] == "output_text":
            part["annotations"] = []
    if fields["type"] == "reasoning":
        fields.setdefault("summary", [])
    return fields


_NO_BACKGROUND = "background responses are not served: a response ends with its request, and closing it cancels it"
RESOURCES = (
    RecordResource("GET", "/v1/responses/{id}", "A stored response", Response, _show),
    RecordResource("DELETE", "/v1/responses/{id}", "Deletes a stored response", DeletedResponse, _delete),
    RecordResource(
        "GET",
        "/v1/responses/{id}/input_items",
        "The items of a stored response's input, those before it in the conversation included",
        InputItemList,
        _list_items,
        {"limit": Annotated[int, msgspec.Meta(ge=1, le=_MAX_LISTED)], "order": Literal["asc", "desc"], "after": str},
    ),
)
REFUSED = (
    RefusedPath("/v1/responses/{id}/cancel", ("POST",), _NO_BACKGROUND),
    RefusedPath(
        "/v1/responses/compact", ("POST",), "there is no compaction: send fewer items, or a summary of your own"
    ),
    RefusedPath(
        "/v1/responses", ("GET",), "responses are neither listed nor served over WebSockets: send a POST request"
    ),
)
