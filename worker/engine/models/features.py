"""The features of an engine that samples from the logits of every token."""

from tokenbus.worker.contract.chat_format import ChatFormat

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
    "fim",
    "cache_control",
)
_CONSTRAINED = ("structured_output", "grammar")


def with_sampler(
    *,
    chat: bool,
    ends: bool,
    fim: bool,
    chat_format: ChatFormat | None,
    lora: bool = False,
    caches: bool = True,
    closes_reasoning: bool = False,
) -> tuple[str, ...]:
    """Returns the features; `chat` says whether the model has a chat template, `ends` whether it has an end token,
    without which a constrained output could not end, `fim` whether it can fill in the middle, `lora` whether the
    engine can load adapters, `caches` whether it reuses prefixes, and `closes_reasoning` whether it can close
    reasoning."""
    missing = [*([] if chat else ["chat"]), *([] if fim else ["fim"]), *([] if ends else _CONSTRAINED)]
    missing += [] if caches else ["cache_control"]
    found = (*_FEATURES, "lora") if lora else _FEATURES
    added = ("reasoning_budget",) if closes_reasoning else ()
    return (*(feature for feature in found if feature not in missing), *of_format(chat_format), *added)


def of_format(chat_format: ChatFormat | None) -> tuple[str, ...]:
    """Returns the features that follow from knowing a model's chat format."""
    if chat_format is None:
        return ()
    return (*(("tools",) if chat_format.calls is not None else ()), *(("reasoning",) if chat_format.reasons else ()))
