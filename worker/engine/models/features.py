"""What an engine offers that has logits for every token and a sampler over them."""

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
    """`chat`: the model has a template."""
    return tuple(feature for feature in _FEATURES if chat or feature != "chat")
