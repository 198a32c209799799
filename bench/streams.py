"""Streams of the whole system, with the time at which each token arrived."""

import time
from collections.abc import Callable, Sequence

from tokenbus.client import Client
from tokenbus.protocol.wire import messages


async def complete(
    client: Client,
    token_ids: Sequence[int],
    max_tokens: int,
    on_token: Callable[[], None] = lambda: None,
    **fields: object,
) -> list[float]:
    """Returns when each token of a greedy completion arrived, by `time.perf_counter`."""
    request = messages.GenerateRequest(
        token_ids=list(token_ids),
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        **fields,  # type: ignore[arg-type]
    )
    times = []
    async for chunk in client.generate("m", request):
        if chunk.error:
            raise SystemExit(f"the system refused: {chunk.error.message}")
        times += [time.perf_counter()] * chunk.tokens
        if chunk.tokens:
            on_token()
    assert len(times) == max_tokens
    return times
