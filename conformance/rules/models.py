"""Rules of models, embeddings, ranked documents, tokens and the separation of tenants."""

import asyncio

from tokenbus.conformance.probing import field_types, schemas, stream_checks
from tokenbus.conformance.probing.assertions import Message, expect, shorten
from tokenbus.conformance.probing.probe import PROMPT, Probe, short_request
from tokenbus.protocol.wire.subjects import DEFAULT_TENANT, encode_name

_OTHER_TENANT = "wire-check.é"
"""A tenant whose name must be escaped in subjects."""


async def models(probe: Probe) -> None:
    """The models reply has each model's fields, its workers' cards with their load, and the limits."""
    check_models(await probe.call(probe.names.models_for(probe.tenant)))


async def models_pages(probe: Probe) -> None:
    """Pages of models have each worker of the whole reply once, and the first page counts them."""
    subject = probe.names.models_for(probe.tenant)
    listed: list[object] = []
    asked: dict[str, object] = {"limit": 1}
    while True:
        page = await probe.call(subject, asked)
        check_models(page)
        cards = [card for served in page["models"] for card in served.get("workers") or []]
        expect(len(cards) <= 1, f"a page of one worker has {len(cards)}")
        listed += [(card["model"], card["worker_id"]) for card in cards]
        if asked == {"limit": 1}:
            count = (page.get("summary") or {}).get("workers")
        if page.get("next") is None:
            break
        asked = {"limit": 1, "after": page["next"]}
    expect(len(set(listed)) == len(listed) == count, f"{len(listed)} workers on pages, {count} counted")


async def models_refused(probe: Probe) -> None:
    """A page that is not allowed is refused under the name of its field."""
    subject = probe.names.models_for(probe.tenant)
    other = encode_name(f"{probe.target.model}-other")
    for body, param in (
        ({"limit": -1}, "limit"),
        ({"limit": "1"}, "limit"),
        ({"model": 1}, "model"),
        ({"model": probe.target.model, "after": f"{other}.w"}, "after"),
        ({"after": "*"}, "after"),
    ):
        error = (await probe.call(subject, body)).get("error") or {}
        seen = (error.get("code"), error.get("param"))
        expect(seen == ("invalid_request", param), f"{body} is answered with {shorten(error)}")


async def models_limit(probe: Probe) -> None:
    """max_request_bytes does not exceed the broker's own limit."""
    most = probe.target.max_request_bytes
    expect(most <= probe.link.max_payload, f"{most} is more than the broker's {probe.link.max_payload}")


async def models_of_tenant(probe: Probe) -> None:
    """models is answered with and without a tenant in its subject."""
    for tenant in (_OTHER_TENANT, DEFAULT_TENANT):
        check_models(await probe.call(probe.names.models_for(tenant), {}))


async def unknown_key(probe: Probe) -> None:
    """A request with the id of an unknown key is refused, or no router listens where keys are named."""
    for subject_of, body in (
        (probe.names.generate, short_request(1)),
        (probe.names.tokenize, {"prompt": PROMPT}),
    ):
        subject = subject_of(probe.target.model, probe.tenant, "wire-check")
        if await probe.is_answered(subject, body, 0.2):
            code = ((await probe.call(subject, body)).get("error") or {}).get("code")
            expect(code in ("unauthorized", "keys_unavailable"), f"an unknown key is answered with {code}")


async def tenants_isolated(probe: Probe) -> None:
    """Two tenants may use the same id at the same time."""
    mine = await probe.live()
    theirs = await probe.ask(short_request(8, id=mine.request_id), tenant=_OTHER_TENANT)
    error = theirs.messages[-1].get("error")
    expect(error is None, f"the second tenant's request is refused: {error}")
    expect(not mine.is_ended, "the end of one tenant's request ended the other's")


async def tenants_cancels(probe: Probe) -> None:
    """A tenant's cancel and resync do not affect another tenant's request."""
    mine = await probe.live()
    request_id = str(mine.request_id)
    for subject in (probe.cancel_subject(request_id, _OTHER_TENANT), probe.resync_subject(request_id, _OTHER_TENANT)):
        expect(not await probe.is_answered(subject, {"offset": 0}, 0.3), f"something answers {subject}")
    expect(not mine.is_ended, "another tenant's cancel ended the request")
    await probe.cancel(mine)
    stream_checks.check_numbers(mine.messages)


async def default_tenant(probe: Probe) -> None:
    """A subject without a tenant stands for the tenant default."""
    mine = await probe.live(tenant=DEFAULT_TENANT)
    body = short_request(4, id=mine.request_id)
    twin = await probe.send(body, subject=f"{probe.names.generate(probe.target.model)}.{DEFAULT_TENANT}")
    await twin.terminal()
    stream_checks.check_refusal(twin.messages, "duplicate_request")


