"""Any number of inputs is embedded, a few in each request."""

import pytest

from tokenbus.client.wire import embedding
from tokenbus.protocol.wire import errors, messages

AT_ONCE = embedding.INPUTS_AT_ONCE


class Client:
    """Makes of each input its own text, and refuses the text `bad`."""

    def __init__(self) -> None:
        self.asked: list[messages.EmbedRequest] = []
        self.num_open = self.most_open = 0

    async def embed(self, model: str, request: messages.EmbedRequest) -> messages.EmbedReply:
        self.asked.append(request)
        inputs = [request.input] if isinstance(request.input, str) else request.input or []
        if "bad" in inputs:
            raise errors.invalid_field(f"input[{inputs.index('bad')}]", "is bad")
        usage = messages.Usage(
            prompt_tokens=len(inputs), completion_tokens=0, total_tokens=len(inputs), cached_tokens=0
        )
        return messages.EmbedReply(
            id=request.id or "", model=model, embeddings=[str(one) for one in inputs], usage=usage
        )

    async def rerank(self, model: str, request: messages.RerankRequest) -> messages.RerankReply:
        (document,) = request.documents or []
        if document == "bad":
            raise errors.invalid_field("documents[0]", "is bad")
        ranked = [messages.RankedDocument(index=0, relevance_score=float(document))]
        return messages.RerankReply(id=request.id or "", model=model, results=ranked)


async def ask(client: Client, count: int, bad: int | None = None) -> messages.EmbedReply:
    inputs: list[str | list[int]] = ["bad" if number == bad else str(number) for number in range(count)]
    request = messages.EmbedRequest(id="r", input=inputs, dimensions=3)
    return await embedding.embed(client, "m", request)  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "num_requests"), [(1, 1), (AT_ONCE, 1), (AT_ONCE + 1, 2), (5 * AT_ONCE, 5)])
async def test_rows_come_in_the_order_of_the_inputs_and_tokens_are_added(count: int, num_requests: int) -> None:
    client = Client()
    reply = await ask(client, count)
    assert reply.embeddings == [str(number) for number in range(count)]
    assert reply.usage
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == count
    assert len({one.id for one in client.asked}) == len(client.asked) == num_requests
    assert {one.dimensions for one in client.asked} == {3}


@pytest.mark.parametrize("bad", [0, AT_ONCE - 1, AT_ONCE, 2 * AT_ONCE + 3])
async def test_an_error_names_the_input_by_its_place_among_all(bad: int) -> None:
    with pytest.raises(errors.RequestError) as refused:
        await ask(Client(), 3 * AT_ONCE, bad)
    assert refused.value.error.param == f"input[{bad}]"
    assert refused.value.error.message == f"input[{bad}]: is bad"


async def test_pairs_are_ranked_in_their_order_and_an_error_names_the_pair() -> None:
    async def rank(*documents: str) -> list[messages.RerankReply]:
        requests = [messages.RerankRequest(id=one, query="q", documents=[one]) for one in documents]
        return await embedding.rank_each(Client(), "m", requests)  # type: ignore[arg-type]

    replies = await rank("3", "1", "2")
    assert [one.relevance_score for reply in replies for one in reply.results or []] == [3, 1, 2]
    with pytest.raises(errors.RequestError) as refused:
        await rank("3", "1", "bad")
    assert (refused.value.error.param, refused.value.error.message) == ("documents[2]", "documents[2]: is bad")
