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
    "structured_output",
    "grammar",
)
_CONSTRAINED = ("structured_output", "grammar")


def with_sampler(*, chat: bool, ends: bool) -> tuple[str, ...]:
    """Returns the features; `chat` says whether the model has a chat template, and `ends` whether it has an end token,
    without which a constrained output could not end."""
    missing = [*([] if chat else ["chat"]), *([] if ends else _CONSTRAINED)]
    return tuple(feature for feature in _FEATURES if feature not in missing)
