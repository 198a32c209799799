"""What an undisturbed stream says of the text that others should have."""

from collections.abc import AsyncIterator
from typing import Any, cast

from tests.chaos import streams
from tokenbus.protocol.wire import messages


def logprob(text: str, **top: float) -> messages.TokenLogprob:
    others = [
        messages.TokenAlternative(id=0, text=one.strip("_"), bytes=[], logprob=value) for one, value in top.items()
    ]
    return messages.TokenLogprob(id=0, text=text, bytes=[], logprob=0.0, top=others)


async def test_the_end_token_which_is_never_sampled_hides_no_near_tie() -> None:
    tokens = [logprob("a", a=-0.1, b=-3.0, _=-4.0), logprob("b", _=-0.01, b=-14.25, c=-14.26)]

    async def chunks() -> AsyncIterator[messages.Chunk]:
        yield messages.Chunk(id="r", text="ab", tokens=2, logprobs=tokens)
        yield messages.Chunk(id="r", finish_reason=messages.FinishReason.LENGTH)

    told = await streams._tell(cast("Any", chunks()), 2)
    assert (told.text, told.near_ties) == (b"ab", {1})
