"""Rules of the fleet as it changes."""

from tokenbus.conformance.probing import field_types, schemas
from tokenbus.conformance.probing.assertions import Message, expect, shorten
from tokenbus.conformance.probing.probe import Probe

_DIGEST_WAIT_S = 8.0


async def fleet_routers(probe: Probe) -> None:
    """fleet without router_id is answered with a router's state and without workers."""
    answer = await _ask(probe)
    expect(answer["router"]["router_id"] == answer["router_id"], f"the router is {shorten(answer['router'])}")
    seen = {name: answer.get(name) for name in ("joined", "workers", "memory", "left") if answer.get(name)}
    expect(not seen, f"it has {shorten(seen)}")


async def fleet_digests(probe: Probe) -> None:
    """A router that is named sends a digest with all workers, and then numbered ones of what has changed."""
    subject = probe.names.fleet_for(probe.tenant)
    router_id = (await _ask(probe))["router_id"]
    exchange = await probe.send({"router_id": router_id}, subject=subject)
    await exchange.until(lambda: len(_seqs(exchange.messages)) > 1, "two digests", _DIGEST_WAIT_S)
    digests = exchange.messages
    first = digests[0]["seq"]
    expect(len({one["life"] for one in digests}) == 1, "the router's life changed")
    for digest in digests:
        field_types.check(digest, schemas.FLEET_DIGEST, "a digest")
        expect(digest.get("whole", False) == (digest["seq"] == first), "the first digest alone must be whole")
    for seq in _seqs(digests)[:-1]:
        parts = [(one.get("part", 0), one["parts"]) for one in digests if one["seq"] == seq]
        expect(parts == [(number, len(parts)) for number in range(len(parts))], f"the parts of a digest are {parts}")
    seqs = _seqs(digests)
    expect(seqs == list(range(first, first + len(seqs))), f"the digests have the numbers {seqs}")
    whole = [one for one in digests if one["seq"] == first]
    sheets = [sheet for one in whole for sheet in one.get("joined", [])]
    for sheet in sheets:
        field_types.check(sheet, schemas.WORKER_SHEET, "a worker")
    numbers = [row[0] for one in whole for row in one.get("workers", [])]
    expect(sorted(numbers) == sorted(sheet["number"] for sheet in sheets), f"the numbers are of {shorten(numbers)}")
    models = {sheet["model"] for sheet in sheets}
    expect(probe.target.model in models, f"the models of the workers are {shorten(sorted(models))}")


async def fleet_refused(probe: Probe) -> None:
    """A fleet request with a field of a wrong type is refused under the field's name."""
    for body, param in (({"router_id": 1}, "router_id"), ({"whole": "yes"}, "whole")):
        error = (await probe.call(probe.names.fleet_for(probe.tenant), body)).get("error") or {}
        seen = (error.get("code"), error.get("param"))
        expect(seen == ("invalid_request", param), f"{body} is answered with {shorten(error)}")


async def fleet_other_router(probe: Probe) -> None:
    """A fleet request that names a router which does not exist is not answered."""
    subject = probe.names.fleet_for(probe.tenant)
    expect(not await probe.is_answered(subject, {"router_id": "no such router"}), "another router answers")


async def _ask(probe: Probe) -> Message:
    answer = await probe.call(probe.names.fleet_for(probe.tenant))
    field_types.check(answer, {"router_id": field_types.NAME, "router": field_types.MAP}, "the answer")
    return answer


def _seqs(digests: list[Message]) -> list[int]:
    return list(dict.fromkeys(one["seq"] for one in digests))