async def cache_hints(probe: Probe) -> None:
    """A cache hint is answered with {id, model}, whether or not the session is known."""
    session_id = probe.new_id()
    await probe.short(1, session_id=session_id)
    for tenant in (probe.tenant, _OTHER_TENANT):
        for ttl_ms in (60_000, 0):
            body = {"id": session_id, "session_id": session_id, "cache_control": {"ttl_ms": ttl_ms}}
            reply = await probe.call(probe.names.cache(probe.target.model, tenant), body)
            expect(
                reply == {"id": session_id, "model": probe.target.model}, f"a hint is answered with {shorten(reply)}"
            )


async def cache_hint_invalid(probe: Probe) -> None:
    """A malformed cache hint is answered with {id, error}, which names the field."""
    subject = probe.names.cache(probe.target.model, probe.tenant)
    for body, param in (
        ({"cache_control": {}}, "session_id"),
        ({"session_id": "x"}, "cache_control"),
        ({"session_id": "x", "cache_control": {"ttl_ms": -1}}, "cache_control.ttl_ms"),
    ):
        reply = await probe.call(subject, {"id": "hint", **body})
        error = reply.get("error") or {}
        seen = (reply.get("id"), error.get("code"), error.get("param"))
        expect(seen == ("hint", "invalid_request", param), f"{body} is answered with {shorten(reply)}")


async def embed(probe: Probe) -> None:
    """embed is answered once, with embeddings or an error, under the request's id."""
    request_id = probe.new_id()
    subject = probe.names.embed(probe.target.model, probe.tenant)
    exchange = await probe.send({"id": request_id, "input": ["one", "two"]}, subject=subject)
    await exchange.first("a reply")
    await asyncio.sleep(0.2)
    expect(len(exchange.messages) == 1, f"{len(exchange.messages)} replies")
    check_embeddings(exchange.messages[0], request_id, 2)


async def embed_invalid(probe: Probe) -> None:
    """A malformed embed is answered with {id, error}."""
    reply = await probe.call(probe.names.embed(probe.target.model, probe.tenant), b"not a message")
    stream_checks.check_error(reply.get("error"))
    expect(isinstance(reply.get("id"), str), f"the id is {shorten(reply.get('id'))}")


async def embed_cancelled(probe: Probe) -> None:
    """A cancel that is answered ends its embed with the error cancelled; one that arrives too late is not answered."""
    request_id = probe.new_id()
    subject = probe.names.embed(probe.target.model, probe.tenant)
    exchange = await probe.send({"id": request_id, "input": ["one"] * 16}, subject=subject)
    is_answered = await probe.is_answered(probe.cancel_subject(request_id))
    await exchange.first("a reply")
    expect(len(exchange.messages) == 1, f"{len(exchange.messages)} replies")
    code = (exchange.messages[0].get("error") or {}).get("code")
    expect(
        is_answered == (code == "cancelled"), f"the cancel is answered: {is_answered}, and the embed ends with {code}"
    )


async def tokenize(probe: Probe) -> None:
    """tokenize is answered once, with the prompt's tokens, their number and the context, under the request's id."""
    request_id = probe.new_id()
    reply = await _only_reply(probe, probe.names.tokenize(probe.target.model, probe.tenant), request_id, prompt=PROMPT)
    check_tokens(reply, request_id)


async def tokenize_count(probe: Probe) -> None:
    """tokenize with only_count has the number of tokens without their ids."""
    subject = probe.names.tokenize(probe.target.model, probe.tenant)
    reply = await probe.call(subject, {"prompt": PROMPT, "only_count": True})
    whole = await probe.call(subject, {"prompt": PROMPT})
    expect("token_ids" not in reply, f"token_ids is {shorten(reply.get('token_ids'))}")
    expect(reply.get("count") == whole.get("count"), f"the count is {shorten(reply.get('count'))}")


async def tokenize_prompt(probe: Probe) -> None:
    """tokenize counts the tokens of the prompt that generate makes of the same text."""
    reply = await probe.call(probe.names.tokenize(probe.target.model, probe.tenant), {"prompt": PROMPT})
    exchange = await probe.short(1)
    used = (exchange.messages[-1].get("usage") or {}).get("prompt_tokens")
    expect(reply.get("count") == used, f"the count is {shorten(reply.get('count'))}, and {used} were used")


async def detokenize(probe: Probe) -> None:
    """detokenize is answered once, with the text of the tokens, under the request's id."""
    subject = probe.names.tokenize(probe.target.model, probe.tenant)
    found = await probe.call(subject, {"prompt": PROMPT, "add_special_tokens": False})
    request_id, subject = probe.new_id(), probe.names.detokenize(probe.target.model, probe.tenant)
    reply = await _only_reply(probe, subject, request_id, token_ids=found.get("token_ids"))
    check_text(reply, request_id, PROMPT)


async def tokenize_invalid(probe: Probe) -> None:
    """A malformed tokenize or detokenize is answered with {id, error}."""
    model, tenant = probe.target.model, probe.tenant
    for subject in (probe.names.tokenize(model, tenant), probe.names.detokenize(model, tenant)):
        reply = await probe.call(subject, b"not a message")
        stream_checks.check_error(reply.get("error"))
        expect(isinstance(reply.get("id"), str), f"the id is {shorten(reply.get('id'))}")


