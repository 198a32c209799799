"""Decides whether a card can be true, whatever the other workers of the model say (decision 0039)."""

from tokenbus.protocol.wire import codec, limits, messages

_MIN_VALUES = {
    "context_length": 1,
    "max_num_seqs": 0,
    "max_num_batched_tokens": 0,
    "kv_block_size": 1,
    "total_kv_blocks": 0,
    "host_kv_blocks": 0,
    "kv_token_bytes": 0,
}
"""The numbers in a card that placement uses, each with its minimum."""
_MAX_VALUE = 2**31 - 1
_MAX_CARD_BYTES = 65_536
"""A typical card has one or two thousand. A router keeps all cards and shows them in its reply to `models`."""


def implausibility(card: messages.Card) -> str | None:
    """Returns why a card is implausible regardless of the model's other workers, or None if it is plausible."""
    if (size := len(codec.encode(card))) > _MAX_CARD_BYTES:
        return f"it has {size} bytes, more than {_MAX_CARD_BYTES}"
    if len(card.site.encode()) > limits.MAX_NAME_BYTES:
        return f"its site has more than {limits.MAX_NAME_BYTES} bytes"
    for name, least in _MIN_VALUES.items():
        number = getattr(card, name)
        if number is not None and not least <= number <= _MAX_VALUE:
            return f"its {name} is {number}; it must be {least} to {_MAX_VALUE}"
    return None
