"""Rules of how requests went."""

import asyncio

from tokenbus.conformance.probing import field_types, schemas
from tokenbus.conformance.probing.assertions import Message, expect, shorten
from tokenbus.conformance.probing.probe import Probe

_TRIES = 20
_WAIT_S = 0.25
"""The time in which all routers answer."""


async def trace_of_a_request(probe: Probe) -> None:
    """A request that has ended is known to a router under its id, with its workers, tokens and times."""
    request_id = probe.new_id()
    exchange = await probe.short(3, id=request_id)
    terminal = exchange.messages[-1]
    trace = await _find(probe, request_id)
    field_types.check(trace, schemas.TRACE, "a trace")
    for attempt in trace.get("attempts", []):
        field_types.check(attempt, schemas.TRACE_ATTEMPT, "an attempt")
    workers = [one["worker_id"] for one in trace["attempts"] if one.get("accepted_ms") is not None]
    expect(workers[-1:] == [terminal["worker_id"]], f"its workers are {shorten(workers)}")
    usage = {name: terminal["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    seen = {name: trace.get(name, 0) for name in usage}
    expect(seen == usage, f"its tokens are {seen}, its usage {usage}")
    expect(trace["state"] == terminal["finish_reason"], f"its state is {trace['state']}")


async def trace_of_another_tenant(probe: Probe) -> None:
    """A trace request for an id that the tenant has not used finds nothing."""
    answer = await probe.call(probe.names.trace_for(probe.tenant), {"id": "no-such-request"})
    expect(not answer.get("requests") and not answer.get("error"), f"the answer is {shorten(answer)}")


async def trace_refused(probe: Probe) -> None:
    """A trace request with a wrong field is refused under the field's name."""
    for body, param in (({"id": 1}, "id"), ({"limit": 0}, "limit"), ({"failed": "yes"}, "failed")):
        error = (await probe.call(probe.names.trace_for(probe.tenant), body)).get("error") or {}
        seen = (error.get("code"), error.get("param"))
        expect(seen == ("invalid_request", param), f"{body} is answered with {shorten(error)}")


async def _find(probe: Probe, request_id: str) -> Message:
    """Returns the trace of a request that has ended; its router may hear of the end a little later than its client."""
    found: list[Message] = []
    for _ in range(_TRIES):
        exchange = await probe.send({"id": request_id}, subject=probe.names.trace_for(probe.tenant))
        await asyncio.sleep(_WAIT_S)
        found = [one for answer in exchange.messages for one in answer.get("requests", [])]
        if any(one["state"] not in ("waiting", "running") for one in found):
            break
    expect(len(found) == 1, f"the routers know it {len(found)} times")
    return found[0]