async def _only_reply(probe: Probe, subject: str, request_id: str, **fields: object) -> Message:
    exchange = await probe.send({"id": request_id, **fields}, subject=subject)
    await exchange.first("a reply")
    await asyncio.sleep(0.2)
    expect(len(exchange.messages) == 1, f"{len(exchange.messages)} replies")
    return exchange.messages[0]


def check_tokens(reply: Message, request_id: str) -> None:
    """Checks every field that the reply to a tokenize request may have."""
    field_types.check(reply, schemas.TOKENS, "the reply")
    expect(reply["id"] == request_id, f"the id is {shorten(reply['id'])}")
    expect(len(reply["token_ids"]) == reply["count"], f"{len(reply['token_ids'])} ids, and the count {reply['count']}")


def check_text(reply: Message, request_id: str, text: str) -> None:
    """Checks the reply to a detokenize request. Some tokenizers put a space before the first word."""
    field_types.check(reply, {"id": field_types.NAME, "model": field_types.NAME, "text": field_types.TEXT}, "the reply")
    expect(reply["id"] == request_id, f"the id is {shorten(reply['id'])}")
    expect(reply["text"].strip() == text, f"the text is {shorten(reply['text'])}")


async def rerank(probe: Probe) -> None:
    """rerank is answered once, with results or an error, under the request's id."""
    request_id = probe.new_id()
    subject = probe.names.rerank(probe.target.model, probe.tenant)
    body = {"id": request_id, "query": "one", "documents": ["one", "two"], "top_n": 1}
    exchange = await probe.send(body, subject=subject)
    await exchange.first("a reply")
    await asyncio.sleep(0.2)
    expect(len(exchange.messages) == 1, f"{len(exchange.messages)} replies")
    check_ranks(exchange.messages[0], request_id, num_documents=2, count=1)


async def rerank_invalid(probe: Probe) -> None:
    """A malformed rerank is answered with {id, error}."""
    reply = await probe.call(probe.names.rerank(probe.target.model, probe.tenant), b"not a message")
    stream_checks.check_error(reply.get("error"))
    expect(isinstance(reply.get("id"), str), f"the id is {shorten(reply.get('id'))}")


def check_models(reply: Message) -> None:
    """Checks the whole reply. Cards may be missing from a truncated one."""
    field_types.check(reply, {"models": field_types.list_of(field_types.MAP)}, "the reply")
    field_types.check(reply.get("limits"), schemas.LIMITS, "limits")
    for served in reply["models"]:
        field_types.check(served, schemas.SERVED, "a model")
        cards = served.get("workers")
        expect(isinstance(cards, list) or reply.get("truncated") is True, f"workers is {shorten(cards)}")
        for card in cards or []:
            field_types.check(card, schemas.CARD, "a card")
            field_types.check(card.get("load"), schemas.LOAD, "a card's load")
            can_embed = "embed" in card["features"]
            expect(
                can_embed or "embeddings" not in card, f"{card['worker_id']} has embeddings without the feature embed"
            )
            expect(card["model"] == served["model"], f"a card of model {card['model']} under {served['model']}")
            is_loadable = card.get("loadable") or served.get("loadable")
            expect(not is_loadable or card["state"] != "ready", f"{card['worker_id']} is both loadable and ready")


def check_embeddings(reply: Message, request_id: str, count: int) -> None:
    expect(reply.get("id") == request_id, f"the id is {shorten(reply.get('id'))}")
    if reply.get("error") is not None:
        stream_checks.check_error(reply["error"])
        return
    rows = reply.get("embeddings")
    expect(field_types.list_of(field_types.list_of(field_types.NUMBER)).holds(rows), f"embeddings is {shorten(rows)}")
    assert isinstance(rows, list)
    expect(len(rows) == count, f"{len(rows)} embeddings for {count} inputs")
    field_types.check(reply, {"model": field_types.NAME, "usage": field_types.MAP}, "the reply")


def check_ranks(reply: Message, request_id: str, *, num_documents: int, count: int) -> None:
    expect(reply.get("id") == request_id, f"the id is {shorten(reply.get('id'))}")
    if reply.get("error") is not None:
        stream_checks.check_error(reply["error"])
        return
    results = reply.get("results")
    expect(field_types.list_of(field_types.MAP).holds(results), f"results is {shorten(results)}")
    assert isinstance(results, list)
    expect(len(results) == count, f"{len(results)} results, {count} were asked for")
    for result in results:
        field_types.check(result, {"index": field_types.COUNT, "relevance_score": field_types.NUMBER}, "a result")
    places, scores = [one["index"] for one in results], [one["relevance_score"] for one in results]
    expect(len({*places}) == count and max(places) < num_documents, f"the indices are {places}")
    expect(scores == sorted(scores, reverse=True), f"the scores are {scores}")
    field_types.check(reply, {"model": field_types.NAME, "usage": field_types.MAP}, "the reply")
