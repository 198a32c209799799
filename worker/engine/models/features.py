"""The features of an engine that samples from the logits of every token."""

_FEATURES = (
    "generate",
    "chat",
    "stop",
    "seed",
    "return_token_ids",
    "logprobs",
    "penalties",
    "logit_bias",
    "progress",
)


def with_sampler(*, chat: bool) -> tuple[str, ...]:
    """Returns the features; `chat` says whether the model has a chat template."""
    return tuple(feature for feature in _FEATURES if chat or feature != "chat")
